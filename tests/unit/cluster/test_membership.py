"""Who makes up the next generation, and from what it goes on: by stories, by hostile JSON, and by search.

The stories are the rules of docs/design/membership.md and the counterexamples to protocols that lack one. The search
takes a small model of workers through all interleavings of steps, crashes, stops, wrong suspicions and restarts, asks
the real `decide` for every record, and looks whether an update is ever doubled, lost or made from a wrong gradient. A
`decide` without one of its rules has to be caught by it, or by a story. With owners every worker of the model
holds some elements of the state, cut anew in every generation, and those who hold a base must have all of it.
"""

from __future__ import annotations

import collections
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.decide import Record, Report, SplitBrainError, Tag, Update, decide
from hetseq.cluster.membership.step_commit import Lineage, Verdict

APPLY, SKIP, REDO = Verdict.APPLY, Verdict.SKIP, Verdict.REDO
History = tuple[tuple[int, int, int, int], ...]  # of updates: step, generation, attempt, verdict
Rule = Callable[..., Record]

HISTORIES: dict[Lineage, History] = {}


@cache
def lineage(history: History) -> Lineage:
    """Of a state that contains these updates."""
    known = Lineage()
    for step, generation, attempt, verdict in history:
        known = known.extend(step, generation=generation, attempt=attempt, verdict=Verdict(verdict))
    HISTORIES[known] = history
    return known


def updated(history: History) -> Update:
    """The last update of a history, as who has made it reports it."""
    step, generation, attempt, verdict = history[-1]
    return Update(Tag(step, generation, attempt), Verdict(verdict), rows=f"rows of {step}, {generation}, {attempt}")


def holds(name: str, history: History | None, gradient: tuple[int, int, int] | None = None, **other: Any) -> Report:
    """The report of a worker with this state, and with this gradient beside it."""
    state = None if history is None else lineage(history)
    return Report(name, other.pop("generation", 0), state, None if gradient is None else Tag(*gradient), **other)


def made(name: str, history: History, **other: Any) -> Report:
    """The report of a worker that has made the last update of this history itself."""
    return holds(name, history, last=updated(history), **other)


# Stories. Step 1 is under way or over in generation 0, unless it says otherwise.

NONE: History = ()
ONE: History = ((1, 0, 0, APPLY),)
SKIPPED: History = ((1, 0, 0, SKIP),)
ONE_LATER: History = ((1, 1, 0, APPLY),)
TWO: History = (*ONE, (2, 0, 0, APPLY))
GRADIENT = (1, 0, 0)


class Story(NamedTuple):
    reports: tuple[Report, ...]
    roster: str  # what is to come out; workers have names of one letter
    base: History | None
    fresh: str = ""
    last: History | None = None  # the update that made the base is its last one
    newcomers: str = ""
    newest: Record = Record(0, ("A", "B", "C"))
    lost: str = ""

    def tell(self, rule: Rule) -> Record:
        reports = {report.incarnation: report for report in self.reports}
        record: Record = rule(self.newest, reports, tuple(self.newcomers), order=ORDER)
        return record

    def expected(self) -> Record:
        return Record(
            self.newest.generation + 1, tuple(self.roster), None if self.base is None else lineage(self.base),
            None if self.last is None else updated(self.last), frozenset(self.fresh), (None,) * len(self.roster),
            lost=self.lost,
        )  # fmt: skip

    def is_told_by(self, rule: Rule) -> bool:
        try:
            found = self.tell(rule)
        except Exception:
            return False
        return found == self.expected()


ORDER = {name: place for place, name in enumerate("ABCDE")}
AFTER = Record(1, ("B", "C"), lineage(NONE))  # B and C went on without A, which had fallen silent
STORIES = {
    "nobody saw the commit: the step is computed anew, and the gradients are dropped": Story(
        (holds("A", NONE, GRADIENT), holds("B", NONE, GRADIENT), holds("C", NONE)), "ABC", NONE
    ),
    "one saw the commit and has applied: who holds the gradient applies too": Story(
        (made("A", ONE), holds("B", NONE, GRADIENT), holds("C", NONE, GRADIENT)), "ABC", ONE, last=ONE
    ),
    "one has applied and gone on into the next step, and lost it": Story(
        (made("A", ONE, gradient=(2, 0, 0)), holds("B", NONE, GRADIENT)), "AB", ONE, last=ONE
    ),
    "all have seen the commit": Story((made("A", ONE), made("B", ONE), made("C", ONE)), "ABC", ONE, last=ONE),
    "the commit said skip: all skip, and nobody applies the bad gradient": Story(
        (made("A", SKIPPED), holds("B", NONE, GRADIENT)), "AB", SKIPPED, last=SKIPPED
    ),
    "a skip needs no gradient": Story((made("A", SKIPPED), holds("B", NONE)), "AB", SKIPPED, last=SKIPPED),
    "the commit said redo: nobody has it in its history, and the step is computed anew": Story(
        (holds("A", NONE), holds("B", NONE, GRADIENT)), "AB", NONE
    ),
    "an update needs its gradient: who holds none is given the state": Story(
        (made("A", ONE), holds("B", NONE), holds("C", NONE, GRADIENT)), "ABC", ONE, fresh="B", last=ONE
    ),
    "a gradient of another attempt is another gradient": Story(
        (made("A", ((1, 0, 1, APPLY),)), holds("B", NONE, GRADIENT)),
        "AB", ((1, 0, 1, APPLY),), fresh="B", last=((1, 0, 1, APPLY),),
    ),
    "a gradient of another generation is another gradient": Story(
        (made("B", ONE_LATER, generation=1), holds("C", NONE, GRADIENT, generation=1)),
        "BC", ONE_LATER, fresh="C", last=ONE_LATER, newest=AFTER,
    ),
    "a gradient of another step is another gradient": Story(
        (made("A", TWO), holds("B", ONE, GRADIENT)), "AB", TWO, fresh="B", last=TWO
    ),
    "who is two updates behind is given the state, whatever it holds": Story(
        (made("A", TWO), holds("B", NONE, (2, 0, 0))), "AB", TWO, fresh="B", last=TWO
    ),
    "who is one update behind on another history is given the state": Story(
        (made("A", TWO), holds("B", ONE_LATER, (2, 0, 0))), "AB", TWO, fresh="B", last=TWO
    ),
    "no report, no place: who is silent may have applied, and may not take part": Story(
        (holds("C", NONE, GRADIENT),), "C", NONE
    ),
    "who reported to an older generation has no vote": Story(
        (made("C", ONE), holds("B", NONE, generation=1)), "B", NONE, newest=AFTER
    ),
    "who is in no roster has no vote": Story(
        (made("A", ONE, generation=1), holds("B", NONE, generation=1), holds("C", NONE, generation=1)),
        "BC", NONE, newest=AFTER,
    ),
    "who comes back from an older generation is given the state": Story(
        (made("A", ONE), holds("B", NONE, generation=1)), "AB", NONE, fresh="A", newcomers="A", newest=AFTER
    ),
    "a process that was started again is somebody else, and holds nothing": Story(
        (holds("A", NONE, GRADIENT),), "AD", NONE, fresh="D", newcomers="D"
    ),
    "a state that has not arrived as a whole is none, though the gradient beside it is": Story(
        (made("A", ONE), holds("B", None, GRADIENT)), "AB", ONE, fresh="B", last=ONE
    ),
    "the one who held the state is gone, and the one who was to get it has half of it": Story(
        (holds("B", None),), "B", None, fresh="B"
    ),
    "all are newcomers: they begin from the newest checkpoint": Story((), "DE", None, fresh="DE", newcomers="ED"),
    "nobody who has a vote has a state, so newcomers and members begin alike": Story(
        (holds("B", None), holds("C", None)), "BCD", None, fresh="BCD", newcomers="D"
    ),
    "a base that no one has made in this generation is nobody's last update": Story(
        (holds("B", ONE, generation=1), holds("C", ONE, (2, 1, 0), generation=1)), "BC", ONE, newest=AFTER
    ),
    "one of those at the base has made it, another one was given it": Story(
        (holds("A", ONE), made("B", ONE), holds("C", NONE, GRADIENT)), "ABC", ONE, last=ONE
    ),
    "the longest history counts, however few hold it": Story(
        (holds("A", NONE), holds("B", NONE), made("C", ONE)), "ABC", ONE, fresh="AB", last=ONE
    ),
    "the owners are all here": Story(
        (made("A", ONE, part=(5, 8)), holds("B", NONE, GRADIENT, part=(2, 8)), made("C", ONE, part=(1, 8))),
        "ABC", ONE, last=ONE,
    ),
    "an owner is gone and its part with it, so all begin from the newest checkpoint": Story(
        (made("A", ONE, part=(5, 8)), made("C", ONE, part=(1, 8))),
        "ACD", None, fresh="ACD", newcomers="D", lost="rank 1 owned 25 % of the state, and no other rank holds it",
    ),
    "two owners are gone, and one that owned nothing is left": Story(
        (holds("B", NONE, GRADIENT, part=(0, 3)),),
        "B", None, fresh="B", lost="ranks 0 and 2 owned 100 % of the state, and no other rank holds it",
    ),
    "who owned nothing is gone, and a newcomer has no part: nothing is lost": Story(
        (made("A", ONE, part=(5, 8)), made("B", ONE, part=(3, 8))), "ABD", ONE, fresh="D", last=ONE, newcomers="D"
    ),
    "an owner without the gradient of the update that the others made has lost its part": Story(
        (made("A", ONE, part=(6, 8)), holds("B", NONE, part=(2, 8)), made("C", ONE, part=(0, 8))),
        "ABC", None, fresh="ABC", lost="rank 1 owned 25 % of the state, and no other rank holds it",
    ),
    "a generation that began anew was lost before it held a state: the next one begins anew for the same reason": Story(
        (holds("B", None, generation=1),), "BD", None, fresh="BD", newcomers="D",
        newest=Record(1, ("B", "C"), fresh=frozenset("BC"), lost="rank 0 owned all"), lost="rank 0 owned all",
    ),
    "who waits for its part holds none, and its report says none": Story(
        (holds("A", ONE, part=(8, 8)), holds("B", None), holds("C", ONE, part=(0, 8))), "ABC", ONE, fresh="B"
    ),
    "one owner has its new part and another one still the old: what is in neither cut is lost": Story(
        (holds("B", ONE, generation=1, part=(4, 8)), holds("C", ONE, generation=1, part=(4, 8), cut=0)),
        "BC", None, fresh="BC", newest=AFTER, lost="rank 2 owned 50 % of the state, and no other rank holds it",
    ),
    "one owner has its new part, and another one that is to get its first has nothing yet": Story(
        (holds("B", ONE, generation=1, part=(4, 8)), holds("C", ONE, generation=1, part=(0, 8), cut=0)),
        "BC", None, fresh="BC", newest=AFTER,
        lost="50 % of the state was on its way to a new owner, and no rank holds it",
    ),
    "nobody has a new part yet, and the old ones are all there": Story(
        (holds("B", ONE, generation=1, part=(4, 8), cut=0), holds("C", ONE, generation=1, part=(4, 8), cut=0)),
        "BC", ONE, newest=AFTER,
    ),
    "the new parts are all there: who still has one of the old ones is given the state, who owns nothing is not": Story(
        (
            holds("A", ONE, generation=1, part=(8, 8)), holds("B", ONE, generation=1, part=(4, 8), cut=0),
            holds("C", ONE, generation=1, part=(0, 8), cut=0),
        ),
        "ABC", ONE, fresh="B", newest=Record(1, ("A", "B", "C"), lineage(NONE)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_the_next_generation_goes_on_from_the_longest_history_and_with_who_reported(name: str) -> None:
    story = STORIES[name]
    found = story.tell(decide)
    assert found == story.expected()
    assert not found.is_last
    assert found.donors == tuple(member for member in found.roster if member not in found.fresh)


def test_two_states_of_one_length_and_different_history_stop_the_run() -> None:
    split = {"A": made("A", ONE), "B": made("B", SKIPPED)}
    with pytest.raises(SplitBrainError, match=r"different histories of step 1 \(A: [0-9a-f]{16}, B: [0-9a-f]{16}\)"):
        decide(Record(0, ("A", "B")), split, order=ORDER)
    longer = {**split, "C": made("C", TWO)}  # then one of the shorter ones is simply given the state
    assert decide(Record(0, ("A", "B", "C")), longer, order=ORDER).fresh == {"A", "B"}


@pytest.mark.parametrize(
    "parts",
    [
        {"A": {"part": (8, 8)}, "B": {}},  # one is a replica
        {"A": {"part": (4, 8)}, "B": {"part": (4, 9)}},
        {"A": {"part": (5, 8)}, "B": {"part": (4, 8)}},  # some element has two owners
    ],
    ids=["with a replica", "other totals", "too much"],
)
def test_parts_that_cannot_be_those_of_one_state_stop_the_run(parts: dict[str, dict[str, Any]]) -> None:
    reports = {name: made(name, ONE, **facts) for name, facts in parts.items()}
    with pytest.raises(SplitBrainError, match=r"contradict each other .*A: \(\d, 8\) of cut 0, B: .*newest checkpoint"):
        decide(Record(0, ("A", "B", "C")), reports, order=ORDER)


def test_nobody_left_is_no_generation() -> None:
    with pytest.raises(ValueError, match="no member is left after generation 3"):
        decide(Record(3, ("A",)), {"A": holds("A", ONE, generation=2)}, order=ORDER)


def test_ranks_follow_the_slots_whoever_comes_first_and_bring_what_their_shares_cost() -> None:
    order = {"C": 0, "A": 1, "D": 2, "B": 3}
    reports = {name: holds(name, NONE, cost=Cost(0.5, float(ord(name)))) for name in "AB"}
    reports["C"] = holds("C", NONE)
    record = decide(Record(0, ("A", "B", "C")), reports, ["D"], order=order)
    assert record.roster == ("C", "A", "D", "B")
    assert record.costs == (None, Cost(0.5, 65.0), None, Cost(0.5, 66.0))
    assert record.donors == ("C", "A", "B")


# JSON.

FULL = Report(
    "3.1", 4, Lineage(7, -(2**63)), Tag(8, 4, 1), Update(Tag(7, 4, 0), SKIP, "cm93cw=="), Cost(0.25, 1e-3, 7, 0.5, 4),
    (2**40, 2**41), 3,
)  # fmt: skip
RECORD = Record(
    5, ("0.0", "3.1", "2.0"), Lineage(7, 2**63 - 1), FULL.last, frozenset({"3.1", "2.0"}),
    (Cost(0.25, 1e-3), None, None), is_last=True, lost="rank 1 owned 25 % of the state",
)  # fmt: skip


@pytest.mark.parametrize("report", [FULL, Report("0.0", 0), replace(FULL, gradient=None, cost=None, part=(0, 1))])
def test_a_report_comes_out_of_json_as_it_went_in(report: Report) -> None:
    assert Report.from_record(json.loads(json.dumps(report.to_record()))) == report


@pytest.mark.parametrize("record", [RECORD, Record(0, ("0.0",)), replace(RECORD, fresh=frozenset(), last=None)])
def test_a_record_comes_out_of_json_as_it_went_in(record: Record) -> None:
    assert Record.from_record(json.loads(json.dumps(record.to_record()))) == record


def test_what_a_version_without_parts_has_written_is_read() -> None:
    report = {key: value for key, value in FULL.to_record().items() if key not in ("part", "cut")}
    assert Report.from_record(report) == replace(FULL, part=None, cut=None)
    record = {key: value for key, value in RECORD.to_record().items() if key != "lost"}
    assert Record.from_record(record) == replace(RECORD, lost="")


HOSTILE = [
    {"generation": None}, {"generation": "x"}, {"generation": []}, {"lineage": 5}, {"lineage": {}},
    {"lineage": {"step": 1}}, {"lineage": {"step": "x", "chain": 0}}, {"lineage": {"step": None, "chain": 0}},
    {"gradient": []}, {"gradient": "text"}, {"gradient": {"step": 1, "generation": 0}}, {"last": 7},
    {"last": {"tag": {"step": 1, "generation": 0, "attempt": 0}, "verdict": 9, "rows": ""}}, {"cost": 5},
    {"cost": ["x", 1]}, {"cost": [None, None]},
]  # fmt: skip
#: FAULT: `from_record` promises KeyError, TypeError or ValueError, and raises AssertionError (which ends the hub's
#: thread with it), OverflowError or IndexError for these
WORSE = [
    {"last": {"tag": None, "verdict": 0, "rows": ""}}, {"generation": float("inf")}, {"cost": []}, {"cost": [1.0]},
    {"lineage": {"step": float("inf"), "chain": 0}},
]  # fmt: skip


@pytest.mark.parametrize("change", [*HOSTILE, *WORSE], ids=str)
def test_what_is_no_report_is_refused_with_an_error_that_the_hub_expects(change: dict[str, Any]) -> None:
    whole = FULL.to_record()
    with pytest.raises((KeyError, TypeError, ValueError)):
        Report.from_record({**whole, **change})
    with pytest.raises(KeyError):
        Report.from_record({key: value for key, value in whole.items() if key not in change})


@pytest.mark.parametrize(
    "change",
    [{"roster": 5}, {"fresh": None}, {"costs": [5]}, {"costs": ["x"]}, {"base": {}}, {"generation": "x"}],
    ids=str,
)
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Record.from_record({**RECORD.to_record(), **change})


@pytest.mark.parametrize(
    "change",
    [{"part": part} for part in (5, [], [1], [1, 2, 3], ["x", 1], [None, 1], [-1, 4], [5, 4], [0, 0], [0.5, 4], {})]
    + [{"cut": "x"}, {"cut": []}, {"cut": 0.5}],
    ids=str,
)
def test_what_is_no_part_is_refused_with_an_error_that_the_hub_expects(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Report.from_record({**FULL.to_record(), **change})


# FAULT: a chain is 64 bits; a longer one is taken in, and raises OverflowError later, in the middle of `decide`.
def test_a_chain_of_more_than_64_bits_is_refused_where_it_comes_in() -> None:
    with pytest.raises(ValueError):
        Report.from_record({**FULL.to_record(), "lineage": {"step": 1, "chain": 2**63}})


# The search.


class Broken(Exception):
    """What must hold does not."""


class Part(NamedTuple):
    """What a worker owns, and the generation that has cut the state so."""

    cut: int
    elements: frozenset[int]


ALL = frozenset(range(4))


def cut(generation: int, roster: tuple[str, ...], name: str) -> Part:
    """Of each generation another one; of three workers, one owns nothing."""
    turned = [*roster[generation % len(roster) :], *roster[: generation % len(roster)]]
    owners = turned if len(turned) < 3 else turned[:-1]
    return Part(generation, frozenset(one for one in ALL if owners[one % len(owners)] == name))


class Worker(NamedTuple):
    name: str  # slot and how often it was started: "1.0"
    status: str = "up"  # stopped, dead
    #: reducing, committing, done; frozen, newcomer; fresh: it waits for the state; with owners also forming: it has the
    #: part of before, and handed: it has its new part as well
    phase: str = "computing"
    generation: int = 0  # the newest record that it has adopted
    history: History | None = ()
    attempt: int = 0
    held: tuple[int, int, int] | None = None  # whole, and of a step that it has not seen the end of
    last: tuple[int, int, int, int] | None = None  # made by itself in this generation
    part: Part | None = None  # of its history; None: everything


class Formed(NamedTuple):
    """A record, with histories in place of lineages."""

    roster: tuple[str, ...]
    base: History | None = None
    last: tuple[int, int, int, int] | None = None
    fresh: frozenset[str] = frozenset()


class Budget(NamedTuple):
    """How much may yet happen."""

    faults: int  # crashes, stops, and living workers that are given up
    restarts: int = 0
    non_finite: int = 0
    redo: int = 0


class State(NamedTuple):
    workers: tuple[Worker, ...]  # by slot
    records: tuple[Formed, ...]
    heard: frozenset[tuple[str, int, Any, Any, Any, Any]]  # reports: name, generation, history, held, last, part
    given: frozenset[tuple[Any, ...]]  # contributions: generation, step, attempt, what, name, payload
    budget: Budget


class Move(NamedTuple):
    told: str
    is_fault: bool
    after: State


TRAINING = ("computing", "reducing", "committing", "done", "fresh")
HANDING = ("forming", "handed")


def beginning(workers: int, budget: Budget, *, has_owners: bool) -> State:
    names = tuple(f"{slot}.0" for slot in range(workers))
    first = (Worker(name, part=cut(0, names, name) if has_owners else None) for name in names)
    return State(tuple(first), (Formed(names, ()),), frozenset(), frozenset(), budget)


def report_of(worker: Worker) -> tuple[str, int, Any, Any, Any, Any]:
    return worker.name, worker.generation, worker.history, worker.held, worker.last, worker.part


@cache
def formed(
    rule: Rule, number: int, newest: Formed, heard: frozenset[Any], newcomers: frozenset[str], silent: frozenset[str]
) -> Formed:
    """What the rule makes of the reports that a coordinator has in hand. `silent`: alive, as only mutants ask."""
    reports = {
        name: holds(
            name, history, held, generation=generation,
            last=None if last is None else Update(Tag(*last[:3]), Verdict(last[3]), "rows"),
            part=None if part is None else (len(part.elements), len(ALL)), cut=None if part is None else part.cut,
        )
        for name, generation, history, held, last, part in sorted(heard, key=lambda report: report[1])
    }  # fmt: skip
    record = Record(
        number, newest.roster, None if newest.base is None else lineage(newest.base), None, newest.fresh
    )  # fmt: skip
    names = [*newest.roster, *reports, *newcomers]
    told = {"silent": silent} if rule in NEEDS_THE_SILENT else {}
    try:
        found = rule(record, reports, newcomers, order={name: float(name) for name in names}, **told)
    except SplitBrainError as error:
        raise Broken(str(error)) from None
    base = None if found.base is None else HISTORIES[found.base]
    last = None
    if found.last is not None:
        tag = found.last.tag
        last = tag.step, tag.generation, tag.attempt, int(found.last.verdict)
    voters = [report for report in heard if report[1] == number and report[0] in newest.roster]
    longest = max((report[2] for report in voters if report[2] is not None), key=len, default=None)
    if longest is not None and base is None and not any(map(is_complete, parts_of(voters, longest))):
        assert found.lost
        return Formed(found.roster, None, None, found.fresh)
    if len(longest or ()) > len(base or ()):
        raise Broken("an update is forgotten that somebody has made who reports")
    return Formed(found.roster, base, last, found.fresh)


def parts_of(voters: Collection[Any], history: History) -> list[list[Part | None]]:
    """Of those who hold this history or can make its last update, by cut."""
    parts = collections.defaultdict[int, list[Part | None]](list)
    for _, _, known, held, _, part in voters:
        can_make = history and known == history[:-1] and (history[-1][3] == SKIP or held == history[-1][:3])
        if known == history or can_make:
            parts[-1 if part is None else part.cut].append(part)
    return list(parts.values())


def is_complete(parts: Collection[Part | None]) -> bool:
    """Whether nothing of the state is in other hands."""
    return None in parts or frozenset[int]().union(*(part.elements for part in parts if part is not None)) == ALL


class Search:
    """All that may happen to some workers under a rule; `steps` is how many they train."""

    def __init__(
        self, rule: Rule = decide, *, workers: int, steps: int, budget: Budget, has_owners: bool = False
    ) -> None:
        self.rule, self.steps, self.has_owners = rule, steps, has_owners
        self.first = beginning(workers, budget, has_owners=has_owners)

    def moves(self, state: State) -> Iterator[Move]:
        for slot, worker in enumerate(state.workers):
            if worker.status == "up":
                yield from self._moves_of(state, slot, worker)
                if state.budget.faults:
                    less = state.budget._replace(faults=state.budget.faults - 1)
                    yield self._move(state, slot, worker._replace(status="dead"), "dies", is_fault=True, budget=less)
                    if worker.phase not in ("newcomer", "done"):
                        stopped = worker._replace(status="stopped")
                        yield self._move(state, slot, stopped, "is stopped", is_fault=True, budget=less)
            elif worker.status == "stopped":
                yield self._move(state, slot, worker._replace(status="up"), "wakes", is_fault=True)
            else:
                yield from self._restart(state, slot, worker)
        yield from self._form(state)

    def _restart(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        is_lost = all(other.status == "dead" for other in state.workers)  # then somebody types the command again
        if is_lost or state.budget.restarts:
            again = f"{slot}.{int(worker.name.partition('.')[2]) + 1}"
            new = Worker(again, phase="newcomer", generation=len(state.records) - 1, history=None)
            budget = state.budget if is_lost else state.budget._replace(restarts=state.budget.restarts - 1)
            yield self._move(state, slot, new, "is started again", budget=budget)

    def _move(self, state: State, slot: int, worker: Worker, told: str, *, is_fault: bool = False, **more: Any) -> Move:
        workers = (*state.workers[:slot], worker, *state.workers[slot + 1 :])
        after = state._replace(workers=workers, **more)
        if after.given:  # what nobody can need any more is forgotten
            live = {self._tag(one) for one in workers if one.status != "dead" and one.phase in TRAINING[:3]}
            after = after._replace(given=frozenset(one for one in after.given if one[:3] in live))
        self.check(after)
        return Move(f"{state.workers[slot].name} {told}", is_fault, after)

    def _tag(self, worker: Worker) -> tuple[int, int, int]:
        return worker.generation, len(worker.history or ()) + 1, worker.attempt

    def _all_gave(self, state: State, worker: Worker, what: str) -> list[Any] | None:
        key, roster = (*self._tag(worker), what), state.records[worker.generation].roster
        given = {one[4]: one[5] for one in state.given if one[:4] == key}
        return [given[name] for name in roster] if set(roster) <= set(given) else None

    def _give(self, state: State, worker: Worker, what: str, payload: Any) -> frozenset[Any]:
        return state.given | {(*self._tag(worker), what, worker.name, payload)}

    # A worker.

    def _moves_of(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        newest = len(state.records) - 1
        if worker.phase == "computing":
            given = self._give(state, worker, "gradient", worker.history)
            yield self._move(state, slot, worker._replace(phase="reducing"), "gives its gradient", given=given)
        elif worker.phase == "reducing" and (parts := self._all_gave(state, worker, "gradient")):
            yield from self._enter_commit(state, slot, worker, parts)
        elif worker.phase == "committing" and (votes := self._all_gave(state, worker, "row")):
            yield self._see_commit(state, slot, worker, votes)
        elif worker.phase == "fresh":
            yield from self._receive(state, slot, worker)
        elif worker.phase in HANDING:
            yield from self._hand_over(state, slot, worker)
        elif worker.phase == "frozen" and report_of(worker) not in state.heard:
            heard = frozenset(one for one in state.heard if one[0] != worker.name) | {report_of(worker)}
            yield self._move(state, slot, worker, f"is heard: {report_of(worker)[1:]}", heard=heard)
        if worker.phase in (*TRAINING, *HANDING) and self._misses_somebody(state, worker):
            yield self._move(state, slot, worker._replace(phase="frozen"), f"freezes while {worker.phase}")
        if worker.phase in ("frozen", "newcomer") and newest > worker.generation:
            yield from self._adopt(state, slot, worker, newest)

    def _misses_somebody(self, state: State, worker: Worker) -> bool:
        if worker.generation < len(state.records) - 1:
            return True
        known = {other.name: other for other in state.workers}
        for name in state.records[worker.generation].roster:
            other = known.get(name)
            if other is None or other.status != "up":
                return True
            if other.generation == worker.generation and other.phase in ("frozen", "newcomer"):
                return True
        return False

    def _enter_commit(self, state: State, slot: int, worker: Worker, parts: list[Any]) -> Iterator[Move]:
        if set(parts) != {worker.history}:
            raise Broken("a gradient is the sum of gradients of different states")
        budget = state.budget
        step, wish = (
            len(worker.history or ()) + 1,
            any(o.status == "up" and o.phase == "newcomer" for o in state.workers),
        )
        choices = [(APPLY, budget)]
        if budget.non_finite:
            choices.append((SKIP, budget._replace(non_finite=budget.non_finite - 1)))
        if budget.redo:
            choices.append((REDO, budget._replace(redo=budget.redo - 1)))
        for vote, less in choices:
            held = None if vote is REDO else (step, worker.generation, worker.attempt)
            yield self._move(
                state, slot, worker._replace(phase="committing", held=held), f"votes {vote.name}",
                is_fault=vote is not APPLY, given=self._give(state, worker, "row", (int(vote), wish)), budget=less,
            )  # fmt: skip

    def _see_commit(self, state: State, slot: int, worker: Worker, votes: list[Any]) -> Move:
        verdict = REDO if (REDO, True) in votes or (REDO, False) in votes else APPLY
        if verdict is APPLY and any(vote == SKIP for vote, _ in votes):
            verdict = SKIP
        if verdict is REDO:
            again = worker._replace(phase="computing", attempt=worker.attempt + 1, held=None)
            return self._move(state, slot, again, "sees redo")
        assert worker.history is not None
        entry = (len(worker.history) + 1, worker.generation, worker.attempt, int(verdict))
        after = self._begin(made_of(worker, entry)._replace(last=entry))
        if any(wish for _, wish in votes) and after.phase != "done":
            after = after._replace(phase="frozen")
        return self._move(state, slot, after, f"sees {verdict.name} of step {entry[0]}")

    def _begin(self, worker: Worker) -> Worker:
        phase = "done" if len(worker.history or ()) == self.steps else "computing"
        return worker._replace(phase=phase, attempt=0, held=None)

    def _receive(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        record = state.records[worker.generation]
        if record.base is None:
            part = cut(worker.generation, record.roster, worker.name) if self.has_owners else None
            loaded = self._begin(worker._replace(history=(), part=part))
            yield self._move(state, slot, loaded, "loads the checkpoint")
        for donor in state.workers:
            is_there = donor.status == "up" and donor.generation == worker.generation and donor.phase in TRAINING
            if is_there and donor.name not in record.fresh:
                if donor.history != record.base:
                    raise Broken("a donor does not hold the state that it is to give")
                after = self._begin(worker._replace(history=donor.history))
                yield self._move(state, slot, after, f"is given the state by {donor.name}")

    def _hand_over(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        """Each is given its new part by those who have the old ones, and drops its own old one when all have theirs."""
        record = state.records[worker.generation]
        here = [one for one in state.workers if one.generation == worker.generation and one.name in record.roster]
        if {one.name for one in here} != set(record.roster) or any(one.phase in ("frozen", "newcomer") for one in here):
            return
        if worker.phase == "forming":
            donors = [one for one in here if one.name not in record.fresh]
            if any(one.history != record.base for one in donors):
                raise Broken("a donor does not hold the state that it is to give")
            if not is_complete([one.part for one in donors]):
                raise Broken("a part of the base is in nobody's hands")
            yield self._move(state, slot, worker._replace(phase="handed"), "has its part")
        elif all(one.phase != "forming" for one in here):
            part = cut(worker.generation, record.roster, worker.name)
            yield self._move(
                state, slot, self._begin(worker._replace(history=record.base, part=part)), "drops its old part"
            )

    def _adopt(self, state: State, slot: int, worker: Worker, newest: int) -> Iterator[Move]:
        record = state.records[newest]
        told = f"enters generation {newest}"
        begun = worker._replace(generation=newest, attempt=0, held=None, last=None)
        if worker.name not in record.roster:
            if worker.phase == "frozen":
                outside = begun._replace(phase="newcomer", history=None, part=None)
                yield self._move(state, slot, outside, f"is not in generation {newest}")
        elif worker.name in record.fresh:
            phase = "fresh" if record.base is None or not self.has_owners else "forming"
            empty = begun._replace(phase=phase, history=None, part=None)
            yield self._move(state, slot, empty, f"{told} without a state")
        elif self.has_owners:
            kept = self._caught_up(worker, record)._replace(phase="forming", generation=newest, attempt=0)
            yield self._move(state, slot, kept._replace(held=None, last=None), told)
        else:
            yield self._move(state, slot, self._begin(self._caught_up(worker, record)._replace(
                generation=newest, last=None)), told)  # fmt: skip

    def _caught_up(self, worker: Worker, record: Formed) -> Worker:
        if worker.history is None:
            raise Broken("a worker that holds no state is taken for one that does")
        if record.last is not None and record.last[0] == len(worker.history) + 1:
            worker = made_of(worker, record.last)
        if worker.history != record.base:
            raise Broken("a survivor does not come to the base of its generation")
        return worker

    # The coordinator.

    def _form(self, state: State) -> Iterator[Move]:
        number = len(state.records) - 1
        newest = state.records[number]
        up = {worker.name: worker for worker in state.workers if worker.status == "up"}
        heard = {report[0] for report in state.heard if report[1] == number and report[0] in newest.roster}
        newcomers = frozenset(name for name, one in up.items() if one.phase == "newcomer" and name not in newest.roster)
        silent = frozenset(name for name in newest.roster if name in up and name not in heard)
        if not (heard or (newcomers and not silent)) or len(silent) > state.budget.faults:
            return
        record = formed(self.rule, number, newest, state.heard, newcomers, silent)
        after = state._replace(
            records=(*state.records, record), budget=state.budget._replace(faults=state.budget.faults - len(silent))
        )
        self.check(after)
        told = f"generation {number + 1} of {record.roster}, fresh {sorted(record.fresh)}, base {record.base}"
        yield Move(told, bool(silent), after)

    # What must hold.

    def check(self, state: State) -> None:
        newest = len(state.records) - 1
        record = state.records[newest]
        held = []
        for worker in state.workers:
            if worker.status == "dead" or worker.history is None or worker.name not in record.roster:
                continue
            if [entry[0] for entry in worker.history] != list(range(1, len(worker.history) + 1)):
                raise Broken("a step was made twice, or left out")
            if worker.generation == newest:
                held.append(worker.history)
            elif worker.name not in record.fresh and len(worker.history) > len(record.base or ()):
                raise Broken("a member of a new generation has gone on in an old one")
        for one, other in itertools.combinations(sorted(held, key=len), 2):
            if other[: len(one)] != one:
                raise Broken("two members of one generation hold different histories")
            if len(other) > len(one) + 1:
                raise Broken("two members of one generation are more than one update apart")

    def is_over(self, state: State) -> bool:
        """All that are left have made every step, each once."""
        up = [worker for worker in state.workers if worker.status == "up"]
        done = [one for one in up if one.phase == "done" and one.generation == len(state.records) - 1]
        return bool(done) and all(one in done or one.phase == "newcomer" for one in up)

    # Ways through it.

    def exhaust(self, look: Callable[[Move], None] = lambda move: None) -> int:
        """How many states there are, each looked at; and from each the run can come to its end without a fault."""
        number, before = {self.first: 0}, list[list[int]]([[]])
        todo, over = deque([self.first]), []
        while todo:
            state = todo.popleft()
            if self.is_over(state):
                over.append(number[state])
            for move in self.moves(state):
                look(move)
                if move.after not in number:
                    number[move.after] = len(number)
                    before.append([])
                    todo.append(move.after)
                if not move.is_fault:
                    before[number[move.after]].append(number[state])
        reached = set(over)
        while over:
            for earlier in before[over.pop()]:
                if earlier not in reached:
                    reached.add(earlier)
                    over.append(earlier)
        # a stopped worker wakes for nobody, and with nobody else up there is nobody to go on
        stuck = [s for s, at in number.items() if at not in reached and any(w.status == "up" for w in s.workers)]
        if stuck:
            raise Broken(f"no end can be reached from {stuck[0]}")
        return len(number)

    def wander(self, dice: random.Random, *, most: int = 600) -> list[str]:
        """One way through, to its end; what happened. Raises Broken with it."""
        state, told = self.first, list[str]()
        try:
            while not self.is_over(state):
                ways = list(self.moves(state))
                if not ways or len(told) > most:
                    raise Broken(f"the run does not end: {state}")
                calm = [way for way in ways if not way.is_fault]
                # faults early and late: with all of them at equal odds most would come before the first step
                way = dice.choice(calm) if calm and dice.random() < 0.85 else dice.choice(ways)
                told.append(way.told)
                state = way.after
        except Broken as broken:
            raise Broken("\n".join([*told, str(broken)])) from None
        return told


def made_of(worker: Worker, entry: tuple[int, int, int, int]) -> Worker:
    """The worker after this update; it needs the gradient of exactly this all-reduce."""
    assert worker.history is not None
    if entry[3] == APPLY and worker.held != entry[:3]:
        raise Broken(f"update {entry} is made from {worker.held}")
    return worker._replace(history=(*worker.history, entry))


# A rule less. Each of these takes the place of `decide`.


def _voters(newest: Record, reports: Mapping[str, Report]) -> dict[str, Report]:
    return {name: one for name, one in reports.items() if name in newest.roster and one.generation == newest.generation}


def without_the_longest_base(
    newest: Record, reports: Mapping[str, Report], newcomers: Collection[str], *, order: Mapping[str, int]
) -> Record:
    """The step that not everybody has seen the end of is computed anew: all hold what the last of them holds."""
    record = decide(newest, reports, newcomers, order=order)
    held = [one.lineage for one in _voters(newest, reports).values() if one.lineage is not None]
    holders = {name for name, one in _voters(newest, reports).items() if one.lineage is not None}
    base = min(held, key=lambda state: state.step, default=None)
    return replace(record, base=base, last=None, fresh=frozenset(record.roster) - holders)


def without_the_verdict(newest: Record, *rest: Any, **options: Any) -> Record:
    """That the commit was seen means: apply."""
    record = decide(newest, *rest, **options)
    return record if record.last is None else replace(record, last=replace(record.last, verdict=APPLY))


def without_the_step_of_a_skip(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """A step that was skipped is none: nobody is behind."""
    cut = {
        name: replace(one, lineage=lineage(HISTORIES[one.lineage][:-1]), last=None)
        if one.last is not None and one.last.verdict is SKIP and one.lineage is not None else one
        for name, one in reports.items()
    }  # fmt: skip
    return decide(newest, cut, *rest, **options)


def without_a_report(
    newest: Record, reports: Mapping[str, Report], *rest: Any, silent: Collection[str] = "AB", **options: Any
) -> Record:
    """Who is alive has a place, and is taken to hold what the others hold."""
    record = decide(newest, reports, *rest, **options)
    roster = sorted({*record.roster, *(set(silent) & set(newest.roster))}, key=options["order"].__getitem__)
    return replace(record, roster=tuple(roster), costs=(None,) * len(roster))


def without_the_tag(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Any gradient of the step will do."""
    held = [one for one in _voters(newest, reports).values() if one.lineage is not None]
    last = max(held, key=lambda one: one.lineage.step if one.lineage else 0, default=Report("", 0)).last
    alike = {
        name: replace(one, gradient=last.tag) if last and one.gradient and one.gradient.step == last.tag.step else one
        for name, one in reports.items()
    }
    return decide(newest, alike, *rest, **options)


def without_the_gradient(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Who is one update behind is taken to hold its gradient."""
    record = decide(newest, reports, *rest, **options)
    behind = {
        name for name, one in _voters(newest, reports).items()
        if one.lineage is not None and record.base is not None and one.lineage.step + 1 == record.base.step
    }  # fmt: skip
    return replace(record, fresh=record.fresh - behind)


def without_the_history(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """The number of a step says which state it is."""
    record = decide(newest, reports, *rest, **options)
    return replace(record, fresh=record.fresh - {
        name for name, one in _voters(newest, reports).items()
        if one.lineage and record.base and record.base.step - 1 == one.lineage.step
        and one.gradient and one.gradient.step == record.base.step
    })  # fmt: skip


def without_the_generation(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """A report to an older generation counts as well."""
    late = {name: replace(one, generation=newest.generation) for name, one in reports.items()}
    return decide(newest, late, *rest, **options)


def without_the_roster(
    newest: Record, reports: Mapping[str, Report], newcomers: Collection[str], *, order: Mapping[str, int]
) -> Record:
    """Whoever reports has a vote and a place, also one that woke from an older generation."""
    everybody = replace(newest, roster=tuple(sorted({*newest.roster, *reports}, key=order.__getitem__)))
    late = {name: replace(one, generation=newest.generation) for name, one in reports.items()}
    return decide(everybody, late, newcomers, order=order)


def without_incarnations(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """A process that was started again is taken for the one before it; so it holds what the others hold."""
    record = decide(newest, reports, *rest, **options)
    return record if record.base is None else replace(record, fresh=record.fresh & set(_voters(newest, reports)))


def without_the_whole_state(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Half of a state is a state."""
    record = decide(newest, reports, *rest, **options)
    return replace(record, fresh=record.fresh - {name for name in newest.fresh if name in reports})


def without_anybody_fresh(newest: Record, *rest: Any, **options: Any) -> Record:
    """All have what they need."""
    return replace(decide(newest, *rest, **options), fresh=frozenset())


def without_survivors(newest: Record, *rest: Any, **options: Any) -> Record:
    """Everybody goes back to the newest checkpoint."""
    record = decide(newest, *rest, **options)
    return replace(record, base=None, last=None, fresh=frozenset(record.roster))


def without_the_order_of_slots(newest: Record, *rest: Any, **options: Any) -> Record:
    """Ranks come in the order in which they are heard of."""
    record = decide(newest, *rest, **options)
    return replace(record, roster=record.roster[::-1])


def without_a_word_of_splits(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Of two states of one length the first is taken."""
    try:
        return decide(newest, reports, *rest, **options)
    except SplitBrainError:
        first = max((one for one in reports.values() if one.lineage), key=lambda one: one.lineage.step)  # type: ignore[union-attr]
        return decide(newest, {first.incarnation: first}, *rest, **options)


def and_with_outsiders(rule: Rule) -> Rule:
    """The rule, and whoever reports has a vote."""

    def both(newest: Record, reports: Mapping[str, Report], newcomers: Collection[str], **options: Any) -> Record:
        everybody = tuple(sorted({*newest.roster, *reports}, key=options["order"].__getitem__))
        late = {name: replace(one, generation=newest.generation) for name, one in reports.items()}
        return rule(replace(newest, roster=everybody), late, newcomers, **options)

    return both


def without_parts(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Who holds a part of a state holds it."""
    return decide(newest, {name: replace(one, part=None) for name, one in reports.items()}, *rest, **options)


def without_the_cut(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Parts are added up, whichever generation has cut them."""
    try:
        return decide(newest, {name: replace(one, cut=0) for name, one in reports.items()}, *rest, **options)
    except SplitBrainError:  # more than all
        return decide(newest, reports, *rest, **options)


def without_small_parts(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """If an owner is lost, so is the state, though it owned nothing."""
    record = decide(newest, reports, *rest, **options)
    if set(newest.roster) <= set(record.roster):
        return record
    return replace(record, base=None, last=None, fresh=frozenset(record.roster), lost="something")


NEEDS_THE_SILENT: set[Rule] = {without_a_report}


# What the search finds.


@pytest.mark.parametrize(
    ("workers", "steps", "budget", "least"),
    [
        (2, 2, Budget(faults=1, restarts=1), 2000),
        (2, 2, Budget(faults=0, non_finite=1, redo=1), 100),
        (3, 1, Budget(faults=1), 5000),
        pytest.param(2, 2, Budget(faults=2, restarts=1), 50_000, marks=pytest.mark.slow),
        pytest.param(2, 2, Budget(faults=1, restarts=1, non_finite=1, redo=1), 30_000, marks=pytest.mark.slow),
        pytest.param(3, 2, Budget(faults=1, restarts=1), 20_000, marks=pytest.mark.slow),
        pytest.param(3, 1, Budget(faults=2), 200_000, marks=pytest.mark.nightly),
    ],
)
def test_no_order_of_events_doubles_or_loses_an_update_or_leaves_no_way_on(
    workers: int, steps: int, budget: Budget, least: int
) -> None:
    assert Search(workers=workers, steps=steps, budget=budget).exhaust() > least


@pytest.mark.parametrize(
    "walks", [60, pytest.param(600, marks=pytest.mark.slow), pytest.param(3000, marks=pytest.mark.nightly)]
)
def test_long_histories_with_many_faults_end_with_every_step_made_once(walks: int) -> None:
    told = collections.Counter[str]()
    for seed in range(walks):
        budget = Budget(faults=3, restarts=2, non_finite=1, redo=1)
        for event in Search(workers=2 + seed % 3, steps=3, budget=budget).wander(random.Random(seed)):
            told.update(event.split())
    words = ("dies", "stopped", "wakes", "freezes", "enters", "REDO", "SKIP", "given", "loads")
    assert [word for word in words if told[word] < walks / 10] == [], "or they would not have been where faults are"


@pytest.mark.parametrize(
    ("workers", "steps", "budget", "least"),
    [
        (2, 2, Budget(faults=1, restarts=1), 1000),
        (3, 1, Budget(faults=1), 5000),
        (2, 1, Budget(faults=2, restarts=1), 5000),
        pytest.param(2, 2, Budget(faults=2, restarts=1), 50_000, marks=pytest.mark.slow),
        pytest.param(3, 1, Budget(faults=1, restarts=1), 10_000, marks=pytest.mark.slow),
        pytest.param(3, 1, Budget(faults=2), 200_000, marks=pytest.mark.nightly),
    ],
)
def test_owners_may_die_at_every_point_and_a_base_is_whole_or_taken_back(
    workers: int, steps: int, budget: Budget, least: int
) -> None:
    """`formed` sees that it is never lost while those who hold it have all of it, `_hand_over` that they have."""
    told = set[str]()
    search = Search(workers=workers, steps=steps, budget=budget, has_owners=True)
    assert search.exhaust(lambda move: told.add(move.told.partition(" ")[2])) > least
    assert {"dies", "loads the checkpoint", "has its part", "drops its old part"} <= told
    if budget.faults > 1:  # one opens the round in which the other one strikes
        assert {"freezes while forming", "freezes while handed"} <= told


@pytest.mark.parametrize(
    "walks", [100, pytest.param(1000, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.nightly)]
)
def test_long_histories_with_owners_end_with_every_step_made_once(walks: int) -> None:
    told = collections.Counter[str]()
    for seed in range(walks):
        budget = Budget(faults=3, restarts=2, non_finite=1, redo=1)
        search = Search(workers=2 + seed % 3, steps=3, budget=budget, has_owners=True)
        told.update(word for event in search.wander(random.Random(seed)) for word in event.split())
    words = ("dies", "stopped", "wakes", "freezes", "enters", "REDO", "SKIP", "drops", "loads", "forming")
    assert [word for word in words if told[word] < walks / 10] == []


def test_who_joins_costs_nobody_a_step() -> None:
    search = Search(workers=3, steps=3, budget=Budget(faults=0))
    newcomer = Worker("2.1", phase="newcomer", history=None)
    members = Formed(("0.0", "1.0"), ())
    search.first = search.first._replace(workers=(*search.first.workers[:2], newcomer), records=(members,))
    told = set[str]()
    search.exhaust(lambda move: told.add(move.told.partition(" ")[2]))
    assert {"freezes while committing", "enters generation 1 without a state"} <= told
    assert "freezes while reducing" not in told, "a gradient would be lost"


MUTANTS = [
    without_the_longest_base, without_the_verdict, without_the_step_of_a_skip, without_a_report, without_the_tag,
    without_the_gradient, without_the_history, without_the_generation, without_the_roster, without_incarnations,
    without_anybody_fresh, without_survivors, without_the_order_of_slots, without_parts, without_the_cut,
    without_small_parts,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_one_of_its_rules_some_story_ends_otherwise(mutant: Rule) -> None:
    assert all(story.is_told_by(decide) for story in STORIES.values())
    assert not all(story.is_told_by(mutant) for story in STORIES.values())


def test_without_a_word_a_split_goes_on() -> None:
    reports = {"A": made("A", ONE), "B": made("B", SKIPPED)}
    assert without_a_word_of_splits(Record(0, ("A", "B")), reports, order=ORDER).base in map(lineage, (ONE, SKIPPED))


@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        (without_the_longest_base, "is forgotten"),
        (without_the_verdict, "come to the base"),
        (without_the_step_of_a_skip, "is forgotten"),
        (without_a_report, "gone on in an old one"),
        (without_incarnations, "holds no state"),
        (without_the_whole_state, "holds no state"),
        (without_anybody_fresh, "holds no state"),
        (without_survivors, "is forgotten"),
        (without_the_roster, "holds no state"),
        (without_the_generation, "does not end"),
        # these two do harm only where outsiders have a vote
        (and_with_outsiders(without_the_history), "come to the base"),
        (and_with_outsiders(without_the_gradient), "come to the base"),
    ],
    ids=lambda value: getattr(value, "__qualname__", value).partition(".")[0],
)
def test_without_one_of_its_rules_a_history_goes_wrong(mutant: Rule, what: str) -> None:
    def goes_wrong(seed: int) -> bool:
        budget = Budget(faults=2, restarts=1, non_finite=1)
        try:
            Search(mutant, workers=2 + seed % 2, steps=2, budget=budget).wander(random.Random(seed), most=150)
        except Broken as broken:
            return what in str(broken).splitlines()[-1]
        return False

    assert any(goes_wrong(seed) for seed in range(500))


@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        (without_parts, "in nobody's hands"),
        (without_the_cut, "in nobody's hands"),
        (without_small_parts, "is forgotten"),
    ],
)
def test_without_one_of_the_rules_of_parts_a_history_goes_wrong(mutant: Rule, what: str) -> None:
    def goes_wrong(seed: int) -> bool:
        search = Search(mutant, workers=2 + seed % 2, steps=2, budget=Budget(faults=2, restarts=1), has_owners=True)
        try:
            search.wander(random.Random(seed), most=150)
        except Broken as broken:
            return what in str(broken).splitlines()[-1]
        return False

    assert any(goes_wrong(seed) for seed in range(1000))
