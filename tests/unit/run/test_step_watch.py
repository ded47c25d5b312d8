"""What is told of steps whose loss or gradient is not healthy, and how often."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.cluster.membership.step_commit import Verdict
from hetseq.run.step_watch import StepWatch


class Metrics:
    """Takes events in place of a file."""

    def event(self, name: str, **fields: Any) -> None:
        pass


def told(losses: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged of steps with these losses."""
    watch = StepWatch(["loss"], Metrics(), rank=0, most=10, group_of=lambda rank: rank)  # type: ignore[arg-type]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for step, loss in enumerate(losses, start=1):
            outcome = SimpleNamespace(verdict=Verdict.APPLY)
            watch.see(SimpleNamespace(outcome=outcome, loss=loss, grad_norm=1.0, plan=SimpleNamespace(step=step)))  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records]


def test_a_loss_that_explodes_is_told_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    assert told([0.25, 0.3, 2.5e29, 2.8e29], caplog) == [
        "step 3: the loss is 2.5e+29, and was 0.25 in step 1: training diverges; lower --lr, or raise --warmup-updates"
    ]


def test_a_loss_that_falls_rises_a_little_or_began_at_0_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert told([2.3, 1e-6, 2.0, 900.0], caplog) == []
    assert told([0.0, 5.0, 1e6], caplog) == []
    assert told([-2.0, -1.0, 100.0], caplog) == []
