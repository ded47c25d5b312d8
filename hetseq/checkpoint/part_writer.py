"""Writes a part's file from memory: chunk by chunk, with checksums, and with few dirty pages at any time.

Responsible for: the speed of one large write, and its effect on other programs. Ignores the content. The one
idea: a second thread computes checksums while this one writes, since both release the interpreter. If the file system
allows it, bytes bypass the page cache: half a GB then takes 0.02 s of CPU time instead of 0.13 s,
and other programs keep their cached files. Otherwise the kernel is asked early to write out its pages,
so that the flush at the end has little left to do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hetseq.checkpoint.records import CHUNK_BYTES
from hetseq.system.files import naming, write_all

PAGE = 4096  # alignment of direct writes, in memory and in the file
WINDOW_BYTES = 64 << 20  # at most two of these are dirty
_WRITE_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # flags of sync_file_range


class PartWriting:
    """One new file with the bytes of `image`; `run` may stop at a chunk and is called again to continue.

    The path must not exist. Any OSError ends this file: do not use it, and do not retry.
    """

    def __init__(self, path: Path, image: memoryview) -> None:
        self._path, self._image = path, image
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._is_direct = _set_direct(self._descriptor, True)
        self._written = 0
        self._asked = 0  # bytes that the kernel was asked to write
        self._sums: list[int] = []

    @property
    def share(self) -> float:
        """The fraction of the image that has been written, from 0 to 1."""
        return self._written / len(self._image) if len(self._image) else 1.0

    def run(self, should_pause: Callable[[], bool]) -> tuple[int, ...]:
        """Write until the end or until `should_pause`; returns each chunk's CRC-32. At the end the file is on disk.

        The result counts only if the write ran to the end.
        """
        is_over = threading.Event()
        summing = threading.Thread(target=self._sum, args=(is_over,), name="checksums", daemon=True)
        summing.start()  # inherits the priority of this thread
        try:
            with naming(self._path):
                if not self._write(should_pause) and self._descriptor >= 0:
                    os.fsync(self._descriptor)
                    descriptor, self._descriptor = self._descriptor, -1
                    os.close(descriptor)  # NFS reports a full disk here at the latest, so an error counts
        finally:
            if self._descriptor >= 0:  # paused, or failed
                is_over.set()
            summing.join()
        return tuple(self._sums)

    def close(self) -> None:
        """Release the file of an unfinished run."""
        self._image.release()
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, should_pause: Callable[[], bool]) -> bool:
        while self._written < len(self._image):
            chunk = self._image[self._written : self._written + CHUNK_BYTES]
            self._write_chunk(chunk)
            self._written += len(chunk)
            if not self._is_direct and self._written - self._asked >= WINDOW_BYTES:
                self._push()
            if self._written < len(self._image) and should_pause():
                return True
        return False

    def _write_chunk(self, chunk: memoryview) -> None:
        """Write past the page cache if possible; the end of a file, less than a page, never bypasses it."""
        while self._is_direct and len(chunk) >= PAGE:
            try:
                taken = os.write(self._descriptor, chunk[: len(chunk) // PAGE * PAGE])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                taken = 0  # the file system accepted the flag but refused this write and wrote nothing
            chunk = chunk[taken:]
            if taken == 0 or taken % PAGE:
                self._be_buffered()
        if len(chunk):
            self._be_buffered()
            write_all(self._descriptor, chunk)

    def _be_buffered(self) -> None:
        if self._is_direct:
            _set_direct(self._descriptor, False)
            self._is_direct, self._asked = False, self._written

    def _sum(self, is_over: threading.Event) -> None:
        for begin in range(len(self._sums) * CHUNK_BYTES, len(self._image), CHUNK_BYTES):
            if is_over.is_set():
                return
            self._sums.append(zlib.crc32(self._image[begin : begin + CHUNK_BYTES]))

    def _push(self) -> None:
        """Ask the kernel to write the newest window, and wait for the previous one."""
        before, self._asked = self._asked, self._written
        if _sync_file_range is None:
            os.fdatasync(self._descriptor)
        else:
            _range(self._descriptor, before, self._written - before, _WRITE)
            if before >= WINDOW_BYTES:
                _range(self._descriptor, before - WINDOW_BYTES, WINDOW_BYTES, _WRITE_BEFORE | _WRITE | _WAIT_AFTER)
        if hasattr(os, "posix_fadvise"):
            done = before if _sync_file_range is not None else self._written
            os.posix_fadvise(self._descriptor, 0, done, os.POSIX_FADV_DONTNEED)


def _set_direct(descriptor: int, is_direct: bool) -> bool:
    """Whether writes now bypass the page cache; False if the system or the file system does not support it."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~flag
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if is_direct else flags)
    except OSError:
        return False
    return is_direct and flag != 0


def _range(descriptor: int, offset: int, length: int, flags: int) -> None:
    assert _sync_file_range is not None
    if _sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(flags)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
