"""Parts of an image: each is whole on two ranks, and together they are the state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetseq.balance.second_places import Place
from hetseq.checkpoint.image_plan import NodeImages, cut, digest_of, image_parts, image_to_keep
from hetseq.checkpoint.layout import Piece, TensorSpec, whole_tensors

WEIGHT, BIAS = TensorSpec("weight", "F32", (6, 5), 4), TensorSpec("bias", "F64", (7,), 8)
COUNT, EMPTY = TensorSpec("count", "I64", (), 8), TensorSpec("empty", "F32", (0, 3), 4)


def whole(*specs: TensorSpec) -> list[Piece]:
    return [Piece(spec, 0, spec.elements) for spec in specs]


def test_pieces_are_cut_in_order_by_their_bytes() -> None:
    halves = cut(whole(WEIGHT, BIAS, COUNT), [1, 1])  # 120, 56 and 8 bytes
    assert halves == [[Piece(WEIGHT, 0, 23)], [Piece(WEIGHT, 23, 30), *whole(BIAS, COUNT)]]
    assert cut(whole(WEIGHT), [1]) == [whole(WEIGHT)]
    assert cut([], [0.5, 0.5]) == [[], []]
    assert cut(whole(COUNT), [0.1, 0.9]) == [whole(COUNT), []], "what has one element stays whole"


@pytest.mark.parametrize("seed", range(50))
def test_no_element_is_lost_or_doubled_by_a_cut(seed: int) -> None:
    dice = random.Random(seed)
    pieces = []
    for number in range(dice.randint(1, 6)):
        spec = TensorSpec(f"t{number}", "F32", (dice.randint(0, 40),), dice.choice([1, 2, 4, 8]))
        begin = dice.randint(0, spec.elements)
        pieces.append(Piece(spec, begin, dice.randint(begin, spec.elements)))
    shares = [dice.random() + 0.01 for _ in range(dice.randint(1, 4))]
    groups = cut(pieces, shares)
    assert len(groups) == len(shares)
    seen = [(piece.spec, at) for group in groups for piece in group for at in range(piece.begin, piece.end)]
    assert seen == [(piece.spec, at) for piece in pieces for at in range(piece.begin, piece.end)]
    empty = [piece for group in groups for piece in group if not piece.bytes]
    assert empty == [piece for piece in pieces if not piece.bytes]
    total = sum(piece.bytes for piece in pieces)
    for share, group in zip(shares, groups):
        assert abs(sum(piece.bytes for piece in group) - total * share / sum(shares)) <= 16


def test_parts_are_numbered_by_owner_and_place_and_together_the_state() -> None:
    owned = [[Piece(WEIGHT, 0, 20), *whole(EMPTY)], [], [Piece(WEIGHT, 20, 30), *whole(BIAS, COUNT)]]
    parts = image_parts(owned, [(Place(1, 0.5), Place(2, 0.5)), (), (Place(0, 1.0),)])
    assert [(part.index, part.owner, part.keeper) for part in parts] == [(0, 0, 1), (1, 0, 2), (2, 2, 0)]
    specs = whole_tensors(piece for part in parts for piece in part.pieces)
    assert sorted(spec.name for spec in specs) == ["bias", "count", "empty", "weight"]
    (alone,) = image_parts([whole(WEIGHT)], [()])
    assert (alone.owner, alone.keeper) == (0, None)


def test_the_name_of_a_division_says_who_keeps_what() -> None:
    owned = [whole(WEIGHT), whole(BIAS), []]
    there = image_parts(owned, [(Place(1, 1.0),), (Place(2, 1.0),), ()])
    elsewhere = image_parts(owned, [(Place(2, 1.0),), (Place(2, 1.0),), ()])
    names = {digest_of(layout, parts) for layout in ("a", "b") for parts in (there, elsewhere)}
    assert len(names) == 4
    assert digest_of("a", there) == digest_of("a", image_parts(owned, [(Place(1, 1.0),), (Place(2, 1.0),), ()]))


def nodes(*texts: str, joins: int | None = None) -> list[NodeImages]:
    """Of each rank its images: `6.0:01` is step 6, generation 0, parts 0 and 1 of two; each rank is a node."""
    found = []
    for rank, text in enumerate(texts):
        images = []
        for word in text.split():
            order, _, parts = word.partition(":")
            step, generation = map(int, order.split("."))
            images.append((order, step, generation, 2, tuple(map(int, parts))))
        found.append(NodeImages(f"node {rank}", rank != joins, tuple(images)))
    return found


@pytest.mark.parametrize(
    ("images", "joins", "kept"),
    [
        (("6.0:01 3.0:01", "6.0:01 3.0:01"), None, "6.0"),
        (("6.0:0 3.0:01", "6.0:1 3.0:01"), None, "3.0"),  # copies of the newer one were under way
        (("6.0:0 3.0:0", "6.0:1 3.0:1"), None, "6.0"),  # after a death none is at two places
        (("6.0:0 3.0:01", "3.0:1"), None, "3.0"),  # the newer one lacks a part
        (("6.0:01", "8.1:0"), None, "6.0"),
        (("6.0:01", "4.1:01"), None, "4.1"),  # a later generation had gone back to step 3
        (("6.0:01", "9.0:01"), None, "6.0"),  # of a step after the state
        (("3.1:01", "6.0:01"), 1, "3.1"),  # a node that comes back brings a course that was given up
        (("3.1:0", "3.1:1 6.0:01"), 1, "3.1"),
        (("", "6.0:01"), 1, None),
        (("", ""), None, None),
    ],
)
def test_the_image_that_stays_is_whole_at_two_places_and_of_the_course_of_the_state(
    images: tuple[str, ...], joins: int | None, kept: str | None
) -> None:
    assert image_to_keep(nodes(*images, joins=joins), step=8) == kept


def test_two_ranks_of_one_node_are_one_place() -> None:
    twice = nodes("6.0:01 3.0:01", "6.0:01 3.0:01", "3.0:01")
    assert image_to_keep([*twice[:1], replace(twice[1], memory="node 0"), twice[2]], step=8) == "3.0"


def test_if_all_begin_from_a_checkpoint_any_image_up_to_its_step_may_stay() -> None:
    found = [replace(one, holds_state=False) for one in nodes("6.0:01 9.0:01", "6.0:01 9.0:01")]
    assert image_to_keep(found, step=8) == "6.0"
