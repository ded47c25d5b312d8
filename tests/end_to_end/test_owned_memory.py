"""A model that does not fit as a whole into the memory of a small node: it trains where another node owns more of it.

A node with a limit lives in a memory cgroup (version 1), in which the kernel kills what exceeds it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DONE
from hetseq.monitor.metrics import read_rows
from tests.support.commands import ROOT
from tests.support.nodes import TRAIN, Node, Nodes, Process, Stock
from tests.support.places import directory
from tests.support.trials import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONTROLLER = Path("/sys/fs/cgroup/memory")
#: for a model of 40 M parameters, beside what an idle node takes: with all of the state it takes 882 MiB at its peak,
#: with a quarter 668 MiB (whole parameters, a quarter of the moments and sums, gradients under way, and 200 MiB of
#: libraries and activations)
ROOM_BYTES = 775 << 20
WORDS = shlex.split(
    f"--cpu --task {ROOT / 'bench' / 'random_tokens.py'}:Large --global-batch-size 4 --batch-size 2 --max-update 3"
    " --lr 1e-4 --lr-scheduler constant --disable-validation --no-save --memory-interval-updates 0 --no-progress-bar"
    " --noise-scale-every 0 --balance 1,1 --ranks 1"
)


@dataclass
class LimitedNode:
    """A cgroup, and a warm process in it, or none."""

    process: Process | None
    cgroup: Path

    def allow(self, more_bytes: int) -> None:
        """Set the limit to so many bytes more than are used now, of which no page belongs to a file."""
        (self.cgroup / "memory.force_empty").write_text("0")
        self._file("limit_in_bytes").write_text(str(int(self._file("usage_in_bytes").read_text()) + more_bytes))

    def limit(self, bytes_: int) -> None:
        """Set the limit to so many bytes in all."""
        (self.cgroup / "memory.force_empty").write_text("0")
        self._file("limit_in_bytes").write_text(str(bytes_))

    def most_bytes(self) -> int:
        """The most that were used at once."""
        return int(self._file("max_usage_in_bytes").read_text())

    def kills(self) -> int:
        """How often the kernel has killed a process because memory ran out."""
        counted = dict(line.split() for line in self._file("oom_control").read_text().splitlines())
        return int(counted["oom_kill"])

    def _file(self, name: str) -> Path:
        return self.cgroup / f"memory.{name}"


@pytest.fixture(scope="module")
def cgroups() -> Iterator[list[Path]]:
    """Two memory cgroups of this module."""
    made: list[Path] = []
    try:
        for number in range(2):
            folder = CONTROLLER / f"hetseq-test-{os.getpid()}-{number}"
            try:
                folder.mkdir()
            except OSError as error:
                pytest.skip(f"no memory cgroups of version 1 that this user may make: {error}")
            made.append(folder)
        yield made
    finally:
        until(lambda: not any((folder / "cgroup.procs").read_text() for folder in made), "an end of all processes")
        for folder in made:
            folder.rmdir()


def inside(cgroup: Path) -> tuple[str, ...]:
    """The words before a command that start it in that cgroup."""
    return ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh")


def free(cgroup: Path) -> None:
    """Let the cgroup use any amount."""
    (cgroup / "memory.limit_in_bytes").write_text("-1")


@pytest.fixture
def small(stock: Stock, cgroups: list[Path]) -> Iterator[LimitedNode]:
    """A node with a process of its own, since one that was killed serves no other test."""
    process = stock.start(prefix=inside(cgroups[0]))
    try:
        yield LimitedNode(process, cgroups[0])
    finally:
        process.close()
        free(cgroups[0])


def start(nodes: Nodes, small: LimitedNode, *words: object) -> tuple[Node, Node]:
    """Two nodes of a rank each; the second one is the small one."""
    meeting = ["--distributed-init-method", directory(nodes.folder).url, "--distributed-world-size", 2]
    one = nodes.start(*WORDS, *meeting, "--distributed-rank", 0, *words, "--save-dir", "run")
    other = nodes.start(
        *WORDS, *meeting, "--distributed-rank", 1, "--max-restarts", 0, *words, "--save-dir", "run",
        process=small.process,
    )  # fmt: skip
    return one, other


def test_a_model_whose_replica_does_not_fit_trains_where_another_node_owns_most_of_it(
    nodes: Nodes, small: LimitedNode
) -> None:
    small.allow(ROOM_BYTES)
    start(nodes, small, "--shard-model", "state", "--own", "3,1")
    one, other = nodes.finish(timeout_s=60)
    assert [one.code, other.code] == [EXIT_DONE, EXIT_DONE], nodes.story()
    rows = read_rows(nodes.folder / "node0" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["shares"] == [2, 2] for row in rows)


def test_the_same_model_as_a_replica_is_killed_there(nodes: Nodes, small: LimitedNode) -> None:
    small.allow(ROOM_BYTES)
    start(nodes, small)
    one, other = nodes.finish(timeout_s=60)
    assert small.kills() == 1, nodes.story()
    assert "rank 1 is not started again" in other.err, nodes.story()
    assert "was killed (SIGKILL, as the kernel does when memory runs out)" in one.err, nodes.story()


#: parameters of `random_tokens.Deep`, which the test checks
DEEP = 456_709_632
LIMITS = (16 * DEEP, 16 * DEEP // 3)


@pytest.mark.nightly  # a larger size of the first one
def test_a_model_three_times_as_large_as_the_memory_of_a_node_trains_where_another_has_three_times_as_much(
    nodes: Nodes, cgroups: list[Path]
) -> None:
    limited = [LimitedNode(None, cgroup) for cgroup in cgroups]
    before = [node.kills() for node in limited]
    words = [str(word).replace(":Large", ":Deep") for word in WORDS]
    words += ["--distributed-init-method", directory(nodes.folder).url, "--distributed-world-size", "2"]
    words += ["--shard-model", "auto", "--delayed-init", "--save-dir", "run", "--max-restarts", "0"]
    for rank, (node, bytes_) in enumerate(zip(limited, LIMITS, strict=True)):
        node.limit(bytes_)
        # from its first instruction: its launcher counts too
        nodes.start(*words, "--distributed-rank", rank, cold=True, program=(*inside(node.cgroup), *TRAIN))
    try:
        one, other = nodes.finish(timeout_s=150)
    finally:
        for cgroup in cgroups:
            free(cgroup)
    used = [f"{node.most_bytes() / bytes_:.3f}" for node, bytes_ in zip(limited, LIMITS, strict=True)]
    story = f"{nodes.story()}\n{' and '.join(used)} of the limits"
    assert [one.code, other.code] == [EXIT_DONE, EXIT_DONE], story
    assert [node.kills() for node in limited] == before, story
    assert f"{DEEP:,} parameters" in one.err, story
    assert re.search("--shard-model auto: all, which leaves .*; none does not fit: .*; state does not fit: ", one.err)
    rows = read_rows(nodes.folder / "node0" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["shares"] == [2, 2] for row in rows)
