"""What a launcher answers the hub before it has workers."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetseq.cluster.membership.assignment import Assignment
from hetseq.cluster.membership.coordinator_client import Member
from hetseq.cluster.membership.run_directory_discovery import leave_mark
from hetseq.cluster.rendezvous.channel import ChannelClosed
from hetseq.cluster.rendezvous.meet import OtherNodes
from hetseq.config import parse
from hetseq.errors import ConfigError, RunDirectoryError
from hetseq.launch.launcher import Launcher, _CutShort, _Stopped
from hetseq.launch.worker_watch import WorkerWatch
from hetseq.run_directory import RunDirectory


def launcher(save_dir: Path | None) -> Launcher:
    words = [] if save_dir is None else ["--save-dir", str(save_dir)]
    return Launcher(parse(["--cpu", *words]), ["cpu"], others=OtherNodes("hetseq train"))


def look(launcher: Launcher, run: Path) -> Any:
    """The answer when another node has made `run`, which this node sees."""
    mark = leave_mark(RunDirectory.prepare(run, config_yaml=""))
    nobody = cast(Member, SimpleNamespace())
    return launcher._answer(nobody, {"kind": "see", "mark": dataclasses.asdict(mark)})


def commit(run: Path) -> Path:
    """A run directory that looks as if it had a checkpoint."""
    place = RunDirectory.prepare(run, config_yaml="").checkpoints / f"step-{7:09d}.{'0' * 16}"
    place.mkdir()
    (place / "COMMIT.json").touch()
    return run


def test_a_directory_that_is_seen_is_shared_whatever_ones_own_option_says(tmp_path: Path) -> None:
    for own in (None, tmp_path / "own", tmp_path / "run"):
        assert look(launcher(own), tmp_path / "run") == {"kind": "seen", "is_shared": True}
        assert (own is None) or own.name == "run" or not own.exists()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_directory_that_is_shared_gets_its_report_where_nobody_else_makes_it(tmp_path: Path, is_over: bool) -> None:
    node, run = launcher(None), tmp_path / "run"
    look(node, run)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    node._is_over = is_over
    node._leave_directory()
    assert (run / "report.html").exists() == is_over


def test_checkpoints_in_a_directory_of_ones_own_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --join the first rank may be another node's at each start, and then another --save-dir would count."""
    own = commit(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"own has checkpoints up to step 7, but the run directory is .*run"):
        look(launcher(own), tmp_path / "run")
    assert look(launcher(own), own)["is_shared"] is True
    monkeypatch.chdir(commit(tmp_path / "checkpoints").parent)
    assert look(launcher(None), tmp_path / "run")["is_shared"] is True  # nobody named that directory


def test_a_node_that_takes_part_again_may_use_its_run_directory_again(tmp_path: Path) -> None:
    """Its lock is its own, and no other launcher's."""
    node = launcher(tmp_path / "run")
    nobody = cast(Member, SimpleNamespace(close=lambda: None))
    first = node._answer(nobody, {"kind": "own"})
    node._start_over(nobody)
    assert [path.name for path in (tmp_path / "run").glob(".mark-*")] == []
    again = node._answer(nobody, {"kind": "own"})
    assert first is not None
    assert again is not None
    assert first["run_id"] == again["run_id"]
    with pytest.raises(RunDirectoryError, match="in use by another run"):
        launcher(tmp_path / "run")._answer(nobody, {"kind": "own"})
    node._leave_directory()


@pytest.mark.parametrize("was_part", [False, True])
def test_the_head_that_is_lost_again_on_the_way_back_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_part: bool
) -> None:
    """At a first start the other nodes end too: nobody could be found."""
    node = launcher(tmp_path / "run")
    node._was_part = was_part
    members = [cast(Member, SimpleNamespace(close=lambda: None)) for _ in range(2)]
    ways = iter(members)

    def prepare(member: Member) -> dict[str, Any]:
        node._own()
        if member is members[0]:
            raise ChannelClosed("the network has failed again")
        return {"kind": "begin"}

    monkeypatch.setattr("hetseq.launch.launcher.join", lambda *_, **__: next(ways))
    monkeypatch.setattr(node, "_claim", lambda member: None)
    monkeypatch.setattr(node, "_prepare", prepare)
    if was_part:
        assert node._take_part() == (members[1], {"kind": "begin"})
    else:
        with pytest.raises(ChannelClosed):
            node._take_part()
    node._leave_directory()


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """A launcher whose fork server imports torch until it is killed; it hears of signals by `rings`."""
    node, killed = launcher(None), threading.Event()
    node._directory = RunDirectory(Path("run"))
    node._bell, hammer = os.pipe()

    def start(*_: Any, is_wanted: Any) -> None:
        os.write(hammer, bytes([signal.SIGTERM]))
        assert killed.wait(20)
        assert not is_wanted(), "another server would be asked"
        raise EOFError

    monkeypatch.setattr("hetseq.launch.launcher.start_worker", start)
    monkeypatch.setattr("hetseq.launch.launcher.kill_server", killed.set)
    yield node
    assert killed.is_set()
    for thread in threading.enumerate():
        if thread.name == "beside":
            thread.join(20)
    os.close(node._bell)
    os.close(hammer)


def test_a_stop_signal_does_not_wait_for_a_server_that_imports_torch(importing: Launcher) -> None:
    with pytest.raises(_Stopped, match="SIGTERM"):
        importing._start_worker(cast(Assignment, SimpleNamespace(slot=0)), importing._pause)
    assert importing._workers == []


def test_a_replacement_that_waits_for_a_server_is_waited_for_until_the_second_signal(
    importing: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = list[bytes]()

    def heed(signals: bytes, now_s: float) -> None:
        heard.append(signals)
        importing._cut_short = "" if len(heard) == 1 else "stopped at once by a second signal (SIGTERM)"
        if len(heard) == 1:
            os.write(hammer, signals)

    hammer = os.open(f"/proc/self/fd/{importing._bell}", os.O_WRONLY)
    monkeypatch.setattr(importing, "_heed", heed)
    with pytest.raises(_CutShort):
        importing._start_worker(cast(Assignment, SimpleNamespace(slot=0)), importing._pause_in_training)
    assert len(heard) == 2
    os.close(hammer)


def test_a_server_that_imports_torch_for_minutes_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = launcher(None)
    node._directory = RunDirectory(Path("run"))
    now_s, begun = [0.0], threading.Event()

    def pause(seconds: float) -> None:
        if now_s[0] < 130.0:
            now_s[0] += 1.0
        else:
            begun.set()

    monkeypatch.setattr("hetseq.launch.launcher.start_worker", lambda *_, **__: begun.wait(20))
    monkeypatch.setattr("hetseq.launch.launcher.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    node._start_worker(cast(Assignment, SimpleNamespace(slot=3)), pause)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" has taken ")[2] for line in lines] == ["60 s", "120 s"]
    assert all(line.startswith("rank 3 has not started: importing torch (process ") for line in lines)


class Stub:
    """A worker, as far as `_heed` and an ending look at it."""

    def __init__(self, *, is_ready: bool) -> None:
        self.is_ready = is_ready


@pytest.mark.parametrize(
    ("has_begun", "ready", "is_polite"),
    [
        (False, [False, False], False),
        (False, [True, False], False),
        (True, [True, False], True),  # one is replaced
        (True, [False, False], False),  # a node that comes late
        (True, [True, True], True),
    ],
)
def test_a_signal_lets_ranks_that_train_finish_their_step(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool, ready: list[bool], is_polite: bool
) -> None:
    monkeypatch.setattr("hetseq.launch.launcher.die_of_next_signal", lambda: None)
    node, sent = launcher(None), list[str]()
    node._member = cast(Member, SimpleNamespace(send=sent.append))
    node._has_begun, node._workers = has_begun, cast(Any, [Stub(is_ready=one) for one in ready])
    node._heed(bytes([signal.SIGTERM]), 5.0)
    assert sent == (["leave"] if is_polite else [])
    assert node._cut_short == ("" if is_polite else "stopped by SIGTERM before the first step")


@pytest.mark.parametrize(("has_begun", "is_polite", "left"), [(True, True, 1), (True, False, 2), (False, True, 2)])
def test_at_a_polite_end_nobody_waits_for_a_worker_that_loads(has_begun: bool, is_polite: bool, left: int) -> None:
    """An errand never begins, and its ranks never say that they are ready."""
    node = launcher(None)
    node._has_begun = has_begun
    workers = cast(Any, [Stub(is_ready=True), Stub(is_ready=False)])
    for worker in workers:
        worker.tell = lambda *_, **__: None
    watch = WorkerWatch(workers, cast(Any, None))
    node._hear({"kind": "ebb", "is_polite": is_polite}, watch)
    if watch.is_ending:
        assert watch.take_loading() == workers[1:]
    assert len(watch.running) == left


def test_a_stop_signal_while_another_head_is_looked_for_does_not_keep_from_saving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise _Stopped("SIGTERM")

    monkeypatch.setattr("hetseq.launch.launcher.meet", stopped)
    assert launcher(None)._meet_again() is None
    assert "found no other node that leads the run (SIGTERM)" in capsys.readouterr().err
