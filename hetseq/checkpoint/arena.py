"""Shared memory in which a rank's part of a checkpoint waits to be written.

Responsible for: named memory that is there before it is needed, says itself what it holds, and is given back. Refuses
to know tensors, torch and ranks. The one idea: the image in an arena is the part's file, byte for byte, and a header
that is written last tells whether it is whole, so that whoever finds the memory of a killed trainer knows what it has.

    0        header: magic, version, status, serial, bytes and CRC-32 of the record
    4096     record: JSON, what the image is and what is to become of it
    ...      image

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
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
PAGE = 4096
RECORD_BYTES = 1 << 20  # what the record may take; a larger state is saved without an arena
STATE_BYTES = 400_000  # of a state.json that certainly fits into a record, whatever of it has to be escaped
ABANDONED_S = 3600.0  # so long the arenas of other runs stay after their owner's death

EMPTY, FILLING, READY, WRITTEN = range(4)

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_MAGIC = b"hetseq-a"
_HEADER = struct.Struct("<8sIIQQI")  # magic, version, status, serial, bytes and CRC-32 of the record
_STATUS = slice(12, 16)  # of the header
_VERSION = 1
_POPULATE_WRITE = 23  # madvise, Linux 5.14: give every page now
_TOUCHED_AT_ONCE = 16 << 20  # bytes


class Arena:
    """One slot: a record and an image of at most `image_bytes`. One process fills it, another one may write it out.

    Filling goes `begin` (the record, status FILLING), then the image, then `finish` (READY). Readers look at `status`
    and `record` and believe neither unless the serial is the one they expect.
    """

    def __init__(self, descriptor: int, path: Path | None) -> None:
        self.descriptor, self.path = descriptor, path
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self.image_bytes = self.size - PAGE - RECORD_BYTES

    @staticmethod
    def create(run_id: str, image_bytes: int) -> Arena:
        """A new arena, all of its memory given by the kernel. OSError, and nothing left, where there is not enough.

        Takes about a second for a gigabyte; later no page of it is ever waited for.
        """
        path = SHARED_MEMORY / f"{Arena.prefix(run_id)}{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # without it a full /dev/shm is a SIGBUS in the middle of a copy, and not an error here
            os.posix_fallocate(descriptor, 0, arena_bytes(image_bytes))
            arena = Arena(descriptor, path)
        except BaseException:
            os.unlink(path)
            os.close(descriptor)
            raise
        arena._touch()
        arena._set(EMPTY, 0, b"")
        return arena

    @staticmethod
    def prefix(run_id: str) -> str:
        """What the names of a run's arenas begin with."""
        return f"hetseq-{os.getuid()}-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}-"

    @property
    def image(self) -> memoryview:
        """The bytes of the part's file, and what is left behind them."""
        return memoryview(self._map)[PAGE + RECORD_BYTES :]

    @property
    def status(self) -> tuple[int, int]:
        """Status and serial; EMPTY and 0 for what is no arena of this version."""
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

    def _set(self, status: int, serial: int, record: bytes) -> None:
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
    return PAGE + RECORD_BYTES + image_bytes


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
    """Memory that this node, or the control group that a queue has put us into, could still give; 0 if not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0
    for limit, current in _CGROUPS:
        with suppress(OSError, ValueError):  # absent, or "max"
            available = min(available, int(Path(limit).read_text()) - int(Path(current).read_text()))
    return max(available, 0)


def node_name() -> str:
    """Equal for processes that share a machine's memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def encoded(record: dict[str, Any]) -> bytes:
    """A record as it stands in an arena."""
    return json.dumps(record, separators=(",", ":")).encode()


def sweep(run_id: str, *, now_s: float) -> list[Path]:
    """Remove the arenas of this user that nobody holds: those of this run, and older ones of other runs.

    Gives those of this run that somebody does hold: a writer that still finishes what a killed trainer has left.
    """
    held = []
    for path in sorted(_own_arenas()):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                about = os.fstat(descriptor)
                if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
                    continue
                is_ours = path.name.startswith(Arena.prefix(run_id))
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held += [path] if is_ours else []
                    continue
                if is_ours or now_s - about.st_ctime > ABANDONED_S:
                    os.unlink(path)
            finally:
                os.close(descriptor)
    return held


def await_writers(run_id: str, *, patience_s: float) -> list[Path]:
    """Wait for the writers that an earlier start of this run has left on this node; the arenas of those that go on."""
    deadline = time.monotonic() + patience_s
    while (held := sweep(run_id, now_s=time.time())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def _own_arenas() -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from SHARED_MEMORY.glob(f"hetseq-{os.getuid()}-*")
