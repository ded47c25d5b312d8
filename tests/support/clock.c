/* A clock of the day that goes wrong: preloaded, it adds HETSEQ_TEST_CLOCK_S seconds to what a process is told.

   Monotonic clocks and the times of files stay as they are, since the kernel has them. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long wrong_s(void) {
    const char *text = getenv("HETSEQ_TEST_CLOCK_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t which, struct timespec *told) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, told);
    if (!result && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) told->tv_sec += wrong_s();
    return result;
}

int gettimeofday(struct timeval *restrict told, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec;
    told->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
