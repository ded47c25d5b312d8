"""Data in pieces: how much of each step comes from which, and that every sample comes once, whoever has it."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from hetseq.data.plan import GlobalBatch, MicroBatchCap, Planner, Position, StepPlan, epoch_order
from hetseq.data.shards import ShardedOrder, Shards, apportioned
from hetseq.training.share_policy import assigner_by

PAIR = Shards((30, 10), ((0, 2), (1,)), 3)


def webster(samples: list[int]) -> list[tuple[int, ...]]:
    """By the definition: seat after seat to the highest quotient size / (2 k + 1), the first of equal ones."""
    seats = sorted((Fraction(2 * k + 1, size), shard) for shard, size in enumerate(samples) for k in range(size))
    given = [(0,) * len(samples)]
    for _, shard in seats:
        given.append(tuple(count + (number == shard) for number, count in enumerate(given[-1])))
    return given


def test_apportionment_is_websters_for_every_number_of_seats() -> None:
    generator = random.Random(1)
    for _ in range(100):
        samples = [generator.choice([1, 2, 3, 7, 50, 200]) for _ in range(generator.randint(1, 9))]
        assert [apportioned(tuple(samples), seats) for seats in range(sum(samples) + 1)] == webster(samples), samples


def test_apportionment_of_billions_is_exact() -> None:
    samples = (10**12 + 1, 10**12, 3)
    assert apportioned(samples, sum(samples)) == samples
    for seats in (7, 10**6, 10**12, 2 * 10**12):
        given, more = apportioned(samples, seats), apportioned(samples, seats + 1)
        assert sum(given) == seats
        assert sorted(late - early for early, late in zip(given, more)) == [0, 0, 1]


def planner(shards: Shards, batch: int, *, weights: tuple[float, ...] | None = None, **options: object) -> Planner:
    assign = assigner_by(weights or (1.0,) * shards.group_count)
    return Planner(shards.total, 7, GlobalBatch(batch), assign, shards=shards, **options)  # type: ignore[arg-type]


def taken(plans: Planner, plan: StepPlan, shards: Shards) -> list[tuple[int, int]]:
    """(shard, index in it) of every sample of a step, rank after rank, each from what it can read."""
    found = []
    for rank in range(shards.group_count):
        for start, stop in plans.micro_batches(plan, rank, MicroBatchCap(4)) if plan.shares[rank] else []:
            shard = next(number for number, ranks in enumerate(shards.holders) if rank in ranks)
            found += [(shard, index) for index in plans.order(plan.epoch).take(start, stop).tolist()]
    return found


def steps(plans: Planner, epochs: int = 1) -> list[StepPlan]:
    found = []
    for plan in plans.plans(Position()):
        if plan.epoch > epochs:
            return found
        found.append(plan)
    raise AssertionError


@pytest.mark.parametrize("options", [{}, {"curriculum": 1}, {"block": 4}], ids=["shuffled", "in order", "in blocks"])
@pytest.mark.parametrize("batch", [1, 3, 8, 40, 64])
def test_every_sample_comes_once_in_an_epoch_from_a_rank_that_can_read_it(batch: int, options: dict[str, int]) -> None:
    for shards in (PAIR, Shards((1, 1, 17, 5), ((3,), (1, 4), (0,), (2,)), 5)):
        plans = planner(shards, batch, **options)
        mine = [taken(plans, plan, shards) for plan in steps(plans)]
        assert all(len(samples) == plan.size for samples, plan in zip(mine, steps(plans)))
        whole = sorted(sample for samples in mine for sample in samples)
        assert whole == [(shard, index) for shard, size in enumerate(shards.samples) for index in range(size)]


def test_steps_mix_the_shards_in_proportion_and_only_holders_share_a_shard() -> None:
    plans = planner(PAIR, 8, weights=(2.0, 5.0, 1.0))
    assert [plans.works(plan) for plan in steps(plans)] == [(6, 2)] * 5
    assert {plan.shares for plan in steps(plans)} == {(4, 2, 2)}
    assert {plan.lineup for plan in steps(plans)} == {(0, 2, 1)}
    first = steps(plans)[0]
    assert [first.range_of(rank) for rank in range(3)] == [(0, 4), (6, 8), (4, 6)]


def test_other_ranks_and_weights_take_the_same_samples_in_every_step() -> None:
    one = Shards((30, 10), ((0,), (1,)), 2)
    here, there = planner(PAIR, 8, weights=(1.0, 1.0, 3.0)), planner(one, 8)
    for mine, other in zip(steps(here, epochs=2), steps(there, epochs=2)):
        assert sorted(taken(here, mine, PAIR)) == sorted(taken(there, other, one))


def test_epochs_differ_and_a_copy_plans_alike() -> None:
    plans = planner(PAIR, 8)
    first, second = (taken(plans, plan, PAIR) for plan in steps(plans, epochs=2)[::5])
    assert first != second
    copy = plans.copy()
    assert steps(copy) == steps(plans)
    assert copy.digest(steps(copy)[0]) == plans.digest(steps(plans)[0])


def test_other_sizes_or_holders_have_another_digest() -> None:
    plan = StepPlan(1, 1, 0, 8, (8, 0, 0), ends_epoch=False)
    variants = [PAIR, Shards((10, 30), PAIR.holders, 3), None]
    digests = {
        Planner(40, 7, GlobalBatch(8), assigner_by((1.0,) * 3), shards=shards).digest(plan) for shards in variants
    }
    assert len(digests) == 3


def test_a_rank_that_can_read_no_shard_gets_nothing() -> None:
    shards = Shards((30, 10), ((2,), (1,)), 3)
    plans = planner(shards, 8)
    assert steps(plans)[0].shares == (0, 2, 6)
    assert steps(plans)[0].range_of(0) == (8, 8)


def test_ranks_without_weight_that_alone_can_read_a_shard_share_it_equally() -> None:
    assert steps(planner(PAIR, 8, weights=(0.0, 1.0, 0.0)))[0].shares == (3, 2, 3)


def test_positions_of_two_shards_are_nobodys() -> None:
    order = ShardedOrder((30, 10), [epoch_order(size, seed=1, epoch=1) for size in (30, 10)], step=8)
    assert np.array_equal(order.take(6, 8), epoch_order(10, seed=1, epoch=1).take(0, 2))
    assert order.take(8, 8).shape == (0,)
    for start, stop in ((5, 7), (0, 8), (7, 9)):
        with pytest.raises(IndexError, match="no rank can read both"):
            order.take(start, stop)
    with pytest.raises(IndexError, match="positions 39 to 41 of an epoch of 40 samples"):
        order.take(39, 41)


def test_a_shard_that_nobody_holds_is_known_as_lost() -> None:
    gone = Shards((30, 10), ((0, 1), ()), 2)
    assert gone.lost == (1,)
    assert PAIR.lost == ()
    assert sum(steps(planner(gone, 8))[0].shares) == 8  # planned all the same
