"""A task that trains on the rows listed in `--data DIR/part.json`, and remembers which ones it computed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hetseq.comm.group import Group
from tests.support import toys
from tests.support.training import Facts, train

TASK = f"{Path(__file__)}:Parts"
seen: list[int] = []  # of this process: the numbers of the rows of all forwards that train


class Parts(toys.TwoTerms):
    """`TwoTerms`, of which this host has the rows that its part names; validation has all of them."""

    rate = 0.05

    def load_dataset(self, split: str) -> toys.Rows:
        columns = self.rows()
        columns["number"] = torch.arange(len(columns["x"]))
        if split == "train":
            rows = json.loads((Path(str(self.config.data.data)) / "part.json").read_text())
            columns = {name: column[rows] for name, column in columns.items()}
        return toys.Rows(columns)

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        if model.training:
            # `--task FILE` makes a module of its own of this file
            importlib.import_module("tests.support.parts").seen.extend(sample["number"].tolist())
        return super().loss(model, sample)


def write_parts(path: Path, *parts: Sequence[int]) -> list[str]:
    """A folder for each part; their names."""
    for number, rows in enumerate(parts):
        (path / f"host{number}").mkdir(parents=True)
        (path / f"host{number}" / "part.json").write_text(json.dumps(list(rows)))
    return [str(path / f"host{number}") for number in range(len(parts))]


def train_on_part(group: Group, save_dir: str, words: list[str], folders: Sequence[str]) -> tuple[Facts, list[int]]:
    """Train as rank `group.rank`, which reads the folder of its number; the facts, and the rows of its steps."""
    seen.clear()
    facts = train(group, save_dir, [*words, "--task", TASK, "--data", folders[group.rank]])
    return facts, seen[len(seen) - sum(shares[group.rank] for shares in facts.shares) :]
