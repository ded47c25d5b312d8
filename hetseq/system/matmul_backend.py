"""Which library multiplies matrices of fp32 on a CPU.

torch leaves these to MKL. MKL chooses its kernels by who made the processor: on one of AMD with AVX-512 it takes those
of AVX2, half as wide. oneDNN, which torch has too and uses for convolutions and 16 bits, asks what the processor can
do. Measured on a Zen 5, one thread, squares of 2048: 109 GFLOP/s with MKL, 225 with oneDNN (bench/floor.py).

torch gives oneDNN products of fp32 only where its user allows 16 bits inside (`torch.set_float32_matmul_precision`,
"medium"). What oneDNN then computes in depends on the processor: without a unit for products of 16-bit matrices, which
AMD's have not, it is fp32 throughout. So that is looked at, by numbers, before anything depends on it, and a processor
that takes the permission at its word does not get it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

#: of an element, relative to the largest: sums of 384 terms in fp32 stay below 2e-6, with factors of 16 bits above 1e-3
_LARGEST_ERROR = 2.0**-16
_ROWS, _TERMS, _COLUMNS = 96, 384, 160


def multiply_by_the_faster_library(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Have this process multiply fp32 matrices by oneDNN where MKL would be slow; True if it does so from here on.

    Products are as exact as before, and round differently. Call it once in a process that computes on a CPU, before a
    task builds its model, where "highest" is MKL again. Another setting than that is somebody's own, and left alone.
    """
    if torch.get_float32_matmul_precision() != "highest" or not (_has_both() and _is_misjudged(cpuinfo)):
        return False
    torch.set_float32_matmul_precision("medium")
    if _error() <= _LARGEST_ERROR:
        return True
    torch.set_float32_matmul_precision("highest")
    return False


def _has_both() -> bool:
    return bool(torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available())


def _is_misjudged(cpuinfo: Path) -> bool:
    """Whether the processor has vectors that MKL does not use on it."""
    capability: str = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX512"):
        return False
    try:
        return re.search(r"^vendor_id\s*:\s*AuthenticAMD$", cpuinfo.read_text(), re.MULTILINE) is not None
    except OSError:  # not Linux
        return False


def _error(multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> float:
    """The largest error of products as forward and backward have them, relative to the largest element."""
    source = torch.Generator().manual_seed(0)  # its own: nobody else's random numbers are touched
    left = torch.randn(2, _ROWS, _TERMS, generator=source)
    right = torch.randn(2, _TERMS, _COLUMNS, generator=source)
    exact = left.double() @ right.double()
    products = [
        product
        for a, b in itertools.product((left, _turned(left)), (right, _turned(right)))
        for product in (multiply(a, b), torch.stack([multiply(a[0], b[0]), multiply(a[1], b[1])]))
    ]
    return max(float((product - exact).abs().max() / exact.abs().max()) for product in products)


def _turned(batch: Tensor) -> Tensor:
    """The same numbers, lying column by column."""
    return batch.transpose(1, 2).contiguous().transpose(1, 2)
