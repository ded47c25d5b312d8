"""Batches of BERT without their padding: the real tokens of all rows one after another.

Responsible for the layout of a packed batch and for making one of a padded batch; it knows no files, no network and no
losses. Attention within each sequence is the affair of `attention`, which `Sequences` tells where they lie.

The one idea: nothing in BERT but attention looks at two tokens, so all other layers take one long row of tokens of
whichever sequences, and padding need not exist. Sequences lie by ascending length, so that those of about one length
are neighbours and attention takes them together; the samples keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq import Config

#: the entries of a packed batch that are as in a padded one, but (T,) in place of (n, L)
_TOKENS = ("input_ids", "token_type_ids")
_MULTIPLE = 16  # of the tokens of a packed batch: products of some other numbers take longer


class Sequences(NamedTuple):
    """Where n sequences lie in a row of T tokens; in place of the `attention_mask` of a padded batch.

    Lengths and padding are numbers of the host: the shapes that attention works on follow from them, and a device need
    not be waited for.
    """

    lengths: tuple[int, ...]  # in the order in which they lie, 1 or more each
    padding: int  # tokens behind the last sequence that are of none; T in all
    starts: Tensor  # (n,) int64, by sample: its first token, [CLS]
    positions: Tensor  # (T,) int64: of each token in its own sequence, from 0


def is_wanted(config: Config, *, no_packing: bool) -> bool:
    """Whether a run packs its batches: unless it says no, or compiles its network."""
    # each batch has other lengths, and torch.compile would take every one for another network
    return not (no_packing or config.optimization.compile)


def pack(batch: dict[str, Any], *, places: Sequence[str] = ("masked_positions",)) -> dict[str, Any]:
    """The batch without its padding: `input_ids`, `token_type_ids` (T,) and `sequences`, with `places` in 0 to T - 1.

    T is the number of real tokens, rounded up to a multiple of 16. `places` are the entries that are row * L + column
    of a padded batch. All others, and the order of the samples, are as they were. A batch without padding is given back
    as it is; so is one with padding elsewhere than behind the tokens of a row, which no program writes that we know.
    The result depends on nothing but the batch.
    """
    mask = batch["attention_mask"].numpy()  # (n, L)
    width, lengths = mask.shape[1], mask.sum(axis=1)  # (n,)
    is_prefix = (mask == (np.arange(width) < lengths[:, None])).all() and lengths.all()
    if mask.all() or not is_prefix:
        return batch
    order = np.argsort(lengths, kind="stable")  # (n,): which sample lies where
    ordered = lengths[order]
    begins = np.cumsum(ordered) - ordered
    starts = np.empty_like(begins)
    starts[order] = begins
    positions = np.arange(ordered.sum()) - np.repeat(begins, ordered)
    taken = torch.from_numpy(np.repeat(order * width, ordered) + positions)  # from where in the padded batch
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
    """What tells the network where the tokens are: the `sequences` of a packed batch, else the `attention_mask`."""
    found: Tensor | Sequences = batch["sequences"] if "sequences" in batch else batch["attention_mask"]
    return found
