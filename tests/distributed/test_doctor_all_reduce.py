"""The all-reduce of the doctors among real ranks."""

from __future__ import annotations

from typing import Any

import torch

from hetseq.comm.group import GlooGroup
from hetseq.commands.doctor import all_reduce_child as all_reduce
from tests.support.ranks import run_ranks


def measured(group: GlooGroup) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    all_reduce._ENOUGH_S = 0.0

    def say(kind: str, **facts: Any) -> None:
        found.extend([facts] if kind == "measured" else [])

    all_reduce.measure(group, torch.device("cpu"), say, (4096, 65536))
    return found


def test_all_ranks_tell_the_same_seconds_for_each_size() -> None:
    first, second = run_ranks(measured, 2)
    assert first == second
    assert [facts["bytes"] for facts in first] == [4096, 65536]
    assert all(facts["seconds"] > 0 for facts in first)
