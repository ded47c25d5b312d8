"""What fine-tuning of BERT begins with and ends with: network, vocabulary and rows of word pieces.

Responsible for where configuration, weights and vocabulary come from (`--init-from`, else `--config-file` and
`--dict`), for words to pieces, and for the directory that is written in the end; what is labelled, and by which
network, is the affair of `ner` and `classify`. The one idea: whoever takes the weights of a directory takes
its vocabulary and its way of splitting words too, since to other pieces the weights mean nothing.
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
#: what a tokenizer_config.json may say -> the values with which its word pieces are ours
_PLAIN_PIECES = {"tokenize_chinese_chars": (True, None), "do_basic_tokenize": (True, None)}
_LEAST_POSITIONS = 5  # [CLS], [SEP], and for two texts another [SEP] and a piece of each


@dataclass(frozen=True)
class Beginning:
    """The network and the vocabulary that fine-tuning begins with.

    `folder` holds the weights; None: they are random. `files` are those that were read, for nodes to compare;
    `head_dropout` is the rate before the head of labels, `most_pieces` the longest row, with [CLS] and [SEP].
    """

    config: BertConfig
    vocabulary: Vocabulary
    vocab_file: Path
    folder: Path | None
    files: tuple[Path, ...]
    head_dropout: float
    most_pieces: int

    def fill_(self, model: Labelling) -> None:
        """Give a network with a head the weights of the directory, if there is one. Raises DataError."""
        if self.folder is not None:
            read_encoder_(model, self.folder)

    def write(self, model: nn.Module, folder: Path) -> None:
        """A directory for transformers, with the vocabulary as it was used. Raises DataError."""
        is_lower_case = self.vocabulary.is_lower_case
        write_pretrained(model, folder, vocab_file=self.vocab_file, is_lower_case=is_lower_case)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """The ids of each text's pieces, without [CLS] and [SEP]; a text may have none."""
        return Encoder(self.vocabulary).encode(texts)

    def id_of(self, token: str) -> int:
        """The id of a special token."""
        return self.vocabulary.id_of(token)


def find_beginning(config: Config, init_from: str | None) -> Beginning:
    """What the options of a run say. Raises ConfigError where they contradict each other or leave something out.

    Raises DataError for files that are wrong.
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
    """Whether words are made lower case, by tokenizer_config.json, or by what the vocabulary looks like."""
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
                    wrong(key, says[key], "no such key, because with it words are split in another way than here")
                )
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return is_lower_case


class Ragged:
    """Rows of whole numbers of any lengths, one after the other in one array."""

    def __init__(self, rows: Sequence[Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]]) -> None:
        self.lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        self._ends = np.cumsum(self.lengths)
        self._values = np.concatenate([np.asarray(row, np.int32) for row in rows])

    def __getitem__(self, index: int) -> Tensor:
        """One row, int64."""
        end = int(self._ends[index])
        return torch.from_numpy(self._values[end - int(self.lengths[index]) : end].astype(np.int64))


def pad(rows: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Rows below each other as (n, L) int64, L being the longest, and the mask of what is no padding, (n, L) bool."""
    length = max(len(row) for row in rows)
    padded = torch.full((len(rows), length), padding, dtype=torch.int64)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    lengths = torch.tensor([len(row) for row in rows])
    return padded, torch.arange(length) < lengths[:, None]
