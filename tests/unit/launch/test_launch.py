"""What the ends of the workers mean: one exit code and one reason, as a table."""

from __future__ import annotations

import signal
import socket

import pytest

import hetseq
from hetseq.cluster.membership.assignment import InferenceJob
from hetseq.cluster.membership.exit_status import Ending, WorkerEnd, judge
from hetseq.config import parse
from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE
from hetseq.launch import launch as launch_module

STOPPED = "stopped after step 7; the same command resumes from step 7"


def done(rank: int) -> WorkerEnd:
    return WorkerEnd(rank, EXIT_DONE, EXIT_DONE)


def stopped(rank: int) -> WorkerEnd:
    return WorkerEnd(rank, EXIT_STOPPED, EXIT_STOPPED, STOPPED)


def failed(rank: int, message: str = "ValueError: no", code: int = EXIT_FAILED) -> WorkerEnd:
    return WorkerEnd(rank, code, code, message)


def bereaved(rank: int) -> WorkerEnd:
    return WorkerEnd(rank, EXIT_STOPPED, EXIT_STOPPED, "lost a peer while waiting up to 5 s", is_secondary=True)


def killed(rank: int, number: int = signal.SIGKILL) -> WorkerEnd:
    return WorkerEnd(rank, -number)


def forked_from_a_dead_server(rank: int) -> WorkerEnd:
    return WorkerEnd(rank, -signal.SIGKILL, server=4711)


def left(rank: int, exit_code: int) -> WorkerEnd:
    return WorkerEnd(rank, exit_code)


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ([done(1), done(0)], EXIT_DONE, ""),
        ([stopped(0), stopped(1)], EXIT_STOPPED, STOPPED),
        ([done(0), stopped(1)], EXIT_STOPPED, STOPPED),
        ([failed(1), bereaved(0)], EXIT_FAILED, "rank 1: ValueError: no"),
        ([bereaved(0), bereaved(2), failed(1)], EXIT_FAILED, "rank 1: ValueError: no"),
        ([failed(0, "the same"), failed(1, "the same")], EXIT_FAILED, "the same"),
        ([failed(0, "alone")], EXIT_FAILED, "alone"),
        ([failed(1, "--lr is wrong", EXIT_USAGE), bereaved(0)], EXIT_USAGE, "rank 1: --lr is wrong"),
        ([failed(2, "first"), failed(1, "second")], EXIT_FAILED, "rank 2: first"),
        (
            [killed(1), bereaved(0)],
            EXIT_STOPPED,
            "rank 1 was killed (SIGKILL, as the kernel does when memory runs out)",
        ),
        ([bereaved(0), killed(1)], EXIT_STOPPED, "rank 1 was killed (SIGKILL"),
        ([killed(1, signal.SIGHUP), bereaved(0)], EXIT_STOPPED, "rank 1 was killed (SIGHUP)"),
        ([killed(1, 34), bereaved(0)], EXIT_STOPPED, "rank 1 was killed (SIGRTMIN)"),
        ([killed(1, 35), bereaved(0)], EXIT_STOPPED, "rank 1 was killed (signal 35)"),
        ([killed(1, signal.SIGSEGV), bereaved(0)], EXIT_FAILED, "rank 1 crashed (SIGSEGV); its last words are in"),
        ([bereaved(0), killed(1, signal.SIGABRT)], EXIT_FAILED, "rank 1 crashed (SIGABRT)"),
        ([left(1, 3), bereaved(0)], EXIT_FAILED, "rank 1 exited with code 3 without a reason"),
        ([left(0, 0)], EXIT_FAILED, "rank 0 exited with code 0 without a reason"),
        ([killed(2), failed(0)], EXIT_STOPPED, "rank 2 was killed"),
        (
            [forked_from_a_dead_server(1), bereaved(0)],
            EXIT_STOPPED,
            "rank 1 ended with the fork server of its node (pid 4711), from which all workers there are forked: the"
            " server was killed, by the kernel when memory ran out or by a person, or it crashed; `dmesg`",
        ),
        ([bereaved(0), bereaved(1)], EXIT_STOPPED, "lost a peer while waiting"),
    ],
)
def test_the_first_failure_that_is_no_mere_loss_of_a_peer_is_the_reason(
    ends: list[WorkerEnd], code: int, says: str
) -> None:
    ending = judge(ends, has_commit=True)
    assert (ending.code, ending.message.startswith(says)) == (code, True), ending
    assert bool(ending.message) == bool(says)


@pytest.mark.parametrize("ends", [[killed(1), bereaved(0)], [bereaved(0)], [bereaved(0), bereaved(1)]])
def test_a_lost_machine_is_a_failure_without_a_commit_to_go_on_from(ends: list[WorkerEnd]) -> None:
    before, after = judge(ends, has_commit=False), judge(ends, has_commit=True)
    assert (before.code, after.code) == (EXIT_FAILED, EXIT_STOPPED)
    assert before.message.endswith("nothing had been saved yet")
    assert after.message.endswith("the same command resumes from the newest checkpoint")


def test_who_still_ran_when_the_others_had_given_up_fell_silent() -> None:
    ending = judge([bereaved(0), bereaved(2)], has_commit=True, silent=[1])
    assert ending.code == EXIT_STOPPED
    assert ending.message.startswith("rank 1 fell silent [worker-silent]; rank 0 lost a peer while waiting up to 5 s")
    assert judge([bereaved(0)], has_commit=True, silent=[1, 2]).message.startswith(
        "ranks 1, 2 fell silent [worker-silent]; "
    )


def test_who_still_ran_is_not_blamed_where_there_is_a_cause() -> None:
    assert "silent" not in judge([failed(0), bereaved(2)], has_commit=True, silent=[1]).message
    assert "silent" not in judge([killed(0)], has_commit=True, silent=[1]).message


@pytest.mark.parametrize("ends", [[], [killed(0), killed(1)], [failed(0)], [stopped(0)]])
def test_what_the_launcher_cut_short_is_its_own_reason(ends: list[WorkerEnd]) -> None:
    ending = judge(ends, has_commit=True, cut_short="stopped at once by a second signal (SIGINT)", silent=[1])
    assert ending.code == EXIT_STOPPED
    assert ending.message.startswith("stopped at once by a second signal (SIGINT); the same command resumes")
    assert judge(ends, has_commit=False, cut_short="stopped").code == EXIT_INTERRUPTED


def test_a_launcher_says_what_it_starts_before_workers_have_anything_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []

    class Launcher:
        def __init__(self, *arguments: object, **named: object) -> None: ...

        def run(self) -> Ending:
            said.append(capsys.readouterr().err)
            return Ending(EXIT_DONE)

    monkeypatch.setattr(launch_module, "Launcher", Launcher)
    config = parse(["--cpu", "--distributed-world-size", "2", "--env", "none", "--save-dir", "runs/digits"])
    launch_module.launch(config)
    workers = f"starting 2 workers on {socket.gethostname()} (cpu, cpu)"
    assert said.pop() == f"hetseq {hetseq.__version__} · run runs/digits · {workers}\n"
    launch_module.launch(config, InferenceJob("/a/run"))  # its own --save-dir is a temporary folder
    assert said.pop() == f"hetseq {hetseq.__version__} · {workers}\n"
