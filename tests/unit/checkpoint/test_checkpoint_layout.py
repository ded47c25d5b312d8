"""How the bytes of a checkpoint are divided over its writers, and put together again."""

from __future__ import annotations

import random

import pytest

from hetseq.checkpoint.layout import (
    Piece,
    TensorSpec,
    divide,
    divide_among,
    escape,
    split_name,
    unescape,
    whole_tensors,
)


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


# -- ranks that hold different things ----------------------------------------------------------------------------------


def whole(one: TensorSpec) -> Piece:
    return Piece(one, 0, one.elements)


def names(parts: list[list[Piece]]) -> list[list[str]]:
    return [[piece.stored_name for piece in part] for part in parts]


def random_specs(generator: random.Random) -> list[TensorSpec]:
    shapes = [tuple(generator.choice([0, 1, 3, 17, 60]) for _ in range(generator.randrange(3))) for _ in range(8)]
    return [TensorSpec(f"t{index}", "F32", shape, generator.choice([1, 4, 8])) for index, shape in enumerate(shapes)]


def test_replicas_are_divided_as_before() -> None:
    generator = random.Random(3)
    for _ in range(200):
        specs = random_specs(generator)
        weights = [generator.choice([0, 1, 1, 2, 0.03]) for _ in range(generator.randrange(1, 6))] + [1]
        assert divide_among([[whole(one) for one in specs]] * len(weights), weights) == divide(specs, weights)


def test_what_one_rank_alone_holds_is_written_by_it_whatever_its_weight() -> None:
    moment, both = spec("moment", 100), [spec("a", 10), spec("b", 10)]
    shared = [whole(one) for one in both]
    slices = [Piece(moment, 0, 70), Piece(moment, 70, 90), Piece(moment, 90, 100)]
    parts = divide_among([[*shared, one] for one in slices], [1, 0, 1])
    assert names(parts) == [["a", "moment@0:70"], ["moment@70:90"], ["b", "moment@90:100"]]


def test_whole_tensors_of_some_ranks_are_divided_by_the_weights_of_these() -> None:
    few = [whole(spec(f"w{index}", 10)) for index in range(8)]
    assert list(map(len, divide_among([few, [], few], [3, 9, 1]))) == [6, 0, 2]
    assert list(map(len, divide_among([few, [], few], [0, 1, 0]))) == [4, 0, 4]  # these have to write it all the same


def test_an_overlap_is_written_once_by_the_rank_that_has_less_to_write() -> None:
    one = spec("w", 100)
    parts = divide_among([[whole(one)], [Piece(one, 0, 20)], [Piece(one, 10, 60)]], [1, 1, 1])
    assert names(parts) == [["w@60:100"], ["w@0:20"], ["w@20:60"]]


def test_what_random_ranks_hold_is_written_once_by_ranks_that_hold_it() -> None:
    generator = random.Random(11)
    for _ in range(300):
        specs, ranks = random_specs(generator), range(generator.randrange(1, 5))
        held: list[list[Piece]] = [[] for _ in ranks]
        for one in specs:
            cuts = sorted(generator.randrange(one.elements + 1) for _ in range(generator.randrange(4)))
            for begin, end in zip([0, *cuts], [*cuts, one.elements]):
                for rank in generator.sample(ranks, generator.choice([1, 1, len(ranks)])):
                    held[rank].append(Piece(one, begin, end))
        weights = [generator.choice([0, 1, 3]) for _ in ranks[1:]] + [1]
        parts = divide_among(held, weights)
        assert sorted(whole_tensors(piece for part in parts for piece in part), key=lambda one: one.name) == specs
        for pieces, own in zip(parts, held):
            for piece in pieces:
                extents = [(one.begin, one.end) for one in own if one.spec == piece.spec]
                assert any(begin <= piece.begin and piece.end <= end for begin, end in extents)


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ([[Piece(spec("w", 9), 0, 4)], [Piece(spec("w", 9), 5, 9)]], "no rank holds the elements 4 to 5 of tensor w"),
        ([[], [Piece(spec("w", 9), 0, 4), Piece(spec("w", 9), 6, 6)]], "elements 4 to 9 of tensor w"),
        ([[whole(spec("w", 9))], [whole(spec("w", 3, 3))]], r"tensor w is F32 of shape \(9,\) on rank 0, but .*rank 1"),
        ([[Piece(spec("w", 9), 0, 4)], [Piece(TensorSpec("w", "I64", (9,), 8), 4, 9)]], "I64 of shape"),
    ],
)
def test_holdings_that_make_no_whole_are_refused_by_name(held: list[list[Piece]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        divide_among(held, [1, 1])


# -- pieces of a file --------------------------------------------------------------------------------------------------


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
