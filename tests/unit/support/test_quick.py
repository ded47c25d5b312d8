"""Which tests `make quick` runs for a change: by the distance of imports, and no others."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import quick

SOURCES = {
    "hetseq/__init__.py": "if TYPE_CHECKING:\n    from hetseq.run.build import Job",
    "hetseq/run/__init__.py": "",
    "hetseq/run/build.py": "from hetseq.data import plan",
    "hetseq/data/__init__.py": "",
    "hetseq/data/plan.py": "import math",
    "hetseq/registry.py": 'HOMES = {"mnist": "hetseq.tasks.mnist:MNIST"}',
    "tasks/mnist.py": "import hetseq",
    "bench/rows.py": "import figures",
    "bench/figures.py": "",
    "tests/conftest.py": "from tests.support import police",
    "tests/support/police.py": "",
    "tests/unit/test_plan.py": "from hetseq.data.plan import Planner",
    "tests/unit/test_build.py": "from hetseq.run import build",
    "tests/unit/test_registry.py": "from hetseq import registry",
    "tests/unit/test_patched.py": 'monkeypatch.setattr("hetseq.data.plan.Planner", None)',
    "tests/unit/test_rows.py": 'script("rows")',
    "tests/unit/test_docs.py": 'pages = ROOT / "docs"',
    "tests/unit/test_house.py": 'page = ROOT / "docs" / "house.md"',
    "tests/distributed/test_ranks.py": "from ..unit import test_plan\nfrom hetseq.data import plan",
    "tests/end_to_end/test_run.py": "from hetseq.data import plan",
}


def names(*changed: str) -> list[str]:
    return [Path(path).stem for path in quick.nearest(changed, SOURCES)]


def test_the_nearest_tests_come_first_and_whole_commands_not_at_all() -> None:
    assert names("hetseq/data/plan.py") == ["test_patched", "test_plan", "test_ranks", "test_build"]
    assert names("hetseq/run/build.py") == ["test_build"]
    assert names("tests/end_to_end/test_run.py") == ["test_run"]


def test_a_module_that_is_imported_by_its_name_is_reached() -> None:
    assert names("tasks/mnist.py") == ["test_registry"]
    assert names("bench/figures.py") == ["test_rows"]


def test_a_change_of_what_all_tests_stand_on_reaches_all_tests_but_those_of_commands() -> None:
    assert len(names("tests/support/police.py")) == 8


def test_a_page_is_tested_by_the_tests_that_name_it_and_then_by_those_that_name_its_folder() -> None:
    assert names("docs/house.md") == ["test_house", "test_docs"]
    assert names("docs/other.md") == ["test_docs", "test_house"]


def test_a_module_that_was_deleted_reaches_the_tests_that_still_name_it() -> None:
    without = {path: source for path, source in SOURCES.items() if path != "hetseq/data/plan.py"}
    assert [Path(path).stem for path in quick.nearest(["hetseq/data/plan.py"], without)] == [
        "test_patched",
        "test_plan",
    ]


def test_an_import_for_type_checkers_is_none() -> None:
    assert "hetseq/__init__.py" not in quick.importers(SOURCES)["hetseq/run/build.py"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from . import plan", ["hetseq.data", "hetseq.data.plan"]),
        ("from ..run.build import Job", ["hetseq.run.build"]),
        ("import hetseq.data.plan as p", ["hetseq.data.plan"]),
        ("from hetseq.data.plan import Planner", ["hetseq.data.plan"]),
        ('preload(["hetseq.run.build"])', ["hetseq.run.build"]),
        ('"a word"', []),
    ],
)
def test_imports_are_found_in_every_form(source: str, found: list[str]) -> None:
    known = ["hetseq.data", "hetseq.data.plan", "hetseq.run.build"]
    assert list(quick.imported(ast.parse(source), "hetseq.data", known)) == found


@pytest.mark.nightly
def test_every_module_of_the_project_is_known_by_the_name_that_others_import() -> None:
    sources = quick.read_tree()
    by = quick.importers(sources)
    assert "hetseq/cli.py" in by["hetseq/errors.py"]
    assert "tests/unit/support/test_quick.py" in by["tests/quick.py"]
    assert any(path.startswith("bench/") for path in by["bench/figures.py"])


def test_time_that_is_over_ends_the_session_and_the_rest_is_listed() -> None:
    items = [SimpleNamespace(nodeid=name, path=quick.ROOT / f"{name}.py") for name in ("a", "b", "c")]
    session: Any = SimpleNamespace(items=items, shouldstop=False)
    for deadline_s, stops in ((float("inf"), False), (0.0, True)):
        session.shouldstop = False
        watch = quick.Deadline(deadline_s)
        watch.pytest_collection_finish(session)
        watch.pytest_runtest_logfinish("a")
        assert bool(session.shouldstop) is stops
        assert watch.left() == ["b.py", "c.py"]
