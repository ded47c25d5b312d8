"""--data-by-host with one launcher per host: refused without the option, and a host that goes is waited for."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DISAGREE, EXIT_STOPPED
from hetseq.monitor.metrics import read_rows
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, Stock
from tests.support.parts import TASK, write_parts
from tests.support.places import directory

pytestmark = pytest.mark.slow

WORDS = shlex.split(
    "--cpu --global-batch-size 12 --optimizer sgd --lr 0.05 --lr-scheduler constant --clip-norm 0 --precision fp64"
    " --disable-validation --min-ranks 2 --ranks 1"
)
EVEN, ODD = range(0, 18, 2), [*range(1, 18, 2), *range(18, 25)]
STEPS = 600


class Hosts:
    """Two launchers in one shared directory, each with its part of the data."""

    def __init__(self, nodes: Nodes, *words: object) -> None:
        self.nodes, self.run = nodes, nodes.folder / "run"
        self.parts = write_parts(nodes.folder / "parts", EVEN, ODD)
        self.words = [*WORDS, "--task", TASK, "--join", directory(nodes.folder).url, "--save-dir", self.run, *words]

    def start(self, *parts: int) -> list[Node]:
        return [self.nodes.start(*self.words, "--data", self.parts[part]) for part in parts]

    def start_in_order(self) -> list[Node]:
        """The first one leads."""
        first = self.start(0)[0]
        self.nodes.wait_until_said(first, "waiting: 1 of 2 ranks are here")
        return [first, *self.start(1)]

    def losses(self) -> list[float]:
        return [row["loss"] for row in read_rows(self.run / "metrics.jsonl")]

    def wait_for_steps(self, count: int) -> None:
        path = self.run / "metrics.jsonl"
        self.nodes.wait_until(lambda: path.exists() and len(self.losses()) >= count, f"{count} steps")


def test_other_files_on_another_host_are_refused_and_the_option_is_named(nodes: Nodes) -> None:
    hosts = Hosts(nodes, "--max-update", 3)
    hosts.start(0, 1)
    for ended in nodes.finish():
        assert ended.code == EXIT_DISAGREE, nodes.story()
        for word in ("length of train: ", "9 samples on rank", "16 samples on rank", "give --data-by-host"):
            assert word in ended.message, nodes.story()


@pytest.mark.parametrize("gone", [0, *nightly(1)], ids=["head", "other"])
def test_a_host_that_comes_back_brings_its_data_and_the_curve_is_the_same(
    gone: int, nodes: Nodes, stock: Stock, tmp_path: Path
) -> None:
    hosts = Hosts(nodes, "--data-by-host", "--max-update", STEPS, "--no-save")
    killed = hosts.start_in_order()[gone]
    hosts.wait_for_steps(20)
    killed.signal(signal.SIGKILL)
    nodes.forget(killed)
    hosts.start(gone)
    ends = nodes.finish()
    assert [ended.code for ended in ends] == [0, 0], nodes.story()
    (tmp_path / "calm").mkdir()
    calm = Nodes(stock, tmp_path / "calm")
    try:
        whole = Hosts(calm, "--data-by-host", "--max-update", STEPS, "--no-save")
        whole.start_in_order()
        first, _ = calm.finish()
        for said in ("rank 0 reads 9 of the 25 training samples, 36.0 % of every step", "the order is per host"):
            assert said in first.err, first.err
        assert "a start without it" not in first.err, "nobody can be done without"
        pairs = zip(hosts.losses(), whole.losses(), strict=True)
        assert max(abs(mine - right) for mine, right in pairs) <= 1e-12
    finally:
        calm.close()


@pytest.mark.nightly
def test_without_a_hosts_data_the_others_save_and_stop(nodes: Nodes) -> None:
    nodes.prepare(2)
    hosts = Hosts(nodes, "--data-by-host", "--max-update", 10**6, "--join-timeout", 8, "--num-workers", 1)
    first, second = hosts.start(0, 1)
    hosts.wait_for_steps(5)
    second.signal(signal.SIGKILL)
    nodes.forget(second)
    (ended,) = nodes.finish(first)
    assert ended.code == EXIT_STOPPED, nodes.story()
    assert "no rank is left that can read 1 of the 2 parts of the training data (16 samples)" in ended.err, (
        nodes.story()
    )
    assert "the same command resumes from step" in ended.message, nodes.story()
