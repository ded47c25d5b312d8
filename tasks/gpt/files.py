"""The files that a run of the task `gpt` reads: the index of its records, its configuration and its tokenizer.

Responsible for finding them by options, and for the error messages if one is missing; `dataset` checks the rows.
Imports no torch: the launcher looks for the files before it starts a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetseq import Config, ConfigError, DataError
from hetseq.tasks.gpt.tokenizer import TOKENIZER
from hetseq.tasks.rows.record_index import INDEX, SUFFIX, Index, read_index

#: the remedy if there is no such folder
MAKE = (
    "`python -m hetseq.preprocessing.gpt_corpus --output DIR` makes such a folder, from your text with --input, else"
    " from the text that ships with Python"
)

_CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class GptFiles:
    """The files named by a run's options, or found beside its data.

    Each method raises DataError for an invalid file, ConfigError if options contradict each other.
    """

    config: Config
    init_from: str | None

    @property
    def data(self) -> Path:
        """The folder given as `--data`."""
        if self.config.data.data is None:
            raise DataError(f"the task gpt needs --data, a folder of records: {MAKE}")
        return Path(self.config.data.data).expanduser()

    @property
    def init_folder(self) -> Path | None:
        """The directory given as `--init-from`."""
        return None if self.init_from is None else Path(self.init_from).expanduser()

    def config_file(self) -> Path:
        """The configuration file of the network."""
        given, begin = self.config.task.config_file, self.init_from
        if begin is not None:
            if given is not None:
                raise ConfigError(
                    f"--config-file {given} and --init-from {begin} both define the network: give one of the two;"
                    f" the {_CONFIG_NAME} of the directory belongs to its weights"
                )
            return Path(begin).expanduser() / _CONFIG_NAME
        path = self.data / _CONFIG_NAME if given is None else Path(given).expanduser()
        if given is None and not path.is_file():
            raise DataError(
                f"the task gpt needs the sizes of its network: give --config-file a {_CONFIG_NAME} of GPT-2 or Llama,"
                f" or --init-from a Hugging Face directory (there is none in {path.parent} either); {MAKE}"
            )
        return path

    def tokenizer_file(self) -> Path | None:
        """The tokenizer, to compare with the data and to export with the model; training does not need it."""
        given, begin = self.config.task.vocab_file, self.init_from
        if given is not None:
            return Path(given).expanduser()
        folders = [self.data] if begin is None else [Path(begin).expanduser(), self.data]
        return next((folder / TOKENIZER for folder in folders if (folder / TOKENIZER).is_file()), None)


def find_records(data: Path) -> Index:
    """The index of `data`. Raises DataError if it is not a folder of records."""
    if data.is_file():
        if data.name == INDEX or data.suffix == SUFFIX:
            raise DataError(f"--data {data} is one file of a folder of records: give the folder, {data.parent}")
        raise DataError(f"--data {data} is a file: expected a folder of records; {MAKE}")
    if not (data / INDEX).exists():
        found = "has no" if data.is_dir() else "does not exist, and so has no"
        raise DataError(f"--data {data} {found} {INDEX}: expected the index of a folder of records; {MAKE}")
    return read_index(data)
