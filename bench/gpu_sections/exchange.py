"""Bandwidth: sums of gloo between ranks of this device, and copies between the GPU and memory of the host.

The figures tell what an exchange costs on this node and what a faster one could gain. A GB is 1e9 bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_sections.gloo import DEADLINE, in_processes
from gpu_sections.section import Check, Place, figure_of, holds

BUCKETS_MIB = (25, 32)
ROUNDS = 3


def checks(place: Place) -> Iterator[Check]:
    """Copies first, which take a second; then sums in buckets as a model of the size of BERT-large has them."""
    if place.is_gpu:
        yield from copies(place)
    total = 1340 if place.is_gpu else 100  # MB of gradients
    for bucket in BUCKETS_MIB:
        place.begin(f"sums of {total} MB in buckets of {bucket} MiB")
        found = in_processes(summing, [place.device] * 2, place.folder / f"sums-{bucket}", total * 10**6, bucket)
        seconds = max(one["seconds"] for one in found)
        yield holds(f"{total} MB between 2 ranks, buckets of {bucket} MiB", all(one["right"] for one in found),
                    seen=f"{figure_of(seconds)}, {total / 1e3 / seconds:.2f} GB/s", expected="right sums")  # fmt: skip


def summing(rank: int, device: torch.device, group: Any, path: Path, total: int, bucket_mib: int) -> dict[str, Any]:
    """Seconds of the fastest of some rounds, all buckets under way at once."""
    count = max(1, total // (bucket_mib * 2**20))
    buckets = [torch.zeros(bucket_mib * 2**18, device=device) for _ in range(count)]
    best = float("inf")
    for _ in range(ROUNDS):
        for bucket in buckets:
            bucket.fill_(rank + 1)
        group.allreduce([torch.zeros(1, device=device)]).wait(DEADLINE)  # both begin now
        began_s = time.perf_counter()
        for work in [group.allreduce([bucket]) for bucket in buckets]:
            work.wait(DEADLINE)
        right = all(bool((bucket == 3).all()) for bucket in buckets)  # sync
        best = min(best, time.perf_counter() - began_s)
    return {"seconds": best, "right": right}


def copies(place: Place) -> Iterator[Check]:
    """GB/s to and from the GPU, by kind of host memory; seconds to pin a GiB."""
    device, size = torch.device(place.device), 2**28  # bytes
    on_gpu = torch.zeros(size, dtype=torch.uint8, device=device)
    kinds = {
        "pageable": torch.zeros(size, dtype=torch.uint8),
        "pinned": torch.zeros(size, dtype=torch.uint8).pin_memory(),
    }
    for name, host in kinds.items():
        yield Check(f"copies, {name}", both_ways(on_gpu, host))
    descriptor = os.memfd_create("gpu_check")
    os.ftruncate(descriptor, 2**30)
    with mmap.mmap(descriptor, 2**30) as memory:
        shared = torch.frombuffer(memory, dtype=torch.uint8)
        shared.fill_(1)  # its pages are there
        whole: Any = (ctypes.c_char * 2**30).from_buffer(memory)
        address = ctypes.addressof(whole)
        began_s = time.perf_counter()
        code = int(torch.cuda.cudart().cudaHostRegister(address, 2**30, 0))
        seconds = time.perf_counter() - began_s
        try:
            if code == 0:
                yield Check("pinning 1 GiB of shared memory", figure_of(seconds))
                yield Check("copies, pinned shared memory", both_ways(on_gpu, shared[:size]))
                torch.cuda.cudart().cudaHostUnregister(address)
            else:
                yield Check("pinning 1 GiB of shared memory", f"the driver refused it with {code}")
        finally:
            del shared, whole  # or the memory could not be unmapped, and that would be told as the cause
    os.close(descriptor)


def both_ways(on_gpu: torch.Tensor, host: torch.Tensor) -> str:
    """GB/s from and to the GPU, the faster of some rounds each."""
    best = {"from the GPU": float("inf"), "to the GPU": float("inf")}
    for _ in range(ROUNDS):
        for name, target, source in (("from the GPU", host, on_gpu), ("to the GPU", on_gpu, host)):
            torch.cuda.synchronize(on_gpu.device)
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(on_gpu.device)
            best[name] = min(best[name], time.perf_counter() - began_s)
    return ", ".join(f"{on_gpu.numel() / 1e9 / seconds:.1f} GB/s {name}" for name, seconds in best.items())
