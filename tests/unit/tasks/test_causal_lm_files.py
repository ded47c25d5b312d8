"""The files that `--task hf_causal_lm` reads, and the refusal of wrong ones before a worker starts."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq import ConfigError, DataError, MissingSplitError
from hetseq import config as options
from hetseq.tasks.early_checks import check_hf_causal_lm
from hetseq.tasks.hf_causal_lm.files import CausalLmFiles, has_weights
from tests.support import gpt_records
from tests.support.causal_lm import write_model_folder

ROOT = Path(__file__).resolve().parents[3]


def config_of(data: Path | None, *words: object) -> Any:
    given = [] if data is None else ["--data", str(data)]
    return options.parse(["--task", "gpt", *given, *map(str, words)])


def files_of(model: Path | None, data: Path | None, *words: object) -> CausalLmFiles:
    return CausalLmFiles(config_of(data, *words), None if model is None else str(model))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train.jsonl", "dev.txt", "notes.md"):
        (folder / name).write_text("text")
    return folder


def check(model: Path, data: Path, *words: object) -> None:
    """The early check, of a run whose options name the model."""
    extras = {"task": SimpleNamespace(model=str(model))}
    check_hf_causal_lm(dataclasses.replace(config_of(data, *words), extras=extras))


def test_the_files_are_found_without_torch_and_transformers() -> None:
    code = (
        "import sys, hetseq.tasks.hf_causal_lm.files as f; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_folder_has_a_file_for_each_split(model: Path, data: Path) -> None:
    files = files_of(model, data)
    assert [files.text_file(split).name for split in ("train", "valid")] == ["train.jsonl", "dev.txt"]
    assert files.records() is None
    with pytest.raises(MissingSplitError, match=r"no file for the split 'test': expected one .* ends in .txt, .jsonl"):
        files.text_file("test")
    check(model, data)
    (data / "train.txt").write_text("text")
    with pytest.raises(DataError, match=r"several files for the split 'train', train.jsonl and train.txt"):
        check(model, data)


def test_one_file_is_the_training_split(model: Path, data: Path) -> None:
    files = files_of(model, data / "train.jsonl", "--train-subset", "all")
    assert files.text_file("all") == data / "train.jsonl"
    with pytest.raises(
        MissingSplitError, match="is one file, the split 'all', and has no split 'valid': give a folder"
    ):
        files.text_file("valid")
    check(model, data / "train.jsonl")  # the default validation may be missing
    with pytest.raises(MissingSplitError, match="has no split 'test'"):
        check(model, data / "train.jsonl", "--valid-subset", "test")
    with pytest.raises(DataError, match=r"notes.md ends in .md: expected a folder with a .txt or .jsonl file"):
        files_of(model, data / "notes.md").text_file("train")
    with pytest.raises(DataError, match=r"nothing does not exist: expected a folder"):
        files_of(model, data / "nothing").text_file("train")


def test_a_folder_of_records_is_told_by_its_index(model: Path, tmp_path: Path) -> None:
    records = gpt_records.write_folder(tmp_path / "records", train=gpt_records.make_rows(5))
    index = files_of(model, records).records()
    assert index is not None
    assert list(index.splits) == ["train"]
    (model / "tokenizer.json").unlink()  # which records do not need
    check(model, records)
    for name in ("corpus.json", "train_00000.safetensors"):
        with pytest.raises(DataError, match="is one file of a folder of records: give the folder"):
            files_of(model, records / name).records()
    (records / "train_00000.safetensors").unlink()
    with pytest.raises(DataError, match=r"train_00000.safetensors cannot be read: No such file"):
        check(model, records)


def test_the_tokenizer_has_all_the_files_that_change_its_tokens(model: Path, data: Path) -> None:
    names = ("added_tokens.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
    (model / "additional_chat_templates").mkdir()
    for name in (*names, "additional_chat_templates/tools.jinja", "generation_config.json", "model.safetensors"):
        (model / name).write_text("{}")
    found = files_of(model, data).find_tokenizer()
    assert [path.relative_to(model).as_posix() for path in found] == sorted(
        [*names, "additional_chat_templates/tools.jinja"]
    )
    (model / "tokenizer.json").unlink()
    assert files_of(model, data).tokenizer_files() == []
    with pytest.raises(DataError, match=r"model has no tokenizer: expected one of tokenizer.json, .*data; copy all"):
        check(model, data)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], False),
        (["model.safetensors"], True),
        (["model.safetensors.index.json", "pytorch_model.bin"], True),
        (
            ["pytorch_model.bin"],
            r"has weights in pytorch_model.bin only: expected model.safetensors or .*as safetensors",
        ),
        (["pytorch_model.bin.index.json"], "has weights in pytorch_model.bin.index.json only"),
    ],
)
def test_weights_are_safetensors(model: Path, data: Path, names: list[str], expected: bool | str) -> None:
    for name in names:
        (model / name).write_text("")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            check(model, data)
    else:
        assert has_weights(model) is expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "model has no config.json: expected a Hugging Face directory with config.json, a tokenizer and"),
        ("{", r"config.json: is not JSON .*model_type"),
        ("[]", r"config.json: holds the JSON value is \[\]: expected a JSON object such as"),
        ('{"vocab_size": 3}', r"config.json: model_type is null: expected a name in quotes"),
        ('{"model_type": 7}', r"config.json: model_type is 7: expected a name in quotes"),
    ],
)
def test_a_directory_without_a_configuration_is_refused(
    model: Path, data: Path, content: str | None, message: str
) -> None:
    path = model / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError, match=message):
        files_of(model, data).read_config()


def test_an_adapter_names_its_base(model: Path, data: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/models/base"}))
    expected = (
        f"--model {model} is an adapter (adapter_config.json) without config.json: expected a whole model; give its"
        " base '/models/base', or the directory that `hetseq checkpoints export RUN --format hf --merge --to DIR`"
        " writes"
    )
    with pytest.raises(DataError, match=re.escape(expected)):
        files_of(model, data).read_config()
    (model / "adapter_config.json").write_text("{")
    with pytest.raises(DataError, match=r"adapter_config.json: is not JSON"):
        files_of(model, data).folder()


def test_options_that_are_missing_are_named(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--task hf_causal_lm needs --model: a Hugging Face directory"):
        files_of(None, data).folder()
    with pytest.raises(ConfigError, match=r"--task hf_causal_lm needs --data: a folder with a .txt or .jsonl file"):
        _ = files_of(model, None).data
    with pytest.raises(DataError, match=r"gpt2 is not a directory: .*`hf download NAME --local-dir DIR` makes"):
        files_of(tmp_path / "gpt2", data).folder()
