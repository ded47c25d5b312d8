"""A checkpoint goes straight into the model and the optimizer, and a refused one leaves the model alone."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.config import parse
from hetseq.data.plan import GlobalBatch, Position
from hetseq.errors import CheckpointMismatch
from hetseq.parallel.task_state import TaskState
from hetseq.run.checkpointing import Provenance
from hetseq.run.resume import nothing_to_do
from hetseq.training.controller import TrainingState
from tests.support.replicas import HERE, Net, Stateless, begun, everything, replica_of, resumed, saved_run, trained


@pytest.mark.parametrize("in_place", [True, False])
def test_a_resume_holds_neither_model_nor_optimizer_twice(tmp_path: Path, in_place: bool) -> None:
    before, directory = saved_run(tmp_path / "run")
    after = replica_of(Net())
    live = {name: tensor.data_ptr() for name, tensor in after.model_tensors().items()}
    beginning = begun(directory, after, in_place=in_place)
    read = {name: tensor.data_ptr() for name, tensor in beginning.loaded.tensors.items()}
    resumed(directory, after, beginning)
    assert {name: tensor.data_ptr() for name, tensor in after.model_tensors().items()} == live
    alike = {name for name in live if read[name] == live[name]}
    # of another layout than a file's: read beside the model and copied
    assert alike == ({"model.plain", "model.seen"} if in_place else set())
    state = after.optimizer_tensors()[0]
    copied = {name for name, tensor in state.items() if tensor.data_ptr() != read[name]}
    assert copied == {"optim.turned.exp_avg", "optim.turned.exp_avg_sq"}
    assert all(torch.equal(tensor, everything(before)[name]) for name, tensor in everything(after).items())
    assert {name: tensor.stride() for name, tensor in everything(after).items()} == {
        name: tensor.stride() for name, tensor in everything(before).items()
    }
    assert not torch.equal(after.model.plain, Net().plain)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "Other"}, "task Toy, this command says Other"),
    "precision": ({"precision": "fp64"}, "precision fp32, this command says fp64"),
    "optimizer": ({"optimizer": "SGD"}, "optimizer AdamW, this command says SGD"),
    "seed": ({"seed": 8}, "seed 7, this command says 8"),
    "batch": ({"batch": GlobalBatch(11)}, "--global-batch-size 11 differs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_checkpoint_that_is_refused_has_not_touched_the_model(tmp_path: Path, name: str) -> None:
    _, directory = saved_run(tmp_path / "run")
    changes, told = REFUSALS[name]
    here = Provenance(**{**vars(HERE), **changes})
    after = replica_of(Net())
    beginning = begun(directory, after, here=here)
    with pytest.raises(CheckpointMismatch, match=told):
        resumed(directory, after, beginning, here=here)
    assert torch.equal(after.model.plain, Net().plain)
    assert beginning.loaded.tensors["model.plain"].abs().sum() > 0


def test_a_checkpoint_of_another_model_has_not_touched_this_one(tmp_path: Path) -> None:
    _, directory = saved_run(tmp_path / "run")
    other = replica_of(Net(width=6))
    beginning = begun(directory, other)
    with pytest.raises(CheckpointMismatch, match=r"model.plain is \(4, 3\) float32 there, \(6, 3\) float32 here"):
        resumed(directory, other, beginning)
    frozen = Net()
    frozen.turned.requires_grad_(False)
    partly = replica_of(frozen)
    beginning = begun(directory, partly)
    with pytest.raises(CheckpointMismatch, match="optimizer state of turned, which the model does not train"):
        resumed(directory, partly, beginning)
    for model, untouched in ((other.model, Net(width=6)), (partly.model, Net())):
        assert torch.equal(model.plain, untouched.plain)
        assert torch.equal(model.turned, untouched.turned)
        assert not model.seen.any()


@pytest.mark.parametrize(
    ("words", "here"), [("--reset-optimizer", {"optimizer": "SGD"}), ("--reset-dataloader", {"seed": 8})]
)
def test_what_a_reset_allows_is_read_in_place(tmp_path: Path, words: str, here: dict[str, Any]) -> None:
    before, directory = saved_run(tmp_path / "run")
    after, there = replica_of(Net()), Provenance(**{**vars(HERE), **here})
    beginning = begun(directory, after, here=there, words=words)
    assert beginning.loaded.tensors["model.plain"].data_ptr() == after.model.plain.data_ptr()
    resumed(directory, after, beginning, here=there, words=words)
    assert torch.equal(after.model.plain, before.model.plain)
    assert bool(after.optimizer.state) == (words != "--reset-optimizer")


def test_a_reset_of_the_optimizer_lets_a_model_be_frozen(tmp_path: Path) -> None:
    before, directory = saved_run(tmp_path / "run")
    model = Net()
    model.turned.requires_grad_(False)
    after = replica_of(model)
    beginning = begun(directory, after, words="--reset-optimizer")
    assert beginning.loaded.tensors["model.plain"].data_ptr() == after.model.plain.data_ptr()
    resumed(directory, after, beginning, words="--reset-optimizer")
    assert torch.equal(after.model.turned, before.model.turned)


@pytest.mark.parametrize(("step", "is_done"), [(1, True), (2, False)])
def test_a_reset_counts_as_done_once_a_later_step_was_saved(tmp_path: Path, step: int, is_done: bool) -> None:
    _, directory = saved_run(tmp_path / "run", resets={"dataloader": step})  # of step 2
    here, after = Provenance(**{**vars(HERE), "seed": 8}), replica_of(Net())
    beginning = begun(directory, after, here=here, words="--reset-dataloader")
    assert (beginning.loaded.tensors["model.plain"].data_ptr() == after.model.plain.data_ptr()) != is_done
    with pytest.raises(CheckpointMismatch) if is_done else nullcontext():
        resumed(directory, after, beginning, here=here, words="--reset-dataloader")


@pytest.mark.parametrize(
    ("words", "state", "told"),
    [
        ("--reset-lr-scheduler --reset-dataloader", TrainingState(ended_by_task=True, position=Position(9, 1, 0)),
         r"the task's after_step ended that run with step 8, .* begin a new phase with --reset-meters, which forgets"),
        ("--reset-lr-scheduler", TrainingState(position=Position(9, 4, 0)),
         r"made 0 updates and is in epoch 4, .* or count epochs anew with --reset-dataloader$"),
        ("", TrainingState(updates=8, position=Position(9, 4, 0)),
         r"made 8 updates .* or count updates anew with --reset-lr-scheduler and epochs anew with --reset-dataloader$"),
        ("--reset-lr-scheduler --reset-dataloader", TrainingState(position=Position(9, 1, 0)),
         r"ask for more with --max-update or --max-epoch, or for a smaller --min-lr$"),
    ],
)  # fmt: skip
def test_a_second_phase_with_nothing_to_do_names_what_is_left_to_say(
    words: str, state: TrainingState, told: str
) -> None:
    config = parse(["--resume", "runs/x", *words.split()]).checkpoint
    with pytest.raises(CheckpointMismatch, match=told):
        raise nothing_to_do(config, state)


class Keeping(Stateless):
    """A task that keeps two values between steps."""

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": 1.5, "patience": 3}


@pytest.mark.parametrize(
    ("words", "factor", "told"),
    [
        ("--reset-meters", 0.5, "its own state (best_loss, patience) and its learning_rate_factor 0.5"),
        ("--reset-meters", 1.0, "its own state (best_loss, patience)"),
        ("--reset-optimizer", 0.5, None),
    ],
)
def test_what_the_task_forgets_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: str, factor: float, told: str | None
) -> None:
    task, before = Keeping(), trained()
    task.learning_rate_factor = factor
    before.task_state = TaskState(task)
    _, directory = saved_run(tmp_path / "run", replica=before)
    after, loaded = replica_of(Net()), list[object]()
    after.task_state = TaskState(Keeping())
    after.task_state.load = lambda *state: loaded.append(state)  # type: ignore[method-assign]
    caplog.set_level(logging.INFO)
    resumed(directory, after, begun(directory, after, words=words), words=words)
    said = [message for message in caplog.messages if message.startswith("--reset-meters: ")]
    assert said == ([] if told is None else [f"--reset-meters: the task begins without {told}"])
    assert bool(loaded) == (told is None)
