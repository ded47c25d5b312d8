"""BERT pre-training data from records: rows hold the original words, which are masked when they are read.

Responsible for the columns of BERT's rows, for refusing invalid numbers, and for batches; `records` reads rows, and
`masking` chooses the words to mask.

The one idea: a sample is a pure function of (seed, epoch, number). So the masks change from epoch to epoch and are the
same on any cluster; without calls of `set_epoch`, as in validation, the masks are the same each time.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hetseq import DataError
from hetseq.tasks.bert.files import MAKE_RECORDS
from hetseq.tasks.bert.masking import MOST_POSITIONS, Masking, Words, numbers_of
from hetseq.tasks.bert.packing import pack
from hetseq.tasks.rows.local_copy import LocalCopy
from hetseq.tasks.rows.mapped_files import Indices, positive
from hetseq.tasks.rows.record_index import (
    AGAIN,
    INDEX,
    Column,
    Index,
    vocab_digest,
)
from hetseq.tasks.rows.records import Records, open_shard

Batch = dict[str, Any]  # tensors by name; of a packed batch also its Sequences

IDS, FIRST_LENGTHS, LABEL = "ids", "first_lengths", "next_sentence_labels"

_CHECKED_ROWS = 1024  # at both ends of each file, before the first step
_MULTIPLE = 8  # of the length of a batch, for the tensor cores of GPUs
_WIDE = 65_536  # vocabularies of this size or more need four bytes per token
_OTHER_VOCABULARY = "give the --dict that the records were made with, or make them again with this one"


def columns_of(vocab_tokens: int) -> dict[str, Column]:
    """The columns of BERT's rows: words of both segments with [CLS] and [SEP], first segment lengths, and labels."""
    return {
        IDS: Column("U16" if vocab_tokens < _WIDE else "U32", is_ragged=True),
        FIRST_LENGTHS: Column("U16"),  # tokens of the first segment, with [CLS] and its [SEP]
        LABEL: Column("U8"),  # 0 = the second segment follows the first one in the text, 1 = it does not
    }


class BertRecords(Dataset[Batch]):
    """The samples of a split; made by `load_records`.

    `files`: paths, for the nodes of a run to compare. `length` is L: the length of the longest row of the split,
    rounded up to a multiple of 8 if the model has that many positions. Batches are padded to it, although most rows are
    shorter: the memory of a micro-batch of n samples is then known after the first one, and no later batch with a
    longer row exceeds it. With `is_packed`, batches are packed by `packing` and take less. Rows are checked when read;
    DataError names the file and row.
    """

    vocabulary_digest: str | None = None  # of `vocab_digest`

    def __init__(
        self, records: Records, files: Sequence[Path], words: Words, masking: Masking, *, length: int,
        vocab_tokens: int, pad: int, seed: int, is_packed: bool = False,
    ) -> None:  # fmt: skip
        self.files, self.length = list(files), length
        self._records, self._words, self._masking = records, words, masking
        self._vocab_tokens, self._pad, self._seed = vocab_tokens, pad, seed
        self._is_packed = is_packed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the masks of this epoch, 0 or more, from now on."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Batch:
        """One sample, by the names of a padded batch and without its first dimension; its positions count from 0."""
        batch = self._padded([operator.index(index)])
        return {name: numbers if name.startswith("masked") else numbers[0] for name, numbers in batch.items()}

    def __getitems__(self, indices: Sequence[int] | Indices) -> Batch:
        """Several samples as a finished batch, in the order of `indices`; an index may occur twice."""
        return self._finished(self._padded(indices))

    def _finished(self, batch: Batch) -> Batch:
        return pack(batch) if self._is_packed else batch

    def _padded(self, indices: Sequence[int] | Indices) -> Batch:
        wanted = positive(indices, len(self))
        ids, lengths, first, labels = self._read(wanted)
        column = np.arange(self.length)
        numbers = numbers_of(self._seed, self._epoch, wanted, self.length)  # (n, L)
        masked = self._words.choose(ids, numbers, self._masking)  # (m,)
        shown = ids.astype(np.int64)
        originals = shown.ravel()[masked]
        shown.ravel()[masked] = self._words.instead(originals, numbers.ravel()[masked])
        is_real = column < lengths[:, None]
        return {
            "input_ids": torch.from_numpy(shown),
            "token_type_ids": torch.from_numpy((is_real & (column >= first[:, None])).astype(np.int64)),
            "attention_mask": torch.from_numpy(is_real),
            "masked_positions": torch.from_numpy(masked),
            "masked_ids": torch.from_numpy(originals),
            "next_sentence_labels": torch.from_numpy(labels.astype(np.int64)),
        }

    def collater(self, samples: Batch | list[Batch]) -> Batch:
        """A batch from the results of `__getitem__` or `__getitems__`; same layout as `BertDataset.collater`."""
        if isinstance(samples, dict):
            return samples
        if not samples:
            return self.__getitems__([])
        batch: Batch = {}
        for name in samples[0]:
            columns = [sample[name] for sample in samples]
            if name == "masked_positions":
                columns = [column + at * self.length for at, column in enumerate(columns)]
            batch[name] = torch.cat(columns) if name.startswith("masked") else torch.stack(columns)
        return self._finished(batch)

    def num_tokens(self, index: int) -> int:
        """The cost of a sample in tokens: its real tokens in packed batches, always L in padded ones.

        The network computes the padding of a batch (n, L) too, so only this limits memory and time, as with HDF5.
        """
        if not self._is_packed:
            return self.length
        return int(self._records.lengths(IDS, self._records.find(positive([index], len(self))))[0])

    def rows(self, indices: Sequence[int] | Indices) -> tuple[npt.NDArray[np.int64], ...]:
        """The stored rows: words (n, L) without masks; lengths, lengths of first segments, and labels, (n,) each."""
        ids, lengths, first, labels = self._read(positive(indices, len(self)))
        return ids.astype(np.int64), lengths, first, labels.astype(np.int64)

    def check_ends(self, ends: Sequence[int]) -> None:
        """Read and check the first and last rows of every file; files end at rows `ends`. Raises DataError."""
        for start, stop in zip([0, *ends], ends):
            first = np.arange(start, min(start + _CHECKED_ROWS, stop))
            last = np.arange(max(start + len(first), stop - _CHECKED_ROWS), stop)
            self._read(np.concatenate([first, last]))

    def _read(self, wanted: Indices) -> tuple[npt.NDArray[np.integer], Indices, Indices, npt.NDArray[np.integer]]:
        found = self._records.find(wanted)
        ids, lengths = self._records.padded(IDS, found, self.length, self._pad)
        first = self._records.fixed(FIRST_LENGTHS, found).astype(np.int64)
        labels = self._records.fixed(LABEL, found)
        if ids.size and ids.max() >= self._vocab_tokens:
            at = int(np.argmax((ids >= self._vocab_tokens).any(axis=1)))
            expected = f"0 to {self._vocab_tokens - 1}, as {INDEX} states; the file is damaged: {AGAIN}"
            self._refuse(wanted[at], f"{IDS} holds {ids[at].max()}", expected)
        for is_wrong, name, numbers, meant in (
            (lengths < 1, "its length", lengths, "at least one token"),
            ((first < 1) | (first > lengths), FIRST_LENGTHS, first, "1 to the length of the row"),
            (labels > 1, LABEL, labels, "0 is next, 1 is not"),
        ):
            if is_wrong.any():
                at = int(np.argmax(is_wrong))
                self._refuse(wanted[at], f"{name} is {numbers[at]}", f"{meant}; the file is damaged: {AGAIN}")
        return ids, lengths, first, labels

    def _refuse(self, index: np.int64, found: str, expected: str) -> NoReturn:
        raise DataError(f"{self._records.place_of(int(index))}: {found}, expected {expected}")


def load_records(
    index: Index,
    split: str,
    vocab: Sequence[str],
    *,
    max_positions: int | None = None,
    seed: int,
    masking: Masking,
    num_file: int = 0,
    is_packed: bool = False,
    local_copy: LocalCopy | None = None,
) -> BertRecords:
    """The samples of a split; `vocab`: tokens of the vocabulary file; `num_file` limits the number of files.

    With `local_copy`, files are copied there first and read from the copies. Raises MissingSplitError if the index has
    no such split, DataError for an invalid index or file.
    """
    chosen = index.split(split)
    _check_vocab(index, vocab)
    expected = columns_of(index.vocab_tokens)
    if index.columns != expected:
        raise DataError(
            f"{index.path} has the columns {_named(index.columns)}, expected BERT's columns,"
            f" {_named(expected)}; {MAKE_RECORDS}"
        )
    longest, files = chosen.longest[IDS], chosen.files_up_to(num_file)
    most = MOST_POSITIONS if max_positions is None else min(max_positions, MOST_POSITIONS)
    if longest > most:
        raise DataError(
            f"{index.path} has rows of up to {longest} tokens in {split}, more than the {most} positions of the model:"
            f" give a --config-file with max_position_embeddings of {longest} or more, or shorter rows"
        )
    if local_copy is not None:
        files = local_copy.of(files)
    shards = [shard for shard in (open_shard(file, index.columns) for file in files) if shard.rows]
    if not shards:
        raise DataError(
            f"no rows in the {len(files)} files of the split {split!r} of {index.path}: expected one; {MAKE_RECORDS}"
        )
    dataset = BertRecords(
        Records(shards, chosen.longest), [index.path, *(file.path for file in files)], Words(vocab), masking,
        length=min(-(-longest // _MULTIPLE) * _MULTIPLE, most),
        vocab_tokens=index.vocab_tokens, pad=vocab.index("[PAD]"), seed=seed, is_packed=is_packed,
    )  # fmt: skip
    dataset.check_ends(np.cumsum([shard.rows for shard in shards]).tolist())
    return dataset


def _check_vocab(index: Index, vocab: Sequence[str]) -> None:
    if len(vocab) != index.vocab_tokens:
        raise DataError(
            f"{index.path} was made with a vocabulary of {index.vocab_tokens:,} tokens, but the one given has"
            f" {len(vocab):,}: expected the same; {_OTHER_VOCABULARY}"
        )
    if (found := vocab_digest(vocab)) != index.vocab_sha256:
        raise DataError(
            f"{index.path} was made with another vocabulary (sha256 {index.vocab_sha256[:16]}...) than the one given"
            f" ({found[:16]}...): expected the same tokens in the same order; {_OTHER_VOCABULARY}"
        )


def _named(columns: dict[str, Column]) -> str:
    return ", ".join(f"{name} ({column.dtype}{', ragged' * column.is_ragged})" for name, column in columns.items())
