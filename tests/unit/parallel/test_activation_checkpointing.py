"""Modules that run again in backward: the same bits, less kept, and words where it cannot be."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hetseq.errors import ConfigError, TaskError
from hetseq.parallel import activation_checkpointing
from hetseq.parallel.activation_checkpointing import checkpoint_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 64), nn.Linear(64, 8), nn.Dropout(0.3)

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        return hidden + scale * self.drop(self.down(torch.tanh(self.up(hidden))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.encoder:
            hidden = block(hidden, scale=0.5)
        return self.head(hidden)


def gradients(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """The gradient of each parameter, and the bytes that were kept for it."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    torch.manual_seed(5)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(32, 4)).square().sum()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return {name: one.clone() for name, one in found.items()}, kept


@pytest.mark.parametrize("patterns", ["auto", "encoder.*", ["encoder.0", "encoder.[12]", "*.up"]])
def test_the_gradient_has_the_same_bits_and_less_is_kept(patterns: str | list[str]) -> None:
    torch.manual_seed(1)
    plain = Net()
    again = copy.deepcopy(plain)
    names = list(again.state_dict())
    assert checkpoint_activations(again, patterns) == ("encoder.0", "encoder.1", "encoder.2")
    assert checkpoint_activations(again, patterns) == ("encoder.0", "encoder.1", "encoder.2"), "a second time"
    (expected, all_of_it), (found, inputs_alone) = gradients(plain), gradients(again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert inputs_alone < all_of_it / 3
    assert list(again.state_dict()) == names
    copied = gradients(copy.deepcopy(again))[0]
    assert all(torch.equal(copied[name], expected[name]) for name in expected)


def test_outside_training_a_module_runs_once() -> None:
    model, runs = Net(), list[int]()
    checkpoint_activations(model)
    model.encoder[1].up.register_forward_hook(lambda *_: runs.append(1))
    model.eval()
    model(torch.randn(2, 4)).sum().backward()
    assert len(runs) == 1
    model.train()
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert len(runs) == 2
    model(torch.randn(2, 4)).sum().backward()
    assert len(runs) == 4


def test_the_layers_of_a_plain_sequential_are_found() -> None:
    assert checkpoint_activations(nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 1))) == ("1", "2")


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return super().forward(hidden, scale=scale)


class Averaging(Counting):
    """Changes the buffer behind its version counter."""

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls.data.add_(1)
        return Block.forward(self, hidden, scale=scale)


class Replacing(Counting):
    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls = self.calls + 1
        return Block.forward(self, hidden, scale=scale)


class Tabled(Block):
    """Has a table that grows with its input, one of unknown numbers, and one that is sparse; none of them changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(2.0), persistent=False)
        self.register_buffer("unknown", torch.full((3,), float("nan")))
        self.register_buffer("links", torch.eye(3).to_sparse(), persistent=False)

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        if len(hidden) > len(self.rows):
            self.register_buffer("rows", torch.arange(float(len(hidden))), persistent=False)
        return super().forward(hidden + self.rows[: len(hidden), None], scale=scale)


class Drawing(Block):
    """Draws from the generators of Python and NumPy."""

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        if random.random() < 0.5:
            hidden = hidden * np.random.rand()
        return super().forward(hidden, scale=scale)


def does_so_itself() -> nn.Module:
    model = Net()
    model.is_gradient_checkpointing = True  # type: ignore[assignment]
    return model


def of(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


@pytest.mark.parametrize(
    ("make", "pattern", "says"),
    [
        (lambda: of(nn.Linear(8, 8), nn.Linear(8, 8)), "auto", "auto found no layers, several modules of one class"),
        (Net, "decoder.*", r"decoder\.\* fits no module of Net: .*; it has first, encoder, encoder.0, .*, \.\.\.$"),
        (does_so_itself, "auto", "Net runs layers again in backward already"),
        (lambda: of(Block(), of(Block(), nn.BatchNorm1d(8))), "1", "1 has BatchNorm1d, whose averages would count"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(make: Callable[[], nn.Module], pattern: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checkpoint_activations(make(), pattern)


@pytest.mark.parametrize("kind", [Counting, Averaging, Replacing])
def test_a_module_that_changes_a_buffer_in_forward_is_named(kind: type[nn.Module]) -> None:
    model = of(kind(), kind())
    checkpoint_activations(model)
    with pytest.raises(TaskError, match=rf"^0 \({kind.__name__}\) changes one of its buffers in forward"):
        model(torch.randn(2, 8))


def test_a_table_that_grows_is_no_change() -> None:
    torch.manual_seed(1)
    plain = of(Tabled(), Tabled())
    again = copy.deepcopy(plain)
    checkpoint_activations(again)
    for model in (plain, again):
        for rows in (2, 5, 3):
            torch.manual_seed(rows)
            model(torch.randn(rows, 8)).square().sum().backward()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(again.parameters(), plain.parameters()))  # type: ignore[arg-type]


def test_the_second_forward_has_the_random_numbers_of_python_and_numpy_too() -> None:
    torch.manual_seed(1)
    plain = of(*(Drawing() for _ in range(6)))
    again = copy.deepcopy(plain)
    checkpoint_activations(again)

    def trained(model: nn.Module) -> list[Any]:
        torch.manual_seed(2)
        random.seed(3)
        np.random.seed(4)
        inputs = torch.randn(4, 8, requires_grad=True)
        model(inputs).square().sum().backward()
        return [*(one.grad for one in (inputs, *model.parameters())), torch.tensor([random.random(), np.random.rand()])]

    assert all(torch.equal(one, other) for one, other in zip(trained(again), trained(plain), strict=True))


class Named(Block):
    def forward(self, *, hidden: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return super().forward(hidden, scale=scale)


def test_what_a_module_is_given_by_name_is_kept_and_looked_at_as_what_comes_by_position() -> None:
    """`checkpoint` keeps the random numbers of the devices of what it is given by position alone."""
    model, kept = of(Named(), Named()), list[Tensor]()
    checkpoint_activations(model)
    hidden = torch.randn(2, 8, requires_grad=True)
    with (
        mock.patch.object(activation_checkpointing, "checkpoint", side_effect=checkpoint) as called,
        saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one),  # type: ignore[func-returns-value]
    ):
        total = model[0](hidden=hidden, scale=0.5).sum()
    total.backward()
    assert [one for one in called.call_args.args if one is hidden]
    assert [one for one in kept if one is hidden]
