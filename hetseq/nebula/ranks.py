"""The ranks of a script that uses plain `torch.distributed`: their number, and decisions of rank zero.

Responsible for: all uses of torch.distributed in this package. Knows nothing of the values. The one idea: one
small tensor from rank zero for each tag, so that all ranks write into one folder; they learn everything else from the
files in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed


def world() -> tuple[int, int]:
    """Rank and world size of the default process group; 0 and 1 without one."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def of_rank_zero(values: Sequence[int]) -> list[int]:
    """The integers of rank zero, each from 0 to 2^63 - 1; collective, the same number of them on every rank."""
    device = torch.device("cpu")
    if "nccl" in distributed.get_backend():
        device = torch.device("cuda", torch.cuda.current_device())
    tensor = torch.tensor(list(values), dtype=torch.int64, device=device)
    distributed.broadcast(tensor, src=0)
    return [int(value) for value in tensor.tolist()]
