"""Two spirals to tell apart; some points tell how far out they are: two loss terms, each with its own count."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from hetseq import Task


class Spirals(Task):
    """Which spiral is a point on, and how far out?"""

    term_weights = {"arm": 1.0, "radius": 0.1}

    def load_dataset(self, split):
        random = torch.Generator().manual_seed(1 if split == "train" else 2)
        arm, radius = torch.arange(600) % 2, torch.rand(600, generator=random)
        angle = 7 * radius + torch.pi * arm
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        is_told = torch.rand(600, generator=random) < 0.3
        return TensorDataset(points, arm, radius, is_told)

    def build_model(self):
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def count(self, sample):
        points, _, _, is_told = sample
        return {"arm": len(points), "radius": is_told.sum()}

    def loss(self, model, sample):
        points, arm, radius, is_told = sample
        output = model(points)
        squares = (output[:, 2] - radius) ** 2
        return {"arm": F.cross_entropy(output[:, :2], arm, reduction="sum"), "radius": (squares * is_told).sum()}

    def metrics(self, model, sample):
        is_right = model(sample[0])[:, :2].argmax(dim=1) == sample[1]
        return {"accuracy": (is_right.sum().item(), len(is_right))}
