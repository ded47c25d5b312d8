"""Step deadline: how long a rank may be silent in a step before the others count it as lost, from the last steps.

Pure. An epoch's first step may be slow for reasons of its own, such as files to open, so it is measured by others of
its kind.
"""

from __future__ import annotations

import statistics
from collections import deque

from hetseq.data.plan import StepPlan

FIRST_DEADLINE_S = 120.0  # until three steps were seen
_LEAST_DEADLINE_S = 5.0  # the end of a process is seen at once; this is for a process that hangs
_PATIENCE = 10  # times the expected time


class StepDeadline:
    """The deadlines of one rank. `fixed_s` is the user's own; with `compiles` any step may compile a kernel."""

    def __init__(self, fixed_s: float | None = None, *, compiles: bool = False) -> None:
        self._fixed_s, self._compiles = fixed_s, compiles
        self._recent: deque[tuple[float, int]] = deque(maxlen=21)  # seconds and samples of the last steps
        self._openings: deque[float] = deque(maxlen=3)  # seconds of the first steps of the last epochs

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take in how long a step took."""
        self._recent.append((seconds, plan.size))
        if plan.start == 0:
            self._openings.append(seconds)

    def of(self, plan: StepPlan) -> float:
        """Seconds that a rank may be silent in this step."""
        if self._fixed_s is not None:
            return self._fixed_s
        is_known = len(self._recent) >= 3 and not self._compiles
        least_s = _LEAST_DEADLINE_S if is_known else FIRST_DEADLINE_S
        if plan.start == 0:
            is_known = is_known and len(self._openings) == self._openings.maxlen
            least_s = max(_LEAST_DEADLINE_S, _PATIENCE * max(self._openings)) if is_known else FIRST_DEADLINE_S
        return max(least_s, _PATIENCE * self._expected_s(plan.size))

    def beside_steps(self, samples: int) -> float:
        """Seconds that a rank may be silent in work on so many samples between two steps."""
        return FIRST_DEADLINE_S + _PATIENCE * self._expected_s(samples)

    def _expected_s(self, samples: int) -> float:
        """Seconds of a step of `samples` samples, estimated from the last ones: at least as long as they took."""
        if not self._recent:
            return 0.0
        typical_s = statistics.median(seconds for seconds, _ in self._recent)
        return max(typical_s, samples * statistics.median(seconds / size for seconds, size in self._recent))
