"""The kinds of fault that a run survives, the figures of the tests with strangers, and the tests for each.

Responsible for the lists and for the evaluation of `reporter`'s lines. Pure. The one idea: a marker says what a test
covers, `@pytest.mark.fault("FT-11")` or `@pytest.mark.figure("orphans")`; a fault without a test is not survived.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.table import Line

#: by their numbers in the failure model
FAULTS = {
    "FT-1": "a rank is killed in a step",
    "FT-2": "rank zero is killed, or the head node",
    "FT-3": "a rank is stopped, hangs, or holds the interpreter",
    "FT-4": "an abandoned rank wakes up",
    "FT-5": "a network falls into two halves that both live",
    "FT-6": "a network fails for a moment",
    "FT-7": "a rank becomes several times slower",
    "FT-8": "a launcher is killed",
    "FT-9": "a launcher alone is interrupted from the keyboard",
    "FT-10": "a queue takes its machine back, with a warning",
    "FT-11": "a writer is killed in a save",
    "FT-12": "a disk is full, or fails",
    "FT-13": "a checkpoint has a flipped bit, or its end is missing",
    "FT-14": "a gradient of one rank is not finite",
    "FT-15": "a bit flips in the model of one rank",
    "FT-16": "a dead run has left its meeting place behind",
    "FT-17": "the run directory is deleted under the run",
    "FT-18": "a rank joins during a step, or leaves during a save",
    "FT-19": "a process that loads data is killed",
    "FT-20": "the clocks of two nodes differ by an hour",
    "FT-21": "another one is lost while the others recover",
    "FT-22": "a rank cannot even be killed",
}
SURVIVED, SURVIVED_IN_CI = len(FAULTS), 16

#: name: what a test records under it, and the bar that the test itself holds it to
FIGURES = {
    "unauthorised joins": "0 of 1,000",
    "flood": "join ≤ 10 s, + 64 MB",
    "orphans": "0 after 5 s",
    "files open to others": "0",
    "secrets to be read": "0",
}


@dataclass(frozen=True)
class Shown:
    """A test that is marked, and what it came to."""

    test: str
    shows: tuple[str, ...]
    outcome: str  # passed, failed, skipped
    is_in_ci: bool
    said: dict[str, str] = field(default_factory=dict)  # by figure

    @property
    def again(self) -> str:
        """The words that repeat it."""
        return f'python -m pytest "{self.test}"'


def read_shown(lines: Iterable[str]) -> list[Shown]:
    """The tests of a report; one with several lines came to the worst of them."""
    found: dict[str, Shown] = {}
    for line in lines:
        told = json.loads(line)
        said = {name: str(value) for name, value in told["said"].items()}
        shown = Shown(told["test"], tuple(told["shows"]), told["outcome"], told["is_in_ci"], said)
        before = found.get(shown.test)
        if before is None or before.outcome != "failed":
            found[shown.test] = shown if before is None or shown.outcome == "failed" else before
    return list(found.values())


def is_shown(tests: Sequence[Shown]) -> bool:
    """Whether these tests show something: one at least has passed, and none failed."""
    outcomes = {shown.outcome for shown in tests}
    return "passed" in outcomes and "failed" not in outcomes


def of_faults(tests: Sequence[Shown], names: Iterable[str] = FAULTS) -> list[Line]:
    """A line for each kind, and how many are survived; in CI are those which tests show that run there."""
    lines, survived, in_ci = [], 0, 0
    for name in names:
        some = [shown for shown in tests if name in shown.shows]
        is_survived, runs_in_ci = is_shown(some), is_shown([shown for shown in some if shown.is_in_ci])
        survived, in_ci = survived + is_survived, in_ci + runs_in_ci
        told = count(some) + (", in CI" if runs_in_ci else "")
        lines.append(Line(f"{name} {FAULTS[name]}", "survived", told, is_survived))
    if len(lines) < SURVIVED:  # a part of them was asked for
        return lines
    return [
        *lines,
        Line("kinds of fault survived", f"{SURVIVED} of {SURVIVED}", f"{survived} of {SURVIVED}", survived == SURVIVED),
        Line("of these in CI", f"{SURVIVED_IN_CI}", str(in_ci), in_ci >= SURVIVED_IN_CI),
    ]


def of_figures(tests: Sequence[Shown], names: Iterable[str] = FIGURES) -> list[Line]:
    """A line for each figure: what its tests have measured, and whether they were content."""
    lines = []
    for name in names:
        some = [shown for shown in tests if name in shown.shows]
        said = list(dict.fromkeys(shown.said[name] for shown in some if name in shown.said))
        lines.append(Line(name, FIGURES[name], "; ".join([*said, count(some)]), is_shown(some)))
    return lines


def count(tests: Sequence[Shown]) -> str:
    """How many of them passed, failed and were skipped."""
    outcomes = [shown.outcome for shown in tests]
    told = [f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped") if name in outcomes]
    return "tests: " + ", ".join(told) if told else "no test"
