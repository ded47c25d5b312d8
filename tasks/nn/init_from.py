"""The files of the Hugging Face directory given as `--init-from`.

Imports no torch; `huggingface_files` reads the weights.
"""

from __future__ import annotations

from pathlib import Path

from hetseq import ConfigError, DataError

_CONFIG_NAME, _VOCAB_NAME = "config.json", "vocab.txt"
#: weight files of a directory, in search order, as in transformers
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def init_config(folder: Path, config_file: str | None) -> Path:
    """The configuration file of a directory for --init-from.

    Raises ConfigError if --config-file is given as well, DataError if the directory does not exist.
    """
    if config_file is not None:
        raise ConfigError(
            f"--config-file {config_file} and --init-from {folder}: expected only one of them, since {_CONFIG_NAME} in"
            " the directory describes its network"
        )
    if not folder.is_dir():
        raise DataError(
            f"--init-from {folder} is not a directory: expected a Hugging Face directory with {_CONFIG_NAME}, weights"
            f" and {_VOCAB_NAME}; `hetseq checkpoints export RUN --format hf --to DIR` writes one"
        )
    return folder / _CONFIG_NAME


def read_files(folder: Path) -> list[Path]:
    """The files of a directory besides its configuration and vocabulary, for the nodes of a run to compare."""
    names = ("tokenizer*.json", "*.safetensors", "pytorch_model*.bin", "*.index.json")
    return sorted({path for name in names for path in folder.glob(name) if path.is_file()})


def find_weights(folder: Path) -> Path:
    """The weight file of a directory, or the index of several. Raises DataError if there is none."""
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise DataError(f"{folder} has no weights: expected one of the files {', '.join(_FILES)}")
    return found
