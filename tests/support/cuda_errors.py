"""torch's error texts for GPU failures, with their real tails, for tests without a GPU.

The tails matter: torch adds its own words to every CUDA error, among them "device-side assertions".
"""

from __future__ import annotations

import torch

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"
DEVICE_ASSERT = "CUDA error: device-side assert triggered"
NO_HOST_MEMORY = "CUDA error: out of memory"  # of the host too, where memory is to be pinned
NOT_LAUNCHED = "CUDA error: invalid configuration argument"  # of a kernel; the device is well
BUSY_DEVICE = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"

#: after the first line of every error that CUDA's runtime reports
TAIL = (
    "\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more"
    " information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
    " incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
#: of a torch that was built with device-side assertions, and runs without them
OTHER_TAIL = "\nDevice-side assertions were explicitly omitted for this error check; the error probably arose while"
_NAMES = {
    ILLEGAL_ACCESS: "cudaErrorIllegalAddress",
    DEVICE_ASSERT: "cudaErrorAssert",
    NOT_LAUNCHED: "cudaErrorInvalidConfiguration",
    NO_HOST_MEMORY: "cudaErrorMemoryAllocation",
    BUSY_DEVICE: "cudaErrorDevicesUnavailable",
}

#: of torch.OutOfMemoryError
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 1.19 MiB is"
    " free. Including non-PyTorch memory, this process has 79.08 GiB memory in use. Of the allocated memory 77.01 GiB"
    " is allocated by PyTorch, and 1.45 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
    " is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation"
    " for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)

CUBLAS_FAILED = (
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda,"
    " b, ldb, &beta, c, ldc)`"
)
#: what libraries say where they get no memory for themselves, and for other reasons
AMBIGUOUS = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
)
CUDNN_FAILED = "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"


def accelerator_error(first_line: str, tail: str = TAIL) -> torch.AcceleratorError:
    """The error that torch raises for an error of CUDA's runtime."""
    return torch.AcceleratorError(first_line + tail.format(name=_NAMES[first_line]))


def out_of_memory() -> torch.OutOfMemoryError:
    """The error that torch raises where its allocator gets no more memory of a GPU."""
    return torch.OutOfMemoryError(OUT_OF_MEMORY)
