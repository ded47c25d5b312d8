"""Sums of activations, and the layers that need them: deadlines, ranks whose peers are missing, and wrong words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetseq.comm.group import LocalGroup
from hetseq.parallel.tensor_ranks import TensorRanks
from hetseq.parallel.tensor_styles import VocabularyRows


class Noting(LocalGroup):
    """A group of one that notes the deadline of each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def all_reduce_sum(self, tensor: torch.Tensor) -> Any:
        self.noted.append(self.deadline_s)
        return super().all_reduce_sum(tensor)


def test_a_sum_has_the_deadline_of_all_ranks_at_its_time() -> None:
    ranks, near, everyone = TensorRanks(1, 0), Noting(), LocalGroup()
    near.deadline_s = 1800.0
    ranks.meet(near, everyone)
    for deadline_s in (5.0, 7.0):
        everyone.deadline_s = deadline_s
        assert torch.equal(ranks.sum(torch.ones(3)), torch.ones(3))
    assert near.noted == [5.0, 7.0]


def test_a_rank_whose_peers_are_missing_computes_nothing() -> None:
    with pytest.raises(AssertionError, match="computes nothing"):
        TensorRanks(2, 0).sum(torch.ones(3))


class First(TensorRanks):
    """The first of two ranks, whose peer gives zeros."""

    def __init__(self) -> None:
        super().__init__(2, 0)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part.clone()


@pytest.mark.parametrize("word", [8, -1])
def test_a_number_that_is_no_word_is_refused_as_by_the_whole_layer(word: int) -> None:
    layer = nn.Embedding(8, 2)
    layer.weight = nn.Parameter(layer.weight[:4].detach().clone())
    VocabularyRows().divide_(layer, First())
    assert not layer(torch.tensor([5])).any(), "a word of the other rank"
    with pytest.raises(IndexError):
        layer(torch.tensor([word]))
