"""Status of a whole run, made from its newest steps for one status file: rows in, an object out, and back.

Makes the key `run` in the `status/rank-N.json` of the rank that writes the rows: the step and pace of the run, its last
checkpoint, the medians of its table, the advice. Pure: `run_directory` handles the files, and the clock is passed in.

The one idea: every rank has all numbers of a step after its commit, so one file can describe all ranks, and the other
files only show that their ranks are alive. A reader that starts late sees the same as a reader from the start.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from hetseq.monitor.advice import ADVICE_STEPS, Advice, AdviceSetting, Adviser
from hetseq.monitor.rank_table import MEDIAN_STEPS, Numbers, RankSummary, Row, summarise
from hetseq.monitor.step_time import TOLD_OF_OWNERS

FOLLOWS = "follows"  # the state of a shadow that has all that it was sent
_ADVICE_INTERVAL_S = 5.0
_ETA_STEPS = 50  # as in the live line
_SPREAD = 2.0  # standard errors of the pace on either side
_DIGITS = 5
_MOST = 1e15  # of a valid number; NaN is not valid
_Number = TypeVar("_Number", int, float)

_OF_STEP = ("step", "epoch", "loss", "samples", "seconds", "skipped", "generation")
_BY_RANK = tuple(field.name for field in fields(RankSummary) if field.type == "Numbers")


class RunStatus:
    """Follows the steps of one generation; only the rank that writes needs one."""

    def __init__(self, setting: AdviceSetting) -> None:
        self.total_steps: int | None = None  # None: not known
        self.shadows: Sequence[Mapping[str, Any]] = ()  # of each: slot, node, state, step
        self._adviser = Adviser(setting)
        self._rows: deque[Row] = deque(maxlen=ADVICE_STEPS)
        self._times_s: deque[float] = deque(maxlen=_ETA_STEPS + 1)
        self._saved: tuple[int, float | None] | None = None  # step of the last checkpoint, and when it was new
        self._advice: tuple[Advice, ...] = ()
        self._next_advice_s = -math.inf

    def step(self, row: Row, now_s: float, *, saved_step: int) -> None:
        """Take the row of a step, which has `ranks`, and the step of the newest checkpoint (0: none)."""
        self._rows.append(row)
        self._times_s.append(now_s)
        if saved_step and self._saved is None:
            self._saved = (saved_step, None)  # the checkpoint of an earlier start: its time is unknown here
        self.saved(saved_step, now_s)

    def saved(self, step: int, now_s: float) -> None:
        """Note that there is a checkpoint of `step`."""
        if step and (self._saved is None or self._saved[0] < step):
            self._saved = (step, now_s)

    def advise(self, now_s: float) -> tuple[Advice, ...]:
        """The advice to show now; computed again every few seconds."""
        if now_s >= self._next_advice_s and len(self._rows) == ADVICE_STEPS:
            self._next_advice_s = now_s + _ADVICE_INTERVAL_S
            self._advice = self._adviser.look(summarise(self._rows))
        return self._advice

    def told(self, now_s: float) -> dict[str, Any]:
        """The object for the file; empty before the first step."""
        if not self._rows:
            return {}
        newest, now_s = self._rows[-1], max(now_s, self._times_s[-1])
        summary = summarise(list(self._rows)[-MEDIAN_STEPS:])
        return {
            **{key: newest[key] for key in _OF_STEP if key in newest},
            "total_steps": self.total_steps,
            "eta_s": self._eta_s(int(newest.get("step", 0))),
            "checkpoint": self._saved and self._saved[0],
            "checkpoint_age_s": self._saved and self._saved[1] and round(max(0.0, now_s - self._saved[1]), 1),
            "advice": [advice.text for advice in self._advice],
            **({"shadows": list(self.shadows)} if self.shadows else {}),
            "ranks": None if summary is None else _packed(summary),
        }

    def _eta_s(self, step: int) -> list[float] | None:
        """Least and most seconds to the last step, from the spread of the latest steps; None if unknown."""
        times = list(self._times_s)
        if self.total_steps is None or len(times) < 3:
            return None
        paces = [after - before for before, after in itertools.pairwise(times)]
        pace_s, doubt_s = statistics.fmean(paces), _SPREAD * statistics.stdev(paces) / math.sqrt(len(paces))
        left = max(self.total_steps - step, 0)
        return [round(left * max(pace_s - doubt_s, 0.0), 1), round(left * (pace_s + doubt_s), 1)]


@dataclass(frozen=True)
class ShadowFacts:
    """A process that follows the run: the number of its log, its node, its state in words, the last step sent to it."""

    slot: int
    node: str
    state: str
    step: int


@dataclass(frozen=True)
class RunFacts:
    """The content of `run` for a reader: the newest step and the medians of its ranks; None if unknown."""

    row: Mapping[str, Any]
    summary: RankSummary | None
    total_steps: int | None
    eta_s: tuple[float, float] | None
    checkpoint: int | None
    checkpoint_age_s: float | None  # when the file was written
    advice: tuple[str, ...]
    shadows: tuple[ShadowFacts, ...] = ()


def read_facts(told: Any) -> RunFacts | None:
    """Read the object of `RunStatus.told` from JSON; None if it is malformed, e.g. written by another version."""
    try:
        eta = told["eta_s"]
        row = {key: told[key] for key in _OF_STEP if key in told}
        return RunFacts(
            row={**row, **{key: _whole(row.get(key)) for key in ("epoch", "generation") if row.get(key) is not None},
                 "step": _whole(told["step"])},
            summary=None if told["ranks"] is None else _unpacked(told["ranks"]),
            total_steps=_or_none(_whole, told["total_steps"]),
            eta_s=None if eta is None else (_real(eta[0]), _real(eta[1])),
            checkpoint=_or_none(_whole, told["checkpoint"]),
            checkpoint_age_s=_or_none(_real, told["checkpoint_age_s"]),
            advice=tuple(str(text) for text in told["advice"]),
            shadows=tuple(
                ShadowFacts(_whole(one["slot"]), str(one["node"]), str(one["state"]), _whole(one["step"]))
                for one in told.get("shadows", ())
            ),
        )  # fmt: skip
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def facts_of_rows(rows: Iterable[Row]) -> RunFacts | None:
    """The same from the newest rows of `metrics.jsonl`, while no rank has a report; None if they have no step."""
    status = RunStatus(AdviceSetting(run=""))
    try:
        for row in rows:
            status.step(row, 0.0, saved_step=0)
        return read_facts(status.told(0.0))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):  # rows of another program
        return None


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r}: expected a whole number")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not -_MOST <= value <= _MOST:
        raise ValueError(f"{value!r}: expected a number")
    return float(value)


def _or_none(kind: Callable[[Any], _Number], value: Any) -> _Number | None:
    return None if value is None else kind(value)


def _packed(summary: RankSummary) -> dict[str, Any]:
    """The summary as JSON, with only the digits that people and advice need: it is written once a second."""
    packed = {field.name: getattr(summary, field.name) for field in fields(summary)}
    packed = {name: _short(values) if name in _BY_RANK else values for name, values in packed.items()}
    unknown = [name for name in TOLD_OF_OWNERS if all(value is None for value in packed[name])]
    return {name: values for name, values in packed.items() if name not in unknown}


def _short(values: Numbers) -> list[float | None]:
    numbers: list[float] = values.tolist()  # NumPy's are slower to format
    return [float(f"{number:.{_DIGITS}g}") if math.isfinite(number) else None for number in numbers]


def _unpacked(packed: Mapping[str, Any]) -> RankSummary:
    size = len(packed["share"])
    unknown = dict.fromkeys(TOLD_OF_OWNERS, [None] * size)
    arrays = {name: np.array({**unknown, **packed}[name], float) for name in _BY_RANK}  # null becomes NaN
    if any(array.shape != (size,) for array in arrays.values()) or len(packed["slots"]) != size:
        raise ValueError(f"{size} shares: expected as many of everything")
    names, slots = tuple(map(str, packed["names"])), tuple(map(int, packed["slots"]))
    others = {key: _or_none(_real, packed[key]) for key in ("efficiency", "communication_s", "step_s")}
    pace = _or_none(_whole, packed["pace"])
    if len(names) != size or len(set(slots)) < size or not (pace is None or 0 <= pace < size):
        raise ValueError(f"pace {pace} of {size} ranks: expected a name and a slot for each, and one of them")
    changes: dict[str, Any] = {"names": names, "slots": slots, "steps": _whole(packed["steps"]), "pace": pace}
    changes |= {**others, **arrays, "step_spread": _real(packed.get("step_spread", 0.0))}
    return RankSummary(**changes)
