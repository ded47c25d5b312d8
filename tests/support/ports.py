"""Training programs of others, as small tasks: each keeps the property by which its port failed or was misjudged.

The network is a small one; what the original does with its loss, its batches or its state is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetseq import Task, option

SAMPLES, WORDS = 48, 16


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is a row of four numbers made of i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Port(Task):
    """Two linear layers, and the squared error of rebuilding a row."""

    def load_dataset(self, split: str) -> Any:
        return Numbers() if split == "train" else None

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        return {"loss": ((model(sample) - sample) ** 2).sum()}


class TwoPhases(Port):
    """A GAN's turns: the steps of one term, then those of the other, told apart by what `update_step` has set."""

    phase = 0

    def update_step(self, num_updates: int) -> None:
        self.phase = num_updates % 2

    def count(self, sample: torch.Tensor) -> dict[str, float]:
        return {"first": len(sample) * (self.phase == 0), "second": len(sample) * (self.phase == 1)}

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        error = ((model(sample) - sample) ** 2).sum()
        return {"first": error * (self.phase == 0), "second": 2 * error * (self.phase == 1)}


class PhasesOfTheBatch(Port):
    """The same with the phase in the batch: samples of one sign have the first term, the others the second."""

    def count(self, sample: torch.Tensor) -> dict[str, float]:
        first = int((sample[:, 0] > 0).sum())
        return {"first": first, "second": len(sample) - first}

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        errors = ((model(sample) - sample) ** 2).sum(1)
        is_first = sample[:, 0] > 0
        return {"first": errors[is_first].sum(), "second": 2 * errors[~is_first].sum()}


class NeverAGradient(Port):
    """The loss is made of a detached output: nothing is learned."""

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        output = model(sample)
        return {"loss": ((output.detach() - sample) ** 2).sum() + 0 * output.sum()}


@dataclass(frozen=True)
class NanOptions:
    """How often the loss is no number."""

    fault_every: int = option(1, "the loss of every N-th step is no number")


class NanOfAConstant(Port):
    """The loss is no number, and its gradient is one: what is added is detached."""

    Options = NanOptions
    updates = 0

    def update_step(self, num_updates: int) -> None:
        self.updates = num_updates

    def loss(self, model: nn.Module, sample: torch.Tensor) -> Any:
        error = ((model(sample) - sample) ** 2).sum()
        is_broken = model.training and (self.updates + 1) % self.options.fault_every == 0
        return {"loss": error + (math.nan if is_broken else 0.0)}
