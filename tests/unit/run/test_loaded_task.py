"""What loading a task makes of the options of activations."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from hetseq import config as options
from hetseq.errors import ConfigError, HetSeqError
from hetseq.parallel.activation_checkpointing import is_checkpointed
from hetseq.run.fingerprint import rank_fields
from hetseq.run.loaded_task import LoadedTask, load_material
from tests.support.training import toy_words


def loaded(*words: str) -> LoadedTask:
    given = [*toy_words("TwoTerms"), *words]
    return load_material(options.complete(options.parse(given)), torch.device("cpu"))


def test_activations_stay_unless_asked_and_on_a_cpu_without_a_folder(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.WARNING)
    assert loaded().offload is None
    assert caplog.messages == []
    assert loaded("--offload-activations").offload is None
    assert ["has no effect on a CPU" in text for text in caplog.messages] == [True]
    offload = loaded("--offload-activations", "--offload-dir", str(tmp_path)).offload
    assert offload is not None
    offload.close()
    with pytest.raises(HetSeqError, match="no file can be made there"):
        loaded("--offload-activations", "--offload-dir", str(tmp_path / "absent"))


def test_a_model_is_not_compiled_of_which_no_rank_has_all() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        loaded("--compile", "--delayed-init", "--shard-model", "all")


@pytest.mark.parametrize("shard_model", ["none", "all", "auto"])
def test_parameters_have_their_numbers_or_no_memory(shard_model: str) -> None:
    words = [] if shard_model == "none" else ["--shard-modules", "body"]
    material = loaded("--delayed-init", "--shard-model", shard_model, *words, "--precision", "fp64")
    parameters = list(material.model.parameters())
    assert {parameter.dtype for parameter in parameters} == {torch.float64}
    assert {parameter.device.type for parameter in parameters} == {"cpu"}
    assert {parameter.untyped_storage().size() > 0 for parameter in parameters} == {shard_model == "none"}
    told = rank_fields(options.complete(options.parse(toy_words("TwoTerms"))), material)  # for the other ranks
    assert ("body.weight: drawn later" in told["initial values"]) == (shard_model != "none")


def test_auto_has_layers_where_the_model_has_some_and_is_not_compiled() -> None:
    assert not loaded("--shard-model", "auto").layers
    assert list(loaded("--shard-model", "auto", "--shard-modules", "body").layers) == ["body"]
    assert not loaded("--shard-model", "state").layers
    with pytest.raises(ConfigError, match="--shard-modules bodi fits no module"):
        loaded("--shard-model", "auto", "--shard-modules", "bodi")


def test_the_modules_that_are_named_run_again() -> None:
    model = loaded("--checkpoint-modules", "body").model
    assert [name for name, module in model.named_modules() if is_checkpointed(module)] == ["body"]
