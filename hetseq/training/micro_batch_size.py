"""How many samples of a share this rank computes at once: what the options allow, less what memory has refused.

Pure, and of one rank alone: how a share is cut changes no sum, so nobody else needs to know. A size is tried before it
is relied upon. Where no option says how much a device holds, the first step of a run grows from one sample on, and what
each size needed tells how many the memory will hold; what it refuses all the same is halved. Sizes only ever shrink
after that: a device that was full once will be full again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetseq.data.plan import MicroBatchCap

_SAFE_PART = 0.9  # of the free memory; what is left is for fragments and for samples longer than those seen


class MicroBatchSizes:
    """The cap of this rank's micro-batches, and what is known about larger ones.

    With `is_fixed` there is one size only, that of a unit. With `is_learning` the memory of the first sizes is wanted.
    `remember` is told whatever memory has taught.
    """

    def __init__(
        self,
        cap: MicroBatchCap,
        *,
        is_fixed: bool = False,
        is_learning: bool = False,
        remember: Callable[[int], None] | None = None,
    ) -> None:
        self.cap = cap  # of coming steps
        self.is_fixed, self.is_learning = is_fixed, is_learning
        self._remember = remember
        self._seen: dict[int, int] = {}  # samples -> most bytes they needed beside what stays

    def first(self) -> MicroBatchCap:
        """The cap of a step whose micro-batches grow from one sample on."""
        return replace(self.cap, is_ramp=True)

    def holds(self, samples: int, tokens: int = 0) -> bool:
        """Whether a micro-batch of so many samples, and tokens where those are counted, may be tried."""
        has_few_tokens = samples == 1 or self.cap.tokens is None or tokens <= self.cap.tokens
        return has_few_tokens and (self.cap.samples is None or samples <= self.cap.samples)

    def refuse(self, samples: int, tokens: int = 0) -> bool:
        """Memory did not hold so much: from now on at most half as much. False if there is no smaller size."""
        half = 0 if self.is_fixed else samples // 2
        if half == 0:
            return False
        if self.cap.tokens is not None and tokens > 1:
            self.cap = replace(self.cap, tokens=tokens // 2)
            return True
        if half > self.cap.multiple:
            half -= half % self.cap.multiple
        self._limit(half)
        return True

    def see(self, samples: int, needed_bytes: int) -> None:
        """A micro-batch of `samples` needed so much memory for itself, at most."""
        self._seen[samples] = max(self._seen.get(samples, 0), needed_bytes)

    def foresee(self, free_bytes: int) -> None:
        """Cap the sizes at what the memory will hold, by the two largest that were seen, and learn no more.

        A share of one sample shows no second size; its memory is then found by trying.
        """
        if len(self._seen) < 2:
            return
        self.is_learning = False
        smaller, larger = sorted(self._seen)[-2:]
        per_sample = (self._seen[larger] - self._seen[smaller]) / (larger - smaller)
        fixed = max(0.0, self._seen[larger] - per_sample * larger)
        if per_sample > 0:
            most = max(larger, int((_SAFE_PART * free_bytes - fixed) / per_sample))
            if self.holds(most):
                self._limit(most)

    def _limit(self, samples: int) -> None:
        self.cap = replace(self.cap, samples=samples)
        if self._remember is not None:
            self._remember(samples)
