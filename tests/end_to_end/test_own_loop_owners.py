"""A script with its own training loop, on ranks that own parts of the state, takes the same course as on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetseq.monitor.metrics import read_events
from hetseq.testing import Faults
from tests.support import forked
from tests.support.commands import Finished
from tests.support.nightly import nightly
from tests.support.own_loops import Course, course_of_one, courses, farthest, run_lines

pytestmark = pytest.mark.slow

STEPS, COURSE = 16, 1e-12
THREE = (
    "--cpu", "--ranks", 3, "--balance", "5,2,1", "--shard-model", "state", "--bucket-cap-mb", "0.0001",
    "--step-deadline", 60, "--save-interval-updates", 3,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return course_of_one(tmp_path_factory.mktemp("alone"), STEPS)


def check(finished: Finished, folder: Path, alone: Course) -> list[tuple[int, int]]:
    """All processes have seen the course of one; the first and the last step of each."""
    assert finished.code == 0, finished.err
    found = courses(folder)
    assert max(farthest(alone, course) for course in found) <= COURSE
    assert all(sorted(course) == list(range(min(course), max(course) + 1)) for course in found)
    return sorted((min(course), max(course)) for course in found)


def generations(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run" / "events.jsonl") if event["event"] == "generation"]


@pytest.mark.parametrize("own", ["6,2,1", "0,0,1"])
def test_owners_give_the_course_of_one_rank(own: str, alone: Course, tmp_path: Path) -> None:
    finished = run_lines(tmp_path, *THREE, "--own", own)
    assert check(finished, tmp_path, alone) == [(1, STEPS)] * 3


def test_a_rank_without_a_part_is_killed_in_a_step_and_the_scripts_of_the_others_continue(
    alone: Course, tmp_path: Path
) -> None:
    faults = Faults().kill(rank=1).at(step=7, phase="reduce")
    finished = run_lines(tmp_path, *THREE, "--own", "2,0,1", env=faults.environment())
    seen = check(finished, tmp_path, alone)
    assert seen[:3] == [(1, 6), (1, STEPS), (1, STEPS)]
    assert generations(tmp_path)[0]["step"] == 6


def test_no_script_sees_old_parameters_if_a_rank_is_killed_before_all_have_the_new_ones(
    alone: Course, tmp_path: Path
) -> None:
    # rank 0 waits for the parameters of rank 2, which takes its time, when rank 1 is killed
    slow = Faults().sleep(rank=2, seconds=2).at(step=7, phase="boundary")
    faults = slow.kill(rank=1).at(step=7, phase="boundary").diary(tmp_path / "diary")
    finished = run_lines(tmp_path, *THREE, "--own", "0,0,1", env=faults.environment())
    assert [json.loads(line)["kind"] for line in (tmp_path / "diary").read_text().splitlines()].count("kill") == 1
    first, *_ = generations(tmp_path)
    assert first["story"].count("a rank was lost before all had the new parameters: the script begins anew") == 2
    seen = check(finished, tmp_path, alone)
    assert seen[:3] == [(1, 6)] * 3
    assert [last for _, last in seen[3:]] == [STEPS] * 3


@pytest.mark.parametrize("victim", [1, *nightly(0, 2)])
def test_an_owner_that_is_killed_sends_all_scripts_back_to_the_newest_state(
    victim: int, alone: Course, tmp_path: Path
) -> None:
    faults = Faults().kill(rank=victim).at(step=7, phase="commit")
    finished = run_lines(tmp_path, *THREE, "--own", "6,2,1", env=faults.environment())
    seen = check(finished, tmp_path, alone)
    assert seen[:3] == [(1, 6)] * 3
    assert [last for _, last in seen[3:]] == [STEPS] * 3
    assert f"rank {victim} owned " in finished.err
    assert "of the state, and no other rank holds it: the script begins anew" in finished.err
