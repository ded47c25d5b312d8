"""Scaled dot-product attention by the fastest implementation for a device.

Responsible for the choice of the implementation and for the explicit one; the model defines the mask. On CPUs, torch's
kernel (`scaled_dot_product_attention`) has no dropout, and in a worker takes four to five times as long for 64 to 128
tokens as the separate matrix products (`bench/attention.py`). These store a weight for each pair of tokens, which
torch's kernel does not, and their advantage shrinks as sequences get longer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hetseq.tasks.nn.dropout import drop

#: longest sequences, in tokens, for which the explicit products are faster; as measured
_LONGEST = {torch.float32: 512, torch.bfloat16: 1024}


def attend(
    query: Tensor, key: Tensor, value: Tensor, rate: float, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Attended values (n, heads, Q, size), from queries of that shape and keys and values (n, heads, L, size).

    `rate`: dropout. mask: bool, broadcast to (n, 1, Q, L), True where a query may attend; `is_causal`: only to itself
    and earlier tokens. At most one of the two. Masked keys have a weight of exactly 0, unless a query's keys are all
    masked.
    """
    if not is_written_out(query, key.shape[2], rate):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate, is_causal=is_causal)
    if is_causal:
        mask = torch.ones(1, 1, query.shape[2], query.shape[2], dtype=torch.bool).tril()
    weights = scores(query.flatten(0, 1), key.flatten(0, 1), mask).softmax(dim=-1)  # (n * heads, Q, L)
    return (drop(weights, rate) @ value.flatten(0, 1)).view(query.shape)


def is_written_out(like: Tensor, length: int, rate: float) -> bool:
    """Whether `attend` uses explicit products, for keys of `length` tokens and the device and dtype of `like`."""
    return like.device.type == "cpu" and (rate > 0 or length <= _LONGEST.get(like.dtype, 0))


def scores(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention scores before softmax, (n * heads, Q, L), of queries (n * heads, Q, size) and keys; mask as above."""
    turned, scale = key.transpose(1, 2), query.shape[-1] ** -0.5
    if mask is None:
        return torch.baddbmm(query.new_zeros(()), query, turned, beta=0, alpha=scale)
    # half of the lowest finite number: finite after adding a score, and so far below the others that its weight is 0
    added = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min / 2)
    added = added.expand(-1, len(query) // len(mask), -1, -1).flatten(0, 1)  # (n * heads, 1 or Q, L)
    return torch.baddbmm(added, query, turned, alpha=scale)
