"""Muon in a loop of one's own: the course of one rank on any ranks, through lost ones and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from hetseq.testing import Faults
from tests.support import forked
from tests.support.commands import HETSEQ, run_command, start_command
from tests.support.own_loops import LINES, Course, courses, farthest, run_lines, run_script
from tests.support.trials import until

pytestmark = pytest.mark.slow

STEPS = 16
THREE = ("--cpu", "--ranks", 3, "--balance", "5,2,1")
MUON = {"LOOP_OPTIMIZER": "muon"}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


def made(folder: Path) -> Path:
    """The folder, which is new."""
    folder.mkdir()
    return folder


def course_of_one(folder: Path, optimizer: str) -> Course:
    """The course on one rank."""
    finished = run_lines(folder, "--cpu", "--ranks", 1, env={"LOOP_OPTIMIZER": optimizer})
    assert finished.code == 0, finished.err
    (course,) = courses(folder)
    assert list(course) == list(range(1, STEPS + 1))
    return course


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return course_of_one(tmp_path_factory.mktemp("alone"), "muon")


def test_unequal_ranks_give_the_course_of_one(alone: Course, tmp_path: Path) -> None:
    finished = run_lines(tmp_path, *THREE, env=MUON)
    assert finished.code == 0, finished.err
    found = courses(tmp_path)
    assert len(found) == 3
    assert all(len(course) == STEPS and farthest(alone, course) <= 1e-12 for course in found)
    assert farthest(alone, course_of_one(made(tmp_path / "adamw"), "adamw")) > 1e-3


def test_muon_of_torch_gives_the_course_of_one_as_well(tmp_path: Path) -> None:
    one = course_of_one(made(tmp_path / "one"), "torch_muon")
    finished = run_lines(tmp_path, *THREE, env={"LOOP_OPTIMIZER": "torch_muon"})
    assert finished.code == 0, finished.err
    assert all(farthest(one, course) <= 1e-12 for course in courses(tmp_path))


def test_a_rank_that_is_killed_and_comes_back_changes_nothing(alone: Course, tmp_path: Path) -> None:
    faults = Faults().kill(rank=0).at(step=6, phase="optimizer").kill(rank=1).at(step=9, phase="commit")
    finished = run_lines(tmp_path, *THREE, "--step-deadline", 5, env={**faults.environment(), **MUON})
    assert finished.code == 0, finished.err
    assert len(re.findall(r"ranks? continues? after step", finished.err)) >= 2
    found = courses(tmp_path)
    assert max(max(course) for course in found) == STEPS
    assert any(min(course) > 6 for course in found), "a rank joined and was given the momentum"
    assert all(farthest(alone, course) <= 1e-12 for course in found)


@pytest.mark.nightly  # the same two deaths as in the loop above
def test_a_task_trains_on_when_ranks_are_killed(tmp_path: Path) -> None:
    task = f"{Path(__file__).parents[1] / 'distributed' / 'test_muon.py'}:Wide"
    words = f"--cpu --task {task} --precision fp64 --optimizer muon --lr 0.02 --weight-decay 0.1 --curriculum 9"
    words += " --global-batch-size 24 --batch-size 5 --max-update 20 --disable-validation --save-interval-updates 9"

    def losses(name: str, more: str, faults: Faults) -> dict[int, float]:
        given = [*words.split(), *more.split(), "--save-dir", str(tmp_path / name)]
        finished = run_command(given, env=faults.environment())
        assert finished.code == 0, finished.err
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, rows) if "loss" in row}

    calm = losses("calm", "--ranks 1", Faults())
    faults = Faults().kill(rank=0).at(step=6, phase="optimizer").kill(rank=1).at(step=9, phase="commit")
    hurt = losses("hurt", "--ranks 3 --balance 5,2,1", faults)
    assert len(calm) == 20
    assert hurt == pytest.approx(calm, rel=1e-12)


def test_a_run_that_resumes_has_the_same_bits(alone: Course, tmp_path: Path) -> None:
    words: list[object] = ["--cpu", "--ranks", 1, "--precision", "fp64", "--save-dir", tmp_path / "run"]
    words += ["--save-interval-updates", 3, LINES, tmp_path]
    with start_command(["run", *map(str, words)], program=HETSEQ, env=MUON) as command:
        rows = tmp_path / "run" / "metrics.jsonl"
        until(lambda: rows.exists() and rows.read_text().count("\n") >= 7, "seven steps")
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    finished = run_script(words, env=MUON)
    assert finished.code == 0, finished.err
    assert "resuming after step" in finished.err
    found = courses(tmp_path)
    assert max(max(course) for course in found) == STEPS
    assert all(farthest(alone, course) == 0 for course in found)
