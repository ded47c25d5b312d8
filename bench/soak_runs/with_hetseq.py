"""The task of HetSeq's side of the soak comparison."""

from __future__ import annotations

from typing import Any

import torch

from hetseq import Task
from soak_runs import toy


class Soak(Task):
    """The toy as a task."""

    def load_dataset(self, split: str) -> Any:
        """The only split."""
        return toy.data()

    def build_model(self) -> torch.nn.Module:
        """The toy."""
        return toy.build()

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of all sides."""
        return toy.optimizer_of(parameter for group in parameter_groups for parameter in group["params"])

    def loss(self, model: torch.nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        """The sum over the samples of a micro-batch."""
        return {"loss": toy.losses(*toy.computed(model, sample), toy.settings().global_batch).sum()}
