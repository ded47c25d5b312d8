"""The data set of a causal language model of transformers: rows of texts, chats or records, and packed batches.

Responsible for loading a split, for tokens that the model does not have, and for the batch. `documents` and `chat` make
rows of text, and `tasks/gpt/dataset.py` reads records.

The one idea: documents of a micro-batch share rows, first fit, the longest document first. Positions restart at each
document, by which the models of transformers keep documents apart in attention. A batch depends only on its samples and
on the longest row of the split, never on the rank that computes it.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hetseq import ConfigError, DataError
from hetseq.tasks.gpt.dataset import GptRecords, check_tokens, load_records
from hetseq.tasks.gpt.tokenizer import TOKENIZER, read_tokens
from hetseq.tasks.hf_causal_lm.chat import rows_of_chats
from hetseq.tasks.hf_causal_lm.documents import CHATS, TokenRows, read_items, rows_of_texts
from hetseq.tasks.hf_causal_lm.files import CONFIG_NAME, CausalLmFiles
from hetseq.tasks.hf_causal_lm.tokenizer import Tokenizer, open_tokenizer, read_vocabulary
from hetseq.tasks.rows.record_index import Index, vocab_digest

logger = logging.getLogger(__name__)

Sample = dict[str, Tensor]
Batch = dict[str, Tensor]

_MULTIPLE = 8  # of the length of rows, for the tensor cores of GPUs


class CausalRows(Dataset[Sample]):
    """The rows of a split; made by `load_rows`.

    `lengths` (n,): tokens of each sample. `length`: the longest row of a batch, that is the longest of the split,
    rounded up to a multiple of 8 if `max_length` allows it. `is_packed`: whether samples share the rows of a batch; the
    caller may change it. `files`: paths, for the nodes of a run to compare.
    """

    vocabulary_digest: str | None = None  # of `vocab_digest`

    def __init__(self, rows: TokenRows | GptRecords, files: Sequence[Path], *, max_length: int | None) -> None:
        self.files, self.is_packed = list(files), True
        self.lengths = rows.lengths if isinstance(rows, TokenRows) else rows.row_lengths()
        self.length = _rounded_up(int(self.lengths.max()), max_length)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """`input_ids` (length,), `target_positions` (m,) before each token to predict, `prompt_length` (); int64."""
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples, in the order of `indices`."""
        if isinstance(self._rows, TokenRows):
            rows = [self._rows[index] for index in indices]
            return [_sample(row.ids, np.flatnonzero(row.is_target[1:]), row.prompt_length) for row in rows]
        padded, lengths = self._rows.rows(indices)
        return [_sample(ids[:size], np.arange(size - 1), size) for ids, size in zip(padded, lengths.tolist())]

    def collater(self, samples: Sequence[Sample]) -> Batch:
        """A batch of r rows of L tokens, all int64.

        `input_ids` and `position_ids` (r, L): positions count from 0 in each sample, and in the padding at the end of a
        row, whose ids are 0. `target_positions` (m,): row * L + column of each token before one to predict.
        `starts`, `lengths` and `prompt_lengths` (n,): row * L + column of the first token of each sample, its tokens,
        and how many of them `hetseq predict` continues. The last four are in the order of the samples.
        """
        lengths = [len(sample["input_ids"]) for sample in samples]
        if self.is_packed:
            row_of, columns = _first_fit(lengths, self.length)
        else:
            row_of, columns = list(range(len(lengths))), [0] * len(lengths)
        used = [0] * (max(row_of, default=-1) + 1)  # tokens of each row
        for row, length in zip(row_of, lengths):
            used[row] += length
        width = _rounded_up(max(used, default=0), self.length)
        starts = [row * width + column for row, column in zip(row_of, columns)]
        ids, positions = torch.zeros(2, len(used) * width, dtype=torch.int64)
        for sample, start, length in zip(samples, starts, lengths):
            ids[start : start + length] = sample["input_ids"]
            positions[start : start + length] = torch.arange(length)
        for row, end in enumerate(used):
            positions[row * width + end : (row + 1) * width] = torch.arange(width - end)
        targets = [sample["target_positions"] + start for sample, start in zip(samples, starts)]
        return {
            "input_ids": ids.view(len(used), width),
            "position_ids": positions.view(len(used), width),
            "target_positions": torch.cat([torch.zeros(0, dtype=torch.int64), *targets]),
            "starts": torch.tensor(starts, dtype=torch.int64),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
            "prompt_lengths": torch.tensor([int(sample["prompt_length"]) for sample in samples], dtype=torch.int64),
        }


def _sample(ids: npt.NDArray[np.integer], targets: npt.NDArray[np.int64], prompt_length: int) -> Sample:
    return {
        "input_ids": torch.from_numpy(ids.astype(np.int64)),
        "target_positions": torch.from_numpy(targets),
        "prompt_length": torch.tensor(prompt_length),
    }


def _rounded_up(length: int, most: int | None) -> int:
    rounded = -(-length // _MULTIPLE) * _MULTIPLE
    return rounded if most is None else min(rounded, most)


def _first_fit(lengths: Sequence[int], most: int) -> tuple[list[int], list[int]]:
    """The row and the column of each sample: in the first row with room, the longest sample first.

    First-fit decreasing takes at most 11/9 of the rows of the best packing, and 6/9 of a row (Dósa 2007).
    """
    row_of, columns = [0] * len(lengths), [0] * len(lengths)
    used: list[int] = []  # tokens of each row
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):  # stable: equal ones stay in order
        row = next((row for row, tokens in enumerate(used) if tokens + lengths[at] <= most), len(used))
        if row == len(used):
            used.append(0)
        row_of[at], columns[at] = row, used[row]
        used[row] += lengths[at]
    return row_of, columns


def load_rows(files: CausalLmFiles, split: str, *, vocab_size: int, max_length: int | None) -> CausalRows:
    """The rows of a split, of at most `max_length` tokens, for a model with `vocab_size` tokens.

    Records are rows already, and None then allows any length. Every rank calls it and tokenizes the whole split.
    Raises MissingSplitError if there is no such split, DataError for invalid files, ConfigError without `max_length`.
    """
    index = files.records()
    if index is not None:
        return _load_records(files, index, split, vocab_size=vocab_size, max_length=max_length)
    path = files.text_file(split)
    if max_length is None:
        raise ConfigError(f"{path} is cut into rows, and no option says how long they are: give --max-length N")
    beside = files.find_tokenizer()
    tokenizer = open_tokenizer(files.folder())
    kind, items = read_items(path)
    rows, count = (rows_of_chats if kind == CHATS else rows_of_texts)(items, tokenizer, path, max_length=max_length)
    what = "conversations" if kind == CHATS else "documents"
    targets = int(rows.is_target.sum())
    if not len(rows) or (not targets and split == files.config.data.train_subset):
        needed = "with an answer of the role assistant" if kind == CHATS else "of two tokens or more"
        raise DataError(
            f"{path} has nothing to learn ({count:,} {what}, rows of at most {max_length:,} tokens): expected {what}"
            f" {needed}; add some, or raise --max-length"
        )
    _check_ids(rows, tokenizer, files.folder(), vocab_size)
    dataset = CausalRows(rows, [path, *beside], max_length=max_length)
    dataset.vocabulary_digest = vocab_digest(read_vocabulary(files.folder(), tokenizer))
    logger.info(
        "%s: %s rows of %s %s from %s, %s of %s tokens predicted",
        split, f"{len(rows):,}", f"{count:,}", what, path, f"{targets:,}", f"{len(rows.ids):,}",
    )  # fmt: skip
    return dataset


def _load_records(
    files: CausalLmFiles, index: Index, split: str, *, vocab_size: int, max_length: int | None
) -> CausalRows:
    tokenizer_file = files.folder() / TOKENIZER
    if tokenizer_file.is_file():
        check_tokens(index, read_tokens(tokenizer_file), tokenizer_file)
    records = load_records(
        index, split, config_file=files.folder() / CONFIG_NAME, vocab_size=vocab_size, max_positions=sys.maxsize,
        num_file=files.config.data.num_file,
    )  # fmt: skip
    longest = int(records.row_lengths().max())
    if max_length is not None and longest > max_length:
        raise DataError(
            f"{index.path} has rows of up to {longest} tokens in {split}, but a row may have {max_length}, by"
            " --max-length or the positions of the model: raise --max-length, or make records with a smaller"
            " --max-seq-length"
        )
    dataset = CausalRows(records, [*records.files, *files.tokenizer_files()], max_length=max_length)
    dataset.vocabulary_digest = index.vocab_sha256
    tokens = int(dataset.lengths.sum())
    logger.info(
        "%s: %s rows of records from %s, %s of %s tokens predicted",
        split, f"{len(dataset):,}", files.data, f"{tokens - len(dataset):,}", f"{tokens:,}",
    )  # fmt: skip
    return dataset


def _check_ids(rows: TokenRows, tokenizer: Tokenizer, folder: Path, vocab_size: int) -> None:
    largest = int(rows.ids.max())
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer in {folder} gives the token {tokenizer.convert_ids_to_tokens(largest)!r} the id"
            f" {largest:,}, but vocab_size in {folder / CONFIG_NAME} is {vocab_size:,}: expected ids below; take the"
            " tokenizer that the model was made with"
        )
