"""A rank slowed down on purpose: it sleeps as long as a slower machine would have computed."""

from __future__ import annotations

import pytest
import torch

from hetseq.training import throttle
from hetseq.training.throttle import Throttle


class Clocks:
    """Stands for `time`: computing takes both clocks on, waiting for a core and sleep only that of the wall."""

    def __init__(self, *, oversleeps_s: float = 0.0) -> None:
        self.wall_s, self.cpu_s, self.asleep = 50.0, 10.0, list[float]()
        self._oversleeps_s = oversleeps_s

    def process_time(self) -> float:
        return self.cpu_s

    def perf_counter(self) -> float:
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        self.asleep.append(seconds)
        self.wall_s += seconds + self._oversleeps_s

    def compute(self, seconds: float, *, waits_s: float = 0.0) -> None:
        self.cpu_s += seconds * torch.get_num_threads()  # of every thread
        self.wall_s += seconds + waits_s


@pytest.mark.parametrize(
    ("factor", "waited", "slept"),
    [(1.0, 0.0, []), (3.0, 0.0, [4.0]), (1.5, 0.0, [1.0]), (3.0, 1.5, [2.5]), (3.0, 10.0, [0.0])],
)
def test_a_throttled_rank_sleeps_until_a_slower_machine_would_have_been_done(
    factor: float, waited: float, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    monkeypatch.setattr(throttle, "time", clocks)
    with Throttle(factor).slowed():
        clocks.compute(2.0, waits_s=waited)
    assert clocks.asleep == slept


def test_a_wait_for_other_ranks_comes_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, waited = Clocks(), [1.0]  # seconds so far
    monkeypatch.setattr(throttle, "time", clocks)
    with Throttle(3.0).slowed(lambda: waited[-1]):
        clocks.compute(2.0, waits_s=5.0)
        waited.append(6.0)
    assert clocks.asleep == [4.0]


def test_what_a_throttled_rank_has_overslept_shortens_the_next_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(oversleeps_s=0.5)
    monkeypatch.setattr(throttle, "time", clocks)
    slowed = Throttle(3.0)
    for _ in range(4):
        with slowed.slowed():
            clocks.compute(1.0)
    assert clocks.asleep == [2.0, 1.5, 1.5, 1.5]
    assert clocks.wall_s == 50.0 + 4 * 3.0 + 0.5


def test_a_core_that_others_kept_is_made_up_for_by_one_piece_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(throttle, "time", clocks)
    slowed = Throttle(3.0)
    for waits_s in (60.0, 0.0, 0.0, 0.0):
        with slowed.slowed():
            clocks.compute(1.0, waits_s=waits_s)
    # of 58 s only three are made up for: two of them in the second piece, which does not sleep, one in the third
    assert clocks.asleep == [0.0, 0.0, 1.0, 2.0]
