"""The shared memory in which saved states wait to be written, within the allowed limit.

Responsible for: arenas that exist before they are needed again, and the memory they take. Knows nothing of tags. The
one idea: an arena is kept for the next state of about its size, so from the third tag on nothing is allocated; an arena
that fits no state any more is released.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from hetseq.checkpoint.arena import OVERHEAD_BYTES, READY, SHARED_MEMORY, WRITTEN, Arena
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.leftover_memory import sweep
from hetseq.checkpoint.part_format import in_file_order
from hetseq.checkpoint.snapshot import Snapshot
from hetseq.nebula.memory_budget import Budget
from hetseq.nebula.publish import TagPlace
from hetseq.system.files import lock
from hetseq.system.processes import state_and_start

logger = logging.getLogger(__name__)

_GRAIN_BYTES = 1 << 20  # so that a state that grows by a few numbers needs no new arena
_LOOK_S = 0.05
_PATIENCE_S = 60.0  # for a process that allocates memory, about a gigabyte per second


class Slot:
    """One arena, and the state in it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.serial = 0
        self._snapshot: Snapshot | None = None

    def fill(
        self,
        serial: int,
        record: Mapping[str, Any],
        *,
        pieces: Sequence[Piece],
        tensors: Mapping[str, Tensor],
        tree: bytes,
        at_once: Collection[str],
        when_whole: Callable[[], None],
    ) -> None:
        """Start copying a state; tensors named in `at_once` may change when this returns, others after `settle`.

        ValueError if the record is too large.
        """
        if self._snapshot is None or self._snapshot.pieces != in_file_order(pieces):
            if self._snapshot is not None:
                self._snapshot.close()
            self._snapshot = Snapshot(self.arena, pieces)
        snapshot = self._snapshot
        self.serial = serial
        self.arena.begin(serial, {**record, "file_bytes": snapshot.image_bytes, "tree_bytes": len(tree)})
        self.arena.image[snapshot.image_bytes : snapshot.image_bytes + len(tree)] = tree

        def finish() -> None:
            self.arena.finish(serial)
            when_whole()

        snapshot.begin(tensors, at_once=at_once, when_whole=finish)

    def settle(self) -> None:
        """Wait until the tensors of the latest copy may change."""
        if self._snapshot is not None:
            self._snapshot.settle()

    def holds(self, serial: int) -> bool:
        """Whether the complete state of this serial is here."""
        return self.arena.status in ((READY, serial), (WRITTEN, serial))

    @property
    def pieces(self) -> list[Piece]:
        """The tensors of the state, in the order of the image."""
        return [] if self._snapshot is None else list(self._snapshot.pieces)

    def close(self) -> None:
        """Release the memory."""
        if self._snapshot is not None:
            with suppress(Exception):  # an error of the copy was raised by the call that waited for it
                self._snapshot.close()
        self.arena.close(unlink=True)


class Slots:
    """The arenas of this process."""

    def __init__(self, place: TagPlace, allowed: Budget) -> None:
        self._place, self.allowed = place, allowed
        self._free: list[Slot] = []
        self._used: list[Slot] = []

    @property
    def memory_bytes(self) -> int:
        """Bytes that the arenas of this process take."""
        return sum(slot.arena.size for slot in (*self._free, *self._used))

    def could_hold(self, size_bytes: int) -> bool:
        """Whether a state of this size would fit in empty memory."""
        return _arena_bytes(size_bytes) <= self.allowed.limit_bytes

    def take(self, size_bytes: int) -> Slot | None:
        """A slot for a state of this size: the best-fitting free one, or a new one; None if neither is available."""
        fitting = [slot for slot in self._free if slot.arena.image_bytes >= size_bytes]
        # the arena of a much larger state is kept for such a state
        close = [slot for slot in fitting if slot.arena.size <= 2 * _arena_bytes(size_bytes)]
        slot = min(close, key=lambda slot: slot.arena.size, default=None)
        slot = slot or self._new(size_bytes, may_evict=False)
        slot = slot or min(fitting, key=lambda slot: slot.arena.size, default=None)
        slot = slot or self._new(size_bytes, may_evict=True)
        if slot is not None:
            if slot in self._free:
                self._free.remove(slot)
            self._used.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Free a slot: its state is no longer needed."""
        self._used.remove(slot)
        self._free.append(slot)

    def close(self) -> None:
        """Release all memory."""
        for slot in (*self._free, *self._used):
            slot.close()
        self._free, self._used = [], []

    def _new(self, size_bytes: int, *, may_evict: bool) -> Slot | None:
        """A new slot, if necessary in place of free ones."""
        wanted = _arena_bytes(size_bytes)
        with _one_at_a_time(self._place.root):
            while self._taken_bytes() + wanted > self.allowed.limit_bytes:
                if not (may_evict and self._free):
                    return None
                self._free.pop(0).close()
            try:
                arena = Arena.create(self._place.run_id, wanted - OVERHEAD_BYTES)
            except OSError as error:
                logger.info("no shared memory of %d bytes: %s", wanted, error.strerror)
                return None
        try:
            lock(arena.descriptor, fcntl.LOCK_SH, patience_s=_PATIENCE_S)  # the writer process locks it too
        except OSError as error:
            logger.info("no shared memory of %d bytes: %s", wanted, error.strerror)
            arena.close(unlink=True)
            return None
        logger.info(
            "%.1f MB of shared memory for saved states, at most %.1f MB (%s)",
            (self.memory_bytes + arena.size) / 1e6,
            self.allowed.limit_bytes / 1e6,
            self.allowed.source,
        )  # fmt: skip
        return Slot(arena)

    def _taken_bytes(self) -> int:
        """Bytes that count against the limit: this process's arenas, or all arenas for this path on this node."""
        if not self.allowed.is_shared:
            return self.memory_bytes
        sizes = 0
        for path in sweep(self._place.run_id, now_s=time.time()):
            with suppress(OSError):
                sizes += path.stat().st_size
        return sizes


def holder_mark() -> str:
    """An id of this process, by which others can tell whether it is still alive; never used again."""
    return f"{os.getpid()}:{_start_of(os.getpid())}"


def anchor(place: TagPlace) -> Arena | None:
    """An arena without an image that says which process saves to this path; None if there is no shared memory.

    The writer inherits its descriptor, so it stays locked as long as either of the two lives.
    """
    try:
        arena = Arena.create(place.run_id, 0)
    except OSError:
        return None
    arena.begin(1, {"holder": holder_mark(), "root": str(place.root)})
    return arena


def await_orphans(root: Path, *, patience_s: float) -> None:
    """Wait for the writers of scripts that were killed while saving to this path."""
    deadline = time.monotonic() + patience_s
    while any(_is_orphan(path, root) for path in SHARED_MEMORY.glob(f"hetseq-{os.getuid()}-*")):
        if time.monotonic() > deadline:
            logger.warning("the writer of a killed script is still working on %s after %.0f s", root, patience_s)
            return
        time.sleep(_LOOK_S)


def _is_orphan(path: Path, root: Path) -> bool:
    """Whether this anchor belongs to a writer that works on `root` and whose script is dead."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with suppress(ValueError, KeyError, AttributeError, OSError):
        arena = Arena(descriptor, path)
        try:
            record = arena.record(1)
            pid, start = record["holder"].split(":")
            if record["root"] != str(root) or _start_of(int(pid)) == start:
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            arena.close(unlink=False)
    return False


def _start_of(pid: int) -> str:
    """The start time of a process in the kernel's ticks; empty if it is not alive."""
    found = state_and_start(pid)
    return "" if found is None or found[0] in "ZX" else str(found[1])


def _arena_bytes(size_bytes: int) -> int:
    return -(-(size_bytes + OVERHEAD_BYTES) // _GRAIN_BYTES) * _GRAIN_BYTES


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Keeps other processes of this node from reading the account or drawing from it meanwhile."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # without locks, or after a long wait: the account may be overdrawn by one slot
            lock(descriptor, fcntl.LOCK_EX, patience_s=_PATIENCE_S)
        yield
    finally:
        os.close(descriptor)
