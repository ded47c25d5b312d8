"""Shared memory in which a rank's part of a checkpoint waits to be written.

Responsible for: named memory that is allocated before it is needed, describes its own content, and is freed again.
Knows nothing of tensors, torch and ranks. The one idea: the image in an arena is the part's file, byte for byte, and a
header written last says whether it is complete, so a process that finds a killed trainer's memory knows what it has.

    0        header: magic, version, status, serial, bytes and CRC-32 of the record, the seal
    4096     record: JSON, what the image contains and what to do with it
    ...      sums: four bytes for every 8 MiB of the image
    ...      image

The seal names the serial for which the sums were computed, after the image was complete. After its process has died, an
image is trusted only if it is sealed and every sum matches: a process can die between any two stores.

A process that uses an arena holds a lock on it (flock), which the kernel releases when the process dies: an arena
without a lock was left behind. Names begin with user and run, so the next start of a run finds what the last one left.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetseq.checkpoint.records import CHUNK_BYTES
from hetseq.system import host_memory
from hetseq.system.files import free_bytes, lock

SHARED_MEMORY = Path("/dev/shm")
PAGE = 4096
RECORD_BYTES = 1 << 20  # limit of the record; a larger state is saved without an arena
SUMS_BYTES = 1 << 18  # enough for an image of 512 GiB
OVERHEAD_BYTES = PAGE + RECORD_BYTES + SUMS_BYTES
STATE_BYTES = 400_000  # a state.json of this size always fits into a record, even if every character is escaped
EMPTY, FILLING, READY, WRITTEN = range(4)

_MAGIC = b"hetseq-a"
_HEADER = struct.Struct("<8sIIQQI")  # magic, version, status, serial, bytes and CRC-32 of the record
_STATUS = slice(12, 16)  # in the header
_SEAL = struct.Struct("<IQ")  # CRC-32 of the sums, and the serial that they belong to; written in this order
_SEAL_AT = 64  # in the header
_VERSION = 2
_POPULATE_WRITE = 23  # madvise, Linux 5.14: allocate every page now
_TOUCHED_AT_ONCE = 16 << 20  # bytes
_PATIENCE_S = 10.0


class Arena:
    """One slot: a record and an image of at most `image_bytes`. One process fills it; another may write it to disk.

    Filling calls `begin` (the record, status FILLING), copies the image, then calls `finish` (READY). Readers check
    `status` and `record` and trust neither unless the serial is the one they expect.
    """

    def __init__(self, descriptor: int, path: Path | None) -> None:
        self.descriptor, self.path = descriptor, path
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self.image_bytes = self.size - OVERHEAD_BYTES

    @staticmethod
    def create(run_id: str, image_bytes: int) -> Arena:
        """A new arena with all of its memory allocated. OSError, and nothing left behind, if there is not enough.

        Takes about a second per gigabyte; after that no access waits for a page.
        """
        path = SHARED_MEMORY / f"{Arena.prefix(run_id)}{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            lock(descriptor, fcntl.LOCK_EX, patience_s=_PATIENCE_S)  # another process's sweep may be checking it
            if not os.fstat(descriptor).st_nlink:
                raise FileNotFoundError(
                    errno.ENOENT, "removed at the same moment by another run that is starting", str(path)
                )
            # without it, a full /dev/shm raises SIGBUS in the middle of a copy instead of an error here
            os.posix_fallocate(descriptor, 0, arena_bytes(image_bytes))
            arena = Arena(descriptor, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.close(descriptor)
            raise
        arena._touch()
        arena._set(EMPTY, 0, b"")
        return arena

    @staticmethod
    def look_into(descriptor: int, path: Path | None) -> Arena:
        """An arena from a descriptor that the caller keeps; ValueError or OSError for a file that is not an arena."""
        own = os.dup(descriptor)
        try:
            return Arena(own, path)
        except BaseException:
            os.close(own)
            raise

    @staticmethod
    def prefix(run_id: str) -> str:
        """The common prefix of the names of a run's arenas."""
        return f"hetseq-{os.getuid()}-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}-"

    @property
    def image(self) -> memoryview:
        """The bytes of the part's file, and the unused rest after them."""
        return memoryview(self._map)[OVERHEAD_BYTES:]

    @property
    def status(self) -> tuple[int, int]:
        """Status and serial; EMPTY and 0 if this is not an arena of this version."""
        if self.size < OVERHEAD_BYTES:
            return (EMPTY, 0)
        magic, version, status, serial, _, _ = _HEADER.unpack_from(self._map)
        return (status, serial) if (magic, version) == (_MAGIC, _VERSION) else (EMPTY, 0)

    def begin(self, serial: int, record: dict[str, Any]) -> None:
        """Record what the image will contain; ValueError if the record is too large."""
        content = encoded(record)
        if len(content) > RECORD_BYTES:
            raise ValueError(f"the record of a save takes {len(content)} bytes, at most {RECORD_BYTES}")
        self._set(EMPTY, 0, b"")
        self._map[PAGE : PAGE + len(content)] = content
        self._set(FILLING, serial, content)

    def finish(self, serial: int) -> None:
        """Mark the image of this serial as complete."""
        self._advance(FILLING, READY, serial)

    def mark_written(self, serial: int) -> None:
        """Mark the image of this serial as written, or as one that never will be."""
        self._advance(READY, WRITTEN, serial)

    def record(self, serial: int) -> dict[str, Any]:
        """The record of this serial; ValueError if the arena does not hold all of it."""
        magic, version, _, found, size, crc32 = _HEADER.unpack_from(self._map)
        content = self._map[PAGE : PAGE + size] if size <= RECORD_BYTES else b""
        if (magic, version, found) != (_MAGIC, _VERSION, serial) or zlib.crc32(content) != crc32:
            raise ValueError(f"the arena does not hold the record {serial}")
        record: dict[str, Any] = json.loads(content)
        return record

    def seal(self, serial: int, sums: Sequence[int]) -> None:
        """Store the sums of this serial's complete image. An image with too many sums for the arena is not sealed."""
        content = struct.pack(f"<{len(sums)}I", *sums)
        if len(content) > SUMS_BYTES or self.status[1] != serial:
            return
        begin = PAGE + RECORD_BYTES
        self._map[begin : begin + len(content)] = content
        # the serial last, in one store: a reader that sees it also sees everything stored before
        self._map[_SEAL_AT : _SEAL_AT + _SEAL.size] = _SEAL.pack(zlib.crc32(content), 0)
        self._map[_SEAL_AT + 4 : _SEAL_AT + _SEAL.size] = serial.to_bytes(8, "little")
        os.utime(self.descriptor)  # the age that a later start will see

    def sums(self, serial: int, *, image_bytes: int) -> tuple[int, ...] | None:
        """The sums of this serial's image of `image_bytes` bytes; None if it was never sealed or has been replaced."""
        if not self.is_sealed or self.status[1] != serial or not 0 < image_bytes <= self.image_bytes:
            return None
        count, begin = -(-image_bytes // CHUNK_BYTES), PAGE + RECORD_BYTES
        content = self._map[begin : begin + 4 * count]
        if zlib.crc32(content) != self._seal()[0]:
            return None
        return struct.unpack(f"<{count}I", content)

    @property
    def is_sealed(self) -> bool:
        """Whether the image, of any serial, is complete and has its sums."""
        status, serial = self.status
        return status in (READY, WRITTEN) and self._seal()[1] == serial

    @property
    def is_given_up(self) -> bool:
        """Whether its name has been removed, so that no later start can find its content."""
        return os.fstat(self.descriptor).st_nlink == 0

    def give_back(self) -> None:
        """Free the memory for all processes that map it (it reads as zeros). A no-op if another process holds it."""
        with suppress(OSError, ValueError):  # ValueError: a map is at least one page
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self, *, unlink: bool) -> None:
        """Release this process's hold; with `unlink` the memory is freed once no other process holds it."""
        if unlink and self.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        with suppress(BufferError):  # a tensor still uses it: the process's end frees it
            self._map.close()
        os.close(self.descriptor)

    def _advance(self, before: int, after: int, serial: int) -> None:
        _, _, status, found, _, _ = _HEADER.unpack_from(self._map)
        if (status, found) == (before, serial):
            # one store: `pack_into` writes zeros first, and the other process may be reading the header at that moment
            self._map[_STATUS] = after.to_bytes(4, "little")

    def _seal(self) -> tuple[int, int]:
        """CRC-32 of the sums, and the serial that they belong to."""
        crc32, serial = _SEAL.unpack_from(self._map, _SEAL_AT)
        return crc32, serial

    def _set(self, status: int, serial: int, record: bytes) -> None:
        self._map[_SEAL_AT : _SEAL_AT + _SEAL.size] = bytes(_SEAL.size)
        _HEADER.pack_into(self._map, 0, _MAGIC, _VERSION, status, serial, len(record), zlib.crc32(record))

    def _touch(self) -> None:
        for begin in range(0, self.size, _TOUCHED_AT_ONCE):
            length = min(_TOUCHED_AT_ONCE, self.size - begin)
            try:
                self._map.madvise(_POPULATE_WRITE, begin, length)
            except OSError:  # an older kernel
                memoryview(self._map)[begin : begin + length : PAGE] = bytes(-(-length // PAGE))


def arena_bytes(image_bytes: int) -> int:
    """Bytes of an arena with an image of this size."""
    return OVERHEAD_BYTES + image_bytes


def check_memory(needs: Sequence[int], *, allowed: int | None) -> None:
    """Raise OSError if arenas of these sizes exceed what this node may use; `allowed` None: half of what is free.

    Shared memory is allocated in advance, but a process that takes too much is killed later, without a message.
    """
    needed = sum(needs)
    limit = available_bytes() // 2 if allowed is None else allowed
    if needed > limit:
        why = "half of what is free" if allowed is None else "--memory-buffer-size"
        raise OSError(errno.ENOMEM, f"{needed / 1e6:.0f} MB are needed on this node, {limit / 1e6:.0f} allowed ({why})")


def available_bytes() -> int:
    """Shared memory that this node, or this process's control group, still has available; 0 if unknown."""
    available = host_memory.available_bytes()
    with suppress(OSError):  # a container often has 64 MB, which loader processes use too
        available = min(available, free_bytes(SHARED_MEMORY))
    return available


def node_name() -> str:
    """The same for all processes that share a machine's memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def memory_name() -> str:
    """The same for all processes of a machine, or of a container, that see each other's arenas."""
    about = SHARED_MEMORY.stat()
    return f"{node_name()}:{about.st_dev}:{about.st_ino}"


def encoded(record: dict[str, Any]) -> bytes:
    """A record as stored in an arena."""
    return json.dumps(record, separators=(",", ":")).encode()
