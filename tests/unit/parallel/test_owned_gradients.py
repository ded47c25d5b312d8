"""Gradients with owners, in one process: what an owner gets, and what is left of a step afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hetseq.comm.group import LocalGroup
from hetseq.errors import HetSeqError
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.owned_units import Division

SHAPES = [(3, 2), (4,), (), (0, 3), (5, 1), (7,)]


def make_parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def loss_of(parameters: list[nn.Parameter], scale: float = 1.0) -> torch.Tensor:
    """A loss whose gradient is 2 * scale * p for each of the parameters."""
    return torch.stack([(p.double() ** 2).sum() for p in parameters]).sum() * scale


@contextmanager
def owning(
    parameters: list[nn.Parameter], *, bucket_bytes: int = 40, dtype: torch.dtype | None = None
) -> Iterator[OwnedGradients]:
    reducer = OwnedGradients(parameters, LocalGroup(), Division((1.0,)), bucket_bytes=bucket_bytes, dtype=dtype)
    try:
        yield reducer
    finally:
        reducer.close()


def step(reducer: OwnedGradients, *micro_batches: Callable[[], torch.Tensor]) -> None:
    reducer.gather((1,))
    reducer.begin()
    for number, loss in enumerate(micro_batches):
        if number == len(micro_batches) - 1:
            reducer.expect_last()
        reducer.backward(loss())
    reducer.finish()


def gradients(reducer: OwnedGradients) -> list[list[float] | None]:
    """Of the parameters in their order."""
    found = {id(one.parameter): one.owned.grad for one in reducer.fragments}
    values = [found.get(id(parameter)) for parameter in reducer.parameters]
    return [None if value is None else value.flatten().tolist() for value in values]


def twice(parameters: list[nn.Parameter], scale: float = 1.0) -> list[list[float] | None]:
    return [(2 * scale * p.detach()).flatten().tolist() if p.numel() else None for p in parameters]


def test_parameters_keep_their_values_and_share_memory_with_what_is_owned() -> None:
    before, parameters = make_parameters(), make_parameters()
    with owning(parameters) as reducer:
        assert all(torch.equal(mine, right) for mine, right in zip(parameters, before))
        assert all(mine.stride() == right.stride() for mine, right in zip(parameters, before))
        assert sum(one.end - one.begin for one in reducer.fragments) == sum(p.numel() for p in before)
        with torch.no_grad():
            for one in reducer.fragments:
                one.owned.add_(1)
        assert all(torch.equal(mine, right + 1) for mine, right in zip(parameters, before))


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_micro_batches_add_up_and_a_step_forgets_the_one_before_it(bucket_bytes: int) -> None:
    parameters = make_parameters()
    with owning(parameters, bucket_bytes=bucket_bytes) as reducer:
        step(reducer, lambda: loss_of(parameters), lambda: loss_of(parameters, 4.0))
        assert gradients(reducer) == twice(parameters, 5.0)
        assert all(parameter.grad is None for parameter in parameters), "of the model nothing is left"
        assert reducer.norm() == pytest.approx(10 * torch.cat([p.detach().flatten() for p in parameters]).norm().item())
        step(reducer, lambda: loss_of(parameters))
        assert gradients(reducer) == twice(parameters)
        reducer.scale_(0.5)
        assert gradients(reducer) == twice(parameters, 0.5)


def test_a_parameter_in_another_memory_order_and_a_transposed_one() -> None:
    image = torch.randn(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    parameters = [nn.Parameter(image), nn.Parameter(torch.randn(5, 3, dtype=torch.float64).t())]
    with owning(parameters) as reducer:
        step(reducer, lambda: loss_of(parameters))
        for one in reducer.fragments:
            assert one.owned.shape == one.parameter.shape
            assert one.owned.stride() == one.parameter.stride()
            assert one.owned.grad is not None
            assert torch.equal(one.owned.grad, 2 * one.parameter.detach())
            assert one.owned.grad.stride() == one.parameter.stride()


def test_units_are_of_one_type_each_and_sums_may_be_wider() -> None:
    parameters = [nn.Parameter(torch.full((3,), 0.1, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2]
    with owning(parameters, bucket_bytes=1 << 20, dtype=torch.float64) as reducer:
        assert [{parameters[index].dtype for index in unit} for unit in reducer.unit_members] == [
            {torch.float64}, {torch.float32}, {torch.float64}, {torch.float32}
        ]  # fmt: skip
        # 2 ** 24 + 1 + 1 is no sum of fp32, taken one after the other
        losses = [lambda scale=scale: torch.stack([p.double().sum() for p in parameters]).sum() * scale
                  for scale in (2.0**24, 1.0, 1.0)]  # fmt: skip
        step(reducer, *losses)
        assert gradients(reducer) == [[2.0**24 + 2] * 3] * 4
        assert [one.owned.grad.dtype for one in reducer.fragments if one.owned.grad is not None] == [
            one.owned.dtype for one in reducer.fragments
        ]
    alike = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    with owning(alike, bucket_bytes=1 << 20) as reducer:
        assert len(reducer.unit_members) == 1, "the twin"
        step(reducer, *(lambda scale=scale: torch.stack(
            [p.double().sum() for p in alike]).sum() * scale for scale in (2.0**24, 1.0, 1.0)))  # fmt: skip
        assert gradients(reducer) == [[2.0**24] * 3] * 4


def test_a_parameter_without_gradient_on_any_rank_has_none() -> None:
    parameters = make_parameters()
    with owning(parameters) as reducer:
        step(reducer, lambda: loss_of(parameters[1:]))
        assert reducer.used.tolist() == [False, *[True] * 5]
        assert gradients(reducer)[0] == [0.0] * 6, "which an optimizer would decay"
        reducer.drop_unused_(reducer.used)
        assert gradients(reducer) == [None, *twice(parameters)[1:]]


def test_begin_forgets_what_a_broken_step_has_left() -> None:
    parameters = make_parameters()
    with owning(parameters, bucket_bytes=1) as reducer:
        reducer.gather((1,))
        reducer.begin()
        reducer.expect_last()
        loss_of(parameters, math.inf).backward()
        assert reducer.has_sent
        reducer.finish()
        assert not reducer.is_finite()
        step(reducer, lambda: loss_of(parameters))
        assert reducer.is_finite()
        assert gradients(reducer) == twice(parameters)


def test_a_share_that_is_computed_again_without_sending_tells_of_itself_alone() -> None:
    parameters = make_parameters()
    with owning(parameters, bucket_bytes=1) as reducer:
        for scale, is_finite in ((math.nan, False), (1.0, True)):
            with reducer.without_sending():
                step(reducer, lambda scale=scale: loss_of(parameters, scale))  # type: ignore[misc]
                assert not reducer.has_sent
                assert reducer.is_finite() == is_finite
        step(reducer, lambda: loss_of(parameters))
        assert gradients(reducer) == twice(parameters)


def test_a_second_backward_after_the_last_micro_batch_is_refused() -> None:
    parameters = make_parameters()
    with owning(parameters, bucket_bytes=1) as reducer:
        step(reducer, lambda: loss_of(parameters))
        with pytest.raises(HetSeqError, match="a gradient arrived after its bucket was sent"):
            loss_of(parameters).backward()


def test_what_a_forward_does_to_grad_loses_nothing() -> None:
    parameters = make_parameters()

    def careless() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        return loss_of(parameters)

    with owning(parameters) as reducer:
        step(reducer, lambda: loss_of(parameters), careless)
        assert gradients(reducer) == twice(parameters, 2.0)


def test_sparse_gradients_add_up() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    with owning([table.weight]) as reducer:
        for _ in range(2):  # the second step begins anew
            step(reducer, *(lambda rows=rows: table(torch.tensor(rows)).sum() for rows in ([0, 0, 3], [3])))
            assert gradients(reducer) == [[2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0]]
