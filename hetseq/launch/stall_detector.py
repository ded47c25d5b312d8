"""Stall detector: notices workers that make no progress, reports them to the coordinator, and saves their stacks.

Manages the files in `stacks/` of the run directory, and warns the user early that a rank is stalled. It ends no
process: the ranks that wait for the worker decide that.

The one idea: the worker need not answer. Its phase is in memory shared with the launcher (`rank_phase`), the state of
its process is in /proc, and its stacks were written before the launcher needs them.
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

SHARE = 0.5  # of the deadline, before a rank is reported as stalled
_LEAST_TOLD_S = 10.0  # a step that takes a few seconds longer is not worth a warning
_LEAST_MEETING_S = SHARE * LOADING_DEADLINE_S
_HELD_S = 2.5  # without a heartbeat, which comes at least once a second
_MOST_FILES = 32
_WRITE_S = 0.5  # for a file; a hanging file system must not block the launcher
_HEAD = "The most recent call of each thread comes first; the training thread is the last one.\n\n"


class Observed(Protocol):
    """The attributes of a worker that the detector reads."""

    rank: int
    starts: int
    device: str
    cell: Cell | None

    @property
    def pid(self) -> int: ...


class Reminder:
    """Tells when a reminder is due: after `first_s`, then each time the duration has doubled."""

    def __init__(self, first_s: float) -> None:
        self._next_s = first_s

    def is_due(self, for_s: float) -> bool:
        if for_s < self._next_s:
            return False
        self._next_s = 2 * for_s
        return True


@dataclass
class _Known:
    """Observations and reports of one process, in the phase that began at `since_s`."""

    since_s: float = -1.0
    is_asked: bool = False
    has_moved: bool = False  # since its phase was last reported to the coordinator
    reminder: Reminder = field(default_factory=lambda: Reminder(_LEAST_TOLD_S))
    has_told: bool = False
    has_signalled: bool = False
    text: str = ""  # its stacks
    path: str = ""  # of the file with its stacks


class Standstill:
    """The stall detector of one launcher; `send` sends a record to the coordinator, `tell` prints a line."""

    def __init__(self, directory: RunDirectory, send: Callable[..., None], tell: Callable[[str], None]) -> None:
        self._directory, self._send, self._tell = directory, send, tell
        self._known: dict[tuple[int, int], _Known] = {}
        self._meeting = Reminder(_LEAST_MEETING_S)

    def asked(self, worker: Observed) -> None:
        """The generation is over and the coordinator waits for this worker's report: send it the worker's phase."""
        if worker.cell is not None:
            stand = worker.cell.stand()
            known = self._know(worker, stand)
            known.is_asked = True
            self._keep_stacks(worker, stand, known)
            self._report(worker, stand, known)

    def answered(self, worker: Observed) -> None:
        """The next generation has been decided, so the coordinator no longer waits for this worker."""
        self._known.pop((worker.rank, worker.starts), None)

    def look(self, workers: Sequence[Observed]) -> None:
        """Check for stalled workers; cheap, call it about once a second."""
        for worker in workers:
            if worker.cell is None:
                continue
            stand = worker.cell.stand()
            known = self._know(worker, stand)
            is_long = stand.for_s >= SHARE * stand.deadline_s or _is_stopped(worker.pid, stand)
            if stand.is_waiting or not (is_long or known.is_asked):
                continue
            has_news = self._keep_stacks(worker, stand, known) or known.has_moved
            if has_news and known.is_asked:
                self._report(worker, stand, known)
            if is_long and not (known.has_told and stand.step) and known.reminder.is_due(stand.for_s):
                known.has_told = True  # in a step the others give up on it; before the first step they do not
                self._tell(f"warning: rank {worker.rank} stands still, {self.words(worker)}")
        self._look_for_others([worker.cell.stand() for worker in workers if worker.cell is not None])

    def _look_for_others(self, stands: Sequence[Stand]) -> None:
        """Warn if all ranks of this node have loaded but must wait for ranks on other nodes."""
        if not stands or any(stand.phase is not Phase.MEETING for stand in stands):
            self._meeting = Reminder(_LEAST_MEETING_S)
        elif self._meeting.is_due(for_s := min(stand.for_s for stand in stands)):
            self._tell(
                f"warning: the ranks of this node have loaded and have waited for ranks on other nodes for {for_s:.0f}"
                " s: see the terminals of those nodes"
            )

    def words(self, worker: Observed) -> str:
        """The last known phase of a worker, in words; empty if unknown."""
        if worker.cell is None:
            return ""
        stand = worker.cell.stand()
        return in_words(_facts(worker, stand, self._know(worker, stand)))

    def _know(self, worker: Observed, stand: Stand) -> _Known:
        known = self._known.setdefault((worker.rank, worker.starts), _Known())
        if known.since_s != stand.since_s:
            is_asked = known.is_asked  # it has moved since, and the next generation is not decided yet
            known = self._known[worker.rank, worker.starts] = _Known(stand.since_s, is_asked, has_moved=is_asked)
        return known

    def _report(self, worker: Observed, stand: Stand, known: _Known) -> None:
        known.has_moved = False
        self._send("stands", rank=worker.rank, starts=worker.starts, **_facts(worker, stand, known))

    def _keep_stacks(self, worker: Observed, stand: Stand, known: _Known) -> bool:
        """Write the worker's stacks into a file if they have changed; returns whether they had and were written."""
        assert worker.cell is not None
        text = "" if stand.is_waiting else worker.cell.stacks()
        if not text and not stand.is_waiting and not known.has_signalled and _is_held(worker.pid, stand):
            known.has_signalled = True
            with suppress(OSError):
                os.kill(worker.pid, STACKS_SIGNAL)  # its answer is read at the next check
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
    """Whether the process could run, but no thread of its interpreter does."""
    if not stand.can_dump or stand.silent_s < _HELD_S:
        return False
    with suppress(OSError):
        return letter_of(pid) in "RS"
    return False


def _is_stopped(pid: int, stand: Stand) -> bool:
    """Whether the process has been stopped for a while, which the user is told early: a deadline may be minutes."""
    if min(stand.for_s, stand.silent_s) < _LEAST_TOLD_S:
        return False
    with suppress(OSError):
        return letter_of(pid) == "T"
    return False


def _children(pid: int) -> str:
    """The child processes of a rank, such as data loaders, with the kernel's letter for their states."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):
                    name = Path(f"/proc/{child}/comm").read_text().strip()
                    found.append(f"{child} {name} ({letter_of(int(child))})")
    return f"Processes that it has started, with their states: {', '.join(sorted(found)[:32])}\n" if found else ""


def _write(path: Path, text: str) -> None:
    """Write a stacks file, and keep only the newest `_MOST_FILES`."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(path, text.encode(), is_durable=False)
    files = sorted(path.parent.glob("rank-*-step-*.txt"), key=lambda file: file.stat().st_mtime_ns)
    for old in files[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


def _within(job: Callable[[], None], seconds: float) -> bool:
    """Run a job that may hang in a thread; returns whether it succeeded in time."""
    outcome: list[bool] = []

    def do() -> None:
        with suppress(OSError):
            job()
            outcome.append(True)

    doing = threading.Thread(target=do, name="stacks", daemon=True)
    doing.start()
    doing.join(seconds)
    return bool(outcome)
