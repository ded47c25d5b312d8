"""How a run ends before its end: asked to, forced to, or because a process died. Real command lines and signals.

After each of them: the exit code tells whether the same command goes on, the reason is said once, and no process and no
shared memory is left. Commands are forked after their imports, save where the beginning matters and in one case of each
kind.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hetseq.checkpoint.arena import Arena
from hetseq.checkpoint.leftover_memory import Remains
from hetseq.run_directory import RunDirectory
from tests.support import forked
from tests.support.commands import ROOT, TRAIN, Finished, start_command
from tests.support.nightly import nightly
from tests.support.trials import (
    Trial,
    curve,
    is_bit_equal,
    kept,
    last_state,
    run_trial,
    start_trial,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HAZARDS = Path(__file__).parents[1] / "support" / "hazards.py"
# equal shares: runs are compared to the bit, and hazards lie where they lie
PLAIN = shlex.split("--cpu --task mnist --global-batch-size 96 --max-epoch 4 --optimizer adam --balance equal")
# slowed down, so that signals find a step under way and not the end of the run; it changes no number
DIGITS = [*PLAIN, "--throttle", "0:8"]
# samples in their own order: of the 12 samples of a step each of three ranks takes four, so rank 1 sees 16 in step 2
# the deadline is the test's own, so that a slow machine cannot bring its end forward
HAZARD = shlex.split(
    f"--cpu --task {HAZARDS}:Hazard --curriculum 9 --global-batch-size 12 --max-epoch 2 --optimizer sgd"
    " --step-deadline 60 --balance equal"
)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# the import of torch lasts a minute, in the process that the variable names
SLOW_TORCH = """
import os, sys, time
from pathlib import Path

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            words = Path("/proc/self/cmdline").read_bytes()
            where = "torch in the fork server" if b"forkserver" in words else "torch in the launcher"
            if where == os.environ["SLOW_IMPORT"]:
                (Path(__file__).parent / "reached").touch()
                time.sleep(60)

sys.meta_path.insert(0, Slow())
"""
SLOW_TASK = """
import time
from pathlib import Path

(Path(__file__).parent / "reached").touch()
time.sleep(60)

from hetseq import Task

class Slow(Task):
    pass
"""
# a rank that loads is told of after 10 s
IMPATIENT = """
from hetseq.launch import watchdog
from tests.support.hazards import Hazard

watchdog.LOADING_DEADLINE_S = 20.0


class Impatient(Hazard):
    pass
"""
LINE = "y" * 200
CHATTY = f"""
import sys
from hetseq.tasks.mnist import MNISTTask


class Chatty(MNISTTask):
    def update_step(self, num_updates):
        for _ in range(30 if num_updates else 0):
            print("{LINE}")
            sys.stderr.write("{LINE}"[:50] + "\\n")
"""
WORKERS_LEFT_S = 5.0
NOBODY_LEFT_S = 15.0  # alone, the fork server takes 1.5 s of computing to tear down what it has imported


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """Most commands here begin after their imports."""
    forked.warm_up()


@pytest.mark.fault("FT-9", "FT-10")
@pytest.mark.parametrize("world", [3, *nightly(1)])
def test_a_stop_signal_to_launcher_group_or_worker_saves_and_the_same_command_goes_on_bit_equal(
    tmp_path: Path, world: int
) -> None:
    words, plain = ([*those, "--distributed-world-size", world] for those in (DIGITS, PLAIN))
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    assert run_trial(plain, calm).code == 0
    targets = ("launcher", "group", "worker") if world == 1 else ("launcher", "group")  # one of three goes alone
    cases = [(target, number) for target in targets for number in STOP_SIGNALS]
    cases = cases if world > 1 else cases[::2]  # each signal and each target, and one process fewer to differ
    last_step = 0
    for place, (target, number) in enumerate(cases):
        with start_trial(words, hurt, is_cold=place == 0) as trial:
            trial.wait_for_step(last_step + 3)
            _send(trial, target, number, rank=place % world)
            finished = trial.finish()
            trial.wait_until_gone(NOBODY_LEFT_S)
        assert finished.code == 75, (target, number, finished)
        step = max(curve(hurt))
        assert max(kept(hurt)) == step, "the step was finished and saved"
        assert f"resumes from step {step}" in finished.err
        assert step <= last_step + 30, "it stopped at once, not at the end of the epoch"
        last_step = step
    assert run_trial(plain, hurt).code == 0
    assert curve(hurt) == curve(calm)
    assert is_bit_equal(last_state(hurt), last_state(calm))


@pytest.mark.alone
def test_a_second_signal_stops_at_once_and_an_echo_of_the_first_does_not(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"40": "wait"}, "--distributed-world-size", 3, "--save-interval-updates", 1)
    with start_trial(words, tmp_path / "run") as trial:
        _wait_until_reached(tmp_path, "40")
        trial.signal(signal.SIGTERM, trial.launcher)
        trial.signal(signal.SIGUSR1, trial.launcher)
        until(lambda: "a second signal stops at once" in trial.command.said(), "the answer to the first signal")
        (tmp_path / "open").touch()
        finished = trial.finish()
    assert finished.code == 75
    assert max(kept(tmp_path / "run")) == 4, f"sample 40 is of step 4, which was finished; {finished.err}"

    (tmp_path / "open").unlink()
    words[words.index("--data") + 1] = str(_plan(tmp_path / "again", {"70": "wait"}))
    with start_trial(words, tmp_path / "run") as trial:
        _wait_until_reached(tmp_path / "again", "70")
        finished, seconds = _insist(trial)
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 75
    assert "stopped at once by a second signal" in finished.err
    assert max(kept(tmp_path / "run")) >= 4, "sample 70 is of step 6; that of step 5 may lack its commit"
    assert seconds < 5


def test_a_signal_while_data_are_loaded_ends_the_run_at_once(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"load": "wait"}, "--distributed-world-size", 2)
    with start_trial(words, tmp_path / "run") as trial:
        _wait_until_reached(tmp_path, "load", count=2)
        trial.signal(signal.SIGUSR1, trial.launcher)
        finished = trial.finish(10)
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 130, "there is nothing to go on from"
    assert finished.err.count("stopped by SIGUSR1 before the first step; nothing had been saved yet") == 1


def test_a_signal_while_the_workers_start_is_not_lost(tmp_path: Path) -> None:
    words = [*DIGITS, "--distributed-world-size", 2]
    with start_trial(words, tmp_path / "run", is_cold=True) as trial:
        until(lambda: any("forkserver" in _command_line(pid) for pid in trial.processes()), "a fork server")
        trial.signal(signal.SIGTERM, trial.launcher)
        finished = trial.finish(30)
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 130, finished.err
    assert "stopped by SIGTERM before the first step" in finished.err


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["torch in the fork server", "torch in the launcher", "the task"])
def test_a_signal_during_an_import_that_lasts_a_minute_is_answered_at_once(
    tmp_path: Path, where: str, number: signal.Signals
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_TORCH)
    (tmp_path / "slow_task.py").write_text(SLOW_TASK)
    task = tmp_path / "slow_task.py:Slow" if where == "the task" else "mnist"
    words = ["--task", task, "--max-epoch", 1, "--global-batch-size", 96, "--save-dir", tmp_path / "run"]
    words += [] if where == "torch in the launcher" else ["--cpu"]
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "SLOW_IMPORT": where}
    with start_command(words, env=environment) as command:
        until((tmp_path / "reached").exists, "the import")
        begin = time.monotonic()
        command.send_signal(number)
        finished = command.finish(timeout_s=10)
        seconds = time.monotonic() - begin
    assert seconds < 3
    assert finished.code == 130, finished.err
    name = signal.Signals(number).name
    assert finished.err.count(f"stopped by {name} before the first step; nothing had been saved yet") == 1
    assert "Traceback" not in finished.err
    until(lambda: not _mentioned(str(tmp_path)), "processes left", within_s=NOBODY_LEFT_S)


@pytest.mark.alone
def test_a_signal_during_an_import_ends_with_75_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    words = [*PLAIN, "--max-epoch", "1"]
    assert run_trial(words, tmp_path / "run").code == 0
    (tmp_path / "sitecustomize.py").write_text(SLOW_TORCH)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "SLOW_IMPORT": "torch in the fork server"}
    with start_command([*words, "--max-epoch", "2", "--save-dir", tmp_path / "run"], env=environment) as command:
        until((tmp_path / "reached").exists, "the import")
        command.send_signal(signal.SIGTERM)
        finished = command.finish(timeout_s=10)
    assert finished.code == 75, finished.err
    assert "SIGTERM: stopping; a second signal stops at once" in finished.err


@pytest.mark.fault("FT-8")
@pytest.mark.parametrize("world", [*nightly(1), 3])
def test_a_launcher_killed_takes_every_process_with_it(tmp_path: Path, world: int) -> None:
    words = [*DIGITS, "--distributed-world-size", world, "--num-workers", 2]
    with start_trial(words, tmp_path / "run", is_cold=world == 1) as trial:
        trial.wait_for_step(3)
        processes = trial.processes()
        assert len(processes) == 3 + world * 3, "launcher, fork server, resource tracker; workers with two loaders each"
        training = {pid for worker in trial.workers().values() for pid in [worker, *trial.children_of(worker)]}
        assert len(training) == world * 3
        trial.command.kill()
        begin = time.monotonic()
        until(lambda: not training & set(trial.processes()), "workers left", within_s=WORKERS_LEFT_S)
        seconds = time.monotonic() - begin
        everything_s = seconds + trial.wait_until_gone(NOBODY_LEFT_S)
        assert _shared_memory_of(processes, tmp_path / "run") == []
    print(f"world {world}: workers gone after {seconds:.2f} s, everything after {everything_s:.1f} s")


@pytest.mark.fault("FT-8")
def test_a_launcher_killed_takes_a_worker_with_it_that_holds_the_interpreter_in_c(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"40": "hold the interpreter"})
    with start_trial(words, tmp_path / "run") as trial:
        _wait_until_reached(tmp_path, "40")
        trial.command.kill()
        trial.wait_until_gone(NOBODY_LEFT_S)


@pytest.mark.alone
@pytest.mark.parametrize(("world", "saves"), [(1, True), (3, True), (3, False)])
def test_the_last_worker_killed_ends_the_run_quickly_and_is_named_once(tmp_path: Path, world: int, saves: bool) -> None:
    words = [*DIGITS, "--distributed-world-size", world, "--num-workers", 2, "--max-restarts", 0]
    words += ["--save-interval-updates", 2] if saves else []
    with start_trial(words, tmp_path / "run", is_cold=world == 1) as trial:
        trial.wait_for_step(3)
        processes = trial.processes()
        begin = time.monotonic()
        trial.signal(signal.SIGKILL, *until(trial.workers, "workers").values())
        finished = trial.finish()
        seconds = time.monotonic() - begin
        trial.wait_until_gone(NOBODY_LEFT_S)
        assert _shared_memory_of(processes, tmp_path / "run") == []
    assert finished.code == (75 if saves else 1)
    assert finished.err.count("was killed (SIGKILL") == 1
    assert finished.err.count("lost a peer") == 0, "who only lost a peer is not worth a line"
    assert "Traceback" not in finished.err
    assert seconds <= 5
    print(f"world {world}: ended after {seconds:.2f} s")


def test_a_worker_killed_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    words = [*DIGITS, "--distributed-world-size", 3, "--max-restarts", 0, "--log-interval", 1000]
    with start_trial(words, tmp_path / "run") as trial:
        trial.wait_for_step(3)
        trial.signal(signal.SIGKILL, until(trial.workers, "workers")[2])
        finished = trial.finish()
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 0
    assert finished.err.count("rank 2 on") == finished.err.count("was killed (SIGKILL") == 1
    assert "2 ranks continue after step" in finished.err
    assert "Traceback" not in finished.err
    assert max(kept(tmp_path / "run")) == 60
    assert json.loads((tmp_path / "run" / "status" / "rank-2.json").read_text())["state"] == "gone"


@pytest.mark.fault("FT-1")
@pytest.mark.parametrize("world", [*nightly(1), 3])
def test_a_worker_killed_comes_back(tmp_path: Path, world: int) -> None:
    words = [*DIGITS, "--distributed-world-size", world, "--save-interval-updates", 2, "--max-epoch", 40]
    with start_trial(words, tmp_path / "run") as trial:
        trial.wait_for_step(3)
        first = until(trial.workers, "workers")[0]
        trial.signal(signal.SIGKILL, first)
        until(lambda: trial.workers().get(0, first) != first, "another rank 0")
        until(lambda: "is back" in trial.command.said(), "its return")
        trial.wait_for_step(trial.newest_step() + 3)
        trial.signal(signal.SIGTERM, trial.launcher)
        finished = trial.finish()
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 75
    assert finished.err.count("was killed (SIGKILL") == finished.err.count("is back") == 1
    steps = sorted(curve(tmp_path / "run"))
    assert steps == list(range(1, len(steps) + 1))


def test_a_rank_that_is_asked_to_go_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    words = [*DIGITS, "--distributed-world-size", 3, "--max-epoch", 40]
    with start_trial(words, tmp_path / "run") as trial:
        trial.wait_for_step(3)
        leaver = until(trial.workers, "workers")[1]
        trial.signal(signal.SIGUSR1, leaver)
        until(lambda: "rank 1 on" in trial.command.said() and "has left" in trial.command.said(), "its leaving")
        trial.wait_for_step(trial.newest_step() + 3)
        assert leaver not in trial.processes()
        trial.signal(signal.SIGTERM, trial.launcher)
        finished = trial.finish()
    assert finished.code == 75
    assert "2 ranks continue after step" in finished.err


@pytest.mark.parametrize("where", ["lose the device once", "lose the device in the exchange"])
def test_a_worker_whose_device_fails_is_replaced_by_another_process(tmp_path: Path, where: str) -> None:
    words = _planned(tmp_path, {"40": where}, "--distributed-world-size", 3)
    with start_trial(words, tmp_path / "run") as trial:
        finished = trial.finish()
    assert finished.code == 0, finished.err
    story = (
        r"rank 1 on \S+: its device failed \(CUDA error: an illegal memory access was encountered\): 2 ranks continue"
    )
    assert re.search(story, finished.err)
    assert "Traceback" not in finished.err
    assert "AcceleratorError: CUDA error" in (tmp_path / "run" / "log" / "rank-1.txt").read_text()


def test_a_worker_whose_memory_runs_out_in_the_exchange_takes_smaller_micro_batches_and_blames_no_peer(
    tmp_path: Path,
) -> None:
    words = _planned(tmp_path, {"40": "run out of memory in the exchange"}, "--distributed-world-size", 3)
    with start_trial(words, tmp_path / "run") as trial:
        finished = trial.finish()
    assert finished.code == 0, finished.err
    assert "rank 1" in finished.err
    assert "did not hold a micro-batch" in finished.err
    assert "3 ranks continue after step" in finished.err, "the group is built anew, in the same processes"
    assert "is back" not in finished.err


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lose the device", r"rank [02]: its device failed \(CUDA error: an illegal memory access"),  # the second one
        ("fail on the device", r"rank 1: your task failed: .*AcceleratorError: CUDA error: device-side assert"),
    ],
)
def test_what_would_make_every_device_fail_ends_the_run(tmp_path: Path, fault: str, words: str) -> None:
    plan = _planned(tmp_path, {"40": fault}, "--distributed-world-size", 3, "--save-interval-updates", 1)
    with start_trial(plan, tmp_path / "run") as trial:
        finished = trial.finish()
    assert finished.code == 1, "it would fail again in the same way"
    assert re.search(f"hetseq: {words}", finished.err), finished.err


def test_a_worker_that_crashes_is_a_failure_even_with_a_commit(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"40": "crash"}, "--distributed-world-size", 3, "--save-interval-updates", 1)
    finished = run_trial(words, tmp_path / "run")
    assert finished.code == 1
    assert "rank 1 on" in finished.err, "the first one; the run goes on without it"
    assert re.search(r"hetseq: rank [02] crashed \(SIGSEGV\)", finished.err), "who takes its sample crashes as well"
    assert max(kept(tmp_path / "run")) >= 2, "that of step 3 may lack its commit"


def test_a_worker_that_leaves_without_a_word_is_a_failure(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"40": "exit"}, "--distributed-world-size", 2, "--save-interval-updates", 1)
    finished = run_trial(words, tmp_path / "run")
    assert finished.code == 1
    assert re.search(r"hetseq: rank \d exited with code 3 without a reason", finished.err)


@pytest.mark.alone
@pytest.mark.fault("FT-3")
def test_a_worker_that_falls_silent_is_fenced_after_the_deadline_and_the_others_go_on(tmp_path: Path) -> None:
    words = _planned(
        tmp_path, {"40": "wait"}, "--distributed-world-size", 3, "--step-deadline", 2, "--max-restarts", 0
    )  # fmt: skip
    with start_trial(words, tmp_path / "run") as trial:
        _wait_until_reached(tmp_path, "40")
        begin = time.monotonic()
        stopped = until(trial.workers, "workers")[1]
        trial.signal(signal.SIGSTOP, stopped)
        (tmp_path / "open").touch()  # whoever takes the sample after it is not to wait
        until(lambda: "continue after step" in trial.command.said(), "the others going on")
        seconds = time.monotonic() - begin
        finished = trial.finish()
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 0
    assert finished.err.count("rank 1 on") == finished.err.count("fell silent") == 1
    assert 2 <= seconds <= 2 + 8, "the deadline, and the grace for the others"
    print(f"went on {seconds:.1f} s after it fell silent")


@pytest.mark.nightly
def test_a_rank_that_hangs_while_it_loads_is_named_with_its_stacks_also_one_that_comes_back(tmp_path: Path) -> None:
    (tmp_path / "slow_task.py").write_text(IMPATIENT)
    words = _planned(tmp_path, {"load": "wait"}, "--distributed-world-size", 2, "--max-epoch", 4000)
    words[words.index(f"{HAZARDS}:Hazard")] = f"{tmp_path}/slow_task.py:Impatient"
    with start_trial(words, tmp_path / "run") as trial:
        for rank in (0, 1):
            line = rf"rank {rank} stands still, last seen on cpu loading its data for 1\d s; .*rank-{rank}-step-0.txt"
            until(lambda line=line: re.search(line, trial.command.said()), f"rank {rank}")
        assert "in _act" in (tmp_path / "run" / "stacks" / "rank-1-step-0.txt").read_text()
        (tmp_path / "open").touch()
        trial.wait_for_step(3)
        (tmp_path / "open").unlink()
        trial.signal(signal.SIGKILL, until(trial.workers, "workers")[1])
        until(lambda: trial.command.said().count("rank 1 stands still") == 2, "its replacement")
        (tmp_path / "open").touch()
        until(lambda: "is back" in trial.command.said(), "its return")
        trial.signal(signal.SIGTERM, trial.launcher)
        finished = trial.finish()
    assert finished.code == 75
    assert finished.err.count("stands still") == 3


@pytest.mark.alone
def test_a_signal_while_a_replacement_loads_saves_what_the_others_have(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"load": "wait"}, "--distributed-world-size", 2, "--max-epoch", 4000)
    (tmp_path / "open").touch()
    with start_trial(words, tmp_path / "run") as trial:
        trial.wait_for_step(3)
        (tmp_path / "open").unlink()
        trial.signal(signal.SIGKILL, until(trial.workers, "workers")[1])
        _wait_until_reached(tmp_path, "load", count=3)
        trial.wait_for_step(trial.newest_step() + 3)
        trial.signal(signal.SIGTERM, trial.launcher)
        finished = trial.finish(15)
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 75, finished.err
    assert "SIGTERM: finishing this step" in finished.err
    assert "was killed" not in finished.err.rpartition("SIGTERM")[2]
    assert max(kept(tmp_path / "run")) == max(curve(tmp_path / "run"))


def test_an_exception_in_one_rank_is_shown_once_while_others_wait_in_a_collective(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"40": "raise"}, "--distributed-world-size", 3, "--save-interval-updates", 1)
    with start_trial(words, tmp_path / "run") as trial:
        finished = trial.finish()
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 1, "it would fail again in the same way"
    assert finished.err.count("ValueError: sample 40 is poisoned") == 1
    assert finished.err.count("rank 1: your task failed: ") == 1
    assert "lost a peer" not in finished.err
    logs = [(tmp_path / "run" / "log" / f"rank-{rank}.txt").read_text() for rank in range(3)]
    assert [log.count("Traceback (most recent call last)") for log in logs] == [0, 1, 0]
    assert ["this rank is over: " in log for log in logs] == [True] * 3
    assert ["ValueError: sample 40 is poisoned" in log for log in logs] == [False, True, False]


@pytest.mark.parametrize("streams", ["stdout", "stdout and stderr"])
def test_a_reader_that_goes_away_hangs_nothing(tmp_path: Path, streams: str) -> None:
    words = [*PLAIN, "--log-interval", "1", "--save-dir", str(tmp_path / "run"), "--distributed-world-size", "2"]
    errors = subprocess.STDOUT if streams == "stdout and stderr" else subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # as `| head -1` does: one line, then nobody reads
    with subprocess.Popen([*TRAIN, *words], stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.stdout.close()
            said = process.stderr.read().decode() if process.stderr else ""
            code = process.wait(60)
        finally:
            process.kill()
    assert code == 0, said
    assert max(curve(tmp_path / "run")) == 60, "the run went on without its reader"
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", nightly("terminal", "pipe"))
def test_a_reader_that_reads_nothing_stops_no_rank_and_what_it_misses_is_in_a_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "chatty_task.py").write_text(CHATTY)
    words = [*PLAIN, "--save-dir", str(tmp_path / "run"), "--distributed-world-size", "2", "--step-deadline", "60"]
    words[words.index("mnist")] = f"{tmp_path}/chatty_task.py:Chatty"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    reader, writer = os.openpty() if kind == "terminal" else os.pipe()
    with subprocess.Popen([*TRAIN, *words], stdout=writer, stderr=writer, env=environment) as process:
        try:
            code = process.wait(60)
        finally:
            process.kill()
            os.close(writer)
            os.close(reader)
    assert code == 0
    assert max(curve(tmp_path / "run")) == 60
    shown, hidden = ((tmp_path / "run" / "log" / f"rank-{rank}.out").read_text() for rank in (0, 1))
    assert shown.startswith("---- the terminal takes no text; what follows was for it")
    assert shown.count("y") > 1000 * len(LINE), "a live display breaks long lines"
    assert hidden.count(LINE) == 60 * 30


def test_without_a_launcher_process_a_signal_saves_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    words = _planned(tmp_path, {"40": "wait"}, "--distributed-no-spawn", "--save-interval-updates", 1)
    with start_trial(words, tmp_path / "run", is_cold=True) as trial:
        _wait_until_reached(tmp_path, "40")
        trial.signal(signal.SIGTERM, trial.launcher)
        (tmp_path / "open").touch()
        assert trial.finish().code == 75
    assert max(kept(tmp_path / "run")) == 4
    (tmp_path / "open").unlink()
    words[words.index("--data") + 1] = str(_plan(tmp_path / "again", {"70": "wait"}))
    with start_trial(words, tmp_path / "run") as trial:
        _wait_until_reached(tmp_path / "again", "70")
        finished, _ = _insist(trial)
    assert finished.code != 0
    assert max(kept(tmp_path / "run")) >= 4, "that of step 5 may lack its commit"


@pytest.mark.nightly
def test_a_fork_server_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    words = [*DIGITS, "--distributed-world-size", 2, "--save-interval-updates", 2]
    with start_trial(words, tmp_path / "run", is_cold=True) as trial:
        trial.wait_for_step(3)
        trial.signal(signal.SIGKILL, trial.helper("forkserver"))
        finished = trial.finish()
        trial.wait_until_gone(NOBODY_LEFT_S)
    assert finished.code == 0, "its workers end with it, and others start from another one"
    assert max(kept(tmp_path / "run")) == 60


def _send(trial: Trial, target: str, number: int, *, rank: int) -> None:
    if target == "launcher":
        trial.signal(number, trial.launcher)
    elif target == "group":  # `timeout` signals the process and then its group
        trial.signal(number, trial.launcher)
        os.killpg(trial.launcher, number)
    else:
        trial.signal(number, until(trial.workers, "workers")[rank])


def _insist(trial: Trial) -> tuple[Finished, float]:
    """Signal the launcher until it has ended, as an impatient person does."""
    begin = time.monotonic()
    while trial.command.poll() is None:
        assert time.monotonic() < begin + 20, trial.command.said()
        with suppress(ProcessLookupError):
            trial.signal(signal.SIGINT, trial.launcher)
        with suppress(subprocess.TimeoutExpired):
            trial.command.wait(0.2)
    return trial.finish(), time.monotonic() - begin


def _plan(folder: Path, plan: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def _planned(folder: Path, plan: dict[str, str], *words: object) -> list[object]:
    return [*HAZARD, "--data", str(_plan(folder, plan)), *words]


def _wait_until_reached(folder: Path, key: str, *, count: int = 1) -> None:
    until(lambda: len(list(folder.glob(f"reached-{key}-*"))) >= count, f"somebody at {key}")


def _shared_memory_of(pids: list[int], run: Path) -> list[str]:
    """Names in /dev/shm that carry one of these process ids, as torch's do, or are of arenas of this run.

    Without those that hold a whole state: they are for the next start.
    """
    run_id = RunDirectory(run).run_id
    remains = Remains(run_id, run)
    whole = {part.arena.path.name for part in remains.parts if part.arena.path}
    remains.close(remove=False)
    folder = Path("/dev/shm")
    names = set(os.listdir(folder) if folder.is_dir() else []) - whole
    prefix = Arena.prefix(run_id)
    return [name for name in names if name.startswith(prefix) or any(f"_{pid}_" in name for pid in pids)]


def _mentioned(text: str) -> list[Path]:
    """The processes that have a text in their environment, as a folder on PYTHONPATH."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if text.encode() in environ.read_bytes():
                found.append(environ.parent)
    return found


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
