"""Fault injection for tests of runs, HetSeq's own and yours: which rank fails where, as a sentence.

    Faults().kill(rank=1).at(step=4, phase="reduce").stop(rank=2, seconds=3).at(step=6, phase="commit")

Responsible for writing a schedule of faults and for drawing one at random. Refuses to know how a fault happens
(`hetseq.system.faults`) and how a run reacts. The one idea: a schedule is a value; it travels in one environment
variable, `environment()`, and its repr is the expression that makes it, so a failure is replayed by pasting.
"""

from __future__ import annotations

import keyword
import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hetseq.system.faults import (
    ENDING,
    KINDS,
    LASTING,
    PHASES,
    STEP_PHASES,
    VARIABLE,
    Fault,
    at_least,
    one_of,
    read_schedule,
    write_schedule,
)


@dataclass(frozen=True, repr=False)
class Faults:
    """An immutable schedule of faults: each call returns a longer one.

    `rank` is the slot: a rank of the first generation, and any process that takes its place. A kind is followed by
    `at`, which says where. Every method raises ValueError for invalid arguments.
    """

    faults: tuple[Fault, ...] = ()
    diary_path: str = ""

    def kill(self, *, rank: int) -> Aim:
        """SIGKILL."""
        return Aim(self, "kill", rank)

    def segv(self, *, rank: int) -> Aim:
        """A crash: reads memory that does not exist."""
        return Aim(self, "segv", rank)

    def abort(self, *, rank: int) -> Aim:
        """SIGABRT, as from a library that has given up."""
        return Aim(self, "abort", rank)

    def term(self, *, rank: int) -> Aim:
        """SIGTERM: the rank is asked to leave."""
        return Aim(self, "term", rank)

    def exit(self, *, rank: int) -> Aim:
        """An end with exit code 3, without a message."""
        return Aim(self, "exit", rank)

    def raise_(self, *, rank: int) -> Aim:
        """A RuntimeError."""
        return Aim(self, "raise", rank)

    def stop(self, *, rank: int, seconds: float | None = None) -> Aim:
        """SIGSTOP, and SIGCONT after `seconds`; with `math.inf` it is never sent."""
        return Aim(self, "stop", rank, seconds)

    def sleep(self, *, rank: int, seconds: float | None = None) -> Aim:
        """This thread sleeps for `seconds`; the others continue."""
        return Aim(self, "sleep", rank, seconds)

    def hog(self, *, rank: int, seconds: float | None = None) -> Aim:
        """One call keeps the interpreter's lock for `seconds`: no thread runs Python meanwhile."""
        return Aim(self, "hog", rank, seconds)

    def diary(self, path: str | os.PathLike[str]) -> Faults:
        """The same faults; each appends a line of JSON to this file just before it happens.

        The line has time, monotonic_s, slot, incarnation, step, phase, kind and pid.
        """
        text = os.fsdecode(path)
        if not text:
            raise ValueError(f"a diary is the path of a file, not {path!r}")
        return replace(self, diary_path=text)

    def text(self) -> str:
        """The schedule as JSON; equal schedules have equal texts."""
        return write_schedule(self.faults, self.diary_path)

    @classmethod
    def parse(cls, text: str) -> Faults:
        """The schedule with this text; an empty text is no fault."""
        return cls(*read_schedule(text))

    def environment(self) -> dict[str, str]:
        """Environment variables that make a command's run meet these faults."""
        return {VARIABLE: self.text()}

    def __repr__(self) -> str:
        diary = f".diary({self.diary_path!r})" if self.diary_path else ""
        return "Faults()" + "".join(map(_sentence, self.faults)) + diary


@dataclass(frozen=True)
class Aim:
    """A fault without its place; `at` returns the schedule that has it."""

    before: Faults = field(repr=False)
    kind: str
    rank: int
    seconds: float | None = None

    def at(self, *, phase: str, step: int | None = None, nth: int = 1, incarnation: int = 0) -> Faults:
        """The nth time that the rank passes `phase` in this step, or in its whole life if no step is given.

        `incarnation` 0 is the first process in the rank's slot, 1 its first replacement.
        """
        fault = Fault(self.kind, self.rank, phase, step, nth, incarnation, self.seconds)
        return replace(self.before, faults=(*self.before.faults, fault))


def random_faults(
    seed: int,
    *,
    ranks: Sequence[int],
    steps: Sequence[int],
    phases: Sequence[str],
    kinds: Sequence[str],
    count: int,
    seconds: float = 1.0,
) -> Faults:
    """`count` faults in different places, in the order of their steps: equal arguments give equal faults anywhere.

    Phases that not every step passes (saving, regrouping, joining) come without a step: the first time. A rank that an
    earlier fault has ended is met again as its next incarnation. `seconds` is for kinds that take a time. Raises
    ValueError if there are fewer places than faults, and for invalid arguments.
    """
    _check_choices(ranks, steps, phases, kinds)
    at_least("count", count, 0)
    with_step = len(set(phases) & set(STEP_PHASES))
    places = len(set(ranks)) * (with_step * len(set(steps)) + len(set(phases)) - with_step)
    if count > places:
        raise ValueError(f"{count} faults in different places, but there are only {places}")
    chance = random.Random(seed)
    kind_at: dict[tuple[int, str, int | None], str] = {}
    while len(kind_at) < count:
        rank, phase, kind = chance.choice(ranks), chance.choice(phases), chance.choice(kinds)
        drawn = chance.choice(steps)
        kind_at.setdefault((rank, phase, drawn if phase in STEP_PHASES else None), kind)

    faults, ended = [], Counter[int]()
    for place in sorted(kind_at, key=_time_of):
        (rank, phase, step), kind = place, kind_at[place]
        incarnation = ended[rank] if step is not None else 0
        ended[rank] += kind in ENDING
        duration_s = seconds if kind in LASTING else None
        faults.append(Fault(kind, rank, phase, step, incarnation=incarnation, seconds=duration_s))
    return Faults(tuple(faults))


def _time_of(place: tuple[int, str, int | None]) -> tuple[float, int, int]:
    """For sorting: loading first, then step by step, then faults without a step."""
    rank, phase, step = place
    when = 0 if phase == "loading" else math.inf if step is None else step
    return when, PHASES.index(phase), rank


def _check_choices(ranks: Sequence[int], steps: Sequence[int], phases: Sequence[str], kinds: Sequence[str]) -> None:
    for name, choices in {"ranks": ranks, "steps": steps, "phases": phases, "kinds": kinds}.items():
        if not choices:
            raise ValueError(f"no {name} to choose from")
    for rank in ranks:
        at_least("rank", rank, 0)
    for step in steps:
        at_least("step", step, 0)
    for phase in phases:
        one_of("phase", phase, PHASES)
    for kind in kinds:
        one_of("kind of fault", kind, KINDS)


def _sentence(fault: Fault) -> str:
    """The two calls that make a fault, without default arguments."""
    method = f"{fault.kind}_" if keyword.iskeyword(fault.kind) else fault.kind
    subject = f"rank={fault.slot}"
    if fault.seconds is not None:
        duration = "float('inf')" if math.isinf(fault.seconds) else repr(fault.seconds)
        subject += f", seconds={duration}"
    place = [] if fault.step is None else [f"step={fault.step}"]
    place.append(f"phase={fault.phase!r}")
    if fault.nth != 1:
        place.append(f"nth={fault.nth}")
    if fault.incarnation:
        place.append(f"incarnation={fault.incarnation}")
    return f".{method}({subject}).at({', '.join(place)})"
