"""What torch's NCCL does on this card, in a group of one. HetSeq itself does not use NCCL yet, but gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gpu_sections.section import Check, NotBuilt, Place, figure_of, holds

MIB = 25


def checks(place: Place) -> Iterator[Check]:
    """Seconds of its start, of a sum and of an abort."""
    if not place.is_gpu or not dist.is_nccl_available():
        raise NotBuilt("exchange of gradients by NCCL")
    # else torch's watchdog ends the process after an abort
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0")
    device = torch.device(place.device)
    torch.cuda.set_device(device)
    nccl: Any = dist.ProcessGroupNCCL  # torch's type stubs leave its calls out
    options = nccl.Options()
    options._timeout = timedelta(seconds=15)
    began_s = time.perf_counter()
    group = nccl(dist.FileStore(str(place.folder / "store"), 1), 0, 1, options)
    tensor = torch.ones(MIB * 2**18, device=device)
    group.allreduce([tensor]).wait()
    torch.cuda.synchronize(device)
    yield Check("start and first sum", figure_of(time.perf_counter() - began_s))
    began_s = time.perf_counter()
    for _ in range(20):
        group.allreduce([tensor]).wait()
    torch.cuda.synchronize(device)
    yield Check(f"sum of {MIB} MiB, one rank", figure_of((time.perf_counter() - began_s) / 20))
    yield holds("sum", bool((tensor == 1).all()), seen=str(tensor[0].item()), expected="1.0")
    began_s = time.perf_counter()
    group.abort()
    yield Check("abort with nothing under way", figure_of(time.perf_counter() - began_s))
    raise NotBuilt("exchange of gradients by NCCL; the figures are of torch's own")
