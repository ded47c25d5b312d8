"""How long a worker waits for its peers to connect."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from hetseq.cluster.membership.assignment import Assignment, GenerationRanks
from hetseq.launch import rank_life


@pytest.mark.parametrize("is_replacement", [False, True])
@pytest.mark.parametrize(
    ("generation", "timeout_s"), [(0, rank_life._CONNECT_TIMEOUT_S), (1, rank_life._RECONNECT_TIMEOUT_S)]
)
def test_ranks_of_a_generation_wait_equally_long_for_each_other(
    monkeypatch: pytest.MonkeyPatch, generation: int, timeout_s: float, is_replacement: bool
) -> None:
    """Else one of them, which came later, goes on waiting for peers that have long given up, or hang."""
    waits: list[float] = []

    def connect(*, timeout_s: float, **_: Any) -> None:
        waits.append(timeout_s)

    monkeypatch.setattr(rank_life, "connect", connect)
    placement = Assignment(slot=1, device="cpu", threads=1, is_replacement=is_replacement)
    rank_life._connect(placement, GenerationRanks(generation, (0, 1), ("a", "a")), mock.Mock())
    assert waits == [timeout_s]
