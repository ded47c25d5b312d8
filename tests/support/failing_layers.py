"""A task of several layers, some of which a micro-batch may leave out, whose memory runs out in any of them.

For `--shard-model all`, where a failure in one layer meets transfers of others: `dine` runs it, `check` knows what
every run must keep to, whatever went wrong.
"""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

from hetseq import config as options
from hetseq.balance import ownership
from hetseq.comm.group import GlooGroup, Group
from hetseq.errors import HetSeqError
from hetseq.task import make_task
from tests.support import cuda_errors, hungry, oracle, toys
from tests.support.hungry import Attempt, Hungry, Seen, forwards_in, keep_diary
from tests.support.logs import KeepingLines
from tests.support.owned import OwnedMeal, fragments_with_gradients, session_of, whole_gradient, whole_parameters
from tests.support.ranks import run_ranks
from tests.support.training import Recorder

FORWARD, BACKWARD = "forward", "backward"
BLOCKS = 5
LAYERS = [*(f"body.layers.{number}" for number in range(BLOCKS)), "cls", "reg"]
ROOT = "body"  # where a fault means the parameter that is in no layer
SKIPPED = {1: 0, 2: 1, 3: 2}  # by block: the feature that says which samples take it


class Fault(NamedTuple):
    """Memory runs out in the rank's forward `number` (from 0, over the whole run), or in the backward after it."""

    number: int
    layer: str
    phase: str = FORWARD


@dataclass(frozen=True)
class Appetite:
    """What goes wrong on one rank."""

    faults: tuple[Fault, ...] = ()
    validation: tuple[Fault, ...] = ()  # numbers count the forwards of validation
    is_bug: bool = False  # another error than one of memory


CALM = Appetite()


class Body(nn.Module):
    """Blocks of which a sample takes those that its features ask for, and a parameter of its own."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.first = nn.Parameter(torch.randn(6, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.first
        for number, layer in enumerate(self.layers):
            takes = torch.ones(len(x), dtype=torch.bool)
            if self.skips and number in SKIPPED:
                takes = x[:, SKIPPED[number]] > 0.5
            if takes.any():
                hidden = hidden + takes[:, None] * torch.tanh(layer(hidden))
        return hidden


class Layered(Hungry):
    """As `Hungry`, with layers; memory runs out as its `Appetite` says."""

    skips = False

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.validations = 0

    def build_model(self) -> nn.Module:
        model = nn.ModuleDict({"body": Body(self.skips), "cls": nn.Linear(8, 3), "reg": nn.Linear(8, 4)})
        model["seen"] = Seen()
        return model

    def _count(self, model: Any, samples: list[int]) -> None:
        appetite: Any = self.appetite
        if not self._is_watched:
            self._watch(model)
        self._fault = None
        if not model.training:
            number, self.validations = self.validations, self.validations + 1
            faults = appetite.validation
        else:
            self.attempt.append(samples)
            number, self.forwards = self.forwards, self.forwards + 1
            faults = appetite.faults
        if len(samples) > 1:
            self._fault = next((fault for fault in faults if fault.number == number), None)
        self.is_training = model.training

    def _watch(self, model: Any) -> None:
        self._is_watched = True
        for name in (*LAYERS, ROOT):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(functools.partial(self._at, name, FORWARD))
            next(module.parameters(recurse=False)).register_hook(functools.partial(self._at, name, BACKWARD))

    def _at(self, layer: str, phase: str, *_: Any) -> None:
        fault: Any = self._fault
        if fault is None or (fault.layer, fault.phase) != (layer, phase):
            return
        self._fault = None
        if self.is_training:
            self.attempt.append("failed")
        else:
            self.failed_validations = getattr(self, "failed_validations", 0) + 1
        appetite: Any = self.appetite
        raise IndexError("a bug of a task") if appetite.is_bug else cuda_errors.out_of_memory()


class Poisoned(Layered):
    """A sample of step 2 spoils the gradient; memory runs out as its appetite says, also when the reason is sought."""

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        factor = torch.where(sample["index"] == 17, torch.nan, 1.0).sum() / len(sample["index"])
        return {name: term * factor for name, term in super().loss(model, sample).items()}


class Skipping(Layered):
    """Micro-batches leave layers out, each other ones."""

    skips = True


@dataclass
class LayeredMeal(OwnedMeal):
    failed_validations: int = 0
    valid: list[float] = field(default_factory=list)


def eat(
    group: Group, runs: list[tuple[str, list[str], list[Appetite]]], shares_memory: bool, task: type[Layered]
) -> list[LayeredMeal]:
    """A rank's life: one run after the other, with cuts between any two elements."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    with mock.patch.object(ownership, "GRAIN", 1):
        return [_eat(group, save_dir, words, appetites[group.rank], task) for save_dir, words, appetites in runs]


def _eat(group: Group, save_dir: str, words: list[str], appetite: Appetite, task: type[Layered]) -> LayeredMeal:
    recorder = Recorder()
    session = session_of(group, save_dir, words, recorder, lambda config: make_task(task, config))
    controller: Any = session.controller
    fetched_again, replica = keep_diary(group, session), controller.replica
    controller.task.appetite, pieces, positions = appetite, list[Any](), list[Any]()
    replica.optimizer.register_step_pre_hook(lambda *_: pieces.append(fragments_with_gradients(session)))
    replica.model.train()
    try:
        while not controller.has_ended():
            controller.train_step()
            positions.append(controller.state.position)
        named = whole_parameters(replica)
        return LayeredMeal(
            shares=[tuple(row["shares"]) for row in recorder.rows],
            positions=positions,
            steps=controller.task.steps,
            caps=[],
            gradients=[],
            parameters=torch.cat([value.flatten() for value in named.values()]),
            total=replica.model["seen"].total.clone(),
            forwards=int(replica.model["seen"].forwards),
            losses=[row["loss"] for row in recorder.rows],
            fetched_again=fetched_again,
            lineage=str(controller.state.lineage),
            pieces=pieces,
            shapes=dict(sorted(named.items(), key=lambda item: item[1].dim() < 2)),
            failed_validations=getattr(controller.task, "failed_validations", 0),
            valid=[row["valid_loss"] for row in recorder.validations],
        )
    finally:
        session.close()
        del group.all_reduce_sum  # type: ignore[misc]


def fail(
    group: Group, save_dir: str, words: list[str], appetites: list[Appetite], shares_memory: bool, task: type[Layered]
) -> tuple[str, list[str]]:
    """Run on one rank until an error ends it; returns the error and the lines of the log."""
    lines: list[str] = []
    log, keeping = logging.getLogger("hetseq"), KeepingLines(lines)
    log.addHandler(keeping)
    log.setLevel(logging.INFO)
    try:
        eat(group, [(save_dir, words, appetites)], shares_memory, task)
    except (HetSeqError, IndexError) as error:
        return f"{type(error).__name__}: {error}", lines
    finally:
        log.removeHandler(keeping)
    return "", lines


def words_for(own: str, words: list[str]) -> list[str]:
    """The words of a run with layers."""
    return [*words, "--shard-model", "all", "--own", own, "--shard-modules", "body.layers.*,cls,reg"]


def dine(
    path: Path, words: list[str], own: str, appetites: list[list[Appetite]], shares_memory: bool,
    task: type[Layered] = Layered,
) -> list[list[LayeredMeal]]:  # fmt: skip
    """Runs, one after the other in one life of the ranks, by the appetites of each; what each rank saw in each."""
    told = words_for(own, words)
    runs = [(folder, told, one) for folder, one in zip(hungry.prepared(path, len(appetites)), appetites)]
    ranks = run_ranks(eat, own.count(",") + 1, runs, shares_memory, task, timeout_s=240)
    for meals in zip(*ranks):
        for gradients in zip(*(meal.pieces for meal in meals), strict=True):
            whole = whole_gradient(list(gradients), meals[0].shapes)
            for meal in meals:
                meal.gradients.append(whole)
    return [list(meals) for meals in zip(*ranks)]


@functools.cache
def curve_of(batch: int, task: type[Layered] = Layered) -> oracle.Curve:
    """The course of one device, in plain torch."""
    torch.manual_seed(oracle.SEED)
    toy = make_task(task, options.parse([]))
    model: Any = toy.build_model()
    model = model.double()
    optimizer: Any = toy.build_optimizer([{"params": sorted(model.parameters(), key=lambda p: p.dim() < 2)}])
    return oracle.train(
        model, optimizer, toy.rows(), oracle.two_terms, batch_of_epoch=lambda _: batch, steps=hungry.STEPS,
        dtype=torch.float64,
    )  # fmt: skip


def rounds_of(attempts: tuple[Attempt, ...]) -> int:
    """The rounds that one attempt of all ranks has had."""
    return max(len(forwards_in(attempt)) for attempt in attempts)


def check(meals: list[LayeredMeal], batch: int, task: type[Layered] = Layered) -> int:
    """Check a run, whatever went wrong; how many attempts were in vain."""
    in_vain = 0
    for number, (start, end) in enumerate(hungry.steps_by_hand(batch), 1):
        shares = meals[0].shares[number - 1]
        borders = list(itertools.accumulate(shares, initial=start))
        assert borders[-1] == end
        together = list(zip(*(meal.steps[number] for meal in meals), strict=True))
        failed = [["failed" in attempt for attempt in attempts] for attempts in together]
        assert list(map(any, failed)) == [True] * (len(together) - 1) + [False]
        in_vain += len(together) - 1
        for earlier, later, failing in zip(together, together[1:], failed):
            for before, after, has_failed in zip(earlier, later, failing):
                if has_failed:
                    assert max(map(len, forwards_in(after))) <= len(forwards_in(before)[-1]) // 2
                    assert "failed" in after or len(forwards_in(after)) > len(forwards_in(before))
            if not any("failed" in attempt for attempt in later):
                assert rounds_of(later) >= rounds_of(earlier)  # another rank may have had more already
        for attempts in together:
            for rank, attempt in enumerate(attempts):
                mine = list(range(borders[rank], borders[rank + 1]))
                samples = list(itertools.chain(*forwards_in(attempt)))
                assert samples == (mine[: len(samples)] if "failed" in attempt else mine)
                assert attempt.count("failed") <= 1
    for meal in meals:
        assert meal.positions == [hungry.position_by_hand(number, batch) for number in range(1, hungry.STEPS + 1)]
    hungry.check_buffers(list(meals), batch)
    curve = curve_of(batch, task)
    worst = hungry.worst_error(list(meals), curve)
    assert worst <= hungry.LIMIT, f"{worst:.1e}"
    assert all(meal.losses == pytest.approx(curve.losses, rel=1e-14) for meal in meals)
    assert len({tuple(meal.parameters.tolist()) for meal in meals}) == 1, "ranks got other parameters"
    assert len({meal.lineage for meal in meals}) == 1
    return in_vain
