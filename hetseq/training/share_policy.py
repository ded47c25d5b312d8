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
from hetseq.balance.layout import Layout
from hetseq.balance.shares import TURN_STEPS, Cost, assign_shares, balance_shares, slowed_by, step_seconds
from hetseq.cluster.membership.step_commit import CommitRow, Measured
from hetseq.data.loader import StepLoader
from hetseq.data.plan import Assign, Planner, StepPlan
from hetseq.training.share import Part

logger = logging.getLogger(__name__)

NOTHING = Cost(0.0, 1.0, limit=0)  # of a group that computes nothing
LEAD = 2  # steps from a decision to the first step it holds for
_ADVICE_STEPS = 50  # between two looks at whether a rank holds the others up
_RECENT = 20  # steps over which presence is judged


@dataclass(frozen=True)
class Shift:
    """Other shares from step `first_step` on: samples by group of a step as large as the last one, and its seconds."""

    first_step: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    before_s: float
    after_s: float


class SharePolicy(Protocol):
    """Decides which data-parallel group gets how much of a step. None of its methods is collective, and none waits."""

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
        """Shares of `total` samples outside training, by speed: (groups,), equal on all ranks."""
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


class AlternatingShares(FixedShares):
    """`--balance 1,1/3,1`: several fixed weights in turn, `TURN_STEPS` steps each, so that one run compares them.

    The machine may be busier at times: steps that follow each other see the same of it, two runs do not.
    """

    def __init__(
        self,
        turns: Sequence[Sequence[float]],
        planner: Planner,
        loader: StepLoader,
        *,
        meter: CostMeter | None = None,
        at_once: Callable[[], AtOnce | None] = lambda: None,
    ) -> None:
        super().__init__(turns[0], meter=meter, at_once=at_once)
        self._turns, self._planner, self._loader = [tuple(weights) for weights in turns], planner, loader

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        first = plan.step + LEAD
        if turn_of(first, self._turns) is not turn_of(first - 1, self._turns):
            assign = assigner_by(turn_of(first, self._turns))
            self._planner.change(first, assign)
            self._loader.change(first, assign=assign)
        return None


class MeasuredShares:
    """`--balance auto`: shares that give the shortest step by the costs of all data-parallel groups of `layout`.

    A group's cost is that of its leader. `at_once` gives the most work that this rank does at once by now, None for a
    whole share. `meter` and `costs`, one by group as far as they are known, are what an earlier generation has learned.
    """

    def __init__(
        self,
        planner: Planner,
        loader: StepLoader,
        *,
        rank: int,
        layout: Layout,
        meter: CostMeter | None = None,
        costs: Sequence[Cost | None] = (),
        at_once: Callable[[], AtOnce | None] = lambda: None,
    ) -> None:
        self._planner, self._loader, self._rank, self._layout = planner, loader, rank, layout
        self.meter, self._at_once = meter or CostMeter(), at_once
        everyone = layout.busy
        # groups that divide work among themselves: all, or those that read the same shard
        self._pools = (everyone,) if planner.shards is None else planner.shards.readers
        self._balancers = [Balancer(len(pool)) for pool in self._pools]
        if (table := complete_costs(costs)) is not None:
            for pool, balancer in zip(self._pools, self._balancers):
                balancer.costs = tuple(table[group] for group in pool)
        self._presence: list[deque[float]] = [deque(maxlen=_RECENT) for _ in layout.groups]
        self._advised: set[int] = set()

    def learn(self, part: Part, *, overhead_s: float) -> Cost | None:
        return learn(self.meter, part, overhead_s=overhead_s, at_once=self._at_once())

    def cost(self) -> Cost | None:
        return self.meter.cost(self._at_once())

    def follow(self, plan: StepPlan, rows: Sequence[CommitRow]) -> Shift | None:
        if len(self._layout.busy) == 1:
            return None
        measured = [row.measured for row in self._layout.of_leaders(rows)]  # (groups,)
        costs = [one.cost for one in measured]
        for group, one in enumerate(measured):
            self._presence[group].append(one.overhead_s)
        works, ratios = self._planner.works(plan), self._ratios(plan, measured)
        has_moved = [self._observe(number, work, costs, ratios) for number, work in enumerate(works)]
        if plan.step % _ADVICE_STEPS == 0:
            for work, pool in zip(works, self._pools):
                self._advise(work, pool, [costs[group] for group in pool])
        return self._shift(plan, costs) if any(has_moved) else None

    def divide(self, total: int) -> tuple[int, ...]:
        count = len(self._layout.groups)
        known = {group: cost for balancer, pool in self._balanced() for group, cost in zip(pool, balancer.costs or ())}
        if len(known) < len(self._layout.busy):
            return assign_shares(total, [float(group in self._layout.busy) for group in range(count)])
        return assign_shares(total, [1 / known[group].slope_s if group in known else 0.0 for group in range(count)])

    def _balanced(self) -> Iterator[tuple[Balancer, tuple[int, ...]]]:
        return zip(self._balancers, self._pools)

    def _ratios(self, plan: StepPlan, measured: Sequence[Measured]) -> list[float | None]:
        """How many times as long as its cost says each group was busy in a step; None where it did nothing."""
        shares = self._planner.divide(plan, self._planner.assigner(plan.step))
        return [
            (one.compute_s + one.data_s + one.overhead_s) / one.cost.seconds(share) if one.cost and share else None
            for one, share in zip(measured, shares)
        ]

    def _observe(self, number: int, work: int, costs: Sequence[Cost | None], ratios: Sequence[float | None]) -> bool:
        """Whether a pool of groups is to have other shares; a group alone has what there is."""
        balancer, pool = self._balancers[number], self._pools[number]
        own = [costs[group] for group in pool]
        if len(own) == 1:
            balancer.costs = complete_costs(own)
            return False
        return work > 0 and balancer.observe(work, own, ratios=[ratios[group] for group in pool]) is not None

    def _tables(self, costs: Sequence[Cost | None]) -> tuple[list[Cost], list[Cost]]:
        """Adopted costs, the same one for groups whose shares are still equal; and as shares follow from them."""
        table = list(complete_costs(costs) or ())
        fitted = list(table)
        for balancer, pool in self._balanced():
            mean = complete_costs([*(table[group] for group in pool), None])
            for place, group in enumerate(pool):
                table[group] = balancer.costs[place] if balancer.costs else mean[-1] if mean else table[group]
                fitted[group] = balancer.fitted[place] if balancer.fitted else table[group]
        for group in self._layout.idle:
            table[group] = fitted[group] = NOTHING
        return table, fitted

    def _shift(self, plan: StepPlan, costs: Sequence[Cost | None]) -> Shift:
        first, (table, fitted) = plan.step + LEAD, self._tables(costs)
        assign, noise = assigner(tuple(fitted)), max(balancer.noise for balancer in self._balancers)
        shares = [self._planner.divide(plan, each) for each in (self._planner.assigner(first), assign)]
        self._planner.change(first, assign)
        self._loader.change(first, assign=assign)
        return Shift(first, shares[0], shares[1], *(step_seconds(each, table, noise) for each in shares))

    def _advise(self, work: int, pool: Sequence[int], costs: Sequence[Cost | None]) -> None:
        """Say once of a group, by its leader, that those with whom it shares work would be faster without it."""
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs) or len(costs) == 1:
            return
        presence_s = [statistics.median(self._presence[group]) for group in pool]
        for place, saved_s in slowed_by(work, known, presence_s):
            rank = self._layout.leader_of(pool[place])
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


def turn_of(step: int, turns: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The weights that hold in a step; steps are counted from 1."""
    return turns[(step - 1) // TURN_STEPS % len(turns)]


def assigner(costs: tuple[Cost, ...]) -> Assign:
    """Work -> the shares of the shortest step, among all or some; remembered, since most steps weigh the same."""

    @functools.lru_cache(maxsize=64)
    def assign(work: int, among: tuple[int, ...] | None = None, /) -> tuple[int, ...]:
        return balance_shares(work, costs if among is None else [costs[group] for group in among])

    return assign


def assigner_by(weights: tuple[float, ...]) -> Assign:
    """Work -> shares in proportion to fixed weights, or equal ones for ranks that have none; remembered likewise."""

    @functools.lru_cache(maxsize=64)
    def assign(work: int, among: tuple[int, ...] | None = None, /) -> tuple[int, ...]:
        chosen = weights if among is None else tuple(weights[group] for group in among)
        return assign_shares(work, chosen if among is None or any(chosen) else (1.0,) * len(chosen))

    return assign
