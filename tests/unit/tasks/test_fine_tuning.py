"""What fine-tuning begins with, `--init-from` of all three tasks, and the directories that come of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetseq import ConfigError, DataError, TaskError
from hetseq.run.loaded_task import load_material
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.nn.huggingface import write_pretrained
from hetseq.tasks.options import BertClassifyOptions
from tests.support import bert, labelled
from tests.support.parity import import_transformers

TASKS = ("bert_ner", "bert_classify")


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A pre-trained BERT as an export is, without the task that made it."""
    labelled.write_network(tmp_path)
    torch.manual_seed(3)
    model = BertForPreTraining(BertConfig(**labelled.CONFIG))
    write_pretrained(model, tmp_path / "start", vocab_file=tmp_path / "words.txt")
    return tmp_path / "start"


def task_of(name: str, tmp_path: Path, *words: str) -> Any:
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    (data / "train.txt").write_text(labelled.TAGGED)
    (data / "train.csv").write_text(labelled.TEXTS)
    return labelled.make(name, data, list(words))


def test_what_is_said_of_a_fresh_head_waits_until_a_run_begins_with_it(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    task = task_of("bert_ner", tmp_path, "--init-from", str(start), "--disable-validation")
    material = load_material(task.config, torch.device("cpu"), task)
    assert "initialised" not in caplog.text
    unneeded, fresh = (record.getMessage() for record in material.start_notes)
    assert unneeded.startswith(f"{start}: not needed: bert.pooler.dense.bias, ")
    assert fresh == f"{start}: left as initialised: the head for labels"


@pytest.mark.parametrize("name", TASKS)
def test_weights_of_a_directory_cannot_be_delayed(name: str, start: Path, tmp_path: Path) -> None:
    task = task_of(name, tmp_path, "--init-from", str(start), "--disable-validation", "--delayed-init")
    with pytest.raises(TaskError, match=r"huggingface\.py:\d+ needs numbers .* weights that are read from files"):
        load_material(task.config, torch.device("cpu"), task)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("name", TASKS)
def test_the_encoder_is_that_of_the_directory(name: str, start: Path, tmp_path: Path) -> None:
    task = task_of(name, tmp_path, "--init-from", str(start))
    stored = load_file(start / "model.safetensors")
    own = {key: value for key, value in task.build_model().state_dict().items() if key.startswith("bert.")}
    assert ("bert.pooler.dense.weight" in own) == (name == "bert_classify")
    assert len(own) > 30
    assert all(torch.equal(value, stored[key]) for key, value in own.items())
    assert {path.name for path in task.load_dataset("train").files} == {
        "train.txt" if name == "bert_ner" else "train.csv",
        "config.json", "vocab.txt", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip


def test_a_fresh_pooler_is_random_and_all_else_is_that_of_the_directory(start: Path, tmp_path: Path) -> None:
    words = ("--init-from", str(start), "--fresh-pooler")
    stored, models = load_file(start / "model.safetensors"), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        models.append(task_of("bert_classify", tmp_path, *words).build_model())
    pooler, weight = models[0].bert.pooler.state_dict(), "bert.pooler.dense.weight"
    assert not torch.allclose(pooler["dense.weight"], stored[weight], atol=0.01)
    assert pooler["dense.weight"].std().item() == pytest.approx(labelled.CONFIG["initializer_range"], rel=0.3)
    assert pooler["dense.bias"].eq(0).all()
    one, other, again = (model.state_dict() for model in models)
    assert not torch.equal(one[weight], other[weight])
    assert torch.equal(one[weight], again[weight])
    rest = [key for key in one if key.startswith("bert.") and ".pooler." not in key]
    assert len(rest) > 30
    assert all(torch.equal(one[key], stored[key]) for key in rest)


def test_a_fresh_pooler_of_a_network_that_is_random_anyway_is_refused() -> None:
    with pytest.raises(ConfigError, match="--fresh-pooler: without --init-from"):
        BertClassifyOptions(fresh_pooler=True)


@pytest.mark.parametrize("name", TASKS)
def test_a_head_goes_on_where_its_labels_are_the_same(name: str, start: Path, tmp_path: Path) -> None:
    task = task_of(name, tmp_path, "--init-from", str(start))
    torch.manual_seed(1)
    task.export(task.build_model(), tmp_path / "tuned")
    torch.manual_seed(2)
    again = task_of(name, tmp_path, "--init-from", str(tmp_path / "tuned")).build_model()
    stored = load_file(tmp_path / "tuned" / "model.safetensors")
    assert torch.equal(again.classifier.weight, stored["classifier.weight"])
    assert set(stored) == set(again.state_dict())
    change(tmp_path / "tuned" / "config.json", id2label={"0": "something else"})
    other = task_of(name, tmp_path, "--init-from", str(tmp_path / "tuned")).build_model()
    assert not torch.equal(other.classifier.weight, stored["classifier.weight"])


def test_pre_training_goes_on_with_the_network_of_a_directory(tmp_path: Path) -> None:
    data = bert.write_folder(tmp_path / "data", 30)
    torch.manual_seed(4)
    write_pretrained(BertForPreTraining(BertConfig(**bert.CONFIG)), tmp_path / "start")
    task = labelled.make("bert", data, ["--init-from", str(tmp_path / "start"), "--dropout", "0.3"])
    model, stored = task.build_model(), load_file(tmp_path / "start" / "model.safetensors")
    assert model.config.hidden_dropout_prob == 0.3
    assert all(torch.equal(value, stored[key]) for key, value in model.named_parameters())
    assert [path.name for path in task.load_dataset("train").files[2:]] == ["config.json", "model.safetensors"]
    (data / "vocab.txt").write_text("\n".join(bert.TOKENS) + "\n")
    (tmp_path / "start" / "vocab.txt").write_text("\n".join([*bert.TOKENS[:7], "other", *bert.TOKENS[8:]]) + "\n")
    with pytest.raises(
        DataError, match=r"data/vocab.txt is not the vocabulary of .*start/vocab.txt: they differ from line 8 on"
    ):
        task.build_model()


def test_words_are_split_as_the_directory_says(start: Path, tmp_path: Path) -> None:
    def pieces() -> list[str]:
        dataset = task_of("bert_ner", tmp_path, "--init-from", str(start)).load_dataset("train")
        return [labelled.TOKENS[piece] for piece in dataset[0]["pieces"]]

    assert pieces() == ["[CLS]", "anna", "sat", "in", "paris", ".", "[SEP]"]
    change(start / "tokenizer_config.json", do_lower_case=False)
    assert pieces() == ["[CLS]", "[UNK]", "sat", "in", "[UNK]", ".", "[SEP]"]
    task_of("bert_ner", tmp_path, "--init-from", str(start)).export(
        task_of("bert_ner", tmp_path, "--init-from", str(start)).build_model(), tmp_path / "tuned"
    )
    assert json.loads((tmp_path / "tuned" / "tokenizer_config.json").read_text())["do_lower_case"] is False
    (start / "tokenizer_config.json").unlink()
    assert "anna" in pieces()  # no token of the vocabulary has an upper-case letter


def test_the_rate_of_the_head_is_its_own(start: Path, tmp_path: Path) -> None:
    def rates(*words: str) -> tuple[float, float]:
        model = task_of("bert_classify", tmp_path, "--init-from", str(start), *words).build_model()
        return model.config.attention_probs_dropout_prob, model.dropout.p

    assert rates() == (0.1, 0.1)
    change(start / "config.json", classifier_dropout=0.4)
    assert rates() == (0.1, 0.4)
    assert rates("--dropout", "0.2") == (0.2, 0.2)
    change(start / "config.json", classifier_dropout=4)
    with pytest.raises(DataError, match=r"config.json: classifier_dropout is 4: expected a number from 0"):
        rates()


@pytest.mark.parametrize("name", TASKS)
def test_what_cannot_be_begun_with_is_refused(name: str, start: Path, tmp_path: Path) -> None:
    def refusal(*words: str) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            task_of(name, tmp_path, *words).build_model()
        return str(caught.value)

    network = ["--config-file", str(tmp_path / "network.json"), "--dict", str(tmp_path / "words.txt")]
    init = ["--init-from", str(start)]
    assert f"--task {name} needs a network: give --init-from" in refusal(*network[:2])
    assert "expected only one of them" in refusal(*init, *network[:2])
    assert "nowhere is not a directory" in refusal("--init-from", str(tmp_path / "nowhere"))
    assert "hold no text: expected 5 or more" in refusal(*init, "--max-pred-length", "4")
    (tmp_path / "other.txt").write_text((start / "vocab.txt").read_text() + "more\n")
    assert "they differ from line 20 on" in refusal(*init, "--dict", str(tmp_path / "other.txt"))
    for key, value, file in (
        ("model_type", "roberta", "config.json"),
        ("strip_accents", False, "tokenizer_config.json"),
        ("do_lower_case", "yes", "tokenizer_config.json"),
    ):
        kept = (start / file).read_text()
        change(start / file, **{key: value})
        assert f"{file}: {key} is" in refusal(*init)
        (start / file).write_text(kept)
    tensors = load_file(start / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, start / "model.safetensors")
    assert "lacks the tensor bert.encoder.layer.1.output.dense.weight" in refusal(*init)
    (start / "vocab.txt").unlink()
    assert "start has neither vocab.txt nor tokenizer.json" in refusal(*init)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tokenizer.json is not JSON"),
        (
            '{"model": {"type": "BPE", "vocab": {}}}',
            "tokenizer.json has model.type 'BPE': expected the tokenizer.json of a",
        ),
        ('{"model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "a": 2}}}', "the ids of its 2 tokens are not 0, 1"),
        ('{"model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "a": 1}}}', r"and no \[UNK\], "),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(content: str, message: str, start: Path, tmp_path: Path) -> None:
    (start / "vocab.txt").unlink()
    (start / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=message):
        task_of("bert_ner", tmp_path, "--init-from", str(start)).build_model()


@pytest.fixture
def transformers() -> Iterator[ModuleType]:
    library = import_transformers()
    library.utils.logging.disable_progress_bar()  # it leaves a thread behind
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as deepspeed sets it, which save_pretrained imports
        yield library


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_transformers_opens_the_directory_with_equal_logits_and_labels(
    name: str, transformers: ModuleType, start: Path, tmp_path: Path
) -> None:
    task = task_of(name, tmp_path, "--init-from", str(start), "--no-packing")
    torch.manual_seed(1)
    model = task.build_model().eval()
    task.export(model, tmp_path / "tuned")
    kind = "Token" if name == "bert_ner" else "Sequence"
    opened = getattr(transformers, f"AutoModelFor{kind}Classification")
    theirs, report = opened.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert tuple(theirs.config.id2label[number] for number in range(len(task.labels))) == task.labels
    batch = labelled.batch_of(task.load_dataset("train"))
    inputs = [batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")]
    with torch.no_grad():
        own = model(*inputs, batch["positions"]) if kind == "Token" else model(*inputs)
        found = theirs.eval()(input_ids=inputs[0], token_type_ids=inputs[1], attention_mask=inputs[2].long()).logits
    found = found.flatten(0, 1)[batch["positions"]] if kind == "Token" else found
    assert (own - found).abs().max() <= 1e-5
    text = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")("Anna unwalked.")["input_ids"]
    assert [labelled.TOKENS[piece] for piece in text] == ["[CLS]", "anna", "un", "##walk", "##ed", ".", "[SEP]"]


@pytest.mark.slow
def test_a_directory_that_transformers_has_written_is_begun_with(
    transformers: ModuleType, start: Path, tmp_path: Path
) -> None:
    labels = {0: "B-LOC", 1: "B-PER", 2: "O"}
    config = transformers.BertConfig(**labelled.CONFIG, id2label=labels, label2id={v: k for k, v in labels.items()})
    theirs = transformers.BertForTokenClassification(config)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "vocab.txt").exists()
    task = task_of("bert_ner", tmp_path, "--init-from", str(tmp_path / "theirs"))
    model = task.build_model()
    task.export(model, tmp_path / "tuned")
    assert (tmp_path / "tuned" / "vocab.txt").read_bytes() == (start / "vocab.txt").read_bytes()
    assert model.labels == tuple(labels.values())
    assert torch.equal(model.classifier.weight, theirs.classifier.weight)
