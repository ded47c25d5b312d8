"""Directories of Hugging Face: theirs opened by us, ours opened by them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from hetseq import DataError
from hetseq import config as options
from hetseq.commands.checkpoints.command import answer, parse
from hetseq.errors import CheckpointError, ConfigError
from hetseq.run_directory import RunDirectory
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.gpt.model import GptForCausalLM
from hetseq.tasks.nn.huggingface import read_bert, read_gpt, write_pretrained
from tests.support import bert
from tests.support.elsewhere import save_state
from tests.support.gpt import GPT2, LAYOUTS, LLAMA, make_batch, make_model, our_logits, their_logits, theirs_of
from tests.support.parity import import_transformers

WORDS = ["walk", "##ed", "##ing", "the", "cat", "un", "a", "b", "##b", ".", ",", "!", "na", "##ive"]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
BERT = BertConfig(
    vocab_size=len(VOCAB),
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=16,
    initializer_range=0.1,
)
LONG_NAME = "bert.encoder.layer.1.output.dense.weight"


def make_bert(seed: int = 3) -> BertForPreTraining:
    torch.manual_seed(seed)
    model = BertForPreTraining(BERT).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * (parameter.ndim == 1)
    return model


def bert_inputs() -> dict[str, Tensor]:
    ids = torch.arange(21).view(3, 7) % BERT.vocab_size
    return {
        "input_ids": ids,
        "token_type_ids": (ids > 9).long(),
        "attention_mask": torch.arange(7) < 6 * torch.ones(3, 1),
    }


def bert_logits(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Of all positions."""
    inputs = bert_inputs()
    with torch.no_grad():
        return model(*inputs.values(), torch.arange(21))


def equal(found: nn.Module, expected: nn.Module) -> bool:
    pairs = [dict(model.named_parameters()) for model in (found, expected)]
    return pairs[0].keys() == pairs[1].keys() and all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0])


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    library = import_transformers()
    library.utils.logging.disable_progress_bar()  # it leaves a thread behind
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as deepspeed sets it, which save_pretrained imports
        yield library


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "hetseq.tasks.nn.huggingface")
    return lambda: " ".join(record.getMessage() for record in caplog.records)


# Ours, opened by transformers.


@pytest.mark.slow
def test_a_bert_of_ours_is_opened_by_transformers_with_equal_logits(transformers: ModuleType, tmp_path: Path) -> None:
    ours = make_bert()
    write_pretrained(ours, tmp_path / "bert")
    theirs, report = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        output = theirs.eval()(**{name: tensor.long() for name, tensor in bert_inputs().items()})
    words, pairs = bert_logits(ours)
    real = bert_inputs()["attention_mask"].flatten()
    assert (output.prediction_logits.flatten(0, 1) - words)[real].abs().max() <= 1e-5
    assert (output.seq_relationship_logits - pairs).abs().max() <= 1e-5
    encoder = transformers.AutoModel.from_pretrained(tmp_path / "bert")
    assert torch.equal(encoder.embeddings.word_embeddings.weight, ours.bert.embeddings.word_embeddings.weight)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_causal_model_of_ours_is_opened_by_transformers_with_equal_logits(
    transformers: ModuleType, tmp_path: Path, layout: str, is_tied: bool
) -> None:
    ours = make_model(dataclasses.replace(LAYOUTS[layout], is_tied=is_tied), torch.float32)
    write_pretrained(ours, tmp_path / "gpt")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    batch = make_batch([12, 7, 3, 1])
    with torch.no_grad():
        assert (their_logits(theirs.eval(), batch) - our_logits(ours, batch)).abs().max() <= 1e-5
    assert transformers.AutoModel.from_pretrained(tmp_path / "gpt").config.vocab_size == 53


@pytest.mark.slow
@pytest.mark.parametrize("cased", [False, True])
def test_the_tokenizer_opens_with_the_ids_of_the_vocabulary(
    transformers: ModuleType, tmp_path: Path, cased: bool
) -> None:
    tokens = [*VOCAB[:-1], "The" if cased else VOCAB[-1]]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    write_pretrained(make_bert(), tmp_path / "bert", vocab_file=tmp_path / "vocab.txt")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    expected = ["[CLS]", "The" if cased else "the", "cat", "walk", "##ed", ".", "[SEP]"]
    assert tokenizer("The cat walked.")["input_ids"] == [tokens.index(token) for token in expected]
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)


# Theirs, opened by us.


@pytest.mark.slow
@pytest.mark.parametrize("size", ["10GB", "10KB"], ids=["one file", "shards"])
def test_a_bert_of_transformers_is_opened_by_us(transformers: ModuleType, tmp_path: Path, size: str) -> None:
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**dataclasses.asdict(BERT))).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "10KB")
    found = dict(read_bert(tmp_path).named_parameters())
    weights = dict(theirs.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["10GB", "10KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_causal_model_of_transformers_is_opened_by_us(
    transformers: ModuleType, tmp_path: Path, layout: str, is_tied: bool, size: str
) -> None:
    ours = make_model(dataclasses.replace(LAYOUTS[layout], is_tied=is_tied), torch.float32)
    theirs_of(transformers, ours).save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "10KB")
    found = read_gpt(tmp_path)
    assert found.config == ours.config
    assert equal(found, ours)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_base_model_of_transformers_is_opened_by_us(
    transformers: ModuleType, tmp_path: Path, layout: str, said: Callable[[], str]
) -> None:
    ours = make_model(LAYOUTS[layout], torch.float32)
    theirs = theirs_of(transformers, ours)
    (theirs.transformer if layout == "gpt2" else theirs.model).save_pretrained(tmp_path)
    if layout == "gpt2":
        assert equal(read_gpt(tmp_path), ours)  # its head is tied, so nothing is missing
        return
    with pytest.raises(DataError, match=r"lacks the tensor lm_head\.weight.*the vocabulary head is incomplete"):
        read_gpt(tmp_path)
    found = read_gpt(tmp_path, heads_may_be_missing=True)
    assert torch.equal(found.layers[1].attention.qkv.weight, ours.layers[1].attention.qkv.weight)
    assert said() == f"{tmp_path}: left as initialised: the vocabulary head"


@pytest.mark.slow
def test_an_encoder_of_transformers_is_opened_for_fine_tuning(
    transformers: ModuleType, tmp_path: Path, said: Callable[[], str]
) -> None:
    config = transformers.BertConfig(**dataclasses.asdict(BERT))
    theirs = transformers.BertModel(config)
    theirs.save_pretrained(tmp_path / "encoder")
    with pytest.raises(DataError, match=r"encoder: model\.safetensors lacks the tensor cls\.predictions\."):
        read_bert(tmp_path / "encoder")
    found = read_bert(tmp_path / "encoder", heads_may_be_missing=True)
    weights = dict(found.bert.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.named_parameters())
    assert said().endswith("left as initialised: the head for masked words, the head for next sentences")

    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    read_bert(tmp_path / "classifier", heads_may_be_missing=True)
    assert "skipped, since the model has no such head: classifier.bias, classifier.weight" in said()


# The same without transformers.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT in a directory."""
    write_pretrained(make_bert(), tmp_path / "bert")
    return tmp_path / "bert"


def weights_of(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def put_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """By way of a copy, since what is mapped must not be written over."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    (folder / "model.safetensors").unlink(missing_ok=True)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_what_is_written_is_read_again_to_the_bit(tmp_path: Path, folder: Path) -> None:
    assert equal(read_bert(folder), make_bert())
    assert not equal(read_bert(folder), make_bert(seed=4))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    for layout, config in LAYOUTS.items():
        model = make_model(config, torch.float32)
        write_pretrained(model, tmp_path / layout)
        found = read_gpt(tmp_path / layout)
        assert found.config == config
        assert equal(found, model)


def test_a_state_dict_of_torch_is_read(folder: Path) -> None:
    torch.save(weights_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert equal(read_bert(folder), make_bert())


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_sharded_files_are_read(folder: Path, form: str) -> None:
    weights, stem = weights_of(folder), {"safetensors": "model", "bin": "pytorch_model"}[form]
    index = {}
    for at in (0, 1):
        part = {name: tensor.clone() for number, (name, tensor) in enumerate(weights.items()) if number % 2 == at}
        name = f"{stem}-0000{at + 1}-of-00002.{form}"
        save = safetensors.torch.save_file if form == "safetensors" else torch.save
        save(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors").unlink()
    (folder / f"{stem}.{form}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert equal(read_bert(folder), make_bert())

    missing = index["cls.predictions.bias"]
    (folder / missing).rename(folder / "elsewhere")
    with pytest.raises(DataError, match=rf"{missing} does not exist, but the index of .*bert names it"):
        read_bert(folder)
    shutil.copy(folder / next(file for file in index.values() if file != missing), folder / missing)
    with pytest.raises(DataError, match=rf"{missing} has no tensor .*, although {stem}\.{form}\.index\.json lists it"):
        read_bert(folder)


def test_weights_of_16_bits_become_those_of_the_model(folder: Path) -> None:
    weights = weights_of(folder)
    put_weights(folder, {name: tensor.bfloat16() for name, tensor in weights.items()})
    found = dict(read_bert(folder).named_parameters())
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert all(torch.equal(found[name], weights[name].bfloat16().float()) for name in weights)


def test_the_names_of_older_files_are_read(folder: Path) -> None:
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in weights_of(folder).items():
        ending = ".".join(name.split(".")[-2:])
        renamed[name.replace(ending, older.get(ending, ending))] = tensor
    renamed["bert.embeddings.position_ids"] = torch.arange(16)[None]
    put_weights(folder, renamed)
    assert equal(read_bert(folder), make_bert())


@pytest.mark.parametrize("first", ["cls.predictions.bias", "bert.embeddings.word_embeddings.weight"])
def test_of_tied_names_a_file_may_have_either_or_both(folder: Path, first: str) -> None:
    second = {"bert": "cls.predictions.decoder.weight", "cls": "cls.predictions.decoder.bias"}[first.split(".")[0]]
    weights = weights_of(folder)
    put_weights(folder, weights | {second: weights[first]})
    assert equal(read_bert(folder), make_bert())
    put_weights(folder, {name: tensor for name, tensor in weights.items() if name != first} | {second: weights[first]})
    assert equal(read_bert(folder), make_bert())
    put_weights(folder, weights | {second: weights[first] + 1})
    with pytest.raises(DataError, match=rf"the tensor {second} differs from {first}.*tie_word_embeddings"):
        read_bert(folder)


# What is refused.


def change_config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


def refusal(folder: Path, read: Callable[..., nn.Module] = read_bert) -> str:
    with pytest.raises(DataError) as caught:
        read(folder)
    message = str(caught.value)
    assert str(folder) in message
    return message


@pytest.mark.parametrize("name", [LONG_NAME, "bert.pooler.dense.bias", "cls.seq_relationship.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    put_weights(folder, {each: tensor for each, tensor in weights_of(folder).items() if each != name})
    assert f"model.safetensors lacks the tensor {name}, which config.json requires" in refusal(folder)
    # a head of which a part is there is no head that is missing
    with pytest.raises(DataError, match=f"lacks the tensor {name}"):
        read_bert(folder, heads_may_be_missing=True)


def test_a_tensor_that_has_no_place_is_named(folder: Path) -> None:
    put_weights(folder, weights_of(folder) | {"bert.encoder.layer.2.output.dense.weight": torch.ones(3)})
    expected = "model.safetensors has the tensor bert.encoder.layer.2.output.dense.weight, which the model of"
    assert expected in refusal(folder)


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.ones(24, 41), "has shape (24, 41): expected (24, 40) by"),
        (torch.ones(40, 24), "has shape (40, 24): expected (24, 40) by"),
        (torch.ones(1, 40), "has shape (1, 40): expected (24, 40) by"),
        (torch.ones(24, 40, dtype=torch.int8), "is torch.int8: expected floats of 16, 32 or 64 bits"),
    ],
)
def test_a_tensor_of_another_form_is_named(folder: Path, tensor: Tensor, told: str) -> None:
    put_weights(folder, weights_of(folder) | {LONG_NAME: tensor})
    message = refusal(folder)
    assert f"model.safetensors: the tensor {LONG_NAME} {told}" in message


def test_another_architecture_is_refused(tmp_path: Path, folder: Path) -> None:
    assert 'config.json: model_type is "bert": expected gpt2 or llama' in refusal(folder, read_gpt)
    write_pretrained(make_model(LLAMA, torch.float32), tmp_path / "gpt")
    assert 'config.json: model_type is "llama": expected "bert"' in refusal(tmp_path / "gpt")
    change_config(folder, model_type="roberta")
    assert 'model_type is "roberta"' in refusal(folder)


def test_a_directory_that_is_none_is_refused(tmp_path: Path, folder: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "no")
    assert "is not a directory" in refusal(folder / "config.json")
    (folder / "config.json").rename(folder / "kept")
    assert "config.json: does not exist" in refusal(folder)
    (folder / "kept").rename(folder / "config.json")
    (folder / "model.safetensors").unlink()
    assert "has no weights: expected one of the files model.safetensors, model.safetensors.index.json" in refusal(
        folder
    )


def test_damaged_files_are_refused(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    assert "model.safetensors is not a safetensors file" in refusal(folder)
    (folder / "model.safetensors").unlink()
    for junk in (b"", b"junk", content):
        (folder / "pytorch_model.bin").write_bytes(junk)
        assert "pytorch_model.bin cannot be read as tensors alone" in refusal(folder)
    torch.save({"a": 1}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin does not hold named tensors" in refusal(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", 3, "run.py", None])
def test_an_index_does_not_lead_out_of_its_directory(folder: Path, file: Any) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = json.dumps({"weight_map": {LONG_NAME: file}})
    (folder / "model.safetensors.index.json").write_text(index)
    assert f"index.json: the file of {LONG_NAME} is {json.dumps(file)}: expected the name of a file" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "index.json: weight_map is {}: expected an index" in refusal(folder)


class Trap:
    """What runs code when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sprung),)


def test_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"a": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    assert "nothing else is unpickled" in refusal(folder)
    assert not (tmp_path / "sprung").exists()


def test_nothing_is_overwritten_and_other_models_are_not_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not empty: expected a folder without files"):
        write_pretrained(make_bert(), folder)
    with pytest.raises(DataError, match="Hugging Face has no class for a Linear"):
        write_pretrained(nn.Linear(2, 2), tmp_path / "x")
    with pytest.raises(DataError, match="cannot be written"):
        write_pretrained(make_bert(), tmp_path / "no" / "x")
    mixed = GptForCausalLM(dataclasses.replace(GPT2, positions="rotary"))
    with pytest.raises(DataError, match="Hugging Face has no class for others"):
        write_pretrained(mixed, tmp_path / "x")
    assert not (tmp_path / "x").exists()


# The command.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of BERT with a checkpoint of step 1 in two parts, as `hetseq train` leaves it."""
    data = bert.write_folder(tmp_path / "data", 60)
    (data / "vocab.txt").write_text("\n".join(bert.TOKENS) + "\n")
    words = ["--task", "bert", "--data", str(data), "--save-dir", str(tmp_path / "run"), "--cpu"]
    RunDirectory.prepare(tmp_path / "run", config_yaml=options.dump_yaml(options.parse(words)))
    save_state(tmp_path / "run", 1, state_of(trained()), [1, 0.5])
    return tmp_path / "run"


def trained() -> BertForPreTraining:
    torch.manual_seed(9)
    return BertForPreTraining(BertConfig(**bert.CONFIG)).eval()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return weights | {"optim.bert.pooler.dense.bias.exp_avg": torch.ones(16)}


def export(run: Path, target: Path) -> list[str]:
    return list(answer(parse(["export", str(run), "--format", "hf", "--to", str(target)])))


def test_a_run_of_bert_is_exported(run: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "data").glob("*.hdf5"):
        path.unlink()  # no data set is loaded
    assert export(run, tmp_path / "out") == [f"step 1 of {run} is in {tmp_path / 'out'} (hf)"]
    names = ["README.md", "config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert "pipeline_tag: fill-mask\n" in (tmp_path / "out" / "README.md").read_text()
    assert equal(read_bert(tmp_path / "out"), trained())
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == (tmp_path / "data" / "vocab.txt").read_bytes()


@pytest.mark.slow
def test_an_exported_run_is_opened_by_transformers(transformers: ModuleType, run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer(["word7 word8", "word30"], padding=True, return_tensors="pt")
    ids = inputs["input_ids"]
    with torch.no_grad():
        words, _ = trained()(ids, inputs["token_type_ids"], inputs["attention_mask"].bool(), torch.arange(ids.numel()))
        apart = theirs(**inputs).prediction_logits.flatten(0, 1) - words
    assert apart[inputs["attention_mask"].flatten().bool()].abs().max() <= 1e-5


def test_what_cannot_be_exported_leaves_nothing(run: Path, tmp_path: Path) -> None:
    config_file = run / "config.yaml"
    text = config_file.read_text()

    def refused(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            export(run, tmp_path / "out")
        assert not list(tmp_path.glob("out*"))

    config_file.write_text(re.sub(r"(?m)^task: bert$", "task: mnist", text))
    refused(ConfigError, r"the task mnist has no export\(model, folder\).*--format safetensors")
    config_file.write_text(text)
    settings = tmp_path / "data" / "bert_config.json"
    kept = settings.read_text()
    settings.write_text(json.dumps(bert.CONFIG | {"hidden_size": 32}))
    refused(CheckpointError, r"word_embeddings\.weight is \(40, 16\) float32 there, \(40, 32\) float32 here")
    settings.write_text(json.dumps(bert.CONFIG | {"num_hidden_layers": 1}))
    refused(CheckpointError, "the checkpoint is of another model")
    settings.write_text(kept)
    (tmp_path / "data" / "vocab.txt").write_text("[PAD]\n")
    refused(DataError, r"vocab\.txt")
    (tmp_path / "data" / "vocab.txt").unlink()
    (run / "config.yaml").unlink()
    refused(ConfigError, "has no config.yaml, which defines its model")


def test_an_export_of_another_error_leaves_nothing_either(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        assert not arguments[0].training
        (arguments[1] / "half").write_text("x")
        raise ZeroDivisionError

    monkeypatch.setattr("hetseq.tasks.bert.task.write_pretrained", fail)
    with pytest.raises(ZeroDivisionError):
        export(run, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
