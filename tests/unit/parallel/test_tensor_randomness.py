"""Random numbers of a rank that divides a model, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetseq.parallel.tensor_randomness import separate_randomness_


class Layer(nn.Module):
    """`up`, `inside` and `down` in a row; `inside` gives random numbers, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.up, self.down, self._fails = nn.Identity(), nn.Identity(), fails
        self.drawn: list[float] = []

    def forward(self, x: Any) -> Any:
        x = self.up(x)
        self.drawn.append(torch.rand(()).item())
        if self._fails:
            raise MemoryError
        return self.down(x)


def run(rank: int, *, fails: bool = False, is_training: bool = True) -> tuple[float, float]:
    """What a rank draws between `up` and `down`, and afterwards."""
    layer = Layer(fails=fails).train(is_training)
    separate_randomness_(nn.Sequential(layer), rank, seed=3, opening=["0.up"], closing=["0.down"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if fails:
            with pytest.raises(MemoryError):
                layer(torch.zeros(1))
        else:
            layer(torch.zeros(1))
        return layer.drawn[0], torch.rand(()).item()


def test_numbers_differ_inside_and_agree_afterwards() -> None:
    first, second = run(0), run(1)
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_a_forward_that_fails_inside_leaves_the_common_numbers() -> None:
    assert run(0, fails=True)[1] == run(1, fails=True)[1] == run(0)[1]


def test_evaluation_draws_the_common_numbers() -> None:
    assert run(0, is_training=False) == run(1, is_training=False)
