"""Which ranks have a share together, and that a world of single ranks is as it was before there were groups."""

from __future__ import annotations

import pytest

from hetseq.balance.layout import Layout, Seat, has_whole_model, layout_of, one_rank_each, seat_of

PAIRS = Layout(((0, 1), (2, 4), (3,)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_with_one_rank_each_a_group_has_the_number_of_its_rank(world_size: int) -> None:
    layout, ranks = one_rank_each(world_size), tuple(range(world_size))
    assert layout.world_size == len(layout.groups) == world_size
    assert layout.leaders == ranks
    assert tuple(map(layout.group_of, ranks)) == ranks
    assert tuple(map(layout.leader_of, ranks)) == ranks
    assert layout.of_leaders(ranks) == ranks


def test_ranks_of_one_group_have_one_share_and_the_first_of_them_leads() -> None:
    assert PAIRS.world_size == 5
    assert [PAIRS.group_of(rank) for rank in range(5)] == [0, 0, 1, 2, 1]
    assert [PAIRS.leader_of(group) for group in range(3)] == [0, 2, 3]
    assert PAIRS.of_leaders("abcde") == ("a", "c", "d")


@pytest.mark.parametrize(
    "groups",
    [(), ((),), ((0,), ()), ((0,), (0,)), ((0,), (2,)), ((1,),), ((0, 1), (1,)), ((1,), (0,)), ((0, 2, 1),)],
    ids=str,
)
def test_what_is_no_layout_is_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Layout(groups)


def test_values_of_fewer_ranks_than_there_are_are_refused() -> None:
    with pytest.raises(AssertionError, match="each rank"):
        PAIRS.of_leaders("abc")


@pytest.mark.parametrize(
    ("sizes", "seats"),
    [
        ((1,), [(0, 0, 1), (1, 0, 1), (2, 0, 1)]),
        ((2,), [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 2)]),
        ((2, 1), [(0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 1)]),
        ((1, 1, 2), [(0, 0, 1), (1, 0, 1), (2, 0, 2), (2, 1, 2), (3, 0, 2)]),
    ],
)
def test_groups_follow_each_other_by_slot_and_the_last_size_repeats(
    sizes: tuple[int, ...], seats: list[tuple[int, int, int]]
) -> None:
    assert [seat_of(slot, sizes) for slot in range(len(seats))] == [Seat(*one) for one in seats]


def test_a_model_is_whole_if_all_seats_of_one_group_are_taken() -> None:
    assert has_whole_model([5, 4], (2,))
    assert not has_whole_model([1, 2, 5], (2,))
    assert has_whole_model([1, 2], (2, 1))
    assert not has_whole_model([], (1,))


def test_ranks_whose_model_is_not_whole_form_an_idle_group() -> None:
    layout = layout_of([0, 2, 3, 4], (2,))
    assert layout.groups == ((0,), (1, 2), (3,))
    assert (layout.idle, layout.busy) == (frozenset({0, 2}), (1,))
    assert [layout.is_idle(rank) for rank in range(4)] == [True, False, False, True]
    assert layout.by_rank((0, 6, 0)) == (0, 6, 6, 0)
    assert layout.at_leaders((0, 6, 0)) == (0, 6, 0, 0)
