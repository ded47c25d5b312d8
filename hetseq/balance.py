"""From how long micro-batches took to which costs the shares of a step are computed from; pure, and knows no clock.

A rank learns its own cost: a `CostMeter` is fed its micro-batches of every step and believes neither a single slow
step nor the first micro-batches of a start. Shares hardly vary once they fit, and no line can be fitted to times of
equal sizes. So the meter keeps two numbers, seconds per micro-batch and seconds per unit, and how sure it is of each:
sizes that differ teach both, equal sizes only scale them together. That is a Kalman filter with two numbers.

Which costs count is decided by all ranks alike: a `Balancer` on every rank is fed the same gathered rows, so all adopt
the same table in the same step without a word between them. It changes shares only for a gain it can be sure of.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetseq.capacity import Cost, balance_shares, step_seconds

WARM_UP = 3  # micro-batches after a start: caches, allocators and kernels are being set up
NOISE = 0.05  # of a step's time, until it has been measured
LEAST_NOISE = 0.01
ODD = 0.22  # a step that is off by more than this, and by more than ODD_DEVIATIONS of the noise, is not noise
ODD_DEVIATIONS = 4.0
JUMP_DOUBT = 0.15  # how sure the meter is of a speed that it has just come to believe
DRIFT = 0.0005  # how much a machine's speed wanders in a step: old steps count less and less
VARIED = 1.5  # sizes that differ by this factor tell the fixed part of the time from the part per unit
WITHIN_STEP_NOISE = 0.03  # of one micro-batch against the others of its step, which share most of their noise
NOT_WORTH_IT = 0.0075
WORTH_IT = 0.06
EAGER = 0.01
CALMING = 0.98
AT_ONCE=0.1
TRIAL_STEPS = 50
MOST_PATIENCE = 800
TRIAL_STEPS_PER_LOST_STEP = 100
LEAST_PER_UNIT = 0.1  # of the time of a micro-batch goes with its size: believing less would give such a rank all work


@dataclass(frozen=True)
class _Line:
    """seconds = fixed_s * micro-batches + per_unit_s * units, and how well both numbers are known.

    The last three fields are the covariance of the two numbers.
    """

    fixed_s: float
    per_unit_s: float
    fixed_variance: float
    covariance: float
    per_unit_variance: float

    def seconds(self, batches: float, units: float) -> float:
        return self.fixed_s * batches + self.per_unit_s * units

    def variance(self, batches: float, units: float) -> float:
        """Of the seconds predicted for these."""
        return (
            self.fixed_variance * batches**2 + 2 * self.covariance * batches * units + self.per_unit_variance * units**2
        )

    def corrected(self, batches: float, units: float, seconds: float, noise_variance: float) -> _Line:
        """This line after a measurement: each number moves as far as its doubt allows."""
        to_fixed = self.fixed_variance * batches + self.covariance * units
        to_unit = self.covariance * batches + self.per_unit_variance * units
        whole = to_fixed * batches + to_unit * units + noise_variance
        error = (seconds - self.seconds(batches, units)) / whole
        return _Line(
            self.fixed_s + to_fixed * error,
            self.per_unit_s + to_unit * error,
            self.fixed_variance - to_fixed * to_fixed / whole,
            self.covariance - to_fixed * to_unit / whole,
            self.per_unit_variance - to_unit * to_unit / whole,
        )

    def scaled(self, factor: float, *, doubt: float) -> _Line:
        """The same shape at another speed, of which this is certain but for the fraction `doubt`."""
        fixed_s, per_unit_s, square = self.fixed_s * factor, self.per_unit_s * factor, factor * factor
        return _Line(
            fixed_s,
            per_unit_s,
            self.fixed_variance * square + (doubt * fixed_s) ** 2,
            self.covariance * square + doubt**2 * fixed_s * per_unit_s,
            self.per_unit_variance * square + (doubt * per_unit_s) ** 2,
        )

    def possible(self, units: float) -> _Line:
        """This line, or the nearest that a machine can have: neither number negative, some time for the size."""
        if self.fixed_s < 0:
            per_unit_s = self.per_unit_s - self.fixed_s * self.covariance / self.fixed_variance
            return replace(self, fixed_s=0.0, per_unit_s=per_unit_s)
        whole = self.fixed_s + self.per_unit_s * units
        if self.per_unit_s * units < LEAST_PER_UNIT * whole:
            return replace(self, fixed_s=whole * (1 - LEAST_PER_UNIT), per_unit_s=whole * LEAST_PER_UNIT / units)
        return self


class CostMeter:
    """One rank's own cost, learned from how long its own micro-batches took. Local to the rank."""

    def __init__(self) -> None:
        self.steps_since_jump = 0
        self._line: _Line | None = None
        self._is_warm = False  # the line rests on more than the first micro-batches
        self._micro_batches = 0
        self._noise = NOISE
        self._last_error = 0.0
        self._noise_steps = 0
        self._shift = 0.0  # by how much recent steps were slower than predicted, as a fraction
        self._before: _Line | None = None  # the line before the last jump
        self._odd: float | None = None  # how many times slower than predicted the last step was, if it was odd
        self._units = 0  # of the last step that had any
        self._overheads: deque[float] = deque(maxlen=9)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float], *, overhead_s: float) -> None:
        """Take in one step: units and seconds of each micro-batch in order, if any, and the seconds outside of them.

        Raises ValueError for sizes below 1, for seconds that are negative or not finite, and for lists of unequal
        length.
        """
        if len(sizes) != len(seconds) or any(size < 1 for size in sizes):
            raise ValueError(f"sizes {list(sizes)}, seconds {list(seconds)}: expected a time for each size, 1 or more")
        if any(not 0 <= time < math.inf for time in (*seconds, overhead_s)):
            raise ValueError(f"seconds {list(seconds)}, overhead {overhead_s}: expected 0 or more, and finite")
        self._observe_overhead(overhead_s, sum(seconds))
        warming_up = max(0, WARM_UP - self._micro_batches)
        self._micro_batches += len(sizes)
        self._units = sum(sizes) or self._units
        measured = list(zip(sizes, seconds))
        believed = measured[warming_up:]
        if sum(seconds) > 0:
            self._observe_compute(believed or measured, is_warm=bool(believed))

    def cost(self, micro_batch: int | None = None) -> Cost | None:
        """What this rank needs for its share of a step, as far as is known; None until something was measured.

        `micro_batch` is the most units that one forward takes; None: the whole share.
        """
        if self._line is None:
            return None
        fixed_s, per_unit_s = self._line.fixed_s, self._line.per_unit_s
        if not micro_batch or self._units <= micro_batch:
            return Cost(self.overhead_s + fixed_s, per_unit_s)
        # A straight line for stairs, right where the rank is now: so many fixed parts, and one more each micro-batch.
        stairs = -(-self._units // micro_batch) - self._units / micro_batch
        return Cost(self.overhead_s + fixed_s * stairs, per_unit_s + fixed_s / micro_batch)

    @property
    def overhead_s(self) -> float:
        """How long this rank is busy in a step outside its micro-batches: the median of recent steps."""
        return sorted(self._overheads)[(len(self._overheads) - 1) // 2] if self._overheads else 0.0

    def _observe_overhead(self, overhead_s: float, compute_s: float) -> None:
        bound = (1 + ODD) * self.overhead_s + ODD / 5 * compute_s
        self._overheads.append(overhead_s)
        if len(self._overheads) > 2 and min(self._overheads[-1], self._overheads[-2]) > bound:
            self._overheads = deque([self._overheads[-2], self._overheads[-1]], maxlen=self._overheads.maxlen)

    def _observe_compute(self, measured: list[tuple[int, float]], *, is_warm: bool) -> None:
        if self._line is None or (is_warm and not self._is_warm):
            self._line, self._is_warm = _first_line(measured), is_warm
            self._learn_shape(measured)
            return
        batches, units = len(measured), sum(size for size, _ in measured)
        seconds = sum(time for _, time in measured)
        self.steps_since_jump += 1
        line = self._line.scaled(1, doubt=DRIFT)
        ratio = seconds / line.seconds(batches, units)
        doubt = line.variance(batches, units) / line.seconds(batches, units) ** 2
        odd = max(ODD, ODD_DEVIATIONS * math.sqrt(doubt + self._noise**2))
        self._learn_noise(ratio - 1)
        if ratio > 1 + odd and self._odd is None:
            self._odd = ratio
            return
        if not 1 - odd < ratio < 1 + odd:
            # Nothing makes a single step faster by chance, so that is believed at once. Slower must be seen twice.
            before, self._before = self._before, line
            if before and abs(seconds / before.seconds(batches, units) - 1) < ODD:
                line = before  # it was two slow steps, not a slow machine
            else:
                line = line.scaled(min(ratio, self._odd or ratio), doubt=JUMP_DOUBT)
            self.steps_since_jump, self._shift = 0, 0.0
        else:
            self._shift += 0.25 * (ratio - 1 - self._shift)
            if abs(self._shift) > 4.5 * self._noise * math.sqrt(0.25 / 1.75):
                line = line.scaled(1, doubt=abs(self._shift))
                self._shift = 0.0
        self._odd = None
        predicted = line.seconds(batches, units)
        line = line.corrected(batches, units, seconds, (self._noise * predicted) ** 2)
        self._line = line.possible(units / batches)
        self._learn_shape(measured)

    def _learn_noise(self, error: float) -> None:
        """From the difference to the step before, because a speed that has changed is no noise."""
        error = max(-3 * self._noise, min(error, 3 * self._noise))
        square = (error - self._last_error) ** 2 / 2
        self._last_error = error
        self._noise_steps += 1
        rate = max(0.05, 1 / (8 + self._noise_steps))
        self._noise = max(LEAST_NOISE, math.sqrt(self._noise**2 + rate * (square - self._noise**2)))

    def _learn_shape(self, measured: list[tuple[int, float]]) -> None:
        """Compare the micro-batches of one step, if their sizes differ: what they have in common cancels."""
        assert self._line is not None
        sizes = [size for size, _ in measured]
        if max(sizes) < VARIED * min(sizes):
            return
        line = self._line
        batches, units = len(sizes), sum(sizes)
        times = []
        for size, _ in measured:  # a smaller one cannot take longer than a larger one
            times.append(min(time for other, time in measured if other >= size))
        seconds = sum(times)
        for size, time in zip(sizes, times):
            expected = self._line.seconds(1, size)
            part = expected / self._line.seconds(batches, units)
            line = line.corrected(
                1 - part * batches, size - part * units, time - part * seconds, (WITHIN_STEP_NOISE * expected) ** 2
            )
        self._line = line.possible(units / batches)


def _first_line(measured: list[tuple[int, float]]) -> _Line:
    """Proportional to the size, and open to a fixed part of up to the time of a micro-batch."""
    units, seconds = sum(size for size, _ in measured), sum(time for _, time in measured)
    per_unit_s, usual_s = seconds / units, seconds / len(measured)
    line = _Line(
        0.0,
        per_unit_s,
        usual_s**2 / 4,
        -(usual_s**2) / 4 * len(measured) / units,
        (usual_s * len(measured) / units) ** 2 / 4,
    )
    return line.scaled(1, doubt=NOISE)


class Balancer:
    """Which costs the shares of coming steps are computed from; the same on every rank, since all feed it the same.

    `costs` is the adopted table, one per rank; None: nothing is known, and shares are equal. The first table is adopted
    at once. After that what other shares would have gained adds up, but for a percent a step that nobody can be sure
    of, and a new table is adopted when enough was missed: in one step if a tenth could be gained, in some ten if it is
    two in a hundred. The first tables rest on a step or two and are replaced for less; shares that have just changed
    need more.
    """

    def __init__(self, world_size: int) -> None:
        self.costs: tuple[Cost, ...] | None = None
        self._world_size = world_size
        self._observations = 0
        self._missed = 0.0  # of a step, since the table changed
        self._unrest = 0.0  # changes of late
        self._trials = _Trials(world_size)

    def observe(self, total: int, costs: Sequence[Cost | None]) -> tuple[Cost, ...] | None:
        """Take in the costs of all ranks; the new table if one is to be adopted from now on, else None.

        `total` is the size of the step just done. A rank without a cost counts as the mean of the others. Raises
        ValueError if the limits hold fewer units than that.
        """
        newest = _complete(costs)
        if newest is None:
            return None
        if self.costs is None or self._trials.is_on or self._is_worth_it(total, self.costs, newest):
            self._missed, self._unrest = 0.0, self._unrest + (not self._trials.is_on)
            self._trials.is_on = False
            self.costs = newest
            return newest
        trial = self._trials.next(total, newest, balance_shares(total, self.costs))
        self.costs = trial or self.costs
        return trial

    def shares(self, total: int) -> tuple[int, ...]:
        """Shares of a step of so many units by the adopted table; equal ones while there is none."""
        if self.costs is None:
            return balance_shares(total, [Cost(0.0, 1.0)] * self._world_size)
        return balance_shares(total, self.costs)

    def _is_worth_it(self, total: int, adopted: Sequence[Cost], newest: Sequence[Cost]) -> bool:
        shares = balance_shares(total, adopted)
        if any(cost.limit is not None and share > cost.limit for share, cost in zip(shares, newest)):
            return True
        now_s = step_seconds(shares, newest)
        gain = 1 - step_seconds(balance_shares(total, newest), newest) / now_s if now_s else 0.0
        self._observations += 1
        self._unrest *= CALMING
        self._missed = max(0.0, self._missed + gain - NOT_WORTH_IT)
        enough = min(EAGER * self._observations, WORTH_IT * (1 + self._unrest))
        return gain >= AT_ONCE or self._missed >= enough


class _Trials:
    """A road back for ranks that get nothing: rarely, and for one step, a small share that shows how fast they are."""

    def __init__(self, world_size: int) -> None:
        self.is_on = False
        self._idle_steps = [0] * world_size
        self._patience = [TRIAL_STEPS] * world_size

    def next(self, total: int, costs: Sequence[Cost], shares: Sequence[int]) -> tuple[Cost, ...] | None:
        """The costs, but one rank that has been idle for long gets a little of a step; None if it is nobody's turn."""
        little = max(1, total // (16 * len(costs)))
        step_s = step_seconds(shares, costs)
        for rank, share in enumerate(shares):
            self._idle_steps[rank] = 0 if share else self._idle_steps[rank] + 1
            if share:
                self._patience[rank] = TRIAL_STEPS
        for rank in sorted(range(len(costs)), key=lambda rank: (-self._idle_steps[rank], rank)):
            units = little if costs[rank].limit is None else min(little, costs[rank].limit or 0)
            if not units or not step_s:
                continue
            price = TRIAL_STEPS_PER_LOST_STEP * (costs[rank].seconds(units) / step_s - 1)
            if self._idle_steps[rank] >= max(self._patience[rank], price):
                self._idle_steps[rank] = 0
                self._patience[rank] = min(2 * self._patience[rank], MOST_PATIENCE)
                self.is_on = True
                cheap = Cost(0.0, step_s / (2 * units), units)
                return tuple(cheap if other == rank else cost for other, cost in enumerate(costs))
        return None


def _complete(costs: Sequence[Cost | None]) -> tuple[Cost, ...] | None:
    """The costs, with the mean of those known in place of those unknown; None if all are unknown."""
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    mean = Cost(
        math.fsum(cost.fixed_s for cost in known) / len(known),
        math.fsum(cost.per_unit_s for cost in known) / len(known),
    )
    return tuple(mean if cost is None else cost for cost in costs)
