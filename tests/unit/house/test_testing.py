"""Schedules of faults: each is a value that prints itself, chance draws them, and the product has the points they name.

What a fault does when it happens is in `test_faults`.
"""

from __future__ import annotations

import ast
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetseq.system import faults
from hetseq.system.faults import ENDING, KINDS, LASTING, PHASES, STEP_PHASES, Fault
from hetseq.testing import Faults, random_faults

ROOT = Path(__file__).resolve().parents[3]


# The schedule as a value.

LONG = (
    Faults()
    .kill(rank=1)
    .at(step=4, phase="reduce")
    .stop(rank=2, seconds=3)
    .at(step=6, phase="commit", nth=2, incarnation=1)
    .stop(rank=0, seconds=math.inf)
    .at(phase="rename")
    .raise_(rank=0)
    .at(step=0, phase="loading")
)


def test_a_schedule_prints_the_expression_that_makes_it() -> None:
    schedule = LONG.diary("a b/di'ary")
    assert repr(schedule) == (
        "Faults().kill(rank=1).at(step=4, phase='reduce')"
        ".stop(rank=2, seconds=3).at(step=6, phase='commit', nth=2, incarnation=1)"
        ".stop(rank=0, seconds=float('inf')).at(phase='rename')"
        ".raise_(rank=0).at(step=0, phase='loading')"
        """.diary("a b/di'ary")"""
    )
    assert eval(repr(schedule)) == schedule
    assert eval(repr(Faults())) == Faults()
    assert eval(repr(LONG)) != schedule


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_method_and_survives_the_text(kind: str) -> None:
    schedule = Faults((Fault(kind, 3, "commit", 5, seconds=1.5 if kind in LASTING else None),))
    assert eval(repr(schedule)) == schedule
    assert Faults.parse(schedule.text()) == schedule


def test_the_text_is_the_same_for_equal_schedules_and_another_for_others() -> None:
    assert LONG.diary("x").text() == (
        '{"diary":"x","faults":['
        '{"incarnation":0,"kind":"kill","nth":1,"phase":"reduce","slot":1,"step":4},'
        '{"incarnation":1,"kind":"stop","nth":2,"phase":"commit","seconds":3.0,"slot":2,"step":6},'
        '{"incarnation":0,"kind":"stop","nth":1,"phase":"rename","seconds":null,"slot":0,"step":null},'
        '{"incarnation":0,"kind":"raise","nth":1,"phase":"loading","slot":0,"step":0}]}'
    )
    assert Faults.parse(LONG.text()) == LONG
    assert Faults.parse(LONG.text()).text() == LONG.text()
    assert Faults.parse("") == Faults.parse(" \n") == Faults.parse(Faults().text()) == Faults()
    one, other = Faults().sleep(rank=0, seconds=1), Faults().sleep(rank=0, seconds=1.0)
    assert one.at(phase="count").text() == other.at(phase="count").text()
    assert one.at(phase="count").text() != one.at(phase="count", nth=2).text()


def test_what_a_schedule_leaves_out_goes_without_saying() -> None:
    brief = '{"faults": [{"kind": "kill", "slot": 1, "phase": "reduce"}]}'
    assert Faults.parse(brief) == Faults().kill(rank=1).at(phase="reduce")


def test_the_environment_of_a_command_holds_the_text() -> None:
    assert LONG.environment() == {"HETSEQ_FAULTS": LONG.text()}


def test_no_call_changes_a_schedule() -> None:
    short = Faults().kill(rank=1).at(step=4, phase="reduce")
    before = short.text()
    short.kill(rank=2).at(step=5, phase="commit")
    short.diary("elsewhere")
    assert short.text() == before
    with pytest.raises(AttributeError):
        short.diary_path = "elsewhere"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Faults().kill(rank=1).at(step=4, phase="backward"),
            "'backward' is not a phase; known are loading, co",
        ),
        (lambda: Faults().kill(rank=-1).at(step=4, phase="reduce"), "rank (its slot) is a whole number of at least 0"),
        (lambda: Faults().kill(rank=True).at(step=4, phase="reduce"), "not True"),
        (lambda: Faults().kill(rank=1).at(step=-1, phase="reduce"), "step is a whole number of at least 0, not -1"),
        (lambda: Faults().kill(rank=1).at(step=1.5, phase="reduce"), "step is a whole number of at least 0, not 1.5"),
        (lambda: Faults().kill(rank=1).at(phase="reduce", nth=0), "nth is a whole number of at least 1, not 0"),
        (lambda: Faults().kill(rank=1).at(phase="reduce", incarnation=-1), "incarnation is a whole number of at lea"),
        (lambda: Faults().stop(rank=1).at(phase="reduce"), "stop needs seconds: how long it lasts, or infinity"),
        (lambda: Faults().sleep(rank=1).at(phase="reduce"), "sleep needs seconds: how long it lasts"),
        (lambda: Faults().hog(rank=1).at(phase="reduce"), "hog needs seconds: how long it lasts"),
        (lambda: Faults().hog(rank=1, seconds=math.inf).at(phase="reduce"), "hog lasts for a finite number of seconds"),
        (lambda: Faults().sleep(rank=1, seconds=0).at(phase="reduce"), "sleep lasts for a number of seconds above 0"),
        (lambda: Faults().sleep(rank=1, seconds=math.nan).at(phase="reduce"), "above 0, not nan"),
        (lambda: Faults().sleep(rank=1, seconds="3").at(phase="reduce"), "above 0, not '3'"),
        (lambda: Faults().sleep(rank=1, seconds=True).at(phase="reduce"), "above 0, not True"),
        (lambda: Faults((Fault("kill", 1, "reduce", seconds=3.0),)), "kill takes no seconds, and was given 3.0"),
        (lambda: Faults((Fault("murder", 1, "reduce"),)), "'murder' is not a kind of fault; known are kill, segv"),
        (lambda: Faults().diary(""), "a diary is the path of a file, not ''"),
        (lambda: Faults.parse("kill rank 1"), "a schedule of faults must be JSON, and this is not"),
        (lambda: Faults.parse("[]"), "a schedule of faults must be a JSON object, not []"),
        (lambda: Faults.parse("{}"), "a schedule of faults lacks faults"),
        (lambda: Faults.parse('{"faults": {}}'), "the faults of a schedule must be a list, not {}"),
        (lambda: Faults.parse('{"faults": [], "diary": 3}'), "the diary of a schedule must be a path, not 3"),
        (lambda: Faults.parse('{"faults": [], "dairy": "x"}'), "has dairy, which is unknown; known are diary"),
        (lambda: Faults.parse('{"faults": [7]}'), "a fault must be a JSON object, not 7"),
        (lambda: Faults.parse('{"faults": [{"kind": "kill", "slot": 1}]}'), "a fault lacks phase"),
        (lambda: Faults.parse('{"faults": [{"kind": [], "slot": 1, "phase": "join"}]}'), "[] is not a kind of fault"),
        (
            lambda: Faults.parse('{"faults": [{"kind": "stop", "slot": 1, "phase": "join"}]}'),
            "stop needs seconds",
        ),
        (
            lambda: Faults.parse('{"faults": [{"kind": "hog", "slot": 1, "phase": "join", "seconds": null}]}'),
            "hog needs seconds",
        ),
        (
            lambda: Faults.parse('{"faults": [{"kind": "kill", "rank": 1, "slot": 1, "phase": "join"}]}'),
            "a fault has rank, which is unknown; known are kind, slot, phase",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        make()
    assert words in str(refusal.value)


def test_a_process_that_is_given_a_bad_schedule_refuses_it() -> None:
    with pytest.raises(ValueError, match="'backward' is not a phase"):
        faults.arm('{"faults": [{"kind": "kill", "slot": 7, "phase": "backward"}]}', slot=1, incarnation=0)


# By chance.

CHOICES: dict[str, Any] = {
    "ranks": range(4),
    "steps": range(2, 30),
    "phases": ("count", "reduce", "commit", "regroup"),
    "kinds": ("kill", "stop", "term"),
}


def test_faults_by_chance_depend_on_the_arguments_alone() -> None:
    random_state = random.getstate()
    once = random_faults(7, count=20, **CHOICES)
    assert random_faults(7, count=20, **CHOICES) == once
    assert random_faults(8, count=20, **CHOICES) != once
    assert random.getstate() == random_state
    # this text is for ever: a seed that failed on one machine is replayed on another
    assert repr(random_faults(7, count=3, **CHOICES)) == (
        "Faults().term(rank=0).at(step=5, phase='count').term(rank=2).at(step=8, phase='count')"
        ".stop(rank=2, seconds=1.0).at(step=22, phase='reduce', incarnation=1)"
    )


def test_faults_by_chance_are_what_was_asked_for_and_in_different_places() -> None:
    drawn = random_faults(3, count=60, seconds=0.5, **CHOICES).faults
    assert len({(fault.slot, fault.phase, fault.step) for fault in drawn}) == 60
    assert {fault.slot for fault in drawn} == {0, 1, 2, 3}
    assert {fault.phase for fault in drawn} == set(CHOICES["phases"])
    assert {fault.kind for fault in drawn} == set(CHOICES["kinds"])
    assert {fault.step for fault in drawn} <= {None, *range(2, 30)}
    assert all((fault.step is None) == (fault.phase == "regroup") for fault in drawn)
    assert all(fault.seconds == (0.5 if fault.kind == "stop" else None) for fault in drawn)


def test_faults_by_chance_come_in_the_order_of_their_steps() -> None:
    drawn = random_faults(3, count=40, **{**CHOICES, "phases": ("loading", "reduce", "count", "regroup")}).faults
    times = [0 if fault.phase == "loading" else fault.step or 99 for fault in drawn]
    order = [(time, PHASES.index(fault.phase), fault.slot) for time, fault in zip(times, drawn)]
    assert order == sorted(order)
    assert (times[0], times[-1]) == (0, 99)
    assert len(set(times)) < len({place[:2] for place in order}) < len(order)  # there was something to sort


def test_a_rank_that_was_ended_by_chance_meets_the_next_fault_as_its_next_incarnation() -> None:
    ended: Counter[int] = Counter()
    drawn = random_faults(5, count=30, **{**CHOICES, "phases": ("loading", "reduce", "regroup")}).faults
    for fault in drawn:
        if fault.phase == "regroup":  # whenever that is
            assert fault.incarnation == 0
            continue
        assert fault.incarnation == ended[fault.slot]
        ended[fault.slot] += fault.kind in ENDING
    assert max(ended.values()) > 2
    assert {fault.kind for fault in drawn} == {"kill", "stop", "term"}


def test_every_place_can_be_drawn_and_no_more() -> None:
    few: dict[str, Any] = {"ranks": (0, 1), "steps": (3, 4), "phases": ("reduce", "regroup"), "kinds": ("kill",)}
    assert len(random_faults(1, count=6, **few).faults) == 6
    assert random_faults(1, count=0, **few) == Faults()
    with pytest.raises(ValueError, match="7 faults in different places, but there are only 6"):
        random_faults(1, count=7, **few)
    with pytest.raises(ValueError, match="7 faults in different places, but there are only 6"):
        random_faults(1, count=7, **{name: (*choices, *choices) for name, choices in few.items()})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks": ()}, "no ranks to choose from"),
        ({"steps": ()}, "no steps to choose from"),
        ({"phases": ()}, "no phases to choose from"),
        ({"kinds": ()}, "no kinds to choose from"),
        ({"ranks": [0] * 99 + [-1]}, "rank is a whole number of at least 0, not -1"),
        ({"steps": [4] * 99 + [-1]}, "step is a whole number of at least 0, not -1"),
        ({"phases": ["reduce"] * 99 + ["backward"]}, "'backward' is not a phase"),
        ({"kinds": ["kill"] * 99 + ["murder"]}, "'murder' is not a kind of fault"),
        ({"count": -1}, "count is a whole number of at least 0, not -1"),
        ({"kinds": ("stop",), "seconds": -1.0}, "stop lasts for a number of seconds above 0"),
    ],
)
def test_choices_that_cannot_be_meant_are_refused_even_if_chance_would_pass_them_by(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        random_faults(1, **{**CHOICES, "count": 1, **changed})
    assert words in str(refusal.value)


# The points in the product, by its syntax trees.


def points(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Line and phase of every `faults.point("...")`; None for a phase that is not written down there.

    A name that hides the call from this search, such as `from hetseq.system.faults import point`, is told as None too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("faults.point", "hetseq.system.faults.point"):
            (phase, *others) = [*node.args, *node.keywords] or [None]
            is_plain = isinstance(phase, ast.Constant) and isinstance(phase.value, str) and not others
            yield node.lineno, phase.value if is_plain else None  # type: ignore[union-attr]
        if isinstance(node, ast.ImportFrom) and node.module == "hetseq.system.faults":
            yield from ((node.lineno, None) for alias in node.names if alias.name == "point")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {f"{getattr(node, 'module', '')}.{alias.name}".strip("."): alias.asname for alias in node.names}
            if names.get("hetseq.system.faults"):
                yield node.lineno, None


def points_of_the_product() -> list[tuple[str, int, str | None]]:
    return [
        (path.relative_to(ROOT).as_posix(), line, phase)
        for path in sorted((ROOT / "hetseq").rglob("*.py"))
        if "faults" in (source := path.read_text())  # to parse all of them takes a second
        for line, phase in points(ast.parse(source))
    ]


def test_every_point_in_the_product_names_a_phase() -> None:
    assert [point for point in points_of_the_product() if point[2] not in PHASES] == []


def test_every_phase_has_a_point_in_the_product() -> None:
    assert set(PHASES) - {phase for _, _, phase in points_of_the_product()} == set()


def test_a_point_is_seen_and_so_is_one_that_hides() -> None:
    def seen(source: str) -> list[str | None]:
        return [phase for _, phase in points(ast.parse(source))]

    assert seen("from hetseq.system import faults\nfaults.point('reduce')\nfaults.point('typo')") == ["reduce", "typo"]
    assert seen("import hetseq.system.faults\nhetseq.system.faults.point('reduce')") == ["reduce"]
    assert seen("faults.point(name)\nfaults.point(phase='reduce')\nfaults.point()\nfaults.point(3)") == [None] * 4
    assert seen("from hetseq.system.faults import point\npoint('reduce')") == [None]
    assert seen("from hetseq.system import faults as f\nf.point('reduce')") == [None]
    assert seen("import hetseq.system.faults as f\nf.point('reduce')") == [None]
    assert seen("from hetseq.comm import group as f\nshape.point('reduce')\nfaults.at_step(3)") == []


def test_the_words_of_phases_and_kinds_are_said_once_each() -> None:
    assert len(set(PHASES)) == len(PHASES) == 23
    assert len(set(KINDS)) == len(KINDS) == 9
    assert set(STEP_PHASES) < set(PHASES)
