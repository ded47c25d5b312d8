"""BERT's attention: every token attends to the real tokens of its own sequence, in a padded or a packed batch.

Responsible for the layout of sequences in attention; `tasks/nn/attention.py` does the arithmetic. It is exact: masked
tokens have a weight of 0, not a small one.

Two ideas. Only attention needs rows, so the sequences of a packed batch are padded for it alone: where kernel launches
are cheap, as on a CPU, in groups of similar length, and elsewhere all together, which at 128 tokens is a small part of
the arithmetic. And only a few tokens of the last layer are needed, although they attend to all others: on a CPU only
those have queries, padded to the largest number per sequence.
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

#: queries (k, heads, head size), keys and values as in `Attention`, dropout rate -> (k, heads, head size)
AttendForSome = Callable[[Tensor, Tensor, float], Tensor]

#: device types on which unequal lengths are processed separately, and values can be read without a sync
_LENGTHS_APART = frozenset({"cpu"})
_MULTIPLE = 8  # of the length of rows, for the tensor cores of GPUs
_MULTIPLE_APART = 32  # for separate lengths: less means more kernels, more means more wasted work
_LARGEST_PART = 0.5  # of all queries: above this fraction, selecting some is not worthwhile


class Attention(Protocol):
    """Attention among the tokens of one batch."""

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        """Queries, keys and values to attended values; `rate`: dropout.

        parts: (n, L, 3, heads, head size), or (T, 3, heads, head size) for a packed batch. Returns
        (n, L, heads, head size) or (T, heads, head size).
        """
        ...

    def for_some(self, wanted: Tensor) -> AttendForSome | None:
        """The same for only the queries of the tokens at `wanted`, (k,) int64: row * L + column or 0 to T - 1.

        Keys and values are in one tensor as above, with 2 instead of 3. None: it would save nothing.
        """
        ...


def among_rows(is_real: Tensor) -> Attention:
    """Attention in a padded batch whose mask, (n, L) bool, is True for a real token."""
    return _Masked(is_real[:, None, None, :])


def within(sequences: Sequences) -> Attention:
    """Attention in a packed batch."""
    are_apart = sequences.positions.device.type in _LENGTHS_APART
    return _Packed(sequences, _blocks_of(sequences, are_apart=are_apart))


@dataclass(frozen=True, eq=False)  # torch 2.11's TorchDynamo hashes objects made in forward before their fields are set
class _Masked:
    """Rows of equal length with padding."""

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
    """For items in `rows` (k,) of `count` rows: the index of each within its row, (k,), and the largest row's size."""
    taken = np.bincount(rows, minlength=count)
    order = rows.argsort(kind="stable")
    columns = np.empty_like(order)
    columns[order] = np.arange(len(order)) - (taken.cumsum() - taken)[rows[order]]
    return columns, int(taken.max())


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The places of the T tokens of a packed batch in blocks of padded rows."""

    shapes: list[tuple[int, int]]  # (n, L) of each
    masks: list[Tensor]  # (n, 1, 1, L) bool of each, as in `_Masked`
    rest: int  # padding tokens, after all blocks
    places: Tensor  # (T,) int64

    @property
    def sizes(self) -> list[int]:
        return [*(count * length for count, length in self.shapes), self.rest]

    def take(self, parts: Tensor) -> list[Tensor]:
        """(T, ...) to (n, L, ...) of each block."""
        places = parts.new_zeros(sum(self.sizes), *parts.shape[1:]).index_copy(0, self.places, parts)
        return [piece.unflatten(0, shape) for piece, shape in zip(places.split(self.sizes), self.shapes)]

    def leave(self, blocks: Sequence[Tensor]) -> Tensor:
        """(n, L, ...) of each block to (T, ...), with zeros for padding tokens."""
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
    # without lengths apart, `begins` follows from `rows` and needs no transfer from host to device
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
    """Sequences that are padded only for attention."""

    sequences: Sequences
    blocks: _Blocks

    def __call__(self, parts: Tensor, rate: float) -> Tensor:
        taken = zip(self.blocks.masks, self.blocks.take(parts))
        return self.blocks.leave([_Masked(mask)(block, rate) for mask, block in taken])

    def for_some(self, wanted: Tensor) -> AttendForSome | None:
        # few queries need little arithmetic, so all rows are processed together
        blocks = self.blocks if len(self.blocks.shapes) == 1 else _blocks_of(self.sequences, are_apart=False)
        attend_among_rows = _Masked(blocks.masks[0]).for_some(blocks.places[wanted])
        if attend_among_rows is None:
            return None
        return lambda query, parts, rate: attend_among_rows(query, blocks.take(parts)[0], rate)


def _heads_first(parts: Tensor) -> Sequence[Tensor]:
    """(n, L, k, heads, size) to k times (n, heads, L, size)."""
    if parts.device.type == "cpu":
        return parts.permute(2, 0, 3, 1, 4).contiguous().unbind()
    # unbind before the transpose: its gradient is stacked in its own order and so has the layout of `parts`
    return [part.transpose(1, 2) for part in parts.unbind(2)]
