"""When the row of a step reaches the files of a run that shadows follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hetseq.run.after_step import AfterStep


def calls_of(*, follows: bool, unsent: bool) -> list[str]:
    """What one step asks of the metrics, in order."""
    metrics: Any = mock.MagicMock()
    boundary = AfterStep(
        config=mock.MagicMock(), validators=[], saver=mock.MagicMock(), metrics=metrics,
        status=mock.MagicMock(run=None), watch=mock.MagicMock(), hooks=mock.MagicMock(),
    )  # fmt: skip
    boundary.shadows = mock.MagicMock() if follows else None
    boundary.due = mock.MagicMock(return_value=SimpleNamespace(row={"step": 7}))  # type: ignore[method-assign]
    boundary._follow_up = mock.MagicMock(return_value=(False, False))  # type: ignore[method-assign]
    boundary._saver.is_keep_wanted.return_value = False  # type: ignore[attr-defined]
    outcome = SimpleNamespace(rows=(), writing=False, failed=(), wish=0, unsent=unsent)
    plan = SimpleNamespace(step=7, epoch=1)
    result: Any = SimpleNamespace(outcome=outcome, plan=plan, shift=None, shares=(1,), counted_shares=(1,))
    boundary.after_step(mock.MagicMock(), result, ends_run=False)
    return [call[0] for call in metrics.mock_calls if call[0] in ("hold", "release", "step")]


@pytest.mark.parametrize(
    ("follows", "unsent", "asked"),
    [
        (True, False, ["release", "hold", "step"]),  # the rows before this one; this one waits for a later commit
        (True, True, ["hold", "step"]),
        (False, False, ["release", "step"]),
    ],
)
def test_a_row_waits_until_a_commit_tells_that_the_shadows_have_its_step(
    follows: bool, unsent: bool, asked: list[str]
) -> None:
    assert calls_of(follows=follows, unsent=unsent) == asked
