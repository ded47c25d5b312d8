"""Slows a rank down on purpose, for demos, tests and benchmarks.

A piece of compute that takes c seconds of CPU lasts f * c on a rank throttled by a factor f, which sleeps for the rest:
it looks like a machine f times slower while its core stays free for others. Time that the rank waited for its core
counts as sleep, since a machine of its own would not have waited, and oversleeping shortens the next piece; so several
such ranks share a core unnoticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Throttle:
    """`with throttle.slowed():` around a piece of compute; a factor of 1 costs two clock reads."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self._late_s = 0.0  # how much too late the last piece ended; at most its duration, or load would pile up

    @property
    def is_on(self) -> bool:
        """Whether this rank is slowed down."""
        return self.factor > 1

    @contextmanager
    def slowed(self, waited_s: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """`waited_s` counts the seconds of waits for other ranks, which such a machine has besides."""
        start, began, waited = time.process_time(), time.perf_counter(), waited_s()
        yield
        if not self.is_on:
            return
        # process time adds up over the threads of an operator, wall time does not
        lasts_s = self.factor * (time.process_time() - start) / torch.get_num_threads()
        due = began + lasts_s + waited_s() - waited - self._late_s
        time.sleep(max(0.0, due - time.perf_counter()))
        self._late_s = min(max(0.0, time.perf_counter() - due), lasts_s)
