"""The public names carry the product: a task that a loop of one's own trains, to the last bit as `hetseq train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetseq.monitor.metrics import read_rows
from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, run_command
from tests.support.own_loops import Course, courses

pytestmark = pytest.mark.slow

LOOPS = ROOT / "tests" / "support" / "loops"
CLIP, STEPS = 0.6, 12
TRAINING = (
    "--optimizer", "adam", "--lr", 0.02, "--weight-decay", 0.05, "--lr-scheduler", "polynomial", "--warmup-updates", 3,
    "--total-num-update", 12, "--end-learning-rate", 0, "--max-update", 12, "--clip-norm", CLIP,
    "--global-batch-size", 24, "--seed", 11, "--disable-validation",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def looped_in_one_piece(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """The course of the loop on one rank, whose micro-batch is the whole step."""
    _, (course,) = by_task_and_by_loop(tmp_path_factory.mktemp("one"), "--ranks", 1)
    return course


def by_task_and_by_loop(folder: Path, *options: Any) -> tuple[list[Course], list[Course]]:
    """The courses of all ranks, of `hetseq train` and of the loop."""
    found = []
    for name, words in (
        ("train", ["train", "--task", f"{LOOPS / 'two_heads.py'}:TwoHeadsTask", *TRAINING]),
        ("run", ["run"]),
    ):
        place = folder / name
        place.mkdir()
        script = [LOOPS / "two_heads_loop.py"] if name == "run" else []
        words = [*words, "--cpu", "--no-save", "--save-dir", place / "run", *options, *script]
        finished = run_command([*map(str, words)], program=HETSEQ, is_cold=False, timeout_s=90,
                               env={"COURSES": str(place)})  # fmt: skip
        assert finished.code == 0, finished.err
        found.append(courses(place))
    return found[0], found[1]


THREE = ("--ranks", 3, "--balance", "5,2,1")
CASES = {
    "three ranks": THREE,
    "three ranks and small micro-batches": (*THREE, "--max-sentences", 4),
    "one rank in units": ("--ranks", 1, "--unit-size", 4),
    "three ranks in units": (*THREE, "--unit-size", 4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_task_in_a_loop_of_ones_own_is_that_of_hetseq_train_to_the_last_bit(
    name: str, looped_in_one_piece: Course, tmp_path: Path
) -> None:
    trained, looped = by_task_and_by_loop(tmp_path, *CASES[name])
    assert len(trained) == len(looped) == int(CASES[name][1])
    assert all(list(course) == list(range(1, STEPS + 1)) for course in (*trained, *looped))
    assert all(course == trained[0] for course in (*trained, *looped)), "each loss, norm, rate and weight"
    norms = [row["grad_norm"] for row in trained[0].values()]
    assert min(norms) < CLIP < max(norms), "some steps are clipped, some are not"
    rates = [[row["lr"] for row in read_rows(tmp_path / name / "run" / "metrics.jsonl")] for name in ("train", "run")]
    assert rates[0] == rates[1] == [row["lr"] for row in trained[0].values()], "metrics have that of the update"
    assert looped[0] != looped_in_one_piece, "the twin: dropout is another one where a step is cut in another way"


def test_a_task_in_one_piece_is_that_of_hetseq_train_to_the_last_bit(tmp_path: Path) -> None:
    (trained,), (looped,) = by_task_and_by_loop(tmp_path, "--ranks", 1)
    assert trained == looped
