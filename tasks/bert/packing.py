"""Sequence packing: BERT batches without padding, with the real tokens of all rows one after another.

Responsible for the layout of a packed batch and for packing a padded one; it knows no files, no network and no losses.
`attention` handles attention within each sequence, which it finds through `Sequences`.

The one idea: only attention in BERT combines tokens, so all other layers accept one long row of tokens from any
sequences, and no padding is needed. Sequences are sorted by length, so that those of similar length are adjacent and
attention can process them together; the samples keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq import Config

#: the entries of a batch that have shape (T,) if packed, instead of (n, L)
_TOKENS = ("input_ids", "token_type_ids")
_MULTIPLE = 16  # the number of tokens is rounded up to it: products of some other sizes take longer


class Sequences(NamedTuple):
    """The layout of n sequences in a row of T tokens; replaces the `attention_mask` of a padded batch.

    Lengths and padding are host numbers, since they determine the shapes in attention: no device synchronisation is
    needed.
    """

    lengths: tuple[int, ...]  # in the order of the layout, 1 or more each
    padding: int  # padding tokens after the last sequence; T in total
    starts: Tensor  # (n,) int64, by sample: index of its first token, [CLS]
    positions: Tensor  # (T,) int64: position of each token in its own sequence, from 0


def is_wanted(config: Config, *, no_packing: bool) -> bool:
    """Whether a run packs its batches: unless it opts out or compiles its network."""
    # each batch has other lengths, and torch.compile would recompile for every one
    return not (no_packing or config.optimization.compile)


def pack(batch: dict[str, Any], *, places: Sequence[str] = ("masked_positions",)) -> dict[str, Any]:
    """The batch without its padding: `input_ids`, `token_type_ids` (T,) and `sequences`, with `places` in 0 to T - 1.

    T is the number of real tokens, rounded up to a multiple of 16. `places` are the entries that hold row * L + column
    in a padded batch. All other entries, and the order of the samples, are unchanged. A batch without padding is
    returned as it is; so is one with padding before the end of a row, which no known program writes. The result depends
    only on the batch.
    """
    mask = batch["attention_mask"].numpy()  # (n, L)
    width, lengths = mask.shape[1], mask.sum(axis=1)  # (n,)
    is_prefix = (mask == (np.arange(width) < lengths[:, None])).all() and lengths.all()
    if mask.all() or not is_prefix:
        return batch
    order = np.argsort(lengths, kind="stable")  # (n,): the sample at each place
    ordered = lengths[order]
    begins = np.cumsum(ordered) - ordered
    starts = np.empty_like(begins)
    starts[order] = begins
    positions = np.arange(ordered.sum()) - np.repeat(begins, ordered)
    taken = torch.from_numpy(np.repeat(order * width, ordered) + positions)  # indices into the padded batch
    padding = -len(positions) % _MULTIPLE
    packed = {name: value for name, value in batch.items() if name != "attention_mask"}
    packed |= {name: F.pad(batch[name].flatten()[taken], (0, padding)) for name in _TOKENS}  # (T,)
    for name in places:
        row, column = np.divmod(batch[name].numpy(), width)  # (m,)
        packed[name] = torch.from_numpy(starts[row] + column)
    positions = np.pad(positions, (0, padding))
    sequences = Sequences(tuple(ordered.tolist()), padding, torch.from_numpy(starts), torch.from_numpy(positions))
    return packed | {"sequences": sequences}


def layout_of(batch: dict[str, Any]) -> Tensor | Sequences:
    """The layout argument of the network: the `sequences` of a packed batch, else the `attention_mask`."""
    found: Tensor | Sequences = batch["sequences"] if "sequences" in batch else batch["attention_mask"]
    return found
