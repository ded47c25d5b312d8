"""What passes between a launcher and its worker, where the worker stops at the worst instant: in the middle of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

from hetseq.errors import ConfigError
from hetseq.launch import worker_processes as workers
from hetseq.launch.worker_processes import Worker

LARGE = "x" * 300_000  # more than the kernel keeps for somebody who reads nothing


class Process:
    """A worker's process, as far as a launcher looks at it."""

    sentinel = -1
    kills = 0
    exitcode: int | None = None

    def is_alive(self) -> bool:
        return not self.kills

    def kill(self) -> None:
        self.kills += 1


class Pair:
    """A launcher's `worker`, its process, and that one's end of the pipe."""

    def __init__(self) -> None:
        ours, self.end = multiprocessing.Pipe()
        self.ours: Connection = ours
        self.process = Process()
        self.worker = Worker(3, 0, self.process, ours)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(workers, "_HALF_S", 0.02)
    pair = Pair()
    yield pair
    pair.ours.close()
    pair.end.close()


def test_what_a_worker_says_is_heard_and_it_lives(pair: Pair) -> None:
    for kind in ("present", "ready", "get"):
        pair.end.send_bytes(json.dumps({"kind": kind}).encode())
    assert pair.worker.listen() == [{"kind": "present"}, {"kind": "get"}]
    assert pair.worker.is_ready
    pair.worker.tell("go")
    assert json.loads(pair.end.recv_bytes()) == {"kind": "go"}
    assert pair.process.kills == 0
    assert pair.worker.sources() == [-1, pair.ours]


def test_a_worker_that_stops_in_the_middle_of_a_message_is_killed(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.end.send_bytes(b'{"kind": "get"}')
    os.write(pair.end.fileno(), struct.pack("!i", len(LARGE)) + b"{")
    assert pair.worker.listen() == [{"kind": "get"}], "what it had said before counts"
    assert pair.process.kills == 1
    assert pair.worker.sources() == [-1], "only its end is awaited"
    assert "rank 3 has stopped in the middle of a message for 0 s and is killed" in caplog.text


def test_a_worker_that_reads_nothing_is_killed_and_its_launcher_goes_on(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):  # the second one is told nothing any more
        pair.worker.tell("record", record=LARGE)
    assert pair.process.kills == 1
    assert "rank 3 has read nothing for 0 s and is killed" in caplog.text


def test_a_worker_that_has_ended_hears_nothing_and_nobody_is_killed(pair: Pair) -> None:
    pair.end.close()
    pair.worker.tell("go")
    assert pair.worker.listen() == []
    assert pair.process.kills == 0


class Orphan:
    """A process that a fork server is asked for; what the server answers in turn."""

    def __init__(self, *answers: type[Exception] | None) -> None:
        self.answers = list(answers)

    def start(self) -> None:
        if (answer := self.answers.pop(0)) is not None:
            raise answer


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """The fork server of this process, which ends in a moment."""
    with subprocess.Popen(["sleep", "0.2"]) as server:
        monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", server.pid, raising=False)  # type: ignore[attr-defined]
        yield server


@pytest.mark.parametrize("answer", [EOFError, BrokenPipeError, ConnectionRefusedError])
def test_a_server_that_is_killed_while_it_is_asked_is_buried_and_another_one_is_asked(
    dying: subprocess.Popen[bytes], answer: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    monkeypatch.setattr(workers, "warm_forkserver", lambda: ended.append(dying.poll() is not None))
    process = Orphan(answer, None)
    workers._start(process)
    assert process.answers == []
    assert ended == [True]


def test_a_server_that_lives_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "warm_forkserver", lambda: pytest.fail("another server"))
    workers._start(Orphan(None))
    with pytest.raises(KeyError):  # what the server did not cause is not tried again
        workers._start(Orphan(KeyError))


def test_a_server_that_was_killed_because_its_worker_is_not_wanted_is_not_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "warm_forkserver", lambda: pytest.fail("another server"))
    with pytest.raises(EOFError):
        workers._start(Orphan(EOFError), lambda: False)


@pytest.mark.usefixtures("dying")
def test_a_server_that_neither_answers_nor_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_HELD_S", 0.02)
    with pytest.raises(ProcessLookupError, match="the fork server, process"):
        workers._start(Orphan(EOFError))


# --------------------------------------------------------------------------------------------- the fork server's end


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_worker_that_ends_with_its_fork_server_says_so(monkeypatch: pytest.MonkeyPatch, is_reaped: bool) -> None:
    with subprocess.Popen(["sleep", "60"]) as server:
        monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", server.pid)
        pair = Pair()
        server.kill()
        if is_reaped:  # another one has been started for other workers
            server.wait()
        pair.process.exitcode = 255
        end = pair.worker.end()
        assert (end.server, end.exit_code) == (server.pid, -signal.SIGKILL)
        pair.end.close()


def test_a_worker_that_ends_with_255_beside_a_living_server_did_so_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SERVER_S", 0.0)
    with subprocess.Popen(["sleep", "60"]) as server:
        monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", server.pid)
        pair = Pair()
        pair.process.exitcode = 255
        end = pair.worker.end()
        server.kill()
        assert (end.server, end.exit_code) == (None, 255)
        pair.end.close()


def test_a_folder_for_temporary_files_whose_name_is_too_long_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 71 * "x")
    with pytest.raises(ConfigError, match=r"a name of 76 bytes, .*: set TMPDIR to one of at most 75 bytes"):
        workers.warm_forkserver()
