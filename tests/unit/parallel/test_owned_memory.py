"""The memory of gradients that are summed to their owners: units that travel one after the other share it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetseq.balance.memory_plan import ModelMemory
from hetseq.comm.group import LocalGroup
from hetseq.comm.slices import TaggedSlices, Transfer
from hetseq.parallel.activation_checkpointing import checkpoint_activations
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.owned_parameters import OwnedParameters
from hetseq.parallel.owned_units import Division

ELEMENTS = (40, 100, 97, 90, 99, 81, 95, 100, 88)  # of the parameters, each of them a unit


class Over:
    """A transfer that was over at once."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Counting(TaggedSlices):
    """Counts the memory that it makes."""

    made_elements: int

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        had = len(self._free)
        tensor = super().memory(elements, dtype, device)
        self.made_elements += elements if len(self._free) == had else 0
        return tensor

    def sum_to_owners(
        self, flat: torch.Tensor | None, total: torch.Tensor, *, bounds: Sequence[int], givers: Sequence[int]
    ) -> Transfer:
        assert flat is not None
        total.copy_(flat[: total.numel()])
        return Over()


class OneRank(LocalGroup):
    """A world of one with an exchange of this kind."""

    def __init__(self, kind: type[Counting]) -> None:
        super().__init__()
        self._kind = kind

    def slices(self, device: torch.device) -> Counting:
        exchange = self._kind(None, rank=0, world_size=1, deadline_s=lambda: 1.0)
        exchange.made_elements = 0
        return exchange


@pytest.mark.parametrize(("micro_batches", "most"), [(1, 2 * 100 + 2 * 40), (3, sum(ELEMENTS) * 5 // 4)])
def test_gradients_take_the_room_of_the_units_that_travel(micro_batches: int, most: int) -> None:
    parameters = [torch.nn.Parameter(torch.ones(elements)) for elements in ELEMENTS]
    reducer = OwnedGradients(parameters, OneRank(Counting), Division((1.0,)), bucket_bytes=400)
    exchange = reducer.exchange
    assert isinstance(exchange, Counting)
    exchange.made_elements = 0  # of the parameters
    for _ in range(3):
        reducer.gather([1])
        reducer.begin()
        for number in range(micro_batches):
            if number + 1 == micro_batches:
                reducer.expect_last()
            loss = torch.zeros(())
            for parameter in parameters:
                loss = loss.sin() + parameter.sum()  # a chain: backward goes from the last one to the first one
            reducer.backward(loss)
        reducer.finish()
        assert all(one.owned.grad is not None and one.owned.grad.isfinite().all() for one in reducer.fragments)
        reducer.changed()
    reducer.close()
    assert exchange.made_elements <= most


class Slow(Counting):
    """Sums that are over when they are waited for, and not before; `most` of them at once."""

    under_way, most = 0, 0

    def sum_to_owners(
        self, flat: torch.Tensor | None, total: torch.Tensor, *, bounds: Sequence[int], givers: Sequence[int]
    ) -> Transfer:
        exchange = self
        exchange.under_way += 1
        exchange.most = max(exchange.most, exchange.under_way)

        class UnderWay(Over):
            def is_over(self) -> bool:
                return False

            def wait(self) -> None:
                exchange.under_way -= 1

        super().sum_to_owners(flat, total, bounds=bounds, givers=givers)
        return UnderWay()


@pytest.mark.parametrize("computes", [True, False])
def test_two_units_travel_at_a_time_and_waits_of_backward_are_pauses(computes: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(elements)) for elements in ELEMENTS]
    reducer = OwnedGradients(parameters, OneRank(Slow), Division((1.0,)), bucket_bytes=400)
    exchange, pauses = reducer.exchange, list[None]()
    assert isinstance(exchange, Slow)
    reducer.gather([1])
    reducer.begin()
    if computes:
        reducer.expect_last()
        reducer.backward(sum(one.sum() for one in parameters), lambda: nullcontext(pauses.append(None)))
        assert len(pauses) == len(ELEMENTS) - 2
        assert exchange.under_way == 2
    reducer.finish()
    assert (exchange.most, exchange.under_way) == (2, 0)
    assert len(pauses) == (len(ELEMENTS) - 2 if computes else 0), "the wait at the end is counted by the step"
    reducer.close()


class Copies(TorchDispatchMode):
    """Remembers the copies of 16 bits that are made of tensors of this shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape, self._made = shape, list[weakref.ref[Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (result.dtype, result.shape) == (torch.bfloat16, self._shape):
            self._made.append(weakref.ref(result.untyped_storage()))
        return result

    def counts(self) -> tuple[int, int]:
        """How many were made, and how many are there now."""
        return len(self._made), sum(one() is not None for one in self._made)


def test_a_layer_that_goes_takes_its_copies_of_16_bits_along() -> None:
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)) for _ in range(5)])
    layers = dict(model.named_children())
    checkpoint_activations(model)
    seen: list[tuple[int, int]] = []
    with Copies((8, 8)) as copies:
        reducer = OwnedParameters(
            model, layers, list(model.parameters()), LocalGroup(), Division((1.0,)), begins=True
        )  # fmt: skip
        for layer in layers.values():
            layer.register_forward_hook(lambda *_: seen.append(copies.counts()))
        reducer.begin()
        with reducer.round():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(2, 8, requires_grad=True)).sum()
            forward = list(seen)
            reducer.backward(loss)
        reducer.finish()
    reducer.close()
    assert forward == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]
    assert copies.counts() == (10, 0)  # backward runs each layer again
    assert all(one.owned.grad is not None and one.owned.grad.any() for one in reducer.fragments)


class Late(Over):
    """A transfer that is over once a rank has waited for it."""

    def is_over(self) -> bool:
        return False


class CountingLate(Counting):
    """Its sums arrive as late as they can."""

    def sum_to_owners(
        self, flat: torch.Tensor | None, total: torch.Tensor, *, bounds: Sequence[int], givers: Sequence[int]
    ) -> Transfer:
        super().sum_to_owners(flat, total, bounds=bounds, givers=givers)
        return Late()


class WithRoot(torch.nn.Module):
    """Five layers, and a head that is in none of them and as large as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(5))
        self.head = torch.nn.Linear(8, 8, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        head: torch.Tensor = self.head(rows)
        return head


@pytest.mark.parametrize(("kind", "gradients"), [(Counting, 3), (CountingLate, 4)])
def test_layers_that_come_and_go_take_the_room_that_the_planner_counts(kind: type[Counting], gradients: int) -> None:
    model, unit = WithRoot(), 64
    layers = {f"layers.{number}": layer for number, layer in enumerate(model.layers)}
    parameters = list(model.parameters())
    reducer = OwnedParameters(model, layers, parameters, OneRank(kind), Division((1.0,)), begins=True)
    exchange, whole = reducer.exchange, list[int]()
    assert isinstance(exchange, Counting)
    exchange.made_elements = sum(one.numel() for one in exchange._free)  # without what this rank owns

    def look(*_: Any) -> None:
        whole.append(sum(one.untyped_storage().size() // one.element_size() for one in parameters))

    for layer in layers.values():
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    for _ in range(2):
        reducer.begin()
        with reducer.round():
            reducer.backward(model(torch.ones(2, 8, requires_grad=True)).sum())
        reducer.finish()
    reducer.close()
    assert (max(whole), exchange.made_elements) == (3 * unit, gradients * unit)
    planned = ModelMemory(6 * unit, layers=5).whole_bytes
    assert planned == 4 * (3 + 4) * unit  # what sums that arrive late need
