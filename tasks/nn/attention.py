"""Attention of queries to keys by whatever is fastest on a device.

Responsible for the choice and for the arithmetic where it is written out; who may look at whom is told by a model. Of
torch's kernel (`scaled_dot_product_attention`) the form for CPUs has no dropout, and in a worker takes four to five
times as long for 64 to 128 tokens as its products one after the other do (`bench/attention.py`). These keep a weight
for each pair of tokens, which torch's does not, and the longer the sequences, the less they win.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq.tasks.nn.dropout import drop

#: tokens at most, of what is written out only for being faster; as measured
_LONGEST = {torch.float32: 512, torch.bfloat16: 1024}


def attend(
    query: Tensor, key: Tensor, value: Tensor, rate: float, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Attended values (n, heads, Q, size), of queries of that shape and of keys and values (n, heads, L, size).

    `rate` is that of dropout. mask: bool, broadcast to (n, 1, Q, L), True where a query may look; `is_causal`: at
    itself and what is before it. One of both at most. What is hidden has a weight of 0, not a small one, where there
    is anything to look at.
    """
    if not is_written_out(query, key.shape[2], rate):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate, is_causal=is_causal)
    if is_causal:
        mask = torch.ones(1, 1, query.shape[2], query.shape[2], dtype=torch.bool).tril()
    weights = scores(query.flatten(0, 1), key.flatten(0, 1), mask).softmax(dim=-1)  # (n * heads, Q, L)
    return (drop(weights, rate) @ value.flatten(0, 1)).view(query.shape)


def is_written_out(like: Tensor, length: int, rate: float) -> bool:
    """Whether `attend` does without torch's kernel, for keys of `length` tokens and the device and type of `like`."""
    return like.device.type == "cpu" and (rate > 0 or length <= _LONGEST.get(like.dtype, 0))


def scores(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """What softmax makes weights of, (n * heads, Q, L), of queries (n * heads, Q, size) and keys; mask as above."""
    turned, scale = key.transpose(1, 2), query.shape[-1] ** -0.5
    if mask is None:
        return torch.baddbmm(query.new_zeros(()), query, turned, beta=0, alpha=scale)
    # half of the least number: with a score it is still a number, and far below every other one, so its weight is 0
    added = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min / 2)
    added = added.expand(-1, len(query) // len(mask), -1, -1).flatten(0, 1)  # (n * heads, 1 or Q, L)
    return torch.baddbmm(added, query, turned, alpha=scale)
