"""Shares of coming steps from measured costs: the same on every rank, two steps ahead, and advice given once."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hetseq.balance.cost_meter import WARM_UP, AtOnce
from hetseq.balance.layout import Layout, one_rank_each
from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import CommitRow, Measured, SaveStatus, Vote, Wish
from hetseq.data.plan import Assign, GlobalBatch, Planner, Position, StepPlan
from hetseq.data.shards import Shards
from hetseq.training.share import Part
from hetseq.training.share_policy import AlternatingShares, FixedShares, MeasuredShares, Shift, assigner_by, turn_of

EQUAL = (1.0, 1.0)


class Loader:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Assign]] = []

    def change(self, step: int, *, assign: Assign) -> None:
        self.told.append((step, assign))


class Rank:
    """A rank that follows."""

    def __init__(
        self, weights: Sequence[float] = EQUAL, *, rank: int = 0, layout: Layout | None = None, **pace: Any
    ) -> None:
        self.planner = Planner(10_000, 7, GlobalBatch(12), assigner_by(tuple(weights)))
        self.loader: Any = Loader()
        self.pace: Any = MeasuredShares(
            self.planner, self.loader, rank=rank, layout=layout or one_rank_each(len(weights)), **pace
        )

    def plan(self, step: int) -> StepPlan:
        return self.planner.plan(Position(step, 1, (step - 1) * 12))

    def follow(self, step: int, ranks: Sequence[Measured]) -> Shift | None:
        nothing = np.zeros(1, np.bool_)
        rows = [CommitRow(0, Vote.OK, 0, (), (), nothing, one, Wish.NONE, SaveStatus()) for one in ranks]
        return self.pace.follow(self.plan(step), rows)


def costing(per_unit_s: float, fixed_s: float = 0.0, overhead_s: float = 0.0) -> Measured:
    return Measured(overhead_s=overhead_s, cost=Cost(fixed_s, per_unit_s))


def test_measured_costs_change_the_shares_two_steps_later_on_all_ranks_alike() -> None:
    ranks = [Rank(), Rank()]
    for rank in ranks:
        # 6 samples of 3 s each, and then 9 of 1 s beside 3 of 3 s
        assert rank.follow(5, [costing(1.0), costing(3.0)]) == Shift(7, (6, 6), (9, 3), 18.0, 9.0)
        assert [rank.plan(step).shares for step in (5, 6, 7, 8)] == [(6, 6), (6, 6), (9, 3), (9, 3)]
        assert [(step, assign(12)) for step, assign in rank.loader.told] == [(7, (9, 3))]
    assert ranks[0].plan(7).digest() == ranks[1].plan(7).digest()


class Wide(Rank):
    """One of three ranks that share steps of 96 samples."""

    def __init__(self, rank: int) -> None:
        super().__init__((1.0,) * 3, rank=rank)
        self.planner = Planner(10_000, 7, GlobalBatch(96), assigner_by((1.0,) * 3))
        self.pace = MeasuredShares(self.planner, self.loader, rank=rank, layout=one_rank_each(3))


def test_steps_that_are_noisy_give_slow_groups_less_on_all_ranks_alike() -> None:
    shares = {}
    for noise in (0.02, 0.3):
        ranks = [Wide(0), Wide(1)]
        chance = random.Random(5)
        for step in range(1, 101):
            share = ranks[0].plan(step).shares
            busy_s = [cost_s * n * chance.lognormvariate(0, noise) for cost_s, n in zip((1.0, 4.0, 4.0), share)]
            rows = [
                Measured(0.7 * each_s, 0.1 * each_s, 99.0, 0.2 * each_s, cost=Cost(0.0, cost_s))
                for each_s, cost_s in zip(busy_s, (1.0, 4.0, 4.0))
            ]
            shifts = [rank.follow(step, rows) for rank in ranks]
            assert shifts[0] == shifts[1]
            assert shifts[0] is None or shifts[0].after_s < shifts[0].before_s
        assert ranks[0].plan(102).digest() == ranks[1].plan(102).digest()
        assert ranks[0].pace.divide(12) == (8, 2, 2)  # outside training
        shares[noise] = ranks[0].plan(102).shares
    assert shares[0.02] == (64, 16, 16)
    assert 67 <= shares[0.3][0] <= 74


def test_the_same_costs_again_change_nothing() -> None:
    rank = Rank()
    assert rank.follow(1, [costing(1.0), costing(3.0)]) is not None
    assert all(rank.follow(step, [costing(1.0), costing(3.0)]) is None for step in range(2, 60))
    assert len(rank.loader.told) == 1
    # the twin: other costs
    shifts = [rank.follow(step, [costing(3.0), costing(1.0)]) for step in range(60, 70)]
    assert [shift.after for shift in shifts if shift] == [(3, 9)]


def test_a_shift_tells_the_shares_that_hold_when_it_begins() -> None:
    rank = Rank()
    assert rank.follow(1, [costing(1.0), costing(3.0)]) == Shift(3, (6, 6), (9, 3), 18.0, 9.0)
    # decided before the first shift holds, and yet told against it
    assert rank.follow(2, [costing(5.0), costing(1.0)]) == Shift(4, (9, 3), (2, 10), 45.0, 10.0)
    assert [rank.plan(step).shares for step in (2, 3, 4)] == [(6, 6), (9, 3), (2, 10)]


def test_a_fixed_part_of_the_cost_counts() -> None:
    rank = Rank()
    # 4 s before the first sample: 8 samples beside 4
    assert rank.follow(1, [costing(1.0), costing(1.0, fixed_s=4.0)]) == Shift(3, (6, 6), (8, 4), 10.0, 8.0)


def test_as_long_as_no_cost_is_known_shares_stay_as_they_are() -> None:
    rank = Rank((1.0, 1.0, 1.0))
    assert rank.follow(1, [Measured()] * 3) is None
    assert rank.plan(3).shares == (4, 4, 4)
    # one that is not known counts as the mean of the others
    assert rank.follow(2, [costing(1.0), Measured(), costing(3.0)]) == Shift(4, (4, 4, 4), (7, 3, 2), 12.0, 7.0)


def test_a_rank_alone_has_nobody_to_share_with() -> None:
    rank = Rank((1.0,))
    assert rank.follow(1, [costing(1.0)]) is None
    assert rank.loader.told == []


def test_costs_are_counted_in_units_where_steps_are() -> None:
    rank = Rank()
    rank.planner.unit = 4  # three units a step, of 2 s and of 1 s each
    shift = rank.follow(1, [costing(2.0), costing(1.0)])
    assert shift == Shift(3, (2, 1), (1, 2), 4.0, 2.0)
    assert rank.plan(3).shares == (4, 8)


def test_what_lies_outside_training_is_divided_by_speed() -> None:
    rank = Rank((5.0, 1.0))
    assert rank.pace.divide(12) == (6, 6)  # before anything is known
    rank.follow(1, [costing(1.0, fixed_s=100.0), costing(3.0)])
    assert rank.pace.divide(12) == (9, 3)  # fixed costs are those of a training step
    batches = Rank((5.0, 1.0))
    batches.follow(1, [Measured(cost=Cost(0.0, 1.0, None, 8.0, 4)), costing(1.0)])
    assert batches.pace.divide(12) == (3, 9)  # those of micro-batches are not: a sample costs a quarter of one
    assert FixedShares((5.0, 1.0)).divide(12) == (10, 2)


@pytest.mark.parametrize("kind", ["fixed", "measured"])
def test_a_rank_learns_its_own_cost(kind: str) -> None:
    def pace_of(at_once: AtOnce | None) -> Any:
        words = {"at_once": lambda: at_once}
        return FixedShares(EQUAL, **words) if kind == "fixed" else Rank(**words).pace

    # 3 s for each micro-batch and 2 s for each sample, and 0.5 s besides
    part = Part((1.0,), (1, 2, 4, 8, 16) * 2, (5.0, 7.0, 11.0, 19.0, 35.0) * 2)
    costs = []
    for at_once in (None, AtOnce(6)):
        pace = pace_of(at_once)
        assert pace.learn(Part((0.0,), (), ()), overhead_s=0.5) is None
        for _ in range(WARM_UP + 20):
            cost = pace.learn(part, overhead_s=0.5)
        costs.append(cost)
    whole, sixths = costs
    assert whole.fixed_s == pytest.approx(3.5, rel=0.02)
    assert whole.per_unit_s == pytest.approx(2.0, rel=0.02)
    assert sixths.seconds(12) == pytest.approx(0.5 + 2 * 3 + 24, rel=0.02)
    assert sixths.seconds(13) == pytest.approx(0.5 + 3 * 3 + 26, rel=0.02)  # one sample more, one micro-batch more


def test_a_rank_learns_something_from_any_times() -> None:
    """A machine that does other things besides: micro-batches take up to thirty times as long, for no reason."""
    chance = random.Random(7)
    for _ in range(300):
        pace = FixedShares(EQUAL, at_once=lambda: chance.choice([None, AtOnce(1), AtOnce(4)]))
        for _ in range(12):
            sizes = tuple(chance.choice([1, 2, 5, 8]) for _ in range(chance.choice([0, 1, 1, 2, 3, 5])))
            seconds = tuple((1e-3 + 1e-4 * size) * chance.choice([1, 1, 1, 3, 30]) for size in sizes)
            cost = pace.learn(Part((0.0,), sizes, seconds), overhead_s=1e-4)
            assert cost is None or cost.seconds(1) > 0


def test_fixed_shares_follow_nothing() -> None:
    nothing = np.zeros(1, np.bool_)
    rows = [CommitRow(0, Vote.OK, 0, (), (), nothing, costing(c), Wish.NONE, SaveStatus()) for c in (1.0, 9.0)]
    assert FixedShares(EQUAL).follow(Rank().plan(1), rows) is None


# Advice.

# rank 1 could take all the work in 12 s, and rank 0 is busy for 30 s before it could begin
HINDERED = [costing(50.0, fixed_s=30.0, overhead_s=30.0), costing(1.0)]


def advice(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "slows this run down" in record.getMessage()]


def test_fixed_shares_take_turns_from_block_to_block() -> None:
    rank = Rank()
    turns = [(1.0, 1.0), (3.0, 1.0)]
    rank.pace = AlternatingShares(turns, rank.planner, rank.loader)
    seen = {}
    for step in range(1, 41):
        seen[step] = rank.plan(step).shares
        assert rank.follow(step, [costing(1.0), costing(9.0)]) is None
    blocks = [[seen[step] for step in range(first, first + 10)] for first in (1, 11, 21, 31)]
    assert blocks == [[(6, 6)] * 10, [(9, 3)] * 10] * 2
    assert [step for step, _ in rank.loader.told] == [11, 21, 31, 41]
    assert [turn_of(step, turns) for step in (10, 11, 20, 21)] == [turns[0], turns[1], turns[1], turns[0]]


def test_a_rank_that_only_holds_the_others_up_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ranks = Rank(), Rank(rank=1)
    for step in range(1, 50):
        for rank in ranks:
            rank.follow(step, HINDERED)
    assert advice(caplog) == []  # not before it is known for certain
    for step in range(50, 152):
        for rank in ranks:
            rank.follow(step, HINDERED)
    said, noted = advice(caplog)
    assert noted == said
    levels = [record.levelno for record in caplog.records if record.getMessage() == said]
    assert levels == [logging.WARNING, logging.INFO]  # all ranks know the same, one says it
    assert said.startswith("rank 0 slows this run down: without it a step would be 18.000 s shorter")
    assert "--devices" in said


def test_a_rank_that_helps_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank = Rank()
    for step in range(1, 82):
        rank.follow(step, [costing(1.0, overhead_s=5.0), costing(1.0)])
    assert advice(caplog) == []


def test_a_single_slow_step_is_no_reason_to_name_a_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank = Rank()
    for step in range(1, 82):
        overhead_s = 30.0 if step in (49, 50) else 0.1
        rank.follow(step, [costing(50.0, overhead_s=overhead_s), costing(1.0)])
    assert advice(caplog) == []


def test_nobody_is_named_while_a_cost_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank = Rank((1.0, 1.0, 1.0))
    for step in range(1, 82):
        rank.follow(step, [Measured(overhead_s=30.0), costing(1.0), costing(1.0)])
    assert advice(caplog) == []


def test_a_group_of_several_ranks_has_one_share_by_what_its_leader_measures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank = Rank(EQUAL, rank=2, layout=Layout(((0, 1), (2, 3))))
    # as two ranks of these costs have it in the first test; ranks 1 and 3 are not asked
    rows = [costing(1.0), costing(50.0), costing(3.0), Measured()]
    assert rank.follow(5, rows) == Shift(7, (6, 6), (9, 3), 18.0, 9.0)
    assert rank.pace.divide(8) == (6, 2)
    for step in range(51, 101):
        rank.follow(step, [costing(0.001), costing(0.001), costing(0.001, overhead_s=9.0), costing(0.001)])
    assert "rank 2 slows this run down" in caplog.text


class Parted(Rank):
    """Ranks 0 and 2 read 3,000 samples, rank 1 1,000 others: of 12 in a step they have 9 and 3."""

    def __init__(self) -> None:
        shards = Shards((3_000, 1_000), ((0, 2), (1,)), 3)
        self.planner = Planner(4_000, 7, GlobalBatch(12), assigner_by((1.0,) * 3), shards=shards)
        self.loader = Loader()
        self.pace = MeasuredShares(self.planner, self.loader, rank=0, layout=one_rank_each(3))


def test_shares_move_only_among_ranks_that_read_the_same_part() -> None:
    rank = Parted()
    assert rank.plan(1).shares == (5, 3, 4)
    # rank 1 is far slower, and nobody can help it
    shift = rank.follow(1, [costing(1.0), costing(9.0), costing(2.0)])
    assert shift == Shift(3, (5, 3, 4), (6, 3, 3), 27.0, 27.0)
    assert rank.plan(3).shares == (6, 3, 3)
    assert rank.pace.divide(29) == (18, 2, 9), "outside training all ranks read the same"


def test_a_slow_rank_alone_with_its_part_moves_nothing() -> None:
    rank = Parted()
    assert rank.follow(1, [costing(1.0), costing(50.0), costing(1.0)]) is None
    assert rank.loader.told == []
    assert rank.pace.divide(12) == (4, 4, 4), "nothing was adopted for the others yet"


def test_a_rank_is_advised_against_only_where_others_read_its_part(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank = Parted()
    for step in range(1, 51):
        rank.follow(step, [costing(0.001), costing(0.001, overhead_s=9.0), costing(0.001)])
    assert "slows this run down" not in caplog.text
    for step in range(51, 101):
        rank.follow(step, [costing(0.001), costing(0.001), costing(0.001, overhead_s=9.0)])
    assert "rank 2 slows this run down" in caplog.text
