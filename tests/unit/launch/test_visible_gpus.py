"""GPUs are counted by another process, which a stop signal does not wait for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hetseq.launch import visible_gpus as counting
from hetseq.launch.visible_gpus import visible_gpus


class Counter:
    """The process that counts: what its answers are in turn, an exception or what it prints."""

    pid, kills = 7, 0

    def __init__(self, *answers: BaseException | bytes) -> None:
        self.answers = list(answers)

    def __call__(self, words: list[str], **_: Any) -> Counter:
        return self

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.kills == 1

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer, None

    def kill(self) -> None:
        self.kills += 1


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_what_it_prints_counts_and_its_minutes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = subprocess.TimeoutExpired("count", 60.0)
    monkeypatch.setattr(counting.subprocess, "Popen", Counter(late, late, b"3\n"))
    assert visible_gpus() == 3
    assert capsys.readouterr().err.count("counting GPUs: importing torch (process 7) has taken") == 2


def test_an_interrupted_count_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(KeyboardInterrupt("SIGTERM"))
    monkeypatch.setattr(counting.subprocess, "Popen", counter)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        visible_gpus()
    assert counter.kills == 1
