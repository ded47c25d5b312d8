"""What a script may not give to a loop: the parts of other ways to train on several devices. Each has its remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from hetseq.comm.group import has_process_group
from hetseq.data.lanes import check_is_indexed
from hetseq.errors import TaskError

#: modules that send their gradients, or hold parts of their parameters; FSDP is not imported to be known
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def refuse_process_group() -> None:
    """Raise TaskError if the script has initialised torch.distributed."""
    if has_process_group():
        raise TaskError(
            "torch.distributed is in use by the script: a HetSeq loop has no process group of its own; leave out"
            " init_process_group, and where ranks exchange values use run.evaluate or run.only_first"
        )


def refuse_module(module: torch.nn.Module) -> None:
    """Raise TaskError for a module that would add up gradients itself."""
    name = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
    if name is not None:
        raise TaskError(
            f"run.own got a {name}: give it the module inside, since a step adds up the gradients of all ranks"
        )


def refuse_data(call: str, data: Any) -> None:
    """Raise TaskError for data that `call`, such as `run.steps`, cannot divide among ranks."""
    name = type(data).__name__
    if isinstance(data, DataLoader):
        raise TaskError(
            f"{call} got a {name}: give it the data set, as in {call}(loader.dataset, collate=loader.collate_fn, ...):"
            " the run shuffles, and gives each rank its samples"
        )
    if isinstance(data, Sampler):
        raise TaskError(f"{call} got a {name}: give it the data set itself: the run gives each rank its samples")
    check_is_indexed(data, f"{call} got")
    if not len(data):
        raise TaskError(f"{call} got data without a sample")
