"""What belongs to other ways of training on several devices is refused, with what takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hetseq.errors import TaskError
from hetseq.loop.refusals import refuse_data, refuse_module, refuse_process_group

DATA = TensorDataset(torch.zeros(6, 2))


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_group_of_the_script_is_refused(process_group: None) -> None:
    with pytest.raises(TaskError, match=r"^torch.distributed is in use by the script: a HetSeq loop has no process gro"
                                        r"up of its own; leave out init_process_group, and where ranks exchange values"
                                        r" use run.evaluate or run.only_first$"):  # fmt: skip
        refuse_process_group()


def test_no_process_group_is_fine() -> None:
    refuse_process_group()


def test_a_model_that_sends_its_own_gradients_is_refused(process_group: None) -> None:
    for kind in (nn.parallel.DistributedDataParallel, nn.DataParallel):
        with pytest.raises(TaskError, match=rf"^run.own got a {kind.__name__}: give it the module inside, since a step"
                                            r" adds up the gradients of all ranks$"):  # fmt: skip
            refuse_module(kind(nn.Linear(2, 1)))
    refuse_module(nn.Linear(2, 1))


class Sharded(DistributedSampler[Any]):
    """A sampler of the user's own."""


def test_loaders_and_samplers_are_refused() -> None:
    sampler = Sharded(DATA, num_replicas=2, rank=0)
    for data in (DataLoader(DATA, batch_size=2), DataLoader(DATA, batch_size=2, sampler=sampler)):
        with pytest.raises(TaskError, match=r"^run.steps got a DataLoader: give it the data set, as in run.steps\(loade"
                                            r"r.dataset, collate=loader.collate_fn, ...\): the run shuffles, and gives"
                                            r" each rank its samples$"):  # fmt: skip
            refuse_data("run.steps", data)
    with pytest.raises(TaskError, match=r"^run.evaluate got a Sharded: give it the data set itself: the run gives each"
                                        r" rank its samples$"):  # fmt: skip
        refuse_data("run.evaluate", sampler)
    told = r"^run.steps got a generator, which has no index: wrap it in hetseq.Lanes\("
    with pytest.raises(TaskError, match=told):
        refuse_data("run.steps", (x for x in [1]))
    with pytest.raises(TaskError, match=r"^run.steps got data without a sample$"):
        refuse_data("run.steps", [])
    refuse_data("run.steps", DATA)
