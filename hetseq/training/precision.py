"""`--precision`: the type of the parameters, the type of the computation, and the loss scale of fp16.

Responsible for the meaning of a name and for how the scale follows the steps; the code that runs forward and backward
decides when to enter and when to scale. Parameters, gradients that travel, their sums and the optimizer's state never
have 16 bits: only products inside forward and backward do, by torch's autocast, which leaves operations that need more
in 32 bits. So a checkpoint has the same form for every precision.

fp16 has no number above 65,504 and none between 0 and 6e-8. The loss is therefore multiplied before backward and the
gradient divided afterwards (Micikevicius et al. 2018, arXiv 1710.03740). The factor is a power of two, so it causes no
rounding, and it follows from the verdicts of the steps alone: all ranks know the same one without communication.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

_LEAST, _MOST = 1.0, 2.0**24
_GROWTH_STEPS = 2000  # applied in a row, before a scale twice as large is tried; as in torch.amp.GradScaler


@dataclass(frozen=True)
class Precision:
    """The type of the parameters, the type of the computation (None: the same), and whether it needs a loss scale.

    `eps`: the gap between 1 and the next number, for the factors of a product.
    """

    storage: torch.dtype
    compute: torch.dtype | None = None
    has_loss_scale: bool = False
    eps: float = torch.finfo(torch.float32).eps

    @property
    def loss_tolerance(self) -> tuple[float, float]:
        """How far mean losses of the same samples may differ between unequal devices: relative, and absolute.

        In 32 bits and more rounding is far below 1e-3, but the parameters may differ by 1e-4 of their norm when they
        are drawn, and the comparison looks for wrong settings. A loss may be the small difference of numbers near 1, so
        their rounding is always allowed. With coarser factors the tolerance is two units in the last place: losses of
        untrained networks in bf16 and fp16 were within 0.06 units of fp32 (transformer, MLP, critic, autoencoder).
        """
        return max(1e-3, 2 * self.eps), max(1e-5, 2 * self.eps)

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Within it the products of this thread's forward have the type `compute`."""
        if self.compute is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.compute)


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "tf32": Precision(torch.float32, eps=2.0**-10),  # system.gpu sets once how a GPU rounds the factors of products
    "fp64": Precision(torch.float64, eps=torch.finfo(torch.float64).eps),
    "bf16": Precision(torch.float32, torch.bfloat16, eps=torch.finfo(torch.bfloat16).eps),
    "fp16": Precision(torch.float32, torch.float16, has_loss_scale=True, eps=torch.finfo(torch.float16).eps),
}


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss before backward, for a precision that needs one."""

    factor: float = 2.0**16
    steps: int = 0  # applied in a row with it

    @property
    def may_fall(self) -> bool:
        """Whether a gradient that is not finite may be caused by the scale."""
        return self.factor > _LEAST

    def after_update(self) -> LossScale:
        """The scale of the next step, after an applied one."""
        if self.steps + 1 < _GROWTH_STEPS:
            return replace(self, steps=self.steps + 1)
        return LossScale(min(2 * self.factor, _MOST))

    def after_overflow(self) -> LossScale:
        """The scale of the next step, after a step whose gradient overflowed."""
        return LossScale(max(self.factor / 2, _LEAST))
