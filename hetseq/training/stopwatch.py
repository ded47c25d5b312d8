"""Measures the seconds of a step by kind, and of each micro-batch on the device.

A CPU works while the clock runs. A GPU works later than the call: events are put between its kernels and read after
the step has waited for its loss anyway, so measuring adds no wait.
"""

from __future__ import annotations

import time

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

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin


class MicroBatchClock:
    """Seconds of each micro-batch on the device: `mark()` before the first one and after each; then `laps()`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Forget all marks, and mark."""
        self._marks, self._events = [], []
        self.mark()

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Seconds between neighbouring marks; waits for a GPU that has not done its work yet."""
        if self._is_cuda:
            self._events[-1].synchronize()  # sync: a share whose terms have no counts has not been waited for
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:])]
        return [b - a for a, b in zip(self._marks, self._marks[1:])]
