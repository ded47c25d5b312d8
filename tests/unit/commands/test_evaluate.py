"""`hetseq evaluate` that is stopped while it counts GPUs, before its launcher listens to signals."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.membership.exit_status import Ending
from hetseq.commands import evaluate
from hetseq.config import parse


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_gpus_are_counted_ends_it_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def count(*_: Any) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(evaluate, "launch", count)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    try:
        ending = evaluate.run(evaluate.EvaluationRequest(tmp_path, parse(["--cpu"]), None, False))
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), before):
            signal.signal(each, handler)
    assert ending == Ending(130, f"stopped by {number.name}; run the command again")
