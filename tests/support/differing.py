"""A task whose material differs as `--data DIR/what.json` says, while its source and all options are equal.

For tests in which two nodes disagree without an option that shows it: the `dtype` of the samples or of a `buffer` (the
dtype of the parameters follows from --precision), the order of two equally shaped parameters (`names`), the number of
samples (`rows`), their order (`is_reversed`), one byte of the first one (`changed`, counted from its beginning), a
`factor` in forward.
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
    "dtype": "float64", "buffer": "int64", "names": ["left", "right"], "rows": 64, "is_reversed": False,
    "changed": None, "factor": 1.0,
}  # fmt: skip


def write_what(folder: Path, **differences: Any) -> Path:
    """The folder for --data."""
    folder.mkdir()
    (folder / "what.json").write_text(json.dumps({**NORMAL, **differences}))
    return folder


_ANOTHER_TORCH = """
import importlib.util, os, types
_find_spec = importlib.util.find_spec
def find_spec(name, package=None):
    here = types.SimpleNamespace(submodule_search_locations=[os.path.dirname(__file__)])
    return here if name == "torch" else _find_spec(name, package)
importlib.util.find_spec = find_spec
"""


def write_other_torch(folder: Path) -> Path:
    """The folder for PYTHONPATH, which tells of torch 9.9.9 by the two sources there are: its file, pip's record."""
    (folder / "torch-9.9.9.dist-info").mkdir(parents=True)
    (folder / "torch-9.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    (folder / "version.py").write_text("__version__ = '9.9.9+cpu'\n")
    (folder / "sitecustomize.py").write_text(_ANOTHER_TORCH)
    return folder


class Two(nn.Module):
    """Two parameters of equal shape."""

    def __init__(self, names: list[str], buffer: torch.dtype, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("calls", torch.zeros(1, dtype=buffer))
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return self.factor * (sample @ (self.left * self.right))


class Differing(Task):
    """Fits zeros; the result does not matter."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.what = json.loads((Path(str(self.config.data.data)) / "what.json").read_text())

    def load_dataset(self, split: str) -> list[torch.Tensor] | None:
        if split != "train":
            return None
        rows = np.random.default_rng(1).normal(size=(64, 3))[: self.what["rows"]]
        if self.what["changed"] is not None:
            rows.view(np.uint8)[0, self.what["changed"]] ^= 1
        rows = rows[::-1] if self.what["is_reversed"] else rows
        return list(torch.from_numpy(rows.copy()).to(getattr(torch, self.what["dtype"])))

    def build_model(self) -> nn.Module:
        return Two(self.what["names"], getattr(torch, self.what["buffer"]), self.what["factor"])

    def loss(self, model: nn.Module, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (model(sample) ** 2).sum()}
