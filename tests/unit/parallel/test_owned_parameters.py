"""Parameters that come and go, in one process: where they are between two rounds, and what their names are then."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetseq.comm.group import LocalGroup
from hetseq.errors import TaskError
from hetseq.parallel.owned_parameters import OwnedParameters
from hetseq.parallel.owned_units import Division, Unit
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


def begun(model: nn.Module, layers: Mapping[str, nn.Module]) -> OwnedParameters:
    reducer = OwnedParameters(model, layers, list(model.parameters()), LocalGroup(), Division((1.0,)), begins=True)
    reducer.begin()
    return reducer


def test_layers_that_a_forward_leaves_out_are_not_there_all_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    reducer, counts = begun(model, dict(model.named_children())), list[int]()
    take_memory = Unit.take_memory

    def counted(unit: Unit) -> None:
        take_memory(unit)
        counts.append(len(here(model)))

    with mock.patch.object(Unit, "take_memory", counted):
        for used in ((0, 8), (0, 1), (7, 8), (8,)):
            with reducer.round():
                hidden = torch.ones(2, 4, requires_grad=True)
                for number in used:
                    hidden = model[number](hidden)
                reducer.backward(hidden.sum())
    reducer.close()
    assert len(counts) == 4 * (9 + 8), "each comes for forward, and all but the last one for backward"
    assert max(counts) == 2


def test_what_forward_kept_is_gone_when_memory_ran_out_in_it(model: nn.Sequential, reducer: OwnedParameters) -> None:
    kept: list[weakref.ref[torch.UntypedStorage]] = []

    def fail() -> None:
        with reducer.round():
            hidden = model[1](model[0](torch.ones(2, 4)).exp())
            kept.append(weakref.ref(hidden.untyped_storage()))
            hidden = model[2](hidden)
            raise torch.OutOfMemoryError

    reducer.begin()
    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert [one() for one in kept] == [None]


def test_a_layer_without_parameters_may_run_again_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reducer = begun(model, dict(model.named_children()))
    with reducer.round():
        hidden: Any = checkpoint(model[1], model[0](torch.ones(2, 4)), use_reentrant=False)
        reducer.backward(model[2](hidden).sum())
    reducer.close()


def test_what_is_not_here_is_no_number_but_an_error(model: nn.Sequential, reducer: OwnedParameters) -> None:
    weight = model[1].weight
    assert (weight.shape, weight.numel(), weight.device.type, weight.requires_grad) == ((4, 4), 16, "cpu", True)
    for read in (torch.sum, torch.clone, lambda one: one.data, lambda one: torch.stack([one, one]), copy.deepcopy):
        with pytest.raises(
            TaskError, match=r"^--shard-model all: 1\.weight is used outside of the forward of its layer"
        ):
            read(weight)
    reducer.begin()
    for _ in range(2):
        with pytest.raises(TaskError, match=r"0\.weight is used outside"), reducer.round():
            model[1](model[0](torch.ones(2, 4))) + model[0].weight
    reducer.close()
    assert {type(one) for one in model.parameters()} == {nn.Parameter}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_gives_the_same_bits_in_evaluation() -> None:
    """It has another path for evaluation, unless something watches its parameters: its padded positions are zeros."""
    torch.manual_seed(1)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    model = copy.deepcopy(plain)
    rows, is_padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    reducer = begun(model, {f"layers.{number}": layer for number, layer in enumerate(model.layers)})
    with torch.no_grad(), reducer.without_gradients():
        right = plain(rows, src_key_padding_mask=is_padding)
        for _ in range(2):
            with reducer.round():
                assert torch.equal(model(rows, src_key_padding_mask=is_padding), right)
    reducer.close()
    assert not right[2, 2:].any()
