"""Tied embedding: one weight as embedding table and vocabulary head, with an efficient gradient on CPUs.

Responsible only for the gradient of such a weight. Autograd would allocate one as large as the vocabulary for the few
rows that were looked up, and add it to the head's gradient. Here only those rows are added to the head's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Tied:
    """The two uses of a weight (vocab_size, hidden_size) in one forward; lookups give the row `padding` no gradient.

    Attributes: `head`, the weight for the matrix product of the head.
    """

    def __init__(self, weight: Tensor, *, padding: int | None) -> None:
        self._rows, self.head, self._padding = weight, weight, padding
        self._is_apart = weight.device.type == "cpu" and weight.requires_grad and not torch.compiler.is_compiling()
        if self._is_apart:
            self._rows, self.head = _Apart.apply(weight)  # type: ignore[no-untyped-call]

    def look_up(self, ids: Tensor) -> Tensor:
        """ids (...) to rows (..., hidden_size)."""
        return F.embedding(ids, self._rows, self._padding, sparse=self._is_apart)


class _Apart(torch.autograd.Function):
    """Returns a weight twice. The first gradient is sparse, the second dense, and their sum reuses its memory."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor | None, head: Tensor | None) -> Tensor | None:
        if rows is None or head is None:
            return head if rows is None else rows.to_dense()
        return head.add_(rows)
