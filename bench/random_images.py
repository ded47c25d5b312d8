"""The MNIST net on synthetic images in memory: a task for the benchmarks, and for plain loops beside it.

An image is noise over a pattern of its label, so that a network can learn it and the loss can fall.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hetseq import Task
from hetseq.tasks.mnist import MNISTNet

#: 2^10 * 3 * 5, so that the usual sizes of a step divide it and no epoch ends in a shorter one
SAMPLES = 15360


class RandomImages(torch.utils.data.Dataset[Any]):
    """Images and labels of the shape of MNIST."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(10, 1, 28, 28, generator=generator)
        self.labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
        self.images = torch.randn(SAMPLES, 1, 28, 28, generator=generator).add_(patterns[self.labels], alpha=0.5)

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
