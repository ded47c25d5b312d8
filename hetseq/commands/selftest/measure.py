"""Measurements of a self-test: sums, counts and gradients of a task's terms over a step with a given cut.

Reads samples as a run does, and runs forward and backward for each micro-batch and each term. It judges nothing. As an
oracle it shares no code with the step of a run except the contract of tasks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hetseq.commands.selftest.fixed_randomness import held_still, widths
from hetseq.commands.selftest.splits import Cut, micro_batches
from hetseq.data.fetch import Fetcher, Request, base_order, seed_everything
from hetseq.data.loader import place_on
from hetseq.data.plan import Indices, Order, derive_seed
from hetseq.task import Task, check_sums, counts_of
from hetseq.training.task_checks import changed_terms

_EPOCH = 1


class Reader:
    """Reads collated micro-batches by positions in the first epoch, with the same random numbers as a run."""

    def __init__(self, dataset: Any, collate: Any, order: Order, *, seed: int) -> None:
        self.dataset, self.order, self.seed = dataset, order, seed
        self.collate = collate
        self._base = base_order(dataset)
        self._kept: dict[int, Any] | None = None

    @property
    def reads_together(self) -> bool:
        """Whether the data set reads whole batches at once."""
        return hasattr(self.dataset, "__getitems__")

    def samples(self, positions: Sequence[int], *, seed: int | None = None) -> Any:
        """The samples of the data set at these positions."""
        return self._fetch(self._indices(positions), self.seed if seed is None else seed)

    def batch(self, positions: Sequence[int], *, seed: int | None = None) -> Any:
        """The collated micro-batch of these positions."""
        if self._kept is None:
            return self.collate(self.samples(positions, seed=seed))
        indices = self._indices(positions)
        for index in set(indices.tolist()) - self._kept.keys():
            self._kept[index] = self._fetch(np.array([index]), self.seed)[0]
        # a copy, because a collater may change its input
        kept = [copy.deepcopy(self._kept[index]) for index in indices.tolist()]
        seed_everything(derive_seed(self.seed if seed is None else seed, _EPOCH, int(indices[-1])))
        return self.collate(kept)

    def index(self, position: int) -> int:
        """The sample of the data set at a position of the epoch."""
        return int(self._indices([position])[0])

    def keep(self) -> None:
        """Read each sample only once from now on; only if samples are read one by one."""
        self._kept = {}

    def _fetch(self, indices: Indices, seed: int) -> Any:
        return Fetcher(self.dataset, seed).samples(Request(_EPOCH, indices))

    def _indices(self, positions: Sequence[int]) -> Indices:
        places = np.array([int(self.order.take(position, position + 1)[0]) for position in positions], np.int64)
        return places if self._base is None else self._base[places]


@dataclass(frozen=True)
class StepPiece:
    """One micro-batch: its number of samples, the widths of its tensors, counts and sums by term."""

    samples: int
    widths: tuple[int, ...]
    counts: dict[str, float]
    sums: dict[str, float]


@dataclass
class MeasuredStep:
    """A measured step with some cut; `gradients` of the sums, flat, by term."""

    pieces: list[StepPiece] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)  # sum of the norms of the pieces' gradients

    def count(self, term: str) -> float:
        return sum(piece.counts[term] for piece in self.pieces)

    def sum(self, term: str) -> float:
        """The sum over the micro-batches with a count: the term may be 0/0 in others."""
        return sum(piece.sums[term] for piece in self.pieces if piece.counts[term])

    def loss(self, term: str) -> float:
        """The sum divided by the count; 0 if the count is 0."""
        return self.sum(term) / self.count(term) if self.count(term) else 0.0


def loss_difference(whole: MeasuredStep, cut: MeasuredStep, term: str) -> float:
    """The difference of a term's mean losses, relative to the mean loss or the sum of the pieces' absolute parts."""
    parts = sum(abs(piece.sums[term]) for piece in cut.pieces if piece.counts[term])
    scale = max(abs(whole.loss(term)), parts / cut.count(term) if cut.count(term) else 0.0)
    return _relative(abs(whole.loss(term) - cut.loss(term)), scale)


def gradient_difference(whole: MeasuredStep, cut: MeasuredStep, term: str) -> float:
    """The norm of the difference of the mean loss's gradients, relative to the whole's norm or the pieces' norms."""
    counts = whole.count(term), cut.count(term)
    if not all(counts):
        return 0.0
    first, second = whole.gradients[term] / counts[0], cut.gradients[term] / counts[1]
    # gradients that cancel between the pieces leave rounding errors
    scale = max(float(first.norm()), cut.lengths[term] / counts[1])
    return _relative(float((first - second).norm()), scale)


def _relative(gap: float, scale: float) -> float:
    if not math.isfinite(gap) or not math.isfinite(scale):
        return math.inf
    return gap / scale if scale else 0.0


class Bench:
    """Measures steps of one task and model, on one device in one precision."""

    def __init__(
        self, task: Task, model: torch.nn.Module, reader: Reader, *, terms: tuple[str, ...], device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.task, self.model, self.reader, self.terms = task, model, reader, terms
        self.device, self.dtype, self.place = device, dtype, place_on(device, dtype)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def measure(self, cut: Cut, first: int = 0, *, has_gradients: bool = True) -> MeasuredStep:
        """Measure the step of the positions from `first` on, micro-batch by micro-batch."""
        done = MeasuredStep()
        for start, stop in micro_batches(cut):
            self.add_(done, range(first + start, first + stop), has_gradients=has_gradients)
        return done

    def piece(self, positions: Sequence[int]) -> StepPiece:
        """Measure one micro-batch without gradients."""
        done = MeasuredStep()
        self.add_(done, positions, has_gradients=False)
        return done.pieces[0]

    def add_(self, done: MeasuredStep, positions: Sequence[int], *, has_gradients: bool) -> None:
        """Forward and backward of one micro-batch, added to `done`."""
        counts, sums, sizes = self.forward(positions)
        done.pieces.append(
            StepPiece(len(positions), sizes, counts, {term: float(total.detach()) for term, total in sums.items()})
        )
        live = [term for term in self.terms if counts[term]] if has_gradients else []
        with held_still():  # checkpointed layers draw again
            for term in live:
                gradient = self._gradient(sums[term])
                done.gradients[term] = done.gradients[term] + gradient if term in done.gradients else gradient
                done.lengths[term] = done.lengths.get(term, 0.0) + float(gradient.norm())

    def forward(
        self, positions: Sequence[int], *, seed: int = 0, is_still: bool = True
    ) -> tuple[dict[str, float], dict[str, torch.Tensor], tuple[int, ...]]:
        """Counts, sums and tensor widths of one micro-batch; every micro-batch gets the same seed."""
        batch = self.reader.batch(positions)
        counts = counts_of(self.task, batch, len(positions))
        if set(counts) != set(self.terms):
            raise changed_terms(self.task, counts, self.terms)
        placed = self.place(batch)
        seed_everything(seed)
        if is_still:
            with held_still():
                sums = check_sums(self.task, self.task.micro_step(self.model, placed, counts), self.terms)
        else:
            sums = check_sums(self.task, self.task.micro_step(self.model, placed, counts), self.terms)
        return counts, sums, widths(batch)

    def _gradient(self, total: torch.Tensor) -> torch.Tensor:
        """The gradient, flat, in fp64, zeros for unused parameters; the graph is kept for the next term."""
        for parameter in self.parameters:
            parameter.grad = None
        if total.requires_grad:
            total.backward(retain_graph=True)
        flat = [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()).double().flatten()
            for parameter in self.parameters
        ]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)
