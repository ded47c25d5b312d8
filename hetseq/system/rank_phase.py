"""The phase of a rank: what it does, in which step, since when; readable by other processes.

Responsible for a few words of memory that a rank's process shares with its launcher, and behind them for the stacks of
its threads, which `faulthandler` writes there. Does not judge whether a rank is stuck, and writes no file.

The one idea: a process that is stopped, or whose interpreter is held by a call in C, cannot report any more. So it
reports in advance: every phase begins with a few stores into shared memory, which cost no system call, no lock and
no reply, and can be read when the process cannot respond. Both sides use the monotonic clock of the machine that
they share. As with `faults`, a process is one rank in one phase, so there is one cell per process.
"""

from __future__ import annotations

import enum
import faulthandler
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.system.processes import state_and_start

#: makes a process write its stacks even if none of its threads can run Python; a real-time signal without other use
STACKS_SIGNAL = signal.SIGRTMAX - 3
MOST_STACKS_BYTES = 1 << 18

_PAGE = 4096  # before the stacks
_HEAD = "---- the threads of rank "
_WORDS = 7
_PHASE, _STEP, _SINCE, _WAITING, _DEADLINE, _BEAT, _CAN_DUMP = range(_WORDS)
_TRIES = 8


class Phase(enum.IntEnum):
    """What a rank is doing, as far as it concerns others."""

    STARTING, LOADING, MEETING, CONNECTING, BUILDING, DATA, COUNT, FORWARD_BACKWARD, REDUCE, COMMIT, UPDATE = range(11)
    BOUNDARY, COMPARING, VALIDATION, SAVING, REGROUPING, ENDING, SWEEPING = range(11, 18)
    LOADING_DATA, MODEL, TRIAL, COMPILING, SCRIPT, FOLLOWING = range(18, 24)

    @property
    def words(self) -> str:
        """The phase as it appears in messages."""
        return _IN_WORDS[self]


_IN_WORDS = {
    Phase.STARTING: "starting its process",
    Phase.LOADING: "loading the task",
    Phase.LOADING_DATA: "loading its data",
    Phase.MODEL: "building its model",
    Phase.TRIAL: "the start-up trial of its loss",
    Phase.COMPILING: "compiling its model",
    Phase.SCRIPT: "the script, between two steps",
    Phase.MEETING: "waiting until all ranks have loaded",
    Phase.CONNECTING: "connecting to its peers",
    Phase.BUILDING: "building optimizer and loader, or taking over the state",
    Phase.DATA: "reading data (loader)",
    Phase.COUNT: "counting",
    Phase.FORWARD_BACKWARD: "forward and backward",
    Phase.REDUCE: "reduction",
    Phase.COMMIT: "commit",
    Phase.UPDATE: "optimizer step",
    Phase.BOUNDARY: "reporting the step",
    Phase.COMPARING: "comparing the replicas",
    Phase.VALIDATION: "validation",
    Phase.SAVING: "saving a checkpoint",
    Phase.REGROUPING: "waiting for the next generation",
    Phase.ENDING: "ending",
    Phase.FOLLOWING: "following the run as a shadow",
    Phase.SWEEPING: "evaluating, or predicting",
}
_FOR_OTHERS = (Phase.MEETING, Phase.CONNECTING, Phase.REGROUPING, Phase.FOLLOWING)


@dataclass(frozen=True)
class Stand:
    """The phase of a rank at the time of reading."""

    phase: Phase
    step: int  # 0: before the first one
    since_s: float  # start of the phase, on the monotonic clock of its machine
    for_s: float  # the duration so far
    is_waiting: bool  # for other ranks
    deadline_s: float  # after which the others give up; infinite if no rank waits
    silent_s: float  # since a thread of its interpreter last ran; infinite if none has yet
    can_dump: bool  # it answers STACKS_SIGNAL

    def to_record(self) -> dict[str, Any]:
        """The JSON form for other machines, whose clocks differ."""
        return {
            "phase": self.phase.words, "step": self.step, "for_s": round(self.for_s, 3), "is_waiting": self.is_waiting,
            "deadline_s": min(self.deadline_s, 1e9),
        }  # fmt: skip


class Cell:
    """Memory that a rank and its launcher share: the rank's phase, and behind it the stacks of its threads."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, _PAGE)
        self._words = memoryview(self._memory).cast("q")[:_WORDS]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        from multiprocessing.reduction import DupFd

        return _cell_of, (DupFd(self.descriptor),)

    def close(self) -> None:
        """Release the memory; may be called twice."""
        if self.descriptor >= 0:
            self._words.release()
            self._memory.close()
            os.close(self.descriptor)
            self.descriptor = -1

    # for the rank

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Enter a phase; `step` stays as it was unless it is given."""
        words = self._words
        words[_SINCE] = 0  # a concurrent reader reads again
        words[_PHASE], words[_WAITING] = phase, 0
        if step is not None:
            words[_STEP] = step
        words[_SINCE] = time.monotonic_ns()

    def wait_for_others(self, is_waiting: bool) -> None:
        self._words[_WAITING] = is_waiting

    def beat(self, deadline_s: float) -> None:
        """Record that the interpreter runs; the others give this rank up after `deadline_s`."""
        self._words[_DEADLINE] = int(min(deadline_s, 1e9) * 1e3)
        self._words[_BEAT] = time.monotonic_ns()

    def answer_signal(self) -> None:
        """From now on STACKS_SIGNAL makes this process write its stacks, even if its interpreter is held."""
        faulthandler.register(STACKS_SIGNAL, file=self.descriptor, all_threads=True)
        self._words[_CAN_DUMP] = 1

    def dump(self) -> None:
        """Write the stacks of all threads; the latest ones count."""
        os.write(self.descriptor, f"{_HEAD}{os.getpid()}\n".encode())
        faulthandler.dump_traceback(self.descriptor, all_threads=True)

    def forget_stacks(self) -> None:
        """Erase stacks that were written in an earlier phase."""
        if os.fstat(self.descriptor).st_size > _PAGE:
            os.ftruncate(self.descriptor, _PAGE)

    # for readers

    def stand(self) -> Stand:
        """The current phase of the rank."""
        for _ in range(_TRIES):
            since, phase, step, waiting, deadline, beat, can_dump = self._read()
            if since and since == self._words[_SINCE]:
                break
        now = time.monotonic_ns()
        since = since or now
        place = Phase(phase)
        return Stand(
            place, step, since / 1e9, (now - since) / 1e9, bool(waiting) or place in _FOR_OTHERS,
            deadline / 1e3 if deadline else float("inf"), (now - beat) / 1e9 if beat else float("inf"), bool(can_dump),
        )  # fmt: skip

    def stacks(self) -> str:
        """The latest stacks written in this phase; empty if there are none."""
        size = os.fstat(self.descriptor).st_size
        begin = max(_PAGE, size - MOST_STACKS_BYTES)
        text = os.pread(self.descriptor, max(0, size - begin), begin).decode(errors="replace")
        return text.rpartition(_HEAD)[2].partition("\n")[2] if _HEAD in text else text

    def _read(self) -> tuple[int, ...]:
        words = self._words
        return tuple(words[i] for i in (_SINCE, _PHASE, _STEP, _WAITING, _DEADLINE, _BEAT, _CAN_DUMP))


def _cell_of(handle: Any) -> Cell:
    return Cell(handle.detach())


def _new_file() -> int:
    """A file without a name: in memory if the interpreter supports it, else an unlinked one."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hetseq-rank", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.write(descriptor, bytes(_PAGE))  # written now: on a full disk, a missing page would kill the process later
    os.lseek(descriptor, _PAGE, os.SEEK_SET)
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


# the cell of this process


def arm(cell: Cell | None) -> None:
    """From now on this process reports its phase; the thread that calls this is the one that trains."""
    global _cell, _thread
    _cell, _thread = cell, threading.get_ident()


def enter(phase: Phase, step: int | None = None) -> None:
    """Enter a phase on this rank. Costs one comparison if there is no cell."""
    if _cell is not None and threading.get_ident() == _thread:
        _cell.enter(phase, step)


@contextmanager
def amid(phase: Phase, after: Phase) -> Iterator[None]:
    """A phase nested in another one, to which it returns."""
    enter(phase)
    yield
    enter(after)


def wait_for_others(is_waiting: bool) -> None:
    """Within any phase, record whether this rank waits for others or has work of its own to finish."""
    if _cell is not None and threading.get_ident() == _thread:
        _cell.wait_for_others(is_waiting)


_cell: Cell | None = None
_thread = 0


# information from the kernel


def state_of_process(pid: int) -> str:
    """Why a process makes no progress, as far as the kernel knows; empty if it could run, or without /proc."""
    with suppress(OSError, ValueError, IndexError):
        words = _STATES.get(letter_of(pid), "")
        return words or _swapped_out(Path(f"/proc/{pid}/status").read_text())
    return ""


def letter_of(pid: int) -> str:
    """The kernel's letter for the state of a process's first thread. Raises OSError if there is none."""
    found = state_and_start(pid)
    if found is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return found[0]


def _swapped_out(status: str) -> str:
    sizes = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("VmSwap:", "VmRSS:")))
    kib = {name: int(value.split()[0]) for name, value in sizes.items()}
    if kib.get("VmSwap", 0) > kib.get("VmRSS", 0):
        return f"most of it is swapped out ({kib['VmSwap'] // 1024:,} MiB): its machine has too little memory"
    return ""


_STATES = {
    "T": "its process is stopped (SIGSTOP, or a terminal's Ctrl-Z; SIGCONT resumes it)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits in the kernel for a disk or a network mount (state D)",
    "Z": "its process has ended and has not been reaped yet (a zombie)",
    "X": "its process has ended",
}


def in_words(told: Mapping[str, Any], *, more_s: float = 0.0) -> str:
    """A reported phase in words, `more_s` seconds later: `last seen in step 3, forward and backward for 9 s; ...`.

    Raises KeyError, TypeError or ValueError for a report in another form.
    """
    step, seconds = int(told["step"]), float(told["for_s"]) + more_s
    where = f" on {str(told['device'])[:40]}" if told.get("device") else ""
    when = f" in step {step:,}," if step else ""
    whom = ", waiting for other ranks," if told["is_waiting"] else ""
    text = f"last seen{where}{when} {str(told['phase'])[:80]}{whom} for {seconds:.0f} s"
    if told.get("process"):
        text += f"; {str(told['process'])[:200]}"
    if told.get("stacks"):
        text += f"; what its threads do: {str(told['stacks'])[:1000]}"
    return text
