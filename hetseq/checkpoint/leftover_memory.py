"""What killed processes have left in this node's shared memory, and what becomes of it.

Responsible for: finding the arenas of dead starts, telling those that hold a whole state from litter, and removing
them. Refuses to decide whether a state is gone on from, and torch. The one idea: an arena that nobody holds was left
behind; if it is sealed it is the last state of a run, which the next start of that run may take, else it is litter.
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

ABANDONED_S = 3600.0  # so long the arenas of other runs stay after their owner's last sign of life


@dataclass(frozen=True)
class LeftPart:
    """One part of a state in the memory of this node: sealed, but its sums not compared yet."""

    arena: Arena
    attempt: Attempt
    plan: str  # digest of what was saved and of how it was divided: parts with equal ones belong together
    index: int
    image_bytes: int
    sums: tuple[int, ...]
    state: str | None  # the content of state.json, in part 0
    is_kept: bool  # it was only to stay in memory; else the disk should have it
    known: tuple[int, ...]  # nonces of the newest commits that the run knew of, and of the one under way


def sweep(run_id: str, *, now_s: float) -> list[Path]:
    """Remove the arenas of this user that nobody holds: the litter of this run, and whatever older one of other runs.

    Gives those of this run that somebody does hold: a writer that still finishes what a killed trainer has left. What
    is sealed stays for the next start of its run.
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
    """Wait for the writers that an earlier start of this run has left on this node; the arenas of those that go on."""
    deadline = time.monotonic() + patience_s
    while (held := sweep(run_id, now_s=time.time())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def directory_mark(run_directory: Path) -> str:
    """Names a run directory on this node: a copy of it has the same run id, but is another run from then on."""
    with suppress(OSError):
        about = run_directory.stat()
        return f"{about.st_dev}:{about.st_ino}"
    return ""


class Remains:
    """The sealed parts that earlier starts of a run have left on this node; any rank, alone.

    They stay where they are until `close`, so a start that fails early takes nothing from the next one.
    """

    def __init__(self, run_id: str, run_directory: Path) -> None:
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
                    arena.close(unlink=False)  # not sealed, or of a run in a copy of our directory
                    continue
                self._arenas.append(arena)
                part = None if record is None else _part_in(arena, record, run_id)
                if part is not None:
                    self.parts.append(part)

    def close(self, *, remove: bool) -> None:
        """Look no more into that memory; with `remove` it is given back."""
        self.parts.clear()
        while self._arenas:
            arena = self._arenas.pop()
            if remove:
                arena.give_back()  # processes that were forked meanwhile still map it
            arena.close(unlink=remove)


def has_remains(run_id: str, run_directory: Path) -> bool:
    """Whether an earlier start of this run has left a part of a state on this node."""
    remains = Remains(run_id, run_directory)
    try:
        return bool(remains.parts)
    finally:
        remains.close(remove=False)


def _record_in(arena: Arena) -> dict[str, Any] | None:
    """The record of a sealed arena; None where it cannot be believed."""
    try:
        record: Any = arena.record(arena.status[1])
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _part_in(arena: Arena, record: dict[str, Any], run_id: str) -> LeftPart | None:
    """The part that an arena holds whole, if it is one of this run; every field is looked at, as in a file."""
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
    is_kept = record.get("is_kept") is True
    return LeftPart(arena, attempt, plan, index, size, sums, state, is_kept, tuple(known))


def _is_sealed(descriptor: int) -> bool:
    """Whether an arena, which nobody holds, has a whole image; what is no arena has none."""
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
    """A descriptor of a file of this user; OSError for anything else of that name."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.getuid() or not stat.S_ISREG(about.st_mode):
            raise OSError(0, "no file of this user")
        yield descriptor
    finally:
        os.close(descriptor)
