"""Nodes with `--shard-model all`: they join, leave on request and keep run directories of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DONE, EXIT_STOPPED
from hetseq.monitor.metrics import read_events, read_rows
from tests.chaos import runs
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, Stock
from tests.support.places import tcp
from tests.support.watched import LAYERS, write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEPS, CURVE = 100, 1e-11


def losses(run: Path) -> dict[int, float]:
    if not (run / "metrics.jsonl").exists():
        return {}
    return {row["step"]: row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row}


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of one device."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        task = write_task(nodes.folder / "watched", computing=1, has_layers=True)
        nodes.start(*runs.words(nodes.folder / "run", ranks=1, steps=STEPS, task=task))
        (ended,) = nodes.finish()
        assert ended.code == EXIT_DONE, ended.err
        return losses(nodes.folder / "run")
    finally:
        nodes.close()


class Course:
    """The nodes of one run, of one rank each, which has a run directory on each of them."""

    def __init__(self, nodes: Nodes, **options: object) -> None:
        self.nodes = nodes
        task = write_task(nodes.folder / "watched", computing=1, has_layers=True)
        base = runs.words(
            nodes.folder, ranks=1, steps=STEPS, task=task, shard_model="all", shard_modules=LAYERS,
            check_replicas_every=5, balance="equal", **options,
        )  # fmt: skip
        place = base.index("--distributed-world-size")
        base = [*base[:place], *base[place + 2 :]]  # given out where nodes join
        self.words = [*base, "--throttle", "0:30,1:30,2:30", "--join", tcp().url, "--min-ranks", 1]

    def start(self, name: str) -> Node:
        return self.nodes.start(*self.words, "--ranks", 1, "--save-dir", self.nodes.folder / name)

    def step(self, name: str) -> int:
        return max(losses(self.nodes.folder / name), default=0)

    def wait_for(self, name: str, step: int) -> None:
        self.nodes.wait_until(lambda: self.step(name) >= step, f"step {step}")

    def generations(self, name: str) -> list[list[int]]:
        path = self.nodes.folder / name / "events.jsonl"
        events = read_events(path) if path.exists() else []
        return [event["ranks"] for event in events if event["event"] == "generation"]


def check(course: Course, name: str, calm: dict[int, float]) -> None:
    mine = losses(course.nodes.folder / name)
    assert mine.keys() == calm.keys(), course.nodes.story()
    worst = max(abs(mine[step] - calm[step]) / abs(calm[step]) for step in mine)
    assert worst <= CURVE, f"{worst:.1e}"


@pytest.mark.parametrize("own", nightly("2,1,0", "auto"))
def test_a_node_joins_and_an_owner_leaves_on_request(nodes: Nodes, calm: dict[int, float], own: str) -> None:
    course = Course(nodes, own=own)
    head = course.start("a")
    course.wait_for("a", 3)
    owner = course.start("b")
    nodes.wait_until(lambda: [0, 1] in course.generations("a"), "the second node trains")
    third = course.start("c")
    nodes.wait_until(lambda: [0, 1, 2] in course.generations("a"), "the third node trains")
    course.wait_for("a", course.step("a") + 7)  # they have compared
    owner.signal(signal.SIGUSR1)
    (left,) = nodes.finish(owner)
    assert left.code == EXIT_STOPPED, nodes.story()
    assert [ended.code for ended in nodes.finish(head, third)] == [EXIT_DONE] * 2, nodes.story()
    assert course.generations("a")[-1] == [0, 2]
    check(course, "a", calm)


@pytest.mark.nightly
def test_either_run_directory_alone_begins_the_run_again(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, own="2,1", save_interval_updates=10)
    first = course.start("a")
    course.wait_for("a", 3)  # two that start at once begin with one generation, which is no event
    both = first, course.start("b")
    nodes.wait_until(lambda: [0, 1] in course.generations("a"), "both train")
    course.wait_for("a", 40)
    both[0].signal(signal.SIGTERM)  # the hub goes with it, so all stop
    nodes.finish(*both)
    assert all(course.step(name) < STEPS for name in "ab"), nodes.story()
    alone = course.start("b")
    assert [ended.code for ended in nodes.finish(alone)] == [EXIT_DONE], nodes.story()
    check(course, "b", calm)
