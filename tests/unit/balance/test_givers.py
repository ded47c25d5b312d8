"""Who gives which elements to a rank that will own them: one giver each, and nothing that the rank has itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hetseq.balance.givers import Gift, gifts
from hetseq.errors import DisagreementError

Spans = list[tuple[int, int]]
NOTHING = (0, 0)


def moved(held: Spans, wanted: Spans, hosts: str = "") -> list[tuple[int, int, int, int]]:
    """Of one tensor: giver, taker, first element and end."""
    found = gifts(np.array([held]).swapaxes(0, 1), np.array([wanted]).swapaxes(0, 1), hosts=tuple(map(ord, hosts)))
    return [(one.giver, one.taker, one.begin, one.end) for one in found]


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ([(0, 6), (6, 9)], [(0, 6), (6, 9)], []),
        ([(0, 6), (6, 9)], [(0, 9), NOTHING], [(1, 0, 6, 9)]),
        ([(0, 6), (6, 9)], [(0, 3), (3, 9)], [(0, 1, 3, 6)]),
        ([(3, 6), (0, 3), (6, 9)], [(0, 9), NOTHING, NOTHING], [(1, 0, 0, 3), (2, 0, 6, 9)]),  # on both its sides
        ([(0, 4), (4, 9), NOTHING], [NOTHING, NOTHING, (2, 7)], [(0, 2, 2, 4), (1, 2, 4, 7)]),
        ([(0, 4), (4, 9), (8, 4)], [(0, 4), (4, 9), (9, 2)], []),  # an end below the first element is nothing
        # two groups that both hold everything: each keeps its own
        ([(0, 4), (4, 9), (0, 9)], [(0, 4), (4, 9), (0, 9)], []),
        ([(0, 4), NOTHING, (0, 9)], [(0, 4), (4, 9), (0, 9)], [(2, 1, 4, 9)]),
    ],
)
def test_only_what_a_rank_lacks_travels(held: Spans, wanted: Spans, expected: list[tuple[int, int, int, int]]) -> None:
    assert moved(held, wanted) == expected


def test_a_giver_on_the_same_host_comes_before_one_that_has_given_less() -> None:
    everything = [(0, 9), (0, 9), NOTHING, NOTHING]
    wanted = [(0, 9), (0, 9), (0, 9), (0, 9)]
    assert moved(everything, wanted, "abbb") == [(1, 2, 0, 9), (1, 3, 0, 9)]
    assert moved(everything, wanted, "aabb") == [(0, 2, 0, 9), (1, 3, 0, 9)], "else they take turns"
    assert moved(everything, wanted) == [(0, 2, 0, 9), (1, 3, 0, 9)]


def test_a_holder_on_the_same_host_gives_what_it_has_and_another_one_the_rest() -> None:
    assert moved([(0, 9), (4, 7), NOTHING], [(0, 9), (4, 7), (0, 9)], "abb") == [
        (0, 2, 0, 4), (1, 2, 4, 7), (0, 2, 7, 9),
    ]  # fmt: skip


def test_an_element_that_no_rank_holds_is_an_error_that_names_it() -> None:
    with pytest.raises(
        DisagreementError, match=r"no rank holds the elements 4 to 6 of parameter 0, which rank 1 is to"
    ):
        moved([(0, 4), (6, 9)], [(0, 4), (2, 9)])


@pytest.mark.parametrize("seed", range(40))
def test_with_groups_in_random_cuts_each_rank_has_each_element_once_and_givers_share_the_work(seed: int) -> None:
    dice = random.Random(seed)
    sizes = [dice.randint(0, 20) for _ in range(5)]
    groups, ranks = dice.randint(1, 3), dice.randint(1, 3)

    def cut() -> list[Spans]:
        """By rank and tensor."""
        found: list[Spans] = [[] for _ in range(groups * ranks)]
        for size in sizes:
            for group in range(groups):
                points = [0, *sorted(dice.randint(0, size) for _ in range(ranks - 1)), size]
                for rank in range(ranks):
                    found[group * ranks + rank].append((points[rank], points[rank + 1]))
        return found

    held, wanted = cut(), cut()
    for rank in range(ranks, groups * ranks):
        held[rank] = held[rank] if dice.random() < 0.5 else [NOTHING] * len(sizes)  # it joins
    hosts = tuple(dice.randint(0, 2) for _ in held)
    found = gifts(np.array(held), np.array(wanted), hosts=hosts)
    for rank, spans in enumerate(wanted):
        for tensor, (first, last) in enumerate(spans):
            own = set(range(*held[rank][tensor]))
            got = [at for one in found if (one.taker, one.tensor) == (rank, tensor) for at in range(one.begin, one.end)]
            assert sorted(got) == sorted(set(range(first, last)) - own)
    for one in found:
        first, last = held[one.giver][one.tensor]
        assert first <= one.begin < one.end <= last
        near = [
            rank for rank, spans in enumerate(held)
            if hosts[rank] == hosts[one.taker] and spans[one.tensor][0] <= one.begin and one.end <= spans[one.tensor][1]
        ]  # fmt: skip
        assert not near or one.giver in near
    assert found == sorted(found, key=lambda one: (one.tensor, one.taker, one.begin))
    assert all(isinstance(one, Gift) for one in found)
