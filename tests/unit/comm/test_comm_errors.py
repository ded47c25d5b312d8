"""Errors inside the exchange: those of this rank's own device and memory are its own, all others are a lost peer."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.comm.group import GlooGroup, GroupMeeting
from hetseq.comm.peer_errors import PeerErrors
from hetseq.errors import PeerLostError
from hetseq.parallel.gradient_sync import GradientReducer
from tests.support import cuda_errors

FAILED_DEVICE = [
    cuda_errors.accelerator_error(cuda_errors.ILLEGAL_ACCESS),
    cuda_errors.accelerator_error(cuda_errors.DEVICE_ASSERT),
]
OWN = [
    *FAILED_DEVICE,
    cuda_errors.accelerator_error(cuda_errors.NO_HOST_MEMORY),  # no memory to pin
    cuda_errors.out_of_memory(),
    RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
]
OTHERS = [RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711")]


class Work:
    """A collective under way, which ends with an error, or well."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> None:
        if self._error is not None:
            raise self._error


class Transport:
    """Stands in for gloo; sums number `fails_at`, from 0, cannot be started, or ends badly if `is_late`."""

    def __init__(self, error: Exception, *, is_late: bool = False, fails_at: int = 0) -> None:
        self._error, self._is_late, self._fails_at = error, is_late, fails_at
        self.started = 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        number, self.started = self.started, self.started + 1
        if number != self._fails_at:
            return Work(None)
        if self._is_late:
            return Work(self._error)
        raise self._error

    def allgather(self, *_: Any) -> Work:
        return self.allreduce([], None)


class Severed(GlooGroup):
    """Remembers whether its connections were cut."""

    was_severed = False

    def sever(self) -> None:
        self.was_severed = True


def group_over(transport: Any) -> Severed:
    meeting: Any = GroupMeeting(None, "test", b"key")  # type: ignore[arg-type]
    return Severed(transport, rank=0, world_size=2, deadline_s=1.0, meeting=meeting, store=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("error", OWN, ids=lambda error: str(error)[:40])
def test_an_error_of_the_ranks_own_device_is_no_lost_peer(error: Exception, is_late: bool) -> None:
    group = group_over(Transport(error, is_late=is_late))
    with pytest.raises(RuntimeError) as raised:
        group.all_reduce_sum(torch.zeros(4)).wait()
    assert raised.value is error
    # frames of the transport hold its sockets open; those of a failed device are kept until the process ends
    has_frames = bool({"allreduce", "_await"} & {frame.name for frame in traceback.extract_tb(raised.tb)})
    assert has_frames is (error in FAILED_DEVICE)
    # gloo has counted a sum that it could not start: the next one would be taken for it
    assert group.was_severed is not is_late


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("error", OTHERS)
def test_an_error_of_the_network_is_a_lost_peer(error: Exception, is_late: bool) -> None:
    group = group_over(Transport(error, is_late=is_late))
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        group.all_reduce_sum(torch.zeros(4)).wait()
    with pytest.raises(PeerLostError):
        group_over(Transport(error, is_late=is_late)).all_gather_rows(np.zeros(1, np.int64))


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_bucket_whose_sum_could_not_be_started_has_not_left(fails_at: int) -> None:
    """Raised by a hook, the error arrives as it is at the caller of backward, who knows what has left."""
    error, parameters = cuda_errors.out_of_memory(), [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    transport = Transport(error, fails_at=fails_at)
    reducer = GradientReducer(parameters, group_over(transport), bucket_bytes=8)
    reducer.begin()
    reducer.expect_last()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        reducer.backward(sum(((parameter**2).sum() for parameter in parameters), torch.zeros(())))
    assert raised.value is error
    assert reducer.has_sent == (fails_at > 0)
    reducer.finish()  # sends what is left, that bucket included
    assert transport.started == 3
    reducer.close()


def test_an_error_of_its_own_holds_nothing_of_the_work_that_failed() -> None:
    """Memory is released as soon as the error has been handled, when no collection of garbage has looked yet."""

    class Activations:
        """What a forward has left, and backward still needed."""

    def fail(activations: Activations) -> None:
        with PeerErrors("a gradient bucket", 1.0):
            raise cuda_errors.out_of_memory()

    gc.disable()
    try:
        activations = Activations()
        held = weakref.ref(activations)
        try:
            fail(activations)
        except torch.OutOfMemoryError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        del activations
        assert held() is None
    finally:
        gc.enable()
    assert frames[-1] == "__exit__"  # and not the place where it was raised first
