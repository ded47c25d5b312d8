"""Where is the disc, and which pixels are its own? Images of 16 x 16 pixels, regressed to a point and to a mask.

Two loss terms, each with its own count: every pixel belongs to a disc or not, but only some images have a disc.

    hetseq train --task examples/discs.py:Discs --batch-size 64 --max-epoch 5 --lr 0.005 --save-dir runs/discs
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hetseq import Task

Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # images: (n, 256), masks: (n, 256), centres: (n, 2), has_disc: (n,)


class Discs(Task):
    """A disc of random place and size in noise; one image in four has none."""

    def load_dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        random = torch.Generator().manual_seed(1 if split == "train" else 2)
        centres, radii = torch.rand(2048, 2, generator=random), 0.1 + 0.2 * torch.rand(2048, 1, generator=random)
        has_disc = torch.rand(2048, generator=random) < 0.75
        pixels = torch.cartesian_prod(torch.arange(16.0), torch.arange(16.0)) / 15  # (256, 2), from 0 to 1
        masks = (torch.cdist(centres, pixels) < radii) & has_disc[:, None]
        images = masks + 0.3 * torch.randn(2048, 256, generator=random)
        return TensorDataset(images, masks.float(), centres, has_disc)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256 + 2))

    def count(self, sample: Batch) -> dict[str, float]:
        return {"mask": sample[1].numel(), "place": float(sample[3].sum())}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        images, masks, centres, has_disc = sample
        mask, place = model(images).split([256, 2], dim=1)
        squares = (place - centres).square().sum(dim=1) * has_disc
        return {"mask": F.binary_cross_entropy_with_logits(mask, masks, reduction="sum"), "place": squares.sum()}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        distances = (model(sample[0])[:, 256:] - sample[2]).norm(dim=1) * sample[3]
        return {"distance": (float(distances.sum()), float(sample[3].sum()))}
