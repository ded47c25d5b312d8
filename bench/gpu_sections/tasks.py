"""The task of the sections: made-up pictures, a small network without dropout, and faults on request.

PYTHONPATH=bench hetseq train --task bench/gpu_sections/tasks.py:Pictures --fault lose-device --fault-at 10 ...
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpu_sections import faults
from hetseq import Task, option

SAMPLES, CLASSES = 2048, 10


@dataclass(frozen=True)
class PictureOptions:
    """Size of the pictures and of the network, and the fault to make."""

    side: int = option(12, "width and height of a picture, in pixels")
    width: int = option(8, "channels of the network")
    fault: str | None = option(None, f"what goes wrong: {', '.join(faults.FAULTS)}")
    fault_at: int = option(3, "number of updates after which it goes wrong")
    fits: int = option(64, "samples that memory holds, for the faults of memory")
    mib: int = option(0, "MiB of GPU memory that this process may use; 0: all of it")
    factor: float = option(1.0, "what the loss is multiplied by")
    pause: float = option(0.0, "seconds to sleep after each step, until there is a file RUN.hurry")


class Dataset(torch.utils.data.Dataset[Any]):
    """Noise over a pattern of the label, held in memory; float32."""

    def __init__(self, side: int) -> None:
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(CLASSES, 1, side, side, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        noise = torch.randn(SAMPLES, 1, side, side, generator=generator)
        self.pictures = noise.add_(patterns[self.labels], alpha=0.5)  # (samples, 1, side, side)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.pictures[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.pictures[indices], self.labels[indices]


class Net(nn.Module):
    """Three convolutions and a linear layer; smooth, so that rounding stays small."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(), nn.Linear(width * ((side + 1) // 2) ** 2, CLASSES),
        )  # fmt: skip

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(pictures)
        return logits


class Pictures(Task):
    """Classification; a fault that happens once leaves a file beside the run directory."""

    Options = PictureOptions

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        run = str(self.config.checkpoint.save_dir)
        once, self._hurry = Path(f"{run}.fault"), Path(f"{run}.hurry")
        self.fault = faults.Plan(self.options.fault, self.options.fault_at, self.options.fits, once)

    def load_dataset(self, split: str) -> Dataset:
        return Dataset(self.options.side)

    def collater(self, samples: Any) -> Any:
        return self.fault.batch(samples)

    def build_model(self) -> Net:
        if self.options.mib and torch.cuda.is_available():
            device = torch.cuda.current_device()
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.options.mib * 2**20 / total), device)
        self.fault.prepare()
        return Net(self.options.side, self.options.width)

    def update_step(self, num_updates: int) -> None:
        self.fault.updates = num_updates
        if self.options.pause and not self._hurry.exists():
            time.sleep(self.options.pause)

    def loss(self, model: nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        pictures, labels = sample
        self.fault.before(pictures, is_training=model.training)
        logits = model(pictures)
        self.fault.between(model, is_training=model.training)
        return {"loss": self.options.factor * F.cross_entropy(logits, labels, reduction="sum")}

    def metrics(self, model: nn.Module, sample: Any) -> dict[str, tuple[float, float]]:
        pictures, labels = sample
        self.fault.before(pictures, is_training=False)
        return {"accuracy": (float((model(pictures).argmax(1) == labels).sum()), len(labels))}

    def predictions(self, model: nn.Module, sample: Any) -> list[str]:
        self.fault.before(sample[0], is_training=False)
        return [str(label) for label in model(sample[0]).argmax(1).tolist()]
