"""Two hosts that share nothing but a directory with caches of 3 s and local locks: runs start there, survive, and end.

They meet in it, and the run directory is in it, each host behind its own mount (`tests/support/lab.py`). `runs` defines
the runs and the comparison. The bar is 20 of 20 runs: `pytest tests/chaos/test_shared_directory.py
--shared-runs 20`; without that option it is one.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetseq.checkpoint.leftover_memory import await_writers
from hetseq.monitor.metrics import read_rows
from hetseq.run_directory import RunDirectory
from hetseq.testing import Faults
from tests.chaos.ground import take_shared_files
from tests.chaos.runs import LOSS_BAR, Outcome, _events, _rows, _tensors, ledger, verdict, words
from tests.support.commands import Command
from tests.support.lab import Lab, shared_lab
from tests.support.nodes import Node, Nodes

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(300)]

SPREAD = (2, 1)  # workers of the two hosts
STEPS = 300
SAVING = ["--no-epoch-checkpoints", "--save-interval-updates", "100"]
PHASES = ("count", "forward_backward", "reduce", "commit", "clip", "optimizer", "boundary")
_WRITERS_S = 60.0  # promised: seconds for which a killed rank's writer may continue


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--shared-runs")))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with shared_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def calm(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run of one process on a disk of its own."""
    nodes = Nodes(lab.stock, tmp_path_factory.mktemp("calm"))
    try:
        lab.start(nodes, 0, *words(nodes.folder / "run", ranks=1, steps=STEPS), *SAVING)
        calm = outcome(nodes, nodes.folder / "run")
    finally:
        nodes.close()
    assert calm.code == 0, calm.said
    return calm


@pytest.fixture
def nodes(lab: Lab, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(lab.stock, tmp_path)
    try:
        yield nodes
    finally:
        nodes.close()
        for config in lab.backing.rglob("config.yaml"):
            directory = RunDirectory(config.parent)
            assert await_writers(directory.run_id, patience_s=_WRITERS_S) == []
            take_shared_files(directory)


def of_host(lab: Lab, at: int, name: str, steps: int = STEPS) -> list[str]:
    """The words of one host's command."""
    meeting = {"distributed_init_method": f"file://{lab.shared}/{name}-meeting", "distributed_gpus": SPREAD[at],
               "distributed_rank": sum(SPREAD[:at])}  # fmt: skip
    return [*words(lab.shared / name, ranks=sum(SPREAD), steps=steps, **meeting), *SAVING]


def wait_for_steps(lab: Lab, nodes: Nodes, name: str, steps: int, *, ranks: int = sum(SPREAD)) -> None:
    """Until the newest row is of such a step, made by so many ranks."""
    rows = lab.backing / name / "metrics.jsonl"

    def look() -> bool:
        newest = read_rows(rows)[-1:] if rows.exists() else []
        return bool(newest) and newest[0]["step"] >= steps and newest[0]["world_size"] == ranks

    nodes.wait_until(look, f"step {steps} of {ranks} ranks", within_s=90)


def kill(nodes: Nodes, *some: Node) -> None:
    """SIGKILL for launchers that were started cold, in one go; nothing is told of them any more."""
    for node in some:
        node.signal(signal.SIGKILL)
    nodes.finish(*some)
    nodes.forget(*some)
    for node in some:
        assert isinstance(node.process, Command)
        node.process.close()


def outcome(nodes: Nodes, run: Path) -> Outcome:
    """What a run has left, once all its nodes have ended."""
    ends = nodes.finish(timeout_s=120)
    return Outcome(max(end.code for end in ends), nodes.story(), _rows(run), _events(run), _tensors(run), 0.0)


def left_in(lab: Lab, name: str) -> list[str]:
    """The leftovers where a run's nodes have met."""
    return sorted(map(str, lab.backing.glob(f"{name}-meeting*")))


def test_a_run_over_a_cached_directory_survives_a_kill(lab: Lab, nodes: Nodes, calm: Outcome, seed: int) -> None:
    chance, name = random.Random(seed), f"kill-{seed}"
    rank, step = chance.randrange(sum(SPREAD)), chance.randint(20, STEPS - 20)
    diary = nodes.folder / "diary"
    faults = Faults().kill(rank=rank).at(step=step, phase=chance.choice(PHASES)).diary(diary)
    for at in chance.sample((0, 1), 2):
        lab.start(nodes, at, *of_host(lab, at, name), faults=faults.text())
    found = outcome(nodes, lab.backing / name)
    assert verdict(found, calm) == ""
    assert diary.read_text().count("\n") == 1, "it was killed"
    assert [event["ranks"] for event in found.events if event["event"] == "generation"][-1] == [0, 1, 2]
    assert left_in(lab, name) == []


@pytest.mark.long
@pytest.mark.fault("FT-2")
@pytest.mark.parametrize("head", [0, 1])
def test_the_head_may_die_and_the_other_host_goes_on(lab: Lab, nodes: Nodes, calm: Outcome, head: int) -> None:
    name, other = f"head-{head}", 1 - head
    leading = lab.start_cold(nodes, head, *of_host(lab, head, name, 1_000_000))
    nodes.wait_until_said(leading, "waiting: ", within_s=60)
    following = lab.start(nodes, other, *of_host(lab, other, name, 1_000_000))
    wait_for_steps(lab, nodes, name, 50)
    kill(nodes, leading)
    wait_for_steps(lab, nodes, name, 100, ranks=SPREAD[other])
    assert "this node is the new head" in following.err, nodes.story()
    again = lab.start(nodes, head, *of_host(lab, head, name, 1_000_000))
    wait_for_steps(lab, nodes, name, STEPS)
    for node in (following, again):
        node.signal(signal.SIGTERM)
    found = outcome(nodes, lab.backing / name)
    assert found.code == 75, found.said
    assert [row["step"] for row in found.rows] == list(range(1, len(found.rows) + 1))
    for row, expected in zip(found.rows, calm.rows, strict=False):
        assert abs(row["loss"] - expected["loss"]) <= LOSS_BAR * abs(expected["loss"]), row["step"]
        assert ledger(row) == ledger(expected)
    assert left_in(lab, name) == []


@pytest.mark.long
@pytest.mark.fault("FT-16")
def test_a_start_goes_past_what_a_dead_run_has_left(lab: Lab, nodes: Nodes, calm: Outcome) -> None:
    name = "dead"
    dead = [lab.start_cold(nodes, at, *of_host(lab, at, name)) for at in (0, 1)]
    wait_for_steps(lab, nodes, name, 120)
    kill(nodes, *dead)
    assert len(_rows(lab.backing / name)) < STEPS
    assert left_in(lab, name), "there is something to go past"
    for at in (1, 0):
        lab.start(nodes, at, *of_host(lab, at, name))
    found = outcome(nodes, lab.backing / name)
    assert verdict(found, calm) == ""
    assert left_in(lab, name) == []
