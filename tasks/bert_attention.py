"""Attention of BERT: every token to the real tokens of its own sequence, in a padded batch or a packed one.

Responsible for where the sequences are in the arithmetic of attention, and for nothing else of the network. Each
function takes queries, keys and values in one tensor, (n, L, 3, heads, size of a head) or of a packed batch (T, 3,
heads, size of a head), and the rate of dropout; it gives (n, L, heads, size of a head) or (T, heads, size of a head).

The one idea: sequences of one length need no padding, so where a kernel costs little to start, as on a CPU, each length
has its own. Elsewhere sequences are padded for attention alone, which at 128 tokens is a small part of the arithmetic.
All of it is exact: what is masked has a weight of 0, not a small one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.bert_packing import Sequences
from tasks.dropout import drop

#: queries, keys and values, and the rate of dropout
Attend = Callable[[Tensor, float], Tensor]

#: kinds of devices where each length has a kernel of its own
_LENGTHS_APART = frozenset({"cpu"})
_MULTIPLE = 8  # of the length of rows, for the tensor cores of GPUs


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
    parts = parts.permute(2, 0, 3, 1, 4)
    is_cpu = parts.device.type == "cpu"
    query, key, value = (parts.contiguous() if is_cpu else parts).unbind()  # (n, heads, L, size) each
    if rate and is_cpu:  # torch has no kernel for it there, and a slow dropout
        weights = _scores(query, key, mask).softmax(dim=-1)  # (n * heads, L, L)
        return (drop(weights, rate) @ value.flatten(0, 1)).view(query.shape).transpose(1, 2)
    attended: Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate)
    return attended.transpose(1, 2)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """What softmax makes weights of, (n * heads, L, L)."""
    rows, turned, scale = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), query.shape[-1] ** -0.5
    if mask is None:
        return torch.baddbmm(rows.new_zeros(()), rows, turned, beta=0, alpha=scale)
    # half of the least number: with a score it is still a number, and far below every other one, so its weight is 0
    added = torch.zeros_like(mask, dtype=rows.dtype).masked_fill_(~mask, torch.finfo(rows.dtype).min / 2)
    added = added.expand(-1, query.shape[1], -1, -1).flatten(0, 1)  # (n * heads, 1, L)
    return torch.baddbmm(added, rows, turned, alpha=scale)


def _attend_by_length(parts: Tensor, rate: float, *, runs: list[tuple[int, int]]) -> Tensor:
    # runs: (sequences, tokens of each) of those that have one length and lie beside each other
    pieces = parts.split([count * length for count, length in runs])
    attended = [_attend(piece.unflatten(0, run), rate, mask=None).flatten(0, 1) for run, piece in zip(runs, pieces)]
    return torch.cat(attended)


def _attend_padded(parts: Tensor, rate: float, *, places: Tensor, is_real: Tensor) -> Tensor:
    # places: (T,), row * L + column; is_real: (n, L)
    rows = parts.new_zeros(is_real.numel(), *parts.shape[1:]).index_copy(0, places, parts).unflatten(0, is_real.shape)
    return _attend(rows, rate, mask=is_real[:, None, None, :]).flatten(0, 1).index_select(0, places)
