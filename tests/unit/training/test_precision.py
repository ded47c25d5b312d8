"""Products of 16 bits: what they are used for, and the scale by which fp16 keeps its gradients in range."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.comm.group import LocalGroup
from hetseq.data.plan import GlobalBatch
from hetseq.run.checkpointing import Provenance, describe, read_state
from hetseq.training.controller import TrainingState
from hetseq.training.precision import PRECISIONS, LossScale
from tests.support import toys
from tests.support.lives import Line, begin, flat, words
from tests.support.training import Recorder, prepared

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_are_of_16_bits_and_parameters_gradients_and_losses_of_32(name: str, kind: torch.dtype) -> None:
    precision, layer = PRECISIONS[name], torch.nn.Linear(4, 3)
    with precision.computing(CPU):
        logits = layer(torch.ones(2, 4))
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long), reduction="sum")
    loss.backward()
    assert (logits.dtype, loss.dtype) == (kind, torch.float32)
    assert {precision.storage, layer.weight.dtype, layer.weight.grad.dtype} == {torch.float32}  # type: ignore[union-attr]
    assert [PRECISIONS[other].storage for other in ("fp32", "fp64")] == [torch.float32, torch.float64]


def test_the_scale_doubles_after_two_thousand_updates_in_a_row() -> None:
    scale = LossScale(8.0)
    for _ in range(1999):
        scale = scale.after_update()
    assert scale == LossScale(8.0, 1999)
    assert scale.after_overflow() == LossScale(4.0)
    assert scale.after_update() == LossScale(16.0)


def test_the_scale_stays_a_power_of_two_between_its_bounds() -> None:
    low = high = LossScale()
    for _ in range(100):
        low, high = low.after_overflow(), LossScale(high.factor, 1999).after_update()
        assert math.frexp(low.factor)[0] == math.frexp(high.factor)[0] == 0.5
    assert (low.factor, high.factor) == (1.0, 2.0**24)
    assert high.may_fall
    assert not low.may_fall


def test_a_checkpoint_holds_the_scale_and_an_older_one_begins_with_the_first() -> None:
    state = TrainingState(loss_scale=LossScale(32.0, 7))
    described = describe(state, Provenance("Line", "SGD", 1, "train", 40, 0, "fp16", GlobalBatch(8)), None)
    assert read_state(described).loss_scale == LossScale(32.0, 7)
    del described["loss_scale"]
    assert read_state(described).loss_scale == LossScale()


class Watching(Line):
    """One that says in which type its validation computes."""

    def metrics(self, model: Any, sample: Any) -> dict[str, tuple[float, float]]:
        return {"bits": (8.0 * model(sample["x"]).dtype.itemsize, 1.0)}


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("fp32", 32), ("fp64", 64)])
def test_validation_computes_as_training_does(tmp_path: Path, name: str, bits: int) -> None:
    recorder = Recorder()
    text = f"--precision {name} --max-update 1"
    with begin(LocalGroup(), prepared(tmp_path), words(text, validate=True), Watching, recorder) as session:
        session.train()
    assert [row["valid_bits"] for row in recorder.validations] == [bits]


class Steep(Line):
    """One whose gradient is about 60: times the first scale it is no number of fp16."""

    def rows(self) -> toys.Batch:
        found = super().rows()
        return {"x": 4 * found["x"].abs(), "y": found["y"] - 8}


class Broken(Steep):
    """One whose loss is no number in the second step."""

    def rows(self) -> toys.Batch:
        found = super().rows()
        found["y"][8] = math.nan
        return found


def train(
    task: type[Steep], folder: Path, *flags: str, scale: float | None = None
) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """The rows of the steps and the last parameters of a run of five updates; it may begin with another `scale`."""
    recorder = Recorder()
    text = f"--precision fp16 --global-batch-size 8 --max-update 5 --lr 0.0001 {' '.join(flags)}"
    with begin(LocalGroup(), prepared(folder), words(text), task, recorder) as session:
        if scale is not None:
            session.controller.state.loss_scale = LossScale(scale)
        session.train()
        return recorder.rows, flat(session.controller.replica.model)


def test_steps_that_overflow_halve_the_scale_and_count_for_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hetseq")
    rows, _ = train(Steep, tmp_path, "--max-skipped-steps", "1")
    skipped = [row for row in rows if row.get("skipped")]
    assert len(skipped) >= 2
    assert rows[: len(skipped)] == skipped, "the first ones, and then none"
    assert [row["loss_scale"] for row in skipped] == [2.0 ** (15 - step) for step in range(len(skipped))]
    assert {row["loss_scale"] for row in rows[len(skipped) :]} == {skipped[-1]["loss_scale"]}
    assert len(rows) == len(skipped) + 5
    assert "step 1 skipped: its gradient, times 65536, is too large for fp16; the next loss is multiplied by 32768" in (
        caplog.text
    )


def test_a_loss_that_is_no_number_is_no_fault_of_the_scale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hetseq")
    rows, _ = train(Broken, tmp_path, scale=4.0)
    assert [row["step"] for row in rows if row.get("skipped")] == [2]
    assert {row["loss_scale"] for row in rows} == {4.0}
    assert "step 2 skipped: its gradient is not finite; rank 0 produced it (loss term 'loss'" in caplog.text


@pytest.mark.parametrize("clip", ["0", "1"])
def test_the_gradient_that_is_applied_is_that_of_the_loss_whatever_the_scale(tmp_path: Path, clip: str) -> None:
    """To the bit, since a power of two rounds nothing."""
    (rows, found), (plain, right) = (
        train(Steep, tmp_path / str(scale), "--clip-norm", clip, scale=scale) for scale in (16.0, 1.0)
    )
    assert torch.equal(found, right)
    assert [row["grad_norm"] for row in rows] == [row["grad_norm"] for row in plain]
    assert plain[0]["grad_norm"] > 1, "so that it is clipped"
    assert not any(row.get("skipped") for row in rows)
