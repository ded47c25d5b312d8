"""Where the time of a step went: made-up clusters whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import CommitRow, Measured, OwnedBytes, SaveStatus, Vote, Wish
from hetseq.monitor.step_time import account, busy_s, owned_by


def rows_of(ranks: Sequence[Measured]) -> list[CommitRow]:
    nothing = np.zeros(1, np.bool_)
    return [CommitRow(0, Vote.OK, 0, (), (), nothing, one, Wish.NONE, SaveStatus()) for one in ranks]


def cluster(busy: Sequence[float], communication_s: float, **known: Any) -> tuple[list[Measured], float]:
    """Ranks that are busy for so long and then wait for the slowest one and for what travels; and the whole step."""
    step_s = max(busy) + communication_s
    return [Measured(compute_s=one, idle_s=step_s - one, **known) for one in busy], step_s


def told(ranks: Sequence[Measured], shares: Sequence[int], step_s: float, work: int | None = None) -> dict[str, Any]:
    return account(rows_of(ranks), shares=shares, work=work or sum(shares), seconds=step_s)


def test_a_rank_is_busy_with_its_data_its_compute_and_its_update() -> None:
    one = Measured(compute_s=8.0, data_s=2.0, overhead_s=0.5, idle_s=64.0)
    assert busy_s(one) == 10.5


@pytest.mark.parametrize("busy", [(4.0, 4.0), (1.0, 3.0), (3.0, 1.0, 2.0), (0.0, 5.0), (7.0,)])
@pytest.mark.parametrize("communication_s", [0.0, 0.25])
def test_busy_wait_and_communication_are_the_whole_step_of_every_rank(
    busy: tuple[float, ...], communication_s: float
) -> None:
    ranks, step_s = cluster(busy, communication_s)
    row = told(ranks, [4] * len(busy), step_s)
    assert row["communication_s"] == communication_s
    assert [b + wait + row["communication_s"] for b, wait in zip(busy, row["ranks"]["wait_s"])] == [step_s] * len(busy)
    assert row["ranks"]["wait_s"] == [max(busy) - b for b in busy]
    assert row["pace"] == busy.index(max(busy))


def test_ranks_that_compute_a_share_together_have_the_speed_of_all_its_samples() -> None:
    cost = Cost(0.0, 0.5)
    ranks, step_s = cluster((2.0, 2.0), 0.0, cost=cost)
    rows = rows_of(ranks)
    both = account(rows, shares=[4, 4], work=4, seconds=step_s, samples=4)
    alone = account(rows[:1], shares=[4], work=4, seconds=step_s)
    assert both["ranks"]["per_sample_s"] == [0.5, 0.5]
    assert alone["ranks"]["per_sample_s"] == [0.5]


def test_the_parts_add_up_to_the_step_with_every_kind_of_work() -> None:
    # 10.5, 7 and 9 s of work, then 1.5 s of travel
    ranks = [
        Measured(compute_s=8.0, data_s=2.0, overhead_s=0.5, idle_s=1.5),
        Measured(compute_s=6.0, data_s=0.0, overhead_s=1.0, idle_s=5.0),
        Measured(compute_s=0.0, data_s=9.0, overhead_s=0.0, idle_s=3.0),
    ]
    row = told(ranks, [4, 4, 4], 12.0)
    lists = row["ranks"]
    for rank in range(3):
        parts = [lists[name][rank] for name in ("compute_s", "data_s", "overhead_s", "wait_s")]
        assert sum(parts) + row["communication_s"] == 12.0
    assert lists["wait_s"] == [0.0, 3.5, 1.5]
    assert row["pace"] == 0


def test_a_balanced_cluster_without_communication_has_an_efficiency_of_one() -> None:
    # speeds 1 to 3, shares to match
    ranks, step_s = cluster((4.0, 4.0), 0.0)
    assert told(ranks, [12, 4], step_s)["efficiency"] == 1.0
    ranks, step_s = cluster((4.0, 4.0), 4.0)
    assert told(ranks, [12, 4], step_s)["efficiency"] == 0.5  # half of the step is travel


@pytest.mark.parametrize(("ratio", "efficiency"), [(1, 1.0), (2, 2 / 3), (3, 1 / 2), (4, 2 / 5)])
def test_equal_shares_of_unequal_ranks_cost_what_theory_says(ratio: int, efficiency: float) -> None:
    """1 s and `ratio` s a sample: 2 / ratio samples a second out of 1 + 1 / ratio, that is 2 / (1 + ratio)."""
    ranks, step_s = cluster((8.0, 8.0 * ratio), 0.0)
    assert told(ranks, [8, 8], step_s)["efficiency"] == pytest.approx(efficiency, rel=1e-15)


def test_a_rank_without_samples_counts_with_what_it_could() -> None:
    idle = Measured(idle_s=8.0, cost=Cost(9.0, 4.0))
    busy = Measured(compute_s=8.0, cost=Cost(0.0, 1.0))
    # one sample a second, and a quarter of one that nobody asked for
    assert told([busy, idle], [8, 0], 8.0)["efficiency"] == pytest.approx(1 / 1.25)
    unknown = Measured(idle_s=8.0)
    assert told([busy, unknown], [8, 0], 8.0)["efficiency"] is None
    server = Measured(idle_s=8.0, state=OwnedBytes(30, 7, 5))
    assert told([busy, server], [8, 0], 10.0)["efficiency"] == 0.8  # it is no slower for a rank that never computes
    assert told([Measured(idle_s=8.0), busy], [8, 8], 8.0)["efficiency"] is None  # samples in no time at all


def test_costs_are_told_in_samples_whatever_a_step_is_divided_by() -> None:
    # 4 samples of 10 tokens each; per_unit_s is of a token
    ranks = [Measured(compute_s=4.0, cost=Cost(0.5, 0.125)), Measured(compute_s=1.0, idle_s=3.0)]
    lists = told(ranks, [3, 1], 4.0, work=40)["ranks"]
    assert lists["per_sample_s"] == [1.25, None]
    assert lists["fixed_s"] == [0.5, None]
    idle = Measured(idle_s=4.0, cost=Cost(0.0, 0.125))
    row = told([Measured(compute_s=4.0), idle], [4, 0], 4.0, work=40)
    assert row["efficiency"] == pytest.approx(1 / (1 + 1 / 1.25))


COST = ("fixed_s", "per_sample_s", "per_micro_batch_s", "micro_batch")


def test_a_cost_by_micro_batches_is_told_as_it_is() -> None:
    stairs = Measured(compute_s=8.0, cost=Cost(0.5, 1.0, None, 2.0, 4))
    ranks = told([stairs, Measured(compute_s=3.0, cost=Cost(0.5, 1.0)), Measured(compute_s=3.0)], [5, 3, 3], 8.0)
    assert [[ranks["ranks"][name][rank] for name in COST] for rank in range(3)] == [
        [0.5, 1.0, 2.0, 4], [0.5, 1.0, 0.0, None], [None] * 4
    ]  # fmt: skip
    alone = told([replace(stairs, compute_s=5.5), replace(stairs, compute_s=0.0)], [4, 0], 5.5)
    assert alone["efficiency"] == pytest.approx(4 / 5.5 / (4 / 5.5 + 1 / 1.5))  # the other could do one in 1.5 s


@pytest.mark.parametrize("shares", [(40, 8), (8, 0), (8, 8)])
def test_a_cost_by_fixed_micro_batches_is_told_by_the_sample(shares: tuple[int, int]) -> None:
    # units of 8 samples, 2 + 6 s each
    ranks = [Measured(compute_s=8.0, cost=Cost(0.5, 2.0, None, 6.0, 1))] * 2
    lists = told(ranks, shares, 8.0, work=sum(shares) // 8)["ranks"]
    assert [lists[name] for name in COST] == [[0.5] * 2, [1.0] * 2, [0.0] * 2, [None] * 2]


def test_a_cost_by_other_work_than_samples_is_the_straight_one_about_the_share() -> None:
    # 5 samples of 2, in micro-batches of 4: 0.5 s + 10 s + 3 * 2 s, and from one micro-batch to the next 1.5 s each
    one = Measured(compute_s=16.0, cost=Cost(0.5, 1.0, None, 2.0, 4))
    lists = told([one, one], (5, 5), 16.0, work=20)["ranks"]
    assert [lists[name][0] for name in COST] == [16.5 - 10 * 1.5, 3.0, 0.0, None]


def test_memory_is_told_by_rank() -> None:
    ranks = [Measured(compute_s=1.0, memory_bytes=5, memory_limit_bytes=8), Measured(compute_s=1.0)]
    lists = told(ranks, [1, 1], 1.0)["ranks"]
    assert (lists["memory_bytes"], lists["memory_limit_bytes"]) == ([5, 0], [8, 0])


def test_what_ranks_own_is_told_by_rank_and_a_plan_only_if_there_is_one() -> None:
    ranks = [Measured(compute_s=1.0, state=OwnedBytes(30, 7, 5)), Measured(state=OwnedBytes(10, 5, 7))]
    lists = told(ranks, [1, 0], 1.0)["ranks"]
    kinds = {"owned_bytes": [30, 10], "sent_bytes": [7, 5], "received_bytes": [5, 7]}
    assert lists.items() >= kinds.items()
    assert "planned_bytes" not in lists
    assert owned_by(lists, 1) == {"owned_bytes": 10, "sent_bytes": 5, "received_bytes": 7}
    ranks[1] = Measured(state=OwnedBytes(10, 5, 7, planned_bytes=99))
    assert owned_by(told(ranks, [1, 0], 1.0)["ranks"], 1)["planned_bytes"] == 99
    replicas = told([Measured(compute_s=1.0)] * 2, [1, 1], 1.0)["ranks"]
    assert not kinds.keys() & replicas.keys()
    assert owned_by(replicas, 0) == {}


def test_nothing_in_a_row_is_infinite() -> None:
    """JSON knows no infinity: a cost that is not known is None."""
    ranks, step_s = cluster((1.0, 2.0), 0.0)
    for values in told(ranks, [4, 0], step_s)["ranks"].values():
        assert all(value is None or math.isfinite(value) for value in values)
