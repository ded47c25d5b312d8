"""The task of `bench/step.py`: the MNIST net on images made up once, held in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hetseq import Task
from tasks.mnist import MNISTNet

SAMPLES = 8192


class RandomImages(torch.utils.data.Dataset[Any]):
    """Images and labels of the shape of MNIST."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(SAMPLES, 1, 28, 28, generator=generator)
        self.labels = torch.randint(0, 10, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.images[indices], self.labels[indices]

    def collater(self, samples: Any) -> Any:
        return samples


def build_model() -> MNISTNet:
    """The net of the MNIST task, dropout included."""
    return MNISTNet()


class RandomImageTask(Task):
    """Classification of the made-up images."""

    def load_dataset(self, split: str) -> RandomImages:
        return RandomImages()

    def build_model(self) -> MNISTNet:
        return build_model()

    def loss(self, model: torch.nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        images, labels = sample
        return {"loss": F.cross_entropy(model(images), labels, reduction="sum")}
