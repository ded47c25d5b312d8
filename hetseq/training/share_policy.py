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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetseq.balance.cost_meter import AtOnce, Balancer, CostMeter, complete_costs
from hetseq.balance.shares import Cost, assign_shares, balance_shares, slowed_by, step_seconds
from hetseq.cluster.membership.step_commit import CommitRow
from hetseq.data.loader import StepLoader
from hetseq.data.plan import Assign, Planner, StepPlan
from hetseq.training.share import Part

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


class SharePolicy(Protocol):
    """Decides which rank gets how much of a step. None of its methods is collective, and none waits."""

    meter: CostMeter  # of this rank

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        """Take in what this rank has just done; gives what a share costs it by now. Every rank calls it in each step.

        `overhead_s` are the seconds of the step in which this rank neither computed nor waited for other ranks.
        """
        ...

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        """Change the shares of coming steps, or not; gives the change. Every rank calls it after each commit.

        `rows`, one for each rank in rank order, are those of the commit of `plan`. All ranks have the same rows, so
        all make the same change; None for none.
        """
        ...

    def cost(self) -> Cost | None:
        """What a share costs this rank by now; None while that is not known. Any rank, alone."""
        ...

    def divide(self, total: int) -> tuple[int, ...]:
        """Shares of `total` samples outside training, by speed: (world_size,), equal on all ranks."""
        ...


class FixedShares:
    """`--balance equal` and fixed weights: costs are measured and shown, and change nothing."""

    def __init__(
        self,
        weights: Sequence[float],
        *,
        meter: CostMeter | None = None,
        at_once: Callable[[], AtOnce | None] = lambda: None,
    ) -> None:
        self._weights, self.meter, self._at_once = tuple(weights), meter or CostMeter(), at_once

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        return learn(self.meter, part, overhead_s=overhead_s, at_once=self._at_once())

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        return None

    def cost(self) -> Cost | None:
        return self.meter.cost(self._at_once())

    def divide(self, total: int) -> tuple[int, ...]:
        return assign_shares(total, self._weights)


class MeasuredShares:
    """`--balance auto`: shares that give the shortest step by the costs of all ranks.

    `at_once` gives the most work that this rank does at once by now, None for a whole share. `meter` and `costs`,
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
        at_once: Callable[[], AtOnce | None] = lambda: None,
    ) -> None:
        self._planner, self._loader, self._rank, self._world_size = planner, loader, rank, world_size
        self.meter, self._at_once = meter or CostMeter(), at_once
        # who divides work among themselves: all ranks, or those that read the same shard
        self._groups = (tuple(range(world_size)),) if planner.shards is None else planner.shards.groups
        self._balancers = [Balancer(len(ranks)) for ranks in self._groups]
        if (table := complete_costs(costs)) is not None:
            for ranks, balancer in zip(self._groups, self._balancers):
                balancer.costs = tuple(table[rank] for rank in ranks)
        self._presence: list[deque[float]] = [deque(maxlen=_RECENT) for _ in range(world_size)]
        self._advised: set[int] = set()

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        return learn(self.meter, part, overhead_s=overhead_s, at_once=self._at_once())

    def cost(self) -> Cost | None:
        return self.meter.cost(self._at_once())

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        if self._world_size == 1:
            return None
        costs = [row.measured.cost for row in rows]
        for rank, row in enumerate(rows):
            self._presence[rank].append(row.measured.overhead_s)
        works = self._planner.works(plan)
        has_moved = [self._observe(number, work, costs) for number, work in enumerate(works)]
        if plan.step % _ADVICE_STEPS == 0:
            for work, ranks in zip(works, self._groups):
                self._advise(work, ranks, [costs[rank] for rank in ranks])
        return self._shift(plan, costs) if any(has_moved) else None

    def divide(self, total: int) -> tuple[int, ...]:
        known = {rank: cost for balancer, ranks in self._balanced() for rank, cost in zip(ranks, balancer.costs or ())}
        if len(known) < self._world_size:
            return assign_shares(total, (1.0,) * self._world_size)
        return assign_shares(total, [1 / known[rank].slope_s for rank in range(self._world_size)])

    def _balanced(self) -> Iterator[tuple[Balancer, tuple[int, ...]]]:
        return zip(self._balancers, self._groups)

    def _observe(self, number: int, work: int, costs: Sequence[Cost | None]) -> bool:
        """Whether a group of ranks is to have other shares; a rank alone has what there is."""
        balancer, own = self._balancers[number], [costs[rank] for rank in self._groups[number]]
        if len(own) == 1:
            balancer.costs = complete_costs(own)
            return False
        return work > 0 and balancer.observe(work, own) is not None

    def _table(self, costs: Sequence[Cost | None]) -> tuple[Cost, ...]:
        """What shares follow from now on: adopted costs, and the same cost for ranks whose shares are still equal."""
        table = list(complete_costs(costs) or ())
        for balancer, ranks in self._balanced():
            mean = complete_costs([*(table[rank] for rank in ranks), None])
            for place, rank in enumerate(ranks):
                table[rank] = balancer.costs[place] if balancer.costs else mean[-1] if mean else table[rank]
        return tuple(table)

    def _shift(self, plan: StepPlan, costs: Sequence[Cost | None]) -> Shift:
        first, table = plan.step + LEAD, self._table(costs)
        assign = assigner(table)
        shares = [self._planner.divide(plan, each) for each in (self._planner.assigner(first), assign)]
        self._planner.change(first, assign)
        self._loader.change(first, assign=assign)
        return Shift(first, shares[0], shares[1], *(step_seconds(each, table) for each in shares))

    def _advise(self, work: int, ranks: Sequence[int], costs: Sequence[Cost | None]) -> None:
        """Say once of a rank that those with whom it shares work would be faster without it."""
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs) or len(costs) == 1:
            return
        presence_s = [statistics.median(self._presence[rank]) for rank in ranks]
        for place, saved_s in slowed_by(work, known, presence_s):
            rank = ranks[place]
            if rank not in self._advised:
                self._advised.add(rank)
                level = logging.WARNING if self._rank == 0 else logging.INFO  # all know the same
                logger.log(
                    level, "rank %d slows this run down: without it a step would be %.3f s shorter, since the rest are"
                    " done before it has updated its copy of the model; leave its device out (--devices)", rank, saved_s
                )  # fmt: skip


def learn(meter: CostMeter, part: Part, *, overhead_s: float, at_once: AtOnce | None) -> Cost | None:
    """Show a rank's part of a step to its meter; gives what a share costs by now. What weighs nothing tells nothing."""
    timed = [(work, seconds) for work, seconds in zip(part.work, part.seconds) if work]
    meter.observe([work for work, _ in timed], [seconds for _, seconds in timed], overhead_s=overhead_s)
    return meter.cost(at_once)


def assigner(costs: tuple[Cost, ...]) -> Assign:
    """Work -> the shares of the shortest step, among all or some; remembered, since most steps weigh the same."""

    @functools.lru_cache(maxsize=64)
    def assign(work: int, among: tuple[int, ...] | None = None, /) -> tuple[int, ...]:
        return balance_shares(work, costs if among is None else [costs[rank] for rank in among])

    return assign


def assigner_by(weights: tuple[float, ...]) -> Assign:
    """Work -> shares in proportion to fixed weights, or equal ones for ranks that have none; remembered likewise."""

    @functools.lru_cache(maxsize=64)
    def assign(work: int, among: tuple[int, ...] | None = None, /) -> tuple[int, ...]:
        chosen = weights if among is None else tuple(weights[rank] for rank in among)
        return assign_shares(work, chosen if among is None or any(chosen) else (1.0,) * len(chosen))

    return assign
