"""File operations of checkpoints: exclusive creation, atomic replacement, bounded reads, safe removal.

Responsible for: files that appear complete or not at all, with mode 0600 and never through a link; bounded
reads; removal that makes a checkpoint invisible before it makes it incomplete. Does not know the content of the
files. The one idea: an error of `fsync` or `close` is an error of the write, and a file that had one is never used
again, because the kernel may have dropped the pages that it could not write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMMIT_NAME = "COMMIT.json"
_LOOK_S = 0.01
_MUCH_BYTES = 1 << 20  # a file system with this many free bytes is not full


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the name of the file to an OSError of a call that had only a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def describe_os_error(error: OSError) -> str:
    """The system's message, its error name, the file, and what a full disk lacks, if not bytes:
    "No space left on device (ENOSPC): state.json; no inode is free there (df -i)"."""
    name = errno.errorcode.get(error.errno or 0, "OSError")
    file = f": {str(error.filename).rpartition('/')[2]}" if error.filename else ""
    return f"{error.strerror or error} ({name}){file}{_lack(error)}"


def _lack(error: OSError) -> str:
    if error.errno != errno.ENOSPC or error.strerror != os.strerror(errno.ENOSPC) or not error.filename:
        return ""
    path = Path(os.fsdecode(error.filename))
    try:
        status = os.statvfs(next(place for place in (path, *path.parents) if place.exists()))
    except (OSError, StopIteration):
        return ""
    free = status.f_bavail * status.f_frsize
    if status.f_files and not status.f_favail:
        return f"; no inode is free there (df -i), though {free} bytes are: delete files"
    return f"; {free} bytes are free there: look at inodes (df -i) and quotas" if free >= _MUCH_BYTES else ""


@contextmanager
def creating(path: Path) -> Iterator[int]:
    """A descriptor of the new file `path`, flushed to the disk and closed at the end; the path must not exist yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with naming(path):
        descriptor = os.open(path, flags, 0o600)
        try:
            yield descriptor
            os.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        os.close(descriptor)  # NFS reports a full disk here at the latest, so an error counts


def lock(descriptor: int, kind: int, *, patience_s: float) -> None:
    """Take a lock (`fcntl.LOCK_EX` or `LOCK_SH`) that others hold only briefly. OSError if another process, perhaps a
    stopped one, keeps it for longer, and if the file system has no locks."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                text = f"another process has held the lock for {patience_s:g} s: is it stopped?"
                raise BlockingIOError(errno.EWOULDBLOCK, text) from None
        time.sleep(_LOOK_S)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, even if each call writes only part of it."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def write_new(path: Path, data: bytes) -> None:
    """The new file `path` with this content, on the disk when this returns."""
    with creating(path) as descriptor:
        write_all(descriptor, data)


def publish(path: Path, data: bytes) -> None:
    """Make `path` appear with this content at once: written beside, flushed, renamed, and the folder flushed.

    A file of that name is replaced; a leftover of an earlier attempt that was killed is removed.
    """
    beside = path.with_name(path.name + ".tmp")
    with suppress(FileNotFoundError):
        os.unlink(beside)
    write_new(beside, data)
    os.rename(beside, path)
    with suppress(FileNotFoundError):  # another process has seen it by now, and removed the folder with it
        sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Create the folder `path`, mode 0700, so that it survives a power cut; it must not exist yet."""
    os.mkdir(path, 0o700)
    try:
        sync_directory(path.parent)
    except OSError:
        with suppress(OSError):
            os.rmdir(path)
        raise


def sync_directory(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file that another process wrote."""
    with reading(path) as (descriptor, _):
        os.fsync(descriptor)


def open_no_follow(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of the file `path`; OSError (ELOOP) with a clear message if it is a symbolic link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or not os.path.islink(path):
            raise
        text = "it is a symbolic link, which HetSeq does not follow here: put the file itself in its place"
        raise OSError(errno.ELOOP, text, str(path)) from None


@contextmanager
def reading(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size in bytes of a regular file; links, pipes and devices raise OSError."""
    # O_NONBLOCK: opening a pipe that someone planted must not wait for its other end
    descriptor = open_no_follow(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with naming(path):
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{path} is not a regular file")
            yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def read_into(descriptor: int, view: memoryview) -> None:
    """Fill `view` from the descriptor's position; EOFError if the file ends first."""
    rest = view
    while len(rest):
        count = os.readv(descriptor, [rest])
        if count == 0:
            raise EOFError("the file ends before its data")
        rest = rest[count:]


def read_bounded(path: Path, limit: int) -> bytes:
    """The whole content of a file of at most `limit` bytes; ValueError if it is larger."""
    with reading(path) as (descriptor, size):
        if size > limit:
            raise ValueError(f"{size} bytes, at most {limit} are expected")
        content = bytearray(size)
        read_into(descriptor, memoryview(content))
        return bytes(content)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def remove_attempt(directory: Path) -> None:
    """Delete one checkpoint folder: COMMIT.json first and durably, so that a crash leaves litter, never half a state.

    Folders inside it are left alone (HetSeq makes none); the folder then stays, and OSError says so.
    """
    with suppress(FileNotFoundError):
        os.unlink(directory / COMMIT_NAME)
        sync_directory(directory)
    with os.scandir(directory) as entries:
        paths = [entry.path for entry in entries if not entry.is_dir(follow_symlinks=False)]
    for path in sorted(paths):
        with suppress(FileNotFoundError):
            os.unlink(path)
    os.rmdir(directory)
    sync_directory(directory.parent)
