"""The task of the chaos runs: a small network, and an unweighted term that identifies the samples of a step.

Each sample has a number of 40 random bits. Their sum over a step is exact in float64, and two sets of samples with the
same sum are not to be expected; so a row of `metrics.jsonl` proves the samples of its step.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from hetseq import Task

SAMPLES = 512
STEP_S = 0.004  # a forward takes so long, so that kills find something to interrupt


def numbers() -> torch.Tensor:
    """(SAMPLES,), float64: the number of each sample."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 2**40, (SAMPLES,), generator=generator).double()


class Ledger(Task):
    term_weights = {"loss": 1.0, "ledger": 0.0}

    def load_dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        rows = zip(x, x.sin().sum(1), numbers())
        return [{"x": row, "y": y, "number": number} for row, y, number in rows]

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def count(self, sample: Any) -> dict[str, float]:
        return {"loss": float(len(sample["x"])), "ledger": 1.0 if len(sample["x"]) else 0.0}

    def loss(self, model: torch.nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        time.sleep(STEP_S)
        error = model(sample["x"]).squeeze(1) - sample["y"]
        return {"loss": (error**2).sum(), "ledger": sample["number"].sum()}
