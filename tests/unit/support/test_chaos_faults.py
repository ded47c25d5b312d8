"""Which kinds of fault and which figures the tests show: their marks, and what follows from how they ended."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import __main__ as command
from tests.chaos import fault_kinds, reporter
from tests.chaos.fault_kinds import FAULTS, FIGURES, Shown
from tests.chaos.reporter import MARKERS, OUTSIDE_CI
from tests.chaos.table import Line
from tests.chaos.test_kills import KINDS, KINDS_SHOW, PHASES, PHASES_SHOW

ROOT = Path(__file__).resolve().parents[3]


def marks(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Marker and name of every `pytest.mark.fault("...")`; None for a name that is not written down there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (found := re.fullmatch(r"pytest\.mark\.(\w+)", ast.unparse(node.func))):
            if found[1] not in MARKERS:
                continue
            for name in node.args:
                yield found[1], name.value if isinstance(name, ast.Constant) else None


@functools.cache
def marked() -> frozenset[tuple[str, str | None]]:
    """All marks there are, also those of the schedules, which stand in two lists."""
    found = {("fault", name) for names in (*KINDS_SHOW.values(), *PHASES_SHOW.values()) for name in names}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__) and re.search(r"pytest\.mark\.(fault|figure)\(", source := path.read_text()):
            found |= set(marks(ast.parse(source))) - ({("fault", None)} if path.name == "test_kills.py" else set())
    return frozenset(found)


def test_a_mark_is_seen_and_so_is_one_that_hides() -> None:
    assert list(marks(ast.parse("@pytest.mark.fault('FT-1', 'FT-2')\ndef f(): pass"))) == [
        ("fault", "FT-1"), ("fault", "FT-2"),
    ]  # fmt: skip
    assert list(marks(ast.parse("x = pytest.param(1, marks=[pytest.mark.figure(name)])"))) == [("figure", None)]
    assert list(marks(ast.parse("@pytest.mark.slow\n@pytest.mark.timeout(3)\ndef f(): pass"))) == []


def test_marks_are_known_kinds_and_figures() -> None:
    known = {*(("fault", name) for name in FAULTS), *(("figure", name) for name in FIGURES)}
    assert marked() - known == set()
    assert set(KINDS_SHOW) <= set(KINDS)
    assert set(PHASES_SHOW) <= set(PHASES)


def test_every_kind_and_every_figure_has_its_test() -> None:
    found = marked()
    assert {name for name in FAULTS if ("fault", name) not in found} == set()
    assert {name for name in FIGURES if ("figure", name) not in found} == set()


def test_there_are_22_kinds_each_in_words_of_its_own() -> None:
    assert list(FAULTS) == [f"FT-{number}" for number in range(1, 23)]
    assert len(set(FAULTS.values())) == 22


def test_what_runs_in_ci_is_what_is_not_left_out_there() -> None:
    assert "make --no-print-directory test-all" in (ROOT / ".ci" / "run").read_text().splitlines()
    makefile = (ROOT / "Makefile").read_text()
    (words,) = re.findall(r"^IN_CI := (.*)$", makefile, re.MULTILINE)
    assert {f"not {name}" for name in OUTSIDE_CI} == set(words.split(" and "))
    assert re.findall(r'-m "(.*\(IN_CI\))"', makefile) == ["alone and $(IN_CI)", "not alone and $(IN_CI)"]


def test_ci_runs_the_tests_of_every_folder() -> None:
    (suites,) = re.findall(r"^SUITES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(suites.split()) == folders


# The plugin.


class Item:
    """As much of a test as the plugin looks at."""

    nodeid = "tests/a.py::test_b"

    def __init__(self, shown: Path, *marks: pytest.MarkDecorator) -> None:
        self._marks = [mark.mark for mark in marks]
        self.config = SimpleNamespace(getoption=lambda _: shown)

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self._marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


def told(item: Item, shown: Path, *parts: tuple[str, str]) -> list[Shown]:
    """What is said of a test whose parts ended like this."""
    for when, outcome in parts:
        report = SimpleNamespace(when=when, outcome=outcome, duration=0.1, user_properties=[("orphans", 3)])
        making = reporter.pytest_runtest_makereport(item)  # type: ignore[arg-type]
        next(making)
        with pytest.raises(StopIteration):
            making.send(report)  # type: ignore[arg-type]
    return fault_kinds.read_shown(shown.read_text().splitlines()) if shown.exists() else []


def test_the_plugin_says_how_a_marked_test_has_ended(tmp_path: Path) -> None:
    def after(name: str, *parts: tuple[str, str], marks: Sequence[pytest.MarkDecorator] = ()) -> list[Shown]:
        return told(Item(tmp_path / name, *marks), tmp_path / name, *parts)

    fault, figure, gpu = pytest.mark.fault("FT-1", "FT-2"), pytest.mark.figure("orphans"), pytest.mark.gpu
    well = [("setup", "passed"), ("call", "passed"), ("teardown", "passed")]
    (found,) = after("well", *well, marks=[figure, fault])
    assert found == Shown(Item.nodeid, ("FT-1", "FT-2", "orphans"), "passed", True, {"orphans": "3"})
    (found,) = after("gpu", *well, marks=[fault, gpu])
    assert found.is_in_ci is False
    for number, when in enumerate(("setup", "call", "teardown")):
        (found,) = after(when, *well[:number], (when, "failed"), ("teardown", "passed"), marks=[fault])
        assert found.outcome == "failed"
    (found,) = after("skipped", ("setup", "skipped"), ("teardown", "passed"), marks=[fault])
    assert found.outcome == "skipped"
    assert after("other", *well, marks=[gpu]) == []
    assert after("begun", *well[:2], marks=[fault]) == []


# What follows from a report.


def line(test: str, *shows: str, outcome: str = "passed", is_in_ci: bool = True, **said: str) -> str:
    """A line of the reporter."""
    facts: dict[str, Any] = {"test": test, "shows": shows, "outcome": outcome, "is_in_ci": is_in_ci, "said": said}
    return json.dumps(facts)


def test_a_test_came_to_the_worst_of_its_parts() -> None:
    lines = [line("a", "FT-1", outcome="failed"), line("a", "FT-1"), line("b", "FT-1"), line("c", outcome="skipped")]
    found = fault_kinds.read_shown([*lines, line("b", "FT-1", outcome="failed"), line("c")])
    assert [(shown.test, shown.outcome) for shown in found] == [("a", "failed"), ("b", "failed"), ("c", "skipped")]
    assert found[0].again == 'python -m pytest "a"'


def kinds(*lines: str) -> dict[str, Line]:
    return {line.what.split()[0]: line for line in fault_kinds.of_faults(fault_kinds.read_shown(lines))}


def test_a_kind_is_survived_if_a_test_passed_and_none_failed() -> None:
    found = kinds(
        line("a", "FT-1", "FT-2"), line("b", "FT-2", outcome="skipped"), line("c", "FT-3"),
        line("d", "FT-3", outcome="failed"), line("e", "FT-4", outcome="skipped"), line("f", "FT-5", is_in_ci=False),
    )  # fmt: skip
    holds = {name: line.holds for name, line in found.items() if name.startswith("FT-")}
    assert len(holds) == 22
    assert [name for name, is_survived in holds.items() if is_survived] == ["FT-1", "FT-2", "FT-5"]
    assert found["FT-2"] == Line(f"FT-2 {FAULTS['FT-2']}", "survived", "tests: 1 passed, 1 skipped, in CI", True)
    assert found["FT-3"].measured == "tests: 1 passed, 1 failed"
    assert found["FT-4"].measured == "tests: 1 skipped"
    assert found["FT-5"].measured == "tests: 1 passed"
    assert found["FT-6"].measured == "no test"
    assert found["kinds"] == Line("kinds of fault survived", "22 of 22", "3 of 22", False)
    assert found["of"] == Line("of these in CI", "16", "2", False)


def test_all_kinds_and_16_of_them_in_ci_hold_the_bars() -> None:
    def all_with(in_ci: int) -> dict[str, Line]:
        return kinds(*(line(name, name, is_in_ci=number < in_ci) for number, name in enumerate(FAULTS)))

    assert all(line.holds for line in all_with(16).values())
    assert [name for name, line in all_with(15).items() if not line.holds] == ["of"]
    assert len(fault_kinds.of_faults([], ["FT-7"])) == 1


def test_a_figure_says_what_its_tests_have_measured() -> None:
    name = next(iter(FIGURES))
    said = {"said": {name: "0 of 1,000"}}
    tests = [Shown("a", (name,), "passed", True, **said), Shown("b", (name,), "passed", True, **said)]
    (found,) = fault_kinds.of_figures(tests, [name])
    assert found == Line(name, FIGURES[name], "0 of 1,000; tests: 2 passed", True)
    (found,) = fault_kinds.of_figures([*tests, Shown("c", (name,), "failed", True)], [name])
    assert (found.holds, found.measured) == (False, "0 of 1,000; tests: 2 passed, 1 failed")
    assert [line.holds for line in fault_kinds.of_figures([])] == [False] * len(FIGURES)
    told = {"test": "d", "shows": [name], "outcome": "passed", "is_in_ci": True, "said": {name: 0}}
    assert (
        fault_kinds.of_figures(fault_kinds.read_shown([json.dumps(told)]), [name])[0].measured == "0; tests: 1 passed"
    )


# The command.


def test_the_command_makes_all_sections_unless_told_otherwise() -> None:
    assert command.parse([]).only == ["kills", "phases", "kinds", "detection", "faults", "security"]
    assert command.parse(["--soak", "10"]).only == ["kills"]
    assert command.parse(["--only", "faults", "--case", "FT-11"]).case == "FT-11"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--kills 0", "--kills: expected at least 1"),
        ("--soak 0", "--soak: more than 0"),
        ("--soak 10 --only faults", "leave --only out"),
        ("--case FT-23", "the cases of kills, phases, kinds, detection, faults, security are"),
        ("--only kinds --case FT-1", "the cases of kinds are"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(words.split())
    assert answer in capsys.readouterr().err


def test_the_words_that_repeat_a_case_are_understood() -> None:
    for section, cases in command.CASES.items():
        for case in cases:
            words = command.repeated(section, case)
            assert words.startswith("python -m tests.chaos ")
            again = command.parse(command.shlex.split(words)[3:])
            assert (again.only, again.case) == ([section], case)
