"""Sums of activations have the deadline of the step under way, not the patience with which the ranks met."""

from __future__ import annotations

from typing import Any

import torch

from hetseq.comm.group import LocalGroup
from hetseq.parallel.tensor_ranks import TensorRanks


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
