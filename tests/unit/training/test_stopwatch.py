"""Seconds of a step by kind, and of its micro-batches, with a clock that the test moves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch

from hetseq.training import stopwatch
from hetseq.training.stopwatch import MicroBatchClock, Stopwatch


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(stopwatch.time, "perf_counter", hands)
    return hands


def test_every_moment_of_a_step_is_of_one_kind(hands: Hands) -> None:
    clock = Stopwatch()
    hands.now_s += 50  # before the step
    clock.start()
    for kind, seconds in (("data", 1.0), ("compute", 8.0), ("idle", 2.0), ("compute", 0.5), ("idle", 4.0)):
        hands.now_s += seconds
        clock.lap(kind)
    assert clock.seconds == {"data": 1.0, "compute": 8.5, "idle": 6.0}
    assert clock.total() == sum(clock.seconds.values())
    hands.now_s += 3
    assert clock.total() == 18.5


def test_a_new_step_begins_with_nothing(hands: Hands) -> None:
    clock = Stopwatch()
    hands.now_s += 1
    clock.lap("data")
    kept = clock.seconds
    clock.start()
    assert (clock.seconds, clock.total()) == ({}, 0.0)
    assert kept == {"data": 1.0}  # who has the old ones keeps them


def test_micro_batches_are_timed_between_marks(hands: Hands) -> None:
    clock = MicroBatchClock(torch.device("cpu"))
    for times in ([1.0, 2.0, 4.0], [8.0]):  # the second share is not added to the first
        clock.start()
        for seconds in times:
            hands.now_s += seconds
            clock.mark()
        hands.now_s += 32
        assert clock.laps() == times


def test_waits_for_other_ranks_are_no_work(hands: Hands) -> None:
    clock = MicroBatchClock(torch.device("cpu"))
    for waits in ([0.0, 0.0], [16.0, 0.0], [2.0, 32.0]):  # a share forgets the pauses of the one before it
        clock.start()
        for worked, waited in zip((1.0, 4.0), waits):
            hands.now_s += worked
            with clock.paused():
                hands.now_s += waited
            hands.now_s += worked
            clock.mark()
        assert clock.laps() == [2.0, 8.0]
        assert clock.waited_s() == sum(waits)
    with suppress(OSError), clock.paused():
        hands.now_s += 64
        raise OSError("a peer is lost")
    assert clock.waited_s() == 34.0 + 64.0


class Queue:
    """A GPU that works off its queue; an event is reached when all before it is done."""

    def __init__(self, hands: Hands) -> None:
        self.hands, self.free_at_s = hands, 0.0

    def work(self, seconds: float) -> None:
        self.free_at_s = max(self.free_at_s, self.hands.now_s) + seconds

    def event(self) -> Reached:
        return Reached(max(self.free_at_s, self.hands.now_s))


@dataclass
class Reached:
    at_s: float

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Reached) -> float:
        return 1e3 * (other.at_s - self.at_s)


def test_a_wait_of_the_host_counts_only_as_far_as_a_gpu_had_nothing_to_do(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, gpu = MicroBatchClock(torch.device("cuda")), Queue(hands)
    monkeypatch.setattr(stopwatch, "_event", gpu.event)
    for queued_s, waited_s, idle_s in ((100.0, 80.0, 0.0), (100.0, 130.0, 30.0)):
        hands.now_s = gpu.free_at_s = max(hands.now_s, gpu.free_at_s)
        clock.start()
        gpu.work(queued_s)
        with clock.paused():
            hands.now_s += waited_s
        gpu.work(50.0)
        clock.mark()
        assert clock.laps() == pytest.approx([150.0])
        assert clock.waited_s() == pytest.approx(idle_s)


def test_what_was_waited_within_a_lap_is_counted_as_waiting(hands: Hands) -> None:
    clock = Stopwatch()
    clock.start()
    for kind, seconds in (("idle", 1.0), ("compute", 8.0)):
        hands.now_s += seconds
        clock.lap(kind)
    clock.move(3.0, "compute", "idle")
    assert clock.seconds == {"idle": 4.0, "compute": 5.0}
    assert clock.total() == 9.0


def test_a_share_without_samples_has_no_micro_batches(hands: Hands) -> None:
    clock = MicroBatchClock(torch.device("cpu"))
    clock.start()
    assert clock.laps() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_timed_by_its_own_work_and_nobody_need_have_waited_for_it() -> None:
    device = torch.device("cuda")
    matrix = torch.eye(4096, device=device)
    matrix = matrix @ matrix  # loads cuBLAS, which takes longer than what is measured
    clock = MicroBatchClock(device)
    clock.start()
    for times in (1, 20):
        for _ in range(times):
            matrix = matrix @ matrix
        clock.mark()
    short_s, long_s = clock.laps()
    assert 0 < short_s < long_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_that_has_work_left_is_not_idle_while_its_host_waits() -> None:
    device = torch.device("cuda")
    matrix = torch.eye(4096, device=device)
    matrix = matrix @ matrix
    clock, laps = MicroBatchClock(device), []
    for waits in (False, True):
        torch.cuda.synchronize()
        clock.start()
        for _ in range(20):
            matrix = matrix @ matrix
        if waits:
            with clock.paused():
                torch.cuda.synchronize()
                torch.cuda._sleep(10**9)
                torch.cuda.synchronize()
        clock.mark()
        laps += clock.laps()
    assert laps[1] == pytest.approx(laps[0], rel=0.3)
