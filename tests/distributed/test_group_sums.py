"""Sums across groups of ranks: the same bits in all groups, and no more bytes than a ring would send."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hetseq.comm.group import GlooGroup, Group
from hetseq.parallel.group_sums import GroupSum, Segment, segments_of, sum_across_groups
from hetseq.parallel.owned_units import Division
from tests.support.ranks import run_ranks

#: the ranks of each group, and the bounds of each group in two units
CASES = {
    "2+1": (((0, 1), (2,)), [[(0, 700, 1000, 1000), (0, 0, 0, 1000)], [(0, 3, 9, 9), (0, 0, 0, 9)]]),
    "1+1+1": (
        ((0,), (1,), (2,)), [[(0, 1000, 1000, 1000), (0, 0, 1000, 1000), (0, 0, 0, 1000)], [(0, 5, 5, 5), (0, 0, 5, 5),
         (0, 0, 0, 5)]],
    ),
    "3+2": (
        ((0, 1, 4), (2, 3)),
        [[(0, 2000, 3001, 3001, 3001, 6000), (0, 0, 0, 2500, 6000, 6000)], [(0, 0, 4, 4, 4, 4), (0, 0, 0, 1, 4, 4)]],
    ),
}  # fmt: skip


def test_a_segment_has_one_owner_in_each_group() -> None:
    _, (cuts, _) = CASES["3+2"]
    assert segments_of(cuts, 0, 0) == [Segment(0, 2000, (0, 2))]
    assert segments_of(cuts, 0, 4) == [Segment(3001, 6000, (4, 3))]
    assert segments_of(cuts, 1, 2) == [Segment(0, 2000, (0, 2)), Segment(2000, 2500, (1, 2))]
    assert segments_of(cuts, 1, 0) == []
    assert [Segment(3, 10, (0, 1, 2)).part(group) for group in range(3)] == [slice(3, 5), slice(5, 7), slice(7, 10)]


def add_up(group: Group, case: str, shares_memory: bool) -> dict[str, Any]:
    groups, units = CASES[case]
    if shares_memory:
        assert isinstance(group, GlooGroup)
        group.meet_neighbours()
    exchange, number = group.slices(torch.device("cpu")), Division((1.0,) * 5, groups=groups).number_of(group.rank)
    sums, wanted, own = [], [], 0
    for at, cuts in enumerate(units):
        first, last = cuts[number][group.rank : group.rank + 2]
        terms = [
            torch.randn(cuts[0][-1], generator=torch.Generator().manual_seed(10 * at + of)) for of in range(len(groups))
        ]
        total = terms[number][first:last].clone()
        sums.append((GroupSum(exchange, total, cuts, number, group.rank), total))
        wanted.append(functools.reduce(torch.add, terms)[first:last])
        own += last - first
    sum_across_groups([one for one, _ in sums])
    exchange.close()
    right = all(torch.equal(total, of) for (_, total), of in zip(sums, wanted))
    return {"right": right, "sent": exchange.sent_bytes, "received": exchange.received_bytes, "own": own}


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize("case", CASES)
def test_all_groups_get_the_same_sums_with_the_bytes_of_a_ring(case: str, shares_memory: bool) -> None:
    groups, _ = CASES[case]
    ranks = run_ranks(add_up, sum(map(len, groups)), case, shares_memory, timeout_s=40)
    for facts in ranks:
        assert facts["right"]
        ring = 4 * facts["own"] * 2 * (len(groups) - 1) / len(groups)
        assert abs(facts["sent"] - ring) <= 4 * 12  # parts of a segment are whole numbers of elements
        assert abs(facts["received"] - ring) <= 4 * 12


class Noted(GroupSum):
    """Notes which units travel in place of sending them."""

    def __init__(self, travelling: list[int], most: list[int], unit: int) -> None:
        self._of_all, self._most, self._unit = travelling, most, unit

    def begin(self) -> None:
        self._of_all.append(self._unit)
        self._most.append(len(self._of_all))

    def add_up(self) -> None:
        assert self._unit in self._of_all

    def finish(self) -> None:
        self._of_all.remove(self._unit)


def test_what_travels_between_groups_is_never_more_than_three_units() -> None:
    travelling, most = list[int](), list[int]()
    sum_across_groups([Noted(travelling, most, unit) for unit in range(7)])
    assert (travelling, max(most)) == ([], 3)
