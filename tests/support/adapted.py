"""A toy of layers with adapters over frozen weights: some frozen weights are in checkpoints, others are the base.

The base has 16 bits, and all else the type of the run. Two layers have nothing to train, and the lowest is one of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.layered import WIDTH, Layered


class Still(nn.Module):
    """A layer of the base."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(F.linear(x, self.weight.to(x.dtype)))


class Adapter(Still):
    """A layer of the base with an adapter, and a frozen vector that a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        self.scale = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        still: torch.Tensor = super().forward(x)
        return still + torch.tanh(x @ self.down.T @ self.up.T) * self.scale


class Adapted(Layered):
    """`seed` draws the base, as a file would hold it."""

    seed: ClassVar[int] = 5

    def build_model(self) -> nn.Module:
        layers = nn.ModuleList([Still(), Adapter(), Still(), Adapter()])
        model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "layers": layers, "head": nn.Linear(WIDTH, 3)})
        model["first"].requires_grad_(False)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
        model.register_state_dict_post_hook(leave_out)
        return model


def leave_out(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The hook that makes a base."""
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.bfloat16:
            state.pop(prefix + name)


def is_base(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(".weight")
