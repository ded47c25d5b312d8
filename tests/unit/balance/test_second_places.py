"""Where the second copy of each rank's image goes."""

from __future__ import annotations

import itertools
import random

import pytest

from hetseq.balance.second_places import IMAGES, Lodging, Place, second_places


def lodgings(text: str, *, room: int = 1000) -> list[Lodging]:
    """Of `a1:30 a1:20 b:10`: two ranks on node 1 of machine a, which own 30 and 20 bytes, and one on machine b."""
    found = []
    for word in text.split():
        node, _, size = word.partition(":")
        found.append(Lodging(node, node[0], room, int(size)))
    return found


def keepers(ranks: list[Lodging]) -> list[tuple[int, ...]]:
    return [tuple(place.rank for place in places) for places in second_places(ranks)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ("a:10", [()]),
        ("a:10 a:20", [(), ()]),  # one node: there is no other place
        ("a:10 b:30", [(1,), (0,)]),
        ("a:10 b:0", [(1,), ()]),  # who owns nothing needs none
        ("a:10 b:10 c:10", [(1,), (2,), (0,)]),  # not all the same
        ("a:10 a:10 b:20 b:20", [(2,), (3,), (0,), (1,)]),  # and on a node its ranks take turns
        ("a1:10 a2:0 b:0", [(2,), (), ()]),  # a node of another machine, though one of the same comes first
        ("a1:10 a2:0", [(1,), ()]),  # if there is no other machine, another node of this one
    ],
)
def test_a_copy_is_on_another_node_and_best_on_another_machine(ranks: str, expected: list[tuple[int, ...]]) -> None:
    assert keepers(lodgings(ranks)) == expected


def test_a_copy_goes_to_the_next_node_that_has_about_as_much_room_as_any() -> None:
    ranks = [Lodging("a", "a", 100, 10), Lodging("b", "b", 40, 0), Lodging("c", "c", 90, 0)]
    assert keepers(ranks) == [(2,), (), ()]
    full = Lodging("c", "c", 90, 30)  # its own images leave less
    assert keepers([*ranks[:2], full]) == [(1,), (), (0,)]


@pytest.mark.parametrize("seed", range(20))
def test_noise_in_the_free_memory_moves_no_copy(seed: int) -> None:
    dice = random.Random(seed)
    ranks = [Lodging(node, node, int(1e10 * dice.uniform(0.9, 1.1)), 10**6) for node in "abcd"]
    assert keepers(ranks) == [(1,), (2,), (3,), (0,)]


def test_a_copy_that_no_node_has_room_for_is_divided_by_the_room_that_there_is() -> None:
    ranks = [Lodging("a", "a", 1000, 100), Lodging("b", "b", 80, 0), Lodging("c", "c", 160, 0), Lodging("d", "d", 0, 0)]
    (places, *_) = second_places(ranks)
    assert [place.rank for place in places] == [1, 2]
    assert [place.share for place in places] == pytest.approx([1 / 3, 2 / 3])
    assert second_places([ranks[0], ranks[3]])[0] == (Place(1, 1.0),), "the caller finds out that it does not fit"


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_nodes_a_whole_copy_of_everything_is_elsewhere(seed: int) -> None:
    dice = random.Random(seed)
    rooms = {node: dice.randrange(2000) for node in ("a1", "a2", "b1", "c1")[: dice.randint(2, 4)]}
    nodes = [*rooms, *dice.choices(list(rooms), k=dice.randint(0, 4))]
    ranks = [Lodging(node, node[0], rooms[node], dice.choice([0, dice.randint(1, 300)])) for node in nodes]
    kept = dict.fromkeys(rooms, 0.0)
    for rank, places in zip(ranks, second_places(ranks), strict=True):
        assert sum(place.share for place in places) == pytest.approx(1.0 if rank.image_bytes else 0.0)
        for place in places:
            assert ranks[place.rank].node != rank.node
            kept[ranks[place.rank].node] += IMAGES * place.share * rank.image_bytes
            is_far = ranks[place.rank].machine != rank.machine
            assert is_far or all(other.machine == rank.machine for other in ranks)
        is_cut = len(places) > 1
        assert not is_cut or len({ranks[place.rank].node for place in places}) == len(places)
    for node, room in rooms.items():
        own = sum(IMAGES * one.image_bytes for one in ranks if one.node == node)
        others = sum(IMAGES * one.image_bytes for one in ranks if one.node != node)
        if own + others <= room:  # it could have taken everything, so it is never overfull
            assert own + kept[node] <= room


def in_groups(text: str) -> list[Lodging]:
    """Of `a:10 b:10 | c`: one rank on each machine, in two groups; c makes no image."""
    return [
        Lodging(word[0], word[0], 1000, int(word[2:] or 0), number)
        for number, group in enumerate(text.split("|"))
        for word in group.split()
    ]


def test_with_groups_a_copy_goes_where_the_loss_of_both_places_leaves_a_group_whole() -> None:
    assert keepers(in_groups("a:10 b:10 | c d")) == [(1,), (0,), (), ()]
    assert keepers(in_groups("a:10 b:10 | c")) == [(1,), (0,), ()]
    assert keepers(in_groups("a:10 | b c")) == [(1,), (), ()], "its group has no other node"
    assert keepers(in_groups("a:10 | b | c")) == [(1,), (), ()], "the third group is whole then"
    apart = [Lodging("a1", "a", 1000, 10), Lodging("a2", "a", 1000, 10), Lodging("b", "b", 1000, 0, 1)]
    assert keepers(apart) == [(2,), (2,), ()], "another machine comes first: one is lost with all its nodes"


def test_a_copy_that_its_group_has_no_room_for_goes_to_another_one() -> None:
    ranks = [Lodging("a", "a", 1000, 300), Lodging("b", "b", 500, 10), *in_groups("| c d")]
    assert keepers(ranks) == [(2,), (0,), (), ()]


def loses_the_state(ranks: list[Lodging], places: list[tuple[Place, ...]], dead: tuple[str, ...]) -> bool:
    """Whether no group is whole without these nodes, and no image either."""
    broken = {one.group for one in ranks if one.node in dead}
    lost = any(
        one.image_bytes and one.node in dead and any(ranks[place.rank].node in dead for place in kept)
        for one, kept in zip(ranks, places, strict=True)
    )
    return broken == {one.group for one in ranks} and lost


@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (3, 2), (3, 1, 1), (2, 4)])
def test_no_loss_of_two_nodes_loses_a_state_that_two_groups_hold(sizes: tuple[int, ...]) -> None:
    names = iter("abcdefgh")
    ranks = [
        Lodging(name := next(names), name, 1000, 0 if number else 10 + at, number)
        for number, size in enumerate(sizes)
        for at in range(size)
    ]
    pairs = list(itertools.combinations([one.node for one in ranks], 2))
    assert not any(loses_the_state(ranks, second_places(ranks), pair) for pair in pairs)
    elsewhere = [(Place(len(ranks) - 1, 1.0),) if one.image_bytes else () for one in ranks]  # in the last group
    assert any(loses_the_state(ranks, elsewhere, pair) for pair in pairs) == (len(sizes) == 2)
