"""Training programs of others that were trained wrongly in silence, or refused: what HetSeq does with each now."""

from __future__ import annotations

import json
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hetseq.checkpoint import scan
from hetseq.checkpoint.export import export
from hetseq.comm.group import LocalGroup
from hetseq.commands.selftest import run as run_selftest
from hetseq.errors import NonFiniteError, TaskError
from tests.support import ports
from tests.support.training import Facts, prepared, train

PORTS = Path(ports.__file__)


def trained(tmp_path: Path, port: str, *words: object) -> Facts:
    """A run of one rank in this process: micro-batches of 4, batches of 8, six steps."""
    command = ["--task", f"{PORTS}:{port}", "--batch-size", 4, "--global-batch-size", 8, "--max-update", 6]
    command += ["--disable-validation", "--lr-scheduler", "constant", "--lr", 0.1, "--optimizer", "sgd", "--seed", 3]
    saving = () if "--save-interval-updates" in words else ("--no-save",)
    return train(LocalGroup(), prepared(tmp_path / "run"), [*map(str, command), *map(str, words), *saving])


# A count that looks at what update_step sets.


def test_a_sum_under_a_count_of_0_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"TwoPhases: a batch has count 0 of 'second', but its loss gives \d.*the batch"
    ):
        trained(tmp_path, "TwoPhases")


def test_phases_that_are_in_the_batch_train(tmp_path: Path) -> None:
    facts = trained(tmp_path, "PhasesOfTheBatch")
    assert len(facts.losses) == 6
    assert all(loss is not None and loss > 0 for loss in facts.losses)


# Losses and gradients that say nothing.


def test_a_gradient_of_exactly_0_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, "NeverAGradient")
    told = [record.getMessage() for record in caplog.records if "exactly 0" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1: the gradient is exactly 0 on all ranks")


def test_an_lstm_that_keeps_its_state_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, "StatefulLstm")
    (told,) = [record.getMessage() for record in caplog.records if "the forward before" in record.getMessage()]
    assert told.startswith("forward reads what the forward before left in hidden of the model (WordModel), so the")
    for remedy in ("keep the state in the batch", "a fixed --balance", "hetseq selftest"):
        assert remedy in told


def test_a_loss_that_is_no_number_is_told_with_its_term_rank_and_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        facts = trained(tmp_path, "NanOfAConstant", "--fault-every", 2)
    assert [loss is None or math.isnan(loss) for loss in facts.losses] == [False, True] * 3
    told = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert told[0] == (
        "step 2: the loss is not finite, though its gradient is and was applied; rank 0 produced it (loss term 'loss';"
        " positions 8 to 15 of epoch 1): lower --lr, or look at the named samples and at parts of the loss that have no"
        " gradient"
    )
    assert len(told) == 3


def test_a_loss_that_stays_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step 4: .* 4 steps in a row had such a loss \(--max-skipped-steps\)"):
        trained(tmp_path, "NanOfAConstant", "--max-skipped-steps", 4)


def test_a_gradient_that_is_finite_when_it_is_computed_again_is_no_overflow_of_one_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        facts = trained(tmp_path, "FlakyCard")
    assert facts.losses[0] is None
    (told,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert told == (
        "step 1 skipped: its gradient is not finite; it was not there when every rank computed its share again: look at"
        " the memory of this device"
    )


# Hugging Face's own collator, which masks at random.


def test_masked_language_models_with_their_own_collator_train(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    facts = trained(tmp_path, "Mlm")
    assert len(facts.losses) == 6
    assert all(loss is not None and 0 < loss < 5 for loss in facts.losses)


# Tied weights.


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_an_export_of_tied_weights_fits_the_class_it_was_trained_with(tmp_path: Path, form: str) -> None:
    facts = trained(tmp_path, "NanoGpt", "--save-interval-updates", 3)
    (commit,) = [kept for kept in scan(tmp_path / "run" / "checkpoints").commits if kept.attempt.identity.step == 6]
    target = export(commit, tmp_path / "exported", form=form)
    state = torch.load(target)["model"] if form == "torch" else load_file(target / "model.safetensors")
    model = ports.TiedHead()
    model.load_state_dict(state)
    assert torch.equal(torch.cat([value.flatten() for value in model.parameters()]), facts.parameters)
    if form == "torch":
        assert state["lm_head.weight"].data_ptr() == state["wte.weight"].data_ptr()


# What cannot be trained is refused in one line.


@pytest.mark.parametrize(
    ("port", "said"),
    [
        ("TwoOptimizers", r"TwoOptimizers\.build_optimizer returned 2 optimizers in a list: expected one\. Give one"),
        ("ForeignOptimizer", r"build_optimizer returned a \S+Momentum: expected a torch\.optim\.Optimizer"),
        ("LazyModel", r"0\.weight has no shape yet because its module is lazy: give the module its sizes"),
        ("Streaming", r"gave a Stream, which has no index: wrap it in hetseq\.Lanes"),
    ],
)
def test_what_is_no_optimizer_model_or_data_set_is_named_with_a_way_out(tmp_path: Path, port: str, said: str) -> None:
    with pytest.raises(TaskError, match=said) as caught:
        trained(tmp_path, port)
    assert "\n" not in str(caught.value)


# What the self-test says of tasks that no note of evaluation mode can clear.


def selftest(port: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr("hetseq.commands.selftest.another_process", lambda _: nullcontext())
    said: list[str] = []
    code = run_selftest(["--task", f"{PORTS}:{port}", "--rounds", "2", "--json"], said.append)
    return code, json.loads(said[0])


def test_a_power_iteration_that_each_micro_batch_moves_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = selftest("SpectralNorm", monkeypatch)
    (finding,) = report["findings"]
    assert (code, report["verdict"], finding["kind"]) == (1, "not exact", "state")
    assert "forward changes buffer 0.parametrizations.weight.0._u" in finding["text"]
    assert "--unit-size" in finding["remedy"]
    assert not any("unless --unit-size" in note for note in report["notes"]), "the remedy that would break it"


def test_mixup_in_the_loss_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = selftest("MixupInLoss", monkeypatch)
    assert report["verdict"] == "exact in evaluation"
    assert "draws of NumPy" in report["not_compared"]


def test_mixup_in_the_collater_is_said_to_draw_for_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = selftest("MixupInCollater", monkeypatch)
    (finding,) = report["findings"]
    assert (code, finding["kind"], finding["name"]) == (1, "random batches", "collater")
    assert "--unit-size" in finding["remedy"]


def test_an_lstm_that_goes_on_where_the_last_batch_ended_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = selftest("StatefulLstm", monkeypatch)
    assert (code, report["verdict"], report["findings"][0]["kind"]) == (1, "not exact", "state")
