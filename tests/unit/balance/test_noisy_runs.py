"""Runs on machines with which other programs compete: shares stay where they are, and where that is best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from tests.support.simulated import CALM, BusyLab, Machine, Trace, train

CLUSTERS = {"4:1:1": (4, 1, 1), "5:2:1": (5, 2, 1), "eight equal": (1,) * 8, "50:1": (50, 1)}
SETTLED = 50  # steps after the start


def cluster(name: str, *, step_s: float) -> tuple[list[Machine], int]:
    """Its machines, and how many units are a step of that time if all machines were calm."""
    speeds = CLUSTERS[name]
    total = sum(speeds) * (10 if name == "50:1" else 32 if name == "eight equal" else 16)
    return [Machine(step_s * sum(speeds) / total / speed) for speed in speeds], total


def noisy_run(name: str, seed: int, *, step_s: float = 0.3, slower: dict[int, dict[int, float]] | None = None) -> Trace:
    machines, total = cluster(name, step_s=step_s)
    return train(machines, total, 900, weather=CALM, lab=BusyLab(len(machines), seed), changes=slower)


def mean_of_fixed(name: str, seed: int, shares: Sequence[int] | None, *, step_s: float = 0.3) -> float:
    """The mean settled step with these shares; None: with the best that can be told afterwards."""
    machines, total = cluster(name, step_s=step_s)
    lab = BusyLab(len(machines), seed)
    shares = shares or lab.best_fixed_shares(machines, total, 900)
    return statistics.mean(lab.run(machines, shares, 900)[0][SETTLED:])


@pytest.mark.parametrize("step_s", [0.3, 1.5])
@pytest.mark.parametrize("name", CLUSTERS)
def test_noise_and_bursts_leave_shares_where_they_are_best(name: str, step_s: float) -> None:
    """Steps with a deviation of 0.3 and bursts of twice the time for 1 to 5 s, every 30 s on every machine."""
    ratios = []
    for seed in (1, 2, 3):
        trace = noisy_run(name, seed, step_s=step_s)
        assert trace.changes(first=SETTLED) <= (900 - SETTLED) / 50
        ratios.append(statistics.mean(trace.taken_s[SETTLED:]) / mean_of_fixed(name, seed, None, step_s=step_s))
    assert statistics.mean(ratios) <= 1.02


@pytest.mark.parametrize("name", CLUSTERS)
def test_bursts_of_a_hundred_steps_leave_shares_where_they_are(name: str) -> None:
    """900 steps of 0.05 s hold a burst or two of a machine; what would have been best depends on whose they were."""
    machines, total = cluster(name, step_s=0.05)
    calm = train(machines, total, 4).shares[-1]
    for seed in (1, 2, 3):
        trace = noisy_run(name, seed, step_s=0.05)
        assert trace.changes(first=SETTLED) <= (900 - SETTLED) / 50
        assert statistics.mean(trace.taken_s[SETTLED:]) <= 1.02 * mean_of_fixed(name, seed, calm, step_s=0.05)


@pytest.mark.parametrize(("name", "shares", "lost"), [("4:1:1", (64, 16, 16), 1.05), ("50:1", (500, 10), 1.1)])
def test_shares_that_fit_calm_machines_are_slower_on_noisy_ones(
    name: str, shares: tuple[int, ...], lost: float
) -> None:
    for seed in (1, 2, 3):
        settled = noisy_run(name, seed).taken_s[SETTLED:]
        assert mean_of_fixed(name, seed, shares) > lost * statistics.mean(settled)


@pytest.mark.parametrize(("factor", "half_way"), [(2.0, 24), (0.5, 40)])
def test_a_machine_that_stays_slower_or_faster_is_followed_through_the_noise(factor: float, half_way: int) -> None:
    """Its share is half-way to the new one after 11 to 44 steps of 0.3 s, as measured with ten seeds."""
    for seed in (1, 2, 3):
        trace = noisy_run("eight equal", seed, slower={400: {0: factor}})
        is_over = [share[0] < half_way if factor > 1 else share[0] > half_way for share in trace.shares]
        assert not any(is_over[395:402])
        assert is_over.index(True, 400) <= 435
        assert all(is_over[500:])
        assert trace.changes(first=500) <= 400 / 50


def test_a_burst_on_a_calm_machine_moves_nothing_and_a_slowdown_moves_once() -> None:
    machines, total = cluster("4:1:1", step_s=0.5)
    for rank in range(3):
        burst = train(machines, total, 60, changes={30: {rank: 2.0}, 35: {rank: 0.5}})  # 5 s for its steps of 1 s
        assert burst.changes(first=5) == 0
        slower = train(machines, total, 60, changes={30: {rank: 2.0}})
        assert [slower.shares[step] == slower.shares[29] for step in (36, 37)] == [True, False]
        assert slower.changes(first=5) == 1


def test_a_calm_machine_with_steps_of_seconds_is_followed_two_steps_after_it_was_slow_twice() -> None:
    machines, total = cluster("4:1:1", step_s=4.0)
    trace = train(machines, total, 60, changes={30: {1: 2.0}})
    assert trace.shares[32] == trace.shares[29]
    assert trace.shares[33][1] < trace.shares[29][1]


def test_noise_that_all_machines_have_in_common_moves_nothing_from_the_slow_ones() -> None:
    class OneHost(BusyLab):
        def factors(self, step: int, now_s: float) -> list[float]:
            return [super().factors(step, now_s)[0]] * 3

    machines, total = cluster("4:1:1", step_s=0.3)
    together = train(machines, total, 300, lab=OneHost(3, 1))
    assert together.shares[-1] == (64, 16, 16)
    assert together.changes(first=SETTLED) <= 250 / 50
    apart = train(machines, total, 300, lab=BusyLab(3, 1))
    assert apart.shares[-1][0] > 66  # the twin
