"""The library that multiplies fp32 matrices on a CPU: MKL or oneDNN.

torch uses MKL. MKL chooses its kernels by processor vendor: on an AMD processor with AVX-512 it uses
AVX2 kernels, half as wide. oneDNN, which torch also has and uses for convolutions and 16 bits, checks what the
processor supports. Measured on a Zen 5, one thread, squares of 2048: 109 GFLOP/s with MKL, 225 with oneDNN
(bench/floor.py).

torch gives oneDNN fp32 products only if its user allows 16 bits inside (`torch.set_float32_matmul_precision`,
"medium"). How oneDNN then computes depends on the processor: without a unit for 16-bit matrix products, which
AMD's lack, it is fp32 throughout. So the accuracy is measured before anything depends on it, and a processor
that does use 16 bits is not given the permission.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

#: of an element, relative to the largest: sums of 384 terms in fp32 stay below 2e-6, with 16-bit factors above 1e-3
_LARGEST_ERROR = 2.0**-16
_ROWS, _TERMS, _COLUMNS = 96, 384, 160


def multiply_by_the_faster_library(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Use oneDNN for fp32 matrix products in this process if MKL would be slow; returns whether it is used.

    Products are as exact as before, but round differently. Call it once in a process that computes on a CPU, before a
    task builds its model: a task that sets "highest" uses MKL again. A setting other than the default is kept.
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
    """Whether the processor has vector instructions that MKL does not use on it."""
    capability: str = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX512"):
        return False
    try:
        return re.search(r"^vendor_id\s*:\s*AuthenticAMD$", cpuinfo.read_text(), re.MULTILINE) is not None
    except OSError:  # not Linux
        return False


def _error(multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> float:
    """The largest error of products as in forward and backward, relative to the largest element."""
    source = torch.Generator().manual_seed(0)  # its own: the global random numbers stay untouched
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
    """The same numbers in column-major order."""
    return batch.transpose(1, 2).contiguous().transpose(1, 2)
