"""What counts as memory that ran out, and how much of a machine a rank uses."""

from __future__ import annotations

import resource
from types import FunctionType

import numpy as np
import pytest
import torch

from hetseq.system import device_memory as memory
from hetseq.system import host_memory
from tests.support import cuda_errors

CPU = torch.device("cpu")
MIB = 1 << 20


class OddError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "is_exhausted"),
    [
        (cuda_errors.out_of_memory(), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (cuda_errors.accelerator_error(cuda_errors.DEVICE_ASSERT), False),
        (OddError("DefaultCPUAllocator: can't allocate memory"), False),
        (ValueError("out of memory"), False),
        (cuda_errors.accelerator_error(cuda_errors.NO_HOST_MEMORY), True),
        (cuda_errors.accelerator_error(cuda_errors.ILLEGAL_ACCESS), False),
        (torch.AcceleratorError("HIP error: out of memory" + cuda_errors.TAIL), True),
        (RuntimeError("HIP error: hipErrorOutOfMemory"), True),
        (RuntimeError(cuda_errors.CUBLAS_FAILED), False),
        *((RuntimeError(text), False) for text in cuda_errors.AMBIGUOUS),  # there is no GPU here
    ],
)
def test_memory_that_ran_out_is_told_from_other_failures(error: BaseException, is_exhausted: bool) -> None:
    assert memory.is_exhausted(error) is is_exhausted


def gpu(monkeypatch: pytest.MonkeyPatch, free: float, fraction: float, reserved_gib: float) -> None:
    """A GPU of 80 GiB with this part of it free, of which this process may take a part, and has taken so much."""
    facts = {
        "is_initialized": lambda: True,
        "mem_get_info": lambda device=None: (int(free * 80 * 2**30), 80 * 2**30),
        "get_per_process_memory_fraction": lambda device=None: fraction,
        "memory_reserved": lambda device=None: int(reserved_gib * 2**30),
        "memory_allocated": lambda device=None: 2**30,
    }
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, fact)


@pytest.mark.parametrize(
    ("case", "gib"), [((0.5, 1, 3), 40 + 2), ((0.5, 0.1, 3), 5 + 2), ((0.01, 0.1, 3), 0.8 + 2), ((1, 0.1, 8), 7)]
)
def test_what_a_process_can_still_get_is_bounded_by_the_gpu_and_by_its_own_limit(
    monkeypatch: pytest.MonkeyPatch, case: tuple[float, float, float], gib: float
) -> None:
    gpu(monkeypatch, *case)
    assert memory.free_bytes(torch.device("cuda:0")) == pytest.approx(gib * 2**30, abs=2)


@pytest.mark.parametrize("text", cuda_errors.AMBIGUOUS)
def test_what_a_library_says_of_a_full_gpu_and_of_other_faults_is_judged_by_the_memory_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    error = RuntimeError(text)
    for case, is_exhausted in (
        ((0.04, 1, 0), True),
        ((0.06, 1, 0), False),
        ((0.9, 0.1, 7.7), True),
        ((0.9, 0.1, 7), False),
    ):
        gpu(monkeypatch, *case)
        assert memory.is_exhausted(error) is is_exhausted

    def refuse() -> None:
        raise cuda_errors.accelerator_error(cuda_errors.ILLEGAL_ACCESS)

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    assert not memory.is_exhausted(error), "a device that has failed has no memory to speak of"


def test_the_real_refusals_of_torch_and_numpy_are_recognised() -> None:
    """Sizes that no machine has."""
    with pytest.raises(RuntimeError) as by_torch:
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as by_numpy:
        np.empty(1 << 60, np.uint8)
    assert memory.is_exhausted(by_torch.value)
    assert memory.is_exhausted(by_numpy.value)
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not memory.is_exhausted(other.value)


def ask_torch() -> None:
    torch.nn.Linear(1 << 30, 1 << 30)  # which raises in a file of torch's


def ask_numpy() -> None:
    np.empty(1 << 60, np.uint8)


def ask_gpu() -> None:
    raise cuda_errors.out_of_memory()


@pytest.mark.parametrize(("ask", "lacking"), [(ask_torch, "cpu"), (ask_numpy, "cpu"), (ask_gpu, "cuda:3")])
def test_what_ran_out_is_told_with_the_line_that_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, ask: FunctionType, lacking: str
) -> None:
    """Wherever it was raised, the line is the task's; and a rank with a GPU may lack the memory of its machine."""
    monkeypatch.setattr(memory, "usage", lambda device: f"all of {device}")
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        ask()
    place = f"{ask.__name__} (test_memory.py, line {ask.__code__.co_firstlineno + 1})"
    told = memory.where_exhausted(raised.value, torch.device("cuda:3"))
    assert told == f"the memory of {lacking} ran out in {place}, with all of {lacking}"


def test_pages_that_are_touched_are_in_use() -> None:
    before = memory.in_use_bytes(CPU)
    held = np.ones(64 * MIB, np.uint8)
    assert memory.in_use_bytes(CPU) - before > 48 * MIB  # others come and go
    assert before < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + MIB
    del held


def test_a_cpu_has_what_its_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "group_memory", lambda: (3 * MIB, 0))
    assert memory.limit_bytes(CPU) == 3 * MIB


def test_a_cpu_has_nothing_to_release() -> None:
    memory.release(CPU)
