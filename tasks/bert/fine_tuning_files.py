"""The files that fine-tuning of BERT starts from, found by the options of a run. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from hetseq import Config, ConfigError, DataError
from hetseq.tasks.bert.vocab import check_same_vocab, find_vocab_in
from hetseq.tasks.nn.init_from import init_config


def find_files(config: Config, init_from: str | None) -> tuple[Path | None, Path, Path]:
    """The directory of the weights (None for random weights), the configuration file and the vocabulary.

    Raises ConfigError if options contradict each other or are missing, DataError for invalid files.
    """
    task = config.task
    folder = None if init_from is None else Path(init_from).expanduser()
    if folder is not None:
        return folder, init_config(folder, task.config_file), _find_vocab(folder, task.vocab_file)
    if task.config_file is None or task.vocab_file is None:
        raise ConfigError(
            f"--task {task.task} needs a network: give --init-from a Hugging Face directory (`hetseq checkpoints"
            " export RUN --format hf --to DIR` writes one), or --config-file and --dict for random weights"
        )
    return None, Path(task.config_file).expanduser(), _find_vocab(None, task.vocab_file)


def _find_vocab(folder: Path | None, given: str | None) -> Path:
    """The vocabulary of a directory for --init-from, else the one `given` as --dict.

    Raises DataError if there is none, or if both exist and differ.
    """
    named = None if given is None else Path(given).expanduser()
    inside = None if folder is None else find_vocab_in(folder)
    if named is not None and inside is not None:
        check_same_vocab(inside, named)
    found = inside or named
    if found is None:
        raise DataError(
            f"{folder} has neither vocab.txt nor tokenizer.json: expected the vocabulary that its weights were trained"
            " with, one token per line; give --dict FILE"
        )
    return found
