"""A net whose middle layers several ranks hold together (--tensor-parallel-degree)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from hetseq import Task


class Divided(Task):
    """Points inside and outside a circle."""

    def load_dataset(self, split):
        random = torch.Generator().manual_seed(1 if split == "train" else 2)
        points = torch.rand(300, 2, generator=random) * 2 - 1
        return TensorDataset(points, (points.norm(dim=1) < 0.8).long())

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))

    def tensor_plan(self):
        return {"0": "colwise", "2": "rowwise"}

    def loss(self, model, sample):
        return {"loss": F.cross_entropy(model(sample[0]), sample[1], reduction="sum")}
