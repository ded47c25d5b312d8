"""Warnings about steps that are applied but not healthy: a loss that explodes or is not finite, a gradient of 0.

A gradient that is not finite is never applied, and the controller reports it. A loss can still be not finite, for
example in a masked or detached term. The checks use the rows of the commit, so they cost nothing and every rank gets
the same result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from hetseq.cluster.membership.step_commit import Verdict
from hetseq.errors import NonFiniteError
from hetseq.monitor.metrics import Metrics
from hetseq.training.step_engine import StepResult

logger = logging.getLogger(__name__)

_DIVERGED = 1e4  # times the first loss of a start; lr 1e30 gives 1e29 times, a bad minute of a good run 10 times
_REMEDY = "lower --lr, or look at the named samples and at parts of the loss that have no gradient"
_TOLD_AT_FIRST = 3  # then whenever their number has doubled


class StepWatch:
    """Watches the steps of one generation; every rank has one and passes it every step."""

    def __init__(
        self, terms: Sequence[str], metrics: Metrics, *, rank: int, most: int, group_of: Callable[[int], int],
        beside: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`beside`: terms that belong to no loss, such as counts that are sums."""
        self._beside = beside
        self._terms, self._metrics, self._most, self._group_of = terms, metrics, most, group_of
        self._level = logging.WARNING if rank == 0 else logging.INFO  # all ranks see the same steps
        self._seen = self._in_a_row = 0
        self._has_told_of_zero = self._has_told_of_growth = False
        self._first: tuple[int, float] | None = None  # step and loss

    def see(self, result: StepResult) -> None:
        """Warn about a step that is not healthy. Raises NonFiniteError after `most` steps in a row without a loss."""
        if result.outcome.verdict is not Verdict.APPLY:
            return
        if result.loss is None or not math.isfinite(result.loss):
            self._tell_of_loss(result)
        else:
            self._in_a_row = 0
            self._compare_with_first(result.plan.step, result.loss)
        if result.grad_norm == 0 and not self._has_told_of_zero:
            self._has_told_of_zero = True
            self._tell_of_zero(result)

    def _tell_of_loss(self, result: StepResult) -> None:
        self._seen += 1
        self._in_a_row += 1
        step, blamed = result.plan.step, self._not_finite(result)
        message = f"step {step}: the loss is not finite, though its gradient is and was applied; {blamed}"
        if self._seen <= _TOLD_AT_FIRST or self._seen & (self._seen - 1) == 0:
            self._metrics.event("loss_not_finite", step=step, what=blamed, steps=self._seen)
            logger.log(self._level, "%s: %s", message, _REMEDY)
        if self._in_a_row >= self._most:
            raise NonFiniteError(
                f"{message}. {self._in_a_row} steps in a row had such a loss (--max-skipped-steps): {_REMEDY}"
            )

    def _compare_with_first(self, step: int, loss: float) -> None:
        if self._first is None:
            self._first = step, loss
        elif abs(loss) > _DIVERGED * abs(self._first[1]) > 0 and not self._has_told_of_growth:
            self._has_told_of_growth = True
            logger.log(
                self._level,
                "step %d: the loss is %.4g, and was %.4g in step %d: training diverges; lower --lr, or raise"
                " --warmup-updates", step, loss, self._first[1], self._first[0],
            )  # fmt: skip

    def _tell_of_zero(self, result: StepResult) -> None:
        step = result.plan.step
        empty = [term for term, count in zip(self._terms, result.counts) if not count and term not in self._beside]
        why = f"; {', '.join(map(repr, empty))}: nothing was counted" if empty else ""
        self._metrics.event("gradient_zero", step=step, terms_without_count=empty)
        logger.log(
            self._level,
            "step %d: the gradient is exactly 0 on all ranks, so nothing was learned%s; if that was not meant, look for"
            " the place that cuts the loss off from the parameters: detach, no_grad, a count of 0", step, why,
        )  # fmt: skip

    def _not_finite(self, result: StepResult) -> str:
        """Which ranks produced it, in which terms and with which samples."""
        blamed = []
        for rank, row in enumerate(result.outcome.rows):
            bad = [repr(term) for term, value in zip(self._terms, row.sums) if not math.isfinite(value)]
            if bad:
                start, stop = result.plan.range_of(self._group_of(rank))
                positions = f"positions {start} to {stop - 1} of epoch {result.plan.epoch}"
                blamed.append(f"rank {rank} produced it (loss term {', '.join(bad)}; {positions})")
        return "; ".join(blamed) or "the sum over the ranks overflowed"
