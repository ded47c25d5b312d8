"""What can go wrong on a device, for the task of the sections: the real thing on a GPU, torch's own texts on a CPU.

A fault that happens once claims a file beside the run directory, so that it happens in one process of the run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

FAULTS = {
    "exhaust": "micro-batches of more than --fits samples need more memory than there is",
    "exhaust-late": "memory runs out once in backward, when most buckets have left",
    "exhaust-place": "moving more than --fits samples to the device needs more memory than there is",
    "exhaust-valid": "validation on more than --fits samples needs more memory than there is",
    "exhaust-texts": "as exhaust, in the words of every library in turn",
    "assert": "an index that is out of range, once --fault-at updates are done",
    "lose-device": "a kernel writes where it must not, once, on one rank",
    "lose-in-exchange": "the same, but gloo is the first to be told",
}

#: torch's own words for a CUDA error, tail included (c10/cuda/CUDAException.cpp, torch 2.13)
TAIL = (
    "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    " for more information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the"
    " stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with"
    " `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
ILLEGAL_ACCESS = f"CUDA error: an illegal memory access was encountered\n{TAIL}"
#: what libraries say when memory has run out, of which none has an exception of its own
EXHAUSTED: tuple[Callable[[], BaseException], ...] = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of"),
    lambda: torch.AcceleratorError(f"CUDA error: out of memory\n{TAIL}"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: torch.AcceleratorError(f"HIP error: out of memory\n{TAIL}"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
)


@dataclass
class Plan:
    """What goes wrong in one process; `once` is a path that no other run has."""

    fault: str | None
    at: int  # updates after which it happens
    fits: int  # samples that memory holds
    once: Path
    updates: int = 0  # so far; the task tells
    _texts: list[Callable[[], BaseException]] = field(default_factory=lambda: list(EXHAUSTED))

    def __post_init__(self) -> None:
        if self.fault is not None and self.fault not in FAULTS:
            raise ValueError(f"--fault {self.fault}: expected one of {', '.join(FAULTS)}")

    def prepare(self) -> None:
        """Change torch as the fault asks for, before the run begins."""
        Heavy.fits = self.fits  # of the class: an attribute of the tensor would be lost where the batch is pinned
        if self.fault == "lose-in-exchange":
            _fail_in_gloo(self)

    def batch(self, samples: Any) -> Any:
        """A collated batch."""
        if self.fault != "exhaust-place":
            return samples
        pictures, labels = samples
        return pictures.as_subclass(Heavy), labels

    def before(self, pictures: torch.Tensor, *, is_training: bool) -> None:
        """Called ahead of forward."""
        is_large = len(pictures) > self.fits
        if self.fault == "exhaust" and is_training and is_large:
            exhaust(pictures.device)
        if self.fault == "exhaust-valid" and not is_training and is_large:
            exhaust(pictures.device)
        if self.fault == "exhaust-texts" and is_training and is_large:
            raise (self._texts.pop(0) if self._texts else EXHAUSTED[0])()
        if not is_training or self.updates < self.at:
            return
        if self.fault == "assert":
            torch.zeros(10, device=pictures.device)[torch.full((1,), 99, device=pictures.device)]
        if self.fault == "lose-device" and (pictures.is_cuda or not torch.cuda.is_available()) and self.claim():
            lose(pictures.device)

    def between(self, model: nn.Module, *, is_training: bool) -> None:
        """Called between forward and backward."""
        if self.fault != "exhaust-late" or not is_training or self.updates < self.at:
            return
        first = next(model.parameters())  # its gradient comes last
        if not self.once.exists():

            def run_out(gradient: torch.Tensor) -> None:
                handle.remove()
                if self.claim():
                    exhaust(gradient.device)

            handle = first.register_hook(run_out)

    def claim(self) -> bool:
        """Whether this is the process in which the fault happens."""
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Heavy(torch.Tensor):
    """A tensor that cannot be moved where it has more than `fits` rows."""

    fits: ClassVar[int] = 0

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(self) > self.fits:
            exhaust(torch.device(args[0]))
        return self.as_subclass(torch.Tensor).to(*args, **kwargs)


def exhaust(device: torch.device) -> None:
    """Ask the device for more memory than any has; raises what torch raises."""
    torch.empty(1 << 55, dtype=torch.uint8, device=device)


def lose(device: torch.device) -> None:
    """Make the GPU of this process unusable for it; on a CPU raise what torch would."""
    if device.type != "cuda":
        raise torch.AcceleratorError(ILLEGAL_ACCESS)
    write_to_nowhere()
    torch.cuda.synchronize(device)


def write_to_nowhere() -> None:
    """Launch a kernel that writes to address 16, in the context that is current. Raises RuntimeError where it cannot.

    Written for the driver's own compiler, so that neither nvcc nor another package is needed.
    """
    ptx = """
.version 6.3
.target TARGET
.address_size 64
.visible .entry write_to_nowhere()
{
    .reg .b32 %value;
    .reg .b64 %address;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""
    torch.zeros(1, device="cuda")  # the context of this thread
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    for target in ("sm_75", "sm_50"):  # the driver's compiler takes it for any later card
        text = ptx.replace("TARGET", target).encode() + b"\0"
        code = driver.cuModuleLoadData(ctypes.byref(module), text)
        if code == 0:
            break
    else:
        raise RuntimeError(f"the driver's cuModuleLoadData ended with {code}")
    _call(driver.cuModuleGetFunction, ctypes.byref(function), module, b"write_to_nowhere")
    _call(driver.cuLaunchKernel, function, *([ctypes.c_uint(1)] * 6), ctypes.c_uint(0), None, None, None)


def _call(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    if code != 0:
        raise RuntimeError(f"the driver's {function.__name__} ended with {code}")


def _fail_in_gloo(plan: Plan) -> None:
    gloo: Any = torch.distributed.ProcessGroupGloo
    real = gloo.allreduce

    def allreduce(self: Any, *arguments: Any, **options: Any) -> Any:
        if plan.updates >= plan.at and plan.claim():
            lose(torch.device("cpu"))
        return real(self, *arguments, **options)

    gloo.allreduce = allreduce


def refuse_pinning() -> list[int]:
    """From now on the driver refuses to register memory, for real: it is asked for 0 bytes. Gives its answers."""
    runtime, answers = torch.cuda.cudart(), list[int]()

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:
            code = runtime.cudaHostRegister(address, 0, flags)  # which the driver refuses, and remembers
            answers.append(int(code))
            return code

    torch.cuda.cudart = Refusing
    return answers
