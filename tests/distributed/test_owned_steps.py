"""With owners, steps that go wrong and work between steps: the course is that of replicas, and no rank hangs."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hetseq import Task, TrainedStep
from hetseq.balance import ownership
from hetseq.comm.group import GlooGroup, Group
from hetseq.errors import ConfigError, HetSeqError, TaskError
from hetseq.parallel.gradient_sync import Pause
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.task import make_task
from hetseq.training.replica_check import ReplicasDiffer
from tests.support.hungry import CALM, LAST, Appetite, Fault, Meal, Words, check, prepared, words_of
from tests.support.lives import Line, flat, words
from tests.support.logs import KeepingLines
from tests.support.nightly import nightly
from tests.support.owned import eat_owned, session_of, whole_gradient
from tests.support.ranks import run_ranks
from tests.support.training import Recorder
from tests.support.training import prepared as prepared_run

WAIT_S = 0.05

# Memory that runs out


def dine(path: Path, words: Words, own: str, appetites: list[list[Appetite]], shares_memory: bool) -> list[list[Meal]]:
    """Runs, one after the other in one life of the ranks, by the appetites of each; what each rank saw in each."""
    told = [*words, "--shard-model", "state", "--own", own]
    runs = [(folder, told, one) for folder, one in zip(prepared(path, len(appetites)), appetites)]
    ranks = run_ranks(eat_owned, own.count(",") + 1, runs, shares_memory, timeout_s=120)
    for meals in zip(*ranks):
        for gradients in zip(*(meal.pieces for meal in meals)):
            whole = whole_gradient(list(gradients), meals[0].shapes)
            for meal in meals:
                meal.gradients.append(whole)
    return [list(meals) for meals in zip(*ranks)]


def attempts_of(meals: list[Meal]) -> list[list[int]]:
    """Attempts at each step, by rank."""
    return [[len(attempts) for attempts in meal.steps.values()] for meal in meals]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize("own", ["3,1", *nightly("0,1")])
def test_memory_that_runs_out_before_anything_was_sent_is_a_matter_of_one_rank(
    own: str, shares_memory: bool, tmp_path: Path
) -> None:
    # five samples for each rank, in micro-batches of three and two
    appetites = [[CALM, Appetite((fault,))] for fault in (Fault(0), Fault(0, LAST), Fault(1), Fault(3))]
    for meals in dine(tmp_path, words_of(10, balance="1,1", max_sentences=3), own, appetites, shares_memory):
        check(meals, 10)
        assert attempts_of(meals) == [[1] * 5] * 2


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize("own", ["0,1", *nightly("3,1")])
def test_memory_that_runs_out_when_a_unit_was_sent_costs_every_rank_one_repeat(
    own: str, shares_memory: bool, tmp_path: Path
) -> None:
    hungry = Appetite((Fault(1, LAST),))
    appetites = [[hungry, CALM], [CALM, hungry], [hungry, hungry]]
    for meals in dine(tmp_path, words_of(10, balance="1,1", max_sentences=5), own, appetites, shares_memory):
        check(meals, 10)
        assert attempts_of(meals) == [[1, 2, 1, 1, 1]] * 2


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_an_owner_without_samples_takes_part_in_repeats(shares_memory: bool, tmp_path: Path) -> None:
    # rank 0 takes the samples 0 to 7: in one piece, then in fours, in twos, and one by one
    appetite = Appetite((Fault(0, LAST), Fault(2, LAST), Fault(6, LAST)))
    told = words_of(16, balance="1,1,0", max_sentences=8)
    (meals,) = dine(tmp_path, told, "0,0,1", [[appetite, CALM, CALM]], shares_memory)
    check(meals, 16)
    assert attempts_of(meals) == [[4, 1, 1, 1, 1]] * 3


@pytest.mark.parametrize("seed", [1, *nightly(2, 3, 4, 5, 6)])
@pytest.mark.parametrize("own", ["6,2,1", *nightly("3,1", "0,1", "2,0,1", "0,0,1")])
def test_memory_that_runs_out_at_random_moments(own: str, seed: int, tmp_path: Path) -> None:
    world_size, chance = own.count(",") + 1, random.Random(seed)
    balance = {2: "5,3", 3: "5,3,1"}[world_size]
    appetites = []
    for _ in range(5):
        faults = [
            tuple(Fault(number, chance.choice([None, *range(6)])) for number in sorted(chance.sample(range(12), 3)))
            for _ in range(world_size)
        ]
        appetites.append([Appetite(some, late=(chance.randrange(6),)) for some in faults])
    told = words_of(16, balance=balance, max_sentences=chance.choice([3, 8]))
    for meals in dine(tmp_path, told, own, appetites, shares_memory=bool(seed % 2)):
        check(meals, 16)


# Runs that a replica does too


class Scaled(nn.Module):
    """Multiplies by a buffer that no forward changes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Net(Line):
    """40 points, one of which may spoil the gradient; it keeps what it sees after each step."""

    rank = 0
    poison: float | None = None

    def rows(self) -> dict[str, torch.Tensor]:
        factor = torch.ones(40, dtype=torch.float64)
        if self.poison is not None:
            factor[17] = self.poison
        return {**super().rows(), "factor": factor}

    def build_model(self) -> nn.Module:
        self.seen: list[torch.Tensor] = []
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Scaled(), nn.Linear(8, 1))

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        return {"loss": (((model(sample["x"])[:, 0] - sample["y"]) * sample["factor"]) ** 2).sum()}


class Poisoned(Net):
    poison = math.nan


class Steep(Net):
    """Its gradient, times the first loss scale, is no number of fp16."""

    poison = 900.0


class Watching(Net):
    def after_step(self, step: TrainedStep) -> None:
        self.seen.append(flat(step.model))


class Spoiling(Watching):
    """Rank 1 changes a buffer of its own after the fourth update."""

    def update_step(self, num_updates: int) -> None:
        if num_updates == 4 and Net.rank == 1:
            self.model.get_buffer("2.scale")[0] = 0.75

    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        return self.model


class ChangingByRank(Net):
    """Its hook changes every copy of the parameters, by another number on each rank."""

    def after_step(self, step: TrainedStep) -> None:
        with torch.no_grad():
            for parameter in step.model.parameters():
                parameter.add_(1e-3 * Net.rank)


class Using(Net):
    """Uses a parameter where it may be out of date."""

    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        return self.model

    def update_step(self, num_updates: int) -> None:
        if num_updates == 2:
            self.model[0].weight.norm()


class Looking(Net):
    """A hook of the optimizer looks at a parameter of the model."""

    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        return self.model

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameter_groups, lr=0.01)
        optimizer.register_step_post_hook(lambda *_: self.model[0].weight.norm())
        return optimizer


class Hiding(Net):
    """An optimizer that keeps parameters besides those of its groups."""

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer: Any = torch.optim.SGD(parameter_groups, lr=0.1)
        optimizer.slow = {"weights": list(parameter_groups[0]["params"])}
        return optimizer  # type: ignore[no-any-return]


class FailsItsTrial(torch.optim.AdamW):
    """On rank 1 it has no memory for a tensor that no parameter of the model is as large as."""

    def step(self, closure: Any = None) -> Any:
        elements = max((one.numel() for group in self.param_groups for one in group["params"]), default=0)
        if Net.rank == 1 and elements in self.failing:
            raise RuntimeError("out of memory")
        return super().step(closure)


class ShortOfMemory(Net):
    """An optimizer whose trial with pieces of a tensor fails on one rank alone."""

    failing = range(1000, 4000)

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = FailsItsTrial(parameter_groups, lr=0.01)
        made.failing = self.failing
        return made


class ShorterOfMemory(ShortOfMemory):
    """And with the whole tensor."""

    failing = range(1000, 5000)


@dataclass
class Life:
    """What one rank saw."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)
    parameters: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    error: HetSeqError | None = None

    @property
    def losses(self) -> list[float | None]:
        return [row["loss"] for row in self.rows]


def live(group: Group, save_dir: str, words: list[str], task_class: type[Net], shares_memory: bool) -> Life:
    if shares_memory:
        assert isinstance(group, GlooGroup)
        group.meet_neighbours()
    Net.rank = group.rank
    life, recorder, session = Life(), Recorder(), None
    fine = mock.patch.object(ownership, "GRAIN", 1)  # the tensors are smaller than a grain
    fine.start()
    log, keeping = logging.getLogger("hetseq"), KeepingLines(life.lines)
    log.addHandler(keeping)
    log.setLevel(logging.INFO)
    try:
        session = session_of(group, save_dir, words, recorder, lambda config: make_task(task_class, config))
        session.controller.fit()
        session.controller.replica.reducer.gather()
        life.parameters = flat(session.controller.replica.model)
        task: Any = session.controller.task
        life.seen = task.seen
    except HetSeqError as error:
        life.error = error
    finally:
        fine.stop()
        log.removeHandler(keeping)
        if session is not None:
            session.close()
    life.rows, life.valid = recorder.rows, [row["valid_loss"] for row in recorder.validations]
    life.events = [fields for name, fields in recorder.events if name == "replicas_differ"]
    return life


def wait_in_backward(group: Group, save_dir: str, words: list[str], task_class: type[Net], shares_memory: bool) -> Life:
    """A rank that waits for others for `WAIT_S` in each backward."""
    backward = OwnedGradients.backward

    def waiting(self: OwnedGradients, loss: torch.Tensor, pause: Pause = nullcontext) -> None:
        with pause():
            time.sleep(WAIT_S)
        backward(self, loss, pause)

    with mock.patch.object(OwnedGradients, "backward", waiting):
        return live(group, save_dir, words, task_class, shares_memory)


def run(
    path: Path,
    task_class: type[Task],
    text: str,
    own: str | None,
    *,
    shares_memory: bool = True,
    validate: bool = False,
    rank: Callable[..., Life] = live,
) -> list[Life]:
    """A run with owners, or of replicas where `own` is None; `text` says who computes."""
    balance = text.split("--balance ")[1].split()[0].partition("/")[0]
    told = words(f"--optimizer adamw --lr 0.01 --no-save --bucket-cap-mb 0.0001 {text}", validate=validate)
    told += [] if own is None else ["--shard-model", "state", "--own", own]
    folder = prepared_run(path / ("replicas" if own is None else "owners"))
    lives: list[Life] = run_ranks(rank, balance.count(",") + 1, folder, told, task_class, shares_memory)
    return lives


def compare(lives: list[Life], calm: list[Life], *, rel: float = 1e-12) -> None:
    """All ranks of both runs have the same steps and, to rounding, the same numbers."""
    for life in lives:
        assert life.error is None, life.error
        assert torch.equal(life.parameters, lives[0].parameters)
        assert life.losses == lives[0].losses
    right = calm[0].parameters
    assert (lives[0].parameters - right).norm() <= rel * right.norm()
    pairs = list(zip(lives[0].losses, calm[0].losses, strict=True))
    assert all((mine is None) == (other is None) for mine, other in pairs)
    assert [mine for mine, _ in pairs if mine] == pytest.approx([other for _, other in pairs if other], rel=rel)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_a_step_that_is_not_finite_is_skipped_and_its_rank_named(shares_memory: bool, tmp_path: Path) -> None:
    text = "--balance 1,1,0 --max-update 7"
    calm, lives = (run(tmp_path, Poisoned, text, own, shares_memory=shares_memory) for own in (None, "2,1,1"))
    compare(lives, calm)
    assert [loss is None for loss in lives[0].losses] == [False, True, False, False, False, True, False, False, False]
    for number, life in enumerate(lives):
        (told, _) = [line for line in life.lines if "skipped" in line]
        assert told == (
            f"{'INFO' if number else 'WARNING'} step 2 skipped: its gradient is not finite; rank 1 produced it"
            " (loss term 'loss'; positions 15 to 19 of epoch 1)"
        )


def test_a_loss_scale_that_is_too_large_is_halved_on_all_ranks(tmp_path: Path) -> None:
    text = "--balance 3,1 --max-update 6 --precision fp16 --clip-norm 1"
    calm, lives = (run(tmp_path, Steep, text, own) for own in (None, "1,3"))
    scales = [[row["loss_scale"] for row in life.rows] for life in (calm[0], *lives)]
    assert len(set(scales[0])) > 1, "some steps were too large"
    assert scales == [scales[0]] * 3
    compare(lives, calm, rel=1e-6)


def test_the_noise_scale_is_that_of_replicas(tmp_path: Path) -> None:
    text = "--balance 2,1 --batch-size 3 --max-update 12 --noise-scale-every 1"
    calm, lives = (run(tmp_path, Net, text, own) for own in (None, "0,1"))
    compare(lives, calm)
    found = [[row.get("noise_scale") for row in life.rows] for life in (*lives, *calm)]
    assert any(found[0])
    assert found[0] == found[1]
    assert found[0] == [value if value is None else pytest.approx(value, rel=1e-9) for value in found[2]]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_sums_in_double_precision_are_those_of_replicas_to_the_bit(shares_memory: bool, tmp_path: Path) -> None:
    text = "--balance 5,3,2 --batch-size 2 --max-update 12 --precision fp32 --optimizer sgd --reduce-dtype fp64"
    calm, lives = (run(tmp_path, Net, text, own, shares_memory=shares_memory) for own in (None, "2,0,1"))
    compare(lives, calm, rel=0.0)
    single = run(tmp_path / "single", Net, text.replace("--reduce-dtype fp64", ""), "2,0,1")
    assert not torch.equal(single[0].parameters, lives[0].parameters), "sums in single precision differ"


def test_validation_between_steps_gives_the_numbers_of_replicas(tmp_path: Path) -> None:
    text = "--balance 9,3,0 --max-update 9 --validate-interval-updates 2"
    calm, lives = (run(tmp_path, Net, text, own, validate=True) for own in (None, "1,1,8"))
    compare(lives, calm)
    assert len(calm[0].valid) >= 5
    for life in lives:
        assert life.valid == pytest.approx(calm[0].valid, rel=1e-12)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_after_step_sees_whole_and_current_parameters_on_every_rank(shares_memory: bool, tmp_path: Path) -> None:
    text = "--balance 9,3,0 --max-update 9"
    calm, lives = (run(tmp_path, Watching, text, own, shares_memory=shares_memory) for own in (None, "1,0,8"))
    compare(lives, calm)
    assert len(calm[0].seen) == 9
    for life in lives:
        assert torch.equal(torch.stack(life.seen), torch.stack(lives[0].seen))
        assert (torch.stack(life.seen) - torch.stack(calm[0].seen)).abs().max() <= 1e-12


def test_update_step_may_not_use_parameters_that_are_out_of_date(tmp_path: Path) -> None:
    text = "--balance 1,1 --max-update 4"
    for life in run(tmp_path, Using, text, "3,1"):
        assert isinstance(life.error, TaskError)
        assert str(life.error) == (
            "Using.update_step uses 0.weight, but with --shard-model state a rank gets the new parameters at the start"
            " of the next step: use after_step, which sees whole parameters, or --shard-model none"
        )
    assert [life.error for life in run(tmp_path, Using, text, None)] == [None] * 2  # the twin


def test_an_optimizer_that_keeps_parameters_besides_its_groups_is_refused(tmp_path: Path) -> None:
    text = "--balance 1,1 --max-update 4"
    for life in run(tmp_path, Hiding, text, "3,1"):
        assert isinstance(life.error, ConfigError)
        assert str(life.error).startswith("--shard-model: SGD keeps 0.weight in SGD.slow, besides its")
    assert [life.error for life in run(tmp_path, Hiding, text, None)] == [None] * 2  # the twin


def test_an_optimizer_that_looks_at_the_model_while_it_steps_is_refused(tmp_path: Path) -> None:
    text = "--balance 1,1 --max-update 4"
    for life in run(tmp_path, Looking, text, "3,1"):
        assert isinstance(life.error, TaskError)
        assert str(life.error).startswith("SGD.step uses 0.weight, but with --shard-model state an optimizer may use")
    assert [life.error for life in run(tmp_path, Looking, text, None)] == [None] * 2  # the twin


def test_ranks_are_compared_and_one_that_differs_is_repaired(tmp_path: Path) -> None:
    text = "--balance 5,3,2 --max-update 8 --check-replicas-every 2"
    calm, lives = (run(tmp_path / name, kind, text, "6,2,1") for name, kind in (("a", Watching), ("b", Spoiling)))
    compare(lives, calm, rel=0.0)
    assert calm[0].events == []
    assert [(event["cause"], event["ranks"], event["step"]) for event in lives[0].events] == [("fault", [1], 4)]


def test_a_hook_that_changes_copies_by_rank_is_found(tmp_path: Path) -> None:
    """An update would replace the copies by what their owners have, and hide it."""
    for life in run(tmp_path, ChangingByRank, "--balance 1,1 --max-update 4 --check-replicas-every 2", "3,1"):
        assert isinstance(life.error, ReplicasDiffer)
        assert str(life.error).startswith("after step 2 the replicas differ in model.")


def test_what_a_rank_waits_in_backward_is_no_work(tmp_path: Path) -> None:
    text = "--balance 1,1 --max-update 4 --batch-size 20"
    for life in run(tmp_path, Net, text, "3,1", rank=wait_in_backward):
        assert life.error is None, life.error
        for row in life.rows:
            assert row["communication_s"] >= WAIT_S, "both ranks wait at the same time"


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize("own", ["1,1", "0,1"])
def test_a_rank_whose_share_was_empty_for_steps_begins_with_current_parameters(
    own: str, shares_memory: bool, tmp_path: Path
) -> None:
    text = "--balance 1,0/0,1/2,1 --max-update 35"
    calm, lives = (run(tmp_path, Net, text, who, shares_memory=shares_memory) for who in (None, own))
    compare(lives, calm)
    shares = [tuple(row["shares"]) for row in lives[0].rows]
    assert {(10, 0), (0, 10), (7, 3)} <= set(shares)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_ranks_have_the_same_cuts_though_the_optimizer_fails_its_trial_on_one_of_them(
    shares_memory: bool, tmp_path: Path
) -> None:
    text = "--balance 1,1 --max-update 4"
    calm, lives = (run(tmp_path, ShortOfMemory, text, own, shares_memory=shares_memory) for own in (None, "3,1"))
    compare(lives, calm)


def test_all_ranks_end_if_the_optimizer_cannot_be_tried_on_one_of_them(tmp_path: Path) -> None:
    first, second = (life.error for life in run(tmp_path, ShorterOfMemory, "--balance 1,1 --max-update 4", "3,1"))
    assert isinstance(first, ConfigError)
    assert isinstance(second, ConfigError)
    assert "rank 1 cannot divide the state" in str(first)
    assert "FailsItsTrial could not be tried (RuntimeError: out of memory)" in str(second)
