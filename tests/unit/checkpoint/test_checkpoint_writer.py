"""The process that writes checkpoints: what it is told and answers, what becomes of its death, and of its trainer's."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetseq.checkpoint import CheckpointManager, Identity, Retention, SaveResult, snapshot
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint import part_writer as part_writing
from hetseq.checkpoint import verification as reader
from hetseq.checkpoint import writer as writer_module
from hetseq.checkpoint import writer_client as writer_process
from hetseq.checkpoint.arena import READY, Arena
from hetseq.checkpoint.history import HISTORY_NAME, read_history
from hetseq.checkpoint.part_writer import PartWriting
from hetseq.checkpoint.publish import Place
from hetseq.checkpoint.records import CHUNK_BYTES
from hetseq.checkpoint.writer import MessagePipe, Writer, setting_of
from hetseq.checkpoint.writer_client import WriterProcess
from tests.support.checkpoints import (
    LINEAGE,
    checked_step,
    fork,
    keep,
    keeping,
    loaded_step,
    manager,
    reap,
    save,
    started,
    tensors_of,
    together,
)


def begin(own: CheckpointManager, tensors: Mapping[str, Tensor], step: int) -> SaveResult | None:
    """Begin to save; "model.b" may change at once."""
    identity = Identity(step, 0, LINEAGE)
    return own.begin(
        tensors, {"step": step}, identity=identity, nonce=step * 16, kinds=["epoch"], at_once=["model.b"]
    )  # fmt: skip


def save_meanwhile(own: CheckpointManager, step: int) -> SaveResult:
    """A save in the background whose tensors change as soon as they may."""
    tensors = tensors_of(step)
    result = begin(own, tensors, step)
    tensors["model.b"].zero_()
    own.settle()
    tensors["model.a"].zero_()
    result = result or own.finish()
    assert result is not None
    return result


def prepared(run: Path, group: Any = None, **settings: Any) -> CheckpointManager:
    """A manager that is ready to save in the background."""
    own = manager(run, group, **{"run_id": run_id_of(run), **settings})
    assert own.prepare(tensors_of(0)) is None
    return own


def run_id_of(run: Path) -> str:
    """Of nobody else: starts of one run wait for each other's writers, and another test run may be going on."""
    return str(run)


def recover(run: Path) -> list[str]:
    """What the next start of a run does, after the last writer of the one before has ended."""
    return manager(run, run_id=run_id_of(run)).recover()


def writer_of(own: CheckpointManager) -> writer_process.WriterProcess:
    assert own._background is not None
    return own._background._writer


@pytest.fixture
def own(tmp_path: Path) -> Iterator[CheckpointManager]:
    """The manager of a run of one rank, with a writer."""
    made = prepared(tmp_path)
    yield made
    made.close()


# -- the line ----------------------------------------------------------------------------------------------------------


def test_a_message_that_comes_in_halves_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that names the parts of a thousand ranks does not fit into one packet."""
    ours, theirs = socket.socketpair()
    line, halves = MessagePipe(theirs), [b'{"do": "com', b'mit"}\n{"do": "end"}\n']

    def wait(readers: Any, writers: Any, errors: Any, timeout_s: float | None) -> Any:
        if timeout_s is None and halves:  # who waits is sent the next half
            ours.sendall(halves.pop(0))
        return select.select(readers, writers, errors, 0)

    monkeypatch.setattr(writer_module, "select", SimpleNamespace(select=wait))
    assert line.take(None) == {"do": "commit"}
    assert line.take(0) == {"do": "end"}
    assert line.take(0) is None
    ours.close()
    assert line.take(None) is None
    assert line.has_ended
    theirs.close()


def test_a_writer_that_falls_silent_fails_its_save_and_no_other(
    own: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_SILENCE_S", 0.2)
    monkeypatch.setattr(writer_process, "_LOOK_S", 0.05)
    silent = writer_of(own).pid
    os.kill(silent, signal.SIGSTOP)  # as where its disk does not answer
    failed = save_meanwhile(own, 1)
    assert (failed.ok, "has sent nothing for" in (failed.error or "")) == (False, True)
    assert writer_of(own).pid != silent
    monkeypatch.setattr(writer_process, "_SILENCE_S", 60.0)  # the next one has to start first
    assert save_meanwhile(own, 2).ok
    assert loaded_step(tmp_path) == 2


def test_a_writer_that_takes_nothing_of_what_it_is_told_is_replaced_and_nobody_waits_for_it(
    own: CheckpointManager, tmp_path: Path
) -> None:
    """Tags that stay in memory are told and need no answer: after some of them the kernel keeps no more for it."""
    assert save_meanwhile(own, 1).ok
    writer = writer_of(own)
    deaf = writer.pid
    os.kill(deaf, signal.SIGSTOP)
    writer._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, writer_process._time_of(0.02))
    for _ in range(1000):
        writer.say({"do": "note", "row": "x" * 1000})
    assert writer._line.is_stuck
    assert save_meanwhile(own, 2).ok
    assert writer.pid != deaf
    assert loaded_step(tmp_path) == 2


def test_a_writer_that_takes_nothing_and_cannot_be_killed_fails_its_save_at_once(
    own: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel waits for its disk."""
    writer = writer_of(own)
    deaf, process = writer.pid, writer._process
    os.kill(deaf, signal.SIGSTOP)
    monkeypatch.setattr(process, "kill", lambda: None)
    monkeypatch.setattr(writer_process, "_LOOK_S", 0.05)
    monkeypatch.setattr(writer_process, "_EXIT_S", 0.0)
    writer._line.is_stuck = True
    failed = save_meanwhile(own, 1)
    assert (failed.ok, "has read nothing for 10 s" in (failed.error or "")) == (False, True)
    assert writer.pid != deaf
    assert save_meanwhile(own, 2).ok
    os.kill(deaf, signal.SIGKILL)
    process.wait(10.0)


def test_silence_is_not_counted_while_the_trainer_stood_still_itself(
    own: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that a queue has suspended for a night finds its writer as it left it."""
    now_s = 0.0
    monkeypatch.setattr(writer_process, "time", SimpleNamespace(monotonic=lambda: now_s))
    silent = writer_of(own).pid
    os.kill(silent, signal.SIGSTOP)
    assert begin(own, tensors_of(1), 1) is None
    own.settle()
    for _ in range(3):
        now_s += 36_000
        assert own.is_busy
    for _ in range(11):
        now_s += writer_process._LOOK_S
        assert own.is_busy
    now_s += writer_process._LOOK_S
    assert not own.is_busy
    monkeypatch.undo()
    result = own.finish()
    assert result is not None
    assert not result.ok


def test_who_is_spoken_to_after_his_end_hears_nothing_and_nobody_is_hurt() -> None:
    ours, theirs = socket.socketpair()
    line = MessagePipe(ours)
    theirs.close()
    line.send({"do": "write"})
    line.send({"do": "write"})
    assert line.take(None) is None
    ours.close()


def test_a_writer_that_died_after_its_last_byte_is_repeated_and_gets_the_same_part(tmp_path: Path) -> None:
    """The arena says WRITTEN then, and nobody has been told."""
    save(tmp_path, 1)
    own = prepared(tmp_path)
    tensors = tensors_of(2)
    begin(own, tensors, 2)
    own.settle()
    assert own._background is not None
    answer = writer_of(own).answer(None)
    ours, theirs = socket.socketpair()
    line, arena = MessagePipe(theirs), own._background._arenas[0]
    assert arena.status[0] != READY
    writer = Writer(line, [arena], Place(tmp_path, Retention(), 0.0, 0.0), is_polite=False)
    ours.sendall(json.dumps({"do": "write", "slot": 0, "serial": 1, "again": True}).encode() + b"\n")
    ours.shutdown(socket.SHUT_WR)
    writer.serve()
    with ours.makefile() as heard:
        again = json.loads(heard.readline())
    assert answer is not None
    assert (again["bytes"], again["sha256"]) == (answer["bytes"], answer["sha256"])
    ours.close()
    theirs.close()
    own.close()


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_polite", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_save_in_the_background_is_file_by_file_the_one_that_is_waited_for(
    tmp_path: Path, ranks: int, is_polite: bool
) -> None:
    waited = together(ranks, lambda group: save(tmp_path / "waited", 5, group=group))

    def live(group: Any) -> SaveResult:
        own = prepared(tmp_path / "meanwhile", group, run_id="a-run", is_polite=is_polite, patience_s=20.0)
        result = save_meanwhile(own, 5)
        own.close()
        return result

    meanwhile = together(ranks, live)
    assert [result.ok for result in meanwhile] == [True] * ranks
    assert [result.bytes for result in meanwhile] == [result.bytes for result in waited]
    assert checkpoint_files(tmp_path / "meanwhile") == checkpoint_files(tmp_path / "waited")
    assert len(checkpoint_files(tmp_path / "waited")) == 3 + 2 * ranks
    save(tmp_path / "other", 5, value=6)
    assert checkpoint_files(tmp_path / "other") != checkpoint_files(tmp_path / "waited")


def checkpoint_files(run: Path) -> dict[str, bytes]:
    """The content of all files below `checkpoints/`."""
    root = run / "checkpoints"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_writer_killed_while_it_has_nothing_to_do_is_replaced(own: CheckpointManager, tmp_path: Path) -> None:
    assert save_meanwhile(own, 1).ok
    first = writer_of(own).pid
    os.kill(first, signal.SIGKILL)
    assert save_meanwhile(own, 2).ok
    assert writer_of(own).pid != first
    assert loaded_step(tmp_path) == 2


def test_a_writer_killed_while_it_waits_for_the_copy_is_replaced(
    own: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, copy = threading.Event(), snapshot._Copying._work
    monkeypatch.setattr(snapshot._Copying, "_work", lambda self: may_copy.wait(20) and copy(self))
    begin(own, tensors_of(1), 1)
    while not list(tmp_path.glob("checkpoints/*/state.json")):  # it has begun
        assert own.is_busy
    os.kill(writer_of(own).pid, signal.SIGKILL)
    may_copy.set()
    result = own.finish()
    assert result is not None
    assert result.ok
    assert loaded_step(tmp_path) == 1


def test_a_save_over_which_three_writers_die_has_failed_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as context:
        deadly = "import hetseq.checkpoint.writer as writer, os; writer.Writer._write = lambda *_: os._exit(3); "
        before, _, after = writer_process._PROGRAM.rpartition("importlib.import_module")
        context.setattr(writer_process, "_PROGRAM", f"{before}{deadly}importlib.import_module{after}")
        own = prepared(tmp_path)
        result = save_meanwhile(own, 2)
        assert not result.ok
        assert result.error == "rank 0: 3 writer processes died (exit code 3)"
        assert loaded_step(tmp_path) == 1
    assert save_meanwhile(own, 3).ok
    assert loaded_step(tmp_path) == 3
    own.close()


def test_where_no_other_writer_can_be_started_the_save_has_failed_and_training_goes_on(
    own: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    assert save_meanwhile(own, 1).ok
    os.kill(writer_of(own).pid, signal.SIGKILL)
    with monkeypatch.context() as context:
        context.setattr(subprocess, "Popen", refuse)
        for step in (2, 3):
            result = save_meanwhile(own, step)
            assert not result.ok
            assert "no process to write checkpoints: [Errno 11]" in str(result.error)
    assert loaded_step(tmp_path) == 1
    assert save_meanwhile(own, 4).ok
    assert loaded_step(tmp_path) == 4


@pytest.mark.parametrize("refusal", ["flag", "write", "no", "short"])
def test_a_part_is_the_same_past_the_page_cache_and_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    image = mmap.mmap(-1, CHUNK_BYTES + 3 * mmap.PAGESIZE + 5)  # aligned in memory, and its end is not a page
    image[:] = os.urandom(len(image))
    real, is_direct = os.write, []

    def write(descriptor: int, data: memoryview) -> int:
        is_direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        if is_direct[-1] and refusal == "write":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data[:-7] if is_direct[-1] and refusal == "short" else data)

    if refusal == "flag":
        monkeypatch.setattr(part_writing, "_set_direct", lambda descriptor, is_direct: False)
    monkeypatch.setattr(os, "write", write)
    writing = PartWriting(tmp_path / "part", memoryview(image))
    assert len(writing.run(lambda: False)) == 2
    assert (tmp_path / "part").read_bytes() == image[:]
    assert is_direct[-1] is False  # the end, and all that follows a refusal
    if refusal == "flag":
        assert not any(is_direct)


# -- the end of the trainer --------------------------------------------------------------------------------------------


def say_over(copying: snapshot._Copying) -> None:
    """In place of a copy."""
    copying._is_copied.set()
    copying._is_over.set()


def train_until_killed(run: Path, *, ranks: int, is_whole: bool) -> None:
    """Ranks as threads of a child that is killed in the middle of the save of step 2, before or after the copy."""

    def live(group: Any) -> None:
        own = prepared(run, group, patience_s=20.0)
        begin(own, tensors_of(2), 2)
        if group.rank == 0 and not is_whole:
            while not list(run.glob("checkpoints/step-000000002.*/state.json")):  # its writer has begun
                assert own.is_busy
        own.settle()
        group.all_gather_rows(torch.zeros(1).numpy())
        os.kill(os.getpid(), signal.SIGKILL)

    def job(pipe: int) -> None:
        if not is_whole:
            snapshot._Copying.run = say_over  # type: ignore[assignment, method-assign]
        together(ranks, live)

    assert reap(*fork(job)) == (-signal.SIGKILL, [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_killed_after_its_copy_has_lost_nothing(tmp_path: Path, ranks: int) -> None:
    together(ranks, lambda group: save(tmp_path, 1, group=group))
    train_until_killed(tmp_path, ranks=ranks, is_whole=True)
    done = recover(tmp_path)
    assert [sentence.rpartition(", ")[2] for sentence in done] == ["which lacked only its commit"]
    assert loaded_step(tmp_path) == 2


def test_a_trainer_killed_before_its_copy_was_whole_has_saved_nothing(tmp_path: Path) -> None:
    """The twin: the writer made the folder, and never made a part of what stood in the arena."""
    save(tmp_path, 1)
    train_until_killed(tmp_path, ranks=1, is_whole=False)
    assert recover(tmp_path) == []
    assert loaded_step(tmp_path) == 1
    assert [path.name for path in tmp_path.glob("checkpoints/step-000000002.*/*")] == ["state.json"]
    assert save(tmp_path, 3).ok
    assert not list(tmp_path.glob("checkpoints/step-000000002.*"))


@pytest.mark.parametrize(
    ("goes_on_s", "waits_s", "reason"),
    [
        (math.inf, 22, "No such file"),  # 12 with a trainer, 10 without; 40 if it had lived
        (0, 12, "the run has continued without this save"),
        (15, 15, "the run has continued without this save"),
    ],
)
def test_a_writer_whose_trainer_was_killed_does_not_wait_long_for_a_folder_that_nobody_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on_s: float, waits_s: float, reason: str
) -> None:
    """Rank zero was killed with its writer; the next start waits for the writer of rank one, or others go on."""
    clock = SimpleNamespace(now_s=0.0)

    def nap(seconds: float) -> None:
        clock.now_s += seconds
        if clock.now_s > 12:
            trainer.close()
        if clock.now_s > goes_on_s:
            arena.path.unlink(missing_ok=True)

    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=nap))
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", tmp_path)
    arena = Arena.create("run", 1000)
    assert arena.path is not None
    trainer, theirs = socket.socketpair()
    writer = Writer(MessagePipe(theirs), [], Place(tmp_path, Retention(), 10.0, 0.0), is_polite=True)
    with pytest.raises(OSError, match=reason):
        writer._await_folder(tmp_path / "checkpoints", arena)
    theirs.close()
    arena.close(unlink=True)
    assert waits_s <= clock.now_s < waits_s + 1


def test_a_trainer_that_ends_in_the_middle_of_a_save_leaves_it_to_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 1)
    own = prepared(tmp_path)
    begin(own, tensors_of(2), 2)
    own.settle()
    own.close()
    assert loaded_step(tmp_path) == 1
    assert len(recover(tmp_path)) == 1
    assert loaded_step(tmp_path) == 2


def test_who_goes_on_without_rank_zero_leaves_no_process_that_waits_for_its_folder(tmp_path: Path) -> None:
    def live(group: Any) -> int:
        own = prepared(tmp_path, group, patience_s=60.0)
        process = writer_of(own)._process
        if group.rank == 0:
            os.kill(process.pid, signal.SIGSTOP)  # so that there is no folder, nor will be for long
        begin(own, tensors_of(2), 2)
        own.settle()
        own.close(is_hasty=True)
        if group.rank == 1:
            assert process.wait(10.0) == -signal.SIGKILL
        group.all_gather_rows(torch.zeros(1, dtype=torch.int64).numpy())
        if group.rank == 0:
            os.kill(process.pid, signal.SIGCONT)
        return process.wait(10.0)

    assert together(2, live) == [0, -signal.SIGKILL]
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*/*.json")) == ["part-00000.json", "state.json"]


def test_who_goes_on_without_a_peer_lets_the_last_save_be_concluded(tmp_path: Path) -> None:
    """The twin: nothing is under way."""
    own = prepared(tmp_path)
    process = writer_of(own)._process
    assert save_meanwhile(own, 1).ok
    own.close(is_hasty=True)
    assert process.wait(5.0) == 0
    assert [row["step"] for row in read_history(tmp_path / HISTORY_NAME)] == ["1"]


def test_a_writer_whose_trainer_was_killed_before_it_began_gives_back_what_it_never_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", tmp_path)

    def job(pipe: int) -> None:
        start = subprocess.Popen

        def start_and_die(*words: Any, **how: Any) -> None:
            start(*words, **how)
            os.kill(os.getpid(), signal.SIGKILL)

        subprocess.Popen = start_and_die  # type: ignore[assignment, misc]
        arena, place = Arena.create("run", 1000), Place(tmp_path, Retention(), 10.0, 0.0)
        WriterProcess("hetseq.checkpoint.writer", setting_of(place, [arena], is_polite=False), [arena.descriptor])

    assert reap(*fork(job)) == (-signal.SIGKILL, [])
    end_s = time.monotonic() + 20
    while list(tmp_path.iterdir()):
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_writer_whose_trainer_was_killed_gives_back_what_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Without it the memory would be gone until the run starts again, or another one an hour later."""
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    run.mkdir()
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", memory)

    def job(pipe: int) -> None:
        own = keeping(run)
        keep(own, 1)
        if not is_whole:
            snapshot._Copying.run = say_over  # type: ignore[assignment, method-assign]
        keep(own, 2)
        os.kill(os.getpid(), signal.SIGKILL)

    pid, pipe = fork(job)
    assert reap(pid, pipe) == (-signal.SIGKILL, [])
    end_s = time.monotonic() + 20
    while held_in(memory) and time.monotonic() < end_s:  # the writer is at its end
        os.sched_yield()
    assert len(list(memory.iterdir())) == (2 if is_whole else 1)
    own = started(run)
    loaded = own.load()
    own.close()
    assert loaded is not None
    assert checked_step(loaded) == (2 if is_whole else 1)


def held_in(memory: Path) -> int:
    """How many arenas somebody uses."""
    held = 0
    for path in memory.iterdir():
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                held += 1
    return held


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_a_state_too_large_for_the_record_is_saved_while_training_waits(tmp_path: Path) -> None:
    def live(group: Any) -> list[Any]:
        own = prepared(tmp_path, group, patience_s=5.0)
        results = []
        for step, notes in ((1, "\\" * 500_000), (2, "")):
            identity = Identity(step, 0, LINEAGE)
            state = {"step": step, "notes": notes}
            result = own.begin(
                tensors_of(step), state, identity=identity, nonce=step, kinds=["epoch"], at_once=[]
            )  # fmt: skip
            results.append((result is not None, (result or own.finish()).ok))  # type: ignore[union-attr]
        own.close()
        return results

    assert together(2, live) == [[(True, True), (False, True)]] * 2
    loaded = manager(tmp_path).load("1")
    assert loaded is not None
    assert loaded.state["notes"] == "\\" * 500_000


def test_a_hint_does_not_wait_for_somebody_who_does_not_listen() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = MessagePipe(theirs)
        for number in range(100_000):
            line.hint({"written": number / 100_000})
        heard = MessagePipe(ours)
        assert heard.take(0) == {"written": 0.0}
