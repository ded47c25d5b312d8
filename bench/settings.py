"""Process settings of a HetSeq worker on a CPU, and of any other process for comparison."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetseq.system.matmul_backend import multiply_by_the_faster_library
from hetseq.system.processes import keep_freed_memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h


def as_a_worker() -> None:
    """Freed memory stays with the process, and fp32 is multiplied by the library that is faster here."""
    keep_freed_memory()
    multiply_by_the_faster_library()


def as_any_process() -> None:
    """glibc behaves as in any program that has freed large blocks: its thresholds follow their size, up to 32 MiB
    for blocks that it asks the kernel for, and twice that for what it keeps (mallopt(3), M_MMAP_THRESHOLD). Products of
    fp32 are torch's choice."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in ((_M_MMAP_MAX, 65536), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 64 << 20)):
            mallopt(option, value)
    torch.set_float32_matmul_precision("highest")


@contextmanager
def products_of_a_worker() -> Iterator[None]:
    """Inside, fp32 is multiplied as in a worker; outside, as torch has it. Takes no time worth measuring."""
    torch.set_float32_matmul_precision(_of_a_worker())
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@functools.cache
def _of_a_worker() -> str:
    multiply_by_the_faster_library()
    return torch.get_float32_matmul_precision()
