"""The gradient noise scale: the useful number of samples in a step, from values that a step computes anyway. Pure.

The gradients of single samples scatter around the true one. While the scatter of their mean is larger than the true
gradient, doubling the samples per step nearly halves the steps that training needs; far above, more samples only cost.
The two are equal at B_simple = tr(covariance) / |true gradient|^2, in samples (McCandlish, Kaplan, Amodei, "An
Empirical Model of Large-Batch Training", 2018; the estimate follows its appendix A.1, for two batch sizes).

The one idea: the squared length of a mean of b samples is, on average, |true|^2 + tr / b. Each rank's first micro-batch
is such a mean, the whole step is another, and two lengths give both unknowns; each is averaged before the division.
Ranks measure unequal numbers of samples: their lengths are averaged, weighted by samples, and so is 1 / b.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_REMEMBERED = 20  # measurements: a single one scatters by more than its value
_LEAST = 5


@dataclass(frozen=True)
class PartialGradient:
    """The part of a step's gradient that some of its samples contribute."""

    samples: int = 0  # 0: nothing was measured
    square: float = 0.0  # squared L2 norm of this part, not rescaled to its own number of samples


UNMEASURED = PartialGradient()


class NoiseScale:
    """A running estimate of B_simple, in samples, from the last `remembered` measured steps."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._found: deque[tuple[float, float]] = deque(maxlen=remembered)  # |true|^2 and tr, one pair per step

    def add(self, parts: Sequence[PartialGradient], *, samples: int, norm: float) -> None:
        """Learn from a step of `samples` samples with a gradient of L2 norm `norm`, and its ranks' measurements."""
        known = [part for part in parts if 0 < part.samples < samples and math.isfinite(part.square)]
        if not known:
            return
        weight = sum(part.samples for part in known)
        # the mean of a part is the part times samples / its samples; parts of more samples scatter less
        small = sum(part.square * samples**2 / part.samples for part in known) / weight
        inverse = len(known) / weight  # 1 / b of the parts, averaged with the same weights
        trace = (small - norm**2) / (inverse - 1 / samples)
        self._found.append((norm**2 - trace / samples, trace))

    @property
    def samples(self) -> float | None:
        """B_simple; None while too few steps were measured, or if noise hides the sign of one of the two."""
        if len(self._found) < _LEAST:
            return None
        true = sum(one for one, _ in self._found)
        trace = sum(one for _, one in self._found)
        return trace / true if true > 0 and trace > 0 else None
