"""Shares: of all ways to divide a step, the one whose slowest rank is done first, exactly."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from hetseq.capacity import assign_shares


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
