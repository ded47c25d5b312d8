"""For tests of command lines: a launcher that stays warm, so that many commands cost little more than their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hetseq.checkpoint.leftover_memory import Remains
from hetseq.errors import HetSeqError
from hetseq.run_directory import RunDirectory
from tests.support import forked
from tests.support.commands import WarmLauncher
from tests.support.nodes import Nodes, Stock
from tests.support.refusals import TWO, train


@pytest.fixture(autouse=True)
def forgotten_memory(tmp_path: Path) -> Iterator[None]:
    """What killed runs have left in shared memory goes with the test, as it would with their next start."""
    yield
    for config in tmp_path.rglob("config.yaml"):
        with suppress(HetSeqError):
            Remains(RunDirectory(config.parent).run_id, config.parent).close(remove=True)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmLauncher]:
    """A launcher that has imported everything, and whose server of workers runs."""
    launcher = WarmLauncher()
    try:
        train(launcher, tmp_path_factory.mktemp("warm"), "--data", "/nowhere", *TWO)
        yield launcher
    finally:
        launcher.close()


FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`figure(text)`: a line for the end of the output of pytest, where `.ci/run` shows it."""
    return request.config.stash.setdefault(FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if figures := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.write_line(line)


STOCK = pytest.StashKey[Stock]()


@pytest.fixture(scope="session")
def stock(request: pytest.FixtureRequest) -> Iterator[Stock]:
    """Warm processes for the launchers of several nodes."""
    request.session.stash[STOCK] = stock = Stock()
    try:
        yield stock
    finally:
        stock.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Complete the stock, before any fixture looks what there is."""
    if "stock" in getattr(item, "fixturenames", ()) and STOCK in item.session.stash:
        item.session.stash[STOCK].mend()


@pytest.fixture
def nodes(stock: Stock, tmp_path: Path) -> Iterator[Nodes]:
    """The launchers of this test, each as if it were a node of its own."""
    nodes = Nodes(stock, tmp_path)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def no_imports() -> None:
    """Commands with `is_cold=False` begin after their imports; the server that forks them belongs to no test."""
    forked.warm_up()
