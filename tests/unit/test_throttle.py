"""A rank slowed down on purpose: it sleeps as long as a slower machine would have computed."""

from __future__ import annotations

import pytest
import torch

from hetseq import throttle
from hetseq.throttle import Throttle


@pytest.mark.parametrize(("factor", "slept"), [(1.0, []), (3.0, [4.0]), (1.5, [1.0])])
def test_a_throttled_rank_sleeps_in_proportion_to_what_it_used(
    factor: float, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asleep = iter([10.0, 10.0 + 2.0 * torch.get_num_threads()]), []  # two seconds of every thread
    monkeypatch.setattr(throttle.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(throttle.time, "sleep", asleep.append)
    with Throttle(factor).slowed():
        pass
    assert asleep == slept
