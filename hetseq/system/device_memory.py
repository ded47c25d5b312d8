"""The memory of the device that this rank computes on: how much is in use, how much there is, and whether it ran out.

A GPU reports its own memory; a CPU rank counts the memory of its process, and shares the limit with all other
processes of the machine.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hetseq.system import host_memory

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_TEXTS_OF_EXHAUSTION = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "hipErrorOutOfMemory",
)
#: messages of libraries that could not allocate memory; they have other causes too
_TEXTS_OF_A_FULL_GPU = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "unable to find an engine",
    "Unable to find a valid cuDNN algorithm",
)
_FULL_PART = 0.05  # of a GPU's memory: with less of it free, those messages mean that memory ran out


def in_use_bytes(device: torch.device) -> int:
    """Memory that this rank holds: the peak of its tensors on a GPU, resident pages on a CPU; 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0  # not Linux


def limit_bytes(device: torch.device) -> int:
    """Memory of the device; on a CPU, of the machine or of the control group that a queue has put this process into."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory.limit_bytes()


def free_bytes(device: torch.device) -> int:
    """GPU memory that this process could still get, including what torch has cached."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return min(free, _own_limit(device, total) - reserved) + reserved - torch.cuda.memory_allocated(device)


def _own_limit(device: torch.device | None, total: int) -> int:
    """The part of a GPU's memory that this process may use, if limited (`set_per_process_memory_fraction`)."""
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)


@dataclass
class Peak:
    """Peak memory of a piece of work beyond the memory in use before; known after it."""

    bytes: int = 0


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """Watches the tensors of a GPU while the block runs."""
    torch.cuda.reset_peak_memory_stats(device)
    before, peak = torch.cuda.memory_allocated(device), Peak()
    yield peak
    peak.bytes = torch.cuda.max_memory_allocated(device) - before


def is_exhausted(error: BaseException) -> bool:
    """Whether the error means that a device is out of memory.

    torch's CPU allocator and CUDA's libraries raise no exception of their own for this, so they are known by message.
    Call it while the tensors of the failed work still exist: some messages count only while the GPU is full.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if type(error) not in (RuntimeError, torch.AcceleratorError):
        return False
    message = str(error)
    if any(text in message for text in _TEXTS_OF_EXHAUSTION):
        return True
    return any(text in message for text in _TEXTS_OF_A_FULL_GPU) and _is_gpu_full()


def _is_gpu_full() -> bool:
    """Whether the GPU of this process, if it has one, has hardly any memory left besides torch's tensors."""
    if not torch.cuda.is_initialized():
        return False
    try:
        free, total = torch.cuda.mem_get_info()  # a library cannot use what torch has cached
        limit, reserved = _own_limit(None, total), torch.cuda.memory_reserved()
    except RuntimeError:  # the device has failed
        return False
    return free < _FULL_PART * total or limit - reserved < _FULL_PART * limit


def usage(device: torch.device) -> str:
    """How full the device is, for a message."""
    used, limit = in_use_bytes(device), limit_bytes(device)
    return f"{used / 2**30:.2f} of {limit / 2**30:.2f} GiB in use by this rank"


def complaint(
    device: torch.device, what: str = "even one sample", remedy: str = "make samples or model smaller"
) -> str:
    """The message for a device whose memory cannot hold the smallest piece of work."""
    return (
        f"the memory of {device} does not hold {what} ({usage(device)}): {remedy}, or leave this device out of"
        " --devices"
    )


def where_exhausted(error: BaseException, device: torch.device) -> str:
    """Which memory ran out and in which line, outside torch; for an error that `is_exhausted` recognizes."""
    is_main = isinstance(error, MemoryError) or "CPUAllocator" in str(error)
    frames = traceback.extract_tb(error.__traceback__)
    torch_folder = os.path.dirname(torch.__file__)
    own = [frame for frame in frames if not frame.filename.startswith((torch_folder, "<"))]
    place = f" in {own[-1].name} ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    lacking = torch.device("cpu") if is_main else device
    return f"the memory of {lacking} ran out{place}, with {usage(lacking)}"


def release(device: torch.device) -> None:
    """Release cached blocks, so that blocks of the right size can be allocated."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
