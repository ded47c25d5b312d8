"""A base is neither saved nor sent, and a run resumes only with the one that it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq import Task
from hetseq.checkpoint import CheckpointManager, Retention
from hetseq.comm.group import LocalGroup
from hetseq.errors import CheckpointMismatch
from tests.support.base_tasks import OverBase
from tests.support.lives import Life, live, words
from tests.support.ranks import run_ranks
from tests.support.training import prepared

SAVING = "--save-interval-updates 3 --no-epoch-checkpoints"


def live_in_turn(save_dir: str, *runs: tuple[str, type[Task]]) -> list[Life]:
    return [live(LocalGroup(), save_dir, words(f"{flags} {SAVING}"), task) for flags, task in runs]


def test_a_checkpoint_has_the_trained_layer_alone_and_resumes_to_the_bit(tmp_path: Path) -> None:
    calm, hurt = prepared(tmp_path / "calm"), prepared(tmp_path / "hurt")
    (whole,) = live_in_turn(calm, ("--max-update 8", OverBase))
    first, second = live_in_turn(hurt, ("--max-update 3", OverBase), ("--max-update 8", OverBase))
    assert [life.error for life in (whole, first, second)] == [None] * 3
    assert second.first_step == 4
    assert first.losses + second.losses == whole.losses

    manager = CheckpointManager(Path(hurt), run_id="", group=LocalGroup(), retention=Retention(-1, -1))
    loaded = manager.load("latest")
    assert loaded is not None
    names = [name for name in loaded.tensors if name.startswith("model.")]
    assert names == ["model.1.weight", "model.1.bias"]
    assert len(loaded.state["base"]) == 16


def test_another_base_is_refused_at_the_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prepared(tmp_path / "run")
    live_in_turn(path, ("--max-update 3", OverBase))
    monkeypatch.setattr(OverBase, "seed", 6)
    (other,) = live_in_turn(path, ("--max-update 8", OverBase))
    assert isinstance(other.error, CheckpointMismatch)
    assert "with base " in str(other.error)
    assert "name the files that the run began with, such as --model DIR" in str(other.error)
    assert other.losses == []


def test_three_ranks_train_over_the_same_base_as_one(tmp_path: Path) -> None:
    arguments = words("--max-update 8 --no-save")
    alone = live(LocalGroup(), prepared(tmp_path / "one"), arguments, OverBase)
    ranks = run_ranks(live, 3, prepared(tmp_path / "three"), [*arguments, "--balance", "5,2,1"], OverBase)
    for life in ranks:
        assert life.error is None
        assert life.losses == pytest.approx(alone.losses, rel=1e-13)
