"""Fault injection: named points in a run at which a test can make this process fail, and the failures.

Responsible for `point("reduce")`, which does nothing unless this process was armed with a fault for that phase.
Does not know where a schedule comes from, what a rank does in a phase, or which ranks survive. The one idea: a fault is
bound to a slot (the place of a rank, in any process), an incarnation (0: the first process in that slot, 1: its first
replacement), a phase and a step, and happens once. So a schedule has the same effect in every run; `hetseq.testing`
writes schedules.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

#: the environment variable that passes a schedule to a launcher; nothing here reads it
VARIABLE = "HETSEQ_FAULTS"

#: phases that every step of every rank passes, in this order
STEP_PHASES = ("count", "forward_backward", "reduce", "commit", "clip", "optimizer", "boundary")
#: phases of a micro-batch where parameters come and go (`--shard-model all`): its beginning, a layer whose parameters
#: are awaited, and one whose gradients have been sent
ROUND_PHASES = ("round", "layer_forward", "layer_backward", "layer_sum")
#: phases of a rank's checkpoint writer, which is a separate process
WRITER_PHASES = ("persist", "rename")
#: all phases
PHASES = (
    "loading",
    *STEP_PHASES,
    *ROUND_PHASES,
    "snapshot",
    "image",
    "image_answer",
    *WRITER_PHASES,
    "regroup",
    "form",
    "transfer",
    "join",
    "follow",
    "follow_state",
)

#: kinds that end the process, at once or soon
ENDING = ("kill", "segv", "abort", "term", "exit", "raise")
#: kinds that take a time in seconds
LASTING = ("stop", "sleep", "hog")
#: all kinds
KINDS = (*ENDING, *LASTING)

_EXIT_CODE = 3
_LOOK_S = 0.02  # between two checks by the process that wakes a stopped one


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, and where it happens. Raises ValueError for an invalid combination."""

    kind: str
    slot: int
    phase: str
    step: int | None = None  # None: any step; 0: before the first one
    nth: int = 1  # the nth time that the process passes this phase, within this step if one is given
    incarnation: int = 0
    seconds: float | None = None  # for the kinds in LASTING; infinity stops a process for good

    def __post_init__(self) -> None:
        one_of("kind of fault", self.kind, KINDS)
        one_of("phase", self.phase, PHASES)
        at_least("rank (its slot)", self.slot, 0)
        if self.step is not None:
            at_least("step", self.step, 0)
        at_least("nth", self.nth, 1)
        at_least("incarnation", self.incarnation, 0)
        _check_seconds(self.kind, self.seconds)


def one_of(what: str, found: object, known: Sequence[str]) -> None:
    """Raise ValueError unless `found` is one of the known words."""
    if found not in known:
        raise ValueError(f"{found!r} is not a {what}; known are {', '.join(known)}")


def at_least(what: str, found: object, least: int) -> None:
    """Raise ValueError unless `found` is a whole number of at least `least`."""
    if type(found) is not int or found < least:
        raise ValueError(f"{what} is a whole number of at least {least}, not {found!r}")


def _check_seconds(kind: str, seconds: object) -> None:
    if kind not in LASTING:
        if seconds is not None:
            raise ValueError(f"{kind} takes no seconds, and was given {seconds!r}")
        return
    for_good = ", or infinity for a stop that never ends" if kind == "stop" else ""
    if seconds is None:
        raise ValueError(f"{kind} needs seconds: how long it lasts{for_good}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"{kind} lasts for a number of seconds above 0{for_good}, not {seconds!r}")
    if math.isinf(seconds) and kind != "stop":
        raise ValueError(f"{kind} lasts for a finite number of seconds, not {seconds!r}")


def write_schedule(faults: Sequence[Fault], diary: str) -> str:
    """The text of a schedule, the same for equal schedules: JSON with the faults in their order."""
    listed = []
    for fault in faults:
        facts = asdict(fault)
        seconds = facts.pop("seconds")
        if seconds is not None:
            facts["seconds"] = None if math.isinf(seconds) else float(seconds)
        listed.append(facts)
    return json.dumps({"diary": diary, "faults": listed}, sort_keys=True, separators=(",", ":"))


def read_schedule(text: str) -> tuple[tuple[Fault, ...], str]:
    """The faults and the diary ("": none) of a schedule's text; an empty text has none. Raises ValueError."""
    if not text.strip():
        return (), ""
    try:
        schedule = json.loads(text)
    except ValueError as error:
        raise ValueError(f"a schedule of faults must be JSON, and this is not: {error}") from None
    _check_keys("a schedule of faults", schedule, known=("diary", "faults"), needed=("faults",))
    listed, diary = schedule["faults"], schedule.get("diary", "")
    if not isinstance(listed, list):
        raise ValueError(f"the faults of a schedule must be a list, not {listed!r}")
    if not isinstance(diary, str):
        raise ValueError(f"the diary of a schedule must be a path, not {diary!r}")
    return tuple(_read_fault(facts) for facts in listed), diary


def _read_fault(facts: Any) -> Fault:
    known = tuple(field.name for field in fields(Fault))
    _check_keys("a fault", facts, known=known, needed=("kind", "slot", "phase"))
    seconds = facts.get("seconds")
    if facts["kind"] == "stop" and "seconds" in facts and seconds is None:
        seconds = math.inf  # JSON cannot express it
    return Fault(**{**facts, "seconds": seconds})


def _check_keys(what: str, found: object, *, known: Sequence[str], needed: Sequence[str]) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} must be a JSON object, not {found!r}")
    if unknown := [key for key in found if key not in known]:
        raise ValueError(f"{what} has {', '.join(unknown)}, which is unknown; known are {', '.join(known)}")
    if missing := [key for key in needed if key not in found]:
        raise ValueError(f"{what} lacks {', '.join(missing)}: {found!r}")


# The interface for HetSeq itself.


def arm(schedule: str, *, slot: int, incarnation: int) -> None:
    """Keep those faults of a schedule's text that are for this process, and drop all others.

    An empty text disarms. A process that is forked later has none: it can arm itself. Raises ValueError.
    """
    global _armed
    listed, diary = read_schedule(schedule)
    mine = [fault for fault in listed if (fault.slot, fault.incarnation) == (slot, incarnation)]
    _armed = _Armed(mine, diary, slot=slot, incarnation=incarnation) if mine else None


def handed_down() -> dict[str, Any] | None:
    """The arguments of `arm` for this process's checkpoint writer; None: none.

    A fault is handed down once: the next writer replaces one that has had its fault.
    """
    return None if _armed is None else _armed.hand_down()


def at_step(step: int) -> None:
    """Set the step that this process works on from now on; 0 until the first call."""
    if _armed is not None:
        _armed.step = step


def point(phase: str) -> None:
    """A place where a fault may happen; any thread may pass it. Costs one comparison if no fault is armed."""
    if _armed is not None:
        _armed.come_to(phase)


class _Armed:
    """The faults still ahead of this process, and its current step."""

    def __init__(self, faults: Sequence[Fault], diary: str, *, slot: int, incarnation: int) -> None:
        self.step = 0
        self._slot, self._incarnation, self._pid, self._diary = slot, incarnation, os.getpid(), diary
        self._faults = tuple(faults)
        self._passes_left = [fault.nth for fault in faults]
        self._lock = threading.Lock()  # for counting only

    def hand_down(self) -> dict[str, Any] | None:
        places = [
            place
            for place, fault in enumerate(self._faults)
            if fault.phase in WRITER_PHASES and self._passes_left[place] > 0
        ]
        for place in places:
            self._passes_left[place] = 0
        if not places:
            return None
        schedule = write_schedule([self._faults[place] for place in places], self._diary)
        return {"schedule": schedule, "slot": self._slot, "incarnation": self._incarnation}

    def come_to(self, phase: str) -> None:
        one_of("phase", phase, PHASES)
        if os.getpid() != self._pid:
            return
        step = self.step
        for fault in self._due(phase, step):
            self._note(fault, step)
            _happen(fault, step)

    def _due(self, phase: str, step: int) -> list[Fault]:
        """The faults that are due now, in the order of the schedule."""
        due = []
        with self._lock:
            for place, fault in enumerate(self._faults):
                if fault.phase == phase and fault.step in (None, step):
                    self._passes_left[place] -= 1  # reaches 0 exactly once
                    if self._passes_left[place] == 0:
                        due.append(fault)
        return due

    def _note(self, fault: Fault, step: int) -> None:
        """Append one line to the diary in a single write, so that processes which share it never mix theirs."""
        if not self._diary:
            return
        entry = {
            "time": time.time(),
            "monotonic_s": time.monotonic(),
            "slot": self._slot,
            "incarnation": self._incarnation,
            "step": step,
            "phase": fault.phase,
            "kind": fault.kind,
            "pid": self._pid,
        }
        file = os.open(self._diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(file)


_armed: _Armed | None = None


# The faults.


def _happen(fault: Fault, step: int) -> None:
    seconds = fault.seconds or 0.0
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "segv":
        _leave_no_core()
        ctypes.string_at(0)
    elif fault.kind == "abort":
        _leave_no_core()
        os.abort()
    elif fault.kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "exit":
        os._exit(_EXIT_CODE)
    elif fault.kind == "raise":
        raise RuntimeError(f"a fault from the schedule: slot {fault.slot}, step {step}, phase {fault.phase}")
    elif fault.kind == "stop":
        _stop(seconds)
    elif fault.kind == "sleep":
        time.sleep(seconds)
    else:
        assert fault.kind == "hog", fault
        _hold_interpreter(seconds)


def _leave_no_core() -> None:
    """No core file for an intended crash: that of a training process has gigabytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _stop(seconds: float) -> None:
    """Stop all threads of this process; continue after `seconds`, or when SIGCONT arrives."""
    waker = _fork_waker(seconds) if math.isfinite(seconds) else None
    # To this thread and not to the process: it then stops before this call returns, and cannot end the waker too early.
    signal.raise_signal(signal.SIGSTOP)
    if waker is not None:
        with suppress(ProcessLookupError, ChildProcessError):  # if SIGCHLD is ignored it is gone already
            os.kill(waker, signal.SIGKILL)
            os.waitpid(waker, 0)


def _fork_waker(seconds: float) -> int:
    """A child that sends SIGCONT to this process after `seconds`, and ends with it; returns its process id."""
    sleeper = os.getpid()
    waker = os.fork()
    if waker:
        return waker
    try:  # the fork of a process with many threads: only system calls from here, and no return
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # or a peer would not see a connection close
        wake_s = time.monotonic() + seconds
        while os.getppid() == sleeper:
            # repeatedly, because the first may arrive before the stop does; the woken process ends it
            if time.monotonic() >= wake_s:
                os.kill(sleeper, signal.SIGCONT)
            time.sleep(_LOOK_S)
    finally:
        os._exit(0)


def _hold_interpreter(seconds: float) -> None:
    """Hold the interpreter lock, like a long call in C that never releases it: no other thread runs Python."""
    library = ctypes.PyDLL(None)  # unlike CDLL, it keeps the lock during a call
    until_s = time.monotonic() + seconds
    while (rest_s := until_s - time.monotonic()) > 0:
        library.poll(None, 0, math.ceil(1000 * rest_s))  # a signal ends it early
