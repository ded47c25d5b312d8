"""Who gets what of a step: shares that change from some step on, and shares that are counted in tokens or units."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hetseq.data.plan import GlobalBatch, Planner, Position
from tests.unit.data.test_plan import PLAN, planner

# Shares that change under way.


def test_a_change_of_shares_holds_from_its_step_on() -> None:
    plans = planner(100, GlobalBatch(10))
    plans.change(3, lambda total: (0, total))
    plans.change(5, lambda total: (total - 1, 1))
    taken = [plan.shares for plan, _ in zip(plans.plans(Position()), range(6))]
    assert taken == [(10,), (10,), (0, 10), (0, 10), (9, 1), (9, 1)]
    assert [plans.assigner(step)(4) for step in (2, 4, 9)] == [(4,), (0, 4), (3, 1)]
    plans.change(5, lambda total: (1, total - 1))  # the last word holds
    assert plans.plan(Position(step=5)).shares == (1, 9)
    with pytest.raises(AssertionError, match="in the order of steps"):
        plans.change(4, lambda total: (total,))


def test_a_copy_plans_alike_and_goes_its_own_way() -> None:
    table = np.arange(1, 101)
    own = Planner(100, 7, GlobalBatch(10), lambda total: (total,), 1, lambda at: table[at], 3)
    own.change(2, lambda total: (0, total))
    copy = own.copy()
    assert [copy.plan(Position(step)) for step in (1, 2)] == [own.plan(Position(step)) for step in (1, 2)]
    assert copy.plan(Position(epoch=2)) == own.plan(Position(epoch=2))
    assert (copy.digest(PLAN), copy.work(1, 0, 4), copy.unit) == (own.digest(PLAN), own.work(1, 0, 4), own.unit)
    copy.change(3, lambda total: (total,))
    assert copy.plan(Position(3)).shares != own.plan(Position(3)).shares == own.plan(Position(2)).shares
    assert copy.order(2) is not own.order(2)  # orders remember what they computed last


def test_a_change_at_every_step_of_a_long_run_is_not_remembered_for_ever() -> None:
    plans = planner(100, GlobalBatch(10))
    for step in range(1, 1000):
        plans.change(step + 2, lambda total, step=step: (step, total - step))  # type: ignore[misc]
        assert plans.plan(Position(step + 1)).shares == ((10,) if step == 1 else (step - 1, 11 - step))
        assert plans.plan(Position(step + 2)).shares == (step, 10 - step)
    assert len(plans._changes) <= 16


def test_work_is_counted_in_samples_tokens_or_units() -> None:
    table = np.arange(100)
    assert planner(100, GlobalBatch(10)).work(1, 3, 10) == 7
    by_tokens = planner(100, GlobalBatch(10), lengths=lambda at: table[at])
    assert by_tokens.work(2, 3, 10) == by_tokens.order(2).take(3, 10).sum() != by_tokens.work(1, 3, 10)
    assert by_tokens.work(1, 3, 3) == 0
    by_units = Planner(100, 7, GlobalBatch(10), lambda total: (total,), unit=4)
    assert [by_units.work(1, 0, stop) for stop in (0, 4, 5, 10)] == [0, 1, 2, 3]


# Shares by tokens.


def token_shares(lengths: list[int], quotas: tuple[int, ...]) -> tuple[int, ...]:
    table = np.array(lengths, np.int64)
    batch, count = GlobalBatch(len(lengths)), len(lengths)
    return Planner(count, 7, batch, lambda total: quotas, 1, lambda at: table[at]).plan(Position()).shares


def test_ranks_get_samples_whose_tokens_are_what_was_assigned() -> None:
    assert token_shares([5, 5, 5, 5], (10, 10)) == (2, 2)
    assert token_shares([9, 1, 1, 1], (9, 3)) == (1, 3) != (3, 1)  # by samples it would be three and one
    assert token_shares([1, 1, 1, 9], (3, 9)) == (3, 1)
    assert token_shares([2, 6, 2], (4, 6)) == (1, 2)  # its middle lies in the second part
    assert token_shares([2, 6, 2], (6, 4)) == (2, 1)


def test_a_rank_without_tokens_gets_no_sample_be_it_of_no_length() -> None:
    assert token_shares([0, 0, 4, 0, 4, 0, 0], (0, 4, 0, 4, 0)) == (0, 3, 0, 4, 0)
    assert token_shares([0, 4, 0], (4, 0)) == (3, 0)
    assert token_shares([0, 4, 0], (0, 4)) == (0, 3)


def test_samples_of_no_length_at_all_go_to_one_rank() -> None:
    assert token_shares([0, 0, 0], (0, 0)) == (3, 0)


def test_one_huge_sample_is_one_ranks_share() -> None:
    assert token_shares([1000], (300, 400, 300)) == (0, 1, 0)
    assert token_shares([1, 1000, 1, 1], (502, 501)) == (2, 2)
    assert token_shares([1, 1000, 1, 1], (501, 502)) == (1, 3)


def test_any_shares_by_tokens_come_as_near_as_neighbours_allow() -> None:
    generator = random.Random(6)
    by_samples = 0
    for _ in range(300):
        lengths = [generator.choice([0, 1, 2, 3, 50]) for _ in range(generator.randint(1, 30))]
        total = sum(lengths)
        cuts = sorted(generator.randint(0, total) for _ in range(generator.randint(0, 4)))
        quotas = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, total]))
        shares = token_shares(lengths, quotas)
        assert shares == token_shares(lengths, quotas)
        assert sum(shares) == len(lengths)
        assert min(shares) >= 0
        assert total == 0 or all(quota or not share for quota, share in zip(quotas, shares))
        reached = [sum(lengths[:at]) for at in range(len(lengths) + 1)]  # tokens before each border
        for rank in range(1, len(quotas)):
            wanted, border = sum(quotas[:rank]), sum(shares[:rank])
            assert abs(reached[border] - wanted) == min(abs(tokens - wanted) for tokens in reached)
            by_samples += abs(reached[len(lengths) * rank // len(quotas)] - wanted) > abs(reached[border] - wanted)
    assert by_samples > 100  # the twin: to divide by samples is worse
