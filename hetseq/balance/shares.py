"""Computes the integer shares of a step from the costs of the ranks: pure and exact.

A unit is a sample, a token or a fixed micro-batch; this module does not care which, nor how a cost was measured.
The shares of a step minimise the time of its slowest rank. Giving each unit in turn to the rank that would finish it
first does that exactly, because no rank gets faster by doing more; units whose rank is certain are assigned in bulk.
A rank that needs several micro-batches for its share has a cost with jumps: the first unit of one more micro-batch is
expensive, and a share ends before it if that is not worth it. With a cost proportional to the units, as for fixed
weights, this is the highest-averages method of D'Hondt. All ranks call this with the same numbers and get the same
shares.

On noisy machines the slowest rank changes from step to step, and the mean of the slowest times matters. A unit that
moves from a slow rank to a fast one shortens the time of the first by more than it lengthens the time of the second.
So slow ranks are planned to finish a little earlier: `fit_to_noise`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

TURN_STEPS = 10  # how long each of several fixed weights holds
NEGLIGIBLE_GAIN = 0.02  # of a step: less is not worth telling the user
NEGLIGIBLE_NOISE = 0.1  # standard deviation of a rank's steps: with 0.05, fitted shares of 4:1:1 would gain 1 %
MOST_NOISE = 0.6  # more is not noise


@dataclass(frozen=True)
class Cost:
    """The time of one rank for n units of a step, for 0 < n <= limit; without units it is 0.

    That is fixed_s + per_unit_s * n seconds, and per_batch_s for each micro-batch of at most `batch` units: all are
    full but the last. `batch` None: there are none, or their number is in the other seconds. `limit` is the most units
    it can take: None for any number, 0 for none. Raises ValueError for seconds that are negative or not finite, for
    units that cost nothing, for a negative limit, and for a `batch` below 1.
    """

    fixed_s: float
    per_unit_s: float
    limit: int | None = None
    per_batch_s: float = 0.0
    batch: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fixed_s < math.inf or not 0 < self.per_unit_s < math.inf:
            raise ValueError(f"{self}: expected finite seconds, fixed_s of 0 or more and per_unit_s above 0")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"{self}: expected a limit of 0 or more units, or None")
        if not 0 <= self.per_batch_s < math.inf or (self.batch is None and self.per_batch_s != 0):
            raise ValueError(f"{self}: expected per_batch_s finite and 0 or more, and 0 without batch")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"{self}: expected a batch of 1 or more units, or None")

    @property
    def slope_s(self) -> float:
        """The average cost of one more unit, with its part of a micro-batch."""
        return self.per_unit_s + self.per_batch_s / self.batch if self.batch else self.per_unit_s

    def seconds(self, units: int) -> float:
        """The time for `units` units, 0 for none. Ignores the limit."""
        if not units:
            return 0.0
        return self.fixed_s + self.per_unit_s * units + self.per_batch_s * self.batches(units)

    def batches(self, units: int) -> int:
        """The number of micro-batches in `units` units; 0 without `batch`."""
        return -(-units // self.batch) if self.batch else 0

    def units_by(self, now_s: float, most: int) -> int:
        """How many of `most` units it has done by then. Ignores the limit."""
        left_s = now_s - self.fixed_s
        if left_s <= 0:
            return 0
        if not self.batch:
            return int(min(most, left_s / self.per_unit_s))
        batch_s = self.per_batch_s + self.batch * self.per_unit_s
        if left_s / batch_s >= most:
            return most
        full, rest_s = divmod(left_s, batch_s)
        return min(most, int(full) * self.batch + int(max(0.0, rest_s - self.per_batch_s) / self.per_unit_s))

    def scaled(self, factor: float) -> Cost:
        """The cost on a machine that takes `factor` times as long for everything; limit and micro-batch stay."""
        return replace(
            self, fixed_s=self.fixed_s * factor, per_unit_s=self.per_unit_s * factor,
            per_batch_s=self.per_batch_s * factor,
        )  # fmt: skip

    def line(self, units: int) -> Cost:
        """This cost without jumps, as a line around `units`: within one micro-batch, or across many.

        Around 0 units it is the line around the first one.
        """
        if self.batch is None:
            return self
        units = max(1, units)
        if units <= self.batch and self.batch > 1:  # jumps at every unit are a line
            fixed_s, per_unit_s = self.fixed_s + self.per_batch_s, self.per_unit_s
        else:
            # not below 0, by rounding
            fixed_s, per_unit_s = max(0.0, self.seconds(units) - self.slope_s * units), self.slope_s
        return replace(self, fixed_s=fixed_s, per_unit_s=per_unit_s, per_batch_s=0.0, batch=None)


def assign_shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Integer shares of `total` samples in proportion to `weights`: those with the smallest max(share / weight).

    A rank of weight 0 gets nothing. Ties go to the lowest rank. Raises ValueError unless all weights are finite and
    some weight is above 0.
    """
    whole = sum(weights)
    if not 0 < whole < math.inf or min(weights) < 0:
        raise ValueError(f"weights {tuple(weights)}: expected finite weights of 0 or more, at least one above 0")
    shares = [int(total * weight / whole) for weight in weights]  # highest averages never gives less than the quota
    while sum(shares) > total:  # a quota that rounding lifted over an integer
        shares[max(range(len(shares)), key=lambda rank: (shares[rank] > 0, rank))] -= 1
    room = [total if weight > 0 else 0 for weight in weights]
    return _deal(total, shares, room, lambda rank, units: units / weights[rank])


def balance_shares(total: int, costs: Sequence[Cost]) -> tuple[int, ...]:
    """Integer shares of `total` units, one per rank, with the smallest `step_seconds`, exactly.

    No rank gets more than its limit; a rank that would only delay the others gets 0. Ties go to the lowest rank. The
    same floats give the same shares on every machine. Raises ValueError for a negative total, and when the limits
    together hold fewer units than that.
    """
    room = _room(total, costs)
    if total < 0 or sum(room) < total:
        raise ValueError(
            f"{total} units to share: expected 0 or more, and no more than the {max(0, sum(room))} "
            f"that {len(costs)} ranks can take within their limits"
        )
    start = _units_to_start_with(total, costs, room)
    return _deal(total, start, room, lambda rank, units: costs[rank].seconds(units))


def step_seconds(shares: Sequence[int], costs: Sequence[Cost], noise: float = 0.0) -> float:
    """The time of the slowest rank; ranks without units do not count. 0 if no rank has any.

    With `noise`, the standard deviation of a rank's time as a fraction, it is the mean slowest time of ranks that vary
    by it. It is exact up to a factor if times are Fréchet distributed, which resembles log-normal.
    """
    times_s = [cost.seconds(units) for units, cost in zip(shares, costs, strict=True)]
    slowest_s, shape = max(times_s, default=0.0), _frechet_shape(noise)
    if shape == math.inf or slowest_s == 0:
        return slowest_s
    return slowest_s * math.pow(math.fsum((time_s / slowest_s) ** shape for time_s in times_s), 1 / shape)


def fit_to_noise(costs: Sequence[Cost], noise: float) -> tuple[Cost, ...]:
    """Costs from which `balance_shares` makes the shares with the smallest `step_seconds` for that noise.

    There one more unit costs the same on every rank: time_s ** (shape - 1) * slope_s is equal. So is its root, which
    is a cost times a factor.
    """
    shape = _frechet_shape(noise)
    return tuple(costs if shape == math.inf else (cost.scaled(cost.slope_s ** (1 / (shape - 1))) for cost in costs))


def felt_noise(noise: float) -> float:
    """The noise that shares are fitted to: 0 while negligible, and continuous from there on."""
    return min(MOST_NOISE, math.sqrt(max(0.0, noise**2 - NEGLIGIBLE_NOISE**2)))


def _frechet_shape(noise: float) -> float:
    """The shape of the distribution whose logarithm has that standard deviation; infinite without noise."""
    felt = felt_noise(noise)
    return math.pi / math.sqrt(6) / felt if felt else math.inf


def slowed_by(total: int, costs: Sequence[Cost], presence_s: Sequence[float]) -> list[tuple[int, float]]:
    """The ranks without which a step of `total` units would be more than 2 % faster, and the wait for each.

    `presence_s` is how long each rank is busy in a step even without units: its copy of the optimizer's work, its data.
    A rank is named if it is busy for longer than the other ranks need for all the work; the seconds are
    how much longer. Lowest rank first. Raises ValueError as `balance_shares` does.
    """
    staying = list(range(len(costs)))
    before_s = step_s = _step_with(staying, total, costs, presence_s)
    for rank in sorted(staying, key=lambda rank: (-presence_s[rank], rank)):
        fewer = [other for other in staying if other != rank]
        if presence_s[rank] < step_s or not _can_take(total, [costs[other] for other in fewer]):
            break  # no rank waits for its presence, or the others cannot do without it
        staying, step_s = fewer, min(step_s, _step_with(fewer, total, costs, presence_s))
    late_s = [(rank, presence - step_s) for rank, presence in enumerate(presence_s)]
    return [(rank, late) for rank, late in late_s if late > NEGLIGIBLE_GAIN * before_s]


def _step_with(ranks: Sequence[int], total: int, costs: Sequence[Cost], presence_s: Sequence[float]) -> float:
    """The shortest step of these ranks, at least as long as the presence of each."""
    chosen = [costs[rank] for rank in ranks]
    return max(step_seconds(balance_shares(total, chosen), chosen), *(presence_s[rank] for rank in ranks))


def _can_take(total: int, costs: Sequence[Cost]) -> bool:
    return len(costs) > 0 and sum(_room(total, costs)) >= total


def _room(total: int, costs: Sequence[Cost]) -> list[int]:
    """The most units each rank can take; without a limit all of them. Shape (world_size,)."""
    return [total if cost.limit is None else cost.limit for cost in costs]


def _units_by(now_s: float, costs: Sequence[Cost], room: Sequence[int]) -> list[int]:
    """The units that each rank has done by then. Shape (world_size,)."""
    return [cost.units_by(now_s, most) for cost, most in zip(costs, room)]


def _units_to_start_with(total: int, costs: Sequence[Cost], room: Sequence[int]) -> list[int]:
    """Units that every rank certainly gets, leaving about one per rank to deal out. Shape (world_size,)."""
    early_s, late_s = 0.0, max((cost.seconds(min(most, total)) for cost, most in zip(costs, room)), default=0.0)
    done = 0
    for _ in range(100):  # bisection: about twenty are needed
        if total - done <= len(costs):
            break
        middle_s = (early_s + late_s) / 2
        done_then = sum(_units_by(middle_s, costs, room))
        if done_then <= total:
            early_s, done = middle_s, done_then
        else:
            late_s = middle_s
    # Slightly earlier, so that rounding cannot count a unit that another rank would have finished first.
    return _units_by(early_s * (1 - 2**-40), costs, room)


def _deal(
    total: int, start: Sequence[int], room: Sequence[int], done_s: Callable[[int, int], float]
) -> tuple[int, ...]:
    """Shares that add up: from `start`, each unit still missing goes to the rank with room that finishes it first.

    `done_s(rank, units)` is the time when a rank has done that many, and must not fall with their number.
    """
    shares = list(start)
    finish = [(done_s(rank, shares[rank] + 1), rank) for rank in range(len(shares)) if shares[rank] < room[rank]]
    heapq.heapify(finish)
    for _ in range(total - sum(shares)):
        _, rank = finish[0]
        shares[rank] += 1
        if shares[rank] < room[rank]:
            heapq.heapreplace(finish, (done_s(rank, shares[rank] + 1), rank))
        else:
            heapq.heappop(finish)
    return tuple(shares)
