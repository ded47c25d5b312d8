"""A task in a dozen lines: which points lie inside the unit circle? README shows it."""

import torch

from hetseq import Task


class Circle(Task):
    """Points, and whether the unit circle holds them."""

    def load_dataset(self, split):
        random = torch.Generator().manual_seed(1 if split == "train" else 2)
        x = torch.randn(4096, 2, generator=random)
        return [{"x": point, "inside": (point.norm() < 1).float()} for point in x]

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def loss(self, model, sample):
        logits = model(sample["x"]).squeeze(1)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, sample["inside"], reduction="sum")
        return {"loss": losses}
