"""A rank slowed down on purpose: it sleeps as long as a slower machine would have computed."""

from __future__ import annotations

import pytest
import torch

from hetseq import throttle
from hetseq.throttle import Throttle


@pytest.mark.parametrize(
    ("factor", "waited", "slept"),
    [(1.0, 0.0, []), (3.0, 0.0, [4.0]), (1.5, 0.0, [1.0]), (3.0, 1.5, [2.5]), (3.0, 10.0, [0.0])],
)
def test_a_throttled_rank_sleeps_until_a_slower_machine_would_have_been_done(
    factor: float, waited: float, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, began = iter([10.0, 10.0 + 2.0 * torch.get_num_threads()]), iter([50.0, 52.0 + waited])  # 2 s of every thread
    asleep: list[float] = []
    monkeypatch.setattr(throttle.time, "process_time", lambda: next(used))
    monkeypatch.setattr(throttle.time, "perf_counter", lambda: next(began))
    monkeypatch.setattr(throttle.time, "sleep", asleep.append)
    with Throttle(factor).slowed():
        pass
    assert asleep == slept
