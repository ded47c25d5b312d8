"""Slows a rank down on purpose, for demos, tests and benchmarks.

After a piece of compute that took c seconds of CPU a rank throttled by a factor f sleeps (f - 1) c, so it looks like a
machine f times slower while its core stays free for others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Throttle:
    """`with throttle.slowed():` around a piece of compute; a factor of 1 costs two clock reads."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    @property
    def is_on(self) -> bool:
        """Whether this rank is slowed down at all."""
        return self.factor > 1

    @contextmanager
    def slowed(self) -> Iterator[None]:
        start = time.process_time()
        yield
        # process time adds up over the threads of an operator, wall time does not
        used_s = (time.process_time() - start) / torch.get_num_threads()
        if self.is_on:
            time.sleep((self.factor - 1) * used_s)
