"""State that forward carries from batch to batch is named by the trial of the loss; caches and outputs are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import default_collate

from hetseq import Config, Task
from hetseq.task import make_task
from hetseq.training.task_checks import LossTrial, check_loss

WIDTH = 4


def rows(*lengths: int) -> list[torch.Tensor]:
    """Samples (length, 4)."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, WIDTH, generator=generator) for length in lengths]


class Squares(Task):
    def loss(self, model: Any, sample: Any) -> Any:
        return {"loss": model(sample).square().sum()}


class Contrast(Squares):
    """The samples of a micro-batch share one loss, so it does not add up."""

    def loss(self, model: Any, sample: Any) -> Any:
        output = model(sample).flatten(1)
        return {"loss": torch.logsumexp(output @ output.T, 1).sum()}


class Holding(Squares):
    """The task, and not the model, keeps the state."""

    held: Any = None

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.held = torch.zeros(WIDTH)

    def loss(self, model: Any, sample: Any) -> Any:
        output = model(sample + self.held)
        self.held = output.detach().mean((0, 1))
        return {"loss": output.square().sum()}


def trial(
    model: nn.Module, samples: Any = None, task: type[Task] = Squares, collate: Any = default_collate
) -> LossTrial:
    torch.manual_seed(3)
    return check_loss(
        make_task(task, Config()), model, rows(5, 5) if samples is None else samples, collate=collate,
        place=lambda sample: sample, terms=("loss",), seed=7,
    )  # fmt: skip


class StatefulLstm(nn.Module):
    """As a language model that goes on where the batch before ended; another size begins anew."""

    def __init__(self, is_buffer: bool = False) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.hidden: Any = None
        if is_buffer:
            self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        size = len(sample)
        if "state" in self._buffers:
            output, _ = self.rnn(sample + self.state)
            self.state.copy_(output.detach().mean((0, 1)))
            return output
        if self.hidden is None or self.hidden[0].shape[1] != size:
            self.hidden = (torch.zeros(1, size, WIDTH), torch.zeros(1, size, WIDTH))
        output, hidden = self.rnn(sample, tuple(state.detach() for state in self.hidden))
        self.hidden = tuple(state.detach() for state in hidden)
        return output


class Memory(nn.Module):
    """Attends to what it saw before, the last entries of it, as Transformer-XL does."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(1, 0, WIDTH)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        past = torch.cat([self.memory.expand(len(sample), -1, -1), sample], 1)
        self.memory = past[:1, -3:].detach()
        return nn.functional.scaled_dot_product_attention(sample, past, past)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (StatefulLstm, "hidden of the model (StatefulLstm)"),
        (lambda: nn.Sequential(StatefulLstm()), "hidden of 0 (StatefulLstm)"),
        (lambda: StatefulLstm(is_buffer=True), "state of the model (StatefulLstm)"),
        (Memory, "memory of the model (Memory)"),
    ],
)
def test_state_that_is_kept_from_batch_to_batch_is_named(model: Callable[[], nn.Module], expected: str) -> None:
    assert trial(model()).carried == (expected,)


def test_state_that_the_task_keeps_is_named() -> None:
    assert trial(nn.Linear(WIDTH, WIDTH), task=Holding).carried == ("held of the task (Holding)",)


class Rotary(nn.Module):
    """A table of cosines: made for the first sequence, and anew, or longer, for another length."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.table, self.by_length = way, torch.zeros(0, WIDTH), dict[int, torch.Tensor]()

    def rows_from(self, start: int, stop: int) -> torch.Tensor:
        return torch.cos(torch.arange(start, stop)[:, None] / torch.arange(1, WIDTH + 1))

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        have, need = len(self.table), sample.shape[1]
        if (self.way == "anew" and have != need) or (self.way == "longest" and have < need):
            self.table = self.rows_from(0, need)
        elif self.way == "grown" and have < need:
            self.table = torch.cat([self.table, self.rows_from(have, need)])
        elif self.way == "by length":
            self.by_length[need] = self.by_length.get(need, self.rows_from(0, need))
            return sample * self.by_length[need]
        return sample * self.table[:need]


class Keeping(nn.Module):
    """Keeps what it computed where others can look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(WIDTH, WIDTH), torch.zeros(1)
        self.features: dict[str, Any] = {}
        self.scratch = torch.zeros(2, 5, WIDTH)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        if "last" in self.features:
            assert self.features["last"].shape[1:] == sample.shape[1:]
            torch.zeros_like(self.features["last"])
        self.scratch[: len(sample)] = sample
        output = self.layer(self.scratch[: len(sample)])
        self.features["last"] = output.detach()
        self.features["input"] = sample
        self.penalty = output.square().mean()
        return output + self.penalty + sample


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))


class First(nn.Module):
    def forward(self, pair: Any) -> Any:
        return pair[0]


QUIET: dict[str, Callable[[], nn.Module]] = {
    **{f"rotary {way}": (lambda way=way: Rotary(way)) for way in ("anew", "longest", "grown", "by length")},  # type: ignore[misc]
    "batch norm": normalised,
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: nn.Dropout(0.5),
    "lstm": lambda: nn.Sequential(nn.LSTM(WIDTH, WIDTH), First()),
    "kept outputs": Keeping,
}


@pytest.mark.parametrize("task", [Squares, Contrast])
@pytest.mark.parametrize("name", QUIET)
def test_caches_outputs_and_statistics_are_not_named(name: str, task: type[Task]) -> None:
    assert trial(QUIET[name](), task=task).carried == ()


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3)])
@pytest.mark.parametrize("name", [name for name in QUIET if name.startswith("rotary")])
def test_a_table_for_sequences_of_any_length_is_not_named(name: str, lengths: tuple[int, int]) -> None:
    def padded(samples: Any) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(list(samples), batch_first=True)

    assert trial(QUIET[name](), rows(*lengths), Contrast, padded).carried == ()


def test_two_batches_that_are_parts_of_one_tensor_are_told_apart() -> None:
    def noisy(samples: Any) -> torch.Tensor:
        batch: torch.Tensor = default_collate(samples)
        return batch + torch.rand(batch.shape)

    assert trial(Keeping(), None, Contrast, noisy).carried == ()
    assert trial(StatefulLstm(), None, Squares, noisy).carried == ("hidden of the model (StatefulLstm)",)


def test_what_cannot_be_compared_is_not_named() -> None:
    class Sparse(nn.Module):
        seen: Any = None

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            before = 0 if self.seen is None else self.seen.to_dense().mean()
            self.seen = sample.detach().mean(0).to_sparse()
            return sample + before

    assert trial(Sparse()).carried == ()


def test_an_average_for_the_log_does_not_change_the_loss_and_is_not_named() -> None:
    class Averaging(nn.Linear):
        average = torch.zeros(())

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            output = super().forward(sample)
            self.average = 0.9 * self.average + output.detach().mean()
            return output

    assert trial(Averaging(WIDTH, WIDTH)).carried == ()


def test_the_trial_makes_three_forwards_whatever_it_looks_at() -> None:
    class Counting(StatefulLstm):
        calls = 0

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(sample)

    for model in (Counting(), Counting(is_buffer=True)):
        trial(model)
        assert model.calls == 3


def test_what_the_user_compiles_stays_one_graph() -> None:
    class Compiled(StatefulLstm):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.compile(lambda tensor: tensor.cos() * 2, fullgraph=True, backend="eager")

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            return super().forward(self.scale(sample))

    assert trial(Compiled()).carried == ("hidden of the model (Compiled)",)
