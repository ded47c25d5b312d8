"""A task with two weighted terms and dropout, which writes its course; `two_heads_loop` trains it by a loop."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from hetseq import Task, TrainedStep

SAMPLES, WIDTH = 90, 12


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """Rows with a class, and a target in some of their four places."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(4)
        self.columns = {
            "x": torch.randn(SAMPLES, WIDTH, generator=draw),
            "label": torch.randint(0, 5, (SAMPLES,), generator=draw),
            "target": torch.randn(SAMPLES, 4, generator=draw),
            "is_given": torch.rand(SAMPLES, 4, generator=draw) < 0.3,
        }

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class TwoHeads(nn.Module):
    """A body with dropout under two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(0.1))
        self.label, self.target = nn.Linear(16, 5), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.label(hidden), self.target(hidden)


class TwoHeadsTask(Task):
    """Classes, and the mean square of the given targets; both are sums with counts of their own."""

    term_weights = {"label": 1.0, "target": 0.3}

    def load_dataset(self, split: str) -> Dataset[Any]:
        return Labelled()

    def build_model(self) -> nn.Module:
        return TwoHeads()

    def count(self, sample: Any) -> dict[str, float]:
        return {"label": len(sample["x"]), "target": float(sample["is_given"].sum())}

    def loss(self, model: nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        label, target = model(sample["x"])
        squares = (target - sample["target"]) ** 2
        return {"label": F.cross_entropy(label, sample["label"], reduction="sum"),
                "target": (squares * sample["is_given"]).sum()}  # fmt: skip

    def after_step(self, step: TrainedStep) -> None:
        write(step.number, step.loss, step.terms, step.grad_norm, step.lr, step.model)


def write(
    number: int, loss: float | None, terms: Any, grad_norm: float | None, lr: float, model: nn.Module
) -> None:  # fmt: skip
    """Add a step to the course of this process, to the last bit: numbers as Python's repr, weights as bytes."""
    weights = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values()).hex()
    row = {"step": number, "loss": loss, "terms": terms, "grad_norm": grad_norm, "lr": lr, "weights": weights}
    with (Path(os.environ["COURSES"]) / f"course-{os.getpid()}").open("a") as file:
        file.write(json.dumps(row) + "\n")
