"""Streams as lanes: each record once and the course of one rank, whatever stops, dies or changes in between."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import hetseq
from hetseq.monitor.report.compare import compare
from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, run_command, start_command
from tests.support.nightly import nightly
from tests.support.own_loops import Course, courses, farthest, run_script

pytestmark = pytest.mark.slow

STREAM = ROOT / "tests" / "support" / "loops" / "stream.py"
LENGTH, BATCH, EPOCH = 640, 16, 40
WORLDS = {1: "1", 2: "3,1", 3: "5,2,2", 4: "1,2,1,3"}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@dataclass
class Life:
    """One start of the run: its ranks, its loader processes, and what happens until it ends."""

    ranks: int
    workers: int
    events: list[str] = field(default_factory=list)


def schedule(count: int, seed: int, steps: int) -> list[Life]:
    """`count` stops, deaths and changes of the world, at random; the last life comes to the end."""
    draw = random.Random(seed)
    lives = [Life(3, 0)]
    for number in range(count):
        step = (number + 1) * steps // (count + 1)
        kind = draw.choice(["body", "after", "kill", "stop"]) if lives[-1].ranks > 1 else draw.choice(["kill", "stop"])
        rank = draw.randrange(lives[-1].ranks) if kind in ("body", "after") else 0
        lives[-1].events.append(f"{kind}:{step}:{rank}")
        if kind in ("kill", "stop"):
            other = draw.choice([ranks for ranks in WORLDS if ranks != lives[-1].ranks])
            lives.append(Life(other, draw.choice([0, 1])))
    return lives


def live(folder: Path, life: Life, events: str, env: Mapping[str, str]) -> tuple[int, str]:
    """One start; its exit code and what it said."""
    words = ["run", "--cpu", "--ranks", str(life.ranks), "--balance", WORLDS[life.ranks], "--num-workers",
             str(life.workers), "--precision", "fp64", "--save-interval-updates", "3", "--save-dir",
             str(folder / "run"), str(STREAM), str(folder), events]  # fmt: skip
    (folder / "launcher").unlink(missing_ok=True)
    with start_command(words, env=env, program=HETSEQ, is_cold=False) as command:
        (folder / "launcher").write_text(str(command.pid))
        finished = command.finish(timeout_s=120)
    return finished.code, finished.err


def calm(folder: Path, ranks: int, **env: str) -> Course:
    """The course of a run in which nothing happens."""
    code, err = live(folder, Life(ranks, 0), "", env)
    assert code == 0, err
    return courses(folder)[0]


def read(folder: Path) -> int:
    """The records read, by all processes together."""
    return sum(path.stat().st_size for path in folder.glob("read-*"))


def ledger(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ledger.json").read_text())
    return found


@pytest.mark.parametrize("window", [*nightly("1"), "6"])
def test_unequal_ranks_give_the_course_of_one_and_read_few_records_twice(window: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    alone = calm(tmp_path / "one", 1, LOOP_WINDOW=window)
    assert farthest(alone, calm(tmp_path / "three", 3, LOOP_WINDOW=window)) <= 1e-12
    for folder, ranks in ((tmp_path / "one", 1), (tmp_path / "three", 3)):
        found = ledger(folder)
        assert found["times"] == [1.0] * LENGTH, "each record once"
        assert found["numbers"] == (LENGTH - 1) / 2, "also in an evaluation"
        # training, the evaluation on each rank, and the few records that ranks compare before the first step
        compared = 2 * 8 * 2 + 4 + 8
        twice = read(folder) - LENGTH - ranks * (LENGTH + compared)
        assert twice <= (ranks - 1) * LENGTH / 8, f"{twice} of {LENGTH} records were read twice"


@pytest.mark.parametrize("count", nightly(2, 20))
def test_each_record_comes_once_over_random_stops_deaths_and_changes_of_the_world(count: int, tmp_path: Path) -> None:
    epochs = 2 if count == 5 else 5
    env = {"LOOP_STEPS": str(epochs * EPOCH)}
    (tmp_path / "alone").mkdir()
    alone = calm(tmp_path / "alone", 1, **env)
    folder = tmp_path / "hurt"
    folder.mkdir()
    lives = schedule(count, seed=34, steps=epochs * EPOCH)
    for life in lives:
        code, err = live(folder, life, ",".join(life.events), env)
        ends = life.events[-1].partition(":")[0] if life is not lives[-1] else "end"
        assert code == {"kill": -signal.SIGKILL, "stop": 75, "end": 0}[ends], f"{life}: {err}"
    assert len(list(folder.glob("happened-*"))) == count
    found = courses(folder)
    assert set().union(*found) == set(alone)
    assert max(farthest(alone, course) for course in found) <= 1e-12
    assert ledger(folder)["times"] == [float(epochs)] * LENGTH, "each record once in each epoch"


def test_a_resumed_run_reads_on_from_the_cursors_of_its_checkpoint(tmp_path: Path) -> None:
    counted = {}
    for state in "01":
        folder = tmp_path / state
        folder.mkdir()
        env = {"LOOP_STEPS": "38", "LOOP_STATE": state}
        assert live(folder, Life(3, 0), "stop:36:0", env)[0] == 75
        before = read(folder)
        code, err = live(folder, Life(2, 0), "", env)
        assert code == 0, err
        counted[state] = read(folder) - before
    assert counted["0"] - counted["1"] >= LENGTH // 2, "the beginnings of the lanes were not read again"


def test_a_lane_that_ends_early_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    code, err = live(tmp_path, Life(2, 0), "", {"LOOP_SHORT": "20"})
    assert code == 1, err
    assert re.search(r"lane 3 ended after 60 records, expected 80: give Lanes a length of at most lanes times", err), (
        err
    )
    code, err = live(tmp_path, Life(2, 0), "", {})
    assert code == 0, err
    (step,) = re.findall(r"resuming after step (\d+)", err)
    assert int(step) > 20
    assert ledger(tmp_path)["times"] == [1.0] * LENGTH


TASK = """
import torch
import hetseq

class Both(hetseq.Task):
    def load_dataset(self, split):
        {split}
        def open_lane(lane):
            for number in range(lane * 40, lane * 40 + 40):
                yield torch.randn(5, generator=torch.Generator().manual_seed(number)), torch.tensor(number)
        return {stream}

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))

    def loss(self, model, sample):
        x, number = sample
        return {{"loss": ((model(x)[:, 0] - x.sum(1)) ** 2).sum()}}

    def metrics(self, model, sample):
        return {{"number": (float(sample[1].sum()), float(len(sample[1])))}}
"""
LANES = "hetseq.Lanes(open_lane, lanes=6, length=240)"


def test_a_task_may_give_lanes_for_training_and_validation(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.format(split="", stream=LANES))
    words = "--cpu --task task.py:Both --global-batch-size 12 --max-epoch 2 --optimizer sgd --lr 0.05 --precision fp64"
    runs = []
    for name, more in (("one", "--ranks 1"), ("three", "--ranks 3 --balance 5,2,2 --num-workers 2")):
        command = ["train", *words.split(), *more.split(), "--save-dir", name]
        finished = run_command(command, program=HETSEQ, cwd=tmp_path, is_cold=False)
        assert finished.code == 0, finished.err
        runs.append(hetseq.load_run(tmp_path / name))
    found = compare(*runs)
    assert len(found.steps) == 40
    assert found.largest is not None
    assert found.largest[0] <= 1e-12
    rows = map(json.loads, (tmp_path / "three" / "metrics.jsonl").read_text().splitlines())
    assert [row["valid_number"] for row in rows if "valid_number" in row] == [119.5] * 2
    finished = run_command(["evaluate", "three"], program=HETSEQ, cwd=tmp_path, is_cold=False)
    assert finished.code == 0, finished.err
    assert "119.5" in finished.out
    finished = run_command(["selftest", *words.split(" --max")[0].split()], program=HETSEQ, cwd=tmp_path, is_cold=False)
    assert finished.code == 0, finished.out + finished.err


@pytest.mark.parametrize(
    ("stream", "more", "code", "told"),
    [
        ("open_lane(0)", "", 2, r"Both.load_dataset\('train'\) gave a generator, which has no index: wrap"),
        (LANES, "--shuffle-block 8", 2, r"--shuffle-block 8: the training data are Lanes, which keep an order"),
        (LANES, "--data-by-host", 2, r"--data-by-host divides data by their index, and Lanes are read in an order of"),
        (LANES.replace("6", "7"), "", 2, r"a step has 12 samples and Lanes has 7 lanes: a step takes as many"),
    ],
    ids=["a bare stream", "blocks", "by host", "lanes that do not divide a step"],
)  # fmt: skip
def test_a_stream_that_cannot_be_trained_on_is_refused(
    stream: str, more: str, code: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK.format(split="", stream=stream))
    words = "--cpu --ranks 1 --task task.py:Both --global-batch-size 12 --max-epoch 1 --save-dir run"
    finished = run_command(["train", *words.split(), *more.split()], program=HETSEQ, cwd=tmp_path, is_cold=False)
    assert finished.code == code, finished.err
    assert re.search(told, finished.err), finished.err


def test_a_bare_stream_is_refused_in_a_loop(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch, hetseq
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([1])
run = hetseq.start()
run.own(torch.optim.SGD(run.own(torch.nn.Linear(1, 1)).parameters(), lr=0.1))
next(run.steps(Stream(), global_batch_size=4, max_steps=1))
"""
    )
    finished = run_script(["--cpu", "--ranks", 1, "--save-dir", tmp_path / "run", script])
    assert finished.code == 2
    assert re.search(
        r"run.steps got a Stream, which has no index: wrap it in hetseq.Lanes\(lambda i: ds.shard\(64, i\), lanes=64,"
        r" length=...\), or convert it to an indexed format \(docs/guides/streams.md\)",
        finished.err,
    ), finished.err  # fmt: skip


@pytest.mark.nightly
def test_the_example_reads_tar_files_on_any_ranks(tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "stream.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for words in (["make"], []):
        alone = subprocess.run(
            [sys.executable, str(example), *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert alone.returncode == 0, alone.stderr
    lines = re.findall(r"^epoch .*", alone.stdout, re.MULTILINE)
    assert len(lines) == 2
    words = ["--cpu", "--ranks", "3", "--balance", "5,2,2", "--num-workers", "1", "--save-dir", "run", str(example)]
    finished = run_script(words, cwd=tmp_path)
    assert re.findall(r"^epoch .*", finished.out, re.MULTILINE) == lines, finished.err
