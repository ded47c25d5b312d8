"""What a resume must not forget, must not repeat, and must not take for the same run."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import ConfigError, HetSeqError, Task
from hetseq.comm.group import Group, LocalGroup
from hetseq.data.plan import GlobalBatch
from hetseq.errors import CheckpointMismatch
from hetseq.run.checkpointing import Provenance, describe
from hetseq.run.resume import check_provenance
from hetseq.training.controller import TrainingState
from tests.support import toys
from tests.support.lives import Life, Line, begin, live, words
from tests.support.ranks import run_ranks
from tests.support.training import prepared


def live_in_turn(group: Group, runs: list[tuple[str, list[str]]], task_class: type[Task]) -> list[Life]:
    """Runs of (directory, words), one after the other."""
    return [live(group, save_dir, arguments, task_class) for save_dir, arguments in runs]


def calm_and_hurt(
    path: Path, task_class: type[Task], *, validate: bool = False, flags: str = ""
) -> tuple[list[float | None], list[float | None]]:
    """The curve of eight steps, in one go and stopped after three."""
    calm, hurt = prepared(path / "calm"), prepared(path / "hurt")
    one, three = (words(f"--max-update {n} {flags}", validate=validate) for n in (8, 3))
    lives = live_in_turn(LocalGroup(), [(calm, one), (hurt, three), (hurt, one)], task_class)
    assert [life.error for life in lives] == [None] * 3
    assert lives[2].first_step == 4
    return lives[0].losses, lives[1].losses + lives[2].losses


# State of the task.


class Annealed(Line):
    """A weight of the loss that follows from update_step."""

    beta = 1.0

    def update_step(self, num_updates: int) -> None:
        self.beta = 1 + num_updates / 10

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.beta * super().loss(model, sample)["loss"]}


class Accumulated(Annealed):
    """The twin: its weight counts the calls, which no resume can know."""

    def update_step(self, num_updates: int) -> None:
        self.beta += 0.1


def test_a_weight_that_follows_from_the_updates_is_right_after_a_resume(tmp_path: Path) -> None:
    calm, hurt = calm_and_hurt(tmp_path, Annealed)
    assert hurt == calm  # to the bit


def test_a_weight_that_counts_its_calls_is_not(tmp_path: Path) -> None:
    calm, hurt = calm_and_hurt(tmp_path, Accumulated)
    assert hurt[:3] == calm[:3]
    assert hurt[3:] != calm[3:]


# Randomness of a data set.


class NoisyRows(toys.Rows):
    def __getitems__(self, indices: list[int]) -> list[toys.Batch]:
        x, y = self.columns["x"], self.columns["y"]
        return [{"x": x[i] + 0.1 * torch.randn(4, dtype=torch.float64), "y": y[i]} for i in indices]


class Noisy(Line):
    def load_dataset(self, split: str) -> Any:
        return NoisyRows(self.rows())


@pytest.mark.parametrize("flags", ["", "--num-workers 1"])
def test_random_samples_fetched_many_at_once_are_the_same_after_a_resume(flags: str, tmp_path: Path) -> None:
    calm, hurt = calm_and_hurt(tmp_path, Noisy, flags=flags)
    assert hurt == calm


def test_another_seed_draws_other_samples(tmp_path: Path) -> None:
    first, second = (prepared(tmp_path / name) for name in ("first", "second"))
    same = words("--max-update 4 --no-save")
    other = [*same, "--seed", "8"]
    ((calm, again),) = run_ranks(live_in_turn, 1, [(first, same), (second, other)], Noisy)
    ((plain, exact),) = run_ranks(live_in_turn, 1, [(first, same), (second, same)], Noisy)
    assert plain.losses == exact.losses == calm.losses != again.losses


class EpochRows(toys.Rows):
    """Its samples grow with the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> toys.Batch:
        return {"x": self.columns["x"][index] * (1 + self.epoch), "y": self.columns["y"][index]}


class OneDataSet(Line):
    """Validates with the very object that it trains with."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.both = EpochRows(self.rows())

    def load_dataset(self, split: str) -> Any:
        return self.both


def test_validating_the_data_set_that_is_trained_changes_no_training(tmp_path: Path) -> None:
    quiet, loud = prepared(tmp_path / "quiet"), prepared(tmp_path / "loud")
    runs = [(quiet, words("--max-update 10 --no-save")), (loud, words("--max-update 10 --no-save", validate=True))]
    ((without, with_validation),) = run_ranks(live_in_turn, 1, runs, OneDataSet)
    assert len(with_validation.valid) == 3  # two epochs, and the end of the run
    assert with_validation.losses == without.losses
    assert len(set(without.losses)) == 10


# Options that begin something anew.


class Keeping(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def reset_often(group: Group, run: str, other: str) -> dict[str, Any]:
    """Four steps; the same --reset-dataloader command twice; and once more into another directory."""
    log, keeping = logging.getLogger("hetseq.run.resume"), Keeping()
    log.addHandler(keeping)
    log.setLevel(logging.INFO)

    def told(save_dir: str, arguments: list[str]) -> tuple[Life, tuple[int, int], bool]:
        keeping.lines.clear()
        session = begin(group, save_dir, arguments, Line)
        position = session.controller.state.position
        session.close()
        has_told = any("--reset-dataloader was done at step" in line for line in keeping.lines)
        return live(group, save_dir, arguments, Line), (position.epoch, position.consumed), has_told

    try:
        seen = {}
        # a step is a quarter of an epoch
        for name, save_dir, flags in [
            ("begin", run, "--max-update 2"),
            ("reset", run, "--max-update 5 --reset-dataloader"),
            ("again", run, "--max-update 7 --reset-dataloader"),
            ("elsewhere", other, f"--max-update 8 --reset-dataloader --resume {run}"),
            ("elsewhere again", other, f"--max-update 9 --reset-dataloader --resume {run}"),
        ]:
            life, position, has_told = told(save_dir, words(flags))
            seen[name] = (life.first_step, *position, has_told)
            assert life.error is None
        return seen
    finally:
        log.removeHandler(keeping)


def test_a_reset_happens_once_in_a_run_and_says_so(tmp_path: Path) -> None:
    (seen,) = run_ranks(reset_often, 1, prepared(tmp_path / "run"), prepared(tmp_path / "other"))
    assert seen == {  # first step, epoch and samples consumed before it, whether a line told of an earlier reset
        "begin": (1, 1, 0, False),
        "reset": (3, 1, 0, False),
        "again": (6, 1, 30, True),
        "elsewhere": (8, 1, 0, False),
        "elsewhere again": (9, 1, 10, True),
    }


def test_a_reset_that_was_killed_before_its_first_save_is_done_again(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    (life,) = run_ranks(live, 1, run, words("--max-update 2"), Line)
    assert life.error is None
    for _ in range(2):
        session = begin(LocalGroup(), run, words("--max-update 5 --reset-dataloader"), Line)
        position = session.controller.state.position
        session.close()  # before any step
        assert (position.step, position.consumed) == (3, 0)


# Another run.


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--curriculum 2", "curriculum 1000000, this command says 2"),
        (
            "--shuffle-block 4",
            "shuffle_block None, this command says 4: leave out --shuffle-block, or begin the data anew",
        ),
        ("--unit-size 2", "unit_size None, this command says 2: leave out --unit-size, or begin the data anew"),
        ("--train-subset valid", "split train, this command says valid"),
        ("--seed 8", "seed 7, this command says 8"),
    ],
)
def test_what_decides_the_order_of_samples_must_stay(flags: str, told: str, tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    runs = [words("--max-update 2"), words(f"--max-update 4 {flags}"), words("--max-update 4")]
    runs.append([*runs[1], "--max-update", "6", "--reset-dataloader"])
    ((begun, other, same, anew),) = run_ranks(live_in_turn, 1, [(run, arguments) for arguments in runs], Line)
    assert begun.error is same.error is anew.error is None
    assert isinstance(other.error, HetSeqError)
    assert told in str(other.error)
    assert "--reset-dataloader" in str(other.error)
    assert other.losses == []


def test_an_older_checkpoint_was_not_shuffled_in_blocks() -> None:
    here = Provenance("Line", "SGD", 1, "train", 40, 0, "fp64", GlobalBatch(8))
    saved = describe(TrainingState(), here, None)
    del saved["shuffle_block"]
    check_provenance(saved, here, [])
    with pytest.raises(CheckpointMismatch, match="leave out --shuffle-block"):
        check_provenance(saved, dataclasses.replace(here, shuffle_block=4), [])


def test_the_order_of_lanes_must_stay() -> None:
    here = Provenance("Line", "SGD", 1, "train", 40, 0, "fp64", GlobalBatch(8), lanes="4 lanes, window 1")
    saved = describe(TrainingState(), here, None)
    for other in (None, "8 lanes, window 1"):
        changed = dataclasses.replace(here, lanes=other)
        with pytest.raises(
            CheckpointMismatch, match=r"lanes 4 lanes, window 1, this command says .*: give hetseq.Lanes"
        ):
            check_provenance(saved, changed, [])
        check_provenance(saved, changed, ["dataloader"])
    del saved["lanes"]  # saved by an older version
    with pytest.raises(CheckpointMismatch, match="lanes None, this command says 4 lanes"):
        check_provenance(saved, here, [])


def test_vocabularies_are_compared_where_both_are_known() -> None:
    here = Provenance("Line", "SGD", 1, "train", 40, 0, "fp64", GlobalBatch(8))
    known = dataclasses.replace(here, vocabulary="one")
    older = describe(TrainingState(), here, None)
    del older["vocabulary"]
    for saved, now in (
        (older, known),
        (describe(TrainingState(), here, None), known),
        (describe(TrainingState(), known, None), here),
    ):
        check_provenance(saved, now, [])
    other = dataclasses.replace(here, vocabulary="other")
    with pytest.raises(CheckpointMismatch, match="vocabulary one, this command says other: give the --data and the"):
        check_provenance(describe(TrainingState(), known, None), other, ["dataloader", "optimizer"])


def test_an_override_of_a_setting_that_the_optimizer_lacks_is_refused_at_the_start(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    unknown = [*words("--max-update 1"), "--optimizer-overrides", "{'beta': 0.5}"]
    known = [*words("--max-update 1"), "--optimizer-overrides", "{'momentum': 0.5}"]
    ((refused, fine),) = run_ranks(live_in_turn, 1, [(run, unknown), (run, known)], Line)
    assert isinstance(refused.error, ConfigError)
    assert "--optimizer-overrides: SGD has no beta; it has" in str(refused.error)
    assert fine.error is None


# Losses that are made in other ways.


class Force(Line):
    """The slope of an energy is fitted: a derivative inside the loss."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        x = sample["x"].requires_grad_()
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return {"loss": ((force.sum(1) - sample["y"]) ** 2).sum()}


class ForceValidated(Force):
    needs_gradients_in_validation = True


def test_a_loss_made_of_derivatives_trains_and_validates(tmp_path: Path) -> None:
    (one,) = run_ranks(live, 1, prepared(tmp_path / "one"), words("--max-update 8", validate=True), ForceValidated)
    flags = words("--max-update 8 --balance 3,1", validate=True)
    two, _ = run_ranks(live, 2, prepared(tmp_path / "two"), flags, ForceValidated)
    assert one.error is two.error is None
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    assert two.valid == pytest.approx(one.valid, rel=1e-12)
    assert one.valid[1] < one.valid[0]


def test_without_gradients_a_derivative_cannot_be_validated(tmp_path: Path) -> None:
    arguments = words("--max-update 4", validate=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        live(LocalGroup(), prepared(tmp_path / "run"), arguments, Force)


class SometimesConstant(Line):
    """A micro-batch without a large sample gives a loss that depends on no parameter."""

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        is_large = sample["y"] > 1
        if not is_large.any():
            return {"loss": torch.tensor(2.0 * len(is_large), dtype=torch.float64)}
        return {"loss": ((model(sample["x"])[:, 0] - sample["y"]) ** 2 * is_large).sum() + 2.0 * len(is_large)}


def test_a_term_that_is_a_constant_in_some_micro_batches_has_no_gradient_there(tmp_path: Path) -> None:
    whole, cut = prepared(tmp_path / "whole"), prepared(tmp_path / "cut")
    runs = [(whole, words("--max-update 8 --no-save")), (cut, words("--max-update 8 --no-save --batch-size 1"))]
    ((one, many),) = run_ranks(live_in_turn, 1, runs, SometimesConstant)
    assert one.error is many.error is None
    assert many.losses == pytest.approx(one.losses, rel=1e-12)
    assert float((many.parameters - one.parameters).abs().max()) < 1e-12
    assert one.losses[0] != one.losses[4]  # the twin: the same samples an epoch later
