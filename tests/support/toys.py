"""Small tasks with known traps, for tests: every one records the gradient its optimizer was given.

They keep the data's own order (`--curriculum 1000`), so a reference loop needs nothing of the product to know which
samples a step takes: the next ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hetseq import Task
from hetseq.tasks.mnist import MNISTNet

SAMPLES = 25  # no batch size below divides it, so every epoch ends raggedly
Batch = dict[str, torch.Tensor]


def recording(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """An optimizer class that keeps a copy of the gradients of each step, flat, zeros where there is none."""

    class Recording(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen: list[torch.Tensor] = []
            self.absent: list[list[bool]] = []

        def step(self, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
            self.seen.append((torch.cat(flat) if flat else torch.zeros(0)).detach().clone())
            self.absent.append([p.grad is None for p in parameters])
            return super().step(closure)

    Recording.__name__ = base.__name__
    return Recording


OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adadelta": torch.optim.Adadelta}


class Toy(Task):
    """A toy: `optimizer` names the class it is trained with, `rate` its learning rate."""

    optimizer = "sgd"
    rate = 0.1

    def load_dataset(self, split: str) -> torch.utils.data.Dataset[Any]:
        return Rows(self.rows())

    def rows(self) -> Batch:
        raise NotImplementedError

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return recording(OPTIMIZERS[self.optimizer])(parameter_groups, lr=self.rate)


class Rows(torch.utils.data.Dataset[Batch]):
    """Columns of equal length as a data set."""

    def __init__(self, columns: Batch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


class TwoTerms(Toy):
    """Two terms with different denominators; the second has count 0 in whole stretches of the data, and its sum is
    then 0/0, as a careless user writes it."""

    term_weights = {"cls": 1.0, "reg": 0.25}

    def rows(self) -> Batch:
        generator = np.random.default_rng(1)
        index = np.arange(SAMPLES)
        return {
            "x": torch.from_numpy(generator.normal(size=(SAMPLES, 6))),
            "y": torch.from_numpy(generator.integers(0, 3, SAMPLES)),
            "z": torch.from_numpy(generator.normal(size=(SAMPLES, 4))),
            "mask": torch.from_numpy((generator.random((SAMPLES, 4)) < 0.6) * ((index // 6) % 2)[:, None]).double(),
        }

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(6, 8), "cls": nn.Linear(8, 3), "reg": nn.Linear(8, 4)})

    def count(self, sample: Batch) -> dict[str, float]:
        return {"cls": len(sample["x"]), "reg": float(sample["mask"].sum())}

    def loss(self, model: Any, sample: Batch) -> dict[str, torch.Tensor]:
        cls, squares = self.outputs(model, sample)
        mask = sample["mask"]
        return {"cls": cls, "reg": (squares * mask).sum() / mask.sum() * mask.sum()}

    @staticmethod
    def outputs(model: Any, sample: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(model["body"](sample["x"]))
        cls = F.cross_entropy(model["cls"](hidden), sample["y"], reduction="sum")
        return cls, (model["reg"](hidden) - sample["z"]) ** 2


class SometimesUnused(Toy):
    """A branch of the model that only some samples take: in some steps no rank uses it, in others only one does."""

    def rows(self) -> Batch:
        generator = np.random.default_rng(2)
        return {
            "x": torch.from_numpy(generator.normal(size=(SAMPLES, 5))),
            "y": torch.from_numpy(generator.normal(size=SAMPLES)),
            "branch": torch.from_numpy(np.arange(SAMPLES) % 11 == 3),
        }

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"main": nn.Linear(5, 1), "branch": nn.Linear(5, 1)})

    def loss(self, model: Any, sample: Batch) -> dict[str, torch.Tensor]:
        output = model["main"](sample["x"]).squeeze(1)
        takes = sample["branch"]
        if takes.any():
            output = output.masked_scatter(takes, output[takes] + model["branch"](sample["x"][takes]).squeeze(1))
        return {"loss": ((output - sample["y"]) ** 2).sum()}


class Integers(Toy):
    """Every number is a small multiple of a power of two, so sums are exact in any order: equal bits or a bug."""

    rate = 2.0**-4

    def rows(self) -> Batch:
        generator = np.random.default_rng(3)
        return {
            "x": torch.from_numpy(generator.integers(-3, 4, (32, 4))).double(),
            "y": torch.from_numpy(generator.integers(-5, 6, 32)).double(),
        }

    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 0.0]]))
        return model

    def loss(self, model: Any, sample: Batch) -> dict[str, torch.Tensor]:
        return {"loss": (model(sample["x"]).squeeze(1) - sample["y"]).abs().sum()}


class Images(Toy):
    """The net of the MNIST task on synthetic images, without dropout; few of them, since the net is not a toy."""

    def rows(self) -> Batch:
        generator = np.random.default_rng(4)
        return {
            "x": torch.from_numpy(generator.normal(size=(12, 1, 28, 28))),
            "y": torch.from_numpy(generator.integers(0, 10, 12)),
        }

    def build_model(self) -> nn.Module:
        return MNISTNet(dropout=(0.0, 0.0))

    def loss(self, model: Any, sample: Batch) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(model(sample["x"]), sample["y"], reduction="sum")}


class TwoTermsAdam(TwoTerms):
    optimizer = "adam"
    rate = 0.01


class TwoTermsAdadelta(TwoTerms):
    optimizer = "adadelta"
    rate = 1.0
