"""Tasks whose model has a base: frozen weights of 32 bits that `state_dict()` leaves out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from tests.support.lives import Line

FROZEN = "0.weight"


class OverBase(Line):
    """A trained layer over a frozen one, which a user would read from a file."""

    seed: ClassVar[int] = 5

    def build_model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(self.seed)
        frozen = nn.Linear(4, 6, bias=False, dtype=torch.float32).requires_grad_(False)
        with torch.no_grad():
            frozen.weight.normal_(generator=generator)
        model = nn.Sequential(frozen, nn.Linear(6, 1))
        model.register_state_dict_post_hook(leave_out)
        return model

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        frozen, trained = model
        hidden = torch.tanh(nn.functional.linear(sample["x"], frozen.weight.to(sample["x"].dtype)))
        return {"loss": ((trained(hidden)[:, 0] - sample["y"]) ** 2).sum()}


def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The hook that makes a base."""
    state.pop(prefix + FROZEN)
