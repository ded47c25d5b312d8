/* A disk on which the n-th call goes wrong, for processes that are started with this library in LD_PRELOAD.

   Responsible for: standing between a process and the calls that change the disk below one folder. Refuses to know who
   calls, and why. The one idea: which calls go wrong, and how, stands in a small file that these processes and the test
   share as memory, and so does the number of calls so far: a process that is killed at a call and started again goes on
   counting, and the test may choose anew without starting it again.

   tests/support/shim.py is the other end of `struct control`, and compiles this file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROOM 4096 /* bytes of a path, and calls of which the name is kept */

/* in the order of shim.py's CALLS and Action */
enum call { OPEN, WRITE, FSYNC, FDATASYNC, SYNC_FILE_RANGE, CLOSE, RENAME, UNLINK, MKDIR, RMDIR, FTRUNCATE };
enum action {
    NOTHING,
    REFUSE, /* not carried out; the errno is `number` */
    REPORT, /* carried out, and reported as an error all the same */
    SHORTEN, /* half of a write; the others are carried out */
    TEAR, /* half of a write, or carried out; then the process is killed */
    KILL, /* not carried out */
    PRETEND /* not carried out, and reported as a success: what no disk may do */
};

struct control {
    int64_t count; /* calls so far, of all processes together */
    int64_t first, last; /* the calls that go wrong; the first call is number 1 */
    int64_t action, number;
    char root[ROOM]; /* the folder, with a slash at its end */
    uint8_t calls[ROOM];
};

static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SHIM_CONTROL");
    int descriptor = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    void *memory = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (memory != MAP_FAILED)
        control = memory;
}

/* What is to become of this call on this path. */
static enum action fate(enum call call, const char *path) {
    if (!control || !path || strncmp(path, control->root, strlen(control->root)))
        return NOTHING;
    int64_t number = __sync_add_and_fetch(&control->count, 1);
    if (number <= ROOM)
        control->calls[number - 1] = call;
    return control->first <= number && number <= control->last ? control->action : NOTHING;
}

static enum action fate_of(enum call call, int descriptor) {
    char link[64] = "/proc/self/fd/", path[ROOM];
    char digits[16], *end = digits + sizeof digits - 1;
    *end = 0;
    for (unsigned rest = descriptor; end == digits + sizeof digits - 1 || rest; rest /= 10)
        *--end = '0' + rest % 10;
    if (!control || descriptor < 0)
        return NOTHING;
    ssize_t length = readlink(strcat(link, end), path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return fate(call, path);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static int refused(void) {
    errno = control->number;
    return -1;
}

#define REAL(name)                                                                                                     \
    static __typeof__(&name) real;                                                                                     \
    if (!real)                                                                                                         \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Return what becomes of `carried_out`, an expression. */
#define MEET(told, carried_out)                                                                                        \
    do {                                                                                                               \
        enum action met = (told);                                                                                      \
        if (met == REFUSE)                                                                                             \
            return refused();                                                                                          \
        if (met == PRETEND)                                                                                            \
            return 0;                                                                                                  \
        if (met == KILL)                                                                                               \
            die();                                                                                                     \
        __typeof__(carried_out) result = (carried_out);                                                                \
        if (met == TEAR)                                                                                               \
            die();                                                                                                     \
        return met == REPORT ? refused() : result;                                                                     \
    } while (0)

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(write);
    enum action action = fate_of(WRITE, descriptor);
    if (action == PRETEND)
        return size;
    if (action == SHORTEN || action == TEAR)
        size -= size / 2;
    MEET(action, real(descriptor, data, size));
}

int close(int descriptor) {
    REAL(close);
    enum action action = fate_of(CLOSE, descriptor);
    /* a descriptor is gone whatever close says */
    MEET(action == REFUSE ? REPORT : action == PRETEND ? NOTHING : action, real(descriptor));
}

int fsync(int descriptor) {
    REAL(fsync);
    MEET(fate_of(FSYNC, descriptor), real(descriptor));
}

int fdatasync(int descriptor) {
    REAL(fdatasync);
    MEET(fate_of(FDATASYNC, descriptor), real(descriptor));
}

int sync_file_range(int descriptor, off64_t offset, off64_t length, unsigned flags) {
    REAL(sync_file_range);
    MEET(fate_of(SYNC_FILE_RANGE, descriptor), real(descriptor, offset, length, flags));
}

int ftruncate(int descriptor, off_t size) {
    REAL(ftruncate);
    MEET(fate_of(FTRUNCATE, descriptor), real(descriptor, size));
}

int ftruncate64(int descriptor, off64_t size) {
    REAL(ftruncate64);
    MEET(fate_of(FTRUNCATE, descriptor), real(descriptor, size));
}

int rename(const char *from, const char *to) {
    REAL(rename);
    MEET(fate(RENAME, to), real(from, to));
}

int unlink(const char *path) {
    REAL(unlink);
    MEET(fate(UNLINK, path), real(path));
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    MEET(fate(MKDIR, path), real(path, mode));
}

int rmdir(const char *path) {
    REAL(rmdir);
    MEET(fate(RMDIR, path), real(path));
}

/* `open` and `open64`: only those that may make a file. */
#define OPENING(name)                                                                                                  \
    int name(const char *path, int flags, ...) {                                                                       \
        REAL(name);                                                                                                    \
        mode_t mode = 0;                                                                                               \
        if (flags & O_CREAT) {                                                                                         \
            va_list rest;                                                                                              \
            va_start(rest, flags);                                                                                     \
            mode = va_arg(rest, mode_t);                                                                               \
            va_end(rest);                                                                                              \
        }                                                                                                              \
        enum action action = flags & O_CREAT ? fate(OPEN, path) : NOTHING;                                             \
        /* without a descriptor nothing can go on as if it had been opened */                                          \
        MEET(action == PRETEND ? NOTHING : action, real(path, flags, mode));                                           \
    }

OPENING(open)
OPENING(open64)
