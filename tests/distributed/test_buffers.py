"""Buffers that forward changes: the same on all ranks, in checkpoints, and after a step that was skipped."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq import Task, TaskError
from hetseq.checkpoint import CheckpointManager, Retention
from hetseq.comm.group import Group, LocalGroup
from hetseq.run_directory import RunDirectory
from tests.support import toys
from tests.support.lives import Life, Line, columns, live, words
from tests.support.ranks import run_ranks
from tests.support.training import prepared

UNEQUAL = "--balance 3,1"
Facts = list[Life]
X = columns()["x"] * torch.arange(1, 41)[:, None] / 10


def live_twice(group: Group, save_dir: str, runs: list[list[str]], task_class: type[Task]) -> Facts:
    """One command after the other in the same run directory."""
    return [live(group, save_dir, arguments, task_class) for arguments in runs]


def train(path: Path, world_size: int, task_class: type[Task], *commands: str) -> list[Facts]:
    """The lives of all ranks, by rank and command."""
    runs = [words(f"{command} {UNEQUAL if world_size == 2 else ''}") for command in commands]
    ranks: list[Facts] = run_ranks(live_twice, world_size, prepared(path), runs, task_class)
    assert [life.error for facts in ranks for life in facts] == [None] * (len(commands) * world_size)
    return ranks


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


# Batch normalisation.


class Normalised(Line):
    """The samples grow, so that the statistics of a share are not those of the step."""

    def rows(self) -> toys.Batch:
        return {**super().rows(), "x": X.clone()}

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Forgotten(Normalised):
    """The twin: its statistics are caches, which nobody keeps equal."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model[1].register_buffer("running_mean", torch.zeros(8), persistent=False)
        return model  # type: ignore[no-any-return]


def test_statistics_are_equal_on_all_ranks_after_every_step(tmp_path: Path) -> None:
    # 12 steps cross three ends of epochs, where they are saved
    (first,), (second,) = train(tmp_path / "run", 2, Normalised, "--max-update 12")
    for mine, theirs in zip(first.buffers, second.buffers, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    means = [buffers["1.running_mean"] for buffers in first.buffers]
    assert all(apart(mean, later) > 1e-3 for mean, later in itertools.pairwise(means))  # they do move
    assert [int(buffers["1.num_batches_tracked"]) for buffers in first.buffers] == [*range(1, 13)]


def test_buffers_that_nobody_keeps_equal_are_not(tmp_path: Path) -> None:
    (first,), (second,) = train(tmp_path / "run", 2, Forgotten, "--max-update 2")
    assert apart(first.buffers[-1]["1.running_mean"], second.buffers[-1]["1.running_mean"]) > 0.01


def test_a_change_is_weighted_with_the_samples_behind_it(tmp_path: Path) -> None:
    (first,), _ = train(tmp_path / "run", 2, RunningMean, "--max-update 1")
    assert apart(first.buffers[0]["mean"], 0.1 * X[:10].mean(0)) < 1e-15  # momentum 0.1, from zero
    assert apart(first.buffers[0]["mean"], 0.05 * (X[:8].mean(0) + X[8:10].mean(0))) > 1e-3  # the mean of the ranks


@pytest.mark.parametrize("world_size", [1, 2])
def test_statistics_survive_a_resume(world_size: int, tmp_path: Path) -> None:
    limit = 1e-12 if world_size == 2 else 0.0
    calm = train(tmp_path / "calm", world_size, Normalised, "--max-update 8")
    hurt = train(tmp_path / "hurt", world_size, Normalised, "--max-update 3", "--max-update 8")
    for (whole,), (begun, gone_on) in zip(calm, hurt, strict=True):
        assert gone_on.first_step == 4
        assert begun.losses + gone_on.losses == pytest.approx(whole.losses, rel=limit, abs=0)
        assert apart(gone_on.parameters, whole.parameters) <= limit
        for name, value in whole.buffers[-1].items():
            assert apart(gone_on.buffers[-1][name], value) <= limit, name
        assert apart(begun.buffers[-1]["1.running_var"], whole.buffers[-1]["1.running_var"]) > 1e-3  # the twin


def test_a_checkpoint_holds_the_statistics_of_all_ranks(tmp_path: Path) -> None:
    (first,), _ = train(tmp_path / "run", 2, Normalised, "--max-update 3")
    saved = load(tmp_path / "run")
    for name, value in first.buffers[-1].items():
        assert torch.equal(saved[f"model.{name}"], value), name
        assert not torch.equal(saved[f"model.{name}"], first.buffers[-2][name])


def load(run: Path) -> dict[str, torch.Tensor]:
    manager = CheckpointManager(run, run_id=RunDirectory(run).run_id, group=LocalGroup(), retention=Retention())
    loaded = manager.load("latest")
    assert loaded is not None
    return dict(loaded.tensors)


# Buffers of other kinds.


class Statistics(nn.Module):
    """`what` happens to the buffers in forward, given the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("largest", torch.full((4,), -math.inf, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(1000, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.mean: torch.Tensor
        self.largest: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.observe(x)
        out: torch.Tensor = self.linear(x)
        return out

    def observe(self, x: torch.Tensor) -> None:
        raise NotImplementedError


class WithRunningMean(Statistics):
    def observe(self, x: torch.Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.1)


class WithNewTensors(Statistics):
    """As users write it: another tensor takes the place of the buffer."""

    def observe(self, x: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)


class WithLargest(Statistics):
    def observe(self, x: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, x.amax(0))


class WithLateMean(Statistics):
    """Begins at its third forward."""

    def observe(self, x: torch.Tensor) -> None:
        self.calls += 1
        if self.calls > 2:
            self.mean += x.mean(0)


class WithGrowth(Statistics):
    def observe(self, x: torch.Tensor) -> None:
        self.mean = torch.cat([self.mean, x.mean(0)])


class RunningMean(Normalised):
    model: type[Statistics] = WithRunningMean

    def build_model(self) -> nn.Module:
        return self.model()


class NewTensors(RunningMean):
    model = WithNewTensors


class Largest(RunningMean):
    model = WithLargest


class LateMean(RunningMean):
    model = WithLateMean


class Growth(RunningMean):
    model = WithGrowth


@pytest.mark.parametrize("task_class", [RunningMean, NewTensors])
def test_a_buffer_is_kept_equal_however_it_is_written(task_class: type[Task], tmp_path: Path) -> None:
    (first,), (second,) = train(tmp_path / "run", 2, task_class, "--max-update 3 --no-save")
    assert all(torch.equal(a["mean"], b["mean"]) for a, b in zip(first.buffers, second.buffers, strict=True))
    assert apart(first.buffers[0]["mean"], first.buffers[2]["mean"]) > 1e-3


def test_a_running_maximum_that_begins_at_minus_infinity_becomes_finite(tmp_path: Path) -> None:
    (first,), (second,) = train(tmp_path / "run", 2, Largest, "--max-update 3 --no-save")
    assert torch.equal(first.buffers[-1]["largest"], second.buffers[-1]["largest"])
    assert first.buffers[-1]["largest"].isfinite().all()


def test_a_buffer_that_begins_to_change_at_step_three_is_found_at_the_save(tmp_path: Path) -> None:
    # `calls` changes from the first step on, `mean` from the third; the fourth is saved, the end of an epoch
    (first,), (second,) = train(tmp_path / "run", 2, LateMean, "--max-update 6")
    differs = [apart(a["mean"], b["mean"]) > 1e-3 for a, b in zip(first.buffers, second.buffers, strict=True)]
    assert differs == [False, False, True, False, False, False]
    assert [int(buffers["calls"]) for buffers in first.buffers] == [1, 2, 3, 4, 5, 6]


def test_buffers_stay_equal_in_the_step_after_a_save(tmp_path: Path) -> None:
    # the second step is saved, when none of the buffers is new; the third is not
    (first,), (second,) = train(tmp_path / "run", 2, RunningMean, "--max-update 4 --save-interval-updates 2")
    assert all(torch.equal(a["mean"], b["mean"]) for a, b in zip(first.buffers, second.buffers, strict=True))


def test_only_buffers_that_change_cost_bytes(tmp_path: Path) -> None:
    (plain,), _ = train(tmp_path / "plain", 2, Line, "--max-update 3 --no-save")
    (first,), _ = train(tmp_path / "run", 2, RunningMean, "--max-update 3 --no-save")
    mean = 8 * 4  # of the 1000 values that never change, none
    assert [a - b for a, b in zip(first.gathered, plain.gathered, strict=True)] == [mean, 2 * mean, 3 * mean]
    assert all(buffers["mask"].all() for buffers in first.buffers)


def test_a_buffer_that_grows_is_refused_in_words(tmp_path: Path) -> None:
    (life,) = run_ranks(live, 1, prepared(tmp_path / "run"), words("--max-update 2"), Growth)
    assert isinstance(life.error, TaskError)
    assert "buffer mean of WithGrowth changed from (4,) torch.float64 to (8,)" in str(life.error)


# A step that is skipped.


class Poisoned(RunningMean):
    """The 17th sample is infinite: step 2."""

    def rows(self) -> toys.Batch:
        rows = super().rows()
        rows["x"][17] = math.inf
        return rows


class PoisonedNormalised(Poisoned):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("task_class", [Poisoned, PoisonedNormalised])
def test_a_skipped_step_leaves_the_buffers_as_they_were(
    task_class: type[Task], world_size: int, tmp_path: Path
) -> None:
    for (life,) in train(tmp_path / "run", world_size, task_class, "--max-update 3 --no-save"):
        assert [loss is None for loss in life.losses] == [False, True, False, False]
        first, skipped, third, _ = life.buffers
        for name, value in first.items():
            assert torch.equal(skipped[name], value), name
            assert third[name].isfinite().all() or name == "largest"
        assert any(not torch.equal(third[name], value) for name, value in first.items())


class Teacher(Poisoned):
    """Keeps an average of the parameters in a buffer, in update_step."""

    seen: nn.Module

    def build_model(self) -> nn.Module:
        self.seen = WithRunningMean()
        self.seen.register_buffer("average", torch.zeros(1, 4, dtype=torch.float64))
        return self.seen

    def update_step(self, num_updates: int) -> None:
        model: Any = self.seen
        model.average.add_(model.linear.weight.detach(), alpha=0.1)


def test_a_skipped_step_takes_nothing_back_that_the_task_did_in_update_step(tmp_path: Path) -> None:
    for (life,) in train(tmp_path / "run", 2, Teacher, "--max-update 3 --no-save"):
        first, skipped, third, _ = (buffers["average"] for buffers in life.buffers)
        assert torch.equal(first, skipped)
        assert first.any()
        assert not torch.equal(third, skipped)
