"""Figures over a whole data set, in pieces that no number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hetseq.data.loader import Source, range_reader
from hetseq.errors import DisagreementError

#: name -> sum and count
Sums = Mapping[str, "tuple[torch.Tensor | float, torch.Tensor | float]"]
Rows = list[dict[str, list[float]]]  # of each piece


def pieces_of(samples: int, size: int) -> list[tuple[int, int]]:
    """First and end sample of each piece; the last one may be smaller."""
    return [(start, min(start + size, samples)) for start in range(0, samples, size)]


def measured(
    measure: Callable[[Any], Sums], source: Source, pieces: Sequence[tuple[int, int]],
    modules: Sequence[torch.nn.Module], computing: AbstractContextManager[object],
) -> Rows:  # fmt: skip
    """The sums and counts of these pieces, with all modules in evaluation mode and without gradients."""
    read, rows = range_reader(source), []
    with _evaluating(modules), torch.no_grad(), computing:
        for start, stop in pieces:
            found = measure(source.place(read(start, stop).sample))
            rows.append({name: [float(total), float(number)] for name, (total, number) in found.items()})
    return rows


def means(rows: Rows, pieces: int) -> dict[str, float]:
    """sum / count by name, added in the order of the pieces. Raises DisagreementError if rows are too few or many."""
    if len(rows) != pieces:
        raise DisagreementError(
            f"run.evaluate: this rank cuts its data into {pieces} batches, and the ranks measured {len(rows)}: give it"
            " the same data and batch_size on every rank"
        )
    totals: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, (total, number) in row.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = before[0] + total, before[1] + number
    return {name: total / number for name, (total, number) in totals.items() if number}


@contextmanager
def _evaluating(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    training = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, was_training in training:
            part.training = was_training
