"""What a launcher says of a worker that does not move: to the head when it is asked, to the user early, into a file."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from hetseq.launch import stall_detector as standstill
from hetseq.launch.stall_detector import SHARE, Standstill
from hetseq.launch.watchdog import LOADING_DEADLINE_S, Watchdog
from hetseq.launch.worker_watch import WorkerWatch
from hetseq.run_directory import RunDirectory
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Cell, Phase, state_of_process
from tests.support.trials import until
from tests.unit.launch.test_whereabouts import Clock, clock  # noqa: F401


@dataclass
class Worker:
    """This process, as a launcher would see it."""

    rank: int = 3
    starts: int = 0
    device: str = "cuda:0"
    cell: Cell | None = field(default_factory=Cell)
    pid: int = field(default_factory=os.getpid)
    tell: Callable[..., None] = lambda *_, **__: None

    @property
    def shared(self) -> Cell:
        assert self.cell is not None
        return self.cell


@dataclass
class Scene:
    standstill: Standstill
    worker: Worker
    sent: list[dict[str, Any]]
    told: list[str]
    folder: Path

    def look(self) -> None:
        self.standstill.look([self.worker])


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    worker, sent, told = Worker(), list[dict[str, Any]](), list[str]()
    seeing = Standstill(RunDirectory(tmp_path), lambda kind, **facts: sent.append({"kind": kind, **facts}), told.append)
    worker.shared.enter(Phase.FORWARD_BACKWARD, 5)
    worker.shared.beat(100.0)
    yield Scene(seeing, worker, sent, told, tmp_path)
    worker.shared.close()


def test_who_is_asked_is_told_of_at_once_and_again_when_its_stacks_are_there(scene: Scene) -> None:
    scene.standstill.asked(scene.worker)
    scene.look()
    (first,) = scene.sent
    assert (first["kind"], first["rank"], first["starts"], first["step"]) == ("stands", 3, 0, 5)
    assert (first["phase"], first["device"], first["stacks"]) == ("forward and backward", "cuda:0", "")
    scene.worker.shared.dump()
    scene.look()
    scene.look()
    _, second = scene.sent
    assert second["stacks"] == str(scene.folder / "stacks" / "rank-3-step-5.txt")
    text = Path(second["stacks"]).read_text()
    assert "test_who_is_asked_is_told_of_at_once" in text
    assert "last seen on cuda:0 in step 5, forward and backward" in text


def test_a_freeze_is_passed_on_and_answered_for_the_worker_and_a_record_ends_it(scene: Scene) -> None:
    heard = list[str]()
    scene.worker.tell = lambda kind, **facts: heard.append(kind)
    watch = WorkerWatch([cast(Any, scene.worker)], scene.standstill)
    watch.pass_on({"kind": "freeze", "rank": 3, "starts": 1})
    assert (heard, scene.sent) == ([], []), "it is for another process"
    watch.pass_on({"kind": "freeze", "rank": 3, "generation": 0})
    assert (heard, len(scene.sent)) == (["freeze"], 1)
    watch.pass_on({"kind": "record", "rank": 3})
    scene.worker.shared.enter(Phase.UPDATE)
    scene.look()
    assert (heard, len(scene.sent)) == (["freeze", "record"], 1)


def test_who_goes_on_after_it_was_asked_is_told_of_anew(scene: Scene) -> None:
    scene.standstill.asked(scene.worker)
    scene.worker.shared.enter(Phase.UPDATE)
    scene.look()
    scene.look()
    assert [told["phase"] for told in scene.sent] == ["forward and backward", "optimizer step"]
    scene.standstill.answered(scene.worker)  # by the record of the next generation
    scene.worker.shared.enter(Phase.DATA, 6)
    scene.look()
    assert len(scene.sent) == 2


def test_half_the_deadline_is_a_line_for_the_user_once_a_phase(scene: Scene, clock: Clock) -> None:  # noqa: F811
    scene.worker.shared.enter(Phase.DATA, 5)
    for share in (0.9 * SHARE, SHARE, 2 * SHARE):
        clock.now_s = 1000.0 + share * 100.0
        scene.look()
        assert len(scene.told) == (share >= SHARE)
    assert "rank 3 stands still, last seen on cuda:0 in step 5, reading data (loader) for 50 s" in scene.told[0]
    scene.worker.shared.enter(Phase.COMMIT)
    clock.now_s += 999
    scene.worker.shared.wait_for_others(True)
    scene.look()
    assert len(scene.told) == 1, "it waits for others"


def test_a_stopped_process_is_a_line_for_the_user_long_before_the_deadline(scene: Scene, clock: Clock) -> None:  # noqa: F811
    scene.worker.shared.enter(Phase.SCRIPT, 5)
    scene.worker.shared.beat(100.0)
    with subprocess.Popen(["sleep", "60"]) as process:
        scene.worker.pid = process.pid
        clock.now_s = 1011.0
        scene.look()
        assert scene.told == [], "it runs"
        process.send_signal(signal.SIGSTOP)
        until(lambda: "SIGCONT" in state_of_process(process.pid), "the stop")
        scene.look()
        scene.look()
        process.kill()
    (line,) = scene.told
    assert "rank 3 stands still, last seen on cuda:0 in step 5, the script, between two steps for 11 s; its" in line
    assert "its process is stopped (SIGSTOP, or a terminal's Ctrl-Z; SIGCONT resumes it)" in line


def test_before_the_first_step_the_line_comes_after_a_minute_and_whenever_that_has_doubled(
    scene: Scene,
    clock: Clock,  # noqa: F811
) -> None:
    """Nobody gives up a rank that only loads, so the user is to know what it does."""
    scene.worker.shared.enter(Phase.LOADING_DATA, 0)
    Watchdog(scene.worker.shared, lambda: None).look()  # before there is a group
    scene.worker.shared.dump()
    for second in range(500):
        clock.now_s = 1000.0 + second
        scene.look()
    words = [
        f"warning: rank 3 stands still, last seen on cuda:0 loading its data for {s} s" for s in (60, 120, 240, 480)
    ]
    assert [line.partition(";")[0] for line in scene.told] == words
    assert str(scene.folder / "stacks" / "rank-3-step-0.txt") in scene.told[0]


def test_ranks_that_have_loaded_say_that_they_wait_for_other_nodes(scene: Scene, clock: Clock) -> None:  # noqa: F811
    scene.worker.shared.enter(Phase.MEETING, 0)
    for second in (59, 60, 61, 119, 120):
        clock.now_s = 1000.0 + second
        scene.look()
    assert [line.partition(" s:")[0] for line in scene.told] == [
        f"warning: the ranks of this node have loaded and have waited for ranks on other nodes for {seconds}"
        for seconds in (60, 120)
    ]


def test_a_rank_that_loads_is_named_and_not_those_that_wait_for_it(scene: Scene, clock: Clock) -> None:  # noqa: F811
    waiting = Worker(rank=2)
    waiting.shared.enter(Phase.MEETING, 0)
    scene.worker.shared.enter(Phase.TRIAL, 0)
    scene.worker.shared.beat(LOADING_DEADLINE_S)
    clock.now_s = 1000.0 + 60
    scene.standstill.look([scene.worker, waiting])
    assert [line[:70] for line in scene.told] == [
        "warning: rank 3 stands still, last seen on cuda:0 the start-up trial of its loss for 60 s"[:70]
    ]
    waiting.shared.close()


def test_a_process_without_a_beat_gets_the_signal_once(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    signals = list[int]()
    monkeypatch.setattr(standstill.os, "kill", lambda pid, number: signals.append(number))
    scene.worker.shared.enter(Phase.DATA, 5)
    scene.worker.shared.beat(10.0)
    clock.now_s += 9.0
    scene.look()
    assert signals == [], "it does not answer the signal yet, which would end it"
    scene.worker.shared._words[whereabouts._CAN_DUMP] = 1
    scene.look()
    scene.look()
    assert signals == [whereabouts.STACKS_SIGNAL]
    assert "a call in C holds its interpreter" in scene.standstill.words(scene.worker)


def test_only_the_newest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_MOST_FILES", 2)
    for step in range(4):
        path = tmp_path / "stacks" / f"rank-0-step-{step}.txt"
        standstill._write(path, "x")
        os.utime(path, ns=(step, step))
    assert sorted(path.name for path in (tmp_path / "stacks").iterdir()) == ["rank-0-step-2.txt", "rank-0-step-3.txt"]


def test_where_nothing_can_be_written_the_rest_is_told(scene: Scene) -> None:
    (scene.folder / "stacks").write_text("in the way")
    scene.worker.shared.dump()
    scene.standstill.asked(scene.worker)
    assert [told["stacks"] for told in scene.sent] == [""]
