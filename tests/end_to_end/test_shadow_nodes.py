"""A shadow follows a run without computing; when all ranks that compute are killed, the run goes on from its state."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DONE
from tests.support.nodes import Node, Nodes, Stock
from tests.support.places import tcp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TASK = Path(__file__).parents[1] / "chaos" / "ledger_task.py"
STEPS, TOLERANCE = 120, 1e-11
WORDS = shlex.split(
    f"--cpu --task {TASK}:Ledger --global-batch-size 24 --lr 0.003 --lr-scheduler constant --optimizer adamw"
    f" --weight-decay 0.01 --clip-norm 1 --precision fp64 --disable-validation --no-progress-bar --num-workers 0"
    f" --max-update {STEPS}"
)
SHARDED = ("--shard-model", "state", "--own", "2,1", "--bucket-cap-mb", "0.0001")


class Course:
    """The nodes of one run, which share a run directory."""

    def __init__(self, nodes: Nodes, *words: object) -> None:
        self.nodes, self.save_dir = nodes, nodes.folder / "run"
        self.words = [*WORDS, *words, "--join", tcp().url, "--min-ranks", 1, "--save-dir", self.save_dir]

    def start(self, *words: object) -> Node:
        return self.nodes.start(*self.words, *words)

    def rows(self) -> list[dict[str, float]]:
        try:
            lines = (self.save_dir / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = []
        with suppress(ValueError):  # a line that is being written
            rows.extend(row for row in map(json.loads, lines) if "loss" in row)
        return rows

    def step(self) -> int:
        return max((int(row["step"]) for row in self.rows()), default=0)

    def wait_for(self, step: int) -> None:
        self.nodes.wait_until(lambda: self.step() >= step, f"step {step}")

    def log(self, slot: int) -> str:
        path = self.save_dir / "log" / f"rank-{slot}.txt"
        return path.read_text() if path.exists() else ""

    def pids(self, *slots: int) -> list[int]:
        return [json.loads((self.save_dir / "status" / f"rank-{slot}.json").read_text())["pid"] for slot in slots]

    def kill(self, *slots: int) -> None:
        for pid in self.pids(*slots):
            os.kill(pid, signal.SIGKILL)

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.save_dir / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of one device."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        save_dir = nodes.folder / "run"
        nodes.start(*WORDS, "--ranks", 1, "--save-dir", save_dir, "--no-save")
        (ended,) = nodes.finish()
        assert ended.code == EXIT_DONE, ended.err
        rows = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if "loss" in row}
    finally:
        nodes.close()


def check_curve(course: Course, calm: dict[int, float]) -> None:
    mine = {int(row["step"]): row["loss"] for row in course.rows()}
    assert mine.keys() == calm.keys()
    wrong = [step for step in calm if abs(mine[step] - calm[step]) > TOLERANCE * abs(calm[step])]
    assert not wrong, f"{wrong[:5]}\n{course.nodes.story()}\n{course.log(2)}"
    worst = max(abs(mine[step] - calm[step]) / abs(calm[step]) for step in calm)
    assert worst <= TOLERANCE, f"{worst:.1e}"


@pytest.mark.parametrize("words", [(), SHARDED], ids=["replicas", "owners"])
def test_when_all_ranks_are_killed_the_run_goes_on_from_the_shadow(
    nodes: Nodes, calm: dict[int, float], words: tuple[str, ...]
) -> None:
    course = Course(nodes, "--no-save", "--memory-interval-updates", 0, *words)
    course.start("--ranks", 2)
    course.wait_for(3)
    course.start("--shadow")
    nodes.wait_until(lambda: "got the state after step" in course.log(2), "the shadow has the state")
    course.wait_for(course.step() + 10)
    last = course.step()
    course.kill(0, 1)
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE] * 2, nodes.story()
    check_curve(course, calm)
    taken = next(event for event in course.events() if "takes over" in str(event.get("story")))
    assert int(str(taken["step"])) >= last - 1, f"{taken} {last}\n{course.log(2)}"
    assert "lost" not in taken
