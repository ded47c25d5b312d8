"""Tasks with one fault each, for `hetseq selftest`; `Honest` and `Padded` have none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetseq import Task
from tests.support.toys import Batch, Rows

SAMPLES = 40


class Honest(Task):
    """A regression of rows of 5."""

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        random = torch.Generator().manual_seed(1)
        return Rows({"x": torch.randn(SAMPLES, 5, generator=random), "y": torch.randn(SAMPLES, generator=random)})

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def count(self, sample: Batch) -> dict[str, float]:
        return {"squares": len(sample["x"])}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).sum()}

    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        squares: torch.Tensor = (model(sample["x"]).squeeze(1) - sample["y"]) ** 2  # (n,)
        return squares


class Mean(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).mean()}


class ConstantCount(Honest):
    def count(self, sample: Batch) -> dict[str, float]:
        return {"squares": 1}


class Contrastive(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        output = model[0](sample["x"])
        return {"squares": F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="sum")}


class Normed(Honest):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class Remembering(Honest):
    seen = 0

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        self.seen += 1
        return {"squares": self.squares(model, sample).sum() * self.seen}


class Infinite(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).sum() / 0}


class Noisy(Honest):
    """Random in a way that is no fault: noise for each element, in any mode."""

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": (self.squares(model, sample) * torch.rand(len(sample["x"])).to(sample["x"])).sum()}


class WrongMetric(Honest):
    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        return {"error": (float(self.squares(model, sample).mean()), 1.0)}


class OneLine(Honest):
    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        return ["all well"]


class Squeezing(Honest):
    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        squares: torch.Tensor = (model(sample["x"]).squeeze()[range(len(sample["x"]))] - sample["y"]) ** 2
        return squares


class Forgetful(Honest):
    """Its model computes with a tensor that no checkpoint holds."""

    def build_model(self) -> nn.Module:
        model = nn.Linear(5, 1)
        scale = model.weight.detach().clone()
        model.register_forward_hook(lambda module, args, output: output * scale.to(output).sum() * args[0].new_ones(1))
        model.register_buffer("scale", torch.rand(1), persistent=False)
        model.register_forward_hook(lambda module, args, output: output + _first(module))
        return model


def _first(module: nn.Module) -> torch.Tensor:
    """The weights as they were when it was first called."""
    if not hasattr(module, "kept"):
        module.kept = module.weight.detach().clone()  # type: ignore[assignment, operator]
    return module.kept.sum()  # type: ignore[operator, union-attr, no-any-return]


class Redrawn(Honest):
    """Reading a sample twice gives two."""

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        return _Redrawn(super().load_dataset(split).columns)  # type: ignore[attr-defined]


class _Redrawn(Rows):
    random = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> Batch:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + torch.randn(5, generator=self.random)}


class Padded(Honest):
    """Rows of different lengths, padded with zeros to the longest of the micro-batch; a mask says what is there."""

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        random = torch.Generator().manual_seed(2)
        lengths = torch.randint(2, 9, (SAMPLES,), generator=random).tolist()
        return _Ragged([torch.randn(length, generator=random) for length in lengths])

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def collater(self, samples: list[torch.Tensor]) -> Batch:
        x = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        lengths = torch.tensor([len(sample) for sample in samples])
        return {"x": x, "mask": (torch.arange(x.shape[1]) < lengths[:, None]).to(x)}

    def count(self, sample: Batch) -> dict[str, float]:
        return {"squares": float(sample["mask"].sum())}

    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        return self.all_squares(model, sample) * sample["mask"]

    @staticmethod
    def all_squares(model: nn.Module, sample: Batch) -> torch.Tensor:
        squares: torch.Tensor = (model(sample["x"][..., None])[..., 0] - 1) ** 2  # (n, width)
        return squares


class _Ragged(list):  # type: ignore[type-arg]
    """Rows of different lengths."""


class CountsPadding(Padded):
    def count(self, sample: Batch) -> dict[str, float]:
        return {"squares": sample["x"].numel()}


class SeesPadding(Padded):
    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        return self.all_squares(model, sample)
