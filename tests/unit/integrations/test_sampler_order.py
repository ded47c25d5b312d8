"""The order of a sampler, epoch by epoch, and what has no order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hetseq import TaskError
from hetseq.integrations.sampler_order import SamplerOrder


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i, plus a hundred times the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def samples(view: SamplerOrder) -> list[int]:
    return [view[place] for place in range(len(view))]


def test_it_is_the_order_of_the_sampler_in_each_epoch() -> None:
    view = SamplerOrder(DataLoader(Numbers(), batch_size=5, shuffle=True), batch_size=5, seed=3)
    first = samples(view)
    view.set_epoch(2)
    second = samples(view)
    assert sorted(first) == list(range(23))
    assert sorted(second) == list(range(100, 123)), "the data set is told its epoch, from 0"
    assert [number - 100 for number in second] != first
    view.set_epoch(1)  # of a step that is repeated
    assert samples(view) == first


def test_all_ranks_have_one_order_whatever_they_have_drawn() -> None:
    orders = []
    for draws in (0, 7):
        torch.rand(draws)
        before = torch.get_rng_state()
        orders.append(samples(SamplerOrder(DataLoader(Numbers(), batch_size=5, shuffle=True), batch_size=5, seed=3)))
        assert torch.equal(before, torch.get_rng_state())
    other = SamplerOrder(DataLoader(Numbers(), batch_size=5, shuffle=True), batch_size=5, seed=4)
    assert orders[0] == orders[1] != samples(other)


def test_a_last_batch_that_is_dropped_is_no_part_of_the_data() -> None:
    assert len(SamplerOrder(DataLoader(Numbers(), batch_size=5, drop_last=True), batch_size=5, seed=3)) == 20


def test_batches_of_several_sizes_are_refused() -> None:
    loader = DataLoader(Numbers(), batch_sampler=[[0, 1, 2], [3], [4, 5, 6]])
    with pytest.raises(
        TaskError, match=r"have several sizes: expected per_device_train_batch_size = 3 samples in each"
    ):
        SamplerOrder(loader, batch_size=3, seed=3)


def test_data_without_an_index_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(9))

    with pytest.raises(TaskError, match=r"got a Stream as its data, which has no index"):
        SamplerOrder(DataLoader(Stream(), batch_size=3), batch_size=3, seed=3)
