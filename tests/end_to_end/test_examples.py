"""The files of examples/: the tasks are exact on unequal ranks, and the loop goes on after a kill."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import hetseq
from hetseq.commands.selftest import run
from hetseq.errors import ConfigError
from hetseq.monitor.report.compare import compare
from hetseq.registry import find_task
from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, Command, run_command, start_command

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
DISCS, COUNTING = f"{EXAMPLES / 'discs.py'}:Discs", f"{EXAMPLES / 'counting.py'}:Counting"
TASKS = pytest.mark.parametrize("task", [DISCS, COUNTING], ids=["discs", "counting"])
LOOP = str(EXAMPLES / "loop.py")
EVERY = 10


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture
def transformers_where_needed(request: pytest.FixtureRequest) -> None:
    if "counting" in request.node.name:
        pytest.importorskip("transformers")


def trained(folder: Path, task: str, *more: str) -> hetseq.RecordedRun:
    """Six steps of 21 samples."""
    words = f"train --cpu --task {task} --global-batch-size 21 --max-update 6 --lr 0.003 --precision fp64 --dropout 0"
    words += f" --disable-validation --no-save --save-dir {folder}"
    done = run_command([*words.split(), *more], program=HETSEQ, timeout_s=100, is_cold=False)
    assert done.code == 0, done.err
    return hetseq.load_run(folder)


@TASKS
@pytest.mark.usefixtures("transformers_where_needed")
def test_two_unequal_ranks_have_the_curve_of_one(tmp_path: Path, task: str) -> None:
    one = trained(tmp_path / "one", task)
    two = trained(tmp_path / "two", task, "--distributed-world-size", "2", "--balance", "5,2")
    assert "shares 15+6" in "".join(log.read_text() for log in (tmp_path / "two" / "log").iterdir())
    found = compare(one, two)
    assert len(found.steps) == 6
    assert found.largest is not None
    assert found.largest[0] <= 1e-12


@pytest.mark.nightly
@TASKS
@pytest.mark.usefixtures("transformers_where_needed")
def test_the_selftest_finds_the_tasks_exact(task: str) -> None:
    said: list[str] = []
    code = run(["--task", task, "--dropout", "0", "--rounds", "2", "--json"], said.append)
    report = json.loads(said[0])
    assert (code, report["verdict"], report["findings"], report["precision"]) == (0, "exact", [], "fp64")


def test_without_transformers_the_example_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EXAMPLES / "counting.py", tmp_path)  # a file is imported once
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the package transformers: pip install"):
        find_task(str(tmp_path / "counting.py"))


def last_step(said: str) -> int:
    """The last step of which the loop has said that its tag is complete; 0 for none."""
    return max((int(step) for step in re.findall(r"^step (\d+) loss \S+\n", said, re.M)), default=0)


def until_step(command: Command, step: int, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while last_step(command.said()) < step:
        assert command.poll() is None, command.said()
        assert time.monotonic() < deadline, command.said()
        time.sleep(0.001)  # looks again


def looped(folder: Path, steps: int) -> str:
    done = run_command([LOOP, str(folder), str(steps)], program=(sys.executable,), is_cold=False)
    assert done.code == 0, done.err
    return done.out


def test_a_loop_that_was_killed_goes_on_to_the_very_losses_of_one_that_was_not(tmp_path: Path) -> None:
    words = [LOOP, str(tmp_path / "killed"), str(10**9)]
    with start_command(words, program=(sys.executable,), is_cold=False) as command:
        until_step(command, 3 * EVERY)
        command.send_signal(signal.SIGKILL)
        command.wait()
        killed_at = last_step(command.said())
    end = killed_at + 3 * EVERY
    again = looped(tmp_path / "killed", end)
    (begun,) = re.findall(r"^begins after step (\d+)$", again, re.M)
    assert int(begun) in (killed_at, killed_at + EVERY)  # it may have been killed before it could say that
    assert again.startswith(f"tags: step{begun} ")
    calm = looped(tmp_path / "calm", end)
    assert again.splitlines()[2:] == calm.splitlines()[2 + int(begun) // EVERY :]
