"""The number of samples that this rank computes at once: what the options allow, less what memory has refused.

Pure, and local to one rank: how a share is cut changes no sum, so the other ranks need not know. A size is tried before
it is relied upon. If no option says how much a device holds, the first step of a run grows from one sample on, and the
memory that each size needed predicts how many samples fit; a size that still does not fit is halved. Sizes only shrink
after that: a device that was full once will be full again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetseq.data.plan import MicroBatchCap

_SAFE_PART = 0.9  # of the free memory; the rest is for fragments and for samples longer than those seen


class MicroBatchSizes:
    """The cap of this rank's micro-batches, and the sizes known not to fit.

    With `is_fixed` the only size is one unit. With `is_learning` the caller measures the memory of the first sizes.
    `remember` is called with every size learned from memory.
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
        self._most = cap.samples  # what memory and options allow, where fewer are computed at once
        self.is_fixed, self.is_learning = is_fixed, is_learning
        self._remember = remember
        self._seen: dict[int, int] = {}  # samples -> most bytes they needed besides memory that stays allocated

    def first(self) -> MicroBatchCap:
        """The cap of a step whose micro-batches grow from one sample on."""
        return replace(self.cap, is_ramp=True)

    def holds(self, samples: int, tokens: int = 0) -> bool:
        """Whether a micro-batch of this many samples, and tokens if counted, may be tried."""
        has_few_tokens = samples == 1 or self.cap.tokens is None or tokens <= self.cap.tokens
        return has_few_tokens and (self.cap.samples is None or samples <= self.cap.samples)

    def refuse(self, samples: int, tokens: int = 0) -> bool:
        """Record that this size did not fit: from now on at most half of it. False if there is no smaller size."""
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

    def needed(self, samples: int, cut: int) -> int:
        """The number of micro-batches that a share of so many samples needs, which is `cut` into so many now."""
        if self.is_fixed or self.cap.tokens is not None:
            return cut
        return min(samples, 1) if self._most is None else -(-samples // self._most)

    def spread(self, samples: int, rounds: int, *, cut: Sequence[int]) -> bool:
        """Cut shares of so many samples evenly into `rounds`, since all ranks compute that many together.

        Whether the share that is `cut` into micro-batches of these sizes has to be cut again.
        """
        if self.is_fixed or self.cap.tokens is not None or not samples:
            return False
        even = -(-samples // rounds)
        even = min(-(-even // self.cap.multiple) * self.cap.multiple, samples)
        least = even if self._most is None else min(even, self._most)
        if least != (self.cap.samples or samples):
            self.cap = replace(self.cap, samples=least)
        return not self.is_learning and cut[0] != min(least, samples)

    def see(self, samples: int, needed_bytes: int) -> None:
        """Record that a micro-batch of `samples` needed at most `needed_bytes` for itself."""
        self._seen[samples] = max(self._seen.get(samples, 0), needed_bytes)

    def foresee(self, free_bytes: int) -> None:
        """Cap the sizes at what fits into memory, by the two largest that were seen, and stop learning.

        A share of one sample shows no second size; its limit is then found by trying.
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
        self._most = samples
        self.cap = replace(self.cap, samples=samples)
        if self._remember is not None:
            self._remember(samples)
