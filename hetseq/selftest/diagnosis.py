"""Why a term depends on the cut: from two measured steps that should be equal and are not, to one finding.

Responsible for telling the usual faults apart by small experiments: a mean, a count that does not add up, padding,
samples that are mixed. The one idea: each fault has one experiment of a few samples that only it fails, and the most
special is tried first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from hetseq.selftest.bench import Bench, Measured, Piece
from hetseq.selftest.findings import Finding
from hetseq.task import is_overridden

_PAGE = "docs/exactness.md"
_MOST = 12  # samples of an experiment with pairs


class Diagnosis:
    """Experiments on one bench with the samples at positions first..first + samples - 1."""

    def __init__(self, bench: Bench, first: int, samples: int, *, tolerance: float) -> None:
        self.bench, self.tolerance = bench, tolerance
        self.positions = range(first, first + samples)

    def of_term(self, term: str, whole: Measured, cut: Measured) -> Finding:
        """The reason why a term of the two is not the same."""
        return (
            self._of_counts(term, whole, cut)
            or self._of_mean(term, whole, cut)
            or self._of_padding(term, whole, cut)
            or self._of_mixing(term, whole, cut)
        )

    def is_close(self, first: float, second: float, *, scale: float = 0.0) -> bool:
        """Equal within the tolerance, relative to the largest of them and of `scale`."""
        return abs(first - second) <= self.tolerance * max(abs(first), abs(second), abs(scale))

    def _of_counts(self, term: str, whole: Measured, cut: Measured) -> Finding | None:
        found, expected = cut.count(term), whole.count(term)
        if self.is_close(found, expected):
            return None
        pieces = [piece for measured in (whole, cut) for piece in measured.pieces]
        if _grows_with_width(term, pieces):
            return Finding(
                "count of padding", term,
                f"count gives {expected:g} for the step in one piece and {found:g} for its micro-batches together: it"
                " counts padding, and each micro-batch is padded to its own longest sample",
                "Count what is there: a mask's sum, or the labels that are not ignored, never the size of a tensor",
                found, expected,
            )  # fmt: skip
        sizes = {piece.counts[term] for piece in pieces}
        if len(sizes) == 1:
            text, remedy = (
                f"count gives {expected:g} for a micro-batch of any size, so it does not add up",
                "Give the number of samples (or tokens) of the micro-batch; with it loss must be their sum",
            )
        else:
            text, remedy = (
                f"count gives {expected:g} for the step in one piece and {found:g} for its micro-batches together",
                "Let count be a sum over samples: of two micro-batches together it is the sum of theirs",
            )
        return Finding("count", term, text, remedy, found, expected)

    def _of_mean(self, term: str, whole: Measured, cut: Measured) -> Finding | None:
        """A mean over the count, or over the samples, of whole and pieces."""
        pieces = [piece for piece in cut.pieces if piece.counts[term]]
        together, added = whole.sum(term), cut.sum(term)
        scale = sum(abs(piece.sums[term]) for piece in pieces) / max(len(pieces), 1)
        if len(pieces) < 2 or self.is_close(together, added, scale=scale):
            return None
        for weights in ([piece.counts[term] for piece in pieces], [float(piece.samples) for piece in pieces]):
            mean = sum(weight * piece.sums[term] for weight, piece in zip(weights, pieces)) / sum(weights)
            if self.is_close(together, mean, scale=scale):
                return Finding(
                    "mean", term,
                    f"loss gives a mean, not a sum: {together:.6g} for the step in one piece, {added:.6g} for its"
                    f" {len(pieces)} micro-batches added up",
                    f"Use reduction='sum' (or mean * count); HetSeq divides by the count of all ranks, here"
                    f" {whole.count(term):g}",
                    added, together,
                )  # fmt: skip
        return None

    def _of_padding(self, term: str, whole: Measured, cut: Measured) -> Finding | None:
        """Samples alike in width add up, and others do not."""
        if len({piece.widths for piece in (*whole.pieces, *cut.pieces)}) < 2:
            return None
        alike: list[tuple[Piece, Piece, Piece]] = []
        others: list[tuple[Piece, Piece, Piece]] = []
        singles = [(position, self.bench.piece([position])) for position in self.positions[:_MOST]]
        for (a, first), (b, second) in pairwise(singles):
            pair = self.bench.piece([a, b])
            wide = first.widths == second.widths == pair.widths
            (alike if wide else others).append((pair, first, second))
        for position, single in singles:  # a sample beside itself is as wide as it is
            twice = self.bench.piece([position, position])
            if twice.widths == single.widths:
                alike.append((twice, single, single))
        # the gap of the mean losses, not of the sums: a count may see padding too
        broken = next((trio for trio in others if not self._adds_up(term, *trio)), None)
        if broken is None or not all(self._adds_up(term, *trio) for trio in alike):
            return None
        pair, first, second = broken
        added = first.sums[term] + second.sums[term]
        return Finding(
            "padding", term,
            f"the loss sees padding: two samples of different lengths give {added:.6g} one by one and"
            f" {pair.sums[term]:.6g} together, where the shorter one is padded",
            "Leave padding out: ignore_index or a mask in the loss, and an attention mask in the model",
            pair.sums[term], added,
        )  # fmt: skip

    def _adds_up(self, term: str, pair: Piece, first: Piece, second: Piece) -> bool:
        added = sum(piece.sums[term] for piece in (first, second) if piece.counts[term])
        scale = sum(abs(piece.sums[term]) for piece in (first, second) if piece.counts[term])
        return self.is_close(pair.sums[term] if pair.counts[term] else 0.0, added, scale=scale)

    def _of_mixing(self, term: str, whole: Measured, cut: Measured) -> Finding:
        module = mixing_module(self.bench, list(self.positions), tolerance=self.tolerance)
        added, together = cut.sum(term), whole.sum(term)
        scale = sum(abs(piece.sums[term]) for piece in cut.pieces if piece.counts[term])
        if self.is_close(added, together, scale=scale):
            return Finding(
                "gradient", term,
                "its sum is the same on any cut, but its gradient is not",
                "Look for hooks, custom backwards or normalised gradients that see a whole micro-batch",
            )  # fmt: skip
        if not module and not is_overridden(self.bench.task, "loss"):
            return Finding(
                "mean", term,
                f"the model's loss is not the mean over the samples: times their number it is {together:.6g} for the"
                f" step in one piece, and {added:.6g} for its micro-batches added up",
                "Write loss and count: the sum, and what it is divided by, as masked words (docs/custom-task.md)",
                added, together,
            )  # fmt: skip
        where = f"{module} mixes" if module else "the loss mixes"
        return Finding(
            "mixing", term,
            f"{where} the samples of a micro-batch: {together:.6g} for the step in one piece, {added:.6g} for its"
            " micro-batches added up",
            f"Let each sample's loss depend on that sample alone, or give --unit-size N, which makes every micro-batch"
            f" the same N samples on any ranks ({_PAGE})",
            added, together,
        )  # fmt: skip


def mixing_module(bench: Bench, positions: Sequence[int], *, tolerance: float) -> str | None:
    """The first module, by the end of its call, whose rows for some samples depend on which others are there; as
    `encoder.1 (BatchNorm1d)`. None if none does, or where rows cannot be told apart."""
    half = len(positions) // 2
    if half < 2:
        return None
    together, first, second = (_outputs(bench, chosen) for chosen in (positions, positions[:half], positions[half:]))
    for name, rows in together.items():
        if name not in first or name not in second:
            continue
        parts = (first[name], second[name])
        if rows.shape[0] != len(positions) or any(part.shape[1:] != rows.shape[1:] for part in parts):
            continue
        gap = float((torch.cat(parts) - rows).norm()) if sum(map(len, parts)) == len(rows) else 0.0
        if gap > tolerance * float(rows.norm()):
            return f"{name or 'the model'} ({type(bench.model.get_submodule(name)).__name__})"
    return None


def _outputs(bench: Bench, positions: Sequence[int]) -> dict[str, torch.Tensor]:
    """The first output of each module, by name, in the order in which calls end."""
    found: dict[str, torch.Tensor] = {}
    with _watched(bench.model, found):
        bench.forward(positions)
    return found


@contextmanager
def _watched(model: torch.nn.Module, found: dict[str, torch.Tensor]) -> Iterator[None]:
    def watch(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, torch.Tensor) and first.dim() and first.is_floating_point():
                found.setdefault(name, first.detach().clone())

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _grows_with_width(term: str, pieces: Sequence[Piece]) -> bool:
    """Counts are samples times one of the widths, which differs from piece to piece."""
    places = min((len(piece.widths) for piece in pieces), default=0)
    for place in range(places):
        sizes = [piece.widths[place] for piece in pieces]
        ratios = [piece.counts[term] / (piece.samples * size) for piece, size in zip(pieces, sizes) if size]
        if len(set(sizes)) > 1 and ratios and ratios[0] and all(math.isclose(r, ratios[0]) for r in ratios):
            return True
    return False
