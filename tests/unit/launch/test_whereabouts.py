"""Where a rank stands, as its launcher reads it: while it runs, when it is stopped, when C holds its interpreter."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

from hetseq.comm.group import LocalGroup
from hetseq.comm.peer_errors import PeerErrors
from hetseq.errors import PeerLostError
from hetseq.launch.watchdog import SHARE, Watchdog
from hetseq.run_directory import RunDirectory
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import STACKS_SIGNAL, Cell, Phase, in_words, state_of_process
from tests.support.training import toy_words, train
from tests.support.trials import until

TOLD = {"phase": Phase.DATA.words, "step": 1204, "for_s": 30.2, "is_waiting": False, "deadline_s": 5.0}


@pytest.fixture
def cell() -> Iterator[Cell]:
    cell = Cell()
    yield cell
    whereabouts.arm(None)
    cell.close()


class Clock:
    """Seconds that pass when a test says so, for `monotonic_ns`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(whereabouts, "time", clock)
    return clock


def test_a_phase_is_told_with_its_step_and_since_when(cell: Cell, clock: Clock) -> None:
    whereabouts.arm(cell)
    whereabouts.enter(Phase.DATA, 7)
    clock.now_s += 3
    whereabouts.enter(Phase.FORWARD_BACKWARD)
    clock.now_s += 2
    stand = cell.stand()
    assert (stand.phase, stand.step, stand.for_s, stand.is_waiting) == (Phase.FORWARD_BACKWARD, 7, 2.0, False)


def test_whoever_waits_in_a_collective_is_not_the_one_that_is_waited_for(cell: Cell) -> None:
    whereabouts.arm(cell)
    whereabouts.enter(Phase.REDUCE)
    seen = []

    def fail_in_collective() -> None:
        with PeerErrors("a row", 5.0):
            seen.append(cell.stand().is_waiting)
            raise RuntimeError("its end")

    with pytest.raises(PeerLostError):
        fail_in_collective()
    assert seen == [True]
    assert not cell.stand().is_waiting
    whereabouts.enter(Phase.REGROUPING)
    assert cell.stand().is_waiting
    cell.wait_for_others(True)  # as a collective leaves it that never ends
    whereabouts.enter(Phase.DATA)
    assert not cell.stand().is_waiting


class Diary:
    """In place of a cell: which phases came, in their order, and in which step each began."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.steps: list[int] = []

    def enter(self, phase: Phase, step: int | None = None) -> None:
        self.phases.append(phase)
        self.steps += [] if step is None else [step]

    def wait_for_others(self, is_waiting: bool) -> None:
        pass


def test_a_run_tells_every_phase_that_it_comes_to(tmp_path: Path) -> None:
    words = [word for word in toy_words("Integers", cpu=True, global_batch_size=16) if word != "--no-save"]
    words = [*(word for word in words if word != "--disable-validation"), "--max-update", "2"]
    RunDirectory.prepare(tmp_path, config_yaml="")
    whereabouts.arm(cast(Any, diary := Diary()))
    try:
        train(LocalGroup(), str(tmp_path), words)
    finally:
        whereabouts.arm(None)
    data, boundary = Phase.DATA, Phase.BOUNDARY
    step = [data, Phase.COUNT, Phase.FORWARD_BACKWARD, data, Phase.REDUCE, Phase.COMMIT, Phase.UPDATE, boundary]
    loading = [Phase.LOADING_DATA, Phase.MODEL, Phase.TRIAL]
    assert diary.phases == [*loading, *step, *step, Phase.VALIDATION, boundary, Phase.SAVING, boundary]
    assert diary.steps == [1, 2]


def test_other_threads_do_not_say_where_the_rank_stands(cell: Cell) -> None:
    whereabouts.arm(cell)
    whereabouts.enter(Phase.DATA)
    thread = threading.Thread(target=whereabouts.enter, args=(Phase.SAVING,))
    thread.start()
    thread.join(10)
    assert cell.stand().phase is Phase.DATA


def test_a_process_where_nobody_looks_has_nothing_to_tell() -> None:
    whereabouts.arm(None)
    whereabouts.enter(Phase.DATA, 3)
    whereabouts.wait_for_others(True)
    with whereabouts.amid(Phase.SAVING, Phase.BOUNDARY):
        pass


def test_a_message_says_what_was_seen_last_and_how_long_ago() -> None:
    words = in_words({**TOLD, "device": "cuda:0"}, more_s=3.9)
    assert words == "last seen on cuda:0 in step 1,204, reading data (loader) for 34 s"
    waiting = in_words(
        {**TOLD, "step": 0, "phase": "commit", "is_waiting": True, "process": "it sleeps", "stacks": "F"}
    )
    assert waiting == "last seen commit, waiting for other ranks, for 30 s; it sleeps; what its threads do: F"
    with pytest.raises(KeyError):
        in_words({"step": 1})


# a process of its own


def child(cell: Cell, pipe: Connection, job: str) -> None:
    whereabouts.arm(cell)
    cell.answer_signal()
    whereabouts.enter(Phase.FORWARD_BACKWARD, 3)
    pipe.send("there")
    if job == "hold":
        hold_interpreter()
    pipe.recv()


def hold_interpreter() -> None:
    import ctypes

    ctypes.PyDLL(None).poll(None, 0, 60_000)  # unlike CDLL it keeps the lock


@pytest.fixture(params=["", "hold"])
def process(request: pytest.FixtureRequest, cell: Cell) -> Iterator[Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process: Any = context.Process(target=child, args=(cell, theirs, request.param))
    process.start()
    assert ours.recv() == "there"
    yield process
    process.kill()
    process.join(10)
    process.close()
    ours.close()
    theirs.close()


def test_a_process_that_runs_no_python_is_seen_all_the_same_and_its_stacks_too(process: Any, cell: Cell) -> None:
    assert (cell.stand().phase, cell.stand().step) == (Phase.FORWARD_BACKWARD, 3)
    assert cell.stacks() == ""
    assert state_of_process(process.pid) == ""
    os.kill(process.pid, STACKS_SIGNAL)
    until(lambda: " in child" in cell.stacks(), "the stacks", within_s=10)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: "SIGCONT" in state_of_process(process.pid), "the stop", within_s=10)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: "zombie" in state_of_process(process.pid), "its end", within_s=10)


def test_what_is_mostly_swapped_out_says_so() -> None:
    status = "Name:\tx\nVmRSS:\t   1024 kB\nVmSwap:\t 409600 kB\n"
    assert "swapped out (400 MiB)" in whereabouts._swapped_out(status)
    assert whereabouts._swapped_out(status.replace("409600", "0")) == ""


# the thread beside the one that trains


def test_stacks_are_written_at_a_share_of_the_deadline_then_ever_more_rarely(cell: Cell, clock: Clock) -> None:
    pulse, deadline_s = Watchdog(cell, lambda: 100.0), 100.0
    sizes = []
    cell.enter(Phase.FORWARD_BACKWARD, 1)
    for share in (0.0, 0.9 * SHARE, SHARE, 1.9 * SHARE, 2 * SHARE):
        clock.now_s = 1000.0 + share * deadline_s
        assert pulse.look() == deadline_s
        sizes.append(os.fstat(cell.descriptor).st_size)
    assert [sizes[1] > sizes[0], sizes[2] > sizes[1], sizes[3] > sizes[2], sizes[4] > sizes[3]] == [
        False, True, False, True,
    ]  # fmt: skip
    assert "test_stacks_are_written_at" in cell.stacks()
    assert cell.stacks().count("test_stacks_are_written_at") == 1, "the latest ones"
    cell.enter(Phase.UPDATE)
    pulse.look()
    assert cell.stacks() == ""


def test_of_a_rank_that_waits_for_others_no_stacks_are_written(cell: Cell, clock: Clock) -> None:
    pulse = Watchdog(cell, lambda: 4.0)
    cell.enter(Phase.REDUCE, 1)
    cell.wait_for_others(True)
    for _ in range(9):
        pulse.look()
        clock.now_s += 1.0
    assert cell.stacks() == ""


def test_its_status_is_renewed_while_a_phase_lasts_long(cell: Cell, clock: Clock) -> None:
    pulse, told = Watchdog(cell, lambda: None), []
    pulse.renew = told.append
    cell.enter(Phase.DATA, 1)
    for _ in range(9):
        pulse.look()
        clock.now_s += 1.0
    assert [stand.for_s for stand in told] == [5.0, 6.0, 7.0, 8.0]
