"""BERT pre-training: masked words and next sentences, two loss terms with a count each.

Responsible for which files a run needs, for the two sums and for the two accuracies. What is in the files is the affair
of `hdf5_dataset` and `dataset`, the network that of `model`; how text becomes such files, that of
`preprocessing/bert_corpus.py`.

The one idea: masked words are many and unequally spread, sentences are few. So the mean loss of masked words is their
sum over *all* masked words of a step, wherever they were computed, and a worker's own mean never appears.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq import DataError, Task, register_task
from hetseq.tasks.bert import packing as bert_packing
from hetseq.tasks.bert.dataset import BertRecords, find_records, load_records
from hetseq.tasks.bert.hdf5_dataset import Batch, BertDataset, folder_of, hdf5_names, load_bert
from hetseq.tasks.bert.masking import Masking
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.bert.vocab import check_same_vocab, check_vocab, find_vocab_in, read_vocab
from hetseq.tasks.nn.activation_checkpointing import checkpoint_activations_
from hetseq.tasks.nn.huggingface import init_config, read_bert, read_files, write_pretrained
from hetseq.tasks.options import MASK_PROB, BertOptions
from hetseq.tasks.rows.local_copy import LocalCopy
from hetseq.tasks.rows.record_index import Index, vocab_digest

logger = logging.getLogger(__name__)

_CONFIG_NAME, _VOCAB_NAME = "bert_config.json", "vocab.txt"
_VALIDATION_SEED = 0
_MAKE_DATA = (
    "`python -m hetseq.preprocessing.bert_corpus --output DIR` makes such a folder, from your text with --input, else"
    " from the text that comes with Python"
)


@register_task("bert")
class BertTask(Task):
    """`--task bert`: records or HDF5 files in `--data`, the network in `--config-file`.

    Where `--config-file` or `--dict` is left out, `bert_config.json` and `vocab.txt` in the folder of the data are
    taken. `--dropout P` stands for both rates of the configuration. `--init-from DIR` goes on with the network of a
    directory of Hugging Face, which then says what `--config-file` would. Batches are packed, as `packing` does
    it, unless there is `--no-packing` or `--compile`: losses and gradients are the same, dropout draws other numbers.
    """

    Options = BertOptions

    def load_dataset(self, split: str) -> BertDataset | BertRecords:
        """The rows of a split: that the index names, or of the HDF5 files whose names contain it.

        Raises DataError and MissingSplitError.
        """
        data, config = self._data(), self._bert_config()
        index = find_records(data, hdf5_names(data))
        dataset: BertDataset | BertRecords
        if index is None:
            if self._local_copy is not None:
                raise DataError(
                    f"--local-copy is for records, and --data {data} holds none: make records of its HDF5 files,"
                    f" `python -m hetseq.preprocessing.convert_hdf5 --input {data} --output DIR`, or leave the option"
                    " out"
                )
            if self.options.mask_prob != MASK_PROB or self.options.whole_words:
                option = "--whole-words" if self.options.whole_words else f"--mask-prob {self.options.mask_prob:g}"
                raise DataError(
                    f"{option} is for records, and the masks of the HDF5 files in --data {data} were drawn when they"
                    f" were made: make records of them, `python -m hetseq.preprocessing.convert_hdf5 --input {data}"
                    " --output DIR`, or leave the option out"
                )
            dataset = load_bert(
                data, split, vocab_size=config.vocab_size, max_positions=config.max_position_embeddings,
                type_vocab_size=config.type_vocab_size, num_file=self.config.data.num_file,
                is_packed=self._is_packed,
            )  # fmt: skip
            self._check_other_splits(dataset.files, split)
        else:
            dataset = self._records(index, split, config)
        vocab = self._vocab_file()
        dataset.vocabulary_digest = None if vocab is None else vocab_digest(read_vocab(vocab))
        # for the nodes of a run to compare; what options name is compared by itself
        own = [self._config_file() if self.config.task.config_file is None else None]
        own += [self._vocab_file() if self.config.task.vocab_file is None else None]
        own += [] if self._init_folder is None else read_files(self._init_folder)
        dataset.files = [*dataset.files, *dict.fromkeys(path for path in own if path is not None)]
        logger.info("%s: %d rows from %s", split, len(dataset), self.config.data.data)
        return dataset

    def build_model(self) -> nn.Module:
        """The network of the configuration, or of the directory that `--init-from` names."""
        config, rate = self._bert_config(), self.config.task.dropout
        if self._init_folder is not None:
            model = read_bert(self._init_folder, heads_may_be_missing=True, dropout=rate)
        else:
            model = BertForPreTraining(config if rate is None else config.with_dropout(rate))
        if self.options.activation_checkpointing:
            checkpoint_activations_(model)
        return model

    def export(self, model: nn.Module, folder: Path) -> None:
        """A directory for transformers, with the vocabulary if there is one. Raises DataError."""
        write_pretrained(model, folder, vocab_file=self._vocab_file())

    def count(self, sample: Batch) -> dict[str, float]:
        """Masked words and sentence pairs."""
        return {"mlm": len(sample["masked_ids"]), "nsp": len(sample["next_sentence_labels"])}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Both cross entropies in nats: summed over the masked words, and over the pairs."""
        words, pairs = _outputs(model, sample, sample["masked_ids"])
        return {
            "mlm": words,
            "nsp": F.cross_entropy(pairs, sample["next_sentence_labels"], reduction="sum"),
        }

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`mlm_accuracy` of the masked words, `nsp_accuracy` of the pairs, and what copying cannot give.

        A tenth of the masked words stand in the input as they are, and a network soon learns to copy those. So the loss
        in nats and the accuracy of the others are told apart: `hidden_mlm` and `hidden_accuracy`.
        """
        words, pairs = _outputs(model, sample)
        labels = sample["masked_ids"]
        is_hidden = sample["input_ids"].flatten()[sample["masked_positions"]] != labels  # (m,)
        hidden, hidden_labels = words[is_hidden], labels[is_hidden]
        loss = F.cross_entropy(hidden, hidden_labels, reduction="sum").item()  # sync, in validation only
        return {
            "mlm_accuracy": _hits(words, labels),
            "nsp_accuracy": _hits(pairs, sample["next_sentence_labels"]),
            "hidden_mlm": (loss, float(len(hidden))),
            "hidden_accuracy": _hits(hidden, hidden_labels),
        }

    def _records(self, index: Index, split: str, config: BertConfig) -> BertRecords:
        vocab = self._vocab_file()
        if vocab is None:
            raise DataError(
                f"{index.path.parent} has no {_VOCAB_NAME}, without which the words of records cannot be masked: give"
                " --dict FILE"
            )
        if config.type_vocab_size < 2:
            raise DataError(
                f"{self._config_file()} has type_vocab_size {config.type_vocab_size}, and rows of records have two"
                " segments: give a --config-file with 2 or more"
            )
        # what is validated with is masked in the same way in every run, whatever its options, so that runs compare
        trains = split == self.config.data.train_subset
        seed, share = (self.config.task.seed, self.options.mask_prob) if trains else (_VALIDATION_SEED, MASK_PROB)
        return load_records(
            index, split, read_vocab(vocab), max_positions=config.max_position_embeddings, seed=seed,
            masking=Masking(share, whole_words=self.options.whole_words), num_file=self.config.data.num_file,
            is_packed=self._is_packed, local_copy=self._local_copy,
        )  # fmt: skip

    def _bert_config(self) -> BertConfig:
        path = self._config_file()
        config = BertConfig.from_json_file(path)
        file = self._vocab_file()
        if file is not None:
            check_vocab(
                read_vocab(file), file, config_path=path, vocab_size=config.vocab_size, pad_token_id=config.pad_token_id
            )
        return config

    def _check_other_splits(self, files: list[Path], split: str) -> None:
        """Raise DataError for a file that would be both trained on and validated with."""
        splits = {self.config.data.train_subset, *self.config.data.valid_subsets}
        for other in sorted(splits - {split}):
            both = [path for path in files if other in path.name]
            if both:
                raise DataError(
                    f"{both[0]} belongs to two splits, because its name contains both {split!r} and {other!r}: rename"
                    " it, or give --train-subset and --valid-subset longer words"
                )

    def _data(self) -> Path:
        if self.config.data.data is None:
            raise DataError(f"the task bert needs --data, a folder of records or of HDF5 files: {_MAKE_DATA}")
        return Path(self.config.data.data).expanduser()

    def _config_file(self) -> Path:
        given = self.config.task.config_file
        if self._init_folder is not None:
            return init_config(self._init_folder, given)
        path = folder_of(self._data()) / _CONFIG_NAME if given is None else Path(given).expanduser()
        if given is None and not os.path.isfile(path):
            raise DataError(
                f"the task bert needs the sizes of its network: give --config-file a bert_config.json (there is none in"
                f" {path.parent} either); {_MAKE_DATA}"
            )
        return path

    @property
    def _is_packed(self) -> bool:
        return bert_packing.is_wanted(self.config, no_packing=self.options.no_packing)

    def _vocab_file(self) -> Path | None:
        """The vocabulary, to compare with the configuration; training itself does without."""
        given = self.config.task.vocab_file
        path = folder_of(self._data()) / _VOCAB_NAME if given is None else Path(given).expanduser()
        found = path if given is not None or os.path.isfile(path) else None
        own = None if self._init_folder is None else find_vocab_in(self._init_folder)
        if own is None:
            return found
        if found is not None:
            check_same_vocab(own, found)
        return own

    @functools.cached_property
    def _local_copy(self) -> LocalCopy | None:
        given = self.options.local_copy
        return None if given is None else LocalCopy(Path(given).expanduser())

    @property
    def _init_folder(self) -> Path | None:
        given = self.options.init_from
        return None if given is None else Path(given).expanduser()


def _outputs(model: nn.Module, sample: Batch, masked_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    layout = bert_packing.layout_of(sample)
    masked = sample["masked_positions"], masked_ids
    words, pairs = model(sample["input_ids"], sample["token_type_ids"], layout, *masked)
    return words, pairs


def _hits(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    correct = torch.sum(logits.argmax(dim=1) == labels).item()  # sync, in validation only
    return float(correct), float(len(labels))
