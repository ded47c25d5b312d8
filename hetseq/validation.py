"""Evaluates a split on all ranks, each sample exactly once whatever the world size.

The samples are divided by the same shares as a training step; sums and counts of losses and metrics travel, never
means, and are added in rank order, so every rank knows the same result to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hetseq.comm import AnyGroup, sum_floats
from hetseq.errors import TaskError
from hetseq.loader import MicroBatch, Source, load_range
from hetseq.plan import EpochOrder, Lengths, MicroBatchCap, cut
from hetseq.task import Task, check_sums


@dataclass(frozen=True)
class Validator:
    """One split and what evaluates it."""

    split: str
    source: Source
    cap: MicroBatchCap
    lengths: Lengths | None
    terms: tuple[str, ...]
    weights: tuple[float, ...]
    computing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext

    def evaluate(
        self, task: Task, model: torch.nn.Module, group: AnyGroup, assign: Callable[[int], tuple[int, ...]]
    ) -> dict[str, float]:
        """`{"loss": ..., term: ..., metric: ...}` over the whole split; every rank calls it and gets the same.

        The loss is the weighted sum of the terms' means, in nats. Raises TaskError for metrics that change their names.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.set_grad_enabled(task.needs_gradients_in_validation), self.computing():
                names = sorted(self._metrics_of_first(task, model))
                totals = self._own_totals(task, model, names, self._own_pieces(group, assign))
        finally:
            model.train(was_training)
        added = iter(sum_floats(group, totals))
        sums = {name: (next(added), next(added)) for name in (*self.terms, *names)}
        means = {term: _mean(*sums.pop(term)) for term in self.terms}
        loss = sum(weight * means[term] for weight, term in zip(self.weights, self.terms))
        return {
            "loss": loss,
            **{term: mean for term, mean in means.items() if term != "loss"},
            **self._figures(task, sums),
        }

    def names(self, task: Task, model: torch.nn.Module) -> list[str]:
        """What `evaluate` will give, asked of one sample; any rank, alone."""
        was_training = model.training
        model.eval()
        try:
            with torch.set_grad_enabled(task.needs_gradients_in_validation), self.computing():
                measured = self._metrics_of_first(task, model)
        finally:
            model.train(was_training)
        sums = {name: (_number(measured[name][0]), _number(measured[name][1])) for name in sorted(measured)}
        return list(dict.fromkeys(["loss", *self.terms, *self._figures(task, sums)]))

    def _own_pieces(self, group: AnyGroup, assign: Callable[[int], tuple[int, ...]]) -> list[tuple[int, int]]:
        size = len(self.source.dataset)
        shares = assign(size)
        start = sum(shares[: group.rank])
        order = EpochOrder(size, seed=0, epoch=0, shuffle=False)
        return cut(order, start, start + shares[group.rank], self.cap, lengths=self.lengths)

    def _metrics_of_first(self, task: Task, model: torch.nn.Module) -> dict[str, tuple[float, float]]:
        """The names of the metrics, asked of one sample so that a rank without samples knows them too."""
        batch = next(load_range(self.source, [(0, 1)]))
        measured = task.metrics(model, batch.sample)
        self._check_names(task, "metrics", measured)
        return measured

    def _figures(self, task: Task, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
        """What the task makes of the sums of its metrics."""
        figures: Any = task.summarise(sums)
        if not isinstance(figures, dict) or not all(isinstance(value, int | float) for value in figures.values()):
            raise TaskError(f"{type(task).__name__}.summarise returned {figures!r}: expected a dict of name to number")
        self._check_names(task, "summarise", figures)
        return {name: float(value) for name, value in figures.items()}

    def _check_names(self, task: Task, hook: str, names: Collection[str]) -> None:
        for name in ("loss", *self.terms):
            if name in names:
                raise TaskError(
                    f"{type(task).__name__}.{hook} gave {name!r}, which is the name of a loss: give it another name"
                )

    def _own_totals(
        self, task: Task, model: torch.nn.Module, names: list[str], pieces: list[tuple[int, int]]
    ) -> list[float]:
        """This rank's sum and count of each term, then of each metric, one after the other."""
        totals = [0.0] * (2 * (len(self.terms) + len(names)))
        for batch in load_range(self.source, pieces):
            for place, (total, count) in enumerate(self._pairs(task, model, names, batch)):
                totals[2 * place] += total
                totals[2 * place + 1] += count
        return totals

    def _pairs(
        self, task: Task, model: torch.nn.Module, names: list[str], batch: MicroBatch
    ) -> list[tuple[float, float]]:
        counts = dict(zip(self.terms, batch.counts))
        sums = check_sums(task, task.micro_step(model, batch.sample, counts), self.terms)
        measured = task.metrics(model, batch.sample)
        if sorted(measured) != names:
            raise TaskError(
                f"{type(task).__name__}.metrics gave {sorted(measured)}, earlier {names}: give the same names"
            )
        losses = [(_number(sums[term]) if counts[term] else 0.0, counts[term]) for term in self.terms]
        return losses + [(_number(measured[name][0]), _number(measured[name][1])) for name in names]


def _number(value: torch.Tensor | float) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
