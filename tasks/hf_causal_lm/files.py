"""The files that a run of the task `hf_causal_lm` reads: a model directory of Hugging Face, and texts or records.

Responsible for finding them by options and names, and for the error messages if one is missing; `documents`, `chat` and
`dataset` read the data. Imports no torch and no transformers: the launcher looks for the files before it starts a
worker.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq import Config, ConfigError, DataError, MissingSplitError
from hetseq.tasks.gpt.files import find_records
from hetseq.tasks.nn.model_config import read_object, wrong
from hetseq.tasks.rows.record_index import INDEX, SUFFIX, Index
from hetseq.tasks.rows.split_files import find_split

#: suffixes of files with data: documents separated by `<|endoftext|>` lines, and one JSON object per line
TEXT, JSONL = ".txt", ".jsonl"
CONFIG_NAME = "config.json"

_ADAPTER_NAME = "adapter_config.json"
#: files that contain the tokens of a tokenizer; a directory needs one of them
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
#: further files that change the tokens of a text or chat
_SETTINGS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_DIRECTORY = f"a Hugging Face directory with {CONFIG_NAME}, a tokenizer and mostly weights in safetensors"
_CONFIG_EXAMPLE = 'a JSON object such as {"model_type": "llama", "vocab_size": 32000, ...}'
_DATA = (
    f"a folder with a {TEXT} or {JSONL} file for each split, one such file, or a folder of records of"
    " `python -m hetseq.preprocessing.gpt_corpus`"
)


@dataclass(frozen=True)
class CausalLmFiles:
    """The files named by `--model` and `--data`.

    Each method raises DataError for an invalid file, ConfigError for a missing option.
    """

    config: Config
    model: str | None

    @property
    def data(self) -> Path:
        """The folder or file given as `--data`."""
        if self.config.data.data is None:
            raise ConfigError(f"--task hf_causal_lm needs --data: {_DATA}")
        return Path(self.config.data.data).expanduser()

    def folder(self) -> Path:
        """The model directory, in which there is a configuration."""
        if self.model is None:
            raise ConfigError(f"--task hf_causal_lm needs --model: {_DIRECTORY}")
        folder = Path(self.model).expanduser()
        if not folder.is_dir():
            raise DataError(
                f"--model {folder} is not a directory: expected {_DIRECTORY}; `hf download NAME --local-dir DIR` makes"
                " one from a published model"
            )
        if not (folder / CONFIG_NAME).exists():
            if (folder / _ADAPTER_NAME).exists():
                raise _adapter(folder)
            raise DataError(
                f"--model {folder} has no {CONFIG_NAME}: expected {_DIRECTORY}; copy all files of the model"
            )
        return folder

    def read_config(self) -> dict[str, Any]:
        """The content of `config.json`, which has a `model_type`."""
        path = self.folder() / CONFIG_NAME
        try:
            found = read_object(path, _CONFIG_EXAMPLE)
            kind = found.get("model_type")
            if not isinstance(kind, str) or not kind:
                raise DataError(wrong("model_type", kind, f'a name in quotes, as in "llama"; {CONFIG_NAME} has it'))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        return found

    def tokenizer_files(self) -> list[Path]:
        """The files of the tokenizer and its chat template, sorted; empty if the directory has no tokenizer."""
        folder = self.folder()
        if not any((folder / name).is_file() for name in _VOCABULARIES):
            return []
        named = [folder / name for name in (*_VOCABULARIES, *_SETTINGS)]
        named += folder.glob("additional_chat_templates/*.jinja")
        return sorted(path for path in named if path.is_file())

    def find_tokenizer(self) -> list[Path]:
        """`tokenizer_files`. Raises DataError if there are none."""
        found = self.tokenizer_files()
        if not found:
            raise DataError(
                f"--model {self.folder()} has no tokenizer: expected one of {', '.join(_VOCABULARIES)} to make tokens"
                f" of {self.data}; copy all files of the model, or give records as --data"
            )
        return found

    def records(self) -> Index | None:
        """The index of `--data` if it is a folder of records, otherwise None."""
        data = self.data
        if data.name == INDEX or data.suffix == SUFFIX or os.path.exists(data / INDEX):
            return find_records(data)
        return None

    def text_file(self, split: str) -> Path:
        """The file of a split. Raises MissingSplitError; a `--data` of one file is only the training split."""
        data, given = self.data, self.config.data
        if not data.is_file():
            splits = (given.train_subset, *given.valid_subsets)
            return find_split(data, split, suffixes=(TEXT, JSONL), other_splits=splits)
        if data.suffix.lower() not in (TEXT, JSONL):
            raise DataError(
                f"--data {data} ends in {data.suffix or 'no suffix'}: expected {_DATA}; rename it if it is text"
                f" ({TEXT}) or has one JSON object per line ({JSONL})"
            )
        if split != given.train_subset:
            raise MissingSplitError(
                f"--data {data} is one file, the split {given.train_subset!r}, and has no split {split!r}: give a"
                " folder with a file for each split"
            )
        return data


def has_weights(folder: Path) -> bool:
    """Whether a model directory has weights in safetensors. Raises DataError if it has others only."""
    if any((folder / name).is_file() for name in _WEIGHTS):
        return True
    for name in _PICKLED:
        if (folder / name).is_file():
            raise DataError(
                f"{folder} has weights in {name} only: expected {' or '.join(_WEIGHTS)}, since a pickled file can run"
                " any code; write them as safetensors, with from_pretrained(...) and save_pretrained(...) of"
                " transformers"
            )
    return False


def _adapter(folder: Path) -> DataError:
    try:
        base = read_object(folder / _ADAPTER_NAME, "the configuration of an adapter").get("base_model_name_or_path")
    except DataError as error:
        return DataError(f"{folder / _ADAPTER_NAME}: {error}")
    named = f"its base {base!r}" if isinstance(base, str) and base else "its base"
    return DataError(
        f"--model {folder} is an adapter ({_ADAPTER_NAME}) without {CONFIG_NAME}: expected a whole model; give {named},"
        " or the directory that `hetseq checkpoints export RUN --format hf --merge --to DIR` writes"
    )
