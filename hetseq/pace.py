"""Moves the shares of coming steps by what all ranks have measured: `--balance auto`, and what it replaces.

Each rank learns its own cost from its own micro-batches and brings it to every commit. All ranks then see the same rows
and ask the same pure rules, so all have the same plan without a word more; the digest of the next commits would tell if
they had not. What is decided at the end of step k holds from step k + 2 on, because the data of step k + 1 have been
fetched by then.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetseq.balance import Balancer, CostMeter, complete_costs
from hetseq.capacity import Cost, assign_shares, balance_shares, slowed_by, step_seconds
from hetseq.commit import CommitRow, Measured
from hetseq.loader import StepLoader
from hetseq.plan import Assign, Planner, StepPlan
from hetseq.share import Part

logger = logging.getLogger(__name__)

LEAD = 2  # steps from a decision to the first step it holds for
_ADVICE_STEPS = 50  # between two looks at whether a rank holds the others up
_RECENT = 20  # steps over which presence is judged


@dataclass(frozen=True)
class Shift:
    """Other shares from step `first_step` on: samples by rank of a step as large as the last one, and its seconds."""

    first_step: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    before_s: float
    after_s: float


class Pace(Protocol):
    """Who gets how much of a step; every rank calls all of it, with the same rows."""

    meter: CostMeter  # of this rank

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        """Take in what this rank has just done; gives what a share costs it by now."""
        ...

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        """Change the shares of coming steps, or not."""
        ...

    def cost(self) -> Cost | None:
        """What a share costs this rank by now; None while that is not known."""
        ...

    def divide(self, total: int) -> tuple[int, ...]:
        """Shares of `total` samples outside training, in proportion to the speeds."""
        ...


class FixedPace:
    """`--balance equal` and fixed weights: costs are measured and shown, and change nothing."""

    def __init__(
        self,
        weights: Sequence[float],
        *,
        meter: CostMeter | None = None,
        micro_batch: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._weights, self.meter, self._micro_batch = tuple(weights), meter or CostMeter(), micro_batch

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        return learn(self.meter, part, overhead_s=overhead_s, micro_batch=self._micro_batch())

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        return None

    def cost(self) -> Cost | None:
        return self.meter.cost(self._micro_batch())

    def divide(self, total: int) -> tuple[int, ...]:
        return assign_shares(total, self._weights)


class MeasuredPace:
    """`--balance auto`: shares that give the shortest step by the costs of all ranks.

    `micro_batch` gives the most work that this rank does at once by now, None for a whole share. `meter` and `costs`,
    one by rank as far as they are known, are what an earlier generation has learned.
    """

    def __init__(
        self,
        planner: Planner,
        loader: StepLoader,
        *,
        rank: int,
        world_size: int,
        meter: CostMeter | None = None,
        costs: Sequence[Cost | None] = (),
        micro_batch: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._planner, self._loader, self._rank, self._world_size = planner, loader, rank, world_size
        self.meter, self._balancer, self._micro_batch = meter or CostMeter(), Balancer(world_size), micro_batch
        self._balancer.costs = complete_costs(costs)
        self._presence: list[deque[float]] = [deque(maxlen=_RECENT) for _ in range(world_size)]
        self._advised: set[int] = set()

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        return learn(self.meter, part, overhead_s=overhead_s, micro_batch=self._micro_batch())

    def cost(self) -> Cost | None:
        return self.meter.cost(self._micro_batch())

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        if self._world_size == 1:
            return None
        costs = [cost_of(row.measured) for row in rows]
        for rank, row in enumerate(rows):
            self._presence[rank].append(row.measured.overhead_s)
        work = self._planner.work(plan.epoch, plan.start, plan.stop)
        table = self._balancer.observe(work, costs)
        if plan.step % _ADVICE_STEPS == 0:
            self._advise(work, costs)
        if table is None:
            return None
        return self._shift(plan, work, table)

    def divide(self, total: int) -> tuple[int, ...]:
        costs = self._balancer.costs
        return assign_shares(total, [1 / cost.per_unit_s for cost in costs] if costs else (1.0,) * self._world_size)

    def _shift(self, plan: StepPlan, work: int, table: tuple[Cost, ...]) -> Shift:
        first, assign = plan.step + LEAD, assigner(table)
        shares = self._planner.assigner(first)(work), assign(work)
        self._planner.change(first, assign)
        self._loader.change(first, assign=assign)
        return Shift(first, *shares, *(step_seconds(each, table) for each in shares))

    def _advise(self, work: int, costs: Sequence[Cost | None]) -> None:
        """Say once of a rank that the run would be faster without it."""
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            return
        presence_s = [statistics.median(seconds) for seconds in self._presence]
        for rank, saved_s in slowed_by(work, known, presence_s):
            if rank not in self._advised:
                self._advised.add(rank)
                level = logging.WARNING if self._rank == 0 else logging.INFO  # all know the same
                logger.log(
                    level, "rank %d slows this run down: without it a step would be %.3f s shorter, since the rest are"
                    " done before it has updated its copy of the model; leave its device out (--devices)", rank, saved_s
                )  # fmt: skip


def learn(meter: CostMeter, part: Part, *, overhead_s: float, micro_batch: int | None) -> Cost | None:
    """Show a rank's part of a step to its meter; gives what a share costs by now. What weighs nothing tells nothing."""
    timed = [(work, seconds) for work, seconds in zip(part.work, part.seconds) if work]
    meter.observe([work for work, _ in timed], [seconds for _, seconds in timed], overhead_s=overhead_s)
    return meter.cost(micro_batch)


def assigner(costs: tuple[Cost, ...]) -> Assign:
    """Work -> the shares of the shortest step; remembered, since most steps weigh the same."""
    return functools.lru_cache(maxsize=64)(functools.partial(balance_shares, costs=costs))


def assigner_by(weights: tuple[float, ...]) -> Assign:
    """Work -> shares in proportion to fixed weights; remembered likewise."""
    return functools.lru_cache(maxsize=64)(functools.partial(assign_shares, weights=weights))


def cost_of(measured: Measured) -> Cost | None:
    """The cost in a rank's row; None as long as that rank does not know it."""
    return Cost(measured.fixed_s, measured.per_unit_s) if measured.is_known else None
