"""Dropout whose random numbers are drawn by the handful."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hetseq.tasks.nn.dropout import Dropout, drop

SAMPLES = 1 << 20


def kept(p: float, seed: int = 1, size: int = SAMPLES) -> Tensor:
    torch.manual_seed(seed)
    return drop(torch.ones(size), p) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_so_many_are_left_out_and_the_mean_stays(p: float) -> None:
    torch.manual_seed(1)
    dropped = drop(torch.ones(SAMPLES, dtype=torch.float64), p)
    deviation = (p * (1 - p) / SAMPLES) ** 0.5
    assert abs((dropped == 0).double().mean().item() - p) < 4 * deviation + 2**-17
    assert abs(dropped.mean().item() - 1) < 4 * deviation / (1 - p)
    assert len(dropped.unique()) == 2, "nothing, or one over the share that is kept"


def test_neighbours_are_left_out_independently_of_each_other() -> None:
    """Four of them come from one draw."""
    is_kept = kept(0.5).view(-1, 4)
    patterns = (is_kept * torch.tensor([8, 4, 2, 1])).sum(dim=1).bincount(minlength=16).double()
    expected = len(is_kept) / 16
    assert ((patterns - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom: once in 10,000 seeds
    shifted = kept(0.5)[1:] == kept(0.5)[:-1]
    assert abs(shifted.double().mean().item() - 0.5) < 4 * 0.5 / SAMPLES**0.5


def test_the_seed_says_which_and_another_one_says_others() -> None:
    assert torch.equal(kept(0.1, seed=3), kept(0.1, seed=3))
    assert not torch.equal(kept(0.1, seed=3), kept(0.1, seed=4))


def test_the_gradient_goes_where_the_numbers_went() -> None:
    x = torch.ones(5, 7, 3, requires_grad=True)  # no multiple of four
    dropped = drop(x, 0.4)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())
    assert dropped.dtype == drop(x.bfloat16(), 0.4).float().dtype == torch.float32


def test_the_module_drops_in_training_alone_and_nothing_at_rate_zero() -> None:
    x, module = torch.ones(1000), Dropout(0.25)
    assert not torch.equal(module(x), x)
    assert module.eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    assert repr(module) == "Dropout(p=0.25)"
    assert torch.equal(drop(x, 1.0), torch.zeros(1000))
    assert module.state_dict() == nn.Dropout().state_dict()
