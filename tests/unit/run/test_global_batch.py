"""The global batch follows from the micro-batches of the groups that have a share together."""

from __future__ import annotations

import numpy as np

from hetseq.balance.layout import Layout, one_rank_each
from hetseq.comm.group import Rows
from hetseq.config.sections import DataConfig
from hetseq.run.build import global_batch


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
    assert global_batch(config, ranks, Layout(((0, 1), (2,)), frozenset({1}))).sample_limit(1) == 16, "an idle group"
