"""What `after_step` is given, and what happens when the tasks of two ranks decide differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetseq import TrainedStep
from hetseq.comm.group import Group
from tests.support.lives import Life, Line, live, words
from tests.support.ranks import run_ranks
from tests.support.training import prepared

WORDS = words("--balance equal --max-epoch 2", validate=True)


class Watching(Line):
    """Keeps the steps that it sees."""

    rank = 0

    def build_model(self) -> Any:
        self.seen: list[int] = []
        return super().build_model()

    def after_step(self, step: TrainedStep) -> Any:
        self.seen.append(step.number)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.seen)}


class Deciding(Watching):
    """Decides by the number of its rank."""

    def after_step(self, step: TrainedStep) -> Any:
        super().after_step(step)
        return Watching.rank == 1 and step.number == 3


class Drifting(Watching):
    """Counts a step twice."""

    def after_step(self, step: TrainedStep) -> Any:
        if Watching.rank == 1 and step.number == 3:
            self.seen.append(0)
        return super().after_step(step)


class Answering(Watching):
    """Gives a number where a bool is expected."""

    def after_step(self, step: TrainedStep) -> Any:
        return 0.5


class Freezing(Watching):
    """A learning rate of 0."""

    def after_step(self, step: TrainedStep) -> Any:
        self.learning_rate_factor = 0.0


class Stopping(Watching):
    """Ends the run by the numbers of the first validation, which is after step 4."""

    def after_step(self, step: TrainedStep) -> Any:
        super().after_step(step)
        assert bool(step.valid) == step.ends_epoch
        self.learning_rate_factor = 0.5
        return bool(step.valid) and step.valid["train"]["loss"] > 0


def a_life(group: Group, save_dir: str, task_class: type[Watching]) -> Life:
    Watching.rank = group.rank
    return live(group, save_dir, WORDS, task_class)


@pytest.mark.parametrize(
    ("task_class", "told"),
    [
        (Deciding, "after step 3 Deciding.after_step returned False on rank 0 and True on rank 1; let it follow"),
        (Drifting, "after step 3 the state of Drifting differs: seen is 3 on rank 0, 4 on rank 1; let it follow"),
        (Answering, "Answering.after_step returned 0.5: expected True to end the run, else None"),
        (Freezing, "Freezing.learning_rate_factor is 0.0 after step 1: expected a number above 0"),
    ],
)
def test_a_task_whose_ranks_differ_or_whose_answer_is_none_is_refused(
    task_class: type[Watching], told: str, tmp_path: Path
) -> None:
    for life in run_ranks(a_life, 3, prepared(tmp_path), task_class):
        assert life.error is not None
        assert str(life.error).startswith(told)


def test_a_task_ends_the_run_after_the_same_step_on_every_rank(tmp_path: Path) -> None:
    for life in run_ranks(a_life, 3, prepared(tmp_path), Stopping):
        assert life.error is None
        assert len(life.losses) == 4
        assert len(life.valid) == 1, "validated once, though the run ends there"
