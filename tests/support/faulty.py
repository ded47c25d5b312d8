"""Tasks with one fault each, for `hetseq selftest`; `Honest` and `Padded` have none."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
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


class MeanOfItsOwn(Honest):
    """A mean over neither the count nor the samples."""

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        weights = sample["x"][:, 0].abs()
        return {"squares": (self.squares(model, sample) * weights).sum() / weights.sum()}


class Largest(Honest):
    """A sample counts no more twice than once, as with a mean."""

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).max()}


class Penalised(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        penalty = 0.1 * sum((weight**2).sum() for weight in model.parameters())
        return {"squares": self.squares(model, sample).sum() + penalty}


class PartlyMean(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        squares = self.squares(model, sample)
        return {"squares": squares.sum() + squares.mean()}


class Nothing(Honest):
    def count(self, sample: Batch) -> dict[str, float]:
        return {"squares": 0}


class Detached(Honest):
    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        return super().squares(model, sample).detach()


class Frozen(Honest):
    def build_model(self) -> nn.Module:
        return super().build_model().requires_grad_(False)


class Contrastive(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        output = model[0](sample["x"])
        return {"squares": F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="sum")}


class Normed(Honest):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class Centred(Honest):
    """A model that mixes samples between two layers that do not."""

    def build_model(self) -> nn.Module:
        return _Centred()


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last((hidden - hidden.mean(0)).tanh())  # type: ignore[no-any-return]


class Averaging(Honest):
    """A running mean that forward changes in training, and looks at."""

    def build_model(self) -> nn.Module:
        return _Averaging()


class _Averaging(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.mean)  # type: ignore[no-any-return]


class Remembering(Honest):
    seen = 0

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        self.seen += 1
        return {"squares": self.squares(model, sample).sum() * self.seen}


class Infinite(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).sum() / 0}


class OneInfinite(Honest):
    """Of sample 7, whose gradient alone is not finite."""

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        columns = super().load_dataset(split).columns  # type: ignore[attr-defined]
        columns["x"][7] = 0
        return Rows(columns)

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": (model(sample["x"])[:, 0] * sample["x"][:, 0]).square().sqrt().sum()}


class Noisy(Honest):
    """Random in a way that is no fault: noise for each element, in any mode."""

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": (self.squares(model, sample) * torch.rand(len(sample["x"])).to(sample["x"])).sum()}


class Diffusing(Honest):
    """Draws of every sort for each element: a time, a noise, a mask, a count."""

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        x, size = sample["x"], len(sample["x"])
        time = torch.randint(1, 11, (size, 1)) + torch.empty(size, 1, dtype=torch.long).random_(0, 10)
        noise = torch.normal(x, 0.1) + torch.poisson(x.abs()) + torch.binomial(x * 0 + 5, x * 0 + 0.5)
        squares = (model(x + time / 10 * noise).squeeze(1) - sample["y"]) ** 2
        return {"squares": F.dropout(squares, 0.5).sum()}


class MixedUp(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        x = (sample["x"] + sample["x"][torch.randperm(len(sample["x"]))]) / 2
        return {"squares": ((model(x).squeeze(1) - sample["y"]) ** 2).sum()}


class DrawsElsewhere(Honest):
    """From NumPy's generator, whose numbers HetSeq cannot fix."""

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": (self.squares(model, sample) * torch.tensor(np.random.rand(len(sample["x"])))).sum()}


class DrawsOnce(Honest):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).sum() * random.random()}


class Single(Honest):
    """Works in fp32 alone."""

    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        if sample["x"].dtype != torch.float32:
            raise TypeError("fp32 is expected")
        return super().squares(model, sample)


class Narrowing(Honest):
    """Computes in fp32 whatever it is given, as mixed precision by hand does."""

    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        squares: torch.Tensor = (model(sample["x"]).squeeze(1).float() - sample["y"].float()) ** 2
        return squares


class NarrowMean(Narrowing):
    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).mean()}


class UnknownMetric(Honest):
    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        return {"error": (math.nan, len(sample["x"]))}


class WrongSummary(Honest):
    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        chosen = self.squares(model, sample)[sample["y"] > 0]
        return {"error": (float(chosen.sum()), len(chosen))}

    def summarise(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        return {"error": sums["error"][0] / sums["error"][1]}


class WrongMetric(Honest):
    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        return {"error": (float(self.squares(model, sample).mean()), 1.0)}


class OneLine(Honest):
    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        return ["all well"]


class Sorting(Honest):
    """Its lines are in the order of the collater, not of the samples."""

    def collater(self, samples: list[Batch]) -> Batch:
        samples = sorted(samples, key=lambda row: float(row["y"]))
        return {name: torch.stack([row[name] for row in samples]) for name in ("x", "y")}

    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        return [f"{value:.3f}" for value in sample["y"].tolist()]


class RandomCollater(Honest):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x)

    def collater(self, samples: list[Batch]) -> Batch:
        batch = {name: torch.stack([row[name] for row in samples]) for name in ("x", "y")}
        return {**batch, "x": batch["x"] + self.noise(batch["x"])}


class OwnCollater(RandomCollater):
    generator = torch.Generator().manual_seed(3)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=self.generator)


class Few(Honest):
    """One sample."""

    samples = 1

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        columns = super().load_dataset(split).columns  # type: ignore[attr-defined]
        return Rows({name: column[: self.samples] for name, column in columns.items()})


class Fewer(Few):
    samples = 0


class Three(Few):
    samples = 3


class Pairing(Honest):
    """Needs two samples, and counts each pair of neighbours."""

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        if len(sample["x"]) < 2:
            raise ValueError("two samples are needed")
        squares = self.squares(model, sample)
        return {"squares": squares.sum() + (squares[1:] * squares[:-1]).sum()}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        return {"error": (float(self.loss(model, sample)["squares"]), len(sample["x"]))}


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


class OfThisProcess(Honest):
    """Its samples have the order of a set, and its weights depend on the time."""

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        order = [int(name) for name in {str(index) for index in range(SAMPLES)}]
        columns = super().load_dataset(split).columns  # type: ignore[attr-defined]
        return Rows({name: column[order] for name, column in columns.items()})

    def build_model(self) -> nn.Module:
        torch.manual_seed(os.getpid())
        return super().build_model()


class Counting(Honest):
    """The sample at an index depends on earlier reads."""

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        return _Counting(super().load_dataset(split).columns)  # type: ignore[attr-defined]


class _Counting(Rows):
    last = 0

    def __getitem__(self, index: int) -> Batch:
        row, before, self.last = super().__getitem__(index), self.last, index
        return {**row, "y": row["y"] + (index > before)}


class SeededNoise(Honest):
    """Random samples, from the generators that are seeded by sample."""

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        return _SeededNoise(super().load_dataset(split).columns)  # type: ignore[attr-defined]


class _SeededNoise(Rows):
    def __getitem__(self, index: int) -> Batch:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + random.random() + np.random.rand() + torch.rand(5)}


class Padded(Honest):
    """Rows of different lengths, zero-padded to the longest of the micro-batch; a mask marks the real elements."""

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


class DividesByTokens(Padded):
    """Divides by the micro-batch's count where all ranks' is right."""

    def count(self, sample: Batch) -> dict[str, float]:
        return {"squares": len(sample["x"])}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, torch.Tensor]:
        return {"squares": self.squares(model, sample).sum() / sample["mask"].sum() * len(sample["x"])}


class SeesPadding(Padded):
    def squares(self, model: nn.Module, sample: Batch) -> torch.Tensor:
        return self.all_squares(model, sample)
