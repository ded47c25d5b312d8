"""What `after_step` is given, and what happens when the tasks of two ranks decide differently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq import TrainedStep
from hetseq.comm.group import Group
from tests.support.lives import Life, Line, begin, live, words
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")


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


class Seen(nn.Module):
    """A line, and a buffer that the hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.line(x)
        return result


class Counting(Watching):
    """Counts steps in a buffer of the model, though the gradient of every third step is not finite."""

    def build_model(self) -> Any:
        super().build_model()
        return Seen()

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        factor = float("nan") if len(self.seen) % 3 == 2 and model.training else 1.0
        return {term: value * factor for term, value in super().loss(model, sample).items()}

    def after_step(self, step: TrainedStep) -> Any:
        super().after_step(step)
        step.model.get_buffer("steps").add_(1)


class Evaluating(Watching):
    """A hook that leaves model and autograd as an evaluation needs them."""

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        if self.seen:  # not in the trial before the first step
            assert model.training == torch.is_grad_enabled(), "training keeps its modes"
        return super().loss(model, sample)

    def after_step(self, step: TrainedStep) -> Any:
        super().after_step(step)
        step.model.eval()
        torch.set_grad_enabled(False)


class Ending(Watching):
    """Keeps what validations it has seen."""

    def after_step(self, step: TrainedStep) -> Any:
        assert not step.valid, "no validation is due"
        super().after_step(step)


class Cooling(Watching):
    """Halves the learning rate after each step."""

    def after_step(self, step: TrainedStep) -> Any:
        self.learning_rate_factor /= 2


class Forgetful(Line):
    """Cannot take back what it gives."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


def a_life(group: Group, save_dir: str, task_class: type[Line], arguments: list[str] | None = None) -> Life:
    Watching.rank = group.rank
    return live(group, save_dir, arguments or WORDS, task_class)


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


def steps_that_settle(group: Group, save_dir: str) -> list[int]:
    """The steps in which training waits for the copy of a checkpoint, besides the updates, which always do."""
    session, waited = begin(group, save_dir, WORDS, Counting), list[int]()
    session.boundary.settle = lambda: waited.append(session.controller.state.position.step)  # type: ignore[method-assign]
    try:
        session.train()
    finally:
        session.close()
    return waited


def test_a_skipped_step_waits_for_the_copy_of_a_checkpoint_since_its_hook_may_change_the_state(tmp_path: Path) -> None:
    assert run_ranks(steps_that_settle, 2, prepared(tmp_path)) == [[3, 6]] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_buffer_that_the_hook_changes_keeps_it_through_skipped_steps(ranks: int, tmp_path: Path) -> None:
    for life in run_ranks(a_life, ranks, prepared(tmp_path), Counting):
        assert life.error is None
        assert life.losses.count(None) == 2, "skipped"
        # seen before the hook of the last step
        assert [float(buffers["steps"]) for buffers in life.buffers] == list(range(1, 9))


def test_a_hook_that_evaluates_leaves_training_as_it_was(tmp_path: Path) -> None:
    for life in run_ranks(a_life, 2, prepared(tmp_path), Evaluating):
        assert life.error is None
        assert len(life.losses) == 8


def test_the_validation_at_the_end_of_a_start_is_none_of_a_run_that_goes_through(tmp_path: Path) -> None:
    arguments = words("--balance equal --max-update 3", validate=True)
    (life,) = run_ranks(a_life, 1, prepared(tmp_path), Ending, arguments)
    assert life.error is None
    assert len(life.valid) == 1


def test_a_learning_rate_that_the_hook_lowers_ends_the_run_at_min_lr(tmp_path: Path) -> None:
    arguments = words("--balance equal --max-epoch 9 --min-lr 0.02")
    (life,) = run_ranks(a_life, 1, prepared(tmp_path), Cooling, arguments)
    assert len(life.losses) == 4, "one epoch"


def test_a_state_that_cannot_be_taken_back_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (life,) = run_ranks(a_life, 1, prepared(tmp_path), Forgetful)
    assert life.losses == []
    assert str(life.error) == "Forgetful has a state_dict() but no load_state_dict(state): write both"
