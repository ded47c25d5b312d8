"""State that killed processes left in this node's shared memory: found, and kept or removed.

Responsible for: finding the arenas of dead starts, telling those that hold a complete state from litter, and removing
litter. Does not decide whether to resume from a state, and does not use torch. The one idea: an arena without a lock
was left behind; if it is sealed, it is the run's last state, which its next start may take, otherwise it is litter.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.checkpoint import arena as memory
from hetseq.checkpoint.arena import Arena
from hetseq.checkpoint.records import Attempt
from hetseq.errors import CheckpointError

ABANDONED_S = 3600.0  # the arenas of other runs are kept for this long after their owner's last sign of life


@dataclass(frozen=True)
class LeftPart:
    """One part of a state in the memory of this node: sealed, but its sums are not compared yet."""

    arena: Arena
    attempt: Attempt
    plan: str  # digest of the saved content and its division: parts with equal digests belong together
    index: int
    image_bytes: int
    sums: tuple[int, ...]
    state: str | None  # the content of state.json, in part 0
    is_kept: bool  # meant for memory only; otherwise meant for the disk too
    known: tuple[int, ...]  # nonces of the newest commits that the run knew of, and of the one in progress
    start: str  # of an image: the start of the run that made it; "" for others


def sweep(run_id: str, *, now_s: float) -> list[Path]:
    """Remove this user's arenas that no process holds: the litter of this run, and older arenas of other runs.

    Returns the arenas of this run that are still held, by a writer that is finishing a killed trainer's work. Sealed
    arenas stay for the next start of their run.
    """
    held = []
    for path in sorted(_own_arenas()):
        is_ours = path.name.startswith(Arena.prefix(run_id))
        with suppress(OSError), _opened(path) as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held += [path] if is_ours else []
                continue
            is_old = now_s - os.fstat(descriptor).st_ctime > ABANDONED_S
            if not _is_sealed(descriptor) if is_ours else is_old:
                os.unlink(path)
    return held


def await_writers(run_id: str, *, patience_s: float) -> list[Path]:
    """Wait for the writers that an earlier start of this run left on this node; returns the arenas still held."""
    deadline = time.monotonic() + patience_s
    while (held := sweep(run_id, now_s=time.time())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def directory_mark(run_directory: Path) -> str:
    """Identifies a run directory on this node: a copy of it has the same run id, but is another run from then on."""
    with suppress(OSError):
        about = run_directory.stat()
        return f"{about.st_dev}:{about.st_ino}"
    return ""


class Remains:
    """The sealed parts that earlier starts of a run left on this node; any rank, alone.

    They stay in memory until `close`, so a start that fails early takes nothing from the next one. With `start` only
    the images (`checkpoint.images`) of that start count, also those that a process still holds; with `are_images` only
    images, or only other states.
    """

    def __init__(
        self, run_id: str, run_directory: Path, *, start: str | None = None, are_images: bool | None = None
    ) -> None:
        mark = directory_mark(run_directory)
        self._arenas: list[Arena] = []
        self.parts: list[LeftPart] = []
        for path in sorted(_own_arenas()):
            if not path.name.startswith(Arena.prefix(run_id)):
                continue
            with suppress(OSError, ValueError), _opened(path) as descriptor:
                arena = Arena.look_into(descriptor, path)
                record = _record_in(arena) if arena.is_sealed else {}
                if record is not None and not record.get("directory") == mark != "":
                    arena.close(unlink=False)  # not sealed, or of a run in a copy of this directory
                    continue
                self._arenas.append(arena)
                part = None if record is None else _part_in(arena, record, run_id)
                is_meant = part is None or (start in (None, part.start) and are_images in (None, bool(part.start)))
                if not is_meant:
                    self._arenas.pop().close(unlink=False)
                elif part is not None:
                    self.parts.append(part)

    def forget_images(self) -> None:
        """Unmap images (`checkpoint.images`), which stay in memory."""
        images = [part for part in self.parts if part.start]
        self.parts = [part for part in self.parts if not part.start]
        for part in images:
            self._arenas.remove(part.arena)
            part.arena.close(unlink=False)

    def close(self, *, remove: bool) -> None:
        """Unmap that memory; with `remove` it is also freed."""
        self.parts.clear()
        while self._arenas:
            arena = self._arenas.pop()
            if remove:
                arena.give_back()  # processes forked in the meantime still map it
            arena.close(unlink=remove)


def has_remains(run_id: str, run_directory: Path) -> bool:
    """Whether an earlier start of this run left a part of a state on this node."""
    remains = Remains(run_id, run_directory)
    try:
        return bool(remains.parts)
    finally:
        remains.close(remove=False)


def _record_in(arena: Arena) -> dict[str, Any] | None:
    """The record of a sealed arena; None if it cannot be trusted."""
    try:
        record: Any = arena.record(arena.status[1])
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _part_in(arena: Arena, record: dict[str, Any], run_id: str) -> LeftPart | None:
    """The complete part in an arena, if it belongs to this run; every field is checked, as in a file."""
    told: Any = record.get("attempt")
    try:
        attempt = Attempt.from_json(told if isinstance(told, dict) else {}, source=arena.path or Path("arena"))
    except CheckpointError:
        return None
    plan, state = record.get("plan"), record.get("state")
    index: Any = record.get("part")
    size: Any = record.get("image_bytes")
    is_part = isinstance(index, int) and 0 <= index < attempt.number_of_parts
    has_state = isinstance(state, str) if index == 0 else state is None
    if attempt.run_id != run_id or not (is_part and has_state and isinstance(plan, str) and isinstance(size, int)):
        return None
    known: Any = record.get("known", [])
    if not isinstance(known, list) or not all(isinstance(nonce, int) for nonce in known):
        return None
    sums = arena.sums(arena.status[1], image_bytes=size)
    if sums is None:
        return None
    is_kept, start = record.get("is_kept") is True, record.get("start", "")
    if not isinstance(start, str):
        return None
    return LeftPart(arena, attempt, plan, index, size, sums, state, is_kept, tuple(known), start)


def _is_sealed(descriptor: int) -> bool:
    """Whether an arena that no process holds has a complete image; False for a file that is not an arena."""
    with suppress(OSError, ValueError):
        arena = Arena.look_into(descriptor, None)
        try:
            return arena.is_sealed
        finally:
            arena.close(unlink=False)
    return False


def _own_arenas() -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from memory.SHARED_MEMORY.glob(f"hetseq-{os.getuid()}-*")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a file owned by this user; OSError for anything else."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
            raise OSError(0, "no file of this user")
        yield descriptor
    finally:
        os.close(descriptor)
