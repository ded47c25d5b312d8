"""Evaluates a split on all ranks, each sample exactly once whatever the world size.

The samples are divided by the same shares as a training step; sums and counts of losses and metrics travel, never
means, and are added in rank order, so every rank gets the same result to the bit. How many samples a rank takes at
once is local: sums are additive, so a rank repeats in halves what its memory did not hold.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hetseq.balance.layout import Layout, one_rank_each
from hetseq.comm.directory_groups import gather_texts
from hetseq.comm.group import RowTransport, sum_floats
from hetseq.data.loader import MicroBatch, Source, range_reader
from hetseq.data.plan import EpochOrder, Lengths, MicroBatchCap, cut
from hetseq.errors import DeviceMemoryError, TaskError
from hetseq.parallel.gradient_sync import NO_ROUNDS, Rounds
from hetseq.system import device_memory as memory
from hetseq.task import Task, check_sums
from hetseq.training.micro_batch_size import MicroBatchSizes

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Validator:
    """Evaluates one split."""

    split: str
    source: Source
    cap: MicroBatchCap  # by the options
    lengths: Lengths | None
    terms: tuple[str, ...]
    weights: tuple[float, ...]
    computing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    device: torch.device = _CPU
    learned: Callable[[], MicroBatchCap] = MicroBatchCap  # the cap that training has learned for this rank so far
    is_in_step: bool = False  # other ranks compute the same pieces with this one, so it cuts by the options alone

    def evaluate(
        self, task: Task, model: torch.nn.Module, group: RowTransport, assign: Callable[[int], tuple[int, ...]],
        rounds: Rounds = NO_ROUNDS, layout: Layout | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """`{"loss": ..., term: ..., metric: ...}` over the whole split; every rank calls it and gets the same.

        The loss is the weighted sum of the terms' means, in nats. In `rounds` the parameters of the model are here.
        `assign` divides samples among the groups of `layout` (default: every rank is one), whose ranks compute alike.
        Raises TaskError for metrics that change their names.
        """
        layout = layout or one_rank_each(group.world_size)
        is_idle = layout.is_idle(group.rank)
        with self.judging(task, model), rounds.without_gradients():
            names = [] if is_idle else self.metric_names(task, model, rounds)
            if layout.idle:
                names = json.loads(gather_texts(group, json.dumps(names))[layout.leader_of(layout.busy[0])])
            totals = [0.0] * (2 * (len(self.terms) + len(names)))
            own = [] if is_idle else self._own_pieces(assign, layout.group_of(group.rank))
            for row in self.rows(task, model, names, own, rounds):
                totals = [total + value for total, value in zip(totals, row, strict=True)]
            rounds.serve()
        if group.rank not in layout.leaders:  # its leader has computed the same
            totals = [0.0] * len(totals)
        return self.figures(task, names, sum_floats(group, totals))

    @contextlib.contextmanager
    def judging(self, task: Task, model: torch.nn.Module) -> Iterator[None]:
        """The model in evaluation mode, in the run's precision, without gradients unless the losses need them."""
        was_training = model.training
        model.eval()
        try:
            with torch.set_grad_enabled(task.needs_gradients_in_validation), self.computing():
                yield
        finally:
            model.train(was_training)

    def names(self, task: Task, model: torch.nn.Module, rounds: Rounds = NO_ROUNDS) -> list[str]:
        """The names that `evaluate` will give, found with one sample; any rank, alone, or all in `rounds`."""
        with self.judging(task, model), rounds.without_gradients():
            measured = self._metrics_of_first(task, model, rounds)
            rounds.serve()
        sums = {name: (_number(measured[name][0]), _number(measured[name][1])) for name in sorted(measured)}
        return list(dict.fromkeys(["loss", *self.terms, *self._summary(task, sums)]))

    def metric_names(self, task: Task, model: torch.nn.Module, rounds: Rounds = NO_ROUNDS) -> list[str]:
        """The names of the metrics, sorted, found with one sample within `judging`; any rank, alone."""
        return sorted(self._metrics_of_first(task, model, rounds))

    def pieces(self) -> list[tuple[int, int]]:
        """The whole split in micro-batches by the options alone: the same on every rank."""
        return self._cut(0, len(self.source.dataset), self.cap)

    def rows(
        self, task: Task, model: torch.nn.Module, names: list[str], pieces: Sequence[tuple[int, int]],
        rounds: Rounds = NO_ROUNDS,
    ) -> Iterator[list[float]]:  # fmt: skip
        """For each piece sum and count of each term, then of each metric, one after the other, within `judging`."""
        read = range_reader(self.source)

        def judge(start: int, stop: int) -> list[float]:
            batch = read(start, stop)
            with rounds.round():
                return [number for pair in self._pairs(task, model, names, batch) for number in pair]

        for piece in pieces:
            yield [sum(column) for column in zip(*self.in_parts(piece, judge), strict=True)]

    def in_parts(self, piece: tuple[int, int], work: Callable[[int, int], T]) -> list[T]:
        """The results of `work(start, stop)` for a piece, or for its parts, in order, if it does not fit in memory.

        Raises DeviceMemoryError if one sample does not fit.
        """
        waiting, results = [piece], []
        while waiting:
            start, stop = waiting.pop()
            parts = self._cut(start, stop, self._cap())
            if len(parts) > 1:
                waiting += reversed(parts)
                continue
            result = _within_memory(work, start, stop)
            if result is None:
                memory.release(self.device)  # only here, where no exception holds the frames and their tensors any more
                if self.is_in_step:
                    what = f"{stop - start} samples of {self.split}"
                    raise DeviceMemoryError(memory.complaint(self.device, what, "give a smaller --max-sentences-valid"))
                self._refuse(start, stop)
                waiting.append((start, stop))
            else:
                results.append(result)
        return results

    def figures(self, task: Task, names: list[str], totals: Sequence[float]) -> dict[str, float]:
        """The result of `evaluate`, from the sum of the rows of all pieces."""
        added = iter(totals)
        sums = {name: (next(added), next(added)) for name in (*self.terms, *names)}
        means = {term: _mean(*sums.pop(term)) for term in self.terms}
        loss = sum(weight * means[term] for weight, term in zip(self.weights, self.terms))
        others = {term: mean for term, mean in means.items() if term != "loss"}
        return {"loss": loss, **others, **self._summary(task, sums)}

    def _own_pieces(self, assign: Callable[[int], tuple[int, ...]], group: int) -> list[tuple[int, int]]:
        shares = assign(len(self.source.dataset))
        start = sum(shares[:group])
        return self._cut(start, start + shares[group], self._cap())

    @property
    def _order(self) -> EpochOrder:
        return EpochOrder(len(self.source.dataset), seed=0, epoch=0, shuffle=False)

    def _cut(self, start: int, stop: int, cap: MicroBatchCap) -> list[tuple[int, int]]:
        return cut(self._order, start, stop, cap, lengths=self.lengths)

    @functools.cached_property
    def _sizes(self) -> MicroBatchSizes:
        """The sizes learned from forwards of this split."""
        return MicroBatchSizes(self.cap)

    def _cap(self) -> MicroBatchCap:
        """The most that this rank takes at once."""
        own, learned = self._sizes.cap, self.learned()
        return replace(own, samples=_least(own.samples, learned.samples), tokens=_least(own.tokens, learned.tokens))

    def _refuse(self, start: int, stop: int) -> None:
        """Record that these samples did not fit in memory at once."""
        is_first, size = self._sizes.cap == self.cap, stop - start
        tokens = 0 if self.lengths is None else int(self.lengths(self._order.take(start, stop)).sum())
        if not self._sizes.refuse(size, tokens):
            raise DeviceMemoryError(memory.complaint(self.device, f"even one sample of {self.split}"))
        if is_first:
            logger.warning(
                "the memory of %s did not hold a micro-batch of %d samples of %s: this rank takes smaller ones from now"
                " on, with the same result [batch-halved]", self.device, size, self.split,
            )  # fmt: skip

    def _metrics_of_first(self, task: Task, model: torch.nn.Module, rounds: Rounds) -> dict[str, tuple[float, float]]:
        """The names of the metrics, found with one sample, so that a rank without samples knows them too."""
        read = range_reader(self.source)

        def measure(start: int, stop: int) -> dict[str, tuple[float, float]]:
            sample = self.source.place(read(start, stop).sample)
            with rounds.round():
                return task.metrics(model, sample)

        (measured,) = self.in_parts((0, 1), measure)
        self._check_names(task, "metrics", measured)
        return measured

    def _summary(self, task: Task, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
        """The task's summary of the sums of its metrics."""
        found: Any = task.summarise(sums)
        if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
            raise TaskError(f"{type(task).__name__}.summarise returned {found!r}: expected a dict of name to number")
        self._check_names(task, "summarise", found)
        return {name: float(value) for name, value in found.items()}

    def _check_names(self, task: Task, hook: str, names: Collection[str]) -> None:
        for name in ("loss", *self.terms):
            if name in names:
                raise TaskError(
                    f"{type(task).__name__}.{hook} gave {name!r}, which is the name of a loss: give it another name"
                )

    def _pairs(
        self, task: Task, model: torch.nn.Module, names: list[str], batch: MicroBatch
    ) -> list[tuple[float, float]]:
        counts, sample = dict(zip(self.terms, batch.counts)), self.source.place(batch.sample)
        sums = check_sums(task, task.micro_step(model, sample, counts), self.terms)
        measured = task.metrics(model, sample)
        if sorted(measured) != names:
            raise TaskError(
                f"{type(task).__name__}.metrics gave {sorted(measured)}, earlier {names}: give the same names"
            )
        losses = [(_number(sums[term]) if counts[term] else 0.0, counts[term]) for term in self.terms]
        return losses + [(_number(measured[name][0]), _number(measured[name][1])) for name in names]


def _within_memory(work: Callable[[int, int], T], start: int, stop: int) -> T | None:
    """The result of `work`, or None if memory ran out."""
    try:
        return work(start, stop)
    except (RuntimeError, MemoryError) as error:
        if not memory.is_exhausted(error):
            raise
        return None


def _least(one: int | None, other: int | None) -> int | None:
    """The smaller limit; None for no limit."""
    return other if one is None else one if other is None else min(one, other)


def _number(value: torch.Tensor | float) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
