"""A FUSE server that mirrors a folder and lets the kernel cache it: see `cached_mount`.

`python -m tests.support.fuse_server BACKING POINT CACHE_S UNANSWERED` mounts BACKING at POINT in its own mount
namespace, reports that by one byte on standard output, and serves until the mount is gone. Structures and numbers are
from linux/fuse.h, version 7.31.

The one idea: a node is an O_PATH descriptor of the backing file, found by device and inode, so hard links are one file
here too. The server does not request locks, so the kernel keeps them within the mount.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import os
import resource
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetseq.system.processes import die_with_parent

NOT_PERMITTED = 77  # exit code of a server that may not mount
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOENT, errno.ENODEV)
_IN, _OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_ATTR, _ENTRY, _ATTR_OUT = struct.Struct("<6Q10I"), struct.Struct("<QQQQII"), struct.Struct("<QII")
_INIT_OUT, _STATFS = struct.Struct("<IIIIHHIIHHI28x"), struct.Struct("<5Q4I24x")
_SETATTR, _OPEN_OUT, _IO, _DIRENT = (struct.Struct(it) for it in ("<IIQQQQQQ8I", "<QII", "<QQIIQII", "<QQII"))
_ASYNC_READ, _ATOMIC_TRUNCATE, _BIG_WRITES, _AUTO_INVALIDATE = 1, 8, 32, 1 << 12
_PARALLEL_LOOKUPS, _MAX_PAGES = 1 << 18, 1 << 22
_KEEP_CACHE, _CACHE_LISTING = 2, 8
_WRITE_BYTES = 1 << 20
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _HANDLE, _ATIME_NOW, _MTIME_NOW = (1 << bit for bit in range(9))


@dataclass
class _Node:
    """One file, directory or link of the backing folder that the kernel knows of."""

    descriptor: int  # O_PATH
    key: tuple[int, int]
    lookups: int = 0

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.descriptor}"


class _Server:
    """Answers the kernel, one request after the other."""

    def __init__(self, device: int, backing: Path, cache_s: float, unanswered: str) -> None:
        self._device, self._backing, self._unanswered = device, backing, unanswered
        self._valid = (int(cache_s), int(cache_s % 1 * 1e9))
        root = _Node(os.open(backing, os.O_PATH | os.O_DIRECTORY), (0, 0), 1)
        self._nodes, self._numbers, self._next = {1: root}, {_key(os.fstat(root.descriptor)): 1}, 2
        self._listings: dict[int, list[tuple[str, int, int]]] = {}
        self._handlers: dict[int, Callable[[int, memoryview], bytes | None]] = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 5: self._readlink, 6: self._symlink, 9: self._mkdir,
            10: self._unlink, 11: self._rmdir, 12: self._rename, 13: self._link, 14: self._open, 15: self._read,
            16: self._write, 17: self._statfs, 18: self._release, 20: self._fsync, 25: self._flush, 26: self._init,
            27: self._opendir, 28: self._readdir, 29: self._releasedir, 30: self._fsyncdir, 34: self._access,
            35: self._create,
        }  # fmt: skip

    def serve(self) -> None:
        """Until the mount is gone."""
        buffer = bytearray(_WRITE_BYTES + 8192)
        view = memoryview(buffer)
        while True:
            try:
                size = os.readv(self._device, [buffer])
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                if error.errno == errno.ENODEV:
                    return
                raise
            _, code, unique, number, *_ = _IN.unpack_from(view)
            body = view[_IN.size : size]
            if code in (2, 42):
                self._forget(code, number, body)
            elif code not in (36, 38):  # to be interrupted is refused, and the end needs no answer
                self._answer(code, unique, number, body)

    def _answer(self, code: int, unique: int, number: int, body: memoryview) -> None:
        failure, said = 0, b""
        try:
            handler = self._handlers.get(code)
            answer = handler(number, body) if handler is not None else None
            failure, said = (0, answer) if answer is not None else (-errno.ENOSYS, b"")
        except _Unanswered:
            return
        except OSError as error:
            failure = -(error.errno or errno.EIO)
        with suppress(FileNotFoundError):  # the caller has received an error meanwhile
            os.writev(self._device, [_OUT.pack(_OUT.size + len(said), failure, unique), said])

    def _init(self, number: int, body: memoryview) -> bytes:
        flags = _ASYNC_READ | _ATOMIC_TRUNCATE | _BIG_WRITES | _AUTO_INVALIDATE | _PARALLEL_LOOKUPS | _MAX_PAGES
        return _INIT_OUT.pack(7, 31, 1 << 17, flags, 12, 9, _WRITE_BYTES, 1, _WRITE_BYTES // 4096, 0, 0)

    # Nodes

    def _entry(self, directory: int, name: str) -> bytes:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[directory].descriptor)
        found = os.fstat(descriptor)
        number = self._numbers.get(_key(found))
        if number is None:
            number, self._next = self._next, self._next + 1
            self._nodes[number] = _Node(descriptor, _key(found))
            self._numbers[_key(found)] = number
        else:
            os.close(descriptor)
        self._nodes[number].lookups += 1
        return self._entry_out(number) + _attributes(found)

    def _entry_out(self, number: int) -> bytes:
        seconds, rest = self._valid
        return _ENTRY.pack(number, 0, seconds, seconds, rest, rest)

    def _forget(self, code: int, number: int, body: memoryview) -> None:
        pairs = [(number, *struct.unpack_from("<Q", body))] if code == 2 else list(struct.iter_unpack("<QQ", body[8:]))
        for each, lookups in pairs:
            node = self._nodes[each]
            node.lookups -= lookups
            if node.lookups <= 0 and each != 1:
                os.close(node.descriptor)
                del self._nodes[each], self._numbers[node.key]

    def _hang_if_asked(self, path: str) -> None:
        if self._unanswered and fnmatch.fnmatchcase(os.path.relpath(path, self._backing), self._unanswered):
            raise _Unanswered

    def _lookup(self, number: int, body: memoryview) -> bytes:
        try:
            return self._entry(number, *_names(body))
        except FileNotFoundError:
            return self._entry_out(0) + bytes(_ATTR.size)  # remembered as missing

    def _getattr(self, number: int, body: memoryview) -> bytes:
        return _ATTR_OUT.pack(*self._valid, 0) + _attributes(os.fstat(self._nodes[number].descriptor))

    def _setattr(self, number: int, body: memoryview) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = _SETATTR.unpack(body)
        path = self._nodes[number].path
        if valid & _MODE:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & (_UID | _GID):
            os.chown(path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            os.truncate(handle if valid & _HANDLE else path, size)
        if valid & (_ATIME_NOW | _MTIME_NOW):
            os.utime(path)
        elif valid & (_ATIME | _MTIME):
            now = os.stat(path)
            times = (atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
            kept = (times[0] if valid & _ATIME else now.st_atime_ns, times[1] if valid & _MTIME else now.st_mtime_ns)
            os.utime(path, ns=kept)
        return self._getattr(number, body)

    def _access(self, number: int, body: memoryview) -> bytes:
        if not os.access(self._nodes[number].path, *struct.unpack_from("<I", body)):
            raise PermissionError(errno.EACCES, "")
        return b""

    def _statfs(self, number: int, body: memoryview) -> bytes:
        it = os.statvfs(self._backing)
        blocks = (it.f_blocks, it.f_bfree, it.f_bavail, it.f_files, it.f_ffree)
        return _STATFS.pack(*blocks, it.f_bsize, it.f_namemax, it.f_frsize, 0)

    # Names

    def _in(self, number: int) -> int:
        return self._nodes[number].descriptor

    def _readlink(self, number: int, body: memoryview) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._in(number)))

    def _symlink(self, number: int, body: memoryview) -> bytes:
        name, target = _names(body)
        os.symlink(target, name, dir_fd=self._in(number))
        return self._entry(number, name)

    def _mkdir(self, number: int, body: memoryview) -> bytes:
        (mode, _), (name,) = struct.unpack_from("<II", body), _names(body[8:])
        os.mkdir(name, mode, dir_fd=self._in(number))
        return self._entry(number, name)

    def _unlink(self, number: int, body: memoryview) -> bytes:
        os.unlink(*_names(body), dir_fd=self._in(number))
        return b""

    def _rmdir(self, number: int, body: memoryview) -> bytes:
        os.rmdir(*_names(body), dir_fd=self._in(number))
        return b""

    def _rename(self, number: int, body: memoryview) -> bytes:
        (other,), (old, new) = struct.unpack_from("<Q", body), _names(body[8:])
        os.rename(old, new, src_dir_fd=self._in(number), dst_dir_fd=self._in(other))
        return b""

    def _link(self, number: int, body: memoryview) -> bytes:
        (old,), (name,) = struct.unpack_from("<Q", body), _names(body[8:])
        os.link(self._nodes[old].path, name, dst_dir_fd=self._in(number), follow_symlinks=True)
        return self._entry(number, name)

    # Content

    def _open(self, number: int, body: memoryview) -> bytes:
        (flags,), path = struct.unpack_from("<I", body), self._nodes[number].path
        self._hang_if_asked(os.readlink(path))
        handle = os.open(path, flags & ~(os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL | os.O_DIRECT))
        return _OPEN_OUT.pack(handle, _KEEP_CACHE, 0)

    def _create(self, number: int, body: memoryview) -> bytes:
        (flags, mode), (name,) = struct.unpack_from("<II", body), _names(body[16:])
        self._hang_if_asked(os.path.join(os.readlink(self._nodes[number].path), name))
        handle = os.open(name, (flags | os.O_NOFOLLOW) & ~os.O_DIRECT, mode, dir_fd=self._in(number))
        return self._entry(number, name) + _OPEN_OUT.pack(handle, _KEEP_CACHE, 0)

    def _read(self, number: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = _IO.unpack_from(body)
        return os.pread(handle, size, offset)

    def _write(self, number: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = _IO.unpack_from(body)
        return struct.pack("<II", os.pwrite(handle, body[_IO.size : _IO.size + size], offset), 0)

    def _fsync(self, number: int, body: memoryview) -> bytes:
        (handle,) = struct.unpack_from("<Q", body)
        self._hang_if_asked(os.readlink(f"/proc/self/fd/{handle}"))
        os.fsync(handle)
        return b""

    def _flush(self, number: int, body: memoryview) -> bytes:
        return b""

    def _release(self, number: int, body: memoryview) -> bytes:
        os.close(*struct.unpack_from("<Q", body))
        return b""

    def _opendir(self, number: int, body: memoryview) -> bytes:
        handle = os.open(self._nodes[number].path, os.O_RDONLY | os.O_DIRECTORY)
        with os.scandir(handle) as found:
            rows = [(entry.name, entry.inode(), stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else stat.S_IFREG)
                    for entry in found]  # fmt: skip
        self._listings[handle] = [(".", 1, stat.S_IFDIR), ("..", 1, stat.S_IFDIR), *rows]
        return _OPEN_OUT.pack(handle, _KEEP_CACHE | _CACHE_LISTING, 0)

    def _readdir(self, number: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = _IO.unpack_from(body)
        said = b""
        for at, (name, inode, kind) in enumerate(self._listings[handle][offset:], start=offset + 1):
            raw = os.fsencode(name)
            row = _DIRENT.pack(inode, at, len(raw), kind >> 12) + raw
            row += bytes(-len(row) % 8)
            if len(said) + len(row) > size:
                break
            said += row
        return said

    def _releasedir(self, number: int, body: memoryview) -> bytes:
        (handle,) = struct.unpack_from("<Q", body)
        del self._listings[handle]
        return self._release(number, body)

    def _fsyncdir(self, number: int, body: memoryview) -> bytes:
        os.fsync(*struct.unpack_from("<Q", body))
        return b""


class _Unanswered(Exception):
    """This request is never to be answered."""


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _names(body: memoryview) -> list[str]:
    return [os.fsdecode(name) for name in bytes(body).split(b"\0")[:-1]]


def _attributes(it: os.stat_result) -> bytes:
    times = [it.st_atime_ns, it.st_mtime_ns, it.st_ctime_ns]
    seconds, rests = [time // 10**9 for time in times], [time % 10**9 for time in times]
    more = (it.st_mode, it.st_nlink, it.st_uid, it.st_gid, it.st_rdev & 0xFFFFFFFF, it.st_blksize, 0)
    return _ATTR.pack(it.st_ino, it.st_size, it.st_blocks, *seconds, *rests, *more)


def main(backing: str, point: str, cache_s: str, unanswered: str) -> None:
    """Mount, say so by one byte on standard output, and serve."""
    # thousands of names may be known at a time, each by a descriptor
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    die_with_parent(os.getppid())  # a killed test run leaves no mount behind, and no process that hangs in it
    os.umask(0)  # the kernel has subtracted the caller's
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        if libc.mount(b"cached", os.fsencode(point), b"fuse.cached", 0, options.encode()):
            raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
    except OSError as error:
        sys.exit(f"{error}") if error.errno not in _REFUSALS else _refuse(error)
    os.write(1, b".")
    _Server(device, Path(backing), float(cache_s), unanswered).serve()


def _refuse(error: OSError) -> None:
    sys.stderr.write(f"{error}\n")
    sys.exit(NOT_PERMITTED)


if __name__ == "__main__":
    main(*sys.argv[1:])
