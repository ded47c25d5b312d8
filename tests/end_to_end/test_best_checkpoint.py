"""The best checkpoint of a run that loses a rank while that checkpoint is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.testing import Faults
from tests.support.trials import checkpoints, events, kept, run_trial, validations

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_imports")]

#: a task whose validation is better each time, for a few steps
TASK = """
import torch
import hetseq


class Rising(hetseq.Task):
    def load_dataset(self, split):
        return [{"x": torch.tensor([float(number % 7)])} for number in range(400)]

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, sample):
        return {"loss": ((model(sample["x"]) - 3) ** 2).sum()}
"""
TRAINING = "--cpu --ranks 2 --max-restarts 0 --global-batch-size 8 --lr 0.001 --lr-scheduler constant --optimizer sgd"
SAVING = "--max-update 16 --validate-interval-updates 5 --save-interval-updates 100 --keep-every-updates 5"
SLOW = Faults().sleep(rank=1, seconds=40).at(step=10, phase="persist")


@pytest.mark.parametrize(("step", "phase", "is_kept"), [(11, "forward_backward", True), (13, "commit", False)])
def test_a_best_checkpoint_that_is_given_up_is_written_again_or_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, phase: str, is_kept: bool
) -> None:
    """Its state is there until the next step is made."""
    for name, value in SLOW.kill(rank=1).at(step=step, phase=phase).environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rising.py").write_text(TASK)
    run = tmp_path / "run"
    finished = run_trial(["--task", tmp_path / "rising.py", *TRAINING.split(), *SAVING.split()], run)
    assert finished.code == 0, finished.err
    rows, bests = validations(run), {step for step, kinds in kept(run).items() if "best" in kinds}
    assert rows[15]["valid_loss"] < rows[10]["valid_loss"] < rows[5]["valid_loss"]
    assert bests == ({5, 10, 15} if is_kept else {5, 15})
    lost = [(event["step"], event["kinds"]) for event in events(run, "save_failed")]
    assert lost == ([] if is_kept else [(10, ["best"])])
    assert ("the best checkpoint, of step 10, is lost" in finished.err) is not is_kept
    if not is_kept:
        (after,) = (commit for commit in checkpoints(run).list() if commit.identity.step not in (5, 15, 16))
        loaded = checkpoints(run).load(str(after.identity.step))
        assert loaded is not None
        assert loaded.state["best"] == rows[5]["valid_loss"], "the next one that is better than this is saved"
