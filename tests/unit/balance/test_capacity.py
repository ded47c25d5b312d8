"""Shares: of all ways to divide a step, the one whose slowest rank is done first, exactly."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from hetseq.balance.shares import (
    NEGLIGIBLE_NOISE,
    Cost,
    assign_shares,
    balance_shares,
    fit_to_noise,
    slowed_by,
    step_seconds,
)


@functools.cache
def divisions(total: int, ranks: int) -> list[tuple[int, ...]]:
    """Every way to divide `total` samples among the ranks."""
    if ranks == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in divisions(total - first, ranks - 1)]


def finish_time(shares: Sequence[int], weights: Sequence[float]) -> float:
    """When the slowest rank is done; a rank of weight 0 never is."""
    return max(share / weight if weight else math.inf for share, weight in zip(shares, weights) if share or weight)


def random_weights(generator: random.Random, ranks: int) -> list[float]:
    kind = generator.choice(["whole", "floats", "zeros", "far apart"])
    if kind == "whole":
        return [generator.randint(1, 9) for _ in range(ranks)]
    if kind == "floats":
        return [generator.uniform(0.1, 2) for _ in range(ranks)]
    if kind == "far apart":
        return [10.0 ** generator.randint(-9, 9) for _ in range(ranks)]
    return [*(generator.choice([0.0, 1.0, 0.3]) for _ in range(ranks - 1)), 1.0]


def test_no_other_division_is_done_sooner() -> None:
    generator = random.Random(1)
    proportional_is_slower = 0
    for _ in range(3000):
        ranks = generator.randint(1, 4)
        total, weights = generator.randint(0, {1: 20, 2: 20, 3: 6, 4: 4}[ranks]), random_weights(generator, ranks)
        shares = assign_shares(total, weights)
        assert sum(shares) == total
        assert min(shares) >= 0
        best = min(finish_time(other, weights) for other in divisions(total, ranks))
        assert finish_time(shares, weights) <= best * (1 + 2**-50), (total, weights)  # quotients of floats round
        proportional_is_slower += finish_time(largest_remainder(total, weights), weights) > best
    assert proportional_is_slower > 30  # the twin: rounding quotas to the nearest is not the same


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """What one would write first: whole quotas, and the rest to the largest fractions."""
    whole = sum(map(Fraction, weights))
    quotas = [total * Fraction(weight) / whole for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(weights)), key=lambda rank: shares[rank] - quotas[rank])
    for rank in by_fraction[: total - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (8, (5, 2, 1), (5, 2, 1)),
        (16, (5, 2, 1), (10, 4, 2)),
        (10, (1, 1, 1), (4, 3, 3)),
        (1, (1, 1, 1), (1, 0, 0)),
        (5, (1, 0), (5, 0)),
        (5, (0, 0, 3), (0, 0, 5)),
        (0, (5, 2, 1), (0, 0, 0)),
        (3, (1e-300, 1e300), (0, 3)),
        (7, (0.1, 0.2, 0.4), (1, 2, 4)),
        (10**12, (1, 3), (250_000_000_000, 750_000_000_000)),
    ],
)
def test_shares_in_round_numbers(total: int, weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert assign_shares(total, weights) == shares


def test_of_ranks_that_tie_the_lowest_gets_the_sample() -> None:
    for total, ranks in itertools.product(range(20), range(1, 6)):
        assert assign_shares(total, (2.5,) * ranks) == tuple(total // ranks + (n < total % ranks) for n in range(ranks))
    assert assign_shares(3, (2, 1)) == (2, 1)
    assert assign_shares(4, (2, 1)) == (3, 1)  # 3/2 and 2/1 differ: no tie
    assert assign_shares(2, (1, 2)) == (1, 1)  # (0, 2) would be done as soon


def test_only_the_ratio_of_weights_matters() -> None:
    generator = random.Random(2)
    for _ in range(200):
        weights = [float(generator.randint(0, 9)) for _ in range(5)] + [1.0]
        total, scale = generator.randint(0, 500), 2.0 ** generator.randint(-20, 20)
        assert assign_shares(total, weights) == assign_shares(total, [weight * scale for weight in weights])
    assert assign_shares(100, (1, 2)) != assign_shares(100, (1, 2.5))


def test_many_ranks_with_any_floats_sum_exactly() -> None:
    generator = random.Random(3)
    for _ in range(20):
        weights = [generator.uniform(0, 1) ** 3 for _ in range(64)]
        assert sum(assign_shares(4096, weights)) == 4096
        # quotas that rounding lifts over an integer: ten times 0.1 is not 1
        assert sum(assign_shares(10, [0.1] * 10)) == 10


@pytest.mark.parametrize("weights", [(), (0,), (0, 0), (1, -1), (3, -1), (float("nan"), 1), (1, float("inf"))])
def test_weights_that_divide_nothing_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected finite weights of 0 or more, at least one above 0"):
        assign_shares(4, weights)


def random_costs(generator: random.Random, ranks: int) -> list[Cost]:
    """With and without fixed parts, limits and micro-batches; in whole numbers, so that ties are ties."""
    costs = []
    for _ in range(ranks):
        fixed_s = generator.choice([0, 0, generator.randint(0, 9), generator.randint(0, 40)])
        limit = generator.choice([None, None, 0, 1, generator.randint(0, 6)])
        batch = generator.choice([None, None, 1, generator.randint(2, 6)])
        per_batch_s = generator.choice([0, generator.randint(1, 9), generator.randint(1, 40)]) if batch else 0
        costs.append(Cost(float(fixed_s), float(generator.randint(1, 9)), limit, float(per_batch_s), batch))
    return costs


def one_at_a_time(total: int, costs: Sequence[Cost]) -> tuple[int, ...]:
    """Each unit to the rank that would finish it first: slow, and obviously what was meant."""
    shares = [0] * len(costs)
    for _ in range(total):
        open_ranks = [n for n, cost in enumerate(costs) if cost.limit is None or shares[n] < cost.limit]
        shares[min(open_ranks, key=lambda n: (costs[n].seconds(shares[n] + 1), n))] += 1
    return tuple(shares)


def by_speed_alone(total: int, costs: Sequence[Cost]) -> tuple[int, ...]:
    """What one would write first: shares in proportion to the speed, without a look at the fixed part."""
    return assign_shares(total, [1 / cost.per_unit_s if cost.limit is None else 0.0 for cost in costs])


def test_no_other_division_has_a_shorter_step() -> None:
    generator = random.Random(4)
    refused = by_speed_is_slower = by_lines_is_slower = 0
    for _ in range(3000):
        ranks = generator.randint(1, 4)
        total, costs = generator.randint(0, {1: 20, 2: 20, 3: 8, 4: 6}[ranks]), random_costs(generator, ranks)
        allowed = [
            shares
            for shares in divisions(total, ranks)
            if all(cost.limit is None or share <= cost.limit for share, cost in zip(shares, costs))
        ]
        if not allowed:
            refused += 1
            with pytest.raises(ValueError, match="within their limits"):
                balance_shares(total, costs)
            continue
        shares = balance_shares(total, costs)
        assert shares in allowed, (total, costs)
        assert step_seconds(shares, costs) == min(step_seconds(other, costs) for other in allowed), (total, costs)
        if any(cost.limit is None for cost in costs):
            by_speed_is_slower += step_seconds(by_speed_alone(total, costs), costs) > step_seconds(shares, costs)
        lines = [cost.line(total // ranks) for cost in costs]
        by_lines_is_slower += step_seconds(balance_shares(total, lines), costs) > step_seconds(shares, costs)
    assert refused > 200
    assert by_speed_is_slower > 200  # the twins: most of the answer is not in the speeds,
    assert by_lines_is_slower > 10  # and some of it not in straight costs


def test_the_units_that_are_not_dealt_one_by_one_are_the_same_units() -> None:
    generator = random.Random(5)
    for _ in range(150):
        # 1e-17 a unit is lost beside any fixed part: a rank that ties with itself takes all it can
        costs = [
            Cost(
                generator.choice([0, generator.uniform(0, 9)]), generator.uniform(0.1, 2) * generator.choice([1, 1e-17])
            )
            for _ in range(generator.randint(1, 7))
        ]
        limited = [Cost(cost.fixed_s, cost.per_unit_s, generator.choice([None, 3, 40])) for cost in costs]
        stairs = [
            replace(cost, per_batch_s=generator.choice([0.0, generator.uniform(0, 9)]), batch=generator.randint(1, 60))
            for cost in limited
        ]
        total = generator.randint(0, 300)
        for each in (costs, [*limited, Cost(50.0, 3.0)], [*stairs, Cost(50.0, 3.0, None, 7.0, 16)]):
            assert balance_shares(total, each) == one_at_a_time(total, each), (total, each)


@pytest.mark.parametrize(
    ("total", "costs", "shares"),
    [
        (10, [Cost(0, 1), Cost(0, 1), Cost(0, 1)], (4, 3, 3)),  # of ranks that tie the lowest
        (70, [Cost(0, 1), Cost(0, 2), Cost(0, 4)], (40, 20, 10)),
        (70, [Cost(30, 1), Cost(0, 1), Cost(0, 1)], (4, 33, 33)),  # the fixed part is 30 units
        (10, [Cost(0, 1), Cost(100, 1)], (10, 0)),  # 11 seconds are the least it could do
        (10, [Cost(100, 1), Cost(0, 1)], (0, 10)),
        (10, [Cost(0, 1), Cost(0, 100)], (10, 0)),
        (10, [Cost(0, 1, 4), Cost(0, 9)], (4, 6)),
        (10, [Cost(0, 1, 0), Cost(5, 9)], (0, 10)),
        (10, [Cost(0, 1, 5), Cost(0, 1, 5)], (5, 5)),
        (6, [Cost(0, 1)] * 6, (1, 1, 1, 1, 1, 1)),
        (2, [Cost(0, 3), Cost(0, 1), Cost(0, 1)], (0, 1, 1)),  # fewer units than ranks
        (0, [Cost(3, 1), Cost(0, 1, 0)], (0, 0)),
        (0, [], ()),
        # micro-batches of 8 that take 10 s more than their samples: two full ones each are better than 17 + 15
        (32, [Cost(0, 1, None, 10, 8), Cost(0, 1.1, None, 10, 8)], (16, 16)),
        (32, [Cost(0, 1), Cost(0, 1.1)], (17, 15)),
        (33, [Cost(0, 1, None, 10, 8), Cost(0, 1.1, None, 10, 8)], (17, 16)),
        (12, [Cost(0, 1, None, 10, 8), Cost(0, 5, None, 0, 8)], (8, 4)),
        (5, [Cost(0, 1, None, 3, 1), Cost(0, 2, None, 6, 1)], (4, 1)),  # each unit a micro-batch
        (10**6, [Cost(0, 1e-6), Cost(0, 3e-6)], (750_000, 250_000)),  # tokens
        (10**12, [Cost(0, 1), Cost(0, 3)], (750_000_000_000, 250_000_000_000)),
    ],
)
def test_balanced_shares_in_round_numbers(total: int, costs: list[Cost], shares: tuple[int, ...]) -> None:
    assert balance_shares(total, costs) == shares


def test_without_fixed_parts_the_shares_are_those_of_the_speeds() -> None:
    generator = random.Random(6)
    for _ in range(300):
        weights = [2.0 ** generator.randint(-3, 3) for _ in range(generator.randint(1, 6))]
        total = generator.randint(0, 400)
        assert balance_shares(total, [Cost(0, 1 / weight) for weight in weights]) == assign_shares(total, weights)
    assert balance_shares(100, [Cost(9, 0.5), Cost(0, 1)]) != assign_shares(100, (2, 1))


def test_the_unit_of_time_does_not_matter() -> None:
    generator = random.Random(7)
    for _ in range(200):
        costs = [
            Cost(generator.uniform(0, 5), generator.uniform(0.1, 2), None, generator.uniform(0, 9), 16)
            for _ in range(6)
        ]
        total, scale = generator.randint(0, 5000), 2.0 ** generator.randint(-20, 20)
        scaled = [
            Cost(cost.fixed_s * scale, cost.per_unit_s * scale, None, cost.per_batch_s * scale, 16) for cost in costs
        ]
        assert balance_shares(total, scaled) == balance_shares(total, costs)


def test_a_million_tokens_are_not_dealt_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    answer = Cost.seconds

    def counted(cost: Cost, units: int) -> float:
        asked.append(units)
        return answer(cost, units)

    monkeypatch.setattr(Cost, "seconds", counted)
    generator = random.Random(8)
    for ranks, total in ((64, 4096), (64, 10**6), (1024, 65536)):
        costs = [Cost(generator.uniform(0, 5), generator.uniform(0.1, 2)) for _ in range(ranks)]
        stairs = [replace(cost, per_batch_s=generator.uniform(0, 9), batch=16) for cost in costs]
        for each, most in ((costs, 4 * ranks), (stairs, 20 * ranks)):  # all of them may have a full micro-batch at once
            asked.clear()
            assert sum(balance_shares(total, each)) == total
            assert len(asked) <= most  # once per rank to begin with, and for about one unit each


def mean_slowest(shares: Sequence[int], costs: Sequence[Cost], noise: float) -> float:
    """Of 2,000 steps of ranks whose times are log-normal, the same for all shares."""
    generator = random.Random(10)
    steps = [[generator.lognormvariate(0, noise) for _ in costs] for _ in range(2000)]
    calm_s = [cost.seconds(share) for cost, share in zip(costs, shares)]
    return sum(max(map(operator.mul, calm_s, factors)) for factors in steps) / len(steps)


@pytest.mark.parametrize(
    ("total", "costs", "shares", "gain"),
    [
        (96, [Cost(0, 0.25), Cost(0, 1), Cost(0, 1)], (72, 12, 12), 0.05),  # (64, 16, 16) if all were calm
        (96, [Cost(0, 0.2), Cost(0, 0.5), Cost(0, 1)], (68, 20, 8), 0.04),
        (510, [Cost(0, 0.02), Cost(0, 1)], (507, 3), 0.12),
        (96, [Cost(0, 1)] * 3, (32, 32, 32), 0),
    ],
)
def test_shares_fitted_to_noise_have_the_shortest_mean_step(
    total: int, costs: list[Cost], shares: tuple[int, ...], gain: float
) -> None:
    fitted = balance_shares(total, fit_to_noise(costs, 0.3))
    assert fitted == shares
    fitted_s = mean_slowest(fitted, costs, 0.3)
    assert mean_slowest(balance_shares(total, costs), costs, 0.3) >= (1 + gain) * fitted_s
    for more, less in itertools.permutations(range(len(costs)), 2):
        moved = [share + max(1, total // 20) * ((rank == more) - (rank == less)) for rank, share in enumerate(fitted)]
        if min(moved) >= 0:
            assert mean_slowest(moved, costs, 0.3) > 0.999 * fitted_s


def test_no_other_shares_have_a_shorter_noisy_step_but_for_rounding() -> None:
    generator = random.Random(11)
    for _ in range(200):
        costs = [Cost(generator.choice([0, 2]), generator.uniform(0.2, 4)) for _ in range(3)]
        shares = balance_shares(40, fit_to_noise(costs, 0.4))
        best_s = min(step_seconds(other, costs, 0.4) for other in divisions(40, 3))
        assert step_seconds(shares, costs, 0.4) <= 1.02 * best_s, (costs, shares)


def test_negligible_noise_changes_nothing() -> None:
    costs = [Cost(1, 2, 9, 3, 4), Cost(0, 5)]
    for noise in (0.0, NEGLIGIBLE_NOISE):
        assert fit_to_noise(costs, noise) == tuple(costs)
        assert step_seconds((9, 9), costs, noise) == step_seconds((9, 9), costs)
    assert step_seconds((9, 9), costs, 0.101) == pytest.approx(step_seconds((9, 9), costs), rel=1e-3)
    assert fit_to_noise(costs, 9.0) == fit_to_noise(costs, 1.0)  # times by chance are not noise
    assert [cost.limit for cost in fit_to_noise(costs, 0.3)] == [9, None]
    assert step_seconds((0, 0), costs, 0.3) == step_seconds((), [], 0.3) == 0


def test_a_rank_without_units_does_not_hold_up_a_step() -> None:
    costs = [Cost(1, 2), Cost(100, 1)]
    assert step_seconds((3, 0), costs) == 7
    assert step_seconds((3, 1), costs) == 101
    assert step_seconds((0, 0), costs) == step_seconds((), []) == 0


def test_units_done_by_a_time_are_those_that_need_no_longer() -> None:
    generator = random.Random(9)
    for _ in range(300):
        (cost,) = random_costs(generator, 1)
        now_s = float(generator.randint(0, 200))
        units = cost.units_by(now_s, 1000)
        assert cost.seconds(units) <= now_s < cost.seconds(units + 1), cost
        assert cost.units_by(now_s, 3) == min(units, 3)
    assert Cost(0, 1e-300).units_by(1e300, 7) == Cost(0, 1e-300, None, 0, 2).units_by(1e300, 7) == 7


def test_a_cost_of_stairs_is_straight_within_a_micro_batch_and_on_the_whole() -> None:
    stairs = Cost(2, 1, 99, 8, 4)  # 2 s, 8 s for each micro-batch of four, 1 s for each sample
    assert [stairs.seconds(units) for units in (0, 1, 4, 5, 8, 9)] == [0, 11, 14, 23, 26, 35]
    assert stairs.slope_s == 3
    assert stairs.line(3) == stairs.line(4) == Cost(10, 1, 99)
    assert stairs.line(8) == Cost(2, 3, 99)
    assert stairs.line(9) == Cost(8, 3, 99)
    for units in range(1, 40):
        assert stairs.line(units).seconds(units) == stairs.seconds(units)
    straight = Cost(2, 1, 99)
    assert straight.line(9) is straight
    fixed = Cost(2, 1, per_batch_s=4, batch=1)
    assert fixed.line(0) == fixed.line(1) == fixed.line(7) == Cost(2, 5)
    assert stairs.line(0) == stairs.line(1)
    assert straight.slope_s == 1


@pytest.mark.parametrize(
    "numbers",
    [(-1, 1), (0, 0), (0, -1), (math.nan, 1), (0, math.nan), (math.inf, 1), (0, math.inf), (0, 1, -1),
     (0, 1, None, 1), (0, 1, None, -1, 4), (0, 1, None, math.inf, 4), (0, 1, None, math.nan, 4), (0, 1, None, 0, 0)],
)  # fmt: skip
def test_costs_that_no_machine_has_are_refused(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Cost(*numbers)  # type: ignore[arg-type]


def test_more_units_than_the_limits_hold_are_refused_with_both_numbers() -> None:
    costs = [Cost(0, 1, 4), Cost(0, 1, 3)]
    assert balance_shares(7, costs) == (4, 3)
    with pytest.raises(ValueError, match=r"8 units to share: expected .* no more than the 7 that 2 ranks can take"):
        balance_shares(8, costs)
    with pytest.raises(ValueError, match="-1 units to share"):
        balance_shares(-1, costs)
    with pytest.raises(ValueError, match="-1 units to share"):
        balance_shares(-1, [Cost(0, 1)])
    with pytest.raises(ValueError, match="1 units to share"):
        balance_shares(1, [])


def test_a_rank_whose_presence_lasts_longer_than_the_work_of_the_others_is_named() -> None:
    costs = [Cost(1, 1), Cost(1, 1), Cost(30, 9)]
    assert balance_shares(20, costs) == (10, 10, 0)  # a step of 11 s, if the third were not awaited
    assert slowed_by(20, costs, (1, 1, 30)) == [(2, 19)]
    assert slowed_by(20, costs, (1, 1, 11)) == []
    assert slowed_by(200, costs, (1, 1, 30)) == []  # it helps with a step that is long enough
    assert slowed_by(20, costs, (1, 1, 11.2)) == []  # less than 2 % is not worth a word


def test_two_ranks_that_hide_behind_each_other_are_both_named() -> None:
    costs = [Cost(1, 1), Cost(30, 9), Cost(1, 1), Cost(40, 9)]
    assert slowed_by(20, costs, (1, 30, 1, 30)) == [(1, 19), (3, 19)]  # without only one of them nothing is gained
    assert slowed_by(20, costs, (1, 30, 1, 40)) == [(1, 19), (3, 29)]


def test_a_rank_that_helps_although_it_is_the_slowest_is_not_named() -> None:
    costs = [Cost(1, 1), Cost(12, 1)]
    assert balance_shares(20, costs) == (16, 4)
    assert slowed_by(20, costs, (1, 12)) == []  # 17 s with it, 21 s alone
    assert slowed_by(20, costs, (1, 30)) == [(1, 9)]
    assert slowed_by(20, [*costs, Cost(30, 9)], (1, 17.5, 30)) == [(2, 12.5)]


def test_a_rank_the_others_cannot_do_without_is_not_named() -> None:
    assert slowed_by(20, [Cost(1, 1, 19), Cost(30, 9)], (1, 60)) == []
    assert slowed_by(20, [Cost(30, 9)], (30,)) == slowed_by(0, [Cost(30, 9)], (30,)) == []
    assert slowed_by(20, [Cost(1, 1, 20), Cost(30, 9)], (1, 60)) == [(1, 39)]
