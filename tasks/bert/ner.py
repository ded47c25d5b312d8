"""Token classification with BERT, such as named entities: one loss over labelled words, F1 of whole entities.

Responsible for converting words to rows of pieces and predictions back to tags, for the summed loss and for the
metrics; `tasks/rows/tagged_words.py` reads the files and interprets tags, and `tasks/bert/heads.py` is the network.

The one idea: the first piece of a word represents it. Its other pieces have no label and are in no count, so all counts
are of words, whatever the vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from hetseq import DataError, ModelCard, Task, register_task
from hetseq.tasks.bert import packing as bert_packing
from hetseq.tasks.bert.fine_tuning import Beginning, Ragged, find_beginning, pad
from hetseq.tasks.bert.heads import BertForTokenClassification
from hetseq.tasks.nn.activation_checkpointing import checkpoint_activations_
from hetseq.tasks.options import BertNerOptions
from hetseq.tasks.rows.record_index import vocab_digest
from hetseq.tasks.rows.split_files import find_split
from hetseq.tasks.rows.tagged_words import OUTSIDE, SUFFIXES, Sentence, read_sentences, tally

logger = logging.getLogger(__name__)

Sample = dict[str, Tensor]
Batch = dict[str, Any]  # tensors by name; of a packed batch also its Sequences


@register_task("bert_ner")
class BertNerTask(Task):
    """`--task bert_ner`: columns of words and tags in `--data`, a BERT with a tag head.

    The tags come from the training split, sorted. `--init-from DIR` loads the encoder of a Hugging Face directory;
    otherwise the weights are random, and `--config-file` and `--dict` define the network.
    """

    Options = BertNerOptions

    def load_dataset(self, split: str) -> TaggedRows:
        """The sentences of a split. Raises DataError and MissingSplitError."""
        path = self._file(split)
        sentences = self._training if split == self.config.data.train_subset else read_sentences(path)
        files = dict.fromkeys([path, *self._beginning.files])
        rows = _encoded(sentences, self._beginning, self._numbers(sentences, path), path)
        dataset = TaggedRows(
            rows, list(files), padding=self._beginning.config.pad_token_id,
            is_packed=bert_packing.is_wanted(self.config, no_packing=self.options.no_packing),
        )  # fmt: skip
        dataset.vocabulary_digest = vocab_digest(self.labels)
        logger.info("%s: %d sentences from %s, %d tags", split, len(dataset), path, len(self.labels))
        return dataset

    def build_model(self) -> nn.Module:
        """The encoder with a head for the tags of the training split."""
        begin = self._beginning
        model = BertForTokenClassification(begin.config, self.labels, dropout=begin.head_dropout)
        begin.fill_(model)
        if self.options.activation_checkpointing:
            checkpoint_activations_(model)
        return model

    def export(self, model: nn.Module, folder: Path) -> None:
        """A directory that transformers opens as BertForTokenClassification. Raises DataError."""
        self._beginning.write(model, folder)

    def model_card(self) -> ModelCard:
        """What the card of the exported model says."""
        return ModelCard(
            about="A BERT that labels words, which `transformers.AutoModelForTokenClassification` opens.",
            library_name="transformers", pipeline_tag="token-classification", base_model=self._beginning.folder,
        )  # fmt: skip

    def count(self, sample: Batch) -> dict[str, float]:
        """Words that have a label: all words that are not truncated."""
        return {"loss": len(sample["positions"])}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Cross entropy in nats, summed over the words."""
        tags = sample["tags"].index_select(0, sample["kept"])
        return {"loss": F.cross_entropy(_logits(model, sample), tags, reduction="sum")}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`f1`, `precision` and `recall` of entities, `token_f1` and `token_accuracy` of words; truncated words are O.

        Each is a quotient of sums over sentences: F1 = 2 right / (found + there), as in seqeval's micro average. For
        `token_f1`, words tagged O count neither as found nor as there.
        """
        found = there = right = hits = words = tagged = outside_hits = 0
        for predicted, expected in zip(self._tags(model, sample), self._expected(sample)):
            entities = tally(predicted, expected)
            found, there, right = found + entities.found, there + entities.there, right + entities.right
            hits += sum(one == other for one, other in zip(predicted, expected))
            words += len(expected)
            tagged += sum(tag != OUTSIDE for tag in (*predicted, *expected))
            outside_hits += sum(one == other == OUTSIDE for one, other in zip(predicted, expected))
        return {
            "f1": (2.0 * right, float(found + there)),
            "precision": (float(right), float(found)),
            "recall": (float(right), float(there)),
            "token_f1": (2.0 * (hits - outside_hits), float(tagged)),
            "token_accuracy": (float(hits), float(words)),
        }

    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        """The tags of each sentence's words, separated by spaces; O for truncated words."""
        return [" ".join(tags) for tags in self._tags(model, sample)]

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The tags of the training split, sorted. Raises DataError if there is only one."""
        tags = sorted({tag for sentence in self._training for tag in sentence.tags})
        if len(tags) < 2:
            raise DataError(
                f"{self._file(self.config.data.train_subset)} gives all words the tag {tags[0]!r}: expected at least"
                " two different tags; does the last column hold the tags?"
            )
        return tuple(tags)

    @functools.cached_property
    def _training(self) -> list[Sentence]:
        return read_sentences(self._file(self.config.data.train_subset))

    @functools.cached_property
    def _beginning(self) -> Beginning:
        return find_beginning(self.config, self.options.init_from)

    def _file(self, split: str) -> Path:
        data = self.config.data
        if data.data is None:
            raise DataError("--task bert_ner needs --data, a folder with a file of words and tags for each split")
        splits = (data.train_subset, *data.valid_subsets)
        return find_split(Path(data.data).expanduser(), split, suffixes=SUFFIXES, other_splits=splits)

    def _numbers(self, sentences: Sequence[Sentence], path: Path) -> Iterator[list[int]]:
        """The numbers of each sentence's tags. Raises DataError for a tag that is not in the training split."""
        numbers = {tag: number for number, tag in enumerate(self.labels)}
        for sentence in sentences:
            for tag, line in zip(sentence.tags, sentence.lines):
                if tag not in numbers:
                    raise DataError(
                        f"{path}, line {line}: the tag {tag!r} does not occur in"
                        f" {self._file(self.config.data.train_subset)}, which has {', '.join(self.labels[:20])}: a tag"
                        " that is not trained is never predicted; correct it, or train with a sentence that has it"
                    )
            yield [numbers[tag] for tag in sentence.tags]

    def _tags(self, model: nn.Module, sample: Batch) -> Iterator[list[str]]:
        """The predicted tags of each sentence's words."""
        numbers = torch.full_like(sample["tags"], -1)
        numbers[sample["kept"]] = _logits(model, sample).argmax(dim=1)
        for row in _by_sentence(numbers, sample):
            yield [self.labels[number] if number >= 0 else OUTSIDE for number in row]

    def _expected(self, sample: Batch) -> Iterator[list[str]]:
        for row in _by_sentence(sample["tags"], sample):
            yield [self.labels[number] for number in row]


class TaggedRows(Dataset[Sample]):
    """Sentences as rows of word pieces; `files`: the paths that were read; `lengths`: pieces including [CLS] and [SEP].

    A batch is padded to its longest row, or without padding if `is_packed` (see `packing`). `vocabulary_digest`
    identifies the numbering of the tags.
    """

    vocabulary_digest: str | None = None

    def __init__(
        self, rows: Sequence[tuple[list[int], list[int], list[int]]], files: list[Path], *, padding: int,
        is_packed: bool = False,
    ) -> None:  # fmt: skip
        self.files, self._padding, self._is_packed = files, padding, is_packed
        pieces, columns, tags = zip(*rows)
        self._pieces, self._columns, self._tags = Ragged(pieces), Ragged(columns), Ragged(tags)
        self.lengths = self._pieces.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        """`pieces` (length,), the `columns` of first pieces of words, and `tags` (words,), all int64.

        A truncated sentence has fewer columns than tags.
        """
        return {"pieces": self._pieces[index], "columns": self._columns[index], "tags": self._tags[index]}

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples, in the order of `indices`."""
        return [self[index] for index in indices]

    def collater(self, samples: Sequence[Sample]) -> Batch:
        """input_ids, token_type_ids, attention_mask (n, L); words (n,) of each sentence; tags of all words, (w,).

        positions (m,) = row * L + column of first pieces; kept (m,): the indices of their words among the w words.
        """
        input_ids, mask = pad([sample["pieces"] for sample in samples], self._padding)
        words = torch.tensor([len(sample["tags"]) for sample in samples])
        starts = words.cumsum(0) - words  # (n,)
        columns = [sample["columns"] for sample in samples]
        batch = {
            "input_ids": input_ids,
            "token_type_ids": torch.zeros_like(input_ids),
            "attention_mask": mask,
            "positions": torch.cat([own + row * input_ids.shape[1] for row, own in enumerate(columns)]),
            "kept": torch.cat([torch.arange(len(own)) + start for own, start in zip(columns, starts)]),
            "tags": torch.cat([sample["tags"] for sample in samples]),
            "words": words,
        }
        return bert_packing.pack(batch, places=("positions",)) if self._is_packed else batch


def _encoded(
    sentences: Sequence[Sentence], begin: Beginning, tags: Iterator[list[int]], path: Path
) -> list[tuple[list[int], list[int], list[int]]]:
    """For each sentence: its pieces with [CLS] and [SEP], the columns of first pieces, and its tags."""
    different = sorted({word for sentence in sentences for word in sentence.words})
    unknown, first, last = (begin.id_of(token) for token in ("[UNK]", "[CLS]", "[SEP]"))
    # a word that the tokenizer drops entirely still has a tag
    pieces_of = {word: ids.tolist() or [unknown] for word, ids in zip(different, begin.encode(different))}
    most, rows, cut_rows, cut_words = begin.most_pieces - 1, [], 0, 0
    for sentence, numbers in zip(sentences, tags):
        pieces, columns = [first], []
        for word in sentence.words:
            if len(pieces) < most:
                columns.append(len(pieces))
            pieces += pieces_of[word]
        cut_rows += len(pieces) > most
        cut_words += len(numbers) - len(columns)
        rows.append(([*pieces[:most], last], columns, numbers))
    if cut_rows:
        logger.warning(
            "%s: %d of %d sentences are longer than %d pieces and are truncated: %d words are not trained"
            " on, and count as O (the limits are max_position_embeddings and --max-pred-length)",
            path, cut_rows, len(sentences), begin.most_pieces, cut_words,
        )  # fmt: skip
    return rows


def _logits(model: nn.Module, sample: Batch) -> Tensor:
    logits: Tensor = model(
        sample["input_ids"], sample["token_type_ids"], bert_packing.layout_of(sample), sample["positions"]
    )  # fmt: skip
    return logits


def _by_sentence(numbers: Tensor, sample: Batch) -> Iterator[list[int]]:
    """The values of the words, split by sentence; sync, in validation only."""
    for row in numbers.split(sample["words"].tolist()):
        yield row.tolist()
