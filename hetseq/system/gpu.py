"""The state of a GPU: whether this process can use it, and whether it has failed under this process.

Responsible for opening a GPU, with a clear error if it cannot be used, and for classifying errors that torch raises
on it. Does not know how the rank reacts. A CUDA error that destroys the context is returned by every later
call, so the device can be queried.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from hetseq.errors import ConfigError, HetSeqError
from hetseq.system.device_memory import is_exhausted

_FIRST_WITH_BF16 = (8, 0)
_BUSY = "busy or unavailable"  # cudaErrorDevicesUnavailable
_OLD_DRIVER = "driver on your system is too old"


def open_device(device: torch.device, who: str) -> None:
    """Select a GPU for this process, and run a first kernel on it; `who` names the rank and its node.

    Raises ConfigError if this torch has no code for it, its driver is too old, or another process uses it exclusively.
    """
    try:
        about = torch.cuda.get_device_properties(device)
        _check_code(device, about, who)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device).add_(1)
    except RuntimeError as error:
        reason = first_line(error)
        if _OLD_DRIVER in reason:  # torch's message has the details
            raise ConfigError(f"{who}: {device} cannot be used: {reason} [device-unusable]") from None
        if _BUSY not in reason:
            raise
        raise ConfigError(
            f"{who}: {device} is busy or unavailable, as a GPU in exclusive mode is to a second process: give each rank"
            f" a GPU of its own with --devices, end the other process, or allow several by nvidia-smi -i {device.index}"
            " -c 0 [device-unusable]"
        ) from None


def allow_tf32(is_allowed: bool) -> None:
    """Whether fp32 matrix products and convolutions may use TF32 factors, which keep 10 bits of 23.

    By default cuDNN uses them for convolutions, and cuBLAS does not use them for products.
    """
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = is_allowed


def _check_code(device: torch.device, about: Any, who: str) -> None:
    """Raise ConfigError if this torch has no code for the GPU."""
    if not is_built_for(about):
        built, capability = torch.cuda.get_arch_list(), (about.major, about.minor)
        has_newer_code = any(_capability(name) > capability for name in built)
        other = "one of https://download.pytorch.org/whl/cu126" if has_newer_code else "a newer torch"
        raise ConfigError(
            f"{who}: {device} is a {about.name} of compute capability {about.major}.{about.minor}, and torch"
            f" {torch.__version__} is built for {', '.join(built)}: install a torch that is built for it, such as"
            f" {other}, or leave this device out of --devices [device-unusable]"
        )


def is_built_for(about: Any) -> bool:
    """Whether this torch has code for a GPU with these properties; ROCm names GPUs differently, and is trusted."""
    return torch.version.cuda is None or runs_on(torch.cuda.get_arch_list(), (about.major, about.minor))


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16 natively; otherwise torch emulates it."""
    about = torch.cuda.get_device_properties(device)
    return torch.version.cuda is None or (about.major, about.minor) >= _FIRST_WITH_BF16


def runs_on(built: list[str], capability: tuple[int, int]) -> bool:
    """Whether code for these (`sm_80`, `compute_90`) runs on a GPU: its own generation, or any later for `compute_`.

    Source: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility". An empty list says nothing.
    """
    for name in built:
        code = _capability(name)
        if code and code <= capability and (name.startswith("compute_") or code[0] == capability[0]):
            return True
    return not built


def _capability(name: str) -> tuple[int, ...]:
    """The generation that code is named after; empty if the name has another form."""
    number = name.partition("_")[2].rstrip("af")
    return (int(number[:-1]), int(number[-1])) if number.isdigit() else ()


def first_line(error: BaseException) -> str:
    """The first line of an error; torch appends advice, including a line about device-side assertions."""
    return str(error).partition("\n")[0]


def is_unusable(error: BaseException, device: torch.device) -> bool:
    """Whether the device returns only errors to this process from now on (sync)."""
    return _answer_after(error, device) is not None


def has_failed(error: BaseException, device: torch.device) -> bool:
    """Whether `error` means that the device has failed under this process, while another process may still use it.

    A failed device-side assertion, for an index out of range, is a fault of the code and would recur. The same holds
    for a kernel that cannot be launched, which leaves the device as it was (sync).
    """
    answer = _answer_after(error, device)
    return answer is not None and "device-side assert" not in first_line(answer)


def never_release(error: BaseException) -> None:
    """Keep an error, its frames and their tensors until the process ends.

    When a device has failed, torch ends the process with SIGABRT as soon as page-locked memory is released: a
    destructor raises (seen with torch 2.11 on an H100; c10/cuda/CUDAGraphsC10Utils.h). The reason would be lost.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


def _answer_after(error: BaseException, device: torch.device) -> torch.AcceleratorError | None:
    """The device's error after `error`; None if it still computes.

    The GPU is queried, because a library such as cuBLAS reports a failed device by an error of its own (sync).
    """
    if isinstance(error, HetSeqError) or is_exhausted(error):
        return None
    if device.type != "cuda":
        return error if isinstance(error, torch.AcceleratorError) else None
    try:
        torch.cuda.synchronize(device)  # sync, once, in a process that is about to end
    except torch.AcceleratorError as answer:
        return answer
    except Exception:  # the error itself says more than this one
        return None
    return None
