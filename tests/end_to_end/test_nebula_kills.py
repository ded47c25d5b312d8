"""A script that saves with `hetseq.nebula` is killed, or its writer is: what was complete is there and whole."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import hetseq.nebula as nm
from hetseq.nebula import slots
from tests.support import forked
from tests.support.commands import ROOT, Command, run_command, start_command
from tests.support.nebula import begun, kill_writer, save, service, step_in, tags

PYTHON = (sys.executable,)
SCRIPT = str(ROOT / "tests/support/nebula_script.py")
NEVER_DUE, FOR_EVER = "1e9", str(10**9)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    forked.warm_up()


def words(path: Path, last: object = FOR_EVER, interval: object = 0, mode: str = "run") -> list[str]:
    return [SCRIPT, str(path), str(last), str(interval), mode]


def last_said(command: Command, what: str) -> int:
    """The last step of which the script has said this; 0 for none."""
    return max((int(step) for step in re.findall(rf"^{what} (\d+)\n", command.said(), re.M)), default=0)


def until_said(command: Command, what: str, step: int, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while last_said(command, what) < step:
        assert command.poll() is None, command.said()
        assert time.monotonic() < deadline, command.said()
        time.sleep(0.001)  # looks again


def whole_steps(path: Path) -> list[int]:
    """The steps of all tags, each of which must be of one step in all its names."""
    found = []
    for checkpoint in nm.list_checkpoints(path):
        (step,) = {step_in(checkpoint.load(name)) for name in ("model", "optimizer")}
        assert checkpoint.tag == f"step{step}"
        found.append(step)
    return found


def test_what_was_complete_survives_the_death_of_its_script(tmp_path: Path) -> None:
    with start_command(words(tmp_path), program=PYTHON, is_cold=False) as command:
        until_said(command, "complete", 4)
        command.kill()
        command.wait()
        complete = last_said(command, "complete")
    slots.await_orphans(tmp_path, patience_s=60)
    assert whole_steps(tmp_path)[0] in (complete, complete + 1)  # killed before it could say so


def test_a_tag_in_memory_survives_the_death_of_its_script(tmp_path: Path) -> None:
    with start_command(words(tmp_path, interval=NEVER_DUE), program=PYTHON, is_cold=False) as command:
        until_said(command, "complete", 5)
        command.kill()
        command.wait()
        complete = last_said(command, "complete")
    slots.await_orphans(tmp_path, patience_s=60)
    steps = whole_steps(tmp_path)
    assert steps[0] in (complete, complete + 1)
    # the first one was due; of the others the last one only, or two when the kill came before one took another's place
    assert steps[1:] in ([1], [steps[0] - 1, 1])


def test_a_second_start_goes_on_from_the_newest_tag(tmp_path: Path) -> None:
    assert run_command(words(tmp_path, 2), program=PYTHON, is_cold=False).code == 0
    again = run_command(words(tmp_path, 4), program=PYTHON, is_cold=False)
    assert re.findall(r"complete (\d+)", again.out) == ["3", "4"]
    assert whole_steps(tmp_path) == [4, 3, 2]


@pytest.mark.slow
def test_an_exception_between_two_names_leaves_no_tag(tmp_path: Path) -> None:
    ended = run_command(words(tmp_path, 3, mode="raise"), program=PYTHON)
    assert ended.code == 1
    assert "'step3' is abandoned" in ended.err
    assert whole_steps(tmp_path) == [2, 1]


def test_a_writer_that_is_killed_is_replaced_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(tmp_path):
        for step in range(1, 6):
            checkpoint = save(step, "model", "optimizer")
            kill_writer()
            assert checkpoint.wait(60) == "persisted"  # so that no save meets a third blow, which would end it
    assert tags(tmp_path) == [f"global_step{step}" for step in (5, 4, 3, 2, 1)]
    assert {step_in(nm.get_checkpoint("global_step3", tmp_path).load(name)) for name in ("model", "optimizer")} == {3}
    assert caplog.text.count("that writes checkpoints has died") >= 2  # of two blows in a row one may hit a dead one


def test_a_writer_that_dies_in_the_middle_of_a_file_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    with begun(tmp_path):
        os.kill(service().writer_pid, signal.SIGSTOP)
        checkpoint = save(1)
        assert checkpoint.path is not None
        checkpoint.path.mkdir()
        (checkpoint.path / "model.safetensors").write_bytes(b"half a file")
        os.kill(service().writer_pid, signal.SIGKILL)
        assert checkpoint.wait(60) == "persisted"
    assert step_in(nm.get_latest_checkpoint(tmp_path).load("model")) == 1


def trials(path: Path, seed: int, number: int) -> int:
    """Kill a script again and again at random instants; the newest step there is in the end."""
    draw, newest = random.Random(seed), 0
    for _ in range(number):
        interval = draw.choice([0, 0, 0.02, 1e9])
        with start_command(words(path, interval=interval), program=PYTHON, is_cold=False) as command:
            until_said(command, "complete", newest + 1)
            time.sleep(draw.random() * 0.15)  # a random instant
            command.kill()
            command.wait()
            complete, durable = last_said(command, "complete"), last_said(command, "durable")
        slots.await_orphans(path, patience_s=60)
        steps = whole_steps(path)
        assert steps[0] >= complete >= durable, "acknowledged but lost"
        assert steps[0] <= complete + 1
        newest = steps[0]
    return newest


def test_ten_kills_at_random_instants_lose_nothing(tmp_path: Path) -> None:
    assert trials(tmp_path, seed=1, number=10) >= 10


@pytest.mark.nightly
@pytest.mark.slow
def test_a_hundred_kills_at_random_instants_lose_nothing(tmp_path: Path) -> None:
    assert trials(tmp_path, seed=2, number=100) >= 100
    assert len([entry for entry in tmp_path.iterdir() if entry.is_dir()]) <= 5  # litter of the killed was removed
