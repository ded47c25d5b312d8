"""BERT pre-training data from folders of HDF5 files, in the format of NVIDIA's scripts and the 2020 HetSeq.

Responsible for refusing invalid numbers and for batches; knows no model, loss or ranks, and never writes into `--data`.
`files` finds the files of a split, `hdf5_reader` reads the rows. In a row, the first masked position 0 ends the list of
masked tokens.

The one idea: rows keep their small stored types until they become a batch, and both checking and batching are a few
operations on whole arrays.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hetseq import DataError
from hetseq.tasks.bert.files import find_hdf5
from hetseq.tasks.bert.hdf5_reader import (
    CACHE_BYTES,
    LABEL,
    MAKE,
    NAMES,
    PREDICTIONS,
    TOKENS,
    Column,
    Numbers,
    Reader,
    Table,
    open_table,
    shown,
)
from hetseq.tasks.bert.packing import pack
from hetseq.tasks.rows.mapped_files import Indices, PerProcess, by_file, positive

logger = logging.getLogger(__name__)

#: one sample, or many with a dimension in front, by the names of the data sets and in their stored types
Row = dict[str, Numbers]
Batch = dict[str, Any]  # tensors by name; of a packed batch also its Sequences

_CHECKED_ROWS = 1024  # at both ends of each file, before the first step
_OTHER_VOCABULARY = (
    "the file was made with another vocabulary: give the --dict and the --config-file that belong to it, or make the"
    " file again with this vocabulary"
)
_DAMAGED = "the file is damaged or of another layout: make it again"


@dataclass(frozen=True)
class Limits:
    """Upper limits (exclusive) of the numbers in a row; None: no limit."""

    vocab_size: int | None
    type_vocab_size: int | None


class BertDataset(Dataset[Row]):
    """The samples of all files one after another, read on request; made by `load_bert`.

    `files`: paths, including files without rows, for the nodes of a run to compare; `length` is L. Rows are checked
    when read; DataError names the file and row. Can be pickled and forked: each process opens the files itself. With
    `is_packed`, batches are packed by `packing`.
    """

    vocabulary_digest: str | None = None  # of `vocab_digest`

    def __init__(
        self, tables: Sequence[Table], files: Sequence[Path], limits: Limits, *, cache_bytes: int = CACHE_BYTES,
        is_packed: bool = False,
    ) -> None:  # fmt: skip
        self.files = list(files)
        self.length = tables[0].columns["input_ids"].width
        self._tables, self._limits, self._is_packed = list(tables), limits, is_packed
        self._ends = list(itertools.accumulate(table.rows for table in tables))
        self._shapes = {name: _common([table.columns[name] for table in tables]) for name in NAMES}
        self._open = PerProcess(functools.partial(Reader, self._tables, cache_bytes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        """One sample by the names of the data sets, in stored types: (L,), (P,) and ()."""
        rows = self._rows([operator.index(index)])
        return {name: numbers[0] for name, numbers in rows.items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Several samples as a finished batch, in the order of `indices`; an index may occur twice."""
        return self._finished(self._rows(indices))

    def collater(self, samples: Batch | list[Row]) -> Batch:
        """A batch from the results of `__getitem__`, or of `__getitems__` unchanged.

        "input_ids", "token_type_ids" (n, L) int64; "attention_mask" (n, L) bool, True for a real token;
        "masked_positions" (m,) int64, row * L + column, ascending; "masked_ids" (m,) int64, the original words;
        "next_sentence_labels" (n,) int64, 0 for a true continuation. `packing.pack` describes packed batches.
        """
        if isinstance(samples, dict):
            return samples
        if not samples:
            return self.__getitems__([])
        rows = {name: np.stack([sample[name] for sample in samples]) for name in (*TOKENS, LABEL)}
        for name in PREDICTIONS:
            rows[name] = np.zeros((len(samples), max(len(sample[name]) for sample in samples)), np.int64)
            for row, sample in zip(rows[name], samples):
                row[: len(sample[name])] = sample[name]
        return self._finished(rows)

    def num_tokens(self, index: int) -> int:
        """The cost of a sample in tokens: its real tokens in packed batches, always L in padded ones.

        The network computes the padding of a batch (n, L) too, so only this limits memory and time; the 2020 code
        counted 512 per sample for the same reason. Real tokens are counted in the file.
        """
        if not self._is_packed:
            return self.length
        (wanted,) = positive([index], len(self)).tolist()
        at = bisect.bisect_right(self._ends, wanted)
        mask = self._reader.take(at, "input_mask", np.array([wanted - self._start(at)]))
        return int(np.count_nonzero(mask))

    def _finished(self, rows: Row) -> Batch:
        return pack(_batch(rows)) if self._is_packed else _batch(rows)

    def check_ends(self) -> None:
        """Read and check the first and last rows of every file. Raises DataError."""
        for at, table in enumerate(self._tables):
            first = np.arange(min(_CHECKED_ROWS, table.rows))
            last = np.arange(max(len(first), table.rows - _CHECKED_ROWS), table.rows)
            self._rows(np.concatenate([first, last]) + self._start(at))

    def place_of(self, index: int) -> str:
        """The origin of a sample, for messages: its file and its row there."""
        at = bisect.bisect_right(self._ends, index)
        return f"{self._tables[at].path}, row {index - self._start(at)}"

    @property
    def _reader(self) -> Reader:
        return self._open.get()

    def _start(self, at: int) -> int:
        return self._ends[at] - self._tables[at].rows

    def _rows(self, indices: Sequence[int] | Indices) -> Row:
        """Samples (n, ...) by data set, checked."""
        wanted = positive(indices, len(self))
        rows = self._gather(wanted)
        self._check(rows, wanted)
        return rows

    def _gather(self, wanted: Indices) -> Row:
        reader = self._reader
        # lists of masked tokens that are shorter than in other files are padded with 0
        found = {name: np.zeros((len(wanted), width), dtype) for name, (width, dtype) in self._shapes.items()}
        for at, places, rows in by_file(self._ends, wanted):
            for name, numbers in found.items():
                piece = reader.take(at, name, rows)
                numbers[places, : piece.shape[1]] = piece
        found[LABEL] = found[LABEL][:, 0]
        return found

    def _check(self, rows: Row, indices: Indices) -> None:
        """Raise DataError for the first invalid number; `indices`: the samples of the rows."""
        self._check_mask(rows["input_mask"], indices)
        words, types, length = self._limits.vocab_size, self._limits.type_vocab_size, self.length
        is_listed = _is_listed(rows["masked_lm_positions"])  # (n, P)
        for name, limit, why, remedy in (
            ("input_ids", words, f"the model's vocabulary has {words} tokens", _OTHER_VOCABULARY),
            ("segment_ids", types, f"type_vocab_size is {types}", "give a --config-file with a larger one"),
            ("masked_lm_positions", length, f"a row has {length} tokens", _DAMAGED),
            ("masked_lm_ids", words, f"the model's vocabulary has {words} tokens", _OTHER_VOCABULARY),
            (LABEL, 2, "0 is next, 1 is not", _DAMAGED),
        ):
            numbers = rows[name]
            wrong = _outside(numbers, limit, is_listed if name in PREDICTIONS else None)
            if wrong is not None:
                expected = "0 or more" if limit is None else f"0 to {limit - 1} ({why})"
                self._refuse(indices, wrong[0], f"{name} holds {numbers[wrong]}", f"{expected}; {remedy}")
        positions = rows["masked_lm_positions"]
        at, _ = np.nonzero(is_listed)
        is_real = rows["input_mask"][at, positions[is_listed]] != 0  # (m,)
        if not is_real.all():
            row, position = at[~is_real][0], positions[is_listed][~is_real][0]
            found = f"masked_lm_positions has position {position}, which is padding by input_mask"
            self._refuse(indices, row, found, f"positions of real tokens; {_DAMAGED}")

    def _check_mask(self, mask: Numbers, indices: Indices) -> None:
        wrong = _outside(mask, 2)
        if wrong is not None:
            self._refuse(indices, wrong[0], f"input_mask holds {mask[wrong]}", f"0 for padding or 1; {_DAMAGED}")
        is_empty = ~mask.any(axis=1)
        if is_empty.any():
            found = "input_mask has no 1, so the row has no token"
            self._refuse(indices, np.argmax(is_empty), found, "at least one; leave such rows out of the file")

    def _refuse(self, indices: Indices, row: Any, found: str, expected: str) -> NoReturn:
        raise DataError(f"{self.place_of(int(indices[row]))}: {found}, expected {expected}")


def load_bert(
    data: Path,
    split: str,
    *,
    vocab_size: int | None,
    max_positions: int | None,
    type_vocab_size: int | None,
    num_file: int = 0,
    is_packed: bool = False,
) -> BertDataset:
    """The samples of a split: the files *.hdf5 and *.h5 in the folder `data` whose names contain `split`.

    `data` may be one such file; `num_file` limits the number of files, 0: all. The sizes of the model, if given, limit
    the numbers in the files; both ends of every file are checked here. Raises MissingSplitError if no file is found,
    DataError for an invalid file.
    """
    files = find_hdf5(data, split)
    files = files[:num_file] if num_file > 0 else files
    tables = [table for table in map(open_table, files) if table.rows]
    if not tables:
        where = shown([str(path) for path in files])
        raise DataError(f"no rows in {where}: expected at least one in the files of the split {split!r}; {MAKE}")
    first, length = tables[0], tables[0].columns["input_ids"].width
    for table in tables:
        if table.columns["input_ids"].width != length:
            raise DataError(
                f"{table.path} has rows of {table.columns['input_ids'].width} tokens and {first.path.name} of {length}:"
                " expected one length in all files of a split; move the others to a folder of their own"
            )
    if max_positions is not None and length > max_positions:
        raise DataError(
            f"{first.path} has rows of {length} tokens, more than the {max_positions} positions of the model: give a"
            f" --config-file with max_position_embeddings of {length} or more, or files of shorter rows"
        )
    _say_what_is_packed(tables)
    dataset = BertDataset(tables, files, Limits(vocab_size, type_vocab_size), is_packed=is_packed)
    dataset.check_ends()
    return dataset


def _say_what_is_packed(tables: Sequence[Table]) -> None:
    """Log if compressed files exceed the cache, because reading them takes a thousand times longer."""
    packed = [[column for column in table.columns.values() if column.offset is None] for table in tables]
    bytes_in_all = sum(table.rows * column.row_bytes for table, columns in zip(tables, packed) for column in columns)
    if bytes_in_all > CACHE_BYTES:
        at_once, path = max(
            (sum(column.block_rows * column.row_bytes for column in columns), table.path)
            for table, columns in zip(tables, packed)
        )
        logger.info(
            "%s: reading one sample may unpack %.1f MB, because the file is stored in chunks and only %d of %d MB are"
            " cached. Unpack it once to read it about a thousand times faster:"
            " h5repack -f NONE -l CONTI FILE NEW_FILE",
            path, at_once / 1e6, CACHE_BYTES // 10**6, bytes_in_all // 10**6,
        )  # fmt: skip


# Batches


def _common(columns: Sequence[Column]) -> tuple[int, np.dtype[Any]]:
    """Width and dtype of an array that can hold the rows of all columns."""
    return max(column.width for column in columns), np.result_type(*{column.dtype for column in columns})


def _is_listed(positions: Numbers) -> npt.NDArray[np.bool_]:
    """Which entries of lists (n, P) of positions come before the first 0 of their row."""
    listed: npt.NDArray[np.bool_] = np.logical_and.accumulate(positions != 0, axis=1)
    return listed


def _outside(numbers: Numbers, limit: int | None, where: npt.NDArray[np.bool_] | None = None) -> tuple[int, ...] | None:
    """The index of the first number outside 0 to limit - 1, or None; `where`, if given, selects numbers to check."""
    if not numbers.size or (numbers.min() >= 0 and (limit is None or int(numbers.max()) < limit)):
        return None
    wide = numbers.astype(np.int64)
    wrong = (wide < 0) if limit is None else (wide < 0) | (wide >= limit)
    places = np.argwhere(wrong if where is None else wrong & where)
    return tuple(places[0].tolist()) if len(places) else None


def _batch(rows: Row) -> Batch:
    """The tensors of a padded batch, as in `BertDataset.collater`; they may share the memory of the rows (n, ...)."""
    count, length = rows["input_ids"].shape
    is_listed = _is_listed(rows["masked_lm_positions"])
    flat = rows["masked_lm_positions"].astype(np.int64) + np.arange(0, count * length, length)[:, None]  # (n, P)
    # a position that is listed twice is one masked token, and its last word counts, as in 2020
    words = np.full(count * length, -1, np.int64)
    words[flat[is_listed]] = rows["masked_lm_ids"][is_listed]
    masked = np.flatnonzero(words >= 0)
    return {
        "input_ids": torch.from_numpy(rows["input_ids"].astype(np.int64, copy=False)),
        "token_type_ids": torch.from_numpy(rows["segment_ids"].astype(np.int64, copy=False)),
        "attention_mask": torch.from_numpy(rows["input_mask"] != 0),
        "masked_positions": torch.from_numpy(masked),
        "masked_ids": torch.from_numpy(words[masked]),
        "next_sentence_labels": torch.from_numpy(rows[LABEL].astype(np.int64, copy=False)),
    }
