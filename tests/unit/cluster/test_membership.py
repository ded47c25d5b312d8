"""Who makes up the next generation, and from what it goes on: by stories, by hostile JSON, and by search.

The stories are the rules of docs/design/membership.md and the counterexamples to protocols that lack one. The search
takes a small model of workers (tests/support/membership_model.py) through all interleavings of steps, crashes, stops,
wrong suspicions and restarts, asks the real `decide` for every record, and looks whether an update is ever doubled,
lost or made from a wrong gradient. A `decide` without one of its rules has to be caught by it, or by a story. With
owners every worker of the model holds some elements of the state, cut anew in every generation, and those who hold a
base must have all of it. Images of the state have a file of their own, test_membership_images.py.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.decide import Record, Report, SplitBrainError, Tag, Update, decide
from hetseq.cluster.membership.step_commit import Lineage
from tests.support.membership_model import (
    APPLY,
    HISTORIES,
    NEEDS_THE_SILENT,
    NONE,
    ORDER,
    SKIP,
    Broken,
    Budget,
    Formed,
    History,
    Rule,
    Search,
    Story,
    Worker,
    holds,
    lineage,
    made,
)  # fmt: skip

# Stories. Step 1 is under way or over in generation 0, unless it says otherwise.

ONE: History = ((1, 0, 0, APPLY),)
SKIPPED: History = ((1, 0, 0, SKIP),)
ONE_LATER: History = ((1, 1, 0, APPLY),)
TWO: History = (*ONE, (2, 0, 0, APPLY))
GRADIENT = (1, 0, 0)


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
    "the new parts are all there: who still has one of the old ones keeps it": Story(
        (
            holds("A", ONE, generation=1, part=(8, 8)), holds("B", ONE, generation=1, part=(4, 8), cut=0),
            holds("C", ONE, generation=1, part=(0, 8), cut=0),
        ),
        "ABC", ONE, newest=Record(1, ("A", "B", "C"), lineage(NONE)),
    ),
    # A and B are one group, and C is another one, with a cut of its own
    "a group has lost a rank, and the other one is whole: all that are left keep what they have": Story(
        (made("A", ONE, part=(5, 8), cut=16), made("C", ONE, part=(8, 8), cut=17)),
        "ACD", ONE, fresh="D", last=ONE, newcomers="D",
    ),
    "a group of which one rank holds only the gradient is whole after the update": Story(
        (made("A", ONE, part=(5, 8), cut=16), holds("B", NONE, GRADIENT, part=(3, 8), cut=16)), "AB", ONE, last=ONE
    ),
    "the whole group has the gradient of the update that the other one has made without it": Story(
        (made("A", ONE, part=(5, 8), cut=16), holds("C", NONE, GRADIENT, part=(8, 8), cut=17)), "AC", ONE, last=ONE
    ),
    "a group without the gradient of an update that a whole group has made is given the state": Story(
        (
            holds("A", NONE, part=(5, 8), cut=16), holds("B", NONE, GRADIENT, part=(3, 8), cut=16),
            made("C", ONE, part=(8, 8), cut=17),
        ),
        "ABC", ONE, fresh="A", last=ONE,
    ),
    "the whole group lacks an update of which the other one has only a part": Story(
        (made("A", ONE, part=(6, 8), cut=16), holds("C", NONE, part=(8, 8), cut=17)),
        "AC", None, fresh="AC", lost="ranks 1 and 2 owned 25 % of the state, and no other rank holds it",
    ),
    "a group is whole only with a newcomer, who brings nothing": Story(
        (made("A", ONE, part=(6, 8), cut=16),), "AD", None, fresh="AD", newcomers="D",
        lost="ranks 1 and 2 owned 25 % of the state, and no other rank holds it",
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


def without_the_other_cuts(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """Only the parts of the cut that is whole count; who has one of another cut is given the state again."""
    record = decide(newest, reports, *rest, **options)
    if record.base is None or record.image:
        return record
    donors = [reports[name] for name in record.donors]
    owned = collections.Counter[int]()
    for one in donors:
        owned[one.cut_by] += one.part[0] if one.part else 0
    best = max(owned, key=lambda cut: (owned[cut], cut))
    others = {one.incarnation for one in donors if one.part and one.part[0] and one.cut_by != best}
    return replace(record, fresh=record.fresh | others)


def without_small_parts(newest: Record, reports: Mapping[str, Report], *rest: Any, **options: Any) -> Record:
    """If an owner is lost, so is the state, though it owned nothing."""
    record = decide(newest, reports, *rest, **options)
    if set(newest.roster) <= set(record.roster):
        return record
    return replace(record, base=None, last=None, fresh=frozenset(record.roster), lost="something")


NEEDS_THE_SILENT.add(without_a_report)


# What the search finds.


@pytest.mark.parametrize(
    ("workers", "steps", "budget", "least"),
    [
        (2, 2, Budget(faults=1, restarts=1), 2000),
        (2, 2, Budget(faults=0, non_finite=1, redo=1), 100),
        (3, 1, Budget(faults=1), 5000),
        pytest.param(2, 2, Budget(faults=2, restarts=1), 50_000, marks=pytest.mark.nightly),
        pytest.param(2, 2, Budget(faults=1, restarts=1, non_finite=1, redo=1), 30_000, marks=pytest.mark.slow),
        pytest.param(3, 2, Budget(faults=1, restarts=1), 20_000, marks=pytest.mark.slow),
        pytest.param(3, 1, Budget(faults=2), 200_000, marks=pytest.mark.nightly),
    ],
)
def test_no_order_of_events_doubles_or_loses_an_update_or_leaves_no_way_on(
    workers: int, steps: int, budget: Budget, least: int
) -> None:
    assert Search(workers=workers, steps=steps, budget=budget).exhaust() > least


@pytest.mark.parametrize("walks", [60, pytest.param(3000, marks=pytest.mark.nightly)])
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
        pytest.param(2, 2, Budget(faults=2, restarts=1), 50_000, marks=pytest.mark.nightly),
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


@pytest.mark.parametrize("walks", [100, pytest.param(5000, marks=pytest.mark.nightly)])
def test_long_histories_with_owners_end_with_every_step_made_once(walks: int) -> None:
    told = collections.Counter[str]()
    for seed in range(walks):
        budget = Budget(faults=3, restarts=2, non_finite=1, redo=1)
        search = Search(workers=2 + seed % 3, steps=3, budget=budget, has_owners=True)
        told.update(word for event in search.wander(random.Random(seed)) for word in event.split())
    words = ("dies", "stopped", "wakes", "freezes", "enters", "REDO", "SKIP", "drops", "loads", "forming")
    assert [word for word in words if told[word] < walks / 10] == []


@pytest.mark.parametrize(
    ("workers", "budget", "least"),
    [
        (2, Budget(faults=1, restarts=1), 1000),
        (3, Budget(faults=1), 5000),
        pytest.param(3, Budget(faults=1, restarts=1), 10_000, marks=pytest.mark.slow),
        pytest.param(3, Budget(faults=2), 200_000, marks=pytest.mark.nightly),
        pytest.param(4, Budget(faults=1), 100_000, marks=pytest.mark.nightly),
    ],
)
def test_two_groups_of_owners_may_die_at_every_point_and_no_holder_is_given_what_it_has(
    workers: int, budget: Budget, least: int
) -> None:
    told = set[str]()
    search = Search(workers=workers, steps=1, budget=budget, has_owners=True, groups=2)
    assert search.exhaust(lambda move: told.add(move.told.partition(" ")[2])) > least
    assert {"dies", "has its part", "drops its old part"} <= told
    assert "loads the checkpoint" not in told or budget.faults > 1, "the other group is whole"


@pytest.mark.parametrize("walks", [100, pytest.param(2000, marks=pytest.mark.nightly)])
def test_long_histories_with_two_groups_end_with_every_step_made_once(walks: int) -> None:
    told = collections.Counter[str]()
    for seed in range(walks):
        budget = Budget(faults=3, restarts=2, non_finite=1, redo=1)
        search = Search(workers=3 + seed % 2, steps=3, budget=budget, has_owners=True, groups=2)
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
    without_the_other_cuts, without_small_parts,
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
        (without_the_other_cuts, "given again what it holds"),
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
