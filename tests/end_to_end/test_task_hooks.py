"""`Task.after_step` in a run: the same course on any ranks and through lost ones, an end of its own, and a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hetseq.testing import Faults
from tests.support.commands import ROOT
from tests.support.trials import curve, largest_difference, last_state, run_trial, start_trial

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "docs" / "examples" / "early_stopping.py"
TRAINING = "--cpu --global-batch-size 60 --lr 0.05 --lr-scheduler constant --max-epoch 200 --precision fp64"
WORDS = [*TRAINING.split(), "--step-deadline", "5"]
WATCHED = '''

class Watched(Averaged):
    """Writes down each call."""

    def after_step(self, step):
        import os
        with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as file:
            file.write(f"{os.getpid()} {step.number}\\n")
        return super().after_step(step)
'''


def task_in(folder: Path) -> list[object]:
    path = folder / "watched.py"
    path.write_text(EXAMPLE.read_text(encoding="utf-8") + WATCHED)
    return ["--task", f"{path}:Watched", *WORDS]


def calls_in(folder: Path) -> list[tuple[str, int]]:
    """Process and step of each call."""
    lines = (folder / "calls").read_text().splitlines()
    return [(line.split()[0], int(line.split()[1])) for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    finished = run_trial(task_in(folder), folder / "run")
    assert finished.code == 0, finished.err
    assert "continue: the same command with --reset-meters, as the task's after_step ended the run" in finished.err
    return folder / "run"


def check(run: Path, alone: Path) -> None:
    """The same losses, rates, end and tensors, the average of the weights among them."""
    ours, theirs = curve(run), curve(alone)
    assert ours.keys() == theirs.keys()
    rates = dict.fromkeys(theirs[step]["lr"] for step in sorted(theirs))
    assert [*rates] == [0.05, 0.025, 0.0125], "the rate falls at two plateaus, and the third one ends the run"
    assert [row["lr"] for row in ours.values()] == [row["lr"] for row in theirs.values()]
    assert max(abs(ours[step]["loss"] - theirs[step]["loss"]) for step in theirs) <= 1e-12
    one, other = last_state(run), last_state(alone)
    assert "task.average.0.weight" in one.tensors
    assert largest_difference(one, other) <= 1e-12
    values: list[dict[str, Any]] = [loaded.state["task_state"]["values"] for loaded in (one, other)]
    assert values[0]["plateaus"] == values[1]["plateaus"] == 3


ONE = Faults()


@pytest.mark.parametrize(
    "faults",
    [
        ONE.kill(rank=0).at(step=23, phase="optimizer"),
        ONE.kill(rank=1)
        .at(step=25, phase="boundary")
        .kill(rank=2)
        .at(step=170, phase="boundary"),  # the others have answered when they notice
        ONE.kill(rank=0).at(step=25, phase="snapshot"),
        ONE.kill(rank=2).at(step=33, phase="commit").kill(rank=0).at(step=51, phase="boundary"),
    ],
    ids=["in the optimizer", "before its call", "after its call", "two ranks"],
)
def test_a_lost_rank_changes_nothing_and_no_process_sees_a_step_twice(
    faults: Faults, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    finished = run_trial([*task_in(tmp_path), "--distributed-world-size", 3], tmp_path / "run", timeout_s=120)
    assert finished.code == 0, finished.err
    assert "continue after step" in finished.err or "ranks continue" in finished.err, "a rank was lost"
    check(tmp_path / "run", alone)
    assert set(Counter(calls_in(tmp_path)).values()) == {1}


def test_a_run_that_is_stopped_goes_on_with_the_state_of_its_task_and_ends_once(alone: Path, tmp_path: Path) -> None:
    words = task_in(tmp_path)
    with start_trial(words, tmp_path / "run") as trial:
        trial.wait_for_step(40)
        trial.signal(10, trial.launcher)  # SIGUSR1
        assert trial.finish().code == 75
    for code, told in ((0, "done: "), (0, "nothing left to do: ")):
        finished = run_trial([*words, "--distributed-world-size", 2], tmp_path / "run")
        assert (finished.code, told in finished.err) == (code, True), finished.err
    check(tmp_path / "run", alone)
    ends = [195]
    for _ in range(2):
        finished = run_trial([*words, "--reset-meters"], tmp_path / "run")
        assert finished.code == 0, finished.err
        ends.append(max(curve(tmp_path / "run")))
    assert ends[0] < ends[1] < ends[2] < 1000, "it continues each time, and ends by itself"
