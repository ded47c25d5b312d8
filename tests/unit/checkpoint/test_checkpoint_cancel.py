"""A save of several ranks that has failed on one of them: the others are told, give up, and training goes on."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.checkpoint import CheckpointManager, Identity, Retention, SaveResult, async_save, snapshot
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint import verification as reader
from hetseq.checkpoint import writer_client as writer_process
from hetseq.checkpoint.arena import Arena
from hetseq.checkpoint.history import HISTORY_NAME, read_history
from hetseq.checkpoint.part_writer import PartWriting
from hetseq.checkpoint.publish import Place
from hetseq.checkpoint.rank_messages import Row, exchange, first_failure
from hetseq.checkpoint.records import CHUNK_BYTES
from hetseq.checkpoint.writer import MessagePipe, Writer
from hetseq.comm.group import LocalGroup
from hetseq.system import faults
from hetseq.testing import Faults
from tests.support.checkpoints import LINEAGE, contents, loaded_step, manager, tensors_of, together

# a writer that cannot make a folder while the file named by {full!r} is there
FULL_DISK = (
    "import hetseq.checkpoint.publish as publish, os, errno; make = publish.make_directory; "
    "publish.make_directory = lambda path: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC),"
    " str(path))) if os.path.exists({full!r}) else make(path); "
)
ENDLESS_S = 6.0  # a writer waits four times as long for a folder, and `together` gives up before that


def begin(own: CheckpointManager, step: int) -> SaveResult | None:
    identity = Identity(step, 0, LINEAGE)
    return own.begin(tensors_of(step), {"step": step}, identity=identity, nonce=step, kinds=["time"], at_once=[])


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk is full for writers while this file is there."""
    path = tmp_path / "full"
    path.touch()
    before, _, after = writer_process._PROGRAM.rpartition("importlib.import_module")
    fault = FULL_DISK.format(full=str(path))
    monkeypatch.setattr(writer_process, "_PROGRAM", f"{before}{fault}importlib.import_module{after}")
    return path


def train(own: CheckpointManager, group: Any) -> SaveResult:
    """Steps until the save under way is over; in each the ranks tell each other what a commit row has of it."""
    result = None
    while result is None:
        rows = exchange(group, Row(busy=own.is_busy, failed=own.has_failed))
        if any(row.failed for row in rows):
            own.cancel()
        if not any(row.busy for row in rows):
            result = own.go_on()
    return result


def wait(own: CheckpointManager, group: Any) -> SaveResult:
    """As at the end of a run."""
    result = own.finish()
    assert result is not None
    return result


@pytest.mark.parametrize("follow", [train, wait])
def test_where_rank_zero_cannot_make_the_folder_no_rank_waits_for_it(tmp_path: Path, full: Path, follow: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def live(group: Any) -> list[SaveResult]:
        own = manager(run, group, run_id=str(run), patience_s=ENDLESS_S)
        assert own.prepare(tensors_of(0)) is None
        results = []
        for step in (1, 2):
            assert begin(own, step) is None
            own.settle()
            results.append(follow(own, group))
            if group.rank == 0:
                full.unlink(missing_ok=True)
            exchange(group, Row())
        own.close()
        return results

    for first, second in together(2, live):
        assert not first.ok
        assert str(first.error).startswith("rank 0: No space left on device (ENOSPC): ")
        assert second.ok
    assert loaded_step(run) == 2
    assert len(contents(run)) == 1
    assert [row["result"] for row in read_history(run / HISTORY_NAME)] == ["failed", "ok"]


def test_the_stall_of_a_save_is_all_the_time_that_training_stood_still_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank comes to each exchange 60 s late."""
    clock = SimpleNamespace(now_s=0.0)

    class SlowGroup(LocalGroup):
        def all_gather_rows(self, row: Any) -> Any:
            clock.now_s += 60
            return super().all_gather_rows(row)

    own = manager(tmp_path, SlowGroup(), run_id=str(tmp_path))
    assert own.prepare(tensors_of(0)) is None
    monkeypatch.setattr(async_save, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    begin(own, 1)
    own.settle()
    clock.now_s += 1000  # training goes on
    while own.is_busy:
        os.sched_yield()
    assert own.go_on() is None
    result = own.finish()
    own.close()
    assert result is not None
    assert (result.stall_s, result.seconds) == (180, 1180)
    assert [row["stall_s"] for row in read_history(tmp_path / HISTORY_NAME)] == ["180.000000"]


def test_the_reason_of_a_failed_save_is_the_rank_that_failed_and_not_one_that_gave_up() -> None:
    gave_up, failed = Row(failed=True, errno=errno.ECANCELED, text="given up"), Row(failed=True, text="no space")
    assert first_failure([gave_up, Row(), failed, failed]) == "rank 2: no space"
    assert first_failure([failed, gave_up]) == "rank 0: no space"
    assert first_failure([Row(), gave_up]) == "rank 1: given up"
    assert first_failure([Row(), Row(busy=True)]) is None


def test_a_writer_that_waits_for_a_folder_stops_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    trainer, theirs = socket.socketpair()

    def nap(seconds: float) -> None:
        clock.now_s += seconds
        if 3 < clock.now_s <= 3 + seconds:
            trainer.sendall(b'{"do": "hurry"}\n{"do": "cancel"}\n')

    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=nap))
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", tmp_path)
    arena = Arena.create("run", 1000)
    writer = Writer(MessagePipe(theirs), [], Place(tmp_path, Retention(), 10.0, 0.0), is_polite=True)
    with trainer, theirs, pytest.raises(OSError, match="another rank's part failed") as caught:
        writer._await_folder(tmp_path / "checkpoints", arena)
    arena.close(unlink=True)
    assert caught.value.errno == errno.ECANCELED
    assert 3 < clock.now_s < 4


@pytest.mark.parametrize("is_polite", [True, False])
def test_a_writer_that_writes_stops_at_a_chunk_when_it_is_told_to(tmp_path: Path, is_polite: bool) -> None:
    trainer, theirs = socket.socketpair()
    writer = Writer(MessagePipe(theirs), [], Place(tmp_path, Retention(), 10.0, 0.0), is_polite=is_polite)
    writing = PartWriting(tmp_path / "part", memoryview(bytes(2 * CHUNK_BYTES)))
    trainer.sendall(b'{"do": "cancel"}\n')
    with trainer, theirs, pytest.raises(OSError, match="another rank's part failed"):
        writer._write_politely(writing)
    writing.close()
    assert (tmp_path / "part").stat().st_size == CHUNK_BYTES


def test_a_writer_that_dies_when_it_is_to_give_up_is_not_asked_for_the_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, copy = threading.Event(), snapshot._Copying._work
    monkeypatch.setattr(snapshot._Copying, "_work", lambda self: may_copy.wait(20) and copy(self))
    own = manager(tmp_path, run_id=str(tmp_path))
    assert own.prepare(tensors_of(0)) is None
    begin(own, 1)
    assert own._background is not None
    writer = own._background._writer
    os.kill(writer.pid, signal.SIGSTOP)
    own.cancel()
    own.cancel()  # said once
    os.kill(writer.pid, signal.SIGKILL)
    while own.is_busy:
        os.sched_yield()
    assert own.has_failed
    may_copy.set()
    result = own.finish()
    own.close()
    assert result is not None
    assert "given up because another rank's part failed (ECANCELED)" in str(result.error)
    assert contents(tmp_path) == set()


def test_a_save_that_is_cancelled_after_its_end_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    own = manager(tmp_path, run_id=str(tmp_path))
    assert own.prepare(tensors_of(0)) is None
    begin(own, 1)
    own.settle()
    assert own._background is not None
    own._background._writer.say({"do": "cancel"})  # it may be done before it hears this
    assert own.finish() is not None
    own._background._writer.say({"do": "cancel"})
    begin(own, 2)
    own.settle()
    result = own.finish()
    own.close()
    assert result is not None
    assert result.ok
    assert loaded_step(tmp_path) == 2


def test_a_row_that_says_busy_comes_back() -> None:
    assert [row.busy for row in exchange(LocalGroup(), Row(busy=True))] == [True]
    assert [row.busy for row in exchange(LocalGroup(), Row())] == [False]


@pytest.mark.parametrize("phase", ["persist", "rename"])
def test_a_fault_of_a_writer_happens_in_the_save_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr(faults, "_armed", None)
    faults.arm(Faults().raise_(rank=0).at(step=2, phase=phase).text(), slot=0, incarnation=0)
    own = manager(tmp_path, LocalGroup(), run_id=str(tmp_path))
    assert own.prepare(tensors_of(0)) is None
    results = []
    for step in (1, 2, 3):
        assert begin(own, step) is None
        own.settle()
        results.append(own.finish())
    own.close()
    assert [result is not None and result.ok for result in results] == [True, False, True]
    assert f"slot 0, step 2, phase {phase}" in str(results[1])
