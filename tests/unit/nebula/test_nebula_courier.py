"""The thread that talks to the writer process outlives whatever follows from an answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hetseq.nebula import courier
from hetseq.nebula.courier import Courier


class Writer:
    """In place of a process: it answers everything at once."""

    pid = 1

    def __init__(self, *_: Any) -> None:
        self._serial = 0

    def ask(self, request: Mapping[str, Any]) -> None:
        self._serial = request["serial"]

    def answer(self, timeout_s: float | None) -> dict[str, Any]:
        return {"serial": self._serial}

    def close(self) -> None:
        pass


def test_what_fails_after_an_answer_keeps_nobody_waiting_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder on a network file system that cannot be closed, for example."""
    monkeypatch.setattr(courier, "WriterProcess", Writer)
    heard, is_over = [], threading.Event()

    def fail(answer: Mapping[str, Any]) -> None:
        raise OSError("the server is gone")

    def hear(answer: Mapping[str, Any]) -> None:
        heard.append(answer["serial"])
        is_over.set()

    those = Courier({}, [])
    with caplog.at_level(logging.ERROR):
        for then in (fail, hear):
            those.ask(dict, then)
        assert is_over.wait(10.0)
        those.close()
    assert heard == [2]
    assert "the server is gone" in caplog.text
