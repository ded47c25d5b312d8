"""The state of a GPU: whether it has failed under this process.

Responsible for judging errors that torch has raised on a rank with a GPU. Refuses to know what becomes of the rank. The
one idea: an error of CUDA that destroys the context comes back from every later call, so the device can be asked.
"""

from __future__ import annotations

import torch

from hetseq.errors import HetSeqError
from hetseq.memory import is_exhausted


def first_line(error: BaseException) -> str:
    """What happened; torch adds lines of advice to its errors, among them one about device-side assertions."""
    return str(error).partition("\n")[0]


def has_failed(error: BaseException, device: torch.device) -> bool:
    """Whether `error` means that the device has failed under this process, while another process may still use it.

    An assertion that fails on a device, for an index out of range, is the fault of the code, and would fail again. A
    library such as cuBLAS reports a failed device by an error of its own, so a GPU is then asked (sync).
    """
    if isinstance(error, HetSeqError) or is_exhausted(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return _is_fatal(error)
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)  # sync, once, in a process that ends
    except torch.AcceleratorError as answer:
        return _is_fatal(answer)
    except Exception:  # the error itself says more than this one
        return False
    return False


def _is_fatal(error: torch.AcceleratorError) -> bool:
    return "device-side assert" not in first_line(error)
