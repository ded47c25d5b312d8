"""Which rank reads which chunk: each chunk is verified, and by as few ranks as want it."""

from __future__ import annotations

import random

import pytest

from hetseq.checkpoint.read_plan import divide_unwanted, from_ranges, to_ranges


def test_what_no_rank_wants_is_divided_so_that_all_read_as_much() -> None:
    wanted = [[{0, 1, 2, 3}, set()], [{3}, set()], [set(), {0}]]
    duties = divide_unwanted(wanted, [6, 6], [range(3)] * 2)
    assert duties == [[set(), {1}], [{4}, {2, 3}], [{5}, {4, 5}]]


def test_a_rank_verifies_only_parts_that_it_can_read() -> None:
    assert divide_unwanted([[set(), set()]] * 2, [3, 3], [{1}, {0}]) == [[set(), {0, 1, 2}], [{0, 1, 2}, set()]]


def test_nothing_is_verified_twice_if_all_is_wanted() -> None:
    assert divide_unwanted([[{0, 1}], [{0, 1}]], [2], [range(2)]) == [[set()], [set()]]
    assert divide_unwanted([[set()]], [0], [range(1)]) == [[set()]]


def test_random_ranks_together_read_every_chunk_and_what_is_unwanted_once() -> None:
    generator = random.Random(2)
    for _ in range(300):
        ranks, counts = (
            range(generator.randrange(1, 6)),
            [generator.randrange(30) for _ in range(generator.randrange(4))],
        )
        holders = [generator.sample(ranks, generator.randrange(1, len(ranks) + 1)) for _ in counts]
        wanted = [
            [set(generator.sample(range(count), generator.randrange(count + 1) // 2)) for count in counts]
            for _ in ranks
        ]
        duties = divide_unwanted(wanted, counts, holders)
        for part, count in enumerate(counts):
            unwanted = set(range(count)).difference(*(wanted[rank][part] for rank in ranks))
            assert sorted(chunk for rank in ranks for chunk in duties[rank][part]) == sorted(unwanted)
            assert all(not duties[rank][part] for rank in set(ranks) - set(holders[part]))


@pytest.mark.parametrize(
    ("chunks", "ranges"),
    [(set(), []), ({4}, [[4, 5]]), ({0, 1, 2, 7, 9, 10}, [[0, 3], [7, 8], [9, 11]]), (set(range(1000)), [[0, 1000]])],
)
def test_chunks_travel_as_ranges(chunks: set[int], ranges: list[list[int]]) -> None:
    assert to_ranges(chunks) == ranges
    assert from_ranges(ranges) == chunks
