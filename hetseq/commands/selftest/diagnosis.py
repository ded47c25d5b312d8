"""Diagnosis of a term that depends on the cut: from two measured steps that should be equal to one finding.

Distinguishes the usual faults by small experiments: a mean, a count that does not add up, a penalty on the weights, a
divisor other than the count, padding, mixed samples. The one idea: each fault fails one experiment on a few samples
that the others pass, and the most specific experiment is tried first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from hetseq.commands.selftest.findings import SelftestFinding
from hetseq.commands.selftest.fixed_randomness import tensors_of
from hetseq.commands.selftest.measure import Bench, MeasuredStep, StepPiece
from hetseq.task import is_overridden

_PAGE = "docs/concepts/exactness.md"
_MOST = 12  # samples of an experiment with pairs
_APART = 1e-3  # relative: the weights of samples with closer losses cannot be found


class Diagnosis:
    """Experiments on one bench with the samples at positions first..first + samples - 1."""

    def __init__(self, bench: Bench, first: int, samples: int, *, tolerance: float, least: int = 1) -> None:
        self.bench, self.tolerance, self._least = bench, tolerance, least  # samples of the smallest micro-batch
        self.positions = range(first, first + samples)

    @cached_property
    def singles(self) -> list[StepPiece]:
        """The first samples, one by one."""
        return [self.bench.piece([position]) for position in self.positions[:_MOST]]

    @cached_property
    def doubles(self) -> list[StepPiece]:
        """Each of them twice in one micro-batch."""
        return [self.bench.piece([position, position]) for position in self.positions[:_MOST]]

    @cached_property
    def pairs(self) -> list[StepPiece]:
        """Each of them with its next neighbour; one fewer."""
        return [self.bench.piece([position, position + 1]) for position in self.positions[: _MOST - 1]][
            : len(self.positions) - 1
        ]

    def of_term(self, term: str, whole: MeasuredStep, cut: MeasuredStep) -> SelftestFinding:
        """The reason why a term differs between the two."""
        found = self._of_counts(term, whole, cut) or self._of_mean(term, whole, cut)
        if found is None and self._least == 1:
            found = (
                self._of_repetition(term)
                or self._of_penalty(term)
                or self._of_quotient(term, whole)
                or self._of_padding(term, whole, cut)
            )
        return found or self._of_mixing(term, whole, cut)

    def is_close(self, first: float, second: float, *, scale: float = 0.0) -> bool:
        """Equal within the tolerance, relative to the largest of them and of `scale`."""
        return abs(first - second) <= self.tolerance * max(abs(first), abs(second), abs(scale))

    def _of_counts(self, term: str, whole: MeasuredStep, cut: MeasuredStep) -> SelftestFinding | None:
        found, expected = cut.count(term), whole.count(term)
        if self.is_close(found, expected):
            return None
        pieces = [piece for measured in (whole, cut) for piece in measured.pieces]
        if _grows_with_width(term, pieces):
            return SelftestFinding(
                "count of padding", term,
                f"count gives {expected:g} for the step in one piece and {found:g} for its micro-batches together: it"
                " counts padding, and each micro-batch is padded to its own longest sample",
                "Count real tokens: the sum of a mask, or the labels that are not ignored, never the size of a tensor",
                found, expected,
            )  # fmt: skip
        sizes = {piece.counts[term] for piece in pieces}
        if len(sizes) == 1:
            text, remedy = (
                f"count gives {expected:g} for a micro-batch of any size, so it does not add up",
                "Give the number of samples (or tokens) of the micro-batch; then loss must be the sum over them",
            )
        else:
            text, remedy = (
                f"count gives {expected:g} for the step in one piece and {found:g} for its micro-batches together",
                "Let count be a sum over samples: for two micro-batches together it is the sum of their counts; a"
                " collater must not drop or cut samples depending on the others",
            )
        return SelftestFinding("count", term, text, remedy, found, expected)

    def _of_mean(self, term: str, whole: MeasuredStep, cut: MeasuredStep) -> SelftestFinding | None:
        """A mean over the count, or over the samples, in the whole and in the pieces."""
        pieces = [piece for piece in cut.pieces if piece.counts[term]]
        together, added = whole.sum(term), cut.sum(term)
        scale = sum(abs(piece.sums[term]) for piece in pieces) / max(len(pieces), 1)
        if len(pieces) < 2 or self.is_close(together, added, scale=scale):
            return None
        for weights in ([piece.counts[term] for piece in pieces], [float(piece.samples) for piece in pieces]):
            mean = sum(weight * piece.sums[term] for weight, piece in zip(weights, pieces)) / sum(weights)
            if self.is_close(together, mean, scale=scale):
                return SelftestFinding(
                    "mean", term,
                    f"loss gives a mean, not a sum: {together:.6g} for the step in one piece, {added:.6g} for its"
                    f" {len(pieces)} micro-batches added up",
                    f"Use reduction='sum' (or mean * count); HetSeq divides by the count over all ranks, here"
                    f" {whole.count(term):g}",
                    added, together,
                )  # fmt: skip
        return None

    def _of_repetition(self, term: str) -> SelftestFinding | None:
        """A mean over anything: the same sample twice gives the same as once, and two samples a value in between."""
        known = [
            (once.sums[term], twice.sums[term]) for once, twice in zip(self.singles, self.doubles) if once.counts[term]
        ]  # fmt: skip
        if len(known) < 2 or not all(once and self.is_close(once, twice) for once, twice in known):
            return None
        for pair, *two in zip(self.pairs, self.singles, self.singles[1:]):
            low, high = sorted(each.sums[term] for each in two)
            if all(each.counts[term] for each in two) and not low < pair.sums[term] < high:
                return None  # not a mean, for example a maximum
        once, twice = known[0]
        return SelftestFinding(
            "mean", term,
            f"loss gives a mean, not a sum: one sample gives {once:.6g}, and the same sample twice {twice:.6g},"
            f" expected {2 * once:.6g}",
            "Use reduction='sum', and give the mean's divisor as count; HetSeq divides by the count over all ranks",
            twice, 2 * once,
        )  # fmt: skip

    def _of_penalty(self, term: str) -> SelftestFinding | None:
        """A constant added to each micro-batch: two samples together have it once, separately twice."""
        trios = [*zip(self.pairs, self.singles, self.singles[1:]), *zip(self.doubles, self.singles, self.singles)]
        trios = [trio for trio in trios if all(piece.counts[term] for piece in trio)]
        lacking = [first.sums[term] + second.sums[term] - pair.sums[term] for pair, first, second in trios]
        scale = max((abs(piece.sums[term]) for trio in trios for piece in trio), default=0.0)
        if not lacking or not max(lacking) - min(lacking) <= self.tolerance * scale < abs(lacking[0]):
            return None
        return SelftestFinding(
            "penalty", term,
            f"it adds {lacking[0]:.6g} to each micro-batch, for any number of samples, like a penalty on weights",
            "Multiply that part by count, because HetSeq divides by it; for an L2 penalty use --weight-decay",
        )  # fmt: skip

    def _of_quotient(self, term: str, whole: MeasuredStep) -> SelftestFinding | None:
        """A weighted mean times the samples: two samples show their weights, which predict one of them twice."""
        told: list[SelftestFinding] = []
        for place, (first, second) in enumerate(pairwise(self.singles)):
            if not first.counts[term] or not second.counts[term]:
                continue
            a, b, pair = first.sums[term], second.sums[term], self.pairs[place].sums[term]
            if self.is_close(a + b, pair) or abs(a - b) <= _APART * max(abs(a), abs(b)):
                continue  # their weights cannot be found
            weight = (pair / 2 - b) / (a - b)  # of the first
            begin = self.positions[place]
            trio = self.bench.piece([begin, begin, begin + 1]).sums[term] / 3
            foretold = b + 2 * weight / (1 + weight) * (a - b) if weight > 0 else math.nan
            if not 0 < weight < 1 or not self.is_close(trio, foretold, scale=max(abs(a), abs(b)) / _APART):
                return None
            told.append(
                SelftestFinding(
                    "mean", term,
                    f"it is divided by another quantity of the micro-batch than count, such as its tokens: two samples"
                    f" give {a:.6g} and {b:.6g} one by one, and {pair:.6g} together",
                    "Give only the sum, and the divisor as count; HetSeq divides by the count over all ranks, here"
                    f" {whole.count(term):g}",
                    pair, a + b,
                )
            )  # fmt: skip
        return told[0] if len(told) > 1 else None

    def _of_padding(self, term: str, whole: MeasuredStep, cut: MeasuredStep) -> SelftestFinding | None:
        """Samples of equal width add up, and others do not."""
        if len({piece.widths for piece in (*whole.pieces, *cut.pieces)}) < 2:
            return None
        alike: list[tuple[StepPiece, StepPiece, StepPiece]] = []
        others: list[tuple[StepPiece, StepPiece, StepPiece]] = []
        for pair, first, second in zip(self.pairs, self.singles, self.singles[1:]):
            wide = first.widths == second.widths == pair.widths
            (alike if wide else others).append((pair, first, second))
        for twice, single in zip(self.doubles, self.singles):  # the same sample twice has the same width
            if twice.widths == single.widths:
                alike.append((twice, single, single))
        # the difference of the mean losses, not of the sums: a count may include padding too
        broken = next((trio for trio in others if not self._adds_up(term, *trio)), None)
        if broken is None or not all(self._adds_up(term, *trio) for trio in alike):
            return None
        pair, first, second = broken
        added = first.sums[term] + second.sums[term]
        return SelftestFinding(
            "padding", term,
            f"the loss sees padding: two samples of different lengths give {added:.6g} one by one and"
            f" {pair.sums[term]:.6g} together, where the shorter one is padded",
            "Exclude padding: ignore_index or a mask in the loss, and an attention mask in the model",
            pair.sums[term], added,
        )  # fmt: skip

    def _adds_up(self, term: str, pair: StepPiece, first: StepPiece, second: StepPiece) -> bool:
        added = sum(piece.sums[term] for piece in (first, second) if piece.counts[term])
        scale = sum(abs(piece.sums[term]) for piece in (first, second) if piece.counts[term])
        return self.is_close(pair.sums[term] if pair.counts[term] else 0.0, added, scale=scale)

    def _of_mixing(self, term: str, whole: MeasuredStep, cut: MeasuredStep) -> SelftestFinding:
        module = mixing_module(self.bench, list(self.positions), tolerance=self.tolerance)
        added, together = cut.sum(term), whole.sum(term)
        scale = sum(abs(piece.sums[term]) for piece in cut.pieces if piece.counts[term])
        if self.is_close(added, together, scale=scale):
            return SelftestFinding(
                "gradient", term,
                "its sum is the same on any cut, but its gradient is not",
                "Look for hooks, custom backwards or normalised gradients that see a whole micro-batch",
            )  # fmt: skip
        if not module and not is_overridden(self.bench.task, "loss"):
            return SelftestFinding(
                "mean", term,
                f"the model's loss is not the mean over the samples: times their number it is {together:.6g} for the"
                f" step in one piece, and {added:.6g} for its micro-batches added up",
                "Write loss and count: the sum, and its divisor, such as masked words (docs/start/own-model.md)",
                added, together,
            )  # fmt: skip
        where = f"{module} mixes" if module else "the loss mixes"
        clue = "" if module or self._least > 1 else self._clue(term)
        return SelftestFinding(
            "mixing", term,
            f"{where} the samples of a micro-batch: {together:.6g} for the step in one piece, {added:.6g} for its"
            f" micro-batches added up{clue}",
            f"Let each sample's loss depend on that sample alone, or give --unit-size N, so that every micro-batch has"
            f" the same N samples on any ranks ({_PAGE})",
            added, together,
        )  # fmt: skip

    def _clue(self, term: str) -> str:
        """A hint about a loss that mixes, from the same sample twice."""
        once, twice = self.singles[0], self.doubles[0]
        if not once.counts[term] or self._adds_up(term, twice, once, once):
            return ""
        return (
            f" (one sample gives {once.sums[term]:.6g}, and the same sample twice {twice.sums[term]:.6g}: part of it"
            " is a mean, or is added once per micro-batch)"
        )


def mixing_module(bench: Bench, positions: Sequence[int], *, tolerance: float) -> str | None:
    """The first module, by the end of its call, whose output rows depend on the other samples although its input rows
    do not, such as `encoder.1 (BatchNorm1d)`. None if there is none, or if rows cannot be assigned to samples.
    """
    half = len(positions) // 2
    if half < 2:
        return None
    together, first, second = (_calls(bench, chosen) for chosen in (positions, positions[:half], positions[half:]))

    def differ(rows: torch.Tensor | None, parts: Sequence[torch.Tensor | None]) -> bool:
        known = [part for part in parts if part is not None and rows is not None and part.shape[1:] == rows.shape[1:]]
        if rows is None or len(known) < 2 or not sum(map(len, known)) == len(rows) == len(positions):
            return False  # rows cannot be assigned to samples
        return not float((torch.cat(known) - rows).norm()) <= tolerance * float(rows.norm())

    for name in [name for name in together if name in first and name in second]:
        (given, made), parts = together[name], (first[name], second[name])
        if differ(made, [part[1] for part in parts]) and not differ(given, [part[0] for part in parts]):
            return f"{name or 'the model'} ({type(bench.model.get_submodule(name)).__name__})"
    return None


_Call = tuple[torch.Tensor | None, torch.Tensor | None]


def _calls(bench: Bench, positions: Sequence[int]) -> dict[str, _Call]:
    """Input and output of each module's first call, by name, in the order in which the calls end."""
    found: dict[str, _Call] = {}
    with _watched(bench.model, found):
        bench.forward(positions)
    return found


@contextmanager
def _watched(model: torch.nn.Module, found: dict[str, _Call]) -> Iterator[None]:
    def watch(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # copied, because a later layer may change it in place
            given, made = (next((_copied(one) for one in tensors_of(each)), None) for each in ((args, kwargs), output))
            found.setdefault(name, (given, made))

        return hook

    hooks = [module.register_forward_hook(watch(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _copied(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.detach().clone() if tensor.dim() and tensor.is_floating_point() else None


def _grows_with_width(term: str, pieces: Sequence[StepPiece]) -> bool:
    """Whether counts are proportional to samples times one of the widths, which differs between pieces."""
    places = min((len(piece.widths) for piece in pieces), default=0)
    for place in range(places):
        sizes = [piece.widths[place] for piece in pieces]
        ratios = [piece.counts[term] / (piece.samples * size) for piece, size in zip(pieces, sizes) if size]
        if len(set(sizes)) > 1 and ratios and ratios[0] and all(math.isclose(r, ratios[0]) for r in ratios):
            return True
    return False
