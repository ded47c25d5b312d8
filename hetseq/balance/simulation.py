"""Predicts the step time of a cluster that need not exist: a model of ranks and links, and a simulated clock. Pure.

Responsible for the arithmetic behind `hetseq plan` and `hetseq simulate`: ranks with costs go in; shares, seconds and
efficiency come out. It knows no files, no runs and no torch; `commands.plan` supplies the costs and shows the result.

The one idea: in a step every rank computes its share, waits for the slowest, and then all exchange the gradient. So a
step takes the time of the slowest rank, plus the part of the exchange that computing does not hide. No machine is
equally fast in every step, and the slowest rank changes: the more ranks, the longer the slowest of a step takes. So a
rank may have its own noise, step by step as measured. A gradient of n bytes goes round a ring of W ranks in 2 (W - 1)
rounds, in each of which every rank sends n / W bytes over its own link; the slowest link sets the pace of a round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hetseq.balance.cost_meter import MEDIAN_GAP, AtOnce, Balancer, CostMeter
from hetseq.balance.shares import Cost, assign_shares, balance_shares, fit_to_noise

Seconds = npt.NDArray[np.float64]
_EXACT = 1e-12  # of a step's seconds


@dataclass(frozen=True)
class RankModel:
    """One rank: its cost in samples, the part of the fixed cost that it pays even without samples, and its noise.

    `noise` holds for each step its time over its usual time; the steps are the same for all ranks of the cluster,
    whose `noise` is as long. Empty: it always takes its usual time.
    """

    name: str
    cost: Cost
    overhead_s: float = 0.0
    noise: tuple[float, ...] = ()

    def busy_s(self, samples: int) -> float:
        """Its busy time in a step in which it takes this many samples."""
        return max(self.cost.seconds(samples), self.overhead_s)

    def own_per_s(self, samples: int) -> float:
        """Its speed with this share without waiting; without a share, its possible speed. 0: it can take none."""
        return samples / self.busy_s(samples) if samples else 0.0 if self.cost.limit == 0 else 1 / self.cost.slope_s

    def alone_per_s(self, total: int) -> float:
        """The samples per second that it would reach alone with a whole step of `total`; 0 if it can take none."""
        return 0.0 if self.cost.limit == 0 else total / self.busy_s(total)


@dataclass(frozen=True)
class Step:
    """A step of one cluster: the shares of the ranks, and where the time goes. All lists are by rank.

    `computing_s` is the mean busy time of the ranks, `waiting_s` the mean of their wait for the slowest,
    `communication_s` the time that the exchange adds; the three together are `step_s`.
    """

    shares: tuple[int, ...]
    computing_s: float
    waiting_s: float
    communication_s: float
    own_per_s: float  # the ranks' own speeds with these shares, summed: samples per second without waiting

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return self.computing_s + self.waiting_s + self.communication_s

    @property
    def samples_per_s(self) -> float:
        """The speed of the whole cluster."""
        return sum(self.shares) / self.step_s

    @property
    def efficiency(self) -> float:
        """The cluster's speed over the sum of its ranks' own speeds: 1 if no rank waits."""
        return self.samples_per_s / self.own_per_s


def predict(ranks: Sequence[RankModel], shares: Sequence[int], *, communication_s: float, scale: float = 1.0) -> Step:
    """The step of these ranks with these shares: the median over their noise; times are multiplied by `scale`."""
    busy = np.array([rank.busy_s(samples) for rank, samples in zip(ranks, shares, strict=True)])  # (ranks,)
    noise = np.ones((max(1, *(len(rank.noise) for rank in ranks)), len(ranks)))  # (steps, ranks)
    for at, rank in enumerate(ranks):
        if rank.noise:
            noise[:, at] = rank.noise
    slowest_s = float(np.median((busy * noise).max(axis=1)))
    computing_s = min(math.fsum(busy.tolist()) / len(busy), slowest_s)
    return Step(
        shares=tuple(shares),
        computing_s=scale * computing_s,
        waiting_s=scale * (slowest_s - computing_s),
        communication_s=scale * communication_s,
        own_per_s=math.fsum(rank.own_per_s(samples) for rank, samples in zip(ranks, shares)) / scale,
    )


def best_shares(ranks: Sequence[RankModel], total: int, unit: int = 1) -> tuple[int, ...]:
    """The shares of `total` samples with which the slowest rank finishes first, in steps as noisy as these ranks.

    The shares are dealt in pieces of `unit` samples; the last piece, on the last rank with any, may be smaller. Raises
    ValueError as the limits say.
    """
    costs = fit_to_noise([rank.cost for rank in ranks], _noise_beside_others(ranks))
    if unit == 1:
        return balance_shares(total, costs)
    pieces = -(-total // unit)
    shares = [count * unit for count in balance_shares(pieces, [_by_the_piece(cost, unit) for cost in costs])]
    shares[max(rank for rank, share in enumerate(shares) if share)] -= pieces * unit - total
    return tuple(shares)


def _noise_beside_others(ranks: Sequence[RankModel]) -> float:
    """The standard deviation of a rank's steps relative to the other ranks, as a fraction; 0 if unknown."""
    noisy = [rank.noise for rank in ranks if rank.noise and min(rank.noise) > 0]
    if len(noisy) < 2 or len(noisy[0]) < 2:
        return 0.0
    errors = np.log(noisy)  # (ranks, steps)
    gaps = np.abs(np.diff(errors - errors.mean(axis=0), axis=1))
    squares = (np.median(gaps, axis=1) / MEDIAN_GAP) ** 2  # (ranks,)
    return math.sqrt(float(squares.sum()) / (len(noisy) - 1))


def _by_the_piece(cost: Cost, unit: int) -> Cost:
    """The cost of pieces of `unit` samples, each computed by itself."""
    limit = None if cost.limit is None else cost.limit // unit
    return Cost(cost.fixed_s, cost.slope_s * unit, limit)


def ring_factor(world_size: int) -> float:
    """How many times a ring of `world_size` ranks sends the bytes of the gradient over each link: 2 (W - 1) / W."""
    return 2 * (world_size - 1) / world_size


@dataclass(frozen=True)
class Link:
    """The connection of one rank to the others: equal in both directions, and used by no other rank."""

    bytes_per_s: float
    latency_s: float = 0.0


def ring_seconds(links: Iterable[Link], world_size: int, gradient_bytes: float) -> float:
    """The time of an all-reduce of a gradient around a ring of `world_size` ranks that have these links."""
    piece = gradient_bytes / world_size
    slowest_s = max(piece / link.bytes_per_s + link.latency_s for link in links)
    return 2 * (world_size - 1) * slowest_s


@dataclass(frozen=True)
class RankGroup:
    """A number of equal ranks. With n samples one of them computes for fixed_s + n / samples_per_s seconds.

    Each micro-batch of at most `micro_batch` samples, None for any number, adds per_micro_batch_s. `count` is a
    multiple of `ranks_per_node`.
    """

    name: str
    count: int
    samples_per_s: float
    link: Link
    fixed_s: float = 0.0
    micro_batch: int | None = None
    per_micro_batch_s: float = 0.0
    ranks_per_node: int = 1

    def rank(self) -> RankModel:
        """One rank of the group; all of its fixed cost is paid with samples only."""
        if self.micro_batch is None:
            return RankModel(self.name, Cost(self.fixed_s + self.per_micro_batch_s, 1 / self.samples_per_s))
        cost = Cost(self.fixed_s, 1 / self.samples_per_s, None, self.per_micro_batch_s, self.micro_batch)
        return RankModel(self.name, cost)


@dataclass(frozen=True)
class Cluster:
    """Groups in the order of their ranks, and the size of the gradient that they exchange in every step."""

    groups: tuple[RankGroup, ...]
    gradient_bytes: float

    @property
    def world_size(self) -> int:
        """Ranks of all groups."""
        return sum(group.count for group in self.groups)

    @functools.cached_property
    def ranks(self) -> tuple[RankModel, ...]:
        """Every rank, in order."""
        return tuple(rank for group in self.groups for rank in (group.rank(),) * group.count)

    def communication_s(self) -> float:
        """The time of the exchange of one step, with nothing hidden behind computing."""
        return ring_seconds((group.link for group in self.groups), self.world_size, self.gradient_bytes)

    def without(self, name: str) -> Cluster:
        """The same cluster without the groups of that name."""
        return Cluster(tuple(group for group in self.groups if group.name != name), self.gradient_bytes)

    def left(self, counts: Sequence[int]) -> Cluster:
        """The same cluster with so many ranks of each group; without the groups that have none."""
        groups = tuple(replace(group, count=count) for group, count in zip(self.groups, counts, strict=True) if count)
        return Cluster(groups, self.gradient_bytes)

    def by_group(self, values: Sequence[int]) -> list[tuple[RankGroup, tuple[int, ...]]]:
        """Values by rank, such as shares, as values by group."""
        found, start = [], 0
        for group in self.groups:
            found.append((group, tuple(values[start : start + group.count])))
            start += group.count
        return found


@dataclass(frozen=True)
class Clock:
    """How long to simulate, and how much one machine varies from step to step.

    `noise` is the standard deviation of a rank's time divided by its mean, drawn for every rank and step. Equal
    clocks draw equal noise, so that two ways to share are compared on the same steps.
    """

    steps: int = 100
    noise: float = 0.0
    seed: int = 0

    def draws(self, world_size: int) -> Iterable[Seconds]:
        """For every step the factors of the ranks' times: (world_size,), above 0, with a mean of 1."""
        generator = np.random.default_rng(self.seed)
        # log-normal: never negative, and its long tail is on the slow side, as on real machines
        sigma = math.sqrt(math.log1p(self.noise**2))
        for _ in range(self.steps):
            yield np.exp(sigma * generator.standard_normal(world_size) - sigma**2 / 2)


def equal_shares(cluster: Cluster, total: int) -> tuple[int, ...]:
    """The shares from a program that does not know its machines."""
    return assign_shares(total, (1.0,) * cluster.world_size)


def best_step_s(groups: Sequence[RankGroup], total: int) -> float:
    """The time of the slowest rank with `best_shares`, by group and not by rank: quick for any number of ranks.

    It is the first moment at which all ranks together can have done `total` samples.
    """
    costs = [(group.rank().cost, group.count) for group in groups]
    early_s, late_s = 0.0, min(cost.seconds(-(-total // count)) for cost, count in costs)
    while late_s - early_s > _EXACT * late_s:
        middle_s = (early_s + late_s) / 2
        if sum(count * cost.units_by(middle_s, total) for cost, count in costs) >= total:
            late_s = middle_s
        else:
            early_s = middle_s
    return late_s


def run(cluster: Cluster, shares: Sequence[int], clock: Clock) -> Step:
    """The mean step of a run with these shares, by rank, in simulated time."""
    calm = np.array(
        [rank.busy_s(samples) for rank, samples in zip(cluster.ranks, shares, strict=True)]
    )  # (world_size,)
    computing_s = waiting_s = 0.0
    for draw in clock.draws(cluster.world_size):
        busy = calm * draw
        computing_s += float(busy.mean()) / clock.steps
        waiting_s += float(busy.max() - busy.mean()) / clock.steps
    own_per_s = math.fsum(rank.own_per_s(samples) for rank, samples in zip(cluster.ranks, shares))
    return Step(tuple(shares), computing_s, waiting_s, cluster.communication_s(), own_per_s)


def learn(cluster: Cluster, total: int, clock: Clock) -> tuple[int, ...]:
    """The shares that `--balance auto` reaches after the clock's steps, beginning with equal ones.

    Every rank computes its share in the fewest micro-batches; the time independent of them is measured separately.
    """
    balancer, meters = Balancer(cluster.world_size), [CostMeter() for _ in cluster.ranks]
    most = [AtOnce(rank.cost.batch) if rank.cost.batch else None for rank in cluster.ranks]
    shares = balancer.shares(total)
    for draw in clock.draws(cluster.world_size):
        factors = draw.tolist()
        for rank, meter, samples, factor in zip(cluster.ranks, meters, shares, factors):
            cost = rank.cost
            sizes = _micro_batches(samples, cost.batch)
            times_s = [(cost.per_batch_s + cost.per_unit_s * size) * factor for size in sizes]
            meter.observe(sizes, times_s, overhead_s=cost.fixed_s * factor)
        costs = [meter.cost(at_once) for meter, at_once in zip(meters, most)]
        ratios = [
            rank.cost.seconds(samples) * factor / cost.seconds(samples) if cost and samples else None
            for rank, cost, samples, factor in zip(cluster.ranks, costs, shares, factors)
        ]
        if balancer.observe(total, costs, ratios=ratios) is not None:
            shares = balancer.shares(total)
    return shares


def _micro_batches(samples: int, most: int | None) -> list[int]:
    """The sizes of the micro-batches of a share: all full but the last; empty for no samples."""
    size = most or max(1, samples)
    full, rest = divmod(samples, size)
    return [size] * full + [rest] * (rest > 0)
