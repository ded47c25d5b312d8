"""Fault points: a process meets exactly its own faults, each once, and says so in its diary. Schedules: `test_testing`.

Faults that end or stop a process happen in a forked child; what it ended with, and what the diary says, is looked at
here.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetseq.system import faults
from hetseq.system.faults import PHASES
from hetseq.testing import Faults

ROOT = Path(__file__).resolve().parents[3]
FAR_S = 600.0  # longer than a test


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("", slot=0, incarnation=0)


def run_child(story: Callable[[], object]) -> int:
    """A forked child with this story; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.disable()  # pytest's would tell of crashes that are meant
        story()
        os._exit(0)
    finally:
        os._exit(99)


def await_status(pid: int, *, within_s: float = 10.0) -> int:
    """The status of a child once it has stopped or ended; a child that does neither is killed."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if changed:
            return status
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"child {pid} neither stopped nor ended within {within_s:g} s")


def code_of(pid: int) -> int:
    """What a child ends with: its exit code, or minus the signal. A stop on the way may be seen or not."""
    while os.WIFSTOPPED(status := await_status(pid)):
        pass
    return os.waitstatus_to_exitcode(status)


def end_of(story: Callable[[], object]) -> int:
    """What a child with this story ends with."""
    return code_of(run_child(story))


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def diary_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def arm(schedule: Faults, *, slot: int = 1, incarnation: int = 0) -> None:
    faults.arm(schedule.text(), slot=slot, incarnation=incarnation)


def meet(schedule: Faults, *, slot: int = 1, incarnation: int = 0, step: int = 4, phase: str = "reduce") -> None:
    arm(schedule, slot=slot, incarnation=incarnation)
    faults.at_step(step)
    faults.point(phase)


# What happens.


@pytest.mark.parametrize(
    ("kind", "ends_with"),
    [("kill", -9), ("segv", -11), ("abort", -6), ("term", -15), ("exit", 3)],
)
def test_a_fault_ends_its_process(kind: str, ends_with: int) -> None:
    schedule = getattr(Faults(), kind)(rank=1).at(step=4, phase="reduce")
    assert end_of(lambda: meet(schedule)) == ends_with
    assert end_of(lambda: meet(schedule, slot=2)) == 0


def test_a_crash_on_purpose_leaves_no_core_file(tmp_path: Path) -> None:

    def story(kind: str) -> None:
        os.chdir(tmp_path)
        limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
        meet(getattr(Faults(), kind)(rank=1).at(phase="reduce"))

    assert os.WCOREDUMP(await_status(run_child(lambda: story("segv")))) is False
    assert os.WCOREDUMP(await_status(run_child(lambda: story("abort")))) is False
    assert list(tmp_path.iterdir()) == []


def test_a_wish_to_end_is_a_signal_that_its_handler_hears() -> None:
    def story() -> None:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        meet(Faults().term(rank=1).at(phase="reduce"))
        os._exit(len(heard) + 40)

    assert end_of(story) == 41


def test_an_error_says_where_it_was_asked_for() -> None:
    with pytest.raises(RuntimeError, match=r"slot 1, step 4, phase reduce"):
        meet(Faults().raise_(rank=1).at(step=4, phase="reduce"))
    meet(Faults().raise_(rank=1).at(step=5, phase="reduce"))


def test_a_stopped_process_goes_on_by_itself_and_leaves_no_child() -> None:
    def story() -> None:
        begin_s = time.monotonic()
        meet(Faults().stop(rank=1, seconds=0.05).at(phase="reduce"))
        if time.monotonic() - begin_s >= 0.05:
            with pytest.raises(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            os._exit(40)

    assert end_of(story) == 40


def test_a_stop_that_comes_after_its_time_is_over_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is busy: the first SIGCONT finds a process that has not stopped yet."""
    real = signal.raise_signal

    def late(number: int) -> None:
        time.sleep(0.1)
        real(number)

    monkeypatch.setattr(signal, "raise_signal", late)
    assert end_of(lambda: meet(Faults().stop(rank=1, seconds=0.001).at(phase="reduce"))) == 0


def test_whoever_wakes_a_stopped_process_first_ends_the_one_that_would_have() -> None:
    pid = run_child(lambda: meet(Faults().stop(rank=1, seconds=FAR_S).at(phase="reduce")))
    assert os.WIFSTOPPED(await_status(pid))
    (waker,) = children_of(pid)
    os.kill(pid, signal.SIGCONT)
    assert code_of(pid) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(waker, 0)


def test_a_stop_without_end_has_nobody_to_wake_it() -> None:
    pid = run_child(lambda: meet(Faults().stop(rank=1, seconds=math.inf).at(phase="reduce")))
    assert os.WSTOPSIG(await_status(pid)) == signal.SIGSTOP  # which nobody can ignore
    assert children_of(pid) == []
    os.kill(pid, signal.SIGKILL)
    assert code_of(pid) == -9


def test_a_stop_holds_all_threads() -> None:
    """The signal goes to one thread, and its default action to the process."""

    def story() -> None:
        threading.Thread(target=signal.pause, daemon=True).start()
        meet(Faults().stop(rank=1, seconds=math.inf).at(phase="reduce"))

    pid = run_child(story)
    assert os.WIFSTOPPED(await_status(pid))
    states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    assert states == ["T", "T"]
    os.kill(pid, signal.SIGKILL)
    assert code_of(pid) == -9


def test_a_stopped_process_that_is_killed_hangs_up_although_its_waker_lives() -> None:
    ours, theirs = os.pipe()

    def story() -> None:
        os.close(ours)
        meet(Faults().stop(rank=1, seconds=FAR_S).at(phase="reduce"))

    pid = run_child(story)
    os.close(theirs)
    assert os.WIFSTOPPED(await_status(pid))
    (waker,) = children_of(pid)
    while os.listdir(f"/proc/{waker}/fd"):  # it was forked a moment ago
        time.sleep(0.001)
    signal.pidfd_send_signal(watched := os.pidfd_open(waker), signal.SIGSTOP)  # so that it cannot end meanwhile
    os.kill(pid, signal.SIGKILL)
    assert code_of(pid) == -9
    assert os.read(ours, 1) == b""  # the only writer that was left would have been the waker
    signal.pidfd_send_signal(watched, signal.SIGCONT)
    for opened in (ours, watched):
        os.close(opened)
    # it sees that it is alone; orphans are ours: tests/conftest.py
    assert code_of(waker) == 0


@contextmanager
def another_thread() -> Iterator[list[int]]:
    """A thread that does a little, passes a point and waits a little, again and again: `[0]` is how often it has."""
    rounds, is_over, interval = [0], threading.Event(), sys.getswitchinterval()

    def take_turns() -> None:
        while not is_over.is_set():
            faults.point("commit")
            rounds[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=take_turns)
    thread.start()
    while not rounds[0]:
        time.sleep(0.001)
    sys.setswitchinterval(FAR_S)  # who has the interpreter is not asked for it: he hands it over by himself or not
    try:
        yield rounds
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()


def test_while_a_thread_sleeps_the_others_work_and_pass_their_points() -> None:
    arm(Faults().sleep(rank=1, seconds=0.1).at(phase="reduce"))
    with another_thread() as rounds:
        before = rounds[0]
        faults.point("reduce")
        assert rounds[0] - before > 2


def test_a_hog_lets_nobody_run_by_one_long_call(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []  # of the other thread, during each call

    class Library(ctypes.PyDLL):
        def poll(self, *arguments: Any) -> None:
            before = rounds[0]
            self["poll"](*arguments)
            turns.append(rounds[0] - before)

    monkeypatch.setattr(ctypes, "PyDLL", Library)
    arm(Faults().hog(rank=1, seconds=0.1).at(phase="reduce"))
    with another_thread() as rounds:
        faults.point("reduce")
    assert turns == [0]


@pytest.mark.parametrize("kind", ["sleep", "hog"])
def test_a_signal_does_not_shorten_it(kind: str) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        begin_s = time.monotonic()
        meet(getattr(Faults(), kind)(rank=1, seconds=0.05).at(phase="reduce"))
        assert time.monotonic() - begin_s >= 0.05
        assert heard == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# When it happens. A fault that raises, so that this process can tell.


def happens(phase: str) -> bool:
    try:
        faults.point(phase)
    except RuntimeError:
        return True
    return False


def test_without_a_schedule_no_point_does_anything() -> None:
    assert not any(happens(phase) for phase in PHASES)
    faults.at_step(4)
    faults.point("not even this is looked at")
    arm(Faults().raise_(rank=2).at(phase="reduce"))
    faults.point("nor where all faults are for others")


def test_a_fault_happens_in_its_step_and_phase_and_once() -> None:
    arm(Faults().raise_(rank=1).at(step=4, phase="reduce"))
    met = []
    for step in (1, 2, 3, 4, 4, 5):
        faults.at_step(step)
        met += [(step, phase) for phase in ("count", "reduce", "commit", "reduce") if happens(phase)]
    assert met == [(4, "reduce")]


def test_a_step_can_be_passed_before_the_first_one() -> None:
    arm(Faults().raise_(rank=1).at(step=0, phase="loading").raise_(rank=1).at(step=1, phase="loading"))
    assert happens("loading")
    assert not happens("loading")


def test_a_fault_without_a_step_happens_the_first_time() -> None:
    arm(Faults().raise_(rank=1).at(phase="regroup"))
    faults.at_step(17)
    assert [happens("commit"), happens("regroup"), happens("regroup")] == [False, True, False]


def test_a_fault_waits_for_its_turn_within_the_step() -> None:
    arm(Faults().raise_(rank=1).at(step=4, phase="regroup", nth=3))
    met = []
    for step in (3, 4):
        faults.at_step(step)
        met += [happens("regroup") for _ in range(4)]
    assert met == [False] * 4 + [False, False, True, False]


def test_a_step_that_is_done_again_counts_on() -> None:
    arm(Faults().raise_(rank=1).at(step=4, phase="reduce", nth=2))
    met = []
    for step in (4, 5, 4):
        faults.at_step(step)
        met.append(happens("reduce"))
    assert met == [False, False, True]


def test_without_a_step_turns_are_counted_over_all_steps() -> None:
    arm(Faults().raise_(rank=1).at(phase="reduce", nth=3))
    met = []
    for step in (1, 2, 3, 4):
        faults.at_step(step)
        met.append(happens("reduce"))
    assert met == [False, False, True, False]


@pytest.mark.parametrize(("slot", "incarnation", "expected"), [(1, 2, True), (1, 0, False), (0, 2, False)])
def test_a_fault_is_for_one_incarnation_in_one_slot(slot: int, incarnation: int, expected: bool) -> None:
    arm(Faults().raise_(rank=1).at(phase="join", incarnation=2), slot=slot, incarnation=incarnation)
    assert happens("join") is expected


def test_several_faults_of_one_point_happen_in_their_order(tmp_path: Path) -> None:
    schedule = Faults().sleep(rank=1, seconds=0.001).at(phase="reduce").raise_(rank=1).at(step=0, phase="reduce")
    arm(schedule.diary(tmp_path / "diary"))
    assert happens("reduce")
    assert [entry["kind"] for entry in diary_of(tmp_path / "diary")] == ["sleep", "raise"]


def test_another_schedule_replaces_the_first_and_an_empty_one_disarms() -> None:
    arm(Faults().raise_(rank=1).at(step=4, phase="reduce"))
    faults.at_step(4)
    arm(Faults().raise_(rank=1).at(step=4, phase="commit"))
    assert not happens("reduce")
    assert not happens("commit")  # it begins before its first step
    faults.at_step(4)
    arm(Faults())
    assert not happens("commit")
    arm(Faults().raise_(rank=1).at(phase="commit"))
    faults.arm("", slot=1, incarnation=0)
    assert not happens("commit")


def test_a_process_that_is_forked_later_has_none_of_the_faults() -> None:
    schedule = Faults().exit(rank=1).at(phase="reduce")
    arm(schedule)
    assert end_of(lambda: faults.point("reduce")) == 0
    assert end_of(lambda: meet(schedule)) == 3  # unless it arms itself


def test_threads_that_pass_a_point_together_share_one_count(tmp_path: Path) -> None:
    arm(Faults().sleep(rank=1, seconds=0.001).at(phase="persist", nth=2001).diary(tmp_path / "diary"))

    def pass_often() -> None:
        for _ in range(500):
            faults.point("persist")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=pass_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert diary_of(tmp_path / "diary") == []
    faults.point("persist")
    assert len(diary_of(tmp_path / "diary")) == 1


def test_a_point_with_another_name_is_an_error_once_somebody_is_armed() -> None:
    arm(Faults().kill(rank=1).at(step=4, phase="reduce"))
    with pytest.raises(ValueError, match=r"'backward' is not a phase; known are loading, count, forward_backward"):
        faults.point("backward")


def test_a_writer_is_handed_its_faults_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_armed", None)
    assert faults.handed_down() is None
    schedule = Faults().kill(rank=1).at(phase="rename").kill(rank=1).at(step=3, phase="reduce").text()
    faults.arm(schedule, slot=1, incarnation=0)
    handed = faults.handed_down()
    assert handed == {
        "schedule": Faults().kill(rank=1).at(phase="rename").text(), "slot": 1, "incarnation": 0,
    }  # fmt: skip
    assert faults.handed_down() is None, "the writer after it"
    faults.point("rename")  # this process is none


# The diary.


def test_the_diary_says_what_happened_before_it_does(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    schedule = Faults().kill(rank=1).at(step=4, phase="reduce", incarnation=2).diary(diary)
    before = time.time(), time.monotonic()
    pid = run_child(lambda: meet(schedule, incarnation=2))
    assert code_of(pid) == -9
    (entry,) = diary_of(diary)
    assert before[0] <= entry.pop("time") <= time.time()
    assert before[1] <= entry.pop("monotonic_s") <= time.monotonic()
    assert entry == {"slot": 1, "incarnation": 2, "step": 4, "phase": "reduce", "kind": "kill", "pid": pid}
    assert stat.S_IMODE(diary.stat().st_mode) == 0o600


def test_the_diary_knows_the_step_of_a_fault_that_names_none(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    meet(Faults().sleep(rank=1, seconds=0.001).at(phase="regroup").diary(diary), step=9, phase="regroup")
    assert [entry["step"] for entry in diary_of(diary)] == [9]


def test_a_diary_is_written_on_and_has_nothing_of_faults_that_did_not_happen(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    diary.write_text('{"pid": 7}\n')
    schedule = Faults().sleep(rank=1, seconds=0.001).at(step=4, phase="reduce").kill(rank=1).at(step=5, phase="reduce")
    meet(schedule.diary(diary))
    assert [entry["pid"] for entry in diary_of(diary)] == [7, os.getpid()]


def test_each_line_of_a_diary_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    opened: list[int] = []
    real_open, real_write = os.open, os.write

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        opened.append(flags)
        return real_open(path, flags, mode)

    def write(file: int, data: bytes) -> int:
        written.append(data)
        return real_write(file, data)

    arm(Faults().sleep(rank=1, seconds=0.001).at(phase="reduce").diary(tmp_path / "diary"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "write", write)
        faults.point("reduce")
    assert [data.count(b"\n") for data in written] == [1]
    assert written[0].endswith(b"\n")
    assert [flags & os.O_APPEND for flags in opened] == [os.O_APPEND]
