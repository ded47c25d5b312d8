"""Parameters that come and go, in one process: where they are between two rounds, and what their names are then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hetseq.comm.group import LocalGroup
from hetseq.parallel.owned_parameters import OwnedParameters
from hetseq.parallel.owned_units import Division
from hetseq.parallel.replica import model_tensors

LAYERS = 3


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))


@pytest.fixture
def reducer(model: nn.Sequential) -> Iterator[OwnedParameters]:
    layers = dict(model.named_children())
    owned = OwnedParameters(model, layers, list(model.parameters()), LocalGroup(), Division((1.0,)), begins=True)
    yield owned
    owned.close()


def here(model: nn.Module) -> list[str]:
    """The layers whose parameters have memory."""
    return [name for name, layer in model.named_children() if layer.weight.untyped_storage().size()]


def test_a_forward_holds_a_layer_and_the_next_one_and_a_backward_the_one_before(
    model: nn.Sequential, reducer: OwnedParameters
) -> None:
    seen: dict[str, list[str]] = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda *_, name=name: seen.update({f"forward {name}": here(model)}))
        layer.register_full_backward_hook(lambda *_, name=name: seen.update({f"backward {name}": here(model)}))
    reducer.begin()
    with reducer.round():
        reducer.backward(model(torch.ones(2, 4, requires_grad=True)).sum())
    assert here(model) == []
    assert seen["forward 0"] == ["1"]  # the hooks of the reducer come first, and have let it go
    assert seen["forward 1"] == ["2"]
    assert seen["backward 2"] == ["1", "2"]
    assert seen["backward 1"] == ["0", "1"]
    assert seen["backward 0"] == ["0"]


def test_parameters_without_memory_keep_their_names(model: nn.Sequential, reducer: OwnedParameters) -> None:
    """All of them have the same address then."""
    names = [f"model.{number}.{kind}" for number in range(LAYERS) for kind in ("weight", "bias")]
    assert list(model_tensors(model)) == names


def test_each_layer_adds_up_over_the_rounds_of_a_step(model: nn.Sequential, reducer: OwnedParameters) -> None:
    torch.manual_seed(1)
    alike = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
    samples = torch.randn(6, 4)
    reducer.begin()
    for part in samples.split(2):
        with reducer.round():
            reducer.backward(model(part).square().sum())
    reducer.finish()
    for part in samples.split(2):
        alike(part).square().sum().backward()
    found = {id(one.parameter): one.owned.grad for one in reducer.fragments}
    for mine, right in zip(model.parameters(), alike.parameters(), strict=True):
        gradient = found[id(mine)]
        assert gradient is not None
        torch.testing.assert_close(gradient.view_as(right), right.grad, rtol=1e-6, atol=1e-6)
