"""A whole gradient whose verdict is still open, and what the verdict says of its counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetseq.cluster.membership.step_commit import Outcome
from hetseq.data.plan import StepPlan
from hetseq.errors import TaskError


@dataclass(frozen=True)
class HeldGradient:
    """The step whose gradient this rank holds, by which counts it was divided, and the learning rate of its update."""

    plan: StepPlan
    attempt: int
    counts: tuple[float, ...]
    rate: float


def with_late_counts(held: HeldGradient, outcome: Outcome, late: Mapping[int, int]) -> tuple[HeldGradient, float]:
    """With the true counts of these terms, and the factor by which the gradient changes: it was divided by the size.

    Raises TaskError, on all ranks alike, if the driver counted nothing for the loss.
    """
    counts, size = list(held.counts), held.plan.size
    for term, place in late.items():
        counts[term], counts[place] = outcome.sums[place], 0.0
    if 0 not in late:
        return replace(held, counts=tuple(counts)), 1.0
    if not counts[0] > 0:
        raise TaskError(
            f"step {held.plan.step}: step.backward counted {counts[0]:g} over all ranks: expected more than 0, as from"
            " count=len(y)"
        )
    return replace(held, counts=tuple(counts)), size / counts[0]
