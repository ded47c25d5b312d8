"""Attention of BERT: every token to the real tokens of its own sequence, in a padded batch or a packed one.

Responsible for where the sequences are in the arithmetic of attention, which is that of `attention`. All of it is
exact: what is masked has a weight of 0, not a small one.

Two ideas. Attention alone needs rows, so the sequences of a packed batch are padded for it alone: where a kernel costs
little to start, as on a CPU, those of about one length together, and elsewhere all, which at 128 tokens is a small part
of the arithmetic. And few tokens of the last layer are wanted, though they look at all others: on a CPU only those have
queries, each sequence as many as the one that has most.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetseq.tasks.bert.packing import Sequences
from hetseq.tasks.nn.attention import attend

#: queries (k, heads, size of a head), keys and values as `Attention` has them, the rate of dropout: to (k, heads, size)
AttendForSome = Callable[[Tensor, Tensor, float], Tensor]

#: kinds of devices where unequal lengths are apart, and where numbers can be looked at without waiting
_LENGTHS_APART = frozenset({"cpu"})
_MULTIPLE = 8  # of the length of rows, for the tensor cores of GPUs
_MULTIPLE_APART = 32  # of those that are apart: with less there are more kernels, with more they do more for nothing
_LARGEST_PART = 0.5  # of all queries: if there are more of them, it is not worth while to choose


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
    are_apart = sequences.positions.device.type in _LENGTHS_APART
    return _Packed(sequences, _blocks_of(sequences, are_apart=are_apart))


@dataclass(frozen=True, eq=False)  # TorchDynamo of torch 2.11 hashes what forward makes before it has its fields
class _Masked:
    """Rows of one length, some of whose tokens are not real."""

    mask: Tensor  # (n, 1, 1, L) bool: the same for all heads and all queries

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        query, key, value = _heads_first(parts)
        return attend(query, key, value, rate, mask=self.mask).transpose(1, 2)

    def for_some(self, wanted: Tensor) -> AttendForSome | None:
        if wanted.device.type not in _LENGTHS_APART or torch.compiler.is_compiling():
            return None
        count, length = self.mask.shape[0], self.mask.shape[-1]
        columns, width = _columns_of(wanted.numpy() // length, count)
        if width > _LARGEST_PART * length:
            return None
        places = wanted // length * width + torch.from_numpy(columns)  # (k,) of count * width

        def attend_for_some(query: Tensor, parts: Tensor, rate: float) -> Tensor:
            rows = query.new_zeros(count * width, *query.shape[1:]).index_copy(0, places, query)
            key, value = _heads_first(parts)
            attended = attend(rows.unflatten(0, (count, width)).transpose(1, 2), key, value, rate, mask=self.mask)
            return attended.transpose(1, 2).flatten(0, 1).index_select(0, places)

        return attend_for_some


def _columns_of(rows: np.ndarray, count: int) -> tuple[np.ndarray, int]:
    """Of items in given ones of `count` rows: which one of its row each is, (k,), and how many the fullest row has."""
    taken = np.bincount(rows, minlength=count)
    order = rows.argsort(kind="stable")
    columns = np.empty_like(order)
    columns[order] = np.arange(len(order)) - (taken.cumsum() - taken)[rows[order]]
    return columns, int(taken.max())


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Where the T tokens of a packed batch are in blocks of padded rows, and how they get there."""

    shapes: list[tuple[int, int]]  # (n, L) of each
    masks: list[Tensor]  # (n, 1, 1, L) bool of each, as in `_Masked`
    rest: int  # tokens that are of no sequence, behind all blocks
    places: Tensor  # (T,) int64

    @property
    def sizes(self) -> list[int]:
        return [*(count * length for count, length in self.shapes), self.rest]

    def take(self, parts: Tensor) -> list[Tensor]:
        """(T, ...) to (n, L, ...) of each block."""
        places = parts.new_zeros(sum(self.sizes), *parts.shape[1:]).index_copy(0, self.places, parts)
        return [piece.unflatten(0, shape) for piece, shape in zip(places.split(self.sizes), self.shapes)]

    def leave(self, blocks: Sequence[Tensor]) -> Tensor:
        """(n, L, ...) of each block to (T, ...), zeros for what is of no sequence."""
        rest = blocks[0].new_zeros(self.rest, *blocks[0].shape[2:])
        return torch.cat([*(block.flatten(0, 1) for block in blocks), rest]).index_select(0, self.places)


def _blocks_of(sequences: Sequences, *, are_apart: bool) -> _Blocks:
    multiple = _MULTIPLE_APART if are_apart else _MULTIPLE
    widths = [-(-length // multiple) * multiple for length in sequences.lengths]
    if not are_apart:
        widths = [max(widths)] * len(widths)
    shapes = [(sum(1 for _ in run), width) for width, run in itertools.groupby(widths)]
    rest, size = sequences.padding, sum(widths)
    positions = sequences.positions[: sum(sequences.lengths)]
    rows = (positions == 0).cumsum(0) - 1  # every sequence begins with its position 0
    # what is computed of `rows` needs nothing of the host, from where a device would have to be sent it
    begins = torch.tensor([0, *itertools.accumulate(widths)])[rows] if are_apart else rows * widths[0]
    places = begins + positions
    is_real = positions.new_zeros(size, dtype=torch.bool).index_fill(0, places, True)
    masks = [
        piece.view(shape)[:, None, None, :]
        for piece, shape in zip(is_real.split([count * width for count, width in shapes]), shapes)
    ]
    if rest:
        places = torch.cat([places, torch.arange(size, size + rest, device=places.device)])
    return _Blocks(shapes, masks, rest, places)


@dataclass(frozen=True, eq=False)
class _Packed:
    """Sequences that are padded for attention alone."""

    sequences: Sequences
    blocks: _Blocks

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        taken = zip(self.blocks.masks, self.blocks.take(parts))
        return self.blocks.leave([_Masked(mask)(block, rate) for mask, block in taken])

    def for_some(self, wanted: Tensor) -> AttendForSome | None:
        # of few queries the arithmetic is little, and so all rows are together
        blocks = self.blocks if len(self.blocks.shapes) == 1 else _blocks_of(self.sequences, are_apart=False)
        attend_among_rows = _Masked(blocks.masks[0]).for_some(blocks.places[wanted])
        if attend_among_rows is None:
            return None
        return lambda query, parts, rate: attend_among_rows(query, blocks.take(parts)[0], rate)


def _heads_first(parts: Tensor) -> Sequence[Tensor]:
    """(n, L, k, heads, size) to k times (n, heads, L, size)."""
    if parts.device.type == "cpu":
        return parts.permute(2, 0, 3, 1, 4).contiguous().unbind()
    # the gradient of an unbind is put together in its order: apart before they are turned, it lies as `parts` does
    return [part.transpose(1, 2) for part in parts.unbind(2)]
