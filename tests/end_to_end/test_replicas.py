"""Replicas that came to differ, through real commands: the run goes back, and its curve knows nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.checkpoint.leftover_memory import has_remains
from hetseq.monitor.metrics import read_events, read_rows
from hetseq.run_directory import RunDirectory
from tests.support.commands import Finished, WarmLauncher
from tests.support.refusals import TWO

TASK = """
import os
import torch
from pathlib import Path
from hetseq import Task

class Struck(Task):
    '''After update 6 a bit of a replica turns over on the rank that comes first, or whose turn is a hit.'''

    def load_dataset(self, split):
        generator = torch.Generator().manual_seed(1)
        return [{{"x": torch.randn(4, generator=generator)}} for _ in range(40)]

    def build_model(self):
        self.model = torch.nn.Linear(4, 1)
        return self.model

    def loss(self, model, sample):
        return {{"loss": (model(sample["x"]) ** 2).sum()}}

    def update_step(self, updates):
        if updates != 6:
            return
        for turn in {turns}:
            try:
                os.close(os.open(Path({folder!r}) / turn, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if turn.startswith("hit"):
                self.model.weight.detach().numpy().view("uint8")[0, 3] ^= 2
            return
"""
WORDS = "--max-update 8 --global-batch-size 5 --optimizer sgd --lr 0.05 --seed 3 --balance equal --disable-validation"


def train(warm: WarmLauncher, folder: Path, turns: tuple[str, ...], *more: str) -> Finished:
    folder.mkdir()
    (folder / "task.py").write_text(TASK.format(turns=turns, folder=str(folder)))
    words = ["--cpu", "--task", f"{folder}/task.py", *WORDS.split(), "--check-replicas-every", "3", *TWO, *more]
    return warm.run(["train", *words, "--save-dir", str(folder / "run")])


def losses(folder: Path) -> list[float]:
    rows = {row["step"]: row["loss"] for row in read_rows(folder / "run" / "metrics.jsonl")}
    return [rows[step] for step in sorted(rows)]


@pytest.mark.slow
def test_a_run_of_two_whose_replicas_differ_goes_back_by_itself(warm: WarmLauncher, tmp_path: Path) -> None:
    calm = train(warm, tmp_path / "calm", ())
    assert (calm.code, len(losses(tmp_path / "calm"))) == (0, 8), calm.err
    hurt = train(warm, tmp_path / "hurt", ("hit", "miss"), "--save-interval-updates", "4")
    assert hurt.code == 0, hurt.err
    assert "after step 6 the replicas differ in model.weight: rank 0 against rank 1" in hurt.err
    assert "going back to the checkpoint of step 4" in hurt.err
    assert losses(tmp_path / "hurt") == losses(tmp_path / "calm")
    events = [event["event"] for event in read_events(tmp_path / "hurt" / "run" / "events.jsonl")]
    assert [name for name in events if name in ("replicas_differ", "resume")] == ["replicas_differ", "resume"]


@pytest.mark.slow
def test_it_does_not_go_back_to_the_same_checkpoint_again(warm: WarmLauncher, tmp_path: Path) -> None:
    options = ("--save-interval-updates", "4", "--memory-interval-updates", "1")
    hurt = train(warm, tmp_path / "hurt", ("hit", "miss", "hit2", "miss2"), *options)
    assert hurt.code == 1, hurt.err
    run = tmp_path / "hurt" / "run"
    assert not has_remains(RunDirectory(run).run_id, run)  # parts of both
    assert hurt.err.count("going back to the checkpoint of step 4") == 1
    assert hurt.err.count("no majority is right") == 2  # when it went back, and as the reason of its end


@pytest.mark.slow
def test_without_a_checkpoint_it_ends_and_says_why(warm: WarmLauncher, tmp_path: Path) -> None:
    hurt = train(warm, tmp_path / "hurt", ("hit", "miss"), "--no-save")
    assert hurt.code == 1, hurt.err
    assert "going back" not in hurt.err
    assert "no majority is right (bad memory does that" in hurt.err


@pytest.mark.fault("FT-15")
@pytest.mark.slow
def test_a_third_rank_settles_it(warm: WarmLauncher, tmp_path: Path) -> None:
    three = ("--distributed-world-size", "3")
    assert train(warm, tmp_path / "calm", (), *three).code == 0
    hurt = train(warm, tmp_path / "hurt", ("hit", "miss", "miss2"), *three, "--no-save")
    assert hurt.code == 0, hurt.err
    assert hurt.err.count("all have the state of rank") == 1
    assert losses(tmp_path / "hurt") == losses(tmp_path / "calm")
    twin = train(warm, tmp_path / "twin", ("hit", "miss", "miss2"), *three, "--no-save", "--check-replicas-every", "0")
    assert (twin.code, twin.err.count("replicas")) == (0, 0)
    assert losses(tmp_path / "twin") != losses(tmp_path / "calm")
