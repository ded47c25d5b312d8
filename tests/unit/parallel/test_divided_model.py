"""Parts of a model: which elements they have, that they are the whole together, and what cannot be divided."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from hetseq.errors import ConfigError
from hetseq.parallel.divided_model import JoinedParts, TensorPart, divide_
from hetseq.parallel.tensor_parallel import plan_of
from hetseq.parallel.tensor_ranks import TensorRanks
from tests.support.divided import LENGTH, PLAN, WORDS, NextWord

#: shape, divided dimension, blocks
CUTS = [
    ((8, 6), 0, (1,)), ((6, 8), 1, (1,)), ((4, 12), 1, (1, 1, 1)), ((12,), 0, (1, 1, 1)), ((12,), 0, (1,)),
    ((2, 8, 3), 1, (1, 1)), ((16, 3), 0, (8, 4, 4)), ((2, 16, 3), 1, (2, 1, 1)), ((10,), 0, (6, 4)),
]  # fmt: skip


def parts_of(shape: tuple[int, ...], dim: int, blocks: tuple[int, ...]) -> list[TensorPart]:
    return [TensorPart("w", shape, dim, place, 2, blocks) for place in range(2)]


@pytest.mark.parametrize(("shape", "dim", "blocks"), CUTS)
def test_a_part_knows_where_its_elements_are_in_the_whole_tensor(
    shape: tuple[int, ...], dim: int, blocks: tuple[int, ...]
) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    again = torch.full((math.prod(shape),), -1)
    for part in parts_of(shape, dim, blocks):
        values = part.of(whole)
        assert values.shape == part.part_shape
        assert values.numel() == part.rows * part.width
        part.put_(again, values.flatten())
        if part.offset is not None:
            assert values.flatten().tolist() == list(range(part.offset, part.offset + values.numel()))
    assert again.tolist() == whole.flatten().tolist()
    assert (parts_of(shape, dim, blocks)[0].offset is not None) == ((dim, blocks) == (0, (1,)))


@pytest.mark.parametrize(("shape", "dim", "blocks"), CUTS)
def test_the_parts_of_all_places_are_the_whole(shape: tuple[int, ...], dim: int, blocks: tuple[int, ...]) -> None:
    whole, joined = torch.randn(shape), JoinedParts(parts_of(shape, dim, blocks))
    assert torch.equal(joined(*joined.right_inverse(whole)), whole)


def test_a_rank_alone_computes_with_all_parts_what_the_model_computes_whole() -> None:
    model, words = NextWord(), torch.randint(0, WORDS, (3, LENGTH))
    right = model(words)
    divided = divide_(model, plan_of(model, PLAN), TensorRanks(1, 0), degree=2, seed=0)
    assert torch.equal(model(words), right)
    assert {id(one) for one in model.parameters()} == {id(one) for one in divided.named.values()}


def test_ranks_at_all_places_name_the_same_parts_and_have_their_own() -> None:
    whole = NextWord()
    found = []
    for size, place in ((2, 0), (2, 1), (1, 0)):
        model = copy.deepcopy(whole)
        divided = divide_(model, plan_of(model, PLAN), TensorRanks(size, place), degree=2, seed=0)
        found.append(divided)
        assert sum(one.numel() for one in model.parameters()) == sum(
            one.numel() for one in divided.named.values() if not one.is_meta
        )
    names = [list(one.named) for one in found]
    assert names[0] == names[1] == names[2]
    for name in names[0]:
        shapes = {one.named[name].shape for one in found}
        assert len(shapes) == 1
        held = [not one.named[name].is_meta for one in found]
        place = found[0].place_of(name)
        assert held == [place in (None, 0), place in (None, 1), True]


def test_a_divided_parameter_that_is_frozen_is_refused_by_name() -> None:
    model = NextWord()
    model.layers[0].up.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"layers\.0\.up\.weight is frozen, and the plan for tensor parallelism"):
        divide_(model, plan_of(model, PLAN), TensorRanks(2, 0), degree=2, seed=0)


def test_a_degree_that_does_not_divide_a_width_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    with pytest.raises(ConfigError, match=r"0 has a width of 6 outputs, which 4 tensor-parallel ranks cannot divide"):
        divide_(model, plan_of(model, {"0": "colwise", "1": "rowwise"}), TensorRanks(4, 0), degree=4, seed=0)
