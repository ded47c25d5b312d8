"""What a launcher sees of a worker that does not move, says of it to the head, and keeps of its threads in a file.

Responsible for `stacks/` of the run directory: which files, how many, how large; and for the line that says early that
a rank stands still. Refuses to end anybody: that is decided by those who wait for it.

The one idea: the worker need not answer. Where it stands is in memory that both share (`rank_phase`), the state of its
process is in /proc, and its stacks were written before it was asked for them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hetseq.launch.watchdog import LOADING_DEADLINE_S
from hetseq.run_directory import RunDirectory, replace_file, utc_now
from hetseq.system.rank_phase import STACKS_SIGNAL, Cell, Phase, Stand, in_words, letter_of, state_of_process

SHARE = 0.5  # of the deadline, after which a rank is said to stand still
_LEAST_TOLD_S = 10.0  # a step that takes a few seconds longer is nothing to talk about
_LEAST_MEETING_S = SHARE * LOADING_DEADLINE_S
_HELD_S = 2.5  # without a beat, which come at least once a second
_MOST_FILES = 32
_WRITE_S = 0.5  # for a file; a file system that hangs is not to hold the launcher
_HEAD = "The most recent call of each thread stands first; the thread that trains is the last one.\n\n"


class Observed(Protocol):
    """What is looked at: a worker."""

    rank: int
    starts: int
    device: str
    cell: Cell | None

    @property
    def pid(self) -> int: ...


class Reminder:
    """When to say that something lasts: after `first_s`, and again whenever it has lasted twice as long."""

    def __init__(self, first_s: float) -> None:
        self._next_s = first_s

    def is_due(self, for_s: float) -> bool:
        if for_s < self._next_s:
            return False
        self._next_s = 2 * for_s
        return True


@dataclass
class _Known:
    """What was seen and said of one process, in the phase that began at `since_s`."""

    since_s: float = -1.0
    is_asked: bool = False
    has_moved: bool = False  # since the head was told where it stands
    reminder: Reminder = field(default_factory=lambda: Reminder(_LEAST_TOLD_S))
    has_told: bool = False
    has_signalled: bool = False
    text: str = ""  # its stacks
    path: str = ""  # of the file that has them


class Standstill:
    """`send` says something to the head, `tell` something to the user."""

    def __init__(self, directory: RunDirectory, send: Callable[..., None], tell: Callable[[str], None]) -> None:
        self._directory, self._send, self._tell = directory, send, tell
        self._known: dict[tuple[int, int], _Known] = {}
        self._meeting = Reminder(_LEAST_MEETING_S)

    def asked(self, worker: Observed) -> None:
        """The generation is over, and the others want to know what this worker holds: tell where it stands."""
        if worker.cell is not None:
            stand = worker.cell.stand()
            known = self._know(worker, stand)
            known.is_asked = True
            self._keep_stacks(worker, stand, known)
            self._report(worker, stand, known)

    def answered(self, worker: Observed) -> None:
        """There is a next generation: nobody asks any more."""
        self._known.pop((worker.rank, worker.starts), None)

    def look(self, workers: Sequence[Observed]) -> None:
        """See who stands still; cheap, and to be called about once a second."""
        for worker in workers:
            if worker.cell is None:
                continue
            stand = worker.cell.stand()
            known = self._know(worker, stand)
            is_long = stand.for_s >= SHARE * stand.deadline_s
            if stand.is_waiting or not (is_long or known.is_asked):
                continue
            has_news = self._keep_stacks(worker, stand, known) or known.has_moved
            if has_news and known.is_asked:
                self._report(worker, stand, known)
            if is_long and not (known.has_told and stand.step) and known.reminder.is_due(stand.for_s):
                known.has_told = True  # in a step the others give it up; before the first one nobody does
                self._tell(f"warning: rank {worker.rank} stands still, {self.words(worker)}")
        self._look_for_others([worker.cell.stand() for worker in workers if worker.cell is not None])

    def _look_for_others(self, stands: Sequence[Stand]) -> None:
        """Say so where all ranks of this node have loaded, and wait for those of other nodes."""
        if not stands or any(stand.phase is not Phase.MEETING for stand in stands):
            self._meeting = Reminder(_LEAST_MEETING_S)
        elif self._meeting.is_due(for_s := min(stand.for_s for stand in stands)):
            self._tell(
                f"warning: the ranks of this node have loaded and wait for those of other nodes for {for_s:.0f} s:"
                " the terminals of those nodes say what they do"
            )

    def words(self, worker: Observed) -> str:
        """Where a worker was last seen; empty where nothing is known."""
        if worker.cell is None:
            return ""
        stand = worker.cell.stand()
        return in_words(_facts(worker, stand, self._know(worker, stand)))

    def _know(self, worker: Observed, stand: Stand) -> _Known:
        known = self._known.setdefault((worker.rank, worker.starts), _Known())
        if known.since_s != stand.since_s:
            is_asked = known.is_asked  # it has gone on since, and there is no next generation yet
            known = self._known[worker.rank, worker.starts] = _Known(stand.since_s, is_asked, has_moved=is_asked)
        return known

    def _report(self, worker: Observed, stand: Stand, known: _Known) -> None:
        known.has_moved = False
        self._send("stands", rank=worker.rank, starts=worker.starts, **_facts(worker, stand, known))

    def _keep_stacks(self, worker: Observed, stand: Stand, known: _Known) -> bool:
        """Write the worker's stacks into a file, if there are others than before; whether there were."""
        assert worker.cell is not None
        text = "" if stand.is_waiting else worker.cell.stacks()
        if not text and not stand.is_waiting and not known.has_signalled and _is_held(worker.pid, stand):
            known.has_signalled = True
            with suppress(OSError):
                os.kill(worker.pid, STACKS_SIGNAL)  # its answer is found at the next look
        if not text or text == known.text:
            return False
        known.text = text
        path = self._directory.stacks / f"rank-{worker.rank}-step-{stand.step}.txt"
        facts = in_words(_facts(worker, stand, _Known()))
        who = f"rank {worker.rank} on {socket.gethostname()}, pid {worker.pid}, {utc_now()}: {facts}\n"
        if _within(lambda: _write(path, f"{who}{_children(worker.pid)}{_HEAD}{text}"), _WRITE_S):
            known.path = str(path)
        return bool(known.path)


def _facts(worker: Observed, stand: Stand, known: _Known) -> dict[str, Any]:
    process = state_of_process(worker.pid)
    if not process and _is_held(worker.pid, stand):
        process = "a call in C holds its interpreter, so that no other thread of it runs"
    return {**stand.to_record(), "device": worker.device, "process": process, "stacks": known.path}


def _is_held(pid: int, stand: Stand) -> bool:
    """Whether the process could run, and no thread of its interpreter does."""
    if not stand.can_dump or stand.silent_s < _HELD_S:
        return False
    with suppress(OSError):
        return letter_of(pid) in "RS"
    return False


def _children(pid: int) -> str:
    """The processes that a rank has started, as those that load its data, and the kernel's letter for their states."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):
                    name = Path(f"/proc/{child}/comm").read_text().strip()
                    found.append(f"{child} {name} ({letter_of(int(child))})")
    return f"Processes that it has started, with their states: {', '.join(sorted(found)[:32])}\n" if found else ""


def _write(path: Path, text: str) -> None:
    """Write a file of stacks, and keep no more than the newest of them."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, text.encode(), is_durable=False)
    files = sorted(path.parent.glob("rank-*-step-*.txt"), key=lambda file: file.stat().st_mtime_ns)
    for old in files[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


def _within(job: Callable[[], None], seconds: float) -> bool:
    """Do something that may hang, in a thread; whether it was done in time and well."""
    outcome: list[bool] = []

    def do() -> None:
        with suppress(OSError):
            job()
            outcome.append(True)

    doing = threading.Thread(target=do, name="stacks", daemon=True)
    doing.start()
    doing.join(seconds)
    return bool(outcome)
