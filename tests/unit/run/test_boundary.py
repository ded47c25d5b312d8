"""Which validation is the best one, and what shadows have to do with a comparison of replicas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.config.sections import ValidationConfig
from hetseq.run.after_step import AfterStep
from hetseq.run.regroup import PendingWork
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
    """In place of a `ShadowFeed`: notes the calls that it gets."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def settle(self) -> None:
        self.asked.append("settle")

    def lack(self) -> None:
        self.asked.append("lack")


def boundary_with(shadows: Any, **parts: Any) -> AfterStep:
    nothing: Any = None
    facts = {"hooks": nothing, "saver": SimpleNamespace(settle=lambda: None), **parts}
    boundary = AfterStep(
        config=ValidationConfig(), validators=[], metrics=nothing, status=nothing, watch=nothing, **facts
    )
    boundary.shadows = shadows
    return boundary


@pytest.mark.parametrize("is_repaired", [False, True])
def test_a_replica_that_was_repaired_may_have_given_its_fault_to_shadows(is_repaired: bool) -> None:
    shadows = Shadows()
    replicas: Any = SimpleNamespace(is_due=lambda step: True, check=lambda step, shares: is_repaired)
    saver = SimpleNamespace(settle=lambda: None, kinds_due=lambda *_, **__: [])
    hooks: Any = SimpleNamespace(is_used=False)
    boundary = boundary_with(shadows, saver=saver, replicas=replicas, hooks=hooks)
    reducer = SimpleNamespace(gather=lambda: None)
    controller: Any = SimpleNamespace(state=TrainingState(), replica=SimpleNamespace(reducer=reducer, buffers=None))
    due = PendingWork(5, 1, False, False, 0, None)
    boundary._follow_up(controller, due, shares=(1, 1), is_stopping=False, ends_run=False)
    assert shadows.asked == ["lack"] * is_repaired


def test_a_skipped_step_waits_for_the_copies_that_shadows_get() -> None:
    """A tensor that is being copied may be changed by the comparison of replicas, or by a hook."""
    shadows = Shadows()
    boundary_with(shadows).settle()
    assert shadows.asked == ["settle"]
