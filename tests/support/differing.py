"""A task whose material differs where `--data DIR/what.json` says so, while its source and all options are equal.

For tests in which two nodes disagree on what no option tells: `dtype` of the parameters, the order of two equally
shaped ones (`names`), the number of samples (`rows`), their order (`is_reversed`), one byte of a sample (`changed`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hetseq import Task

NORMAL: dict[str, Any] = {
    "dtype": "float32", "names": ["left", "right"], "rows": 64, "is_reversed": False, "changed": None,
}  # fmt: skip


def write_what(folder: Path, **differences: Any) -> Path:
    """The folder for --data."""
    folder.mkdir()
    (folder / "what.json").write_text(json.dumps({**NORMAL, **differences}))
    return folder


class Two(nn.Module):
    """Two parameters of equal shape."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return sample @ (self.left * self.right)


class Differing(Task):
    """Fits zeros; nobody looks at the result."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.what = json.loads((Path(str(self.config.data.data)) / "what.json").read_text())

    def load_dataset(self, split: str) -> list[torch.Tensor] | None:
        if split != "train":
            return None
        rows = np.random.default_rng(1).normal(size=(64, 3))[: self.what["rows"]]
        if self.what["changed"] is not None:
            rows.view(np.uint8)[self.what["changed"], 0] ^= 1
        rows = rows[::-1] if self.what["is_reversed"] else rows
        return list(torch.from_numpy(rows.copy()))

    def build_model(self) -> nn.Module:
        return Two(self.what["names"]).to(getattr(torch, self.what["dtype"]))

    def loss(self, model: nn.Module, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (model(sample.to(next(model.parameters()).dtype)) ** 2).sum()}
