"""Ownership: each element has one owner, and owners follow the fractions."""

from __future__ import annotations

import random

import pytest

from hetseq.balance.ownership import GRAIN, Ownership, UnitSizes, cut


@pytest.mark.parametrize("seed", range(200))
def test_each_element_has_one_owner_and_tensors_are_whole_or_in_grains(seed: int) -> None:
    draw = random.Random(seed)
    units = []
    for _ in range(draw.randint(1, 8)):
        sizes = [draw.choice([0, 1, draw.randint(0, 5000)]) for _ in range(draw.randint(1, 6))]
        units.append(UnitSizes(tuple(sizes), tuple(draw.random() < 0.5 for _ in sizes)))
    fractions = [float(draw.randint(0, 9)) for _ in range(draw.randint(1, 5))]
    fractions[draw.randrange(len(fractions))] += 1
    owners = cut(units, fractions)
    for unit, bounds in zip(units, owners.bounds, strict=True):
        assert (bounds[0], bounds[-1]) == (0, sum(unit.elements))
        assert list(bounds) == sorted(bounds)
        start = 0
        for elements, may_cut in zip(unit.elements, unit.may_cut):
            inside = [bound - start for bound in bounds if start < bound < start + elements]
            assert may_cut or not inside
            assert all(place % GRAIN == 0 for place in inside)
            start += elements
    assert sum(owners.owned_by(rank) for rank in range(len(fractions))) == owners.total
    assert all(owners.owned_by(rank) == 0 for rank, fraction in enumerate(fractions) if not fraction)


def test_a_rank_owns_its_fraction_to_a_grain() -> None:
    units = [UnitSizes((n,), (True,)) for n in (1000, 17, 123_456, 1, 999)]
    owners = cut(units, [6.0, 2.0, 1.0])
    for rank, fraction in enumerate((6 / 9, 2 / 9, 1 / 9)):
        assert abs(owners.owned_by(rank) - fraction * owners.total) <= GRAIN


def test_a_cut_lies_at_the_nearest_grain_of_its_own_tensor() -> None:
    cuts = [cut([UnitSizes((10, 1000), (True, True))], [first, 1.0]).bounds[0][1] for first in (0.09, 0.1, 0.19)]
    assert cuts == [10 + GRAIN, 10 + GRAIN, 10 + 2 * GRAIN]  # of 83.4, 91.8 and 161.3
    assert cut([UnitSizes((100,), (True,))], [85.0, 15.0]).bounds == ((0, 100, 100),), "the end is nearer than 64"


def test_whole_tensors_make_up_in_the_next_unit_for_what_a_cut_missed() -> None:
    units = [UnitSizes((100,), (False,)) for _ in range(40)]  # each goes to one rank
    owners = cut(units, [3.0, 1.0])
    assert [owners.owned_by(rank) for rank in range(2)] == [3000, 1000]


def test_other_cuts_have_another_digest() -> None:
    assert Ownership(((0, 3, 4),)).digest() != Ownership(((0, 2, 4),)).digest()
    assert Ownership(((0, 3, 4),)).digest() == Ownership(((0, 3, 4),)).digest()


@pytest.mark.parametrize("fractions", [[], [0.0, 0.0], [1.0, -1.0], [float("nan")]])
def test_fractions_that_own_nothing_are_refused(fractions: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one above 0"):
        cut([UnitSizes((4,), (True,))], fractions)
