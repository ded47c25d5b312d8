"""Muon for the hidden matrices of a model and AdamW for its other parameters, in one optimizer.

Responsible for the update rule, and for computing it to the same bits on every CPU. The one idea: a rank computes the
update alone, so its bits must not depend on threads or kernels, which choose the order of a sum. Factors are therefore
rounded to a fixed grid so coarse that every product and every partial sum is exact in float64.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from hetseq.config.sections import OptimizationConfig
from hetseq.errors import TaskError
from hetseq.training.optim import kernel, learning_rates

logger = logging.getLogger(__name__)

_MOMENTUM = 0.95  # if --momentum is 0, the default of sgd
_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
# The grid of factors is 2^-25. A product of two is a multiple of 2^-50, and float64 holds those exactly below 2^3.
# The singular values of an iterate are at most 1.21, so rows of the iterate, of its Gram matrix and of the polynomial
# have norms of at most 1.21, 1.5 and 2.9, and by Cauchy-Schwarz no partial sum of the products exceeds 3.6.
_GRID_BITS = 25


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) in groups with `use_muon`, AdamW in all others; both with the rates of AdamW.

    Groups with `use_muon` take parameters of two dimensions: the matrices of hidden layers. Embeddings, the output
    layer, biases and norms belong into other groups. For a matrix W of shape (rows, columns) with gradient G:

        M = momentum * M + (1 - momentum) * G
        O = NS(momentum * M + (1 - momentum) * G)               (Nesterov)
        W = (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * O

    NS is five Newton-Schulz iterations, see `orthogonal`. The factor 0.2 * sqrt(max(rows, columns)) gives updates the
    size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so `lr` and `weight_decay` are chosen as for AdamW everywhere.
    It is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, which computes NS in bfloat16.

    State per parameter: `momentum_buffer` (M), in other groups that of AdamW. Every rank computes the whole update.
    Raises TaskError for a parameter with `use_muon` that has not two dimensions.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = _MOMENTUM,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        # one of its own, which is given this optimizer's groups and state before each step
        self._adamw = _adamw(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {**self._adamw.defaults, "momentum": momentum, "use_muon": False})
        for settings in (self.defaults, *self.param_groups):
            settings.update(kernel(self.param_groups))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch. Raises TaskError if it has `use_muon` and not only matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        shapes = [tuple(parameter.shape) for parameter in group["params"] if parameter.ndim != 2]
        if group["use_muon"] and shapes:
            raise TaskError(
                f"a group with use_muon has a parameter of shape {shapes[0]}: expected matrices, which have two"
                " dimensions; put the others into a group without use_muon, which AdamW trains"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adamw = _adamw()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; the closure, if any, recomputes and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw.step()
        for group in self.param_groups:
            if group["use_muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None and parameter.numel():
                        self._update_(parameter, group)
        return loss

    def _update_(self, matrix: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Any] = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix, memory_format=torch.preserve_format)
        rate, momentum, average = float(group["lr"]), group["momentum"], state["momentum_buffer"]
        # Multiplications and additions one by one: a fused kernel rounds once on one kind of device, twice on another.
        new = cast(Tensor, matrix.grad) * (1 - momentum)
        average.mul_(momentum).add_(new)
        update = orthogonal((average * momentum).add_(new))
        size = 0.2 * math.sqrt(max(matrix.shape))
        decayed = matrix.double().mul(1 - rate * group["weight_decay"])
        matrix.copy_(decayed.sub_(update.double().mul_(rate * size)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly U V^T, where `matrix` (rows, columns) is U S V^T; singular values of the result are about 0.7 to 1.2.

    X is the matrix divided by its Frobenius norm, then five times X = a X + (b A + c A^2) X with A = X X^T and
    (a, b, c) = (3.4445, -4.7750, 2.0315), the quintic Newton-Schulz iteration of Jordan et al. 2024.

    On a CPU the result, in float64, has the same bits for any number of threads and any instruction set; factors are
    rounded to 2^-25, and for a matrix in float64 to about 2^-48 (measured: within 7e-6 and 2e-12 of plain products, as
    a share of the largest element). On another device a float32 matrix is computed in float32, whose bits depend on the
    kind of device: few GPUs are fast in float64.
    """
    is_exact = matrix.dtype == torch.float64 or matrix.device.type == "cpu"
    product = torch.matmul if not is_exact else _fine_product if matrix.dtype == torch.float64 else _coarse_product
    is_tall = matrix.shape[0] > matrix.shape[1]
    iterate = matrix.double().div(_norm(matrix).clamp(min=1e-7)).to(torch.float64 if is_exact else torch.float32)
    iterate = iterate.mT if is_tall else iterate
    for _ in range(_ITERATIONS):
        gram = product(iterate, iterate.mT)
        polynomial = (gram * _B).add_(product(gram, gram).mul_(_C))
        iterate = (iterate * _A).add_(product(polynomial, iterate))
    return iterate.mT if is_tall else iterate


def _norm(matrix: Tensor) -> Tensor:
    """The Frobenius norm in float64, from a sum of integers: their order does not matter."""
    largest = matrix.abs().max().double().clamp(min=torch.finfo(torch.float32).tiny)
    bits = 62 - (matrix.numel() - 1).bit_length()  # the sum stays below 2^63
    squares = (matrix.double() / largest).square_().mul_(2.0**bits).round_().long()
    return largest * (squares.sum().double() * 2.0**-bits).sqrt()


def _coarse_product(left: Tensor, right: Tensor) -> Tensor:
    """The exact product of both factors as they are on the grid; adding 0.0 makes every zero positive."""
    return (_rounded(left, _GRID_BITS) @ _rounded(right, _GRID_BITS)).add_(0.0)


def _fine_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of factors as sums of two parts, all three products of parts exact; the fourth is too small.

    A part on the grid has rows or columns of norm 2.9 at most, and a remainder elements of 2^-26 at most. Partial sums
    of their products are then at most 2.9 * sqrt(n) * 2^-26 for an inner dimension of n. In multiples of
    2^-(25 + 52 - log2(sqrt(n))), which the second grid gives, float64 holds them exactly.
    """
    bits = 52 - math.ceil(math.log2(left.shape[1]) / 2)
    left_part, right_part = _rounded(left, _GRID_BITS), _rounded(right, _GRID_BITS)
    left_rest, right_rest = _rounded(left - left_part, bits), _rounded(right - right_part, bits)
    mixed = (left_part @ right_rest).add_(left_rest @ right_part)
    return (left_part @ right_part).add_(mixed.add_(0.0))


def _rounded(matrix: Tensor, bits: int) -> Tensor:
    """The multiples of 2^-bits that are nearest to the elements."""
    return matrix.mul(2.0**bits).round_().mul_(2.0**-bits)


def _adamw(**settings: Any) -> torch.optim.AdamW:
    """AdamW without parameters."""
    return torch.optim.AdamW([torch.empty(0)], **settings)


def muon(
    parameter_groups: list[dict[str, Any]], config: OptimizationConfig, options: Any = None
) -> torch.optim.Optimizer:
    """`Muon` for the group of hidden matrices that `parameter_groups` made, with `--momentum` or 0.95; else AdamW."""
    optimizer = Muon(
        parameter_groups,
        lr=learning_rates(config)[0],
        weight_decay=config.weight_decay,
        momentum=config.momentum or _MOMENTUM,
        betas=cast("tuple[float, float]", config.adam_betas),
        eps=config.adam_eps,
    )
    groups = optimizer.param_groups
    hidden = [parameter for group in groups if group["use_muon"] for parameter in group["params"]]
    numbers = sum(parameter.numel() for parameter in hidden)
    total = sum(parameter.numel() for group in groups for parameter in group["params"])
    logger.info("muon: %d hidden matrices with %d of %d weights; AdamW trains the others", len(hidden), numbers, total)
    return optimizer
