"""Shared parts of BERT fine-tuning: loading the network and vocabulary, word pieces, and export.

Responsible for the source of configuration, weights and vocabulary (`--init-from`, else `--config-file` and `--dict`),
for splitting words into pieces, and for the exported directory; `ner` and `classify` define labels and networks. The
one idea: the weights of a directory always come with its vocabulary and its way of splitting words, since they are
meaningless for other pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hetseq import Config, ConfigError, DataError
from hetseq.tasks.bert.config import BertConfig
from hetseq.tasks.bert.fine_tuning_files import find_files
from hetseq.tasks.bert.heads import Labelling
from hetseq.tasks.bert.vocab import check_vocab, read_vocab
from hetseq.tasks.bert.wordpiece import Encoder, Vocabulary
from hetseq.tasks.nn.huggingface import looks_lower_case, read_encoder_, write_pretrained
from hetseq.tasks.nn.init_from import read_files
from hetseq.tasks.nn.model_config import check_fraction, read_object, wrong

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer_config.json"
#: keys of a tokenizer_config.json -> the values for which its word pieces equal ours
_PLAIN_PIECES = {"tokenize_chinese_chars": (True, None), "do_basic_tokenize": (True, None)}
_LEAST_POSITIONS = 5  # [CLS], [SEP], and for two texts another [SEP] and a piece of each


@dataclass(frozen=True)
class Beginning:
    """The network and the vocabulary that fine-tuning starts from.

    `folder` holds the weights; None: they are random. `files`: the files that were read, for nodes to compare;
    `head_dropout`: rate before the label head; `most_pieces`: longest row, including [CLS] and [SEP].
    """

    config: BertConfig
    vocabulary: Vocabulary
    vocab_file: Path
    folder: Path | None
    files: tuple[Path, ...]
    head_dropout: float
    most_pieces: int

    def fill_(self, model: Labelling) -> None:
        """Load the weights of the directory, if there is one, into a network with a head. Raises DataError."""
        if self.folder is not None:
            read_encoder_(model, self.folder)

    def write(self, model: nn.Module, folder: Path) -> None:
        """Write a directory for transformers, with the vocabulary that was used. Raises DataError."""
        is_lower_case = self.vocabulary.is_lower_case
        write_pretrained(model, folder, vocab_file=self.vocab_file, is_lower_case=is_lower_case)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """The ids of each text's pieces, without [CLS] and [SEP]; may be empty."""
        return Encoder(self.vocabulary).encode(texts)

    def id_of(self, token: str) -> int:
        """The id of a special token."""
        return self.vocabulary.id_of(token)


def find_beginning(config: Config, init_from: str | None) -> Beginning:
    """The starting point that the options of a run define.

    Raises ConfigError if options contradict each other or are missing, DataError for invalid files.
    """
    task = config.task
    folder, config_file, vocab_file = find_files(config, init_from)
    found, tokens = BertConfig.from_json_file(config_file), read_vocab(vocab_file)
    check_vocab(
        tokens, vocab_file, config_path=config_file, vocab_size=found.vocab_size, pad_token_id=found.pad_token_id
    )
    most = min(found.max_position_embeddings, task.max_pred_length)
    if most < _LEAST_POSITIONS:
        raise ConfigError(
            f"rows of {most} pieces, by --max-pred-length {task.max_pred_length} and max_position_embeddings"
            f" {found.max_position_embeddings} of {config_file}, hold no text: expected {_LEAST_POSITIONS} or more"
        )
    return Beginning(
        config=found if task.dropout is None else found.with_dropout(task.dropout),
        vocabulary=Vocabulary(tuple(tokens), _is_lower_case(folder, tokens)),
        vocab_file=vocab_file,
        folder=folder,
        files=tuple(dict.fromkeys([config_file, vocab_file, *([] if folder is None else read_files(folder))])),
        head_dropout=_head_dropout(config_file, found) if task.dropout is None else task.dropout,
        most_pieces=most,
    )


def _head_dropout(path: Path, config: BertConfig) -> float:
    given = read_object(path, "the configuration of a BERT").get("classifier_dropout")
    if given is None:
        return config.hidden_dropout_prob
    try:
        check_fraction("classifier_dropout", given, may_be_zero=True)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return float(given)


def _is_lower_case(folder: Path | None, tokens: Sequence[str]) -> bool:
    """Whether words are lower-cased, according to tokenizer_config.json, or else to the vocabulary."""
    path = None if folder is None else folder / _TOKENIZER
    if path is None or not path.is_file():
        return looks_lower_case(tokens)
    try:
        says = read_object(path, 'the settings of a tokenizer, such as {"do_lower_case": true}')
        is_lower_case = says.get("do_lower_case", looks_lower_case(tokens))
        if not isinstance(is_lower_case, bool):
            raise DataError(wrong("do_lower_case", is_lower_case, "true or false"))
        for key, plain in {**_PLAIN_PIECES, "strip_accents": (None, is_lower_case)}.items():
            if says.get(key) not in plain:
                raise DataError(
                    wrong(key, says[key], "no such key, because it makes the tokenizer split words differently")
                )
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return is_lower_case


class Ragged:
    """Integer rows of any length, stored one after another in one array."""

    def __init__(self, rows: Sequence[Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]]) -> None:
        self.lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        self._ends = np.cumsum(self.lengths)
        self._values = np.concatenate([np.asarray(row, np.int32) for row in rows])

    def __getitem__(self, index: int) -> Tensor:
        """One row, int64."""
        end = int(self._ends[index])
        return torch.from_numpy(self._values[end - int(self.lengths[index]) : end].astype(np.int64))


def pad(rows: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Rows padded to (n, L) int64, where L is the longest, and the mask of real entries, (n, L) bool."""
    length = max(len(row) for row in rows)
    padded = torch.full((len(rows), length), padding, dtype=torch.int64)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])
    return padded, torch.arange(length) < lengths[:, None]
