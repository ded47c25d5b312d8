"""A cluster in a simulated clock: machines of known cost, noise, spikes, changes of speed, and the product's own lag.

Of the product it uses only the meters and the balancer. As there, the first step of a run is cut into growing
micro-batches on every rank, and measurements at the end of step k take effect from step k + 2 on.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hetseq.balance.cost_meter import AtOnce, Balancer, CostMeter
from hetseq.balance.shares import Cost, assign_shares

Times = npt.NDArray[np.float64]
LAG = 2  # steps from a measurement to the first shares that follow from it
WARM_UP = (3.0, 2.0, 1.5)  # how much slower the first micro-batches of a start are


@dataclass(frozen=True)
class Machine:
    """True cost of a rank: seconds per micro-batch, per unit, and per step besides."""

    per_unit_s: float
    per_micro_batch_s: float = 0.0
    overhead_s: float = 0.0
    micro_batch: int | None = None  # the most units of one
    limit: int | None = None

    @property
    def at_once(self) -> AtOnce | None:
        return AtOnce(self.micro_batch) if self.micro_batch else None

    def slower(self, factor: float) -> Machine:
        return replace(
            self,
            per_unit_s=self.per_unit_s * factor,
            per_micro_batch_s=self.per_micro_batch_s * factor,
            overhead_s=self.overhead_s * factor,
        )

    def sizes(self, share: int, *, is_first: bool) -> list[int]:
        """The micro-batches of a share; in a first step they double, unless the last one would be the largest."""
        sizes: list[int] = []
        while share > 0:
            size = min(share, self.micro_batch or share)
            if is_first:
                largest = max(sizes, default=0)
                doubled = max(1, 2 * largest)
                size = min(size, largest if doubled >= share > largest > 0 else doubled)
            sizes.append(size)
            share -= size
        return sizes

    def seconds(self, share: int) -> float:
        """One calm step without a ramp."""
        if share == 0:
            return 0.0
        batches = -(-share // self.micro_batch) if self.micro_batch else 1
        return self.overhead_s + self.per_micro_batch_s * batches + self.per_unit_s * share


@dataclass(frozen=True)
class Weather:
    """Disturbances of a machine: relative noise of steps and micro-batches, and slow steps."""

    step_noise: float = 0.05
    micro_batch_noise: float = 0.02
    spike_rate: float = 0.03
    spike: float = 4.0


CALM = Weather(0, 0, 0)


class BusyLab:
    """Machines on which other programs run: every step of every rank has a factor, and for seconds the double of it.

    The factors are log-normal, drawn by step and rank; bursts come by the clock, on each machine by itself, about every
    `gap_s` seconds, and last 1 to 5. So all ways to share have the same noise, as far as they take the same time.
    """

    def __init__(self, ranks: int, seed: int, *, sigma: float = 0.3, gap_s: float = 30.0, burst: float = 2.0) -> None:
        self._generator = np.random.default_rng(seed)
        self._factors = np.exp(sigma * self._generator.standard_normal((1000, ranks)))
        self._bursts = [self._bursts_of_a_machine(gap_s) for _ in range(ranks)]
        self._burst = burst

    def _bursts_of_a_machine(self, gap_s: float) -> list[float]:
        """When bursts begin and end, in turn."""
        gaps, lasting = self._generator.exponential(gap_s, 1000), self._generator.uniform(1, 5, 1000)
        return list(itertools.accumulate(float(time_s) for pair in zip(gaps, lasting) for time_s in pair))

    def factors(self, step: int, now_s: float) -> list[float]:
        """How many times its time each rank takes in a step that begins then. Shape (ranks,)."""
        is_on = [bisect.bisect_right(bursts, now_s) % 2 == 1 for bursts in self._bursts]
        return [factor * (self._burst if on else 1) for factor, on in zip(self._factors[step].tolist(), is_on)]

    def run(self, machines: Sequence[Machine], shares: Sequence[int], steps: int) -> tuple[list[float], Times]:
        """The times of steps with fixed shares, and the factors that ranks had in them: (steps,), (steps, ranks)."""
        now_s, taken_s, factors = 0.0, list[float](), list[list[float]]()
        for step in range(steps):
            factors.append(self.factors(step, now_s))
            busy_s = [machine.seconds(share) * slow for machine, share, slow in zip(machines, shares, factors[-1])]
            taken_s.append(max(busy_s))
            now_s += taken_s[-1]
        return taken_s, np.array(factors)

    def best_fixed_shares(self, machines: Sequence[Machine], total: int, steps: int) -> tuple[int, ...]:
        """The times of the shortest run, known when it is over: moving units from rank to rank makes it no shorter."""
        fastest = [1 / machine.seconds(1) for machine in machines]
        best = assign_shares(total, fastest)
        _, factors = self.run(machines, best, steps)
        best_s, piece = _mean_step(machines, best, factors), total // 8
        while piece:
            pairs = itertools.permutations(range(len(machines)), 2)
            others = [_moved(best, pair, piece) for pair in pairs if best[pair[0]] >= piece]
            other_s, other = min((_mean_step(machines, shares, factors), shares) for shares in others)
            best_s, best, piece = (other_s, other, piece) if other_s < best_s else (best_s, best, piece // 2)
        return best


def _mean_step(machines: Sequence[Machine], shares: Sequence[int], factors: Times) -> float:
    calm_s = [machine.seconds(share) for machine, share in zip(machines, shares)]
    return float((factors * calm_s).max(axis=1).mean())


def _moved(shares: Sequence[int], pair: tuple[int, int], units: int) -> tuple[int, ...]:
    return tuple(share + units * ((rank == pair[1]) - (rank == pair[0])) for rank, share in enumerate(shares))


@dataclass
class Trace:
    """What happened: per step the shares, their time on calm machines, and the time of the best shares."""

    shares: list[tuple[int, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    oracle_s: list[float] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)  # with all noise

    def excess(self, first: int = 0) -> float:
        """The time of the steps from `first` on, as a multiple of the best."""
        return sum(self.seconds[first:]) / sum(self.oracle_s[first:])

    def changes(self, first: int = 0) -> int:
        """How often the shares changed after step `first`."""
        return sum(before != after for before, after in zip(self.shares[first:], self.shares[first + 1 :]))

    def late(self, step: int) -> bool:
        """Whether a step was not within 1.1 of the best."""
        return self.seconds[step] > 1.1 * self.oracle_s[step]

    def unsettled(self, first: int = 0, last: int | None = None) -> int:
        """How many of the steps first..last-1 were not within 1.1 of the best."""
        return sum(self.late(step) for step in range(first, len(self.seconds) if last is None else last))


def fastest_step(machines: Sequence[Machine], total: int) -> float:
    """The time of the best division, found without the solver: by halving, the least time in which all can be done."""
    low_s, high_s = 0.0, sum(machine.seconds(total) for machine in machines)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        done = sum(
            bisect.bisect_right(range(1, (machine.limit or total) + 1), middle_s, key=machine.seconds)
            for machine in machines
        )
        low_s, high_s = (low_s, middle_s) if done >= total else (middle_s, high_s)
    return high_s


def train(
    machines: Sequence[Machine],
    total: int,
    steps: int,
    *,
    seed: int = 0,
    weather: Weather = CALM,
    lab: BusyLab | None = None,
    changes: Mapping[int, Mapping[int, float]] | None = None,
) -> Trace:
    """A run of so many steps of `total` units. `changes`: in step s, rank r becomes so many times slower."""
    generator = random.Random(seed)
    machines = list(machines)
    meters, balancer, trace = [CostMeter() for _ in machines], Balancer(len(machines)), Trace()
    waiting: list[tuple[int, ...]] = [balancer.shares(total)] * LAG  # shares of the next steps, already decided
    best_s = 0.0
    for step in range(steps):
        for rank, factor in (changes or {}).get(step, {}).items():
            machines[rank] = machines[rank].slower(factor)
        shares = waiting.pop(0)
        if step in (changes or {}) or step == 0:
            best_s = fastest_step(machines, total)
        trace.shares.append(shares)
        trace.seconds.append(max(machine.seconds(share) for machine, share in zip(machines, shares)))
        trace.oracle_s.append(best_s)
        slow = lab.factors(step, sum(trace.taken_s)) if lab else [1.0] * len(machines)
        busy_s = [
            _measure(machine.slower(factor), meter, share, weather, generator, is_first=step == 0)
            for machine, meter, share, factor in zip(machines, meters, shares, slow)
        ]
        trace.taken_s.append(max(busy_s))
        costs = [_with_limit(meter.cost(machine.at_once), machine) for machine, meter in zip(machines, meters)]
        ratios = [each_s / cost.seconds(n) if cost and n else None for each_s, cost, n in zip(busy_s, costs, shares)]
        balancer.observe(total, costs, ratios=ratios)
        waiting.append(balancer.shares(total))
    return trace


def _measure(
    machine: Machine, meter: CostMeter, share: int, weather: Weather, generator: random.Random, *, is_first: bool
) -> float:
    """A step of one rank, shown to its meter; how long it was busy."""
    slow = max(0.2, generator.gauss(1, weather.step_noise))
    slow *= weather.spike if generator.random() < weather.spike_rate else 1
    sizes = machine.sizes(share, is_first=is_first)
    seconds = []
    for number, size in enumerate(sizes):
        calm = machine.per_micro_batch_s + machine.per_unit_s * size
        warm = WARM_UP[number] if is_first and number < len(WARM_UP) else 1
        seconds.append(calm * slow * warm * max(0.2, generator.gauss(1, weather.micro_batch_noise)))
    meter.observe(sizes, seconds, overhead_s=machine.overhead_s * slow)
    return sum(seconds) + (machine.overhead_s * slow if sizes else 0.0)


def _with_limit(cost: Cost | None, machine: Machine) -> Cost | None:
    return cost and replace(cost, limit=machine.limit)


def machines_with_micro_batches(generator: random.Random, total: int, *, ranks: int = 4) -> list[Machine]:
    """Speeds of 1 to 8 and micro-batches of 8, of whose time 30 % is fixed; 10 % of an equal share's besides."""
    speeds = [generator.uniform(1, 8) for _ in range(ranks)]
    return [Machine(1 / speed, 0.3 / 0.7 * 8 / speed, 0.1 * total / ranks / speed, micro_batch=8) for speed in speeds]


def unlike_machines(generator: random.Random, total: int, *, ranks: int = 6) -> list[Machine]:
    """Speeds of 1 to 8, and a fixed part of up to 15 % of the time of an equal share, of two kinds."""
    machines = []
    for _ in range(ranks):
        per_unit_s = 1 / generator.uniform(1, 8)
        fixed_s = generator.uniform(0, 0.15) * per_unit_s * total / ranks
        kind = generator.random()
        machines.append(Machine(per_unit_s, fixed_s * kind, fixed_s * (1 - kind)))
    return machines
