"""Learns each rank's cost from measured micro-batch times, and decides which costs the shares are computed from. Pure.

A rank learns its own cost: a `CostMeter` observes its micro-batches in every step and trusts neither a single slow
step nor the first micro-batches of a start. Shares hardly vary once they fit, and no line can be fitted to times of
equal sizes. So the meter keeps two numbers, seconds per micro-batch and seconds per unit, with a variance for each:
sizes that differ separate them, equal sizes move both together. That is a Kalman filter with two numbers.

On a calm machine two slow steps mean that it has become slower. On a noisy one (`shares.NEGLIGIBLE_NOISE`) single steps
prove nothing, so the mean of recent steps decides. A slowdown is accepted only after it has lasted longer than a burst
of another program.

All ranks decide alike which costs apply: a `Balancer` on every rank observes the same gathered rows, so all adopt the
same table after the same step without further communication. It changes shares only for a gain that is certain.

The constants were chosen with the clusters of `tests/support/simulated.py`, where noise is 5 % and 3 % of all steps
take four times as long; `tests/unit/balance/test_balanced_runs.py` records how close a run comes to the best shares.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetseq.balance.shares import NEGLIGIBLE_NOISE, Cost, balance_shares, felt_noise, fit_to_noise, step_seconds

WARM_UP = 3  # micro-batches after a start, while caches, allocators and kernels are being set up
VARIED = 1.5  # sizes that differ by this factor tell the fixed part of the time from the part per unit
LEAST_SECONDS = 1e-9  # a step in less was not measured
LEAST_BY_SIZE = 0.1  # of a micro-batch's time grows with its size: a rank estimated below this would get all work

# Noise, as a fraction of a time
NOISE = 0.05  # of a step, until measured
LEAST_NOISE = 0.01
WITHIN_STEP_NOISE = 0.03  # of one micro-batch against the others of its step, which share most of their noise
NOISE_MEMORY_STEPS = 60
SHARES_NOISE_MEMORY_STEPS = 200  # shares follow from it, so it must not waver
LEAST_NOISE_STEPS = 5  # a slow moment among fewer would look like noise
NOISE_PRIOR_STEPS = 12  # weight of NOISE, in steps
MEDIAN_GAP = 0.954  # the median difference of two errors, by their standard deviation

# Limits beyond which a step is not noise
ODD = 0.25  # off by more than this,
ODD_DEVIATIONS = 4.0  # and by more than this many standard deviations
JUMP_DOUBT = 0.15  # of a speed that was just accepted
DISPUTED = 2.0  # times a speed that was just accepted: a step as slow as this is none that agrees with it
DRIFT = 0.0005  # how much a machine's speed drifts per step: old steps count less and less
SHIFT_MEMORY_STEPS = 4  # steps over which an error too small to be odd is averaged
SHIFT_DEVIATIONS = 4.5
OVERHEAD_STEPS = 9
BURST_S = 6.0  # other programs take the cores of a machine for 1 to 5 s: no slowdown is accepted earlier

# The same on a noisy machine
NOISY_SHIFT_MEMORY_STEPS = 8
SHIFT_OVER = 0.5  # of the error that begins a shift: less ends it
FASTER_STEPS = 16  # only noise makes a machine faster for a while: this many steps are enough
SURE_STEPS = 400  # a speed is never more certain than a mean of this many

# Gains that justify other shares, as fractions of a step
GAIN_AT_ONCE = 0.1
GAIN_IN_DOUBT = 0.0075  # even well-known costs promise this much by noise
MISSED = 0.06  # adopt once other shares would have gained this much
MISSED_EARLY = 0.01  # or this much per step observed so far: the first tables rest on a step or two
NOISE_MISSED = 1.0  # this fraction of noisy machines' noise is added to MISSED,
NOISE_AT_ONCE = 0.5  # and this fraction to GAIN_AT_ONCE
UNREST_MEMORY_STEPS = 50  # a change makes the next one more expensive for this long

# Trials for ranks that get nothing
TRIAL_STEPS = 50  # least distance between two trials; doubled after each failed one
MOST_TRIAL_STEPS = 800
TRIAL_PRICE = 0.01  # of all time may go into failed trials
TRIAL_PART = 1 / 16  # of an equal share,
TRIAL_STEP_PART = 0.5  # or work for half a step at the estimated speed


@dataclass(frozen=True)
class _Line:
    """seconds = fixed_s * micro-batches + per_unit_s * units, with the covariance of the two numbers."""

    fixed_s: float
    per_unit_s: float
    fixed_variance: float
    covariance: float
    per_unit_variance: float

    def is_sound(self) -> bool:
        """Whether a machine can have these numbers."""
        return self.fixed_s >= 0 and min(self.per_unit_s, self.fixed_variance, self.per_unit_variance) > 0

    def seconds(self, batches: float, units: float) -> float:
        return self.fixed_s * batches + self.per_unit_s * units

    def variance(self, batches: float, units: float) -> float:
        """The variance of the seconds predicted for these."""
        return (
            self.fixed_variance * batches**2 + 2 * self.covariance * batches * units + self.per_unit_variance * units**2
        )

    def corrected(self, batches: float, units: float, seconds: float, noise_s: float) -> _Line:
        """This line after a measurement: each number moves as far as its variance allows (a Kalman gain)."""
        to_fixed = self.fixed_variance * batches + self.covariance * units
        to_unit = self.covariance * batches + self.per_unit_variance * units
        whole = to_fixed * batches + to_unit * units + noise_s**2
        error = (seconds - self.seconds(batches, units)) / whole
        return _Line(
            self.fixed_s + to_fixed * error,
            self.per_unit_s + to_unit * error,
            self.fixed_variance - to_fixed * to_fixed / whole,
            self.covariance - to_fixed * to_unit / whole,
            self.per_unit_variance - to_unit * to_unit / whole,
        )

    def scaled(self, factor: float, *, doubt: float) -> _Line:
        """The same shape at another speed, with the fraction `doubt` as its uncertainty."""
        fixed_s, per_unit_s = self.fixed_s * factor, self.per_unit_s * factor
        return _Line(
            fixed_s,
            per_unit_s,
            self.fixed_variance * factor**2 + (doubt * fixed_s) ** 2,
            self.covariance * factor**2 + doubt**2 * fixed_s * per_unit_s,
            self.per_unit_variance * factor**2 + (doubt * per_unit_s) ** 2,
        )

    def possible(self, units: float) -> _Line:
        """This line, or the nearest possible one: no time below zero, and some time per unit."""
        if self.fixed_s < 0:
            slope = self.covariance / self.fixed_variance if self.fixed_variance > 0 else 0.0
            return replace(self, fixed_s=0.0, per_unit_s=self.per_unit_s - slope * self.fixed_s)
        whole_s = self.seconds(1, units)
        if self.per_unit_s * units < LEAST_BY_SIZE * whole_s:
            return replace(self, fixed_s=whole_s * (1 - LEAST_BY_SIZE), per_unit_s=whole_s * LEAST_BY_SIZE / units)
        return self


@dataclass(frozen=True)
class _Step:
    """Units and seconds of the micro-batches of one step, in order; at least one, and some time."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def batches(self) -> int:
        return len(self.sizes)

    @property
    def units(self) -> int:
        return sum(self.sizes)

    @property
    def seconds(self) -> float:
        return sum(self.times)

    def doubt(self, line: _Line) -> float:
        """The standard deviation of a line's prediction for this step, as a fraction."""
        deviation_s = math.sqrt(max(0.0, line.variance(self.batches, self.units)))
        return deviation_s / line.seconds(self.batches, self.units)

    def first_line(self) -> _Line:
        """Proportional to size, with a deviation of half a micro-batch's time for a fixed part."""
        deviation_s = self.seconds / self.batches / 2
        per_unit = self.batches / self.units  # a larger fixed part means a smaller part per unit: the sum is known
        proportional = _Line(
            0.0,
            self.seconds / self.units,
            deviation_s**2,
            -(deviation_s**2) * per_unit,
            (deviation_s * per_unit) ** 2,
        )
        return proportional.scaled(1, doubt=NOISE)

    def shape(self, line: _Line) -> _Line:
        """The line after comparing these micro-batches with each other, if their sizes differ.

        Common factors, such as a slow moment of the machine, carry no information about the shape and cancel.
        """
        if max(self.sizes) < VARIED * min(self.sizes):
            return line
        # A smaller one cannot take longer than a larger one: if it did, it was disturbed.
        least_s, so_far_s = dict[int, float](), math.inf
        for size, time in sorted(zip(self.sizes, self.times), reverse=True):
            least_s[size] = so_far_s = min(so_far_s, time)
        times = [least_s[size] for size in self.sizes]
        shaped = line
        for size, time in zip(self.sizes, times):
            expected_s = line.seconds(1, size)
            part = expected_s / line.seconds(self.batches, self.units)
            batches, units = 1 - part * self.batches, size - part * self.units
            seconds, noise_s = time - part * sum(times), WITHIN_STEP_NOISE * expected_s
            error_s = seconds - shaped.seconds(batches, units)
            if abs(error_s) < ODD_DEVIATIONS * math.sqrt(max(0.0, shaped.variance(batches, units)) + noise_s**2):
                shaped = shaped.corrected(batches, units, seconds, noise_s)
        return shaped.possible(self.units / self.batches)


@dataclass(frozen=True)
class AtOnce:
    """The most that one forward of a rank takes, in the unit in which work is divided.

    `is_filled`: a share is cut into micro-batches of exactly this size, and a last one. Not so for tokens: a sample
    that does not fit leaves room, so the number of micro-batches in a share of tokens is unknown.
    """

    units: int
    is_filled: bool = True


class CostMeter:
    """One rank's own cost, learned from how long its own micro-batches took. Local to the rank.

    A step that is far off is ignored if it was slow, and accepted if the next ones are slow too, for BURST_S at least.
    A fast step is accepted at once: unless a machine is noisy, nothing makes a step faster by chance. An accepted step
    changes the speed and keeps the shape.
    """

    def __init__(self) -> None:
        self._line: _Line | None = None
        self._before: _Line | None = None  # the line at the speed before this one
        self._has_warmed_up = False  # the line rests on more than the first micro-batches
        self._micro_batches = 0
        self._units = 0  # of the last step that had any
        self._slow: float | None = None  # factor by which the last step was slower than predicted, if odd
        self._odd_s, self._odd_steps = 0.0, 0  # how long steps have been odd without a break
        self._faster_s = math.inf  # how long a higher speed has been believed, if the last change was an increase
        self._steps = 0  # on which the speed rests
        self._shift = 0.0  # how much slower than predicted recent steps were
        self._latest = 0.0  # the same over fewer steps, on a noisy machine
        self._noise = _Noise()
        self._overheads: deque[float] = deque(maxlen=OVERHEAD_STEPS)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float], *, overhead_s: float) -> None:
        """Observe one step: units and seconds of each micro-batch in order, if any, and the busy seconds besides.

        `overhead_s` is this rank's time in the step outside forward and backward: data, the optimizer. Raises
        ValueError for sizes below 1, for seconds that are negative or not finite, and for lists of unequal length.
        """
        if len(sizes) != len(seconds) or any(size < 1 for size in sizes):
            raise ValueError(f"sizes {list(sizes)}, seconds {list(seconds)}: expected a time for each size, 1 or more")
        if any(not 0 <= time < math.inf for time in (*seconds, overhead_s)):
            raise ValueError(f"seconds {list(seconds)}, overhead {overhead_s}: expected 0 or more, and finite")
        self._overheads.append(overhead_s)
        cold = min(max(0, WARM_UP - self._micro_batches), len(sizes))
        is_warm = cold < len(sizes)
        self._micro_batches += len(sizes)
        self._units = sum(sizes) or self._units
        step = _Step(tuple(sizes[cold:]), tuple(seconds[cold:])) if is_warm else _Step(tuple(sizes), tuple(seconds))
        if step.seconds < LEAST_SECONDS:
            return
        if self._line is None or (is_warm and not self._has_warmed_up):
            line, self._has_warmed_up = step.shape(step.first_line()), is_warm
        else:
            line = self._judged(self._line.scaled(1, doubt=DRIFT), step)
        self._line = line if line.is_sound() else step.first_line()  # extreme times have made it invalid: begin anew

    def cost(self, at_once: AtOnce | None = None) -> Cost | None:
        """The estimated cost of this rank's share of a step; None until a step was measured.

        `at_once` None: one forward takes the whole share.
        """
        if self._line is None:
            return None
        if at_once is None:
            return Cost(self.overhead_s + self._line.fixed_s, self._line.per_unit_s)
        stairs = Cost(self.overhead_s, self._line.per_unit_s, per_batch_s=self._line.fixed_s, batch=at_once.units)
        return stairs if at_once.is_filled else stairs.line(self._units)

    @property
    def overhead_s(self) -> float:
        """How long this rank is busy in a step outside its micro-batches; 0 at first.

        The median of recent steps, unless the last two agree on a far longer or shorter time.
        """
        median_s = sorted(self._overheads)[(len(self._overheads) - 1) // 2] if self._overheads else 0.0
        last_two = list(self._overheads)[-2:]
        if min(last_two, default=0.0) > (1 + ODD) * median_s:
            return min(last_two)
        return max(last_two) if max(last_two, default=0.0) < (1 - ODD) * median_s else median_s

    def _judged(self, line: _Line, step: _Step) -> _Line:
        """The line after a step: corrected by it, moved to another speed, or as it was."""
        ratio = step.seconds / line.seconds(step.batches, step.units)
        self._noise.observe(math.log(ratio))
        self._faster_s += step.seconds
        judged = self._noisy(line, step, ratio) if self._noise.is_large else self._calm(line, step, ratio)
        if judged is None:
            return line
        self._slow = None
        self._steps += 1
        expected_s = judged.seconds(step.batches, step.units)
        if step.seconds > DISPUTED * expected_s and not self._noise.is_large:
            return judged  # at the speed of the milder one of two slow steps: this one may be a moment
        noise_s = self._noise.deviation * expected_s
        judged = judged.corrected(step.batches, step.units, step.seconds, noise_s)
        return step.shape(judged.possible(step.units / step.batches))

    def _calm(self, line: _Line, step: _Step, ratio: float) -> _Line | None:
        """The line that this step corrects, on a calm machine; None for a step that may be a slow moment."""
        odd = max(ODD, ODD_DEVIATIONS * math.hypot(step.doubt(line), self._noise.deviation))
        if abs(ratio - 1) <= odd:
            self._odd_s = 0.0
            return self._shifted(line, ratio - 1)
        self._odd_s += step.seconds
        if ratio > 1 and (self._slow is None or (self._odd_s < BURST_S and self._is_established)):
            self._slow = ratio
            return None
        self._odd_s = 0.0
        self._faster_s = 0.0 if ratio < 1 else math.inf
        return self._jumped(line, step, ratio)

    @property
    def _is_established(self) -> bool:
        """Whether the speed has held for longer than a burst.

        A moment without other programs is not a new speed, and its end is not a burst: until then slow steps are
        believed as soon as fast ones.
        """
        return self._faster_s >= BURST_S

    def _noisy(self, line: _Line, step: _Step, ratio: float) -> _Line | None:
        """The same on a noisy machine, by the mean of recent steps; None while they may be a burst."""
        deviation, known = self._noise.deviation, step.doubt(line)
        least = deviation / math.sqrt(min(1 + self._steps, SURE_STEPS))  # noise has made the line less certain
        if least > known:
            line = line.scaled(1, doubt=math.sqrt(least**2 - known**2))
        error = max(-ODD_DEVIATIONS * deviation, min(math.log(ratio), ODD_DEVIATIONS * deviation))
        self._shift += (error - self._shift) / NOISY_SHIFT_MEMORY_STEPS
        self._latest += (error - self._latest) / SHIFT_MEMORY_STEPS
        most = SHIFT_DEVIATIONS * deviation / math.sqrt(2 * NOISY_SHIFT_MEMORY_STEPS - 1)
        if abs(self._shift) < most * (SHIFT_OVER if self._odd_s else 1):
            self._odd_s, self._odd_steps = 0.0, 0
            is_stall = math.log(ratio) > ODD_DEVIATIONS * deviation  # or the first step at another speed
            return None if is_stall else line
        self._odd_s, self._odd_steps = self._odd_s + step.seconds, self._odd_steps + 1
        may_be_burst = self._shift > 0 and self._is_established
        if self._odd_s < BURST_S and (may_be_burst or self._odd_steps < FASTER_STEPS):
            return None
        self._odd_s, self._odd_steps = 0.0, 0
        if self._latest / self._shift < SHIFT_OVER:  # the mean still remembers a burst that is over
            self._shift = self._latest
            return line
        line = line.scaled(math.exp(self._shift), doubt=deviation)
        self._faster_s = 0.0 if self._shift < 0 else math.inf
        self._before, self._shift, self._latest, self._steps = None, 0.0, 0.0, 0
        return line

    def _jumped(self, line: _Line, step: _Step, ratio: float) -> _Line:
        """The line at another speed, or the previous one if that fits: then only two steps were slow."""
        before, self._before, self._shift = self._before, line, 0.0
        self._steps = 0
        if before and abs(step.seconds / before.seconds(step.batches, step.units) - 1) < ODD:
            return before
        if self._slow and abs(ratio / self._slow - 1) < ODD:
            return line.scaled(self._slow, doubt=self._noise.deviation)  # both steps agree: they count alike
        return line.scaled(min(ratio, self._slow or ratio), doubt=JUMP_DOUBT)

    def _shifted(self, line: _Line, error: float) -> _Line:
        """The line, with a less certain speed if recent steps were all slower than predicted, or all faster."""
        self._shift += (error - self._shift) / SHIFT_MEMORY_STEPS
        deviation = self._noise.deviation / math.sqrt(2 * SHIFT_MEMORY_STEPS - 1)  # of such a mean of noise
        if abs(self._shift) > SHIFT_DEVIATIONS * deviation:
            line, self._shift = line.scaled(1, doubt=abs(self._shift)), 0.0
        return line


class _Noise:
    """The standard deviation of a rank's steps around their prediction, as a fraction.

    Learned from the difference between successive errors, which are logarithms, because a prediction that stays wrong
    is not noise; and from the median difference, because slow moments are not noise either.
    """

    def __init__(self, memory_steps: int = NOISE_MEMORY_STEPS) -> None:
        self.deviation = NOISE
        self._last: float | None = None
        self._gaps: deque[float] = deque(maxlen=memory_steps)

    @property
    def is_large(self) -> bool:
        return self.deviation > NEGLIGIBLE_NOISE

    def observe(self, error: float) -> None:
        if self._last is not None:
            self._gaps.append(abs(error - self._last))
        steps = len(self._gaps)
        if steps >= LEAST_NOISE_STEPS:
            measured = sorted(self._gaps)[(steps - 1) // 2] / MEDIAN_GAP
            mean = (NOISE_PRIOR_STEPS * NOISE**2 + steps * measured**2) / (NOISE_PRIOR_STEPS + steps)
            self.deviation = max(LEAST_NOISE, math.sqrt(mean))
        self._last = error


class Balancer:
    """Decides which costs the shares of coming steps are computed from; equal on every rank, with equal observations.

    `costs` is the adopted table, one cost per rank; None: shares are equal, as at first, and stay so for ranks that
    differ only by noise. The gains that other shares would have brought are summed, and a table is adopted when enough
    was missed: after one step for a gain of a tenth, after about five for two hundredths. Early tables rest on a step
    or two and are replaced for less, so the first one is mostly adopted at once; shares that have just changed need
    more, and so do shares of noisy ranks. Gains are computed for steps as noisy as recent ones.
    """

    def __init__(self, world_size: int) -> None:
        self.costs: tuple[Cost, ...] | None = None
        self.noise = 0.0  # of a rank's time relative to the other ranks
        self._fitted_noise = 0.0  # the noise behind the adopted table
        self._noises = [_Noise(SHARES_NOISE_MEMORY_STEPS) for _ in range(world_size)]
        self._world_size = world_size
        self._observations = 0
        self._missed = 0.0  # in steps, since the table changed
        self._unrest = 0.0  # recent changes
        self._trials = _Trials(world_size)

    def observe(
        self, total: int, costs: Sequence[Cost | None], *, ratios: Sequence[float | None] = ()
    ) -> tuple[Cost, ...] | None:
        """Observe the costs of all ranks; the new table if one is adopted from now on, else None.

        `total` is the number of units in the step; `ratios` the busy time of each rank in it over the time that its
        cost predicts, None for an idle rank. A rank without a cost counts as the mean of the others. Raises ValueError
        if the limits hold fewer units than that.
        """
        newest = complete_costs(costs)
        if newest is None:
            return None
        self._listen(ratios)
        if self._trials.is_on:  # one step of it is enough
            self._trials.is_on = False
            self.costs, self._fitted_noise = newest, self.noise
        elif self._is_worth_it(total, newest):
            self._missed, self._unrest = 0.0, self._unrest + 1
            self.costs, self._fitted_noise = newest, self.noise
        else:
            trial = self._trials.next(total, newest, self.shares(total))
            if trial is None:
                return None
            self.costs = trial
        return self.costs

    def shares(self, total: int) -> tuple[int, ...]:
        """Shares of a step of `total` units by the adopted table; equal ones while there is none."""
        return balance_shares(total, self.fitted or (Cost(0.0, 1.0),) * self._world_size)

    @property
    def fitted(self) -> tuple[Cost, ...] | None:
        """The table that gives the shares: `costs`, fitted to the noise of the ranks."""
        return self.costs and fit_to_noise(self.costs, self._fitted_noise)

    def _listen(self, ratios: Sequence[float | None]) -> None:
        """Learn the noise of the ranks relative to each other; common factors, such as longer samples, cancel."""
        errors = [math.log(ratio) if ratio else None for ratio in ratios]
        known = [error for error in errors if error is not None]
        if len(known) < 2:
            return
        middle, most = statistics.median(known), ODD_DEVIATIONS * max(NOISE, self.noise)  # spikes affect one rank only
        mean = middle + math.fsum(max(-most, min(error - middle, most)) for error in known) / len(known)
        for noise, error in zip(self._noises, errors):
            if error is not None:
                noise.observe(error - mean)
        squares = [noise.deviation**2 for noise, error in zip(self._noises, errors) if error is not None]
        self.noise = math.sqrt(math.fsum(squares) / (len(squares) - 1))  # minus 1: the mean takes one degree of freedom

    def _is_worth_it(self, total: int, newest: Sequence[Cost]) -> bool:
        """Whether the best shares by these costs gain enough to replace the present ones."""
        best_s = step_seconds(balance_shares(total, fit_to_noise(newest, self.noise)), newest, self.noise)
        shares = self.shares(total)
        if any(cost.limit is not None and share > cost.limit for share, cost in zip(shares, newest)):
            return True
        now_s = step_seconds(shares, newest, self.noise)
        gain = 1 - best_s / now_s if now_s else 0.0
        noise = felt_noise(self.noise)
        self._observations += 1
        self._unrest *= 1 - 1 / UNREST_MEMORY_STEPS
        self._missed = max(0.0, self._missed + gain - GAIN_IN_DOUBT)
        enough = min((MISSED + NOISE_MISSED * noise) * (1 + self._unrest), MISSED_EARLY * self._observations)
        return gain >= GAIN_AT_ONCE + NOISE_AT_ONCE * noise or self._missed >= enough


class _Trials:
    """Rarely, and for one step, gives a small share to a rank that gets nothing: it may have become faster.

    A rank whose mere presence takes longer than a whole step is tried even more rarely.
    """

    def __init__(self, world_size: int) -> None:
        self.is_on = False  # the last adopted table is a trial
        self._idle_steps = [0] * world_size
        self._patience = [TRIAL_STEPS] * world_size

    def next(self, total: int, costs: Sequence[Cost], shares: Sequence[int]) -> tuple[Cost, ...] | None:
        """The costs, changed so that the rank whose turn it is gets a little; None if no rank is due."""
        for rank, share in enumerate(shares):
            self._idle_steps[rank] = 0 if share else self._idle_steps[rank] + 1
            self._patience[rank] = TRIAL_STEPS if share else self._patience[rank]
        rank = max(range(len(costs)), key=lambda rank: (self._idle_steps[rank], -rank))
        step_s, cost = step_seconds(shares, costs), costs[rank]
        units = max(1, int(min(TRIAL_PART * total / len(costs), TRIAL_STEP_PART * step_s / cost.slope_s)))
        units = units if cost.limit is None else min(units, cost.limit)
        if units == 0 or step_s == 0:
            return None
        lost_steps = cost.seconds(units) / step_s - 1  # if it proves as slow as estimated
        if self._idle_steps[rank] < max(self._patience[rank], lost_steps / TRIAL_PRICE):
            return None
        self.is_on = True
        self._idle_steps[rank] = 0
        self._patience[rank] = min(2 * self._patience[rank], MOST_TRIAL_STEPS)
        least_s = min(other.slope_s for other in costs)
        tried = Cost(0.0, min(least_s, step_s / (2 * units)), units)  # so cheap that it gets exactly these units
        return (*costs[:rank], tried, *costs[rank + 1 :])


def complete_costs(costs: Sequence[Cost | None]) -> tuple[Cost, ...] | None:
    """The costs, with the mean of the known ones for each unknown one; None if all are unknown."""
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    mean = Cost(
        math.fsum(cost.fixed_s for cost in known) / len(known),
        math.fsum(cost.slope_s for cost in known) / len(known),
    )
    return tuple(cost or mean for cost in costs)
