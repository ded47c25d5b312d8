"""Worker processes that end when they are killed, and one that the kernel holds.

The real thing, on a mount that never answers, is in `tests/chaos/test_unkillable.py`.
"""

from __future__ import annotations

import math
import signal
from multiprocessing import Pipe, active_children, process
from typing import Any, cast

import pytest

from hetseq.launch import worker_processes as workers
from hetseq.launch.worker_processes import Worker, end_all, ending_server
from hetseq.launch.worker_watch import WorkerWatch


class Process:
    """As `multiprocessing.Process`; one that is `held` lives on when it is killed."""

    def __init__(self, story: list[str], name: str, *, held: bool) -> None:
        self._story, self._name, self._held = story, name, held
        self.pid, self.sentinel = 4711, 0
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self._story.append(f"kill {self._name}")
        if not self._held:
            self.exitcode = -signal.SIGKILL

    def join(self, timeout: float) -> None:
        assert 0 <= timeout <= workers._HELD_S, "never without a bound"
        self._story.append(f"join {self._name}")

    def close(self) -> None:
        assert self.exitcode is not None, "cannot close a process that runs"
        self._story.append(f"close {self._name}")


@pytest.fixture
def story() -> list[str]:
    return []


def worker(story: list[str], rank: int, *, held: bool = False) -> Worker:
    ours, theirs = Pipe()
    theirs.close()
    return Worker(rank, 0, Process(story, f"{rank}", held=held), ours)


def test_all_are_killed_before_any_is_waited_for(story: list[str]) -> None:
    end_all([worker(story, 0), worker(story, 1)], story.append)
    assert story == ["kill 0", "kill 1", "join 0", "close 0", "join 1", "close 1"]


def test_one_that_is_held_is_told_of_once_and_left_behind(story: list[str]) -> None:
    both, told = [worker(story, 0), worker(story, 1, held=True)], []
    for _ in range(2):
        end_all(both, told.append)
    assert "close 1" not in story
    assert story.count("kill 1") == 1
    assert len(told) == 1
    assert told[0].startswith("rank 1 (pid 4711) was killed but has not ended within 10 s: the kernel holds it")


@pytest.mark.parametrize(("held_s", "ends"), [(0.0, [(1, -signal.SIGKILL)]), (math.inf, [])])
def test_one_that_is_held_counts_as_ended_after_a_while(
    story: list[str], monkeypatch: pytest.MonkeyPatch, held_s: float, ends: list[Any]
) -> None:
    monkeypatch.setattr(workers, "_HELD_S", held_s)
    stays, hangs = worker(story, 0), worker(story, 1, held=True)
    watch = WorkerWatch([stays, hangs], cast(Any, None))
    assert watch.ended(set()) == [], "nobody was killed"
    hangs.fence()
    assert [(end.rank, end.exit_code) for _, end in watch.ended(set())] == ends
    assert (hangs in watch.running) == (not ends)
    monkeypatch.undo()
    end_all([stays, hangs], story.append)


def test_the_interpreter_does_not_wait_at_its_end_for_one_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held: Any = type("Held", (), {"_popen": type("Popen", (), {"poll": lambda self: None})()})()
    with ending_server():
        process._children.add(held)  # type: ignore[attr-defined]
        assert held in active_children()
    assert held not in active_children()
