"""Text classification with BERT: one loss over texts, accuracy, and the macro F1 of the labels.

Responsible for converting texts to rows of word pieces, and for the metrics; `tasks/rows/labelled_texts.py` reads the
files, and `tasks/bert/heads.py` is the network.

The one idea: the F1 of a label is a quotient of sums, but the mean of several F1 is not. So ranks exchange the sums of
each label, and `summarise` computes the mean once those of all samples are known.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hetseq import ConfigError, DataError, ModelCard, Task, register_task
from hetseq.tasks.bert import packing as bert_packing
from hetseq.tasks.bert.fine_tuning import Beginning, Ragged, find_beginning, pad
from hetseq.tasks.bert.heads import BertForSequenceClassification
from hetseq.tasks.nn.activation_checkpointing import checkpoint_activations_
from hetseq.tasks.options import BertClassifyOptions
from hetseq.tasks.rows.labelled_texts import SUFFIXES, Columns, Labelled, read_labelled
from hetseq.tasks.rows.record_index import vocab_digest
from hetseq.tasks.rows.split_files import find_split

logger = logging.getLogger(__name__)

Sample = dict[str, Tensor]
Batch = dict[str, Any]  # tensors by name; of a packed batch also its Sequences

_ACCURACY = "accuracy"


@register_task("bert_classify")
class BertClassifyTask(Task):
    """`--task bert_classify`: texts with a label in `--data`, a BERT with a label head.

    The labels come from the training split, sorted, numerically if all are whole numbers. `--init-from DIR` loads the
    encoder of a Hugging Face directory; otherwise the weights are random, and `--config-file` and `--dict` define the
    network.
    """

    Options = BertClassifyOptions

    def load_dataset(self, split: str) -> LabelledRows:
        """The texts of a split. Raises DataError and MissingSplitError."""
        path, begin = self._file(split), self._beginning
        texts = self._training if split == self.config.data.train_subset else read_labelled(path, self._columns)
        if self._columns.pair is not None and begin.config.type_vocab_size < 2:
            raise ConfigError(
                f"--text-pair-column {self._columns.pair} makes rows of two segments, but type_vocab_size in"
                f" {begin.files[0]} is {begin.config.type_vocab_size}: expected a network with 2 or more"
            )
        files = dict.fromkeys([path, *begin.files])
        dataset = LabelledRows(
            *_encoded(texts, begin, path), self._numbers(texts, path), list(files), padding=begin.config.pad_token_id,
            is_packed=bert_packing.is_wanted(self.config, no_packing=self.options.no_packing),
        )  # fmt: skip
        dataset.vocabulary_digest = vocab_digest(self.labels)
        logger.info("%s: %d texts from %s, %d labels", split, len(dataset), path, len(self.labels))
        return dataset

    def build_model(self) -> nn.Module:
        """The encoder with a head for the labels of the training split."""
        begin = self._beginning
        model = BertForSequenceClassification(begin.config, self.labels, dropout=begin.head_dropout)
        fresh = copy.deepcopy(model.bert.pooler.state_dict())
        begin.fill_(model)
        if self.options.fresh_pooler:
            model.bert.pooler.load_state_dict(fresh)
        if self.options.activation_checkpointing:
            checkpoint_activations_(model)
        return model

    def export(self, model: nn.Module, folder: Path) -> None:
        """A directory that transformers opens as BertForSequenceClassification. Raises DataError."""
        self._beginning.write(model, folder)

    def model_card(self) -> ModelCard:
        """What the card of the exported model says."""
        return ModelCard(
            about="A BERT that labels texts, which `transformers.AutoModelForSequenceClassification` opens.",
            library_name="transformers", pipeline_tag="text-classification", base_model=self._beginning.folder,
        )  # fmt: skip

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Cross entropy in nats, summed over the texts."""
        return {"loss": F.cross_entropy(_logits(model, sample), sample["labels"], reduction="sum")}

    def count(self, sample: Batch) -> dict[str, float]:
        """Texts."""
        return {"loss": len(sample["labels"])}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`accuracy`, and for each label the two sums of its F1, for `summarise`.

        These are twice the number of correct predictions of the label, and its predictions plus its occurrences.
        """
        found, labels = _logits(model, sample).argmax(dim=1), sample["labels"]
        right = labels[found == labels]
        count = [torch.bincount(each, minlength=len(self.labels)) for each in (right, found, labels)]
        twice, both = (2 * count[0]).tolist(), (count[1] + count[2]).tolist()  # sync, in validation only
        of_labels = {f"f1/{label}": (float(twice[at]), float(both[at])) for at, label in enumerate(self.labels)}
        return {_ACCURACY: (float(len(right)), float(len(labels))), **of_labels}

    def summarise(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """`accuracy`, and `macro_f1`: the mean F1 of all labels that occur or are predicted, as in scikit-learn."""
        counted = [total / count for name, (total, count) in sums.items() if name != _ACCURACY and count]
        right, texts = sums[_ACCURACY]
        return {_ACCURACY: right / texts, "macro_f1": sum(counted) / len(counted)}

    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        """The label of each text."""
        return [self.labels[number] for number in _logits(model, sample).argmax(dim=1).tolist()]

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of the training split, in order. Raises DataError if there is only one."""
        found = {text.label for text in self._training}
        if len(found) < 2:
            raise DataError(
                f"{self._file(self.config.data.train_subset)} gives all texts the label {min(found)!r}: expected at"
                " least two different labels; is --label-column the right one?"
            )
        is_numbers = all(label.isascii() and label.isdigit() for label in found)
        return tuple(sorted(found, key=lambda label: (int(label) if is_numbers else 0, label)))

    @functools.cached_property
    def _training(self) -> list[Labelled]:
        return read_labelled(self._file(self.config.data.train_subset), self._columns)

    @functools.cached_property
    def _beginning(self) -> Beginning:
        return find_beginning(self.config, self.options.init_from)

    @property
    def _columns(self) -> Columns:
        given = self.options
        return Columns(text=given.text_column, pair=given.text_pair_column, label=given.label_column)

    def _file(self, split: str) -> Path:
        data = self.config.data
        if data.data is None:
            raise DataError(
                "--task bert_classify needs --data, a folder with a file of texts and labels for each split"
            )
        splits = (data.train_subset, *data.valid_subsets)
        return find_split(Path(data.data).expanduser(), split, suffixes=SUFFIXES, other_splits=splits)

    def _numbers(self, texts: Sequence[Labelled], path: Path) -> Tensor:
        """The number of each label, (n,). Raises DataError for a label that is not in the training split."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        for text in texts:
            if text.label not in numbers:
                raise DataError(
                    f"{path}, line {text.line}: the label {text.label!r} does not occur in"
                    f" {self._file(self.config.data.train_subset)}, which has {', '.join(self.labels)[:200]}: a label"
                    " that is not trained is never predicted; correct it, or train with a text that has it"
                )
        return torch.tensor([numbers[text.label] for text in texts])


class LabelledRows(Dataset[Sample]):
    """Texts as rows of word pieces; `files`: the paths that were read; `lengths`: pieces including [CLS] and [SEP].

    A batch is padded to its longest row, or without padding if `is_packed` (see `packing`). `second`: the beginning of
    the second text of each row. `vocabulary_digest` identifies the numbering of the labels.
    """

    vocabulary_digest: str | None = None

    def __init__(
        self, pieces: Ragged, second: Tensor, labels: Tensor, files: list[Path], *, padding: int,
        is_packed: bool = False,
    ) -> None:  # fmt: skip
        self.files, self.lengths, self._padding, self._is_packed = files, pieces.lengths, padding, is_packed
        self._pieces, self._second, self._labels = pieces, second, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        """`pieces` (length,), and as single numbers `second` and `label`, all int64."""
        return {"pieces": self._pieces[index], "second": self._second[index], "label": self._labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples, in the order of `indices`."""
        return [self[index] for index in indices]

    def collater(self, samples: Sequence[Sample]) -> Batch:
        """input_ids, token_type_ids, attention_mask (n, L) and labels (n,)."""
        input_ids, mask = pad([sample["pieces"] for sample in samples], self._padding)
        second = torch.stack([sample["second"] for sample in samples])  # (n,)
        is_second = (torch.arange(input_ids.shape[1]) >= second[:, None]) & mask
        batch = {
            "input_ids": input_ids,
            "token_type_ids": is_second.long(),
            "attention_mask": mask,
            "labels": torch.stack([sample["label"] for sample in samples]),
        }
        return bert_packing.pack(batch, places=()) if self._is_packed else batch


def _encoded(texts: Sequence[Labelled], begin: Beginning, path: Path) -> tuple[Ragged, Tensor]:
    """The pieces of each row with [CLS] and [SEP], and the beginning of its second text, (n,)."""
    first, last = begin.id_of("[CLS]"), begin.id_of("[SEP]")
    columns = [[ids.tolist() for ids in begin.encode(column)] for column in zip(*(text.texts for text in texts))]
    room, rows, second, cut = begin.most_pieces - 1 - len(columns), [], [], 0
    for parts in zip(*columns):
        cut += sum(map(len, parts)) > room
        kept = _fitting(parts, room)
        rows.append([first, *(number for part in kept for number in (*part, last))])
        second.append(len(kept[0]) + 2)
    if cut:
        logger.warning(
            "%s: %d of %d texts are longer than %d pieces and are truncated at the end (the limits are"
            " max_position_embeddings and --max-pred-length)",
            path, cut, len(texts), begin.most_pieces,
        )  # fmt: skip
    return Ragged(rows), torch.tensor(second)


def _fitting(parts: Sequence[list[int]], room: int) -> list[list[int]]:
    """The texts of a row truncated to `room` pieces, the longer of two first, as in transformers."""
    if len(parts) == 1:
        return [parts[0][:room]]
    one, two = parts
    # an odd piece goes to the longer text, as does any room that the shorter one leaves
    half = room // 2 + (room % 2 if len(one) > len(two) else 0)
    return [one[: max(half, room - len(two))], two[: max(room - half, room - len(one))]]


def _logits(model: nn.Module, sample: Batch) -> Tensor:
    logits: Tensor = model(sample["input_ids"], sample["token_type_ids"], bert_packing.layout_of(sample))
    return logits
