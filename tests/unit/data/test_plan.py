"""Which samples make a step: every sample once per epoch, in an order that no machine, world or share can change."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetseq.data.plan import (
    BlockOrder,
    EpochOrder,
    GlobalBatch,
    Indices,
    Lengths,
    MicroBatchCap,
    Planner,
    Position,
    StepPlan,
    cut,
    derive_seed,
    steps_in_epoch,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "order.json"
MOST_SAMPLES_HELD = 8192  # positions permuted at once


def whole(n: int, *, seed: int = 7, epoch: int = 1) -> list[int]:
    order: list[int] = EpochOrder(n, seed=seed, epoch=epoch).take(0, n).tolist()
    return order


# The order of an epoch.


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 9, 10, 16, 17, 99, 100, 101, 1000, 8191, 8192, 8193, 70_001])
def test_an_epoch_takes_every_sample_once(n: int) -> None:
    for epoch in range(1, 4):
        assert sorted(whole(n, epoch=epoch)) == list(range(n))


def test_every_small_epoch_takes_every_sample_once() -> None:
    assert [n for n in range(1, 300) if sorted(whole(n)) != list(range(n))] == []
    assert whole(299) != list(range(299))  # the twin: it is not simply counted


def test_a_billion_samples_take_no_memory_and_can_be_entered_anywhere() -> None:
    n = 10**9
    tracemalloc.start()
    order = EpochOrder(n, seed=7, epoch=1)
    places = [0, 5, n // 2 + 1, n - 3]
    taken = [int(index) for place in places for index in order.take(place, place + 3)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100 * MOST_SAMPLES_HELD  # a held permutation would be 8 GB
    assert len(set(taken)) == len(taken)
    assert all(0 <= index < n for index in taken)
    assert max(taken) > n // 2 > min(taken)


def test_an_order_read_in_any_blocks_is_the_same_order() -> None:
    n, generator = 20_000, random.Random(1)
    order, right = EpochOrder(n, seed=7, epoch=1), whole(n)
    for _ in range(200):
        start = generator.randrange(n + 1)
        stop = min(n, start + generator.choice([0, 1, 2, 8191, 8192, 8193, n]))
        assert order.take(start, stop).tolist() == right[start:stop]
    assert order.take(1, 100).tolist() != right[:99]  # the twin: one position off


def test_a_position_outside_of_the_epoch_is_refused() -> None:
    order = EpochOrder(10, seed=7, epoch=1)
    assert order.take(10, 10).tolist() == []
    for start, stop in ((-1, 3), (0, 11), (5, 4)):
        with pytest.raises(IndexError, match="an epoch of 10 samples"):
            order.take(start, stop)


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {tuple(whole(50, seed=seed, epoch=epoch)) for seed in (7, 8) for epoch in range(1, 21)}
    assert len(orders) == 40
    assert whole(50, seed=7, epoch=3) == whole(50, seed=7, epoch=3)


def test_without_shuffling_the_order_is_the_datas_own() -> None:
    order = EpochOrder(10, seed=7, epoch=1, shuffle=False)
    assert order.take(2, 6).tolist() == [2, 3, 4, 5]
    assert whole(10) != list(range(10))


def distance_from_uniform(table: np.ndarray) -> float:
    """How far counts are from all being equal, in standard deviations of the chi-square that chance would give."""
    expected = table.sum() / table.size
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float((((table - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_every_sample_is_equally_likely_at_every_position() -> None:
    n, epochs = 20, 1000
    table, still = np.zeros((n, n)), np.zeros((n, n))
    for epoch in range(epochs):
        table[np.arange(n), whole(n, epoch=epoch)] += 1
        still[np.arange(n), (np.arange(n) + epoch % 3) % n] += 1
    assert distance_from_uniform(table) < 4  # measured: between -1 and 3 for n from 7 to 100
    assert distance_from_uniform(still) > 100  # the twin: a rotation is no shuffle


def test_neighbours_do_not_stay_neighbours() -> None:
    n = 100_003
    steps = np.diff(np.array(whole(n))) % n  # (n - 1,): from each sample to the next one
    observed, _ = np.histogram(steps, bins=20, range=(0, n))
    expected = (n - 1) / 20
    assert ((observed - expected) ** 2 / expected).sum() < 60  # 19 degrees of freedom; measured: 12 to 37
    in_batches = np.arange(n).reshape(-1, 1)[np.argsort(np.arange(n) // 64 % 7, kind="stable")].ravel()
    observed, _ = np.histogram(np.diff(in_batches) % n, bins=20, range=(0, n))
    assert ((observed - expected) ** 2 / expected).sum() > 1e5  # the twin: batches of neighbours are shuffled


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1000])
def test_an_epoch_in_blocks_takes_every_sample_once_wherever_it_is_entered(block: int) -> None:
    generator = random.Random(1)
    for n in (1, 2, 5, 6, 7, 63, 64, 65, 1000, 1601, 20_000):
        order = BlockOrder(n, block, seed=7, epoch=2)
        right = order.take(0, n).tolist()
        assert sorted(right) == list(range(n))
        for _ in range(20):
            start = generator.randrange(n + 1)
            stop = min(n, start + generator.choice([0, 1, 2, 16 * block, n]))
            assert order.take(start, stop).tolist() == right[start:stop]
        assert order.take(n, n).tolist() == []
        with pytest.raises(IndexError, match=f"an epoch of {n} samples"):
            order.take(0, n + 1)


def test_sixteen_blocks_at_a_time_are_read_and_their_samples_shuffled() -> None:
    n, block = 100_000, 100
    order = BlockOrder(n, block, seed=7, epoch=1)
    first = order.take(0, 16 * block)
    blocks, counts = np.unique(first // block, return_counts=True)
    assert (len(blocks), set(counts.tolist())) == (16, {block})
    assert len(np.unique(order.take(0, 64) // block)) > 10, "a step has samples of many blocks"
    assert len(np.unique(EpochOrder(n, seed=7, epoch=1).take(0, 16 * block) // block)) > 500  # the twin
    assert np.diff(blocks).max() > 50, "which lie all over the data"


def test_every_sample_is_equally_likely_at_every_position_of_an_epoch_in_blocks() -> None:
    n, block, epochs = 100, 3, 2000  # three windows, and a last block of one sample
    table = np.zeros((n, n))
    for epoch in range(epochs):
        table[np.arange(n), BlockOrder(n, block, seed=7, epoch=epoch).take(0, n)] += 1
    assert distance_from_uniform(table) < 4
    orders = {tuple(BlockOrder(n, size, seed=seed, epoch=1).take(0, n)) for size in (2, 3) for seed in (7, 8)}
    assert len(orders) == 4


def test_the_order_never_changes_silently() -> None:
    # runs that resume, and published curves, depend on every one of these numbers
    golden = json.loads(GOLDEN.read_text())
    for case in golden["orders"]:
        order = EpochOrder(case["n"], seed=case["seed"], epoch=case["epoch"])
        start = case["start"]
        assert order.take(start, start + len(case["indices"])).tolist() == case["indices"]
        twin = EpochOrder(case["n"], seed=case["seed"] + 1, epoch=case["epoch"])
        assert case["n"] < 10 or twin.take(start, start + len(case["indices"])).tolist() != case["indices"]
    for case in golden["blocks"]:
        by_block = BlockOrder(case["n"], case["block"], seed=case["seed"], epoch=case["epoch"])
        assert by_block.take(case["start"], case["start"] + len(case["indices"])).tolist() == case["indices"]
    for case in golden["seeds"]:
        assert derive_seed(*case["parts"]) == case["seed"]


def test_derived_seeds_tell_their_parts_apart() -> None:
    seeds = {derive_seed(*parts) for parts in ((1, 2), (2, 1), (12,), (1, 2, 0), (1, -2), (2**63, 0), ())}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


# Steps.


def planner(
    n: int, batch: GlobalBatch, *, seed: int = 7, lengths: Lengths | None = None, curriculum: int = 0
) -> Planner:
    return Planner(n, seed, batch, lambda total: (total,), curriculum, lengths)


def epoch_of(plans: Planner, epoch: int) -> Iterator[StepPlan]:
    """The steps of one epoch."""
    for plan in plans.plans(Position(step=1, epoch=epoch)):
        yield plan
        if plan.ends_epoch:
            return


def random_shares(generator: random.Random, total: int) -> tuple[int, ...]:
    cuts = sorted(generator.randint(0, total) for _ in range(generator.randint(0, 4)))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, total]))


def test_steps_take_every_position_once_for_any_batch_ranks_and_caps() -> None:
    generator = random.Random(2)
    for _ in range(150):
        n = generator.randint(1, 200)
        table = np.array([generator.randint(1, 30) for _ in range(n)])
        batch = GlobalBatch(
            generator.choice([None, generator.randint(1, 2 * n)]),
            generator.randint(1, 300),
            tuple(generator.randint(1, 3) for _ in range(generator.randint(1, 3))),
        )
        cap = MicroBatchCap(
            generator.choice([None, generator.randint(1, 9)]),
            generator.choice([None, generator.randint(1, 60)]),
            generator.choice([1, 1, 2, 4]),
        )
        plans = Planner(n, 7, batch, lambda total: random_shares(generator, total), lengths=lambda at: table[at])  # noqa: B023
        for epoch in (1, 2):
            taken: list[int] = []
            for plan in epoch_of(plans, epoch):
                for rank in range(len(plan.shares)):
                    for start, stop in plans.micro_batches(plan, rank, cap):
                        assert stop > start
                        taken += range(start, stop)
            assert taken == list(range(n)), (n, batch, cap)  # in order, so ranks take neighbouring slices


def test_units_are_the_same_whatever_the_shares() -> None:
    generator = random.Random(4)
    for _ in range(150):
        n, unit = generator.randint(1, 200), generator.randint(1, 9)
        batch, cap = GlobalBatch(generator.randint(1, n)), MicroBatchCap(unit)
        alone = Planner(n, 7, batch, lambda total: (total,), unit=unit)
        shared = Planner(n, 7, batch, lambda total: random_shares(generator, total), unit=unit)
        for mine, plan in zip(epoch_of(alone, 1), epoch_of(shared, 1), strict=True):
            units = [piece for rank in range(len(plan.shares)) for piece in shared.micro_batches(plan, rank, cap)]
            assert units == alone.micro_batches(mine, 0, cap), (n, unit, batch, plan.shares)
            assert all((start - plan.start) % unit == 0 for start, _ in units)
            assert all(stop - start == unit for start, stop in units[:-1])


def test_the_last_step_of_an_epoch_is_what_is_left() -> None:
    plans = list(epoch_of(planner(25, GlobalBatch(10)), 1))
    assert [(plan.start, plan.stop, plan.ends_epoch) for plan in plans] == [
        (0, 10, False),
        (10, 20, False),
        (20, 25, True),
    ]
    assert plans[-1].next_position() == Position(step=4, epoch=2, consumed=0)
    assert plans[0].next_position() == Position(step=2, epoch=1, consumed=10)
    # the twin: where the batch divides the data no step is smaller
    assert {plan.size for plan in epoch_of(planner(30, GlobalBatch(10)), 1)} == {10}


def test_a_batch_larger_than_the_data_is_all_of_it() -> None:
    (plan,) = epoch_of(planner(5, GlobalBatch(100)), 1)
    assert (plan.size, plan.ends_epoch) == (5, True)


def test_update_freq_counts_by_epoch_and_its_last_value_stays() -> None:
    batch = GlobalBatch(2, update_freq=(1, 3, 5))
    sizes = [next(iter(epoch_of(planner(100, batch), epoch))).size for epoch in range(1, 6)]
    assert sizes == [2, 6, 10, 10, 10]
    counted = [steps_in_epoch(100, batch, epoch) for epoch in range(1, 6)]
    assert counted == [len(list(epoch_of(planner(100, batch), epoch))) for epoch in range(1, 6)] == [50, 17, 10, 10, 10]
    assert counted != [steps_in_epoch(100, GlobalBatch(2), epoch) for epoch in range(1, 6)]


def test_the_steps_of_a_token_batch_are_not_known_beforehand() -> None:
    assert steps_in_epoch(100, GlobalBatch(None, 64), 1) is None
    assert steps_in_epoch(100, GlobalBatch(8, 64), 1) is None
    assert steps_in_epoch(100, GlobalBatch(8), 1) == 13


def test_the_first_epochs_of_a_curriculum_keep_the_datas_order() -> None:
    plans = planner(30, GlobalBatch(10), curriculum=2)
    orders = [plans.order(epoch).take(0, 30).tolist() for epoch in (1, 2, 3)]
    assert orders[0] == orders[1] == list(range(30)) != orders[2]


def test_an_epoch_that_was_left_can_be_entered_again() -> None:
    plans = planner(30, GlobalBatch(10))
    first = plans.order(1).take(0, 30).tolist()
    plans.order(5)
    assert plans.order(1).take(0, 30).tolist() == first == whole(30, epoch=1)


# Steps that are full by tokens.


def fill(lengths: list[int], tokens: int, samples: int | None = None) -> list[int]:
    """Sizes of the steps over samples of these lengths in their own order."""
    table = np.array(lengths, np.int64)
    plans = planner(len(lengths), GlobalBatch(samples, tokens), lengths=lambda at: table[at], curriculum=1)
    return [plan.size for plan in epoch_of(plans, 1)]


def test_a_step_takes_the_longest_run_of_samples_that_fits_its_tokens() -> None:
    assert fill([5, 5, 5, 5, 5], 10) == [2, 2, 1]
    assert fill([5, 5, 5, 5, 5], 14) == [2, 2, 1]
    assert fill([5, 5, 5, 5, 5], 15) == [3, 2]
    assert fill([1, 9, 9, 1], 10) == [2, 2]


def test_a_sample_longer_than_the_limit_is_a_step_of_its_own() -> None:
    assert fill([3, 99, 3, 3], 6) == [1, 1, 2]
    assert fill([99, 99, 99], 1) == [1, 1, 1]


def test_of_samples_and_tokens_the_first_limit_ends_the_step() -> None:
    assert fill([1, 1, 1, 9, 9, 9], 18, samples=3) == [3, 2, 1]
    assert fill([1, 1, 1, 9, 9, 9], 18) == [4, 2]


def test_empty_samples_do_not_end_a_step() -> None:
    assert fill([0, 0, 5, 0, 0, 5, 0], 5) == [5, 2]


def longest_run(lengths: list[int], start: int, tokens: int) -> int:
    """The plain loop: one sample in any case, then as long as the next one fits."""
    stop, used = start + 1, lengths[start]
    while stop < len(lengths) and used + lengths[stop] <= tokens:
        used += lengths[stop]
        stop += 1
    return stop


def test_a_run_over_many_looks_at_the_lengths_equals_a_plain_loop() -> None:
    # more than the 1024 samples that are looked at per round
    generator = random.Random(3)
    for tokens in (1, 100, 4095, 4096, 10_000, 10**6):
        lengths = [generator.randint(0, 8) for _ in range(5000)]
        sizes, at = [], 0
        while at < len(lengths):
            stop = longest_run(lengths, at, tokens)
            sizes.append(stop - at)
            at = stop
        assert fill(lengths, tokens) == sizes
        assert tokens == 10**6 or fill(lengths, tokens + 9) != sizes  # the twin: another limit


# Micro-batches.


def sizes(start: int, stop: int, cap: MicroBatchCap, lengths: list[int] | None = None) -> list[int]:
    order = EpochOrder(1000, seed=7, epoch=1, shuffle=False)
    table = None if lengths is None else np.array(lengths, np.int64)
    pieces = cut(order, start, stop, cap, lengths=None if table is None else lambda at: table[at])
    assert [piece[0] for piece in pieces] == [start, *(piece[1] for piece in pieces[:-1])][: len(pieces)]
    return [end - begin for begin, end in pieces]


def test_a_share_is_cut_into_micro_batches_that_fit_the_node() -> None:
    assert sizes(3, 13, MicroBatchCap()) == [10]
    assert sizes(3, 13, MicroBatchCap(4)) == [4, 4, 2]
    assert sizes(3, 13, MicroBatchCap(10)) == [10]
    assert sizes(3, 13, MicroBatchCap(1)) == [1] * 10
    assert sizes(3, 3, MicroBatchCap(4)) == []


def test_micro_batches_are_rounded_down_to_a_multiple_where_they_hold_more() -> None:
    assert sizes(0, 20, MicroBatchCap(7, multiple=4)) == [4, 4, 4, 4, 4]
    assert sizes(0, 22, MicroBatchCap(7, multiple=4)) == [4, 4, 4, 4, 6]  # the last one holds what is left
    assert sizes(0, 6, MicroBatchCap(3, multiple=8)) == [3, 3]  # nothing to round to
    assert [MicroBatchCap(*cap).most_samples for cap in ((7, None, 4), (8, None, 4), (3, None, 8))] == [4, 8, 3]
    assert MicroBatchCap(None, 64, 4).most_samples is None
    assert sizes(0, 20, MicroBatchCap(7)) == [7, 7, 6]


def test_micro_batches_are_cut_by_tokens_where_lengths_are_known() -> None:
    assert sizes(0, 6, MicroBatchCap(tokens=10), [5, 5, 5, 99, 1, 1]) == [2, 1, 1, 2]
    assert sizes(0, 6, MicroBatchCap(1, tokens=10), [5, 5, 5, 99, 1, 1]) == [1] * 6
    assert sizes(0, 6, MicroBatchCap(tokens=10)) == [6]


def test_lengths_are_asked_for_by_sample_and_not_by_position() -> None:
    asked: list[int] = []

    def lengths(indices: Indices) -> Indices:
        asked.extend(indices.tolist())
        return np.ones(len(indices), np.int64)

    order = EpochOrder(100, seed=7, epoch=1)
    cut(order, 10, 14, MicroBatchCap(tokens=100), lengths=lengths)
    assert asked == order.take(10, 14).tolist() != [10, 11, 12, 13]


# Micro-batches that grow.


def test_a_ramp_doubles_and_its_last_size_was_seen_before() -> None:
    ramp = MicroBatchCap(is_ramp=True)
    assert [sizes(3, 3 + count, ramp) for count in range(9)] == [
        [], [1], [1, 1], [1, 1, 1], [1, 2, 1], [1, 2, 2], [1, 2, 2, 1], [1, 2, 2, 2], [1, 2, 4, 1]
    ]  # fmt: skip
    assert sizes(0, 40, ramp) == [1, 2, 4, 8, 16, 9]
    assert sizes(0, 40, MicroBatchCap()) == [40]


def test_a_ramp_respects_what_a_node_holds() -> None:
    assert sizes(0, 20, MicroBatchCap(3, is_ramp=True)) == [1, 2, 3, 3, 3, 3, 3, 2]
    assert sizes(0, 20, MicroBatchCap(6, multiple=3, is_ramp=True)) == [1, 2, 3, 6, 6, 2]
    assert sizes(0, 9, MicroBatchCap(tokens=10, is_ramp=True), [5, 5, 5, 1, 1, 1, 9, 9, 9]) == [1, 2, 3, 1, 1, 1]
    # one long sample does not throw it back
    assert sizes(0, 20, MicroBatchCap(tokens=10, is_ramp=True), [1] * 7 + [10] + [1] * 12) == [1, 2, 4, 1, 8, 4]


def test_any_ramp_covers_its_share_and_never_ends_with_its_largest() -> None:
    generator = random.Random(5)
    for _ in range(300):
        start, size = generator.randrange(5), generator.randrange(1, 80)
        lengths = generator.choice([None, [generator.randint(0, 9) for _ in range(90)]])
        cap = MicroBatchCap(
            generator.choice([None, generator.randint(1, 20)]),
            generator.choice([None, generator.randint(1, 40)]),
            generator.choice([1, 1, 2, 4]),
            is_ramp=True,
        )
        found, at = sizes(start, start + size, cap, lengths), start
        assert sum(found) == size
        assert min(found) > 0
        for number, each in enumerate(found):
            before = max(found[:number], default=0)
            assert each <= max(1, 2 * before), (cap, found)
            assert cap.samples is None or each <= cap.samples
            assert each <= cap.multiple or each % cap.multiple == 0 or number == len(found) - 1
            assert cap.tokens is None or lengths is None or each == 1 or sum(lengths[at : at + each]) <= cap.tokens
            at += each
        assert len(found) == 1 or found[-1] <= max(found[:-1]), (cap, found)


# The proof that ranks plan the same step.

PLAN = StepPlan(step=4, epoch=2, start=10, stop=20, shares=(5, 3, 2), ends_epoch=False)


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, step=5),
        replace(PLAN, epoch=3),
        replace(PLAN, start=9),
        replace(PLAN, stop=21),
        replace(PLAN, shares=(5, 2, 3)),
        replace(PLAN, shares=(5, 5)),
        replace(PLAN, shares=(5, 3, 2, 0)),
    ],
)
def test_the_digest_differs_where_anything_of_the_step_does(other: StepPlan) -> None:
    assert other.digest() != PLAN.digest() == replace(PLAN).digest()
    assert 0 <= PLAN.digest() < 2**63


def test_the_digest_of_a_planner_differs_where_the_data_or_their_order_do() -> None:
    base, batch = planner(100, GlobalBatch(10)), GlobalBatch(10)
    others = [planner(99, batch), planner(100, batch, seed=8), planner(100, batch, curriculum=1)]
    others.append(replace(planner(100, batch), block=8))
    digests = {base.digest(PLAN), base.digest(replace(PLAN, stop=21)), *(other.digest(PLAN) for other in others)}
    assert len(digests) == 6
    assert planner(100, batch).digest(PLAN) == base.digest(PLAN)


def test_ranks_take_neighbouring_slices_of_a_step() -> None:
    assert [PLAN.range_of(rank) for rank in range(3)] == [(10, 15), (15, 18), (18, 20)]
    idle = replace(PLAN, shares=(10, 0, 0))
    assert [idle.range_of(rank) for rank in range(3)] == [(10, 20), (20, 20), (20, 20)]
    assert planner(100, GlobalBatch(10)).micro_batches(idle, 1, MicroBatchCap(4)) == []
