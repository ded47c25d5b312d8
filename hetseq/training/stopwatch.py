"""Measures the seconds of a step by kind, and of each micro-batch on the device.

A CPU works while the clock runs. A GPU works later than the call: events are put between its kernels and read after
the step has waited for its loss anyway, so measuring adds no wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Host seconds of a step by kind: `lap(kind)` adds the time since the last lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begin = self._last = time.perf_counter()

    def start(self) -> None:
        """Begin a step."""
        self.seconds = {}
        self._begin = self._last = time.perf_counter()

    def lap(self, kind: str) -> None:
        """Add the time since the last lap to this kind."""
        now = time.perf_counter()
        self.seconds[kind] = self.seconds.get(kind, 0.0) + now - self._last
        self._last = now

    def move(self, seconds: float, kind: str, to: str) -> None:
        """Count seconds that a lap has put under one kind as another one."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) - seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin


class MicroBatchClock:
    """Seconds of each micro-batch on the device: `mark()` before the first one and after each; then `laps()`.

    What happens in `paused()`, a wait for other ranks, does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._pauses: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []  # with the number of its lap
        self._paused_s = 0.0  # of a CPU, since the start

    def start(self) -> None:
        """Forget all marks and pauses, and mark."""
        self._marks, self._events, self._pauses, self._paused_s = [], [], [], 0.0
        self.mark()

    def mark(self) -> None:
        if self._is_cuda:
            self._events.append(_event())
        else:
            self._marks.append(time.perf_counter() - self._paused_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of a wait for other ranks.

        A GPU reaches the first of two events when it has done all earlier work; between them it has nothing to do.
        """
        before, began_s = _event() if self._is_cuda else None, time.perf_counter()
        try:
            yield
        finally:
            if before is None:
                self._paused_s += time.perf_counter() - began_s
            else:
                self._pauses.append((len(self._events) - 1, before, _event()))

    def paused_s(self) -> float:
        """Seconds of the pauses of a CPU so far; of a GPU they are not known yet, and 0."""
        return self._paused_s

    def laps(self) -> list[float]:
        """Seconds between neighbouring marks; waits for a GPU that has not done its work yet."""
        if not self._is_cuda:
            return [b - a for a, b in zip(self._marks, self._marks[1:])]
        self._events[-1].synchronize()  # sync: a share whose terms have no counts has not been waited for
        seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:])]
        for lap, before, after in self._pauses:
            seconds[lap] -= before.elapsed_time(after) / 1e3
        return seconds

    def waited_s(self) -> float:
        """Seconds of all pauses in which the device had nothing to do. After `laps`, with a mark behind each pause."""
        idle_ms = [float(before.elapsed_time(after)) for _, before, after in self._pauses]
        return self._paused_s + sum(idle_ms) / 1e3


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
