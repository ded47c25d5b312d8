"""A pytest plugin: one line of JSON with the outcome of each test that is marked `fault` or `figure`.

    python -m pytest -m "fault or figure" -p tests.chaos.reporter --shown FILE [--shows NAME]

The line includes values that the test recorded with `record_property`. It imports nothing of HetSeq, as pytest loads
it first.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

MARKERS = ("fault", "figure")
#: what `make test-all`, and so `.ci/run`, leaves out
OUTSIDE_CI = frozenset({"gpu", "long", "nightly"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shown", type=Path, required=True, help="append a line of JSON for each marked test")
    parser.addoption("--shows", help="only tests that are marked with this name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave those out that show something else."""
    wanted = config.getoption("--shows")
    if wanted is not None:
        config.hook.pytest_deselected(items=[item for item in items if wanted not in names(item)])
        items[:] = [item for item in items if wanted in names(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """One line for what a test has come to, once it is known: skipped, failed, or all its parts passed."""
    report = yield
    if names(item) and (report.outcome != "passed" or report.when == "teardown"):
        line = {
            "test": item.nodeid, "shows": names(item), "outcome": report.outcome,
            "is_in_ci": not any(item.get_closest_marker(name) for name in OUTSIDE_CI),
            "said": dict(report.user_properties), "seconds": report.duration,
        }  # fmt: skip
        with item.config.getoption("--shown").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report


def names(item: pytest.Item) -> list[str]:
    """The kinds of fault and the figures that it is marked with."""
    return [name for marker in MARKERS for mark in item.iter_markers(marker) for name in mark.args]
