"""Fixtures of all tests: the leak check (`police`), the warm server of the ranks, and data that is not committed.

It imports no torch, so tests that need no torch begin at once.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.support import ranks
from tests.support.police import Scene, adopt_orphans, own_shared_memory

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shared-runs", type=int, default=1, help="runs over a cached directory; the bar is 20 of 20")


def pytest_configure() -> None:
    # of a torch that is imported later: tests fork this process, and a child waits for ever for threads it lacks
    os.environ["OMP_NUM_THREADS"] = "1"
    adopt_orphans()
    own_shared_memory()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live to the end: garbage collection skips them, now and in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process first, several ranks next, command lines last: the cheapest tests fail first."""
    folders = ["unit", "distributed", "end_to_end"]
    items.sort(key=lambda item: next((at for at, name in enumerate(folders) if name in item.path.parts), len(folders)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server of the ranks import torch while the tests of one process run."""
    if not session.config.option.collectonly and any("distributed" in item.path.parts for item in session.items):
        ranks.warm_up()


def pytest_sessionfinish() -> None:
    ranks.cool_down()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaks a thread, a process, an environment variable, a process group or shared memory."""
    scene = Scene.now()
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)  # the log of a rank lets INFO through, and the next test may count records
    leaks = scene.leaks()
    if leaks:
        scene.restore()
        pytest.fail("this test left something behind:\n" + "\n".join(f"  {leak}" for leak in leaks), pytrace=False)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """`shared_data("text/books")`: a folder of real data, or the test is skipped.

    Looked for in the folder that HETSEQ_TEST_DATA names, else in ../shared/data beside the repository.
    """
    root = Path(os.environ.get("HETSEQ_TEST_DATA") or ROOT.parent / "shared" / "data")

    def folder(name: str) -> Path:
        path = root / name
        if not path.is_dir():
            pytest.skip(f"no folder {name} in HETSEQ_TEST_DATA or ../shared/data")
        return path

    return folder


@pytest.fixture(scope="session")
def mnist_data(shared_data: Callable[[str], Path]) -> Path:
    """The folder with the four genuine MNIST files, `train-images-idx3-ubyte.gz` and so on."""
    folder = shared_data("mnist")
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        if not list(folder.glob(f"{name}-ubyte*")):
            pytest.skip(f"no {name}-ubyte(.gz) in the mnist folder")
    return folder
