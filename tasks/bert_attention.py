"""Attention of BERT: every token to the real tokens of its own sequence, in a padded batch or a packed one.

Responsible for where the sequences are in the arithmetic of attention, which is that of `attention`. All of it is
exact: what is masked has a weight of 0, not a small one.

Two ideas. Sequences of one length need no padding, so where a kernel costs little to start, as on a CPU, each length
has its own; elsewhere sequences are padded for attention alone, which at 128 tokens is a small part of the arithmetic.
And few tokens of the last layer are wanted, though they look at all others: on a CPU only those have queries. The
queries of a sequence then need places beside each other, as many as the sequence with the most of them has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasks.attention import attend, is_written_out, scores
from tasks.bert_packing import Sequences
from tasks.dropout import drop

#: queries (k, heads, size of a head), keys and values as `Attention` has them, the rate of dropout: to (k, heads, size)
AttendForSome = Callable[[Tensor, Tensor, float], Tensor]

#: kinds of devices where each length has a kernel of its own
_LENGTHS_APART = frozenset({"cpu"})
_MULTIPLE = 8  # of the length of rows, for the tensor cores of GPUs
_LARGEST_PART = 0.5  # of all tokens: with more places for queries it is not worth while to look for them

#: (sequences, tokens of each) of those that have one length and lie beside each other
Runs = list[tuple[int, int]]


class Attention(Protocol):
    """Attention among the tokens of one batch."""

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        """Queries, keys and values to attended values, with the rate of dropout.

        parts: (n, L, 3, heads, size of a head), or of a packed batch (T, 3, heads, size of a head); gives
        (n, L, heads, size of a head) or (T, heads, size of a head).
        """
        ...

    def for_some(self, wanted: Tensor) -> AttendForSome | None:
        """The same for the queries of the tokens at `wanted` alone, (k,) int64: row * L + column or 0 to T - 1.

        Keys and values are in one tensor as above, 2 in place of 3. None: it would save nothing.
        """
        ...


def among_rows(is_real: Tensor) -> Attention:
    """Attention in a padded batch whose mask, (n, L) bool, is True where there is a token."""
    return _Masked(is_real[:, None, None, :])


def within(sequences: Sequences) -> Attention:
    """Attention in a packed batch."""
    positions, count = sequences.positions, len(sequences.lengths)
    if positions.device.type in _LENGTHS_APART:
        return _ByLength([(sum(1 for _ in run), length) for length, run in itertools.groupby(sequences.lengths)])
    width = -(-max(sequences.lengths) // _MULTIPLE) * _MULTIPLE
    rows = (positions == 0).cumsum(0) - 1  # (T,): every sequence begins with its position 0
    places = rows * width + positions  # (T,)
    is_real = positions.new_zeros(count * width, dtype=torch.bool).index_fill(0, places, True)
    return _Padded(places, is_real.view(count, width))


@dataclass(frozen=True)
class _Masked:
    """Rows of one length, some of whose tokens are not real."""

    mask: Tensor  # (n, 1, 1, L) bool: the same for all heads and all queries

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        query, key, value = _heads_first(parts)
        return attend(query, key, value, rate, mask=self.mask).transpose(1, 2)

    def for_some(self, wanted: Tensor) -> AttendForSome | None:
        count, length = self.mask.shape[0], self.mask.shape[-1]
        seats = _find_seats(wanted, [(count, length)])
        if seats is None:
            return None

        def attend_for_some(query: Tensor, parts: Tensor, rate: float) -> Tensor:
            seated = seats.take(query).unflatten(0, (count, -1)).transpose(1, 2)
            key, value = _heads_first(parts)
            attended = attend(seated, key, value, rate, mask=self.mask)
            return seats.leave(attended.transpose(1, 2).flatten(0, 1))

        return attend_for_some


@dataclass(frozen=True)
class _Padded:
    """Sequences that are padded for attention alone."""

    places: Tensor  # (T,) int64: row * L + column
    is_real: Tensor  # (n, L) bool

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        rows = parts.new_zeros(self.is_real.numel(), *parts.shape[1:]).index_copy(0, self.places, parts)
        attended = among_rows(self.is_real)(rows.unflatten(0, self.is_real.shape), rate)
        return attended.flatten(0, 1).index_select(0, self.places)

    def for_some(self, wanted: Tensor) -> None:
        return None


@dataclass(frozen=True)
class _ByLength:
    """Sequences without any padding, those of one length at once."""

    runs: Runs

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        return _attend_by_length(parts, None, rate, self.runs, self.runs)

    def for_some(self, wanted: Tensor) -> AttendForSome | None:
        seats = _find_seats(wanted, self.runs)
        if seats is None:
            return None

        def attend_for_some(query: Tensor, parts: Tensor, rate: float) -> Tensor:
            return seats.leave(_attend_by_length(parts, seats.take(query), rate, self.runs, seats.runs))

        return attend_for_some


@dataclass(frozen=True)
class _Seats:
    """A place for each of k queries, those of a sequence beside each other."""

    places: Tensor  # (k,) int64: 0 to S - 1
    runs: Runs  # the same sequences, with the places that each has

    def take(self, query: Tensor) -> Tensor:
        """(k, ...) to (S, ...), zeros where nobody sits."""
        count = sum(sequences * width for sequences, width in self.runs)
        return query.new_zeros(count, *query.shape[1:]).index_copy(0, self.places, query)

    def leave(self, attended: Tensor) -> Tensor:
        """(S, ...) to (k, ...)."""
        return attended.index_select(0, self.places)


def _find_seats(wanted: Tensor, runs: Runs) -> _Seats | None:
    """Seats for the tokens at `wanted`; None where looking for them would wait for a device, or saves little."""
    if wanted.device.type not in _LENGTHS_APART or torch.compiler.is_compiling():
        return None
    counts, lengths = np.array(runs).T
    sequences = np.arange(counts.sum()).repeat(lengths.repeat(counts))[wanted.numpy()]  # (k,): which one each is of
    taken = np.bincount(sequences, minlength=counts.sum())
    widths = np.maximum.reduceat(taken, counts.cumsum() - counts).clip(min=1)  # of each run: a kernel has one for all
    if (widths * counts).sum() > _LARGEST_PART * (lengths * counts).sum():
        return None
    width_of_each = widths.repeat(counts)
    starts, before = width_of_each.cumsum() - width_of_each, taken.cumsum() - taken
    order = sequences.argsort(kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order)) + (starts - before)[sequences[order]]
    return _Seats(torch.from_numpy(places), list(zip(counts.tolist(), widths.tolist())))


def _attend_by_length(parts: Tensor, query: Tensor | None, rate: float, runs: Runs, query_runs: Runs) -> Tensor:
    # parts: (T, 3, heads, size), or (T, 2, heads, size) with the queries (S, heads, size); to (T or S, heads, size)
    if is_written_out(parts, max(length for _, length in runs), rate) and not torch.compiler.is_compiling():
        attended: Tensor = _WrittenOut.apply(parts, query, rate, runs, query_runs)  # type: ignore[no-untyped-call]
        return attended
    pieces = []
    queries, others = _split(parts, query)
    for one, other in zip(_by_run(queries, query_runs), _by_run(others, runs)):
        key, value = other.permute(2, 0, 3, 1, 4)
        attended = attend(one.transpose(1, 2), key, value, rate)
        pieces.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces)


class _WrittenOut(torch.autograd.Function):
    """Attention written out, a run of sequences after the other, straight from one tensor into another.

    As autograd would do it, each of the many small kernels would have an entry of its own in the graph, and their
    results would be joined afterwards. With D = dropout(P) and O = D V the gradient of the scores is, as in
    FlashAttention (Dao et al. 2022, arXiv 2205.14135, appendix B), dS = D * dD - P * rowsum(dO * O): P and D are all
    that is kept.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, query: Tensor | None, rate: float, runs: Runs, query_runs: Runs) -> Tensor:
        queries, others = _split(parts, query)
        attended, kept = parts.new_empty(queries.shape), []
        by_run = _by_run(queries, query_runs), _by_run(others, runs), _by_run(attended, query_runs)
        for run, one, other, place in zip(query_runs, *by_run):
            asking, (key, value) = _by_head(one), _heads_first(other).flatten(1, 2)
            weights = scores(asking, key).softmax(dim=-1)
            dropped = drop(weights, rate)
            place.copy_(_tokens_first(dropped @ value, run))
            kept += [weights, dropped]
        ctx.runs = runs, query_runs
        ctx.save_for_backward(parts, query, attended, *kept)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts, query, attended, *kept = ctx.saved_tensors
        (runs, query_runs), scale = ctx.runs, parts.shape[-1] ** -0.5
        of_parts, of_query = torch.empty_like(parts), None if query is None else torch.empty_like(query)
        means = (gradient * attended).sum(-1, keepdim=True)  # (S, heads, 1): of dD, by the weights
        (queries, others), (of_queries, of_others) = _split(parts, query), _split(of_parts, of_query)
        of_run = zip(query_runs, runs, kept[::2], kept[1::2])
        by_query = zip(*(_by_run(tensor, query_runs) for tensor in (queries, gradient, means, of_queries)))
        by_key = zip(*(_by_run(tensor, runs) for tensor in (others, of_others)))
        for (query_run, run, weights, dropped), (one, given, mean, place), (other, places) in zip(
            of_run, by_query, by_key
        ):
            asking, of_attended, mean = (_by_head(tensor) for tensor in (one, given, mean))
            key, value = _heads_first(other).flatten(1, 2)
            of_scores = (of_attended @ value.transpose(1, 2)).mul_(dropped).addcmul_(weights, mean, value=-1)
            of_key, of_value = places.unbind(2)
            place.copy_(_tokens_first((of_scores @ key).mul_(scale), query_run))
            of_key.copy_(_tokens_first((of_scores.transpose(1, 2) @ asking).mul_(scale), run))
            of_value.copy_(_tokens_first(dropped.transpose(1, 2) @ of_attended, run))
        return of_parts, of_query, None, None, None


def _split(parts: Tensor, query: Tensor | None) -> tuple[Tensor, Tensor]:
    # queries (S, heads, size), and keys and values (T, 2, heads, size)
    return (parts[:, 0] if query is None else query), parts[:, -2:]


def _by_run(tensor: Tensor, runs: Runs) -> Iterator[Tensor]:
    # (T, ...) to (n, L, ...) of each run
    for run, piece in zip(runs, tensor.split([count * length for count, length in runs])):
        yield piece.unflatten(0, run)


def _heads_first(parts: Tensor) -> Tensor:
    # (n, L, k, heads, size) to (k, n, heads, L, size)
    turned = parts.permute(2, 0, 3, 1, 4)
    return turned.contiguous() if parts.device.type == "cpu" else turned


def _by_head(tokens: Tensor) -> Tensor:
    # (n, L, heads, size) to (n * heads, L, size)
    return tokens.transpose(1, 2).flatten(0, 1)


def _tokens_first(attended: Tensor, run: tuple[int, int]) -> Tensor:
    # (n * heads, L, size) to (n, L, heads, size)
    count, length = run
    return attended.view(count, -1, length, attended.shape[-1]).transpose(1, 2)
