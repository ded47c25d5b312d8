"""Dropout with fast random numbers on CPUs.

Responsible only for the choice of elements to drop. On other devices this is torch's dropout; on a CPU torch draws one
Bernoulli number after another, which takes a tenth of a small BERT's step. Here one draw of 64 bits serves four
elements, each of which compares 16 bits with a threshold.

The rate is therefore a multiple of 2^-16: 0.1 becomes 0.100006. Kept elements are divided by the actual probability of
keeping them, so that the mean of every element is unchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BITS = 16
_VALUES = 1 << _BITS
_LEAST = -(1 << 63)
_LANES = 4  # elements of one draw


class Dropout(nn.Module):
    """As `torch.nn.Dropout`: in training, zeroes each element with probability `p` and scales up the rest."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of any shape."""
        return drop(x, self.p if self.training else 0.0)

    def extra_repr(self) -> str:
        """The text in brackets of `repr`."""
        return f"p={self.p}"


def drop(x: Tensor, p: float) -> Tensor:
    """Zero each element of `x` with probability `p`, 0 <= p < 1, and scale up the rest; uses torch's generator."""
    threshold = round(p * _VALUES)
    if threshold == 0:
        return x
    if x.device.type != "cpu" or threshold == _VALUES:
        return F.dropout(x, p)
    draws = torch.empty(-(-x.numel() // _LANES), dtype=torch.int64).random_(_LEAST, None)
    lanes = draws.view(torch.int16)[: x.numel()].view(x.shape)  # uniform from -2^15 to 2^15 - 1
    # compare straight into floats: a bool tensor would cost an extra write, read and conversion
    is_kept = torch.ge(lanes, threshold - _VALUES // 2, out=torch.empty_like(lanes, dtype=x.dtype))
    return x * is_kept.mul_(_VALUES / (_VALUES - threshold))
