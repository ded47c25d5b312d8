"""The gradients of one rank: what backward writes ends in the buckets, once, whatever a user does to `.grad`.

A rank alone has no buckets, and the same gradient.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.comm.group import LocalGroup, Pending
from hetseq.errors import HetSeqError
from hetseq.parallel.gradient_sync import GradientReducer, Gradients, WideReducer, gradients_of

SHAPES = [(3, 2), (4,), (), (5, 1), (7,)]


class Recorder(LocalGroup):
    """A group of one that keeps what left, in order; it may say that it is one of several."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.sent: list[torch.Tensor] = []

    def all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        self.sent.append(tensor)
        return super().all_reduce_sum(tensor)


def make_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def loss_of(parameters: list[torch.nn.Parameter], scale: float = 1.0) -> torch.Tensor:
    """A loss whose gradient is 2 * scale * p for each of the parameters."""
    return torch.stack([(p * p).sum() for p in parameters]).sum() * scale


@contextmanager
def reducing(
    parameters: list[torch.nn.Parameter], *, bucket_bytes: int = 1 << 20, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[GradientReducer, Recorder]]:
    group = Recorder(rank, world_size)
    reducer = GradientReducer(parameters, group, bucket_bytes=bucket_bytes)
    try:
        yield reducer, group
    finally:
        reducer.close()


def step(reducer: Gradients, *micro_batches: Callable[[], torch.Tensor]) -> None:
    reducer.begin()
    for number, loss in enumerate(micro_batches):
        if number == len(micro_batches) - 1:
            reducer.expect_last()
        reducer.backward(loss())
    reducer.finish()


@pytest.mark.parametrize(("bucket_bytes", "sizes"), [(1, [7, 5, 1, 4, 6]), (24, [7, 6, 4, 6]), (1 << 20, [23])])
def test_buckets_follow_the_parameters_in_reverse(bucket_bytes: int, sizes: list[int]) -> None:
    parameters = make_parameters()
    with reducing(parameters, bucket_bytes=bucket_bytes) as (reducer, group):
        step(reducer, lambda: loss_of(parameters))
        assert [sent.numel() for sent in group.sent] == sizes
        backwards = torch.cat([2 * p.detach().flatten() for p in reversed(parameters)])
        forwards = torch.cat([2 * p.detach().flatten() for p in parameters])
        assert torch.equal(torch.cat([sent.flatten() for sent in group.sent]), backwards)
        assert not torch.equal(torch.cat([sent.flatten() for sent in group.sent]), forwards)


def test_the_first_bucket_is_small_so_that_it_leaves_early_and_a_large_parameter_has_its_own() -> None:
    mebi = 1 << 18  # float32 numbers in a MiB
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (9 * mebi, mebi // 2, 2 * mebi, mebi // 4)]
    for bucket_bytes, sizes in (
        (4 << 20, [mebi // 4, 5 * mebi // 2, 9 * mebi]),
        (1 << 19, [mebi // 4, 2 * mebi, mebi // 2, 9 * mebi]),
    ):
        with reducing(parameters, bucket_bytes=bucket_bytes) as (reducer, group):
            step(reducer)
            assert [sent.numel() for sent in group.sent] == sizes


def test_buckets_leave_during_backward_and_in_order() -> None:
    parameters, seen = make_parameters(), []
    with reducing(parameters, bucket_bytes=1) as (reducer, group):
        # in backward's order: the last parameter's gradient is the first to come
        for parameter in reversed(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(group.sent)))
        chain = torch.zeros(())
        for parameter in parameters:
            chain = (chain + parameter.sum()) * 1.5
        step(reducer, lambda: chain)
        assert seen == [1, 2, 3, 4, 5]
        seen.clear()
        step(reducer, lambda: loss_of(parameters), lambda: loss_of(parameters))
        assert seen[:5] == [5, 5, 5, 5, 5]  # the twin: nothing leaves before the last micro-batch
        assert seen[-1] == len(group.sent) == 10  # and there nothing waits for the end


def test_gradients_stay_views_into_the_buckets() -> None:
    parameters = make_parameters()
    with reducing(parameters) as (reducer, group):
        for _ in range(3):
            step(reducer, lambda: loss_of(parameters))
            (sent,) = group.sent
            group.sent.clear()
            memory = sent.untyped_storage().data_ptr()
            assert [p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None] == [memory] * 5
            sent.fill_(3.0)
            assert all((p.grad == 3).all() for p in parameters)


def test_two_micro_batches_add_up() -> None:
    parameters = make_parameters()
    with reducing(parameters) as (reducer, _):
        step(reducer, lambda: loss_of(parameters), lambda: loss_of(parameters, 4.0))
        assert gradients(parameters) == [(10 * p).flatten().tolist() for p in parameters]
        step(reducer, lambda: loss_of(parameters, 4.0))  # the twin: a step forgets the one before it
        assert gradients(parameters) == [(8 * p).flatten().tolist() for p in parameters]


def gradients(parameters: list[torch.nn.Parameter]) -> list[Any]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in parameters]


def test_begin_empties_what_a_broken_step_has_left() -> None:
    parameters = make_parameters()
    with reducing(parameters, bucket_bytes=1) as (reducer, group):
        reducer.begin()
        reducer.expect_last()
        loss_of(parameters, math.inf).backward()
        assert reducer.used.all()
        reducer.begin()
        assert not reducer.used.any()
        assert gradients(parameters) == [None] * 5
        group.sent.clear()
        step(reducer, lambda: loss_of(parameters[1:]))
        assert gradients(parameters) == [[0.0] * 6, *((2 * p).flatten().tolist() for p in parameters[1:])]
        assert len(group.sent) == 5
        assert reducer.is_finite()


def test_a_parameter_without_gradient_anywhere_loses_it_until_the_next_step() -> None:
    parameters = make_parameters()
    with reducing(parameters) as (reducer, _):
        step(reducer, lambda: loss_of([*parameters[:2], *parameters[3:]]))
        assert reducer.used.tolist() == [True, True, False, True, True]
        assert gradients(parameters)[2] == [0.0]  # the twin: zeros, which an optimizer would decay
        reducer.drop_unused_(reducer.used)
        assert [gradient is None for gradient in gradients(parameters)] == [False, False, True, False, False]
        step(reducer, lambda: loss_of(parameters))
        assert reducer.used.all()
        assert gradients(parameters) == [(2 * p).flatten().tolist() for p in parameters]


def test_a_rank_without_samples_sends_zeros() -> None:
    parameters = make_parameters()
    with reducing(parameters, bucket_bytes=1) as (reducer, group):
        step(reducer, lambda: loss_of(parameters))
        busy = [sent.numel() for sent in group.sent]
        group.sent.clear()
        step(reducer)
        assert [sent.numel() for sent in group.sent] == busy
        assert not any(sent.any() for sent in group.sent)
        assert not reducer.used.any()


@pytest.mark.parametrize("deed", ["none", "fresh", "alias"])
def test_what_a_forward_does_to_grad_loses_nothing(deed: str) -> None:
    parameters = make_parameters()

    def careless() -> torch.Tensor:
        for parameter in parameters:
            if deed == "none":
                parameter.grad = None
            elif deed == "fresh":
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.view_as(parameter)
        return loss_of(parameters)

    with reducing(parameters) as (reducer, group):
        step(reducer, lambda: loss_of(parameters), careless)
        assert gradients(parameters) == [(4 * p).flatten().tolist() for p in parameters]
        assert group.sent[0].norm() > 0


def test_dtypes_do_not_share_a_bucket() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2]
    with reducing(parameters) as (reducer, group):
        step(reducer, lambda: torch.stack([(p * p).sum().double() for p in parameters]).sum())
        assert [sent.dtype for sent in group.sent] == [torch.float64, torch.float32] * 2
        assert reducer.norm() == pytest.approx(math.sqrt(48), rel=1e-7)  # half of it in float32
        alike = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
        with reducing(alike) as (other, others):
            step(other, lambda: loss_of(alike))
            assert len(others.sent) == 1  # the twin


def test_norm_and_scale_are_of_the_whole_gradient() -> None:
    parameters = make_parameters(torch.float64)
    with reducing(parameters, bucket_bytes=40) as (reducer, group):
        step(reducer, lambda: loss_of(parameters))
        right = torch.cat([2 * p.detach().flatten() for p in parameters]).norm().item()
        assert reducer.norm() == pytest.approx(right, rel=1e-15)
        assert group.sent[0].norm().item() < right  # the twin: of one bucket
        reducer.scale_(0.5)
        assert gradients(parameters) == [p.flatten().tolist() for p in parameters]
        assert reducer.norm() == pytest.approx(right / 2, rel=1e-15)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_each_parameter_is_in_the_norm_of_one_rank(world_size: int) -> None:
    parameters = make_parameters(torch.float64)
    squares = []
    for rank in range(world_size):
        with reducing(parameters, rank=rank, world_size=world_size) as (reducer, _):
            step(reducer, lambda: loss_of(parameters))
            squares.append(reducer.norm() ** 2)
    whole = float(torch.cat([2 * p.detach().flatten() for p in parameters]).square().sum())
    assert sum(squares) == pytest.approx(whole, rel=1e-14)
    assert max(squares) < whole  # the twin


def test_ranks_have_about_as_many_elements_in_their_norms() -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (1000, 10, 10, 400, 400, 200)]
    sizes = []
    for rank in range(2):
        with reducing(parameters, rank=rank, world_size=2) as (reducer, _):
            sizes.append([parameter.numel() for parameter in reducer._own])
    assert sizes == [[1000, 10], [10, 400, 400, 200]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_seen(value: float) -> None:
    parameters = make_parameters()
    with reducing(parameters, bucket_bytes=1) as (reducer, group):
        step(reducer, lambda: loss_of(parameters))
        assert reducer.is_finite()
        assert math.isfinite(reducer.norm())
        group.sent[2].fill_(value)
        assert not reducer.is_finite()
        assert not math.isfinite(reducer.norm())


def test_a_large_but_finite_gradient_has_a_finite_norm() -> None:
    # squares of 1e30 overflow a float32; an infinite norm would clip the gradient to zero
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    with reducing([parameter]) as (reducer, group):
        step(reducer, lambda: (parameter * parameter).sum())
        group.sent[0].mul_(0.5e30)
        assert reducer.is_finite()
        assert reducer.norm() == pytest.approx(5e30, rel=1e-6)
        assert not torch.linalg.vector_norm(group.sent[0]).isfinite()  # the twin


def test_norm_so_far_is_of_the_gradients_that_have_come() -> None:
    parameters = make_parameters()
    with reducing(parameters) as (reducer, _):
        step(reducer, lambda: loss_of(parameters))  # leaves numbers in every bucket
        reducer.finish()
        reducer.begin()
        assert reducer.norm_so_far() == 0.0
        loss_of(parameters[:2]).backward()
        expected = math.hypot(*(p.grad.norm().item() for p in parameters[:2] if p.grad is not None))
        assert reducer.norm_so_far() == pytest.approx(expected)


def test_a_second_backward_after_the_buckets_have_left_is_refused() -> None:
    parameters = make_parameters()
    with reducing(parameters) as (reducer, _):
        reducer.begin()
        reducer.expect_last()
        loss_of(parameters).backward()
        with pytest.raises(HetSeqError, match="backward ran twice in one micro-batch"):
            loss_of(parameters).backward()


@pytest.mark.parametrize("make", [GradientReducer, WideReducer])
def test_sparse_gradients_add_up(make: Any) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    reducer = make([table.weight], Recorder(), bucket_bytes=1 << 20)
    for _ in range(2):  # the second step begins anew
        reducer.begin()
        reducer.backward(table(torch.tensor([0, 0, 3])).sum())
        reducer.expect_last()
        reducer.backward(table(torch.tensor([3])).sum())
        reducer.finish()
        assert table.weight.grad is not None
        assert table.weight.grad.tolist() == [[2.0] * 2, [0.0] * 2, [0.0] * 2, [2.0] * 2, [0.0] * 2]
    reducer.close()


def test_a_second_backward_before_they_leave_adds_up() -> None:
    # both halves of a bucket: it is not full before the second half has come
    parameters = make_parameters()
    with reducing(parameters) as (reducer, _):
        reducer.begin()
        reducer.expect_last()
        loss_of(parameters[:3]).backward()
        loss_of(parameters[:3]).backward()
        loss_of(parameters[3:]).backward()
        reducer.finish()
        assert gradients(parameters) == [
            ((4 if index < 3 else 2) * p).flatten().tolist() for index, p in enumerate(parameters)
        ]


def test_inside_without_sending_nothing_travels_and_afterwards_it_does() -> None:
    parameters = make_parameters()
    with reducing(parameters) as (reducer, group):
        with reducer.without_sending():
            step(reducer, lambda: loss_of(parameters))
            assert not reducer.has_sent, "all of it can still be taken back"
        assert group.sent == []
        assert reducer.norm() > 0
        with pytest.raises(ZeroDivisionError), reducer.without_sending():
            _ = 1 / 0
        step(reducer, lambda: loss_of(parameters))
        assert len(group.sent) == 1
        assert reducer.has_sent


def test_a_closed_reducer_has_let_go_of_the_parameters() -> None:
    parameters = make_parameters()
    with reducing(parameters) as (reducer, _):
        step(reducer, lambda: loss_of(parameters))
    reducer.used[:] = False
    loss_of(parameters).backward()
    assert not reducer.used.any()
    assert isinstance(reducer.used, np.ndarray)


# ----------------------------------------------------------------------------------------------------- a rank alone


def alone() -> tuple[list[torch.nn.Parameter], Gradients]:
    parameters = make_parameters(torch.float64)
    gradients = gradients_of(parameters, LocalGroup(), bucket_bytes=1 << 20)
    assert type(gradients) is Gradients, "it has nothing to send"
    return parameters, gradients


def test_a_rank_alone_leaves_gradients_where_autograd_has_put_them() -> None:
    parameters, own = alone()
    seen: list[int] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(0 if p.grad is None else p.grad.data_ptr()))
    step(own, lambda: loss_of(parameters), lambda: loss_of(parameters, 4.0))
    assert gradients(parameters) == [(10 * p).flatten().tolist() for p in parameters]
    assert {p.grad.data_ptr() for p in parameters if p.grad is not None} == set(seen)
    assert not own.has_sent
    step(own, lambda: loss_of(parameters, 4.0))  # the twin: a step forgets the one before it
    assert gradients(parameters) == [(8 * p).flatten().tolist() for p in parameters]


def test_a_rank_alone_has_the_norm_of_one_among_several() -> None:
    parameters, own = alone()
    with reducing(parameters, bucket_bytes=40) as (reducer, _):
        step(reducer, lambda: loss_of(parameters))
        among_several = reducer.norm()
    step(own, lambda: loss_of(parameters))
    assert own.norm() == own.norm_so_far() == among_several
    own.scale_(0.5)
    assert gradients(parameters) == [p.flatten().tolist() for p in parameters]


def test_a_parameter_that_a_rank_alone_did_not_use_has_no_gradient() -> None:
    parameters, own = alone()
    step(own, lambda: loss_of(parameters[1:]))
    assert own.used.tolist() == [False, True, True, True, True]
    own.drop_unused_(own.used)
    assert [gradient is None for gradient in gradients(parameters)] == [True, False, False, False, False]
    step(own)
    assert not own.used.any()
    assert own.norm() == 0
    assert own.is_finite()
    own.scale_(0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_rank_alone_sees_what_is_not_finite(value: float) -> None:
    parameters, own = alone()
    step(own, lambda: loss_of(parameters))
    assert own.is_finite()
    assert parameters[3].grad is not None
    parameters[3].grad[2] = value
    assert not own.is_finite()
    assert not math.isfinite(own.norm())


def test_a_rank_alone_lays_its_gradients_out_as_its_parameters() -> None:
    table = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    turned = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())
    ids = torch.tensor([1, 3, 3])

    def loss(*, is_sparse: bool) -> torch.Tensor:
        return (torch.nn.functional.embedding(ids, table, sparse=is_sparse) ** 2).sum() + (turned**3).sum()

    found = []
    for is_sparse in (True, False):
        own = gradients_of([table, turned], LocalGroup(), bucket_bytes=1)
        own.begin()
        loss(is_sparse=is_sparse).backward()
        assert table.grad is not None
        assert table.grad.is_sparse == is_sparse
        early = own.norm_so_far()  # in the middle of a step
        loss(is_sparse=is_sparse).backward()
        assert turned.grad is not None
        turned.grad = turned.grad.contiguous()  # as somebody may who replaces it
        own.finish()
        assert (table.grad.stride(), turned.grad.stride()) == (table.stride(), turned.stride())
        assert own.norm() == pytest.approx(2 * early, rel=1e-15)
        found.append(gradients([table, turned]))
    assert found[0] == found[1]


def wide(parameters: list[torch.nn.Parameter]) -> WideReducer:
    reducer = gradients_of(parameters, LocalGroup(), bucket_bytes=24, is_wide=True)
    assert isinstance(reducer, WideReducer)  # also of a rank alone
    return reducer


def test_wide_sums_do_not_depend_on_the_order() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    terms = [torch.tensor([1.0, 1e-8, scale]) for scale in (1.0, 3e7, -3e7, 1e-3)]

    def after(order: tuple[int, ...], reducer: Gradients) -> list[float]:
        step(reducer, *(lambda index=index: (parameters[0] * terms[index]).sum() for index in order))  # type: ignore[misc]
        gradient = parameters[0].grad
        assert gradient is not None
        assert gradient.dtype is torch.float32
        reducer.close()
        return gradient.tolist()

    orders = (0, 1, 2, 3), (1, 3, 0, 2), (3, 2, 1, 0)
    assert len({tuple(after(order, wide(parameters))) for order in orders}) == 1
    assert len({tuple(after(order, Gradients(parameters))) for order in orders}) > 1  # the twin
    assert after(orders[1], wide(parameters)) == torch.stack(terms).double().sum(0).float().tolist()


@pytest.mark.parametrize("elements", [1, 4, 15, 100])
def test_wide_sums_of_large_parameters_are_made_by_pieces(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.parallel.gradient_sync._PIECE_ELEMENTS", elements)
    values = torch.arange(15.0).add(0.1)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((15,), (5, 3), (1, 15), (), (0, 3))]
    parameters.append(torch.nn.Parameter(torch.zeros(5, 3).t()))  # rows do not lie one after the other

    def loss(times: float) -> torch.Tensor:
        return torch.stack([(p * (values[: p.numel()].view(p.shape) * times)).sum() for p in parameters]).sum()

    reducer = wide(parameters)
    step(reducer, *(lambda times=times: loss(times) for times in (1.0, 1e-7, 3.0)))  # type: ignore[misc]
    for parameter in parameters:
        terms = [(values[: parameter.numel()] * times).double() for times in (1.0, 1e-7, 3.0)]
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.flatten(), sum(terms, torch.zeros(())).float())
    reducer.close()


def test_a_wide_gradient_is_seen_when_it_is_complete() -> None:
    parameters = make_parameters()
    reducer = wide(parameters)
    for _ in range(2):
        reducer.begin()
        reducer.backward(loss_of(parameters))
        assert gradients(parameters) == [None] * 5
        expected = math.sqrt(sum((2 * p).double().square().sum().item() for p in parameters))
        assert reducer.norm_so_far() == pytest.approx(expected, rel=1e-12)
        reducer.expect_last()
        reducer.backward(loss_of(parameters[1:]))
        reducer.finish()
        assert gradients(parameters) == [((4 if n else 2) * p).flatten().tolist() for n, p in enumerate(parameters)]
        assert [p.grad.stride() for p in parameters if p.grad is not None] == [p.stride() for p in parameters]
        assert reducer.norm() < 2 * expected
    reducer.begin()
    reducer.expect_last()
    reducer.backward(loss_of(parameters[:2]))
    reducer.finish()
    reducer.drop_unused_(reducer.used)
    assert [gradient is None for gradient in gradients(parameters)] == [False, False, True, True, True]
    reducer.close()


@pytest.mark.parametrize("kind", [GradientReducer, WideReducer])
def test_a_closed_reducer_goes_at_once(kind: type[GradientReducer]) -> None:
    """Not when garbage is collected: its buckets may be all the memory there is for the next one."""
    parameters = make_parameters()
    reducer = kind(parameters, LocalGroup(), bucket_bytes=24)
    step(reducer, lambda: loss_of(parameters))
    reducer.close()
    seen = weakref.ref(reducer)
    gc.disable()
    try:
        del reducer
        assert seen() is None
    finally:
        gc.enable()
