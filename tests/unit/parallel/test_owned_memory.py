"""What travels beside the computation: gradients in turn, through the same memory, and parameters of later layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch

from hetseq.comm.group import LocalGroup
from hetseq.comm.slices import TaggedSlices, Transfer
from hetseq.parallel.owned_gradients import OwnedGradients

ELEMENTS = (40, 100, 97, 90, 99, 81, 95, 100, 88)  # of the parameters, each of them a unit


class Over:
    """A transfer that was over at once."""

    def is_over(self) -> bool:
        return True

    def wait_for_arrival(self) -> None:
        pass

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
    """A world of one with that exchange."""

    def slices(self, device: torch.device) -> Counting:
        exchange = Counting(None, rank=0, world_size=1, deadline_s=lambda: 1.0)
        exchange.made_elements = 0
        return exchange


@pytest.mark.parametrize(("micro_batches", "most"), [(1, 2 * 100 + 2 * 40), (3, sum(ELEMENTS) * 5 // 4)])
def test_gradients_take_the_room_of_the_units_that_travel(micro_batches: int, most: int) -> None:
    parameters = [torch.nn.Parameter(torch.ones(elements)) for elements in ELEMENTS]
    reducer = OwnedGradients(parameters, OneRank(), fractions=[1.0], bucket_bytes=400)
    exchange = reducer.exchange
    assert isinstance(exchange, Counting)
    exchange.made_elements = 0  # of the parameters
    for _ in range(3):
        reducer.begin_gather([1])
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


class Arriving(Counting):
    """Parameters arrive when they are waited for; `told` is the order of events."""

    told: list[str]

    def gather(self, flat: torch.Tensor, *, bounds: Sequence[int], takers: Sequence[int]) -> Transfer:
        told = self.told

        class Arrival(Over):
            def wait_for_arrival(self) -> None:
                told.append(f"waited for {flat.numel()}")

        return Arrival()


class Layers(OneRank):
    def slices(self, device: torch.device) -> Arriving:
        exchange = Arriving(None, rank=0, world_size=1, deadline_s=lambda: 1.0)
        exchange.told, exchange.made_elements = [], 0
        return exchange


def test_a_layer_computes_before_later_ones_have_arrived() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1, size, bias=False) for size in (1, 2, 3)), torch.nn.Linear(4, 1))
    reducer = OwnedGradients(list(model.parameters()), Layers(), fractions=[1.0], bucket_bytes=4)
    exchange = reducer.exchange
    assert isinstance(exchange, Arriving)
    pauses: list[None] = []

    def forward() -> list[str]:
        exchange.told.clear()
        reducer.begin_gather([1])
        with reducer.arriving(model, lambda: nullcontext(pauses.append(None))):
            for number, layer in enumerate(model[:3]):
                layer(torch.ones(1, 1))
                exchange.told.append(f"computed {number}")
        reducer.begin()
        reducer.finish()
        reducer.changed()
        return exchange.told.copy()

    waits = [f"waited for {elements}" for elements in (1, 2, 3, 4, 1)]
    assert forward() == [*waits, *(f"computed {number}" for number in range(3))], "compiled code may be met"
    del pauses[:]
    turns = [event for number in range(3) for event in (waits[number], f"computed {number}")]
    assert forward() == [*turns, *waits[3:]], "what this forward has not used arrives before backward"
    assert len(pauses) == 4
    reducer.close()
