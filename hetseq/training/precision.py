"""`--precision`: the type that parameters are kept in, the one that is computed in, and the loss scale of fp16.

Responsible for what a name means and for how the scale follows the steps; when to enter and when to scale is for those
who run forward and backward. Parameters, gradients that travel, their sums and the optimizer's state are never of 16
bits: those are only the type of products inside forward and backward, by torch's autocast, which leaves to 32 bits what
does not bear fewer. So a checkpoint is the same whatever was computed with.

fp16 has no number above 65,504 and none between 0 and 6e-8. The loss is therefore multiplied before backward and the
gradient divided afterwards (Micikevicius et al. 2018, arXiv 1710.03740). The factor is a power of two, so that nothing
is rounded by it, and follows from the verdicts on the steps alone: all ranks know the same one without a word.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

_LEAST, _MOST = 1.0, 2.0**24
_GROWTH_STEPS = 2000  # applied in a row, before a scale twice as large is tried; as torch.amp.GradScaler has it


@dataclass(frozen=True)
class Precision:
    """What the parameters are kept in, what is computed in (None: the same), and whether that needs a loss scale.

    `eps`: the gap between 1 and the next number that a factor of a product may be.
    """

    storage: torch.dtype
    compute: torch.dtype | None = None
    has_loss_scale: bool = False
    eps: float = torch.finfo(torch.float32).eps

    @property
    def loss_tolerance(self) -> tuple[float, float]:
        """How far mean losses of the same samples may be apart on unequal devices: relative to them, and in any case.

        In 32 bits and more rounding is far below 1e-3, but the parameters may differ by 1e-4 of their norm when they
        are drawn, and it is settings that are looked for. A loss may be the small rest of numbers near 1, so their
        rounding is allowed in any case. With coarser factors two units in the last place are: losses of untrained
        networks in bf16 and fp16 were within 0.06 units of those in fp32 (transformer, MLP, critic, autoencoder).
        """
        return max(1e-3, 2 * self.eps), max(1e-5, 2 * self.eps)

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Within it the products of this thread's forward are of the type `compute`."""
        if self.compute is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.compute)


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "tf32": Precision(
        torch.float32, eps=2.0**-10
    ),  # what a GPU does with the factors of products is set once, by system.gpu
    "fp64": Precision(torch.float64, eps=torch.finfo(torch.float64).eps),
    "bf16": Precision(torch.float32, torch.bfloat16, eps=torch.finfo(torch.bfloat16).eps),
    "fp16": Precision(torch.float32, torch.float16, has_loss_scale=True, eps=torch.finfo(torch.float16).eps),
}


@dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by before backward, where a precision needs it."""

    factor: float = 2.0**16
    steps: int = 0  # applied in a row with it

    @property
    def may_fall(self) -> bool:
        """Whether a gradient that is not finite may be the fault of the scale."""
        return self.factor > _LEAST

    def after_update(self) -> LossScale:
        """The scale of the next step, after one that was applied."""
        if self.steps + 1 < _GROWTH_STEPS:
            return replace(self, steps=self.steps + 1)
        return LossScale(min(2 * self.factor, _MOST))

    def after_overflow(self) -> LossScale:
        """The scale of the next step, after one whose gradient did not fit."""
        return LossScale(max(self.factor / 2, _LEAST))
