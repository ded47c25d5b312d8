"""The directory of Hugging Face that `--init-from` names: whether it is one, and which files it has.

Imports no torch; what is in the weights is the affair of `huggingface_files`.
"""

from __future__ import annotations

from pathlib import Path

from hetseq import ConfigError, DataError

_CONFIG_NAME, _VOCAB_NAME = "config.json", "vocab.txt"
#: what a directory may have, in the order in which they are looked for; transformers has the same order
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def init_config(folder: Path, config_file: str | None) -> Path:
    """The configuration file of a directory for --init-from.

    Raises ConfigError if one is given as --config-file as well, DataError where the directory does not exist.
    """
    if config_file is not None:
        raise ConfigError(
            f"--config-file {config_file} and --init-from {folder}: expected one of them, since the directory says in"
            f" {_CONFIG_NAME} what network it holds"
        )
    if not folder.is_dir():
        raise DataError(
            f"--init-from {folder} is no directory: expected one of Hugging Face, with {_CONFIG_NAME}, weights"
            f" and {_VOCAB_NAME}; `hetseq checkpoints export RUN --format hf --to DIR` writes one"
        )
    return folder / _CONFIG_NAME


def read_files(folder: Path) -> list[Path]:
    """The files of a directory besides its configuration and vocabulary, for the nodes of a run to compare."""
    names = ("tokenizer*.json", "*.safetensors", "pytorch_model*.bin", "*.index.json")
    return sorted({path for name in names for path in folder.glob(name) if path.is_file()})


def find_weights(folder: Path) -> Path:
    """The file of weights of a directory, or the index of several. Raises DataError where there is none."""
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise DataError(f"{folder} has no weights: expected one of the files {', '.join(_FILES)}")
    return found
