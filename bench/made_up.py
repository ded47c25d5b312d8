"""Synthetic padded BERT batches: rows of unequal lengths with a given share of real tokens.

Row lengths are spread evenly from the shortest to the longest, so that hardly two are equal, and their sum is the same
for every seed; words, masked positions and the order of the rows differ.
"""

from __future__ import annotations

from typing import Any

import torch

Batch = dict[str, Any]

LENGTH, WORDS, MASKED_SHARE = 128, 30522, 0.15
_FIRST_WORD = 1000  # in Google's vocabulary what comes before is no word


def made_up(
    rows: int, share: float, seed: int, *, length: int = LENGTH, words: int = WORDS, masked_share: float = MASKED_SHARE
) -> Batch:
    """A padded batch (rows, length) as the task's; `share` of its tokens are real, as nearly as possible.

    Of each row `masked_share` of the real tokens are masked, and at least one; [CLS] is not.
    """
    generator = torch.Generator().manual_seed(seed)
    shortest = (2 * share - 1) * length
    lengths = torch.linspace(shortest, length, rows).round().long() if rows > 1 else torch.tensor([length])
    lengths = lengths[torch.randperm(rows, generator=generator)]
    is_real = torch.arange(length) < lengths[:, None]
    order = torch.rand(rows, length, generator=generator).masked_fill(~is_real, 2.0)
    order[:, 0] = 2.0
    counts = (lengths * masked_share).round().clamp(min=1)
    is_masked = order.argsort(dim=1).argsort(dim=1) < counts[:, None]
    places = is_masked.flatten().nonzero()[:, 0]
    return {
        "input_ids": torch.randint(_FIRST_WORD, words, (rows, length), generator=generator) * is_real,
        "token_type_ids": ((torch.arange(length) >= lengths[:, None] // 2) & is_real).long(),
        "attention_mask": is_real,
        "masked_positions": places,
        "masked_ids": torch.randint(_FIRST_WORD, words, (len(places),), generator=generator),
        "next_sentence_labels": torch.arange(rows) % 2,
    }
