"""Which validation is the best one, and what waits for the copies that shadows get."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.config.sections import ValidationConfig
from hetseq.run.after_step import AfterStep
from hetseq.training.controller import TrainingState


@pytest.mark.parametrize("maximize", [False, True])
def test_what_is_not_finite_is_never_the_best_and_hides_nothing_that_comes_later(maximize: bool) -> None:
    nothing: Any = None
    config = ValidationConfig(maximize_best_checkpoint_metric=maximize)
    boundary = AfterStep(
        config=config, validators=[], saver=nothing, metrics=nothing, status=nothing, watch=nothing, hooks=nothing
    )
    state = TrainingState()
    values = [math.nan, math.inf, -math.inf, 2.0, math.nan, 3.0, 1.0]
    best = [boundary._is_best(state, {"loss": value}) for value in values]
    assert best == [False, False, False, True, False, maximize, not maximize]
    assert state.best == (3.0 if maximize else 1.0)


class Shadows:
    """What a rank sends to shadows: notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def settle(self) -> None:
        self.asked.append("settle")


def boundary_with(shadows: Any, **parts: Any) -> AfterStep:
    nothing: Any = None
    facts = {"hooks": nothing, "saver": SimpleNamespace(settle=lambda: None), **parts}
    boundary = AfterStep(
        config=ValidationConfig(), validators=[], metrics=nothing, status=nothing, watch=nothing, **facts
    )
    boundary.shadows = shadows
    return boundary


def test_a_skipped_step_waits_for_the_copies_that_shadows_get() -> None:
    """The comparison of replicas, or a hook, may change what is being copied."""
    shadows = Shadows()
    boundary_with(shadows).settle()
    assert shadows.asked == ["settle"]
