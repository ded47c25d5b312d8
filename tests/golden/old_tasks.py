"""The frozen tasks of the runs in this folder: `--task old_tasks.py:Exact`, `:Mixed` and `:Loud`.

A resumed run needs the task that wrote its checkpoints, so this file is never changed. It imports only torch and public
names of `hetseq`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hetseq import Task

Batch = dict[str, Tensor]

_SAMPLES = {"train": 36, "valid": 16}  # a global batch of 8 leaves 4 for the last step of an epoch


class Rows(Dataset[Batch]):
    """Columns of equal length as a data set."""

    def __init__(self, columns: Batch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


def whole_numbers(rows: int, columns: int, *, least: int, most: int, start: int) -> Tensor:
    """A matrix of small integers; no generator of torch is used, because another version might draw others."""
    # the generator of Park and Miller with the constants of 1993
    state, numbers = start, []
    for _ in range(rows * columns):
        state = state * 48271 % 2147483647
        numbers.append(least + (state >> 8) % (most - least + 1))
    return torch.tensor(numbers, dtype=torch.float64).reshape(rows, columns)  # (rows, columns)


class Counting(nn.Module):
    """A linear layer of 4 by 3; its two buffers count the forwards in training."""

    steps: Tensor
    halves: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("halves", torch.zeros(2))
        with torch.no_grad():
            self.linear.weight.copy_(whole_numbers(3, 4, least=-2, most=2, start=5) / 2)
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.halves += 0.5
        return self.linear(x)


class Exact(Task):
    """In fp64 no result is rounded, so every processor and every number of ranks computes the same bits.

    The loss is the absolute difference, so a gradient is a sum of small integers. With a global batch of 8, a
    learning rate of 2^-4 and momentum 2^-1, 12 steps take fewer than 30 of the 53 bits.
    """

    term_weights = {"first": 1.0, "others": 0.5}

    def load_dataset(self, split: str) -> Rows | None:
        """36 rows to train on, 16 for validation."""
        if split not in _SAMPLES:
            return None
        rows, start = _SAMPLES[split], {"train": 11, "valid": 12}[split]
        x = whole_numbers(rows, 4, least=-3, most=3, start=start)
        rule = torch.tensor([[1.0, -2.0, 0.0], [3.0, 1.0, -1.0], [-1.0, 0.0, 2.0], [0.0, 2.0, 1.0]]).double()
        return Rows({"x": x, "y": x @ rule + whole_numbers(rows, 3, least=-1, most=1, start=start + 100)})

    def build_model(self) -> nn.Module:
        """12 weights and 3 biases, all multiples of one half."""
        return Counting()

    def count(self, sample: Batch) -> dict[str, float]:
        """Samples, for both terms."""
        return {"first": float(len(sample["x"])), "others": float(len(sample["x"]))}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Absolute differences, summed: of the first column, and of the other two."""
        differences = (model(sample["x"]) - sample["y"]).abs()
        return {"first": differences[:, 0].sum(), "others": differences[:, 1:].sum()}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`near`: numbers that are less than 2 from their target, per row."""
        near = (model(sample["x"]) - sample["y"]).abs() < 2
        return {"near": (float(near.sum()), float(len(sample["x"])))}

    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        """The three numbers of each row, in full."""
        return [" ".join(map(repr, row)) for row in model(sample["x"]).tolist()]


class Small(nn.Module):
    """Two layers with batch normalisation and dropout between them, and two heads."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout))
        self.label = nn.Linear(8, 3)
        self.number = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.label(hidden), self.number(hidden)[:, 0]


class Mixed(Task):
    """Ordinary floats: a class and a number of each row, for the optimizers and the lower precisions."""

    term_weights = {"label": 1.0, "number": 0.25}

    def load_dataset(self, split: str) -> Rows | None:
        """36 rows to train on, 16 for validation."""
        if split not in _SAMPLES:
            return None
        rows, start = _SAMPLES[split], {"train": 21, "valid": 22}[split]
        x = whole_numbers(rows, 4, least=-3, most=3, start=start)
        label = (x[:, 0] - x[:, 1] + 30).long() % 3
        return Rows({"x": x.float() / 3, "label": label, "number": (x[:, 2] * x[:, 3]).float() / 9})

    def build_model(self) -> nn.Module:
        """Its weights are set without random numbers; `--dropout` is the rate of its only dropout."""
        rate = self.config.task.dropout
        model = Small(0.25 if rate is None else rate)
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                if parameter.dim() == 2:
                    rows, columns = parameter.shape
                    parameter.copy_(whole_numbers(rows, columns, least=-8, most=8, start=30 + index) / 16)
                elif index not in (2, 3):  # of the normalisation, which begins with ones and zeros
                    parameter.zero_()
        return model

    def count(self, sample: Batch) -> dict[str, float]:
        """Samples, for both terms."""
        return {"label": float(len(sample["x"])), "number": float(len(sample["x"]))}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """The cross entropy of the class in nats and the squared error of the number, summed."""
        scores, number = model(sample["x"])
        return {
            "label": nn.functional.cross_entropy(scores, sample["label"], reduction="sum"),
            "number": ((number - sample["number"]) ** 2).sum(),
        }

    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        """The class of each row."""
        return [str(label) for label in model(sample["x"])[0].argmax(dim=1).tolist()]


class Loud(Mixed):
    """`Mixed` with gradients that are too large for the first loss scale of fp16: two steps are skipped."""

    term_weights = {"label": 1.0, "number": 2.0}
