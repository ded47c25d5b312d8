"""A toy of layers in a list, as those of a transformer are: what `--shard-model all` takes one by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support import toys

WIDTH = 8


class Block(nn.Module):
    """A layer with a matrix, and a vector whose product reads its memory in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.linear(x)) * self.scale


class Layered(toys.Toy):
    """A net of four layers between a first and a last linear map."""

    block: type[nn.Module] = Block

    def rows(self) -> toys.Batch:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(toys.SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "y": torch.randint(0, 3, (toys.SAMPLES,), generator=generator)}

    def build_model(self) -> nn.Module:
        layers = nn.ModuleList([self.block() for _ in range(4)])
        return nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "layers": layers, "head": nn.Linear(WIDTH, 3)})

    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model["first"](x)
        for layer in model["layers"]:
            x = layer(x)
        return x

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        hidden = self.hidden(model, sample["x"])
        return {"loss": F.cross_entropy(model["head"](hidden), sample["y"], reduction="sum")}
