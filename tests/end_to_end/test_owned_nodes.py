"""Ranks that own parts of the state, as nodes: nothing is lost when they die, leave, join or never return."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetseq.errors import EXIT_DONE
from tests.support.commands import ROOT
from tests.support.hosts import Host, two_hosts
from tests.support.nodes import Node, Nodes, Process, Stock
from tests.support.trials import until

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(300)]

TASK = ROOT / "tests" / "support" / "toys.py"
WORDS = shlex.split(
    f"--cpu --task {TASK}:TwoTermsAdam --global-batch-size 12 --lr 0.01 --lr-scheduler constant --precision fp64"
    " --disable-validation --no-progress-bar --seed 7 --bucket-cap-mb 0.0001 --check-replicas-every 50"
)
TOLERANCE = 1e-12


@dataclass
class Lab:
    """Two hosts that share no folder but the one where they meet; a warm process in each."""

    hosts: tuple[Host, Host]
    processes: tuple[Process, Process]
    local: Path

    def start(self, nodes: Nodes, at: int, *words: object, own: str = "1") -> Node:
        """A node of one rank; alone if `own` is not given."""
        both = [*WORDS, "--ranks", 1, "--shard-model", "state", "--own", own]
        return nodes.start(*both, *words, "--save-dir", self.run_of(nodes), process=self.processes[at])

    def pair(self, nodes: Nodes, *words: object) -> tuple[Node, Node]:
        """Two nodes of a run in which rank 0, of the node that leads, owns three quarters."""
        (nodes.folder / "meet").mkdir()
        meeting = ["--distributed-init-method", f"file://{nodes.folder}/meet", "--distributed-world-size", 2]
        one = self.start(nodes, 0, *meeting, "--distributed-rank", 0, *words, own="3,1")
        # if the first node of a run leaves, all stop
        until(lambda: any((nodes.folder / "meet").iterdir()), "the first node leads")
        return one, self.start(nodes, 1, *meeting, "--distributed-rank", 1, *words, own="3,1")

    def run_of(self, nodes: Nodes) -> Path:
        return self.local / nodes.folder.name

    def read(self, nodes: Nodes, at: int, name: str) -> str:
        """A file of the run directory of a host; empty if it is not there."""
        try:
            return self.hosts[at].run("cat", str(self.run_of(nodes) / name))
        except AssertionError:
            return ""

    def losses(self, nodes: Nodes, at: int) -> dict[int, float]:
        lines = self.read(nodes, at, "metrics.jsonl").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def status(self, nodes: Nodes, at: int) -> dict[str, Any]:
        text = self.read(nodes, at, f"status/rank-{at}.json")
        told: dict[str, Any] = json.loads(text) if text else {}
        return told


@pytest.fixture(scope="module")
def lab(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with two_hosts(folder) as hosts:
        processes: list[Process] = []
        try:
            for host in hosts:
                processes.append(stock.start({"GLOO_SOCKET_IFNAME": None}, prefix=host.enter))
            yield Lab(hosts, (processes[0], processes[1]), folder / "local")
        finally:
            for process in processes:
                process.close()


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of one device."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        nodes.start(*WORDS, "--ranks", 1, "--save-dir", nodes.folder / "run", "--no-save", "--max-update", 600)
        (ended,) = nodes.finish()
        assert ended.code == EXIT_DONE, ended.err
        rows = map(json.loads, (nodes.folder / "run" / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if "loss" in row}
    finally:
        nodes.close()


def worst(mine: dict[int, float], calm: dict[int, float]) -> float:
    return max(abs(mine[step] - calm[step]) / abs(calm[step]) for step in mine)


@pytest.mark.nightly
@pytest.mark.parametrize("removed", [0, 1])
def test_a_host_that_never_returns_leaves_a_whole_checkpoint_with_the_other(
    nodes: Nodes, lab: Lab, calm: dict[int, float], removed: int
) -> None:
    both = lab.pair(nodes, "--max-update", 40)
    assert [ended.code for ended in nodes.finish(*both)] == [EXIT_DONE] * 2, nodes.story()
    alone = lab.start(nodes, 1 - removed, "--max-update", 50)
    assert [ended.code for ended in nodes.finish(alone)] == [EXIT_DONE], nodes.story()
    mine = lab.losses(nodes, 1 - removed)
    assert mine.keys() == set(range(1, 51))
    assert worst(mine, calm) <= TOLERANCE


@pytest.mark.nightly
def test_an_owner_that_leaves_gives_its_part_to_the_others(nodes: Nodes, lab: Lab, calm: dict[int, float]) -> None:
    leaver = 1
    both = lab.pair(nodes, "--max-update", 600, "--throttle", "0:10,1:10")
    until(lambda: len(lab.losses(nodes, leaver)) > 20, "20 steps")
    name = lab.hosts[leaver].name
    lab.hosts[leaver].run(sys.executable, "-m", "hetseq", "drop", str(lab.run_of(nodes)), name)
    nodes.finish(*both)
    assert [node.code for node in both] == [EXIT_DONE] * 2, nodes.story()
    assert 20 < len(lab.losses(nodes, leaver)) < 600, nodes.story()  # it had gone before the end
    rows = [json.loads(line) for line in lab.read(nodes, 1 - leaver, "metrics.jsonl").splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, 601))  # none was done twice
    assert worst(lab.losses(nodes, 1 - leaver), calm) <= TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_an_owner_that_dies_sends_all_back_to_the_newest_state(
    nodes: Nodes, lab: Lab, calm: dict[int, float], victim: int
) -> None:
    both = lab.pair(nodes, "--max-update", 300, "--save-interval-updates", 10)
    until(lambda: len(lab.losses(nodes, victim)) > 30, "30 steps")
    os.kill(lab.status(nodes, victim)["pid"], signal.SIGKILL)
    nodes.finish(*both, timeout_s=120)
    assert [node.code for node in both] == [EXIT_DONE] * 2, nodes.story()
    for at in (0, 1):
        mine = lab.losses(nodes, at)
        assert mine.keys() == set(range(1, 301))
        assert worst(mine, calm) <= TOLERANCE
