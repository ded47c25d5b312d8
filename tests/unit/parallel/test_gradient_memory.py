"""A gradient that a function makes where it will be sent: never where something lies already, never for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetseq import empty_gradient
from hetseq.comm.group import LocalGroup
from hetseq.parallel.gradient_sync import GradientReducer, Gradients
from hetseq.tasks.nn.tied_embedding import Tied
from hetseq.tasks.nn.vocabulary_loss import vocabulary_loss

WORDS, SIZE = 9, 4


class Times(torch.autograd.Function):
    """The sum of a weight's elements times a factor, whose gradient is made in lent memory."""

    made: list[Tensor] = []  # in backward, by address and all

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.weight, ctx.factor = weight, factor
        return weight.sum() * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        memory = empty_gradient(ctx.weight)
        Times.made.append(memory.detach())
        return memory.fill_(ctx.factor).mul_(gradient), None


def times(weight: Tensor, factor: float) -> Tensor:
    total: Tensor = Times.apply(weight, factor)  # type: ignore[no-untyped-call]
    return total


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    Times.made.clear()


@contextmanager
def reducing(*parameters: nn.Parameter) -> Iterator[GradientReducer]:
    reducer = GradientReducer(parameters, LocalGroup(), bucket_bytes=1 << 20)
    try:
        yield reducer
    finally:
        reducer.close()


def begun(reducer: Gradients) -> Gradients:
    reducer.begin()
    reducer.expect_last()
    return reducer


def is_where(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.data_ptr() == other.data_ptr()


def turned() -> nn.Parameter:
    return nn.Parameter(torch.ones(SIZE, WORDS).t())


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(WORDS, SIZE)), turned])
def test_a_gradient_is_made_where_it_is_sent_and_not_moved(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, other, moved = make(), nn.Parameter(torch.ones(3)), []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source: moved.append(tuple(to.shape)) or copy(to, source))
    with reducing(weight, other) as reducer:
        for factor in (2.0, 3.0):  # also in the steps after the first
            begun(reducer).backward(times(weight, factor) + other.sum())
            made = Times.made.pop()
            reducer.finish()
            assert is_where(made, weight.grad)
            assert made.stride() == weight.stride()
            assert made.unique().tolist() == [factor]
            assert other.grad is not None
            assert other.grad.tolist() == [1.0] * 3
    assert moved == [(3,), (3,)]


def test_a_view_of_all_of_it_counts_and_one_of_a_part_does_not() -> None:
    weight = nn.Parameter(torch.ones(SIZE, SIZE))
    for view, is_whole in (
        (weight.view_as(weight), True),
        (weight[:2], False),
        (weight.t(), False),
        (weight * 1, False),
    ):
        with reducing(weight) as reducer:
            begun(reducer).backward(times(view, 2.0))
            reducer.finish()
            made = Times.made.pop()
            assert (made.shape, made.stride()) == (view.shape, view.stride())
            assert weight.grad is not None
            assert is_where(made, weight.grad) == is_whole
            assert weight.grad.sum() == 2 * view.numel()


def test_memory_is_lent_once_a_step() -> None:
    weight = nn.Parameter(torch.ones(WORDS, SIZE))
    with reducing(weight) as reducer:
        begun(reducer).backward(times(weight, 2.0) + times(weight, 3.0))  # two uses of one weight
        assert len({memory.data_ptr() for memory in Times.made}) == 2
        reducer.finish()
        assert weight.grad is not None
        assert weight.grad.unique().tolist() == [5.0]
        reducer.begin()
        reducer.backward(times(weight, 2.0))
        reducer.expect_last()
        reducer.backward(times(weight, 3.0))  # two micro-batches
        reducer.finish()
        assert weight.grad.unique().tolist() == [5.0]
        assert [is_where(memory, weight.grad) for memory in Times.made[2:]] == [True, False]
        reducer.begin()
        reducer.backward(weight.sum() * 2)  # made by autograd
        reducer.expect_last()
        reducer.backward(times(weight, 3.0))
        assert weight.grad.unique().tolist() == [5.0]
        assert not is_where(Times.made[4], weight.grad)


def test_a_share_that_is_done_again_borrows_again() -> None:
    weight = nn.Parameter(torch.ones(WORDS, SIZE))
    with reducing(weight) as reducer:
        begun(reducer).backward(times(weight, torch.inf))
        begun(reducer).backward(times(weight, 3.0))
        reducer.finish()
        assert is_where(Times.made[1], weight.grad)
        assert Times.made[1].unique().tolist() == [3.0]


def test_what_has_been_sent_is_lent_to_nobody() -> None:
    weight = nn.Parameter(torch.ones(WORDS, SIZE))
    with reducing(weight) as reducer:
        begun(reducer).finish()  # a rank without samples
        assert weight.grad is not None
        with pytest.raises(Exception, match="arrived after its bucket was sent"):
            reducer.backward(times(weight, 2.0))
        assert not is_where(Times.made[0], weight.grad)


def test_outside_of_the_backward_of_a_step_everybody_gets_memory_of_his_own() -> None:
    weight = nn.Parameter(torch.ones(WORDS, SIZE))
    with reducing(weight) as reducer:
        begun(reducer)
        (kept,) = torch.autograd.grad(times(weight, 7.0), [weight])  # in forward, such as of a penalty
        reducer.backward(times(weight, 2.0))
        reducer.finish()
        assert kept.unique().tolist() == [7.0]
        with pytest.raises(RuntimeError, match="unlike"):
            begun(reducer).backward(_failing(weight))
        reducer.begin()
        assert not is_where(empty_gradient(weight), reducer._home[0][1])
    alone = Gradients([weight])
    begun(alone).backward(times(weight, 2.0))
    alone.finish()
    assert is_where(Times.made[-1], weight.grad), "autograd takes it as it is"


def _failing(weight: nn.Parameter) -> Tensor:
    total = times(weight, 1.0)
    total.register_hook(_fail)
    return total


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("unlike")


def test_the_matrix_of_a_vocabulary_head_is_one_of_those() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(WORDS, SIZE, generator=generator, dtype=torch.float64))
    bias = nn.Parameter(torch.zeros(WORDS, dtype=torch.float64))
    ids = torch.tensor([3, 1, 3])

    def loss() -> Tensor:
        tied = Tied(weight, padding=0)
        return vocabulary_loss(tied.look_up(ids).tanh(), tied.head, bias, ids.flip(0))

    loss().backward()
    expected, weight.grad, bias.grad = weight.grad, None, None
    assert expected is not None
    with reducing(weight, bias) as reducer:
        arrived: list[Tensor] = []
        reducer._hooks[0].remove()
        weight.register_post_accumulate_grad_hook(lambda tensor: arrived.append(tensor.grad))
        begun(reducer).backward(loss())
        view = reducer._home[0][1]
        assert is_where(arrived[0], view)
        assert torch.equal(view, expected)
