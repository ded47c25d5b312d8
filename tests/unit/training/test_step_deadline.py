"""How long a rank waits for the others: pure arithmetic over the last steps, no clock."""

from __future__ import annotations

from collections import deque

import pytest

from hetseq.data.plan import StepPlan
from hetseq.training.step_deadline import StepDeadline

FIRST_S, LEAST_S = 120.0, 5.0


def deadline(
    recent: list[tuple[float, int]], samples: int, *, start: int = 100, given: float | None = None,
    compiles: bool = False, openings: tuple[float, ...] = (),
) -> float:  # fmt: skip
    """The deadline of a step of `samples` samples after steps of (seconds, samples), and epochs of that first step."""
    found = StepDeadline(given, compiles=compiles)
    found._recent, found._openings = deque(recent, maxlen=21), deque(openings, maxlen=3)
    return found.of(StepPlan(9, 2, start, start + samples, (samples,), ends_epoch=False))


def test_until_three_steps_were_seen_nothing_is_known() -> None:
    assert deadline([], 10) == deadline([(0.1, 10)] * 2, 10) == FIRST_S
    assert deadline([(0.1, 10)] * 3, 10) == LEAST_S


def test_a_compiled_network_may_be_compiled_for_another_size_in_any_step() -> None:
    assert deadline([(0.1, 10)] * 21, 10, compiles=True) == FIRST_S
    assert deadline([(20.0, 10)] * 21, 10, compiles=True) == pytest.approx(200.0)


def test_quick_steps_are_waited_for_as_long_as_a_process_may_stall() -> None:
    assert deadline([(0.001, 10)] * 21, 10) == LEAST_S


def test_slow_steps_are_waited_for_longer() -> None:
    assert deadline([(20.0, 10)] * 21, 10) == pytest.approx(200.0)


def test_a_step_of_more_samples_is_waited_for_in_proportion() -> None:
    # --update-freq 1,60: after short steps comes one of sixty times their samples
    assert deadline([(0.2, 10)] * 21, 600) == pytest.approx(120.0)
    assert deadline([(0.2, 10)] * 21, 10) == LEAST_S


def test_a_step_of_fewer_samples_is_waited_for_as_long_as_the_last_ones() -> None:
    assert deadline([(20.0, 100)] * 21, 1) == pytest.approx(200.0)


def test_one_slow_step_among_quick_ones_changes_nothing() -> None:
    assert deadline([*[(0.1, 10)] * 20, (900.0, 10)], 10) == LEAST_S


def test_the_first_step_of_an_epoch_may_read_its_data_anew() -> None:
    assert deadline([(0.1, 10)] * 21, 10, start=0) == FIRST_S
    assert deadline([(0.1, 10)] * 21, 10, start=10) == LEAST_S


def test_after_three_epochs_the_first_step_of_one_is_known_by_the_others_of_its_kind() -> None:
    assert deadline([(0.1, 10)] * 21, 10, start=0, openings=(0.1, 0.1)) == FIRST_S
    assert deadline([(0.1, 10)] * 21, 10, start=0, openings=(0.1, 0.1, 0.1)) == LEAST_S
    assert deadline([(0.1, 10)] * 21, 10, start=0, openings=(0.1, 30.0, 0.1)) == pytest.approx(300.0)
    assert deadline([(0.1, 10)] * 21, 10, start=0, openings=(0.1, 0.1, 0.1), compiles=True) == FIRST_S


def test_a_slow_run_does_not_wait_less_at_the_start_of_an_epoch() -> None:
    assert deadline([(40.0, 10)] * 21, 10, start=0) == pytest.approx(400.0)


def test_a_deadline_that_was_given_holds_always() -> None:
    assert deadline([], 10, given=7.0) == deadline([(99.0, 10)] * 21, 600, start=0, given=7.0) == 7.0
