"""Dropout that draws its random numbers quickly on a CPU.

Responsible for which elements are left out and for nothing else. On other devices it is torch's; on a CPU torch draws
one number of the Bernoulli distribution after the other, which is a tenth of the time of a small BERT's step. Here one
draw of 64 bits serves four elements, each of which has 16 bits to be compared with a threshold.

The rate is therefore a multiple of 2^-16: 0.1 is 0.100006. What is kept is divided by the share that is kept then, so
that the mean of every element is unchanged.
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
    """As `torch.nn.Dropout`: in training each element is left out with probability `p`, and the rest is scaled up."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of any shape."""
        return drop(x, self.p if self.training else 0.0)

    def extra_repr(self) -> str:
        """What is shown in brackets."""
        return f"p={self.p}"


def drop(x: Tensor, p: float) -> Tensor:
    """Leave out each element of `x` with probability `p`, 0 <= p < 1, and scale up the rest; random by torch's seed."""
    threshold = round(p * _VALUES)
    if threshold == 0:
        return x
    if x.device.type != "cpu" or threshold == _VALUES:
        return F.dropout(x, p)
    draws = torch.empty(-(-x.numel() // _LANES), dtype=torch.int64).random_(_LEAST, None)
    lanes = draws.view(torch.int16)[: x.numel()].view(x.shape)  # uniform from -2^15 to 2^15 - 1
    # compared into numbers at once: truth values would be written, read and turned into numbers one by one
    is_kept = torch.ge(lanes, threshold - _VALUES // 2, out=torch.empty_like(lanes, dtype=x.dtype))
    return x * is_kept.mul_(_VALUES / (_VALUES - threshold))
