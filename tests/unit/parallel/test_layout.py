"""Which ranks have a share together, and that a world of single ranks is as it was before there were groups."""

from __future__ import annotations

import numpy as np
import pytest

from hetseq.comm.group import Rows
from hetseq.config.sections import DataConfig
from hetseq.parallel.layout import Layout, one_rank_each
from hetseq.run.build import global_batch

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


class Gathered:
    """Rows that the ranks of a world have brought."""

    deadline_s = 1.0

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = np.array(rows, np.int64)
        self.rank, self.world_size = 0, len(rows)

    def all_gather_rows(self, row: Rows) -> Rows:
        assert row.tolist() == self._rows[self.rank].tolist()
        return self._rows


def test_a_global_batch_has_a_micro_batch_of_each_group_and_not_of_each_rank() -> None:
    config = DataConfig(max_sentences=8, update_freq=(2,))
    ranks = Gathered([[8, 0], [8, 0], [2, 0]])
    assert global_batch(config, ranks, one_rank_each(3)).sample_limit(1) == 36
    assert global_batch(config, ranks, Layout(((0, 1), (2,)))).sample_limit(1) == 20


def test_values_of_fewer_ranks_than_there_are_are_refused() -> None:
    with pytest.raises(AssertionError, match="each rank"):
        PAIRS.of_leaders("abc")
