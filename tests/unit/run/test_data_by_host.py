"""Which ranks read the same part of the data: what a rank finds out of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetseq.comm.group import LocalGroup
from hetseq.data.shards import Shards
from hetseq.run.data_by_host import parts_of_ranks, say_what_holds
from hetseq.run.loaded_task import LoadedTask
from hetseq.task import Task
from hetseq.training.precision import PRECISIONS


class Masked(list):  # type: ignore[type-arg]
    """Samples that are others in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([super().__getitem__(index), self.epoch])


def material(data: Any) -> LoadedTask:
    task: Any = Task
    return LoadedTask(
        task, data, {}, torch.nn.Linear(1, 1), (), lambda item: item, 7, torch.device("cpu"), PRECISIONS["fp32"]
    )  # fmt: skip


def test_a_rank_reads_the_part_that_it_has_loaded_whatever_epoch_it_is_in() -> None:
    data = Masked(range(8))
    first, group = material(data), LocalGroup()
    parts = parts_of_ranks(first, group)
    data.set_epoch(3)
    assert parts_of_ranks(material(data), group) != parts, "the twin: another digest"
    assert parts_of_ranks(first, group) == parts


def test_who_begins_with_one_part_is_told_that_others_come_too_late(caplog: pytest.LogCaptureFixture) -> None:
    say_what_holds(Shards((3,), ((0, 1),), 2), (0, 1), has_begun=False)
    (line,) = caplog.messages
    assert line.endswith("gets no samples, so with --join let --min-ranks count the ranks of all hosts")


def test_ranks_are_called_as_users_know_them(caplog: pytest.LogCaptureFixture) -> None:
    say_what_holds(Shards((3, 1), ((0,), (2,)), 3), (1, 4, 6), has_begun=True)
    (line,) = caplog.messages
    assert line.startswith(
        "--data-by-host: rank 4 reads training data that this run did not begin with, and so gets no"
    )
