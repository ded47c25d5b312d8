"""Whole runs in a simulated clock: how near shares that follow the measurements come to the best there are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping

import pytest

from hetseq.balance.cost_meter import AtOnce
from tests.support.nightly import nightly
from tests.support.simulated import (
    CALM,
    Machine,
    Trace,
    Weather,
    machines_with_micro_batches,
    train,
    unlike_machines,
)


def runs(
    seeds: int, total: int, *, weather: Weather, changes: Mapping[int, Mapping[int, float]] | None = None
) -> list[Trace]:
    """One run of 200 steps per seed, each on a cluster of its own."""
    clusters = [unlike_machines(random.Random(7919 * seed + 1), total) for seed in range(seeds)]
    return [
        train(cluster, total, 200, seed=seed, weather=weather, changes=changes) for seed, cluster in enumerate(clusters)
    ]


def test_a_calm_cluster_has_the_best_shares_from_the_third_step_on_and_keeps_them() -> None:
    for trace in runs(4, 1024, weather=CALM):
        assert trace.unsettled() == 2
        assert trace.excess(first=2) < 1.01
        assert trace.changes() == 1
        assert trace.oracle_s[0] * 1.2 < trace.seconds[0]  # the twin: equal shares


def test_four_ranks_of_1_1_2_4_settle_to_proportional_shares() -> None:
    machines = [Machine(1.0), Machine(1.0), Machine(0.5), Machine(0.25)]
    assert train(machines, 64, 20).shares[2:] == [(8, 8, 16, 32)] * 18
    noisy = train(machines, 64, 200, weather=Weather()).shares
    assert all(abs(mine - best) <= 2 for mine, best in zip(noisy[-1], (8, 8, 16, 32)))


def test_equal_machines_keep_equal_shares() -> None:
    # adopting whatever the first step says would move a sample or two for good
    calm = [train([Machine(1.0, 2.0)] * 2, 512, 200, seed=seed, weather=Weather(0.01, 0.02, 0)) for seed in range(20)]
    assert statistics.mean(trace.excess(first=150) for trace in calm) < 1.001
    assert sum(trace.changes() == 0 for trace in calm) >= 14
    unlike = train([Machine(1.0, 2.0), Machine(1.05, 2.1)], 512, 200, seed=1, weather=Weather(0.01, 0.02, 0))
    assert unlike.changes() >= 1  # the twin
    assert unlike.excess(first=150) < 1.005


@pytest.mark.fault("FT-7")
def test_a_rank_that_becomes_three_times_slower_costs_three_slow_steps() -> None:
    for seed in range(5):
        machines = unlike_machines(random.Random(seed), 1024)
        trace = train(machines, 1024, 60, changes={30: {0: 3.0}})
        assert trace.unsettled(first=30) <= 3
        assert trace.shares[32] == trace.shares[29]
        assert trace.shares[33][0] < trace.shares[29][0]


def test_a_rank_that_is_too_slow_gets_nothing_and_comes_back_when_it_has_recovered() -> None:
    machines = [Machine(1.0), Machine(1.0), Machine(1.0, overhead_s=5.0)]
    trace = train(machines, 60, 400, changes={50: {2: 40.0}, 100: {2: 1 / 40}})
    assert trace.shares[49] == (22, 22, 16)
    assert trace.shares[90] == (30, 30, 0)
    assert trace.seconds[-1] == trace.seconds[49] == 22
    tries = [share[2] for share in trace.shares[60:] if 0 < share[2] < 10]
    assert len(tries) == 1
    stays = train(machines, 60, 400, changes={50: {2: 40.0}})
    assert stays.shares[-1] == (30, 30, 0)  # the twin


def test_tokens_are_shared_as_well_as_samples() -> None:
    machines = [Machine(1e-6, 0.01), Machine(3e-6, 0.02), Machine(2e-6)]
    trace = train(machines, 10**6, 40)
    assert trace.unsettled() == 2
    assert trace.excess(first=5) < 1.005
    assert sum(trace.shares[-1]) == 10**6


def test_few_large_units_are_dealt_as_well_as_whole_units_allow() -> None:
    machines = [Machine(1.0), Machine(2.0), Machine(4.0)]
    assert train(machines, 7, 20).shares[-1] == (4, 2, 1)
    assert train(machines, 2, 20).shares[-1] == (2, 0, 0)


def test_limits_and_micro_batches_of_a_rank_are_respected() -> None:
    machines = [Machine(1.0, 2.0, micro_batch=16), Machine(1.0, limit=20), Machine(1.0, 2.0, micro_batch=64)]
    trace = train(machines, 100, 60)
    assert all(share[1] == 20 for share in trace.shares[2:])
    assert trace.excess(first=10) < 1.05


@pytest.mark.parametrize(("total", "lost", "changes"), [(64, 0.05, 5.0), (256, 0.005, 0.1)])
def test_shares_end_where_a_micro_batch_ends_if_that_is_best(
    total: int, lost: float, changes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs without stairs, the twin, lose up to a tenth where a share is a few micro-batches, and never come to rest.

    As measured, of the oracle after the first five steps, 64 samples: 1.000 at most, without stairs 1.026 and at worst
    1.098, with 9 changes of shares in 145 steps; 256 samples: 1.000, without stairs 1.003 and at worst 1.008.
    """

    def traces() -> list[Trace]:
        clusters = [machines_with_micro_batches(random.Random(seed), total) for seed in range(20)]
        return [train(cluster, total, 150) for cluster in clusters]

    stairs = traces()
    assert max(trace.excess(first=5) for trace in stairs) < 1.001
    assert all(trace.changes(first=5) == 0 for trace in stairs)
    monkeypatch.setattr(Machine, "at_once", property(lambda machine: AtOnce(machine.micro_batch, is_filled=False)))
    straight = traces()
    assert max(trace.excess(first=5) for trace in straight) > 1 + lost
    assert statistics.mean(trace.changes(first=5) for trace in straight) > changes


def test_the_same_run_is_the_same_again() -> None:
    machines = unlike_machines(random.Random(5), 256)
    first, again = (train(machines, 256, 100, seed=5, weather=Weather()) for _ in range(2))
    assert first == again
    assert first != train(machines, 256, 100, seed=6, weather=Weather())


def test_noise_and_slow_steps_cost_little() -> None:
    traces = runs(4, 1024, weather=Weather())
    assert statistics.mean(trace.excess() for trace in traces) < 1.05
    assert statistics.mean(trace.excess(first=150) for trace in traces) < 1.02
    assert statistics.median(trace.unsettled(last=20) for trace in traces) <= 3
    assert statistics.mean(trace.seconds[0] / trace.oracle_s[0] for trace in traces) > 1.5  # the twin: equal shares


def test_noise_alone_seldom_changes_shares() -> None:
    traces = runs(4, 1024, weather=Weather(spike_rate=0))
    assert statistics.mean(trace.changes(first=20) for trace in traces) <= 180 / 50
    assert min(trace.changes() for trace in traces) >= 2  # the twin: they do change while they are settling


@pytest.mark.parametrize("total", nightly(256, 1024))
def test_a_hundred_clusters_are_close_to_the_best_that_could_be(total: int) -> None:
    """Six ranks, speeds of 1 to 8, fixed parts of up to 15 %; noise of 5 %, and 3 % of steps take four times as long.

    As measured, 256 and 1,024 samples: 1.025 and 1.028 of the oracle over 200 steps, at worst 1.052 and 1.053; over the
    last 50, 1.005 and 1.007; 0.8 and 0.9 changes of shares in 50 steps; settled after three in 92 and 100 clusters.
    """
    traces = runs(100, total, weather=Weather())
    assert statistics.mean(trace.excess() for trace in traces) <= 1.03
    assert max(trace.excess() for trace in traces) <= 1.07
    assert statistics.mean(trace.excess(first=150) for trace in traces) <= 1.01
    assert statistics.mean(trace.changes(first=20) for trace in traces) <= 180 / 50
    assert sum(not any(trace.late(step) for step in range(3, 10)) for trace in traces) >= 90


@pytest.mark.parametrize("clusters", nightly(40, 100))
def test_clusters_lose_three_steps_to_a_rank_that_slows_down(clusters: int) -> None:
    calm = runs(clusters, 1024, weather=CALM, changes={100: {0: 3.0}})
    assert max(trace.unsettled(first=100, last=120) for trace in calm) == 3
    noisy = runs(clusters, 1024, weather=Weather(spike_rate=0), changes={100: {0: 3.0}})
    assert sum(trace.unsettled(first=100, last=120) <= 3 for trace in noisy) >= 0.97 * clusters  # 99 of 100 as measured
