"""What a worker reports when memory has run out where no smaller micro-batch helps."""

from __future__ import annotations

import socket

import pytest
import torch

from hetseq import worker
from hetseq.catalogue import codes_in
from hetseq.errors import EXIT_FAILED, DeviceMemoryError
from hetseq.placement import Placement

PLACEMENT = Placement(slot=2, device="cpu", threads=1)


@pytest.mark.parametrize(("is_ready", "when"), [(False, "before the first step the memory"), (True, "the memory")])
def test_memory_that_ran_out_has_its_own_code_and_no_traceback(is_ready: bool, when: str) -> None:
    report = worker._report_of_failure(MemoryError(), PLACEMENT, is_ready=is_ready)
    message = report["message"]
    assert message.startswith(f"rank 2 on {socket.gethostname()}: {when} of cpu ran out")
    assert codes_in(message) == ["memory-exhausted"]
    assert "Traceback" not in message
    assert "make samples or model smaller" in message
    assert report["code"] == EXIT_FAILED


def test_what_says_it_itself_is_left_as_it_is() -> None:
    own = worker._report_of_failure(DeviceMemoryError("not even one sample"), PLACEMENT, is_ready=True)
    assert own["message"] == "not even one sample [memory-exhausted]"


def test_another_failure_of_the_task_keeps_its_traceback() -> None:
    other = worker._report_of_failure(RuntimeError("shapes"), PLACEMENT, is_ready=False)
    assert codes_in(other["message"]) == ["worker-raised"]
    lost = worker._report_of_failure(torch.AcceleratorError("CUDA error: illegal"), PLACEMENT, is_ready=True)
    assert lost["has_lost_device"]
