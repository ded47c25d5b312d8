"""A memory server: a node that computes nothing and owns all of the state, beside nodes that own nothing."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hetseq.errors import EXIT_DONE, EXIT_STOPPED
from hetseq.monitor.metrics import read_events, read_rows
from hetseq.testing import Faults
from tests.chaos import runs
from tests.support.nodes import Node, Nodes, Stock
from tests.support.places import tcp
from tests.support.watched import read_computed, write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEPS, CURVE = 100, 1e-12
MODEL_BYTES = 8 * 321
SERVER = ["--shard-model", "state", "--own", "0,0,1", "--balance", "3,1,0", "--bucket-cap-mb", "0.0001"]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row}


def worst(mine: dict[int, float], calm: dict[int, float]) -> float:
    """The largest difference of two curves; all steps of the second are in the first."""
    return max(abs(mine[step] - right) / abs(right) for step, right in calm.items())


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of one device."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        nodes.start(*runs.words(nodes.folder / "run", ranks=1, steps=STEPS))
        (ended,) = nodes.finish()
        assert ended.code == EXIT_DONE, ended.err
        return losses(nodes.folder / "run")
    finally:
        nodes.close()


def start(nodes: Nodes, *words: object, faults: tuple[Faults, ...] = (Faults(),) * 3) -> list[Node]:
    """Three nodes of one rank each, the last of which is the server."""
    task, url = write_task(nodes.folder / "watched", computing=2), tcp().url
    meeting = [["--distributed-init-method", url, "--ranks", 1, "--distributed-rank", rank] for rank in range(3)]
    base = runs.words(nodes.folder / "run", ranks=3, steps=STEPS, task=task)
    return [
        nodes.start(*base, *SERVER, *words, *own, environment=each.environment())
        for own, each in zip(meeting, faults, strict=True)
    ]


def test_computing_nodes_and_a_server_of_the_state_have_the_curve_of_one_device(
    nodes: Nodes, calm: dict[int, float]
) -> None:
    start(nodes)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 3, nodes.story()
    run = nodes.folder / "run"
    rows = read_rows(run / "metrics.jsonl")
    assert {tuple(row["shares"]) for row in rows if row["samples"] == 24} == {(18, 6, 0)}
    assert losses(run).keys() == calm.keys()
    assert worst(losses(run), calm) <= CURVE
    # each computing rank sends all gradients and gets all parameters; the server has the sums and two moments of AdamW
    later = rows[1]["ranks"]
    assert later["owned_bytes"][:2] == [0, 0]
    assert later["owned_bytes"][2] >= 3 * MODEL_BYTES
    assert later["sent_bytes"] == later["received_bytes"] == [MODEL_BYTES, MODEL_BYTES, 2 * MODEL_BYTES]


def test_a_computing_node_that_is_killed_beside_a_server_costs_one_step(nodes: Nodes, calm: dict[int, float]) -> None:
    kill = Faults().kill(rank=1).at(step=20, phase="reduce")
    start(nodes, faults=(Faults(), kill, Faults()))
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 3, nodes.story()
    run = nodes.folder / "run"
    generations = [event for event in read_events(run / "events.jsonl") if event["event"] == "generation"]
    assert generations[0]["step"] == 19
    assert generations[0]["story"].startswith("rank 1 on ")
    assert "was killed (SIGKILL" in generations[0]["story"]
    assert generations[-1]["ranks"] == [0, 1, 2], nodes.story()
    assert "is back" in generations[-1]["story"]
    assert {event["state_bytes"] for event in generations} == {0}
    assert not any("lost" in event for event in generations)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert losses(run).keys() == calm.keys()
    assert worst(losses(run), calm) <= CURVE
    computed = read_computed(nodes.folder / "watched")
    assert len(computed) == 3, "two computing ranks and a replacement"
    most = max(len(forwards) for one in computed for forwards in one.lives)
    assert most in (STEPS, STEPS + 1), "rank 0 is the same process, and has begun one step twice at most"


class Meeting:
    """A run that nodes of one rank join; slow, since a launcher waits for 5 s whether other nodes want to leave too."""

    def __init__(self, nodes: Nodes, *words: object) -> None:
        self._nodes, self.run = nodes, nodes.folder / "run"
        task = write_task(nodes.folder / "watched", computing=4, pace_s=0.25)  # there is no fourth rank
        base: list[object] = [*runs.words(self.run, ranks=1, steps=100_000, task=task, shard_model="state")]
        at = base.index("--distributed-world-size")
        del base[at : at + 2]  # --join gives the ranks
        meeting = ["--join", tcp().url, "--min-ranks", 2, "--bucket-cap-mb", "0.0001", "--no-epoch-checkpoints"]
        self._words = [*base, *meeting, *words]
        self.first = nodes.start(*self._words)
        nodes.wait_until_said(self.first, "waiting: ")
        self.second = nodes.start(*self._words)
        self.wait_for_steps(2)
        self.third = nodes.start(*self._words)
        self.joined = self.wait_for_steps(3)

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return list(read_rows(path)) if path.exists() else []

    def wait_for_steps(self, world_size: int) -> int:
        """The number of the newest step, once there are three of so many ranks."""

        def look() -> bool:
            return [row["world_size"] for row in self.rows()[-3:]] == [world_size] * 3

        self._nodes.wait_until(look, f"three steps of {world_size} ranks")
        return int(self.rows()[-1]["step"])

    def stop(self, *others: Node) -> None:
        self.first.signal(signal.SIGTERM)
        assert {ended.code for ended in self._nodes.finish(self.first, *others)} == {EXIT_STOPPED}, self._nodes.story()

    def check(self, calm: dict[int, float]) -> None:
        """Each step was made once, as one device makes it."""
        made = losses(self.run)
        assert [row["step"] for row in self.rows()] == list(range(1, len(made) + 1))
        assert self.joined < len(made) <= STEPS
        assert worst(made, {step: calm[step] for step in made}) <= CURVE

    def generations(self) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run / "events.jsonl") if event["event"] == "generation"]


def test_a_node_that_joins_owns_nothing_by_itself(nodes: Nodes, calm: dict[int, float]) -> None:
    meeting = Meeting(nodes, "--own", "auto", "--balance", "3,2,1")
    meeting.stop(meeting.second, meeting.third)
    (joining,) = meeting.generations()
    assert (joining["ranks"], joining["state_bytes"]) == ([0, 1, 2], 0)
    *given, none = meeting.rows()[-1]["ranks"]["owned_bytes"]
    assert (min(given) > 0, none) == (True, 0)
    meeting.check(calm)


def test_a_node_that_joins_takes_a_part_and_an_owner_that_leaves_gives_its_part_away(
    nodes: Nodes, calm: dict[int, float]
) -> None:
    meeting = Meeting(nodes, "--own", "6,2,1", "--balance", "3,2,1")
    meeting.second.signal(signal.SIGUSR1)
    (left,) = nodes.finish(meeting.second, timeout_s=30)
    assert left.code == EXIT_STOPPED, nodes.story()
    meeting.wait_for_steps(2)
    meeting.stop(meeting.third)
    first, last = meeting.generations()
    assert (first["ranks"], last["ranks"]) == ([0, 1, 2], [0, 2])
    assert 0 < first["state_bytes"] < 2 * MODEL_BYTES, "moments, of what changed hands alone"
    saved = [event["step"] for event in read_events(meeting.run / "events.jsonl") if event["event"] == "save"]
    assert last["step"] == saved[0], "the part of the leaving rank was saved with its last step"
    meeting.check(calm)
