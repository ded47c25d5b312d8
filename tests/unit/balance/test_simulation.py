"""Steps of clusters on paper: the slowest rank and the ring decide, and the simulated clock is fair to both sides."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hetseq.balance.shares import Cost
from hetseq.balance.simulation import (
    Clock,
    Cluster,
    Link,
    RankGroup,
    RankModel,
    best_shares,
    equal_shares,
    learn,
    predict,
    ring_factor,
    ring_seconds,
    run,
)

GIGABIT = Link(bytes_per_s=1.25e8)


def ranks_of(*speeds: float) -> list[RankModel]:
    return [RankModel(f"speed {speed:g}", Cost(0.0, 1 / speed)) for speed in speeds]


def cluster_of(*speeds: float, gradient_bytes: float = 0.0) -> Cluster:
    return Cluster(tuple(RankGroup(f"g{at}", 1, speed, GIGABIT) for at, speed in enumerate(speeds)), gradient_bytes)


def test_a_step_is_the_slowest_rank_and_then_the_exchange() -> None:
    step = predict(ranks_of(1, 0.5), (3, 3), communication_s=0.5)  # busy for 3 s and 6 s
    assert (step.computing_s, step.waiting_s, step.communication_s) == (4.5, 1.5, 0.5)
    assert step.step_s == 6.5
    assert step.samples_per_s == 6 / 6.5
    assert step.efficiency == pytest.approx((6 / 6.5) / (1 + 0.5))


def test_times_that_are_scaled_leave_the_efficiency_as_it_is() -> None:
    plain, scaled = (predict(ranks_of(1, 0.5), (4, 2), communication_s=1.0, scale=scale) for scale in (1.0, 1.5))
    assert scaled.step_s == pytest.approx(1.5 * plain.step_s)
    assert scaled.efficiency == pytest.approx(plain.efficiency)


def test_a_rank_without_samples_is_awaited_for_its_overhead() -> None:
    quick, idle = ranks_of(10)[0], RankModel("idle", Cost(2.5, 1.0), overhead_s=2.0)
    assert predict([quick, idle], (10, 0), communication_s=0.0).step_s == 2.0
    assert predict([quick, RankModel("none", Cost(2.5, 1.0))], (10, 0), communication_s=0.0).step_s == 1.0


def test_a_rank_that_could_help_and_has_nothing_to_do_counts_against_the_efficiency() -> None:
    able, unable = RankModel("able", Cost(0.0, 1.0)), RankModel("unable", Cost(0.0, 1.0, limit=0))
    assert predict([able, able], (4, 0), communication_s=0.0).efficiency == 0.5
    assert predict([able, unable], (4, 0), communication_s=0.0).efficiency == 1.0


def test_the_speed_alone_is_that_of_the_whole_step() -> None:
    assert RankModel("", Cost(2.0, 0.5)).alone_per_s(12) == 12 / 8
    assert RankModel("", Cost(2.0, 0.5, limit=0)).alone_per_s(12) == 0


def test_a_rank_without_a_share_could_fill_its_micro_batches() -> None:
    assert RankModel("", Cost(2.0, 1.0, per_batch_s=4.0, batch=8)).own_per_s(0) == 1 / 1.5


@pytest.mark.parametrize("slower", [2, 3, 4])
def test_equal_shares_of_two_unequal_ranks_waste_what_theory_says(slower: int) -> None:
    ranks = ranks_of(slower, 1)
    equal = predict(ranks, (60, 60), communication_s=0.0)
    assert equal.efficiency == pytest.approx(2 / (slower + 1))
    assert predict(ranks, best_shares(ranks, 120), communication_s=0.0).efficiency == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("total", [8, 13, 24, 31])
def test_shares_in_pieces_are_the_best_ones_in_pieces(total: int) -> None:
    ranks = [RankModel("", Cost(0.5, 1.0)), RankModel("", Cost(0.0, 0.1, limit=9)), RankModel("", Cost(2.0, 1.5))]
    shares = best_shares(ranks, total, 4)
    assert sum(shares) == total
    pieces = [-(-share // 4) for share in shares]
    last = max(rank for rank, share in enumerate(shares) if share)
    assert [share % 4 for share in shares if share][:-1] == [0] * (sum(share > 0 for share in shares) - 1)
    assert shares[last] == 4 * pieces[last] - -total % 4

    def step_s(pieces: Sequence[int]) -> float:
        return max(rank.cost.seconds(4 * count) for rank, count in zip(ranks, pieces))

    whole = -(-total // 4)
    every = itertools.product(range(whole + 1), range(3), range(whole + 1))  # no more than 9 samples: two pieces
    assert step_s(pieces) == min(step_s(counts) for counts in every if sum(counts) == whole)
    assert best_shares(ranks, total) == best_shares(ranks, total, 1)


def test_the_best_shares_of_noisy_ranks_are_fitted_to_their_noise() -> None:
    draw = random.Random(1)
    noises = [tuple(draw.lognormvariate(0, 0.3) for _ in range(500)) for _ in range(3)]
    calm = ranks_of(4, 1, 1)
    noisy = [replace(rank, noise=noise) for rank, noise in zip(calm, noises)]
    alike = [replace(rank, noise=noises[0]) for rank in calm]
    assert best_shares(calm, 96) == best_shares(alike, 96) == (64, 16, 16)
    assert best_shares([noisy[0], *calm[1:]], 96) == (64, 16, 16)  # of one rank alone it cannot be told
    fitted = best_shares(noisy, 96)
    assert fitted == (72, 12, 12)
    step_s = [predict(noisy, shares, communication_s=0.0).step_s for shares in ((64, 16, 16), fitted)]
    assert step_s[1] < 0.97 * step_s[0]


# the ring


def ring_by_hand(values: np.ndarray, links: Sequence[Link], piece_bytes: float) -> tuple[np.ndarray, float, list[int]]:
    """An all-reduce of (ranks, pieces) numbers, message by message: the sums, the seconds, pieces sent by each rank."""
    held, world, seconds, sent = values.copy(), len(links), 0.0, [0] * len(links)
    for is_sum in (True, False):
        for turn in range(world - 1):
            messages = []
            for rank in range(world):
                piece = (rank - turn + (0 if is_sum else 1)) % world
                messages.append(((rank + 1) % world, piece, held[rank, piece]))
                sent[rank] += 1
            for to, piece, value in messages:
                held[to, piece] = held[to, piece] + value if is_sum else value
            seconds += max(piece_bytes / link.bytes_per_s + link.latency_s for link in links)
    return held, seconds, sent


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_ring_takes_as_long_as_its_messages(world_size: int) -> None:
    draw = random.Random(world_size)
    links = [Link(draw.uniform(1e6, 1e9), draw.uniform(0, 1e-2)) for _ in range(world_size)]
    values = np.arange(world_size**2).reshape(world_size, world_size)
    held, seconds, sent = ring_by_hand(values, links, 1e6 / world_size)
    assert (held == values.sum(axis=0)).all()  # what is timed is an all-reduce
    assert ring_seconds(links, world_size, 1e6) == pytest.approx(seconds)
    assert {count / world_size for count in sent} == {ring_factor(world_size)}


def test_a_rank_alone_exchanges_nothing() -> None:
    assert ring_seconds([Link(1.0, 1.0)], 1, 1e9) == 0 == ring_factor(1)


def test_the_slowest_link_sets_the_pace_of_the_ring() -> None:
    thin, far = Link(1e6, 0.0), Link(1e9, 0.5)
    slowest = max(ring_seconds([link], 4, 4e6) for link in (thin, far))
    assert ring_seconds([thin, far], 4, 4e6) == slowest
    both = ring_seconds([Link(1e6, 0.5)], 4, 4e6)  # the twin: one link with the faults of both
    assert slowest < both


# the cluster and its clock


def test_groups_are_ranks_in_their_order() -> None:
    cluster = Cluster((RankGroup("fast", 2, 4, GIGABIT), RankGroup("slow", 3, 1, GIGABIT, fixed_s=0.5)), 1.0)
    assert cluster.world_size == 5
    assert [rank.name for rank in cluster.ranks] == ["fast"] * 2 + ["slow"] * 3
    assert cluster.ranks[4].busy_s(3) == 3.5
    assert [(group.name, values) for group, values in cluster.by_group((1, 2, 3, 4, 5))] == [
        ("fast", (1, 2)),
        ("slow", (3, 4, 5)),
    ]
    assert cluster.without("fast").world_size == 3


def test_without_noise_the_clock_says_what_the_model_says() -> None:
    cluster = cluster_of(4, 2, 1, gradient_bytes=1e6)
    shares = best_shares(cluster.ranks, 70)
    calm = run(cluster, shares, Clock(steps=3))
    model = predict(cluster.ranks, shares, communication_s=cluster.communication_s())
    assert calm.step_s == pytest.approx(model.step_s)
    assert calm.efficiency == pytest.approx(model.efficiency)
    assert run(cluster, shares, Clock(steps=3, noise=0.1)).waiting_s > calm.waiting_s + 0.1


def test_noise_has_the_mean_and_the_spread_that_were_asked_for() -> None:
    draws = np.concatenate(list(Clock(steps=50, noise=0.2, seed=3).draws(1000)))
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(1, abs=0.005)
    assert draws.std() == pytest.approx(0.2, abs=0.005)
    assert {float(value) for draw in Clock(steps=2).draws(3) for value in draw} == {1.0}


def test_equal_clocks_draw_equal_noise() -> None:
    one, same, other = (
        np.stack(list(Clock(steps=4, noise=0.1, seed=seed).draws(5))) for seed in (1, 1, 2)
    )  # fmt: skip
    assert (one == same).all()
    assert (one != other).all()


def test_four_ranks_1_1_2_4_do_together_what_each_does_alone() -> None:
    cluster = cluster_of(1, 1, 2, 4)
    best, equal = (run(cluster, shares(cluster), Clock()) for shares in (fitting, lambda c: equal_shares(c, 64)))
    assert best.efficiency == pytest.approx(1)  # 8, 8, 16 and 32 samples, each in 8 s
    assert equal.efficiency == pytest.approx(0.5)


def fitting(cluster: Cluster) -> tuple[int, ...]:
    return best_shares(cluster.ranks, 64)


def test_thousands_of_ranks_are_shared_to_the_sample() -> None:
    groups = (
        RankGroup("a", 1024, 900, GIGABIT, 0.02),
        RankGroup("b", 2048, 300, GIGABIT, 0.02),
        RankGroup("c", 1024, 100, GIGABIT),
    )
    cluster = Cluster(groups, 0.0)
    total = 131072
    best = run(cluster, best_shares(cluster.ranks, total), Clock(steps=1))
    speed = sum(group.count * group.samples_per_s for group in groups)
    ideal = (total + sum(group.count * group.samples_per_s * group.fixed_s for group in groups)) / speed
    assert ideal <= best.step_s <= ideal + 1 / 100  # a sample of the slowest kind
    assert run(cluster, equal_shares(cluster, total), Clock(steps=1)).step_s > 1.5 * best.step_s


def test_a_run_that_knows_nothing_learns_good_shares_in_noise() -> None:
    cluster = Cluster((RankGroup("fast", 4, 100, GIGABIT, 0.02), RankGroup("slow", 4, 25, GIGABIT, 0.02)), 0.0)
    best, equal = (predict(cluster.ranks, shares, communication_s=0.0).step_s for shares in both(cluster, 512))
    learned = learn(cluster, 512, Clock(steps=30, noise=0.05, seed=1))
    assert sum(learned) == 512
    assert predict(cluster.ranks, learned, communication_s=0.0).step_s < 1.1 * best
    assert equal > 1.5 * best  # where it began
    assert len(set(equal_shares(cluster, 512))) == 1


def test_it_learns_what_micro_batches_cost() -> None:
    groups = (RankGroup("fast", 2, 100, GIGABIT, 0.0, 8, 0.04), RankGroup("slow", 2, 100, GIGABIT, 0.2, 8, 0.2))
    cluster = Cluster(groups, 0.0)
    best, equal = (predict(cluster.ranks, shares, communication_s=0.0).step_s for shares in both(cluster, 130))
    learned = learn(cluster, 130, Clock(steps=20))
    assert predict(cluster.ranks, learned, communication_s=0.0).step_s == pytest.approx(best)
    assert equal > 1.5 * best
    noisy = learn(cluster, 130, Clock(steps=40, noise=0.02, seed=3))
    assert predict(cluster.ranks, noisy, communication_s=0.0).step_s < 1.05 * best


def both(cluster: Cluster, total: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return best_shares(cluster.ranks, total), equal_shares(cluster, total)


def test_a_run_goes_on_learning_when_some_ranks_get_nothing() -> None:
    cluster = Cluster((RankGroup("fast", 2, 100, GIGABIT), RankGroup("useless", 2, 1, GIGABIT, 10.0)), 0.0)
    learned = learn(cluster, 64, Clock(steps=10))
    assert learned[2:] == (0, 0)
    assert math.isclose(predict(cluster.ranks, learned, communication_s=0.0).step_s, 0.32)
