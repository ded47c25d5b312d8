"""Causal language modelling task: predict every token from earlier ones, with one loss term counted in tokens.

Responsible for the choice of files, the summed loss and the accuracy. `tasks/gpt/dataset.py` reads the files,
`tasks/gpt/model.py` is the network, and `preprocessing/gpt_corpus.py` makes such files from text.

The one idea: the last row of a corpus is short, and in data from other tools any row may be. So the mean loss is the
sum over *all* predicted tokens of a step, on all ranks, divided by their number.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq import ModelCard, Task, register_task
from hetseq.tasks.gpt.dataset import Batch, GptRecords, check_tokens, load_records
from hetseq.tasks.gpt.files import GptFiles, find_records
from hetseq.tasks.gpt.model import GptConfig, GptForCausalLM
from hetseq.tasks.gpt.tokenizer import read_tokens
from hetseq.tasks.nn.activation_checkpointing import checkpoint_activations_
from hetseq.tasks.nn.huggingface import read_gpt, write_pretrained
from hetseq.tasks.options import GptOptions
from hetseq.tasks.rows.local_copy import LocalCopy

logger = logging.getLogger(__name__)


@register_task("gpt")
class GptTask(Task):
    """`--task gpt`: records in `--data`, the network of GPT-2 or Llama in `--config-file`.

    `--config-file` and `--dict` default to `config.json` and `tokenizer.json` in the folder of the data. `--init-from`
    names a Hugging Face directory instead, and training starts from its weights. `--dropout P` replaces all rates of
    the configuration.
    """

    Options = GptOptions

    def load_dataset(self, split: str) -> GptRecords:
        """The rows of a split in the index. Raises DataError and MissingSplitError."""
        index, config_file, tokenizer = (
            find_records(self._files.data),
            self._files.config_file(),
            self._files.tokenizer_file(),
        )
        config = GptConfig.from_json_file(config_file)
        if tokenizer is not None:
            check_tokens(index, read_tokens(tokenizer), tokenizer)
        dataset = load_records(
            index, split, config_file=config_file, vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings, num_file=self.config.data.num_file,
            local_copy=self._local_copy,
        )  # fmt: skip
        dataset.vocabulary_digest = index.vocab_sha256
        # for the nodes of a run to compare; files named by options are compared separately
        if self.config.task.config_file is None:
            dataset.files.append(config_file)
        if tokenizer is not None and self.config.task.vocab_file is None:
            dataset.files.append(tokenizer)
        logger.info("%s: %d rows from %s", split, len(dataset), self.config.data.data)
        return dataset

    def build_model(self) -> nn.Module:
        """The network of the configuration; with `--init-from`, the pre-trained network of the directory."""
        rate, config_file = self.config.task.dropout, self._files.config_file()
        if self.options.init_from is not None:
            model = read_gpt(config_file.parent, dropout=rate)
        else:
            config = GptConfig.from_json_file(config_file)
            model = GptForCausalLM(config if rate is None else config.with_dropout(rate))
        if self.options.activation_checkpointing:
            checkpoint_activations_(model)
        return model

    def export(self, model: nn.Module, folder: Path) -> None:
        """A directory for transformers, with the tokenizer if there is one. Raises DataError."""
        write_pretrained(model, folder, tokenizer_file=self._files.tokenizer_file())

    def model_card(self) -> ModelCard:
        """What the card of the exported model says."""
        return ModelCard(
            about="A causal language model, which `transformers.AutoModelForCausalLM` opens.",
            library_name="transformers", pipeline_tag="text-generation", base_model=self._files.init_folder,
        )  # fmt: skip

    def count(self, sample: Batch) -> dict[str, float]:
        """Predicted tokens."""
        return {"loss": len(sample["target_positions"])}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Cross entropy in nats, summed over the predicted tokens."""
        logits, targets = _predicted(model, sample)
        return {"loss": F.cross_entropy(logits, targets, reduction="sum")}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`token_accuracy`: how often the most likely token is the correct one."""
        logits, targets = _predicted(model, sample)
        correct = torch.sum(logits.argmax(dim=1) == targets).item()  # sync, in validation only
        return {"token_accuracy": (float(correct), float(len(targets)))}

    @functools.cached_property
    def _files(self) -> GptFiles:
        return GptFiles(self.config, self.options.init_from)

    @functools.cached_property
    def _local_copy(self) -> LocalCopy | None:
        given = self.options.local_copy
        return None if given is None else LocalCopy(Path(given).expanduser())


def _predicted(model: nn.Module, sample: Batch) -> tuple[Tensor, Tensor]:
    """Logits (m, vocab_size) and the correct tokens, (m,)."""
    ids, positions = sample["input_ids"], sample["target_positions"]
    return model(ids, positions), ids.flatten().index_select(0, positions + 1)
