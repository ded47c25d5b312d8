"""Shared memory in which a rank's part of a checkpoint waits to be written.

Responsible for: named memory that is there before it is needed, says itself what it holds, and is given back. Refuses
to know tensors, torch and ranks. The one idea: the image in an arena is the part's file, byte for byte, and a header
that is written last tells whether it is whole, so that whoever finds the memory of a killed trainer knows what it has.

    0        header: magic, version, status, serial, bytes and CRC-32 of the record, the seal
    4096     record: JSON, what the image is and what is to become of it
    ...      sums: four bytes for every 8 MiB of the image
    ...      image

The seal says for which serial the sums were computed, after the image was whole. An image is believed after its
process's death if it is sealed and every sum is right, and not before: a process dies between any two stores.

A process that uses an arena holds a lock on it (flock), which the kernel takes away when it dies: an arena that nobody
holds was left behind. Names begin with user and run, so that the next start of the run finds what the last one left.
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
RECORD_BYTES = 1 << 20  # what the record may take; a larger state is saved without an arena
SUMS_BYTES = 1 << 18  # enough for an image of 512 GiB
OVERHEAD_BYTES = PAGE + RECORD_BYTES + SUMS_BYTES
STATE_BYTES = 400_000  # of a state.json that certainly fits into a record, whatever of it has to be escaped
EMPTY, FILLING, READY, WRITTEN = range(4)

_MAGIC = b"hetseq-a"
_HEADER = struct.Struct("<8sIIQQI")  # magic, version, status, serial, bytes and CRC-32 of the record
_STATUS = slice(12, 16)  # of the header
_SEAL = struct.Struct("<IQ")  # CRC-32 of the sums, and the serial that they belong to; written in this order
_SEAL_AT = 64  # in the header
_VERSION = 2
_POPULATE_WRITE = 23  # madvise, Linux 5.14: give every page now
_TOUCHED_AT_ONCE = 16 << 20  # bytes
_PATIENCE_S = 10.0


class Arena:
    """One slot: a record and an image of at most `image_bytes`. One process fills it, another one may write it out.

    Filling goes `begin` (the record, status FILLING), then the image, then `finish` (READY). Readers look at `status`
    and `record` and believe neither unless the serial is the one they expect.
    """

    def __init__(self, descriptor: int, path: Path | None) -> None:
        self.descriptor, self.path = descriptor, path
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self.image_bytes = self.size - OVERHEAD_BYTES

    @staticmethod
    def create(run_id: str, image_bytes: int) -> Arena:
        """A new arena, all of its memory given by the kernel. OSError, and nothing left, where there is not enough.

        Takes about a second for a gigabyte; later no page of it is ever waited for.
        """
        path = SHARED_MEMORY / f"{Arena.prefix(run_id)}{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            lock(descriptor, fcntl.LOCK_EX, patience_s=_PATIENCE_S)  # somebody else's sweep may be looking at it
            if not os.fstat(descriptor).st_nlink:
                raise FileNotFoundError(
                    errno.ENOENT, "removed by the start of another run in the same instant", str(path)
                )
            # without it a full /dev/shm is a SIGBUS in the middle of a copy, and not an error here
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
        """An arena by a descriptor that stays the caller's; ValueError or OSError for a file that cannot be one."""
        own = os.dup(descriptor)
        try:
            return Arena(own, path)
        except BaseException:
            os.close(own)
            raise

    @staticmethod
    def prefix(run_id: str) -> str:
        """What the names of a run's arenas begin with."""
        return f"hetseq-{os.getuid()}-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}-"

    @property
    def image(self) -> memoryview:
        """The bytes of the part's file, and what is left behind them."""
        return memoryview(self._map)[OVERHEAD_BYTES:]

    @property
    def status(self) -> tuple[int, int]:
        """Status and serial; EMPTY and 0 for what is no arena of this version."""
        if self.size < OVERHEAD_BYTES:
            return (EMPTY, 0)
        magic, version, status, serial, _, _ = _HEADER.unpack_from(self._map)
        return (status, serial) if (magic, version) == (_MAGIC, _VERSION) else (EMPTY, 0)

    def begin(self, serial: int, record: dict[str, Any]) -> None:
        """What is going to be in the image; ValueError where the record is too large."""
        content = encoded(record)
        if len(content) > RECORD_BYTES:
            raise ValueError(f"the record of a save takes {len(content)} bytes, at most {RECORD_BYTES}")
        self._set(EMPTY, 0, b"")
        self._map[PAGE : PAGE + len(content)] = content
        self._set(FILLING, serial, content)

    def finish(self, serial: int) -> None:
        """The image of this serial is whole."""
        self._advance(FILLING, READY, serial)

    def mark_written(self, serial: int) -> None:
        """The image of this serial is on the disk, or never will be."""
        self._advance(READY, WRITTEN, serial)

    def record(self, serial: int) -> dict[str, Any]:
        """The record of this serial; ValueError where the arena holds no such record whole."""
        magic, version, _, found, size, crc32 = _HEADER.unpack_from(self._map)
        content = self._map[PAGE : PAGE + size] if size <= RECORD_BYTES else b""
        if (magic, version, found) != (_MAGIC, _VERSION, serial) or zlib.crc32(content) != crc32:
            raise ValueError(f"the arena does not hold the record {serial}")
        record: dict[str, Any] = json.loads(content)
        return record

    def seal(self, serial: int, sums: Sequence[int]) -> None:
        """The image of this serial, whole by now, has these sums. An image that has too many of them is not sealed."""
        content = struct.pack(f"<{len(sums)}I", *sums)
        if len(content) > SUMS_BYTES or self.status[1] != serial:
            return
        begin = PAGE + RECORD_BYTES
        self._map[begin : begin + len(content)] = content
        # the serial last, in one store: whoever finds it finds all that was stored before
        self._map[_SEAL_AT : _SEAL_AT + _SEAL.size] = _SEAL.pack(zlib.crc32(content), 0)
        self._map[_SEAL_AT + 4 : _SEAL_AT + _SEAL.size] = serial.to_bytes(8, "little")
        os.utime(self.descriptor)  # so old is what is found later

    def sums(self, serial: int, *, image_bytes: int) -> tuple[int, ...] | None:
        """The sums of an image of this serial and so many bytes; None where it was never sealed, or is no more."""
        if not self.is_sealed or self.status[1] != serial or not 0 < image_bytes <= self.image_bytes:
            return None
        count, begin = -(-image_bytes // CHUNK_BYTES), PAGE + RECORD_BYTES
        content = self._map[begin : begin + 4 * count]
        if zlib.crc32(content) != self._seal()[0]:
            return None
        return struct.unpack(f"<{count}I", content)

    @property
    def is_sealed(self) -> bool:
        """Whether the image is whole and has its sums, of whatever serial."""
        status, serial = self.status
        return status in (READY, WRITTEN) and self._seal()[1] == serial

    @property
    def is_given_up(self) -> bool:
        """Whether it has no name any more, so that no later start will find what is in it."""
        return os.fstat(self.descriptor).st_nlink == 0

    def give_back(self) -> None:
        """Free the memory, whoever else maps it: zeros are there from now on. Nothing happens if somebody holds it."""
        with suppress(OSError, ValueError):  # ValueError: a map cannot be smaller than a page
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self, *, unlink: bool) -> None:
        """Give up this process's hold; with `unlink` the memory goes as soon as nobody else holds it."""
        if unlink and self.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        with suppress(BufferError):  # a tensor still looks into it: the memory goes with the process
            self._map.close()
        os.close(self.descriptor)

    def _advance(self, before: int, after: int, serial: int) -> None:
        _, _, status, found, _, _ = _HEADER.unpack_from(self._map)
        if (status, found) == (before, serial):
            # one store: `pack_into` begins with zeros, and the other process may be reading the header just then
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
    """What an arena for such an image takes."""
    return OVERHEAD_BYTES + image_bytes


def check_memory(needs: Sequence[int], *, allowed: int | None) -> None:
    """Raise OSError where arenas of these sizes are more than this node may give; `allowed` None: half of what is free.

    Shared memory is given beforehand, but a process that takes too much of it is killed later, and without a word.
    """
    needed = sum(needs)
    limit = available_bytes() // 2 if allowed is None else allowed
    if needed > limit:
        why = "half of what is free" if allowed is None else "--memory-buffer-size"
        raise OSError(errno.ENOMEM, f"{needed / 1e6:.0f} MB are needed on this node, {limit / 1e6:.0f} allowed ({why})")


def available_bytes() -> int:
    """Shared memory that this node, or the control group we are in, could still give; 0 if not known."""
    available = host_memory.available_bytes()
    with suppress(OSError):  # a container often gives 64 MB, which loader processes use as well
        available = min(available, free_bytes(SHARED_MEMORY))
    return available


def node_name() -> str:
    """Equal for processes that share a machine's memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def encoded(record: dict[str, Any]) -> bytes:
    """A record as it stands in an arena."""
    return json.dumps(record, separators=(",", ":")).encode()
