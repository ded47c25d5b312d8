"""Causal language model data from records: rows of tokens in text order, each predicted from the earlier ones.

Responsible for the single column of such rows, for refusing invalid numbers, and for batches. `records` reads rows, and
`preprocessing/gpt_corpus.py` makes them from text.

The one idea: the prediction targets are computed here, in NumPy, from the lengths of rows. So the number of predictions
of a batch is known before it is on a device, without a device synchronisation.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetseq import DataError
from hetseq.tasks.gpt.files import MAKE
from hetseq.tasks.rows.local_copy import LocalCopy
from hetseq.tasks.rows.mapped_files import Indices, positive
from hetseq.tasks.rows.record_index import AGAIN, INDEX, Column, Index, vocab_digest
from hetseq.tasks.rows.records import Records, open_shard

Batch = dict[str, Tensor]

IDS = "ids"

_CHECKED_ROWS = 1024  # at both ends of each file, before the first step
_MULTIPLE = 8  # of the length of a batch, for the tensor cores of GPUs
_WIDE = 65_536  # vocabularies of this size or more need four bytes per token


def columns_of(vocab_tokens: int) -> dict[str, Column]:
    """The column that `gpt_corpus` writes; the reader accepts unsigned integers of any width, and fixed rows too."""
    return {IDS: Column("U16" if vocab_tokens < _WIDE else "U32", is_ragged=True)}


class GptRecords(Dataset[Batch]):
    """The rows of a split; made by `load_records`.

    `files`: paths, for the nodes of a run to compare. `length` is L: the length of the longest row of the split,
    rounded up to a multiple of 8 if the model has that many positions. Every batch is padded to it, so the memory of a
    micro-batch of n rows is known after the first one. Rows are checked when read; DataError names the file and row.
    """

    vocabulary_digest: str | None = None  # of `vocab_digest`

    def __init__(
        self, records: Records, files: Sequence[Path], *, length: int, vocab_tokens: int, is_ragged: bool
    ) -> None:
        self.files, self.length = list(files), length
        self._records, self._vocab_tokens, self._is_ragged = records, vocab_tokens, is_ragged

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Batch:
        """One sample, by the names of a batch and without its first dimension; its positions count from 0."""
        batch = self.__getitems__([operator.index(index)])
        return {"input_ids": batch["input_ids"][0], "target_positions": batch["target_positions"]}

    def __getitems__(self, indices: Sequence[int] | Indices) -> Batch:
        """Several samples as a finished batch, in the order of `indices`; an index may occur twice.

        `input_ids` (n, L) int64, shorter rows padded with zeros at the end; `target_positions` (m,) int64, row * L +
        column of every token that is followed by another of its row, the target.
        """
        ids, lengths = self.rows(indices)
        has_target = np.arange(self.length) < lengths[:, None] - 1  # (n, L)
        return {
            "input_ids": torch.from_numpy(ids),
            "target_positions": torch.from_numpy(np.flatnonzero(has_target)),
        }

    def collater(self, samples: Batch | list[Batch]) -> Batch:
        """A batch from the results of `__getitem__`, or of `__getitems__` unchanged."""
        if isinstance(samples, dict):
            return samples
        if not samples:
            return self.__getitems__([])
        places = [sample["target_positions"] + at * self.length for at, sample in enumerate(samples)]
        return {
            "input_ids": torch.stack([sample["input_ids"] for sample in samples]),
            "target_positions": torch.cat(places),
        }

    def num_tokens(self, index: int) -> int:
        """The cost of a sample in tokens: always L, since the network computes its padding too."""
        return self.length

    def rows(self, indices: Sequence[int] | Indices) -> tuple[npt.NDArray[np.int64], Indices]:
        """The stored tokens (n, L), padded with zeros, and the length of each row, (n,). Raises DataError."""
        wanted = positive(indices, len(self))
        found = self._records.find(wanted)
        if self._is_ragged:
            ids, lengths = self._records.padded(IDS, found, self.length, 0)
        else:
            stored = self._records.fixed(IDS, found)  # (n, tokens of every row)
            ids = np.pad(stored, ((0, 0), (0, self.length - stored.shape[1])))
            lengths = np.full(len(wanted), stored.shape[1], np.int64)
        if ids.size and ids.max() >= self._vocab_tokens:
            at = int(np.argmax((ids >= self._vocab_tokens).any(axis=1)))
            expected = f"0 to {self._vocab_tokens - 1}, as {INDEX} states"
            self._refuse(wanted[at], f"{IDS} holds {ids[at].max()}", expected)
        if (lengths < 1).any():
            self._refuse(wanted[int(np.argmax(lengths < 1))], f"{IDS} holds nothing", "at least one token")
        return ids.astype(np.int64), lengths

    def row_lengths(self) -> Indices:
        """The tokens of every row, (n,), without padding. Raises DataError."""
        found = self._records.find(np.arange(len(self)))
        if self._is_ragged:
            return self._records.lengths(IDS, found)
        return np.full(len(self), self._records.fixed(IDS, self._records.find(np.arange(1))).shape[1], np.int64)

    def check_ends(self, ends: Sequence[int]) -> None:
        """Read and check the first and last rows of every file; files end at rows `ends`. Raises DataError."""
        for start, stop in zip([0, *ends], ends):
            first = np.arange(start, min(start + _CHECKED_ROWS, stop))
            last = np.arange(max(start + len(first), stop - _CHECKED_ROWS), stop)
            self.rows(np.concatenate([first, last]))

    def _refuse(self, index: np.int64, found: str, expected: str) -> NoReturn:
        place = self._records.place_of(int(index))
        raise DataError(f"{place}: {found}, expected {expected}; the file is damaged: {AGAIN}")


def load_records(
    index: Index, split: str, *, config_file: Path, vocab_size: int, max_positions: int, num_file: int = 0,
    local_copy: LocalCopy | None = None,
) -> GptRecords:  # fmt: skip
    """The rows of a split for a model of `vocab_size` tokens and `max_positions`, as in `config_file`.

    `num_file` limits the number of files. With `local_copy`, files are copied there first and read from the copies.
    Raises MissingSplitError if the index has no such split, DataError for an invalid index or file.
    """
    chosen = index.split(split)
    column = _column(index)
    if index.vocab_tokens > vocab_size:
        raise DataError(
            f"{index.path} has ids of {index.vocab_tokens:,} tokens, but {config_file} has vocab_size {vocab_size:,}:"
            " expected as many or more; give the --config-file that belongs to the data"
        )
    longest = chosen.longest[IDS] if column.is_ragged else column.shape[0]
    if longest > max_positions:
        raise DataError(
            f"{index.path} has rows of up to {longest} tokens in {split}, more than the {max_positions} positions of"
            f" {config_file}: give a --config-file with {longest} or more, or shorter rows"
        )
    files = chosen.files_up_to(num_file)
    if local_copy is not None:
        files = local_copy.of(files)
    shards = [shard for shard in (open_shard(file, index.columns) for file in files) if shard.rows]
    if not shards:
        raise DataError(
            f"no rows in the {len(files)} files of the split {split!r} of {index.path}: expected one; {MAKE}"
        )
    dataset = GptRecords(
        Records(shards, chosen.longest), [index.path, *(file.path for file in files)],
        length=min(-(-longest // _MULTIPLE) * _MULTIPLE, max_positions),
        vocab_tokens=index.vocab_tokens, is_ragged=column.is_ragged,
    )  # fmt: skip
    dataset.check_ends(np.cumsum([shard.rows for shard in shards]).tolist())
    return dataset


def check_tokens(index: Index, tokens: Sequence[str], tokenizer_file: Path) -> None:
    """Raise DataError unless the rows were made with these tokens of a tokenizer."""
    remedy = "give the --dict FILE (tokenizer.json) that the records were made with, or make them again with this one"
    if len(tokens) != index.vocab_tokens:
        raise DataError(
            f"{index.path} was made with a vocabulary of {index.vocab_tokens:,} tokens, but {tokenizer_file} has"
            f" {len(tokens):,}: expected the same; {remedy}"
        )
    if (found := vocab_digest(tokens)) != index.vocab_sha256:
        raise DataError(
            f"{index.path} was made with another vocabulary (sha256 {index.vocab_sha256[:16]}...) than {tokenizer_file}"
            f" has ({found[:16]}...): expected the same tokens in the same order; {remedy}"
        )


def _column(index: Index) -> Column:
    column = index.columns.get(IDS)
    is_right = column is not None and column.dtype.startswith("U") and (column.is_ragged or len(column.shape) == 1)
    if column is None or not is_right or len(index.columns) > 1:
        raise DataError(
            f"{index.path} has the columns {_named(index.columns)}, expected the column of a causal language model:"
            f" only {IDS}, unsigned integers, ragged or of one length; {MAKE}"
        )
    return column


def _named(columns: Mapping[str, Column]) -> str:
    return ", ".join(
        f"{name} ({column.dtype}{', ragged' if column.is_ragged else ''})" for name, column in columns.items()
    )
