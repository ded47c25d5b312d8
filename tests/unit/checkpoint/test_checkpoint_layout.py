"""How the bytes of a checkpoint are divided over its writers, and put together again."""

from __future__ import annotations

import random

import pytest

from hetseq.checkpoint.layout import Piece, TensorSpec, divide, escape, split_name, unescape, whole_tensors


def spec(name: str, *shape: int, itemsize: int = 4) -> TensorSpec:
    return TensorSpec(name, "F32", shape, itemsize)


def sizes(parts: list[list[Piece]]) -> list[int]:
    return [sum(piece.bytes for piece in part) for part in parts]


def test_parts_are_cut_between_tensors() -> None:
    specs = [spec("a", 10), spec("b", 10), spec("c", 10), spec("d", 10)]
    parts = divide(specs, [1, 1])
    assert [[piece.spec.name for piece in part] for part in parts] == [["a", "b"], ["c", "d"]]
    assert not any(piece.is_slice for part in parts for piece in part)


def test_only_a_tensor_larger_than_a_part_is_cut() -> None:
    parts = divide([spec("small", 2), spec("large", 10, 10), spec("last", 2)], [1, 1, 2])
    names = [[piece.stored_name for piece in part] for part in parts]
    assert names == [["small", "large@0:24"], ["large@24:50"], ["large@50:100", "last"]]
    assert not any(piece.is_slice for part in divide([spec("a", 9), spec("b", 9)], [1, 1]) for piece in part)


def test_a_slow_rank_writes_its_three_percent() -> None:
    written = sizes(divide([spec(f"w{index}", 1000) for index in range(200)], [97, 3]))
    assert written == [194 * 4000, 6 * 4000]


def test_a_rank_of_weight_zero_writes_nothing_and_cuts_nothing() -> None:
    specs = [spec(f"w{index}", 7) for index in range(10)]
    parts = divide(specs, [1, 0, 1, 0])
    assert sizes(parts) == [140, 0, 140, 0]
    assert not any(piece.is_slice for part in parts for piece in part)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [float("nan")], [float("inf"), 1]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected finite numbers"):
        divide([spec("a", 3)], weights)


def test_random_states_come_together_again_in_order() -> None:
    generator = random.Random(5)
    for _ in range(300):
        specs = [
            TensorSpec(
                f"t{index}",
                "F32",
                tuple(generator.choice([0, 1, 2, 3, 17, 60]) for _ in range(generator.randrange(3))),
                generator.choice([1, 2, 4, 8]),
            )
            for index in range(generator.randrange(8))
        ]
        weights = [generator.choice([0, 1, 1, 2, 0.03]) for _ in range(generator.randrange(1, 7))] + [1]
        parts = divide(specs, weights)
        assert len(parts) == len(weights)
        pieces = [piece for part in parts for piece in part]
        assert whole_tensors(pieces) == specs  # nothing missing, nothing twice, in the given order
        assert all(not part for part, weight in zip(parts, weights) if weight == 0)
        ideal, largest = sum(one.bytes for one in specs) / sum(weights), max([one.bytes for one in specs], default=0)
        assert all(abs(size - ideal * weight) <= largest + 8 for size, weight in zip(sizes(parts), weights))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([Piece(spec("a", 10), 0, 4), Piece(spec("a", 10), 5, 10)], "gap"),
        ([Piece(spec("a", 10), 0, 6), Piece(spec("a", 10), 5, 10)], "overlaps"),
        ([Piece(spec("a", 10), 0, 4)], "ends at element 4"),
        ([Piece(spec("a", 10), 0, 10), Piece(spec("a", 10), 0, 10)], "twice"),
        ([Piece(spec("a", 0), 0, 0), Piece(spec("a", 0), 0, 0)], "twice"),
        ([Piece(spec("a", 10), 0, 4), Piece(spec("a", 5, 2), 4, 10)], "disagree"),
    ],
)
def test_pieces_that_make_no_whole_are_refused(pieces: list[Piece], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        whole_tensors(pieces)
    assert whole_tensors([Piece(spec("a", 10), 4, 10), Piece(spec("a", 10), 0, 4)]) == [spec("a", 10)]


@pytest.mark.parametrize("name", ["model.w", "a/b", "../../etc", "a...b", "x@0:4", "100%", "%2F", "tab\t", "ü.名", " "])
def test_any_name_survives_and_none_is_a_path(name: str) -> None:
    stored = escape(name)
    assert unescape(stored) == name
    assert not any(sign in stored for sign in ("/", "..", "@"))
    assert split_name(stored) == (name, None)
    assert split_name(f"{stored}@3:9") == (name, (3, 9))


@pytest.mark.parametrize("stored", ["", "../x", "a/b", "a..b", "a%2e", "a@4:3", "a@4:4", "a@04:5", "a@-1:5", "a\n"])
def test_names_that_hetseq_does_not_write_are_refused(stored: str) -> None:
    with pytest.raises(ValueError):
        split_name(stored)
