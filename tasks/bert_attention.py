"""Attention of BERT: every token to the real tokens of its own sequence, in a padded batch or a packed one.

Responsible for where the sequences are in the arithmetic of attention, which is that of `attention`. Each function
takes queries, keys and values in one tensor, (n, L, 3, heads, size of a head) or of a packed batch (T, 3, heads, size
of a head), and the rate of dropout; it gives (n, L, heads, size of a head) or (T, heads, size of a head).

The one idea: sequences of one length need no padding, so where a kernel costs little to start, as on a CPU, each length
has its own. Elsewhere sequences are padded for attention alone, which at 128 tokens is a small part of the arithmetic.
All of it is exact: what is masked has a weight of 0, not a small one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasks.attention import attend, is_written_out, scores
from tasks.bert_packing import Sequences
from tasks.dropout import drop

#: queries, keys and values, and the rate of dropout
Attend = Callable[[Tensor, float], Tensor]

#: kinds of devices where each length has a kernel of its own
_LENGTHS_APART = frozenset({"cpu"})
_MULTIPLE = 8  # of the length of rows, for the tensor cores of GPUs

#: (sequences, tokens of each) of those that have one length and lie beside each other
Runs = list[tuple[int, int]]


def among_rows(is_real: Tensor) -> Attend:
    """Attention in a padded batch whose mask, (n, L) bool, is True where there is a token."""
    mask = is_real[:, None, None, :]  # (n, 1, 1, L): the same for all heads and all queries
    return functools.partial(_attend, mask=mask)


def within(sequences: Sequences) -> Attend:
    """Attention in a packed batch."""
    positions, count = sequences.positions, len(sequences.lengths)
    if positions.device.type in _LENGTHS_APART:
        runs = [(sum(1 for _ in run), length) for length, run in itertools.groupby(sequences.lengths)]
        return functools.partial(_attend_by_length, runs=runs)
    width = -(-max(sequences.lengths) // _MULTIPLE) * _MULTIPLE
    rows = (positions == 0).cumsum(0) - 1  # (T,): every sequence begins with its position 0
    places = rows * width + positions  # (T,)
    is_real = positions.new_zeros(count * width, dtype=torch.bool).index_fill(0, places, True)
    return functools.partial(_attend_padded, places=places, is_real=is_real.view(count, width))


def _attend(parts: Tensor, rate: float, *, mask: Tensor | None) -> Tensor:
    is_cpu = parts.device.type == "cpu"
    query, key, value = (_heads_first(parts) if is_cpu else parts.permute(2, 0, 3, 1, 4)).unbind()
    return attend(query, key, value, rate, mask=mask).transpose(1, 2)


def _attend_by_length(parts: Tensor, rate: float, *, runs: Runs) -> Tensor:
    if is_written_out(parts, max(length for _, length in runs), rate) and not torch.compiler.is_compiling():
        attended: Tensor = _ByLength.apply(parts, rate, runs)  # type: ignore[no-untyped-call]
        return attended
    pieces = [_attend(piece, rate, mask=None) for piece in _by_run(parts, runs)]
    return torch.cat([piece.flatten(0, 1) for piece in pieces])


class _ByLength(torch.autograd.Function):
    """Attention written out, a run of sequences after the other, straight from one tensor into another.

    As autograd would do it, each of the many small kernels would have an entry of its own in the graph, and their
    results would be joined afterwards. With D = dropout(P) and O = D V the gradient of the scores is, as in
    FlashAttention (Dao et al. 2022, arXiv 2205.14135, appendix B), dS = D * dD - P * rowsum(dO * O): P and D are all
    that is kept.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, rate: float, runs: Runs) -> Tensor:
        attended, kept = parts.new_empty(parts.shape[0], *parts.shape[2:]), []
        for run, piece, place in zip(runs, _by_run(parts, runs), _by_run(attended, runs)):
            query, key, value = _heads_first(piece).flatten(1, 2).unbind()
            weights = scores(query, key).softmax(dim=-1)
            dropped = drop(weights, rate)
            place.copy_(_tokens_first(dropped @ value, run))
            kept += [weights, dropped]
        ctx.runs = runs
        ctx.save_for_backward(parts, attended, *kept)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts, attended, *kept = ctx.saved_tensors
        runs, scale, of_parts = ctx.runs, parts.shape[-1] ** -0.5, torch.empty_like(parts)
        means = (gradient * attended).sum(-1, keepdim=True)  # (T, heads, 1): of dD, by the weights
        tensors = (_by_run(tensor, runs) for tensor in (parts, gradient, means, of_parts))
        for run, piece, given, mean, place, weights, dropped in zip(runs, *tensors, kept[::2], kept[1::2]):
            query, key, value = _heads_first(piece).flatten(1, 2).unbind()
            of_attended, mean = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (given, mean))
            of_scores = (of_attended @ value.transpose(1, 2)).mul_(dropped).addcmul_(weights, mean, value=-1)
            of_query, of_key, of_value = place.unbind(2)
            of_query.copy_(_tokens_first((of_scores @ key).mul_(scale), run))
            of_key.copy_(_tokens_first((of_scores.transpose(1, 2) @ query).mul_(scale), run))
            of_value.copy_(_tokens_first(dropped.transpose(1, 2) @ of_attended, run))
        return of_parts, None, None


def _by_run(tensor: Tensor, runs: Runs) -> Iterator[Tensor]:
    # (T, ...) to (n, L, ...) of each run
    for run, piece in zip(runs, tensor.split([count * length for count, length in runs])):
        yield piece.unflatten(0, run)


def _heads_first(parts: Tensor) -> Tensor:
    # (n, L, 3, heads, size) to (3, n, heads, L, size)
    return parts.permute(2, 0, 3, 1, 4).contiguous()


def _tokens_first(attended: Tensor, run: tuple[int, int]) -> Tensor:
    # (n * heads, L, size) to (n, L, heads, size)
    count, length = run
    return attended.view(count, -1, length, attended.shape[-1]).transpose(1, 2)


def _attend_padded(parts: Tensor, rate: float, *, places: Tensor, is_real: Tensor) -> Tensor:
    # places: (T,), row * L + column; is_real: (n, L)
    rows = parts.new_zeros(is_real.numel(), *parts.shape[1:]).index_copy(0, places, parts).unflatten(0, is_real.shape)
    return _attend(rows, rate, mask=is_real[:, None, None, :]).flatten(0, 1).index_select(0, places)
