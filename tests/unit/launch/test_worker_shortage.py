"""What a worker reports when memory has run out where no smaller micro-batch helps, or when its device has failed."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetseq.cluster.membership.assignment import Assignment
from hetseq.errors import EXIT_FAILED, DeviceMemoryError, PeerLostError, codes_in
from hetseq.launch import worker
from hetseq.system import device_memory as memory
from tests.support import cuda_errors

PLACEMENT = Assignment(slot=2, device="cpu", threads=1)


@pytest.mark.parametrize(("is_ready", "when"), [(False, "before the first step the memory"), (True, "the memory")])
def test_memory_that_ran_out_has_its_own_code_and_no_traceback(is_ready: bool, when: str) -> None:
    report = worker.report_of_failure(MemoryError(), PLACEMENT, is_ready=is_ready)
    message = report["message"]
    assert message.startswith(f"rank 2 on {socket.gethostname()}: {when} of cpu ran out")
    assert codes_in(message) == ["memory-exhausted"]
    assert "Traceback" not in message
    assert "make samples or model smaller" in message
    assert report["code"] == EXIT_FAILED


def test_what_says_it_itself_is_left_as_it_is() -> None:
    own = worker.report_of_failure(DeviceMemoryError("not even one sample"), PLACEMENT, is_ready=True)
    assert own["message"] == "not even one sample [memory-exhausted]"


def test_another_failure_of_the_task_keeps_its_traceback() -> None:
    other = worker.report_of_failure(RuntimeError("shapes"), PLACEMENT, is_ready=False)
    assert codes_in(other["message"]) == ["worker-raised"]


LOST = cuda_errors.accelerator_error(cuda_errors.ILLEGAL_ACCESS)
ASSERTED = cuda_errors.accelerator_error(cuda_errors.DEVICE_ASSERT)
CUBLAS = RuntimeError(cuda_errors.CUBLAS_FAILED)


def report_on_gpu(
    error: Exception, monkeypatch: pytest.MonkeyPatch, device_says: Exception | None, *, is_ready: bool = True
) -> dict[str, Any]:
    """The report of a rank on a GPU which answers `device_says` when it is asked."""

    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda:1")
        if device_says is not None:
            raise device_says

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return worker.report_of_failure(error, replace(PLACEMENT, device="cuda:1"), is_ready=is_ready)


@pytest.mark.parametrize("tail", [cuda_errors.TAIL, cuda_errors.OTHER_TAIL])
def test_a_device_that_has_failed_is_known_by_the_first_line_of_its_error(
    monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    """Torch adds a line about device-side assertions to every error of CUDA."""
    lost = report_on_gpu(cuda_errors.accelerator_error(cuda_errors.ILLEGAL_ACCESS, tail), monkeypatch, LOST)
    assert lost["has_lost_device"]
    assert lost["message"] == f"its device failed ({cuda_errors.ILLEGAL_ACCESS})"
    failed = report_on_gpu(cuda_errors.accelerator_error(cuda_errors.DEVICE_ASSERT, tail), monkeypatch, ASSERTED)
    assert "has_lost_device" not in failed, "the fault of the code"
    assert codes_in(failed["message"]) == ["worker-raised"]


@pytest.mark.parametrize("text", [cuda_errors.CUBLAS_FAILED, cuda_errors.CUDNN_FAILED + "\nYou can try to repro"])
def test_a_device_that_fails_within_a_library_is_asked_and_its_answer_decides(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    first = text.partition("\n")[0]
    lost = report_on_gpu(RuntimeError(text), monkeypatch, LOST)
    assert lost == {"code": EXIT_FAILED, "message": f"its device failed ({first})", "has_lost_device": True}
    for answer in (None, ASSERTED, RuntimeError("another")):
        assert "has_lost_device" not in report_on_gpu(RuntimeError(text), monkeypatch, answer)


def test_a_kernel_that_cannot_be_launched_is_no_failed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = report_on_gpu(cuda_errors.accelerator_error(cuda_errors.NOT_LAUNCHED), monkeypatch, None)
    assert "has_lost_device" not in refused
    assert codes_in(refused["message"]) == ["worker-raised"]


def test_only_what_may_come_from_the_device_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (DeviceMemoryError("full"), cuda_errors.out_of_memory(), PeerLostError("gone")):
        monkeypatch.setattr(memory, "usage", lambda device: "all of it")
        assert "has_lost_device" not in report_on_gpu(error, monkeypatch, LOST)
    assert "has_lost_device" not in report_on_gpu(CUBLAS, monkeypatch, LOST, is_ready=False)
    assert "has_lost_device" not in worker.report_of_failure(CUBLAS, PLACEMENT, is_ready=True), "a CPU"
