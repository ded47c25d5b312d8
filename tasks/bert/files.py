"""The files that a run of the task `bert` reads: its data, its configuration and its vocabulary.

Responsible for finding them by options and names, and for the error messages if one is missing; `dataset` and
`hdf5_dataset` check the rows. Imports no torch: the launcher looks for the files before it starts a worker.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq import Config, DataError, MissingSplitError
from hetseq.tasks.bert.config import BertConfig
from hetseq.tasks.bert.hdf5_reader import MAKE, shown
from hetseq.tasks.bert.vocab import check_same_vocab, check_vocab, find_vocab_in, read_vocab
from hetseq.tasks.nn.init_from import init_config
from hetseq.tasks.rows.record_index import AGAIN, INDEX, SUFFIX, VERSION, Index, read_index, version_of

#: file name of the vocabulary in a data folder
VOCAB_NAME = "vocab.txt"
#: the remedy if there is no such folder of records
MAKE_RECORDS = "`python -m hetseq.preprocessing.convert_hdf5 --help` says how to make such a folder"

_CONFIG_NAME = "bert_config.json"
_SUFFIXES = (".hdf5", ".h5")
_MAKE_DATA = (
    "`python -m hetseq.preprocessing.bert_corpus --output DIR` makes such a folder, from your text with --input, else"
    " from the text that comes with Python"
)


@dataclass(frozen=True)
class BertFiles:
    """The files named by a run's options, or found beside its data.

    Each method raises DataError for an invalid file, ConfigError if options contradict each other.
    """

    config: Config
    init_from: str | None

    @property
    def data(self) -> Path:
        """The folder or file given as `--data`."""
        if self.config.data.data is None:
            raise DataError(f"the task bert needs --data, a folder of records or of HDF5 files: {_MAKE_DATA}")
        return Path(self.config.data.data).expanduser()

    @property
    def init_folder(self) -> Path | None:
        """The directory given as `--init-from`."""
        return None if self.init_from is None else Path(self.init_from).expanduser()

    def config_file(self) -> Path:
        """The configuration file of the network."""
        given = self.config.task.config_file
        if self.init_folder is not None:
            return init_config(self.init_folder, given)
        path = folder_of(self.data) / _CONFIG_NAME if given is None else Path(given).expanduser()
        if given is None and not os.path.isfile(path):
            raise DataError(
                f"the task bert needs the sizes of its network: give --config-file a bert_config.json (there is none in"
                f" {path.parent} either); {_MAKE_DATA}"
            )
        return path

    def vocab_file(self) -> Path | None:
        """The vocabulary, to compare with the configuration; training on HDF5 files does not need it."""
        given = self.config.task.vocab_file
        path = folder_of(self.data) / VOCAB_NAME if given is None else Path(given).expanduser()
        found = path if given is not None or os.path.isfile(path) else None
        own = None if self.init_folder is None else find_vocab_in(self.init_folder)
        if own is None:
            return found
        if found is not None:
            check_same_vocab(own, found)
        return own

    def network(self) -> BertConfig:
        """The configuration of the network, checked against the vocabulary."""
        path = self.config_file()
        config = BertConfig.from_json_file(path)
        file = self.vocab_file()
        if file is not None:
            check_vocab(
                read_vocab(file), file, config_path=path, vocab_size=config.vocab_size, pad_token_id=config.pad_token_id
            )
        return config

    def check_other_splits(self, files: Sequence[Path], split: str) -> None:
        """Raise DataError for a file that would be used for both training and validation."""
        splits = {self.config.data.train_subset, *self.config.data.valid_subsets}
        for other in sorted(splits - {split}):
            both = [path for path in files if other in path.name]
            if both:
                raise DataError(
                    f"{both[0]} belongs to two splits, because its name contains both {split!r} and {other!r}: rename"
                    " it, or give --train-subset and --valid-subset longer words"
                )


def folder_of(data: Path) -> Path:
    """The folder of `--data`, which may name one file in it. Raises DataError if it cannot be read."""
    with _reading(data):
        return data if stat.S_ISDIR(data.stat().st_mode) else data.parent


def hdf5_names(data: Path) -> list[str]:
    """The sorted names of the HDF5 files in `data`; empty if it is not a folder. Raises DataError."""
    with _reading(data):
        if not stat.S_ISDIR(data.stat().st_mode):
            return []
        return sorted(path.name for path in data.iterdir() if _is_hdf5_name(path.name) and path.is_file())


def find_hdf5(data: Path, split: str) -> list[Path]:
    """The files of a split, sorted by name. Folder names never matter."""
    with _reading(data):
        mode = data.stat().st_mode  # is_dir() hides errors in some versions of Python
        if stat.S_ISDIR(mode):
            found = sorted(data.iterdir(), key=lambda path: path.name)
            files = [path for path in found if _is_hdf5_name(path.name) and path.is_file()]
        elif stat.S_ISREG(mode):
            if not _is_hdf5_name(data.name):
                raise DataError(
                    f"--data {data} is not named like an HDF5 file: expected *.hdf5, *.h5 or a folder with them; {MAKE}"
                )
            found = files = [data]
        else:
            raise DataError(f"--data {data} is neither a folder nor a file: expected a folder with HDF5 files; {MAKE}")
    chosen = [path for path in files if split in path.name]
    if not chosen:
        raise MissingSplitError(
            f"--data {data} has no files of the split {split!r}: expected names that contain {split!r} and end in .hdf5"
            f" or .h5 (folder names do not count), found {shown([path.name for path in found])}; set --train-subset"
            f" and --valid-subset to words in the names of your files; {MAKE}"
        )
    return chosen


@contextlib.contextmanager
def _reading(data: Path) -> Iterator[None]:
    """Context that raises DataError if `--data` cannot be read."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"--data {data} does not exist: expected a folder with HDF5 files; {MAKE}") from error
    except OSError as error:
        raise DataError(
            f"--data {data} cannot be read: {error.strerror}; expected a folder you may read and enter"
        ) from error


def _is_hdf5_name(name: str) -> bool:
    # macOS leaves ._name beside a copied file
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def find_records(data: Path, hdf5_files: Sequence[str]) -> Index | None:
    """The index of `data` if it is a folder of records, otherwise None; `hdf5_files`: the HDF5 files in it.

    Raises DataError for a folder of both kinds, of an unknown version, or of records without their index.
    """
    if data.is_file():
        if data.name == INDEX or data.suffix == SUFFIX:
            raise DataError(f"--data {data} is one file of a folder of records: give the folder, {data.parent}")
        return None
    version = version_of(data) if data.is_dir() else None
    if version is None or version == 1:
        stray = [] if hdf5_files or not data.is_dir() else sorted(path.name for path in data.glob(f"*{SUFFIX}"))
        if stray:
            raise DataError(
                f"--data {data} has {stray[0]} and no {INDEX} of records: expected the index, which is written last;"
                f" {AGAIN}; {MAKE_RECORDS}"
            )
        return None
    if version == VERSION and hdf5_files:
        raise DataError(
            f"--data {data} holds records ({INDEX} lists them) and HDF5 files ({', '.join(hdf5_files[:3])}): expected"
            " one of the two; move the other to a folder of its own"
        )
    return read_index(data)
