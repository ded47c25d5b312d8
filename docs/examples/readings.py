"""Temperatures that several hosts have measured, each its own: guess the next one. For `--data-by-host`."""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hetseq import Task


class Series(torch.utils.data.TensorDataset):
    """Eight values and the ninth, from all files of a folder; `files` lets the nodes see who has which."""

    def __init__(self, folder):
        self.files = sorted(folder.glob("*.csv"))
        rows = torch.from_numpy(np.concatenate([np.loadtxt(path, delimiter=",") for path in self.files]))
        super().__init__(rows[:, :8].float(), rows[:, 8].float())


class Readings(Task):
    """The next value of a series."""

    def load_dataset(self, split):
        return Series(Path(self.config.data.data) / split)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, model, sample):
        values, following = sample
        return {"loss": F.mse_loss(model(values)[:, 0], following, reduction="sum")}


def measure(path, count, seed):
    """Write a file as one host would have it."""
    random = np.random.default_rng(seed)
    starts, places = random.uniform(0, 6, (count, 1)), np.arange(9) / 3
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, np.sin(starts + places), delimiter=",", fmt="%.4f")


if __name__ == "__main__":
    for name, count in (("labA", 300), ("labB", 100)):
        measure(Path(sys.argv[1]) / name / "train" / f"{name}.csv", count, seed=count)
        measure(Path(sys.argv[1]) / name / "valid" / "common.csv", 60, seed=7)
