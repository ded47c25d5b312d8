"""BERT pre-training task: masked words and next sentences, two loss terms with a count each.

Responsible for the choice of files, the two summed losses and the accuracies. `hdf5_dataset` and `dataset` read the
files, `model` is the network, and `preprocessing/bert_corpus.py` makes such files from text.

The one idea: masked words are many and unevenly distributed, sentence pairs are few. So the mean loss of masked words
is their sum over *all* masked words of a step, on all ranks, divided by their number; a rank's own mean never appears.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq import DataError, ModelCard, Task, register_task
from hetseq.tasks.bert import packing as bert_packing
from hetseq.tasks.bert.dataset import BertRecords, load_records
from hetseq.tasks.bert.files import VOCAB_NAME, BertFiles, find_records, hdf5_names
from hetseq.tasks.bert.hdf5_dataset import Batch, BertDataset, load_bert
from hetseq.tasks.bert.masking import Masking
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.tasks.bert.vocab import read_vocab
from hetseq.tasks.nn.activation_checkpointing import checkpoint_activations_
from hetseq.tasks.nn.huggingface import read_bert, write_pretrained
from hetseq.tasks.nn.init_from import read_files
from hetseq.tasks.options import MASK_PROB, BertOptions
from hetseq.tasks.rows.local_copy import LocalCopy
from hetseq.tasks.rows.record_index import Index, vocab_digest

logger = logging.getLogger(__name__)

_VALIDATION_SEED = 0


@register_task("bert")
class BertTask(Task):
    """`--task bert`: records or HDF5 files in `--data`, the network in `--config-file`.

    `--config-file` and `--dict` default to `bert_config.json` and `vocab.txt` in the folder of the data. `--dropout P`
    replaces both rates of the configuration. `--init-from DIR` starts from the network of a Hugging Face directory,
    whose configuration replaces `--config-file`. Batches are packed (see `packing`) unless `--no-packing` or
    `--compile` is given: losses and gradients are the same, but dropout draws other numbers.
    """

    Options = BertOptions

    def load_dataset(self, split: str) -> BertDataset | BertRecords:
        """The rows of a split: those in the index, or those of the HDF5 files whose names contain the split.

        Raises DataError and MissingSplitError.
        """
        data, config = self._files.data, self._files.network()
        index = find_records(data, hdf5_names(data))
        dataset: BertDataset | BertRecords
        if index is None:
            if self._local_copy is not None:
                raise DataError(
                    f"--local-copy is for records, and --data {data} holds none: convert its HDF5 files to records,"
                    f" `python -m hetseq.preprocessing.convert_hdf5 --input {data} --output DIR`, or leave the option"
                    " out"
                )
            if self.options.mask_prob != MASK_PROB or self.options.whole_words:
                option = "--whole-words" if self.options.whole_words else f"--mask-prob {self.options.mask_prob:g}"
                raise DataError(
                    f"{option} is for records, and the masks of the HDF5 files in --data {data} were drawn when they"
                    f" were made: convert them, `python -m hetseq.preprocessing.convert_hdf5 --input {data}"
                    " --output DIR`, or leave the option out"
                )
            dataset = load_bert(
                data, split, vocab_size=config.vocab_size, max_positions=config.max_position_embeddings,
                type_vocab_size=config.type_vocab_size, num_file=self.config.data.num_file,
                is_packed=self._is_packed,
            )  # fmt: skip
            self._files.check_other_splits(dataset.files, split)
        else:
            dataset = self._records(index, split, config)
        vocab = self._files.vocab_file()
        dataset.vocabulary_digest = None if vocab is None else vocab_digest(read_vocab(vocab))
        # for the nodes of a run to compare; files named by options are compared separately
        own = [self._files.config_file() if self.config.task.config_file is None else None]
        own += [self._files.vocab_file() if self.config.task.vocab_file is None else None]
        own += [] if self._files.init_folder is None else read_files(self._files.init_folder)
        dataset.files = [*dataset.files, *dict.fromkeys(path for path in own if path is not None)]
        logger.info("%s: %d rows from %s", split, len(dataset), self.config.data.data)
        return dataset

    def build_model(self) -> nn.Module:
        """The network of the configuration, or the pre-trained one of `--init-from`."""
        config, rate = self._files.network(), self.config.task.dropout
        if self._files.init_folder is not None:
            model = read_bert(self._files.init_folder, heads_may_be_missing=True, dropout=rate)
        else:
            model = BertForPreTraining(config if rate is None else config.with_dropout(rate))
        if self.options.activation_checkpointing:
            checkpoint_activations_(model)
        return model

    def export(self, model: nn.Module, folder: Path) -> None:
        """A directory for transformers, with the vocabulary if there is one. Raises DataError."""
        write_pretrained(model, folder, vocab_file=self._files.vocab_file())

    def model_card(self) -> ModelCard:
        """What the card of the exported model says."""
        return ModelCard(
            about="A BERT with its heads of pre-training, which `transformers.AutoModelForPreTraining` opens.",
            library_name="transformers", pipeline_tag="fill-mask", base_model=self._files.init_folder,
        )  # fmt: skip

    def count(self, sample: Batch) -> dict[str, float]:
        """Masked words and sentence pairs."""
        return {"mlm": len(sample["masked_ids"]), "nsp": len(sample["next_sentence_labels"])}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Both cross entropies in nats, summed over the masked words and over the pairs."""
        words, pairs = _outputs(model, sample, sample["masked_ids"])
        return {
            "mlm": words,
            "nsp": F.cross_entropy(pairs, sample["next_sentence_labels"], reduction="sum"),
        }

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`mlm_accuracy` of the masked words, `nsp_accuracy` of the pairs, and metrics that exclude copying.

        A tenth of the masked words are unchanged in the input, and a network soon learns to copy those. So the loss in
        nats and the accuracy of the others are reported separately: `hidden_mlm` and `hidden_accuracy`.
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
        vocab = self._files.vocab_file()
        if vocab is None:
            raise DataError(
                f"{index.path.parent} has no {VOCAB_NAME}, which is needed to mask the words of records: give"
                " --dict FILE"
            )
        if config.type_vocab_size < 2:
            raise DataError(
                f"{self._files.config_file()} has type_vocab_size {config.type_vocab_size}, but rows of records have"
                " two segments: give a --config-file with 2 or more"
            )
        # validation data are masked identically in every run, whatever its options, so that runs are comparable
        trains = split == self.config.data.train_subset
        seed, share = (self.config.task.seed, self.options.mask_prob) if trains else (_VALIDATION_SEED, MASK_PROB)
        return load_records(
            index, split, read_vocab(vocab), max_positions=config.max_position_embeddings, seed=seed,
            masking=Masking(share, whole_words=self.options.whole_words), num_file=self.config.data.num_file,
            is_packed=self._is_packed, local_copy=self._local_copy,
        )  # fmt: skip

    @functools.cached_property
    def _files(self) -> BertFiles:
        return BertFiles(self.config, self.options.init_from)

    @property
    def _is_packed(self) -> bool:
        return bert_packing.is_wanted(self.config, no_packing=self.options.no_packing)

    @functools.cached_property
    def _local_copy(self) -> LocalCopy | None:
        given = self.options.local_copy
        return None if given is None else LocalCopy(Path(given).expanduser())


def _outputs(model: nn.Module, sample: Batch, masked_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    layout = bert_packing.layout_of(sample)
    masked = sample["masked_positions"], masked_ids
    words, pairs = model(sample["input_ids"], sample["token_type_ids"], layout, *masked)
    return words, pairs


def _hits(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    correct = torch.sum(logits.argmax(dim=1) == labels).item()  # sync, in validation only
    return float(correct), float(len(labels))
