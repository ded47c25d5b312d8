"""The first use of a parameter that is on its way waits for it, whoever uses it and however."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hetseq.parallel.first_use import FirstUse, are_uses_hidden


class Product(torch.autograd.Function):
    """Uses a parameter only inside its own forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)


@contextmanager
def following(model: Model) -> Iterator[list[str]]:
    """The names of parameters in the order in which they were waited for, "all" for everything left."""
    late = {id(parameter): name for name, parameter in model.named_parameters()}
    waited: list[str] = []

    def wait(one: int | None) -> None:
        if one is None:
            waited.append("all")
            late.clear()
        else:
            waited.append(late.pop(one))

    with FirstUse(late, wait):
        yield waited


X = torch.ones(2, 4)
ROW = {"first.weight", "first.bias"}


def through_transform(model: Model) -> None:
    weight = model.first.weight

    def loss(given: torch.Tensor) -> torch.Tensor:
        return (X @ given.t()).sum()

    torch.func.grad(loss)(weight)


USES: dict[str, tuple[Callable[[Model], object], set[str]]] = {
    "a module that is called": (lambda model: model.first(X), ROW),
    "a parameter of a module that is not called": (
        lambda model: functional.linear(X, model.first.weight), {"first.weight"}
    ),
    "a function of autograd": (lambda model: Product.apply(X, model.first.weight), {"first.weight"}),
    "a view": (lambda model: model.first.weight.t(), {"first.weight"}),
    "its values": (lambda model: model.first.weight.data_ptr(), {"first.weight"}),
    "without its graph": (lambda model: model.first.weight.data.sum(), {"first.weight"}),
    "in a list of a list": (
        lambda model: torch.cat([model.first.weight, torch.stack([model.first.bias])]), ROW
    ),
    "weights in one list": (
        lambda model: model.lstm(X[None]), {f"lstm.{kind}_{of}h_l0" for kind in ("weight", "bias") for of in "ih"}
    ),
    "a transform": (through_transform, {"all"}),
    "facts that are no values": (
        lambda model: [(p.shape, p.dtype, p.device, p.dim(), p.numel(), p.requires_grad) for p in model.parameters()],
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("use", list(USES))
def test_the_first_use_waits_and_nothing_else(use: str) -> None:
    model, (act, names) = Model(), USES[use]
    with following(model) as waited:
        act(model)
    assert set(waited) == names
    assert len(waited) == len(names), "each once"


def test_a_module_waits_before_its_forward_which_torch_may_not_see() -> None:
    model = Model()
    with following(model) as waited:
        model.first.forward = lambda x: list(waited)  # type: ignore[method-assign, assignment]
        assert set(model.first(X)) == ROW


def test_a_subclass_of_tensors_waits_for_everything() -> None:
    class Other(torch.Tensor):
        pass

    model = Model()
    with following(model) as waited:
        X.as_subclass(Other)
        assert not waited
        X.as_subclass(Other) + 1
    assert waited == ["all"]


def test_after_the_context_nothing_waits() -> None:
    model = Model()
    with following(model) as waited:
        pass
    model.first(X)
    assert not waited


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_compiled_code_hides_uses() -> None:
    model = Model()
    assert not are_uses_hidden(model)
    assert are_uses_hidden(nn.Sequential(model, torch.jit.script(nn.Linear(2, 2))))
    model.second.compile(backend="eager")
    assert are_uses_hidden(model)


def test_a_function_that_was_compiled_hides_uses_of_any_model() -> None:
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    counters["stats"]["unique_graphs"] = 0
    try:
        assert not are_uses_hidden(Model())
        torch.compile(lambda x: x + 1, backend="eager")(X)
        assert are_uses_hidden(Model())
    finally:
        counters["stats"]["unique_graphs"] = graphs
