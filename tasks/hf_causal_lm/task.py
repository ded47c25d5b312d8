"""Any causal language model of transformers, all its weights or LoRA adapters: one loss term, counted in tokens.

Responsible for the summed loss, the figures of validation, and continuations; `model` makes the network, `dataset` the
batches, `export` the directory for other programs.

The one idea: an answer has few tokens and a document many, so a mean over samples would depend on how a step is cut.
The mean loss is the sum over all predicted tokens of a step, on all ranks, divided by their number.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetseq import ConfigError, ModelCard, Task, register_task
from hetseq.tasks.hf_causal_lm import export
from hetseq.tasks.hf_causal_lm import model as networks
from hetseq.tasks.hf_causal_lm.dataset import Batch, CausalRows, load_rows
from hetseq.tasks.hf_causal_lm.files import CausalLmFiles, has_weights
from hetseq.tasks.hf_causal_lm.tokenizer import Tokenizer, open_tokenizer
from hetseq.tasks.options import HfCausalLmOptions

logger = logging.getLogger(__name__)

_LONGEST = 1024  # tokens of a row unless --max-length says otherwise
_PADDING = 0  # a token that attention leaves out


@register_task("hf_causal_lm")
class HfCausalLmTask(Task):
    """`--task hf_causal_lm`: a model of transformers in `--model`, and text, JSONL, chats or records in `--data`.

    All weights are trained, or with `--lora-rank` adapters. The base under adapters has 16 bits with `--precision
    bf16`, and no checkpoint holds it. `--dropout P` replaces all rates of the model, and the adapters have the same.
    """

    Options = HfCausalLmOptions

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._loaded: list[CausalRows] = []
        self._is_packed, self._has_told_of_cut, self._has_exported_adapters = True, False, False
        self._predicted_only = WeakKeyDictionary[nn.Module, networks.PredictedOnly]()
        #: a batch, with its logits and targets
        self._kept: tuple[Batch, tuple[Tensor, Tensor]] | None = None

    def load_dataset(self, split: str) -> CausalRows:
        """The rows of a split. Raises DataError and MissingSplitError."""
        dataset = load_rows(
            self._files, split, vocab_size=networks.vocab_size(self._network), max_length=self._max_length()
        )
        self._loaded.append(dataset)
        if self.config.distributed.delayed_init:
            dataset.is_packed = self._keeps_small_documents_apart
        return dataset

    def build_model(self) -> nn.Module:
        """The network of `--model`, on the CPU."""
        model = networks.build(self._folder, self._setting())
        if self.config.distributed.delayed_init:
            self._is_packed = self._keeps_small_documents_apart
        else:
            self._is_packed = networks.keeps_documents_apart(model, self._folder)
        if not self._is_packed:
            logger.info(
                "%s does not keep documents in one row apart: each has a row of its own", networks.architecture(model)
            )
        for dataset in self._loaded:
            dataset.is_packed = self._is_packed
        return model  # type: ignore[no-any-return]

    def export(self, model: nn.Module, folder: Path, merge: bool = False) -> None:
        """An adapter folder of peft, or a directory that transformers opens, with the tokenizer. Raises ConfigError."""
        export.write(model, folder, self._tokenizer, is_merged=merge)
        self._has_exported_adapters = hasattr(model, "peft_config") and not merge

    def model_card(self) -> ModelCard:
        """What the card of the exported model says."""
        adapted, is_lora = self._has_exported_adapters, self.options.lora_rank is not None
        kind = "LoRA adapters for a causal language model" if adapted else "A causal language model"
        merged = ", with LoRA adapters merged into it" if is_lora and not adapted else ""
        opener = "peft.AutoPeftModelForCausalLM" if adapted else "transformers.AutoModelForCausalLM"
        return ModelCard(
            about=f"{kind}{merged}; `{opener}` opens it.", library_name="peft" if adapted else "transformers",
            pipeline_tag="text-generation", base_model=self._folder if has_weights(self._folder) else None,
            tags=("lora",) if is_lora else (),
        )  # fmt: skip

    def count(self, sample: Batch) -> dict[str, float]:
        """Predicted tokens."""
        return {"loss": len(sample["target_positions"])}

    def loss(self, model: nn.Module, sample: Batch) -> dict[str, Tensor]:
        """Cross entropy in nats, summed over the predicted tokens."""
        found = self._predicted(model, sample)
        if not torch.is_grad_enabled():  # in validation, where `metrics` asks for the same at once
            self._kept = sample, found
        return {"loss": _cross_entropy(*found)}

    def metrics(self, model: nn.Module, sample: Batch) -> dict[str, tuple[float, float]]:
        """`token_accuracy`: how often the most likely token is the correct one; and nats, for `summarise`."""
        kept, self._kept = self._kept, None
        logits, targets = kept[1] if kept is not None and kept[0] is sample else self._predicted(model, sample)
        correct, nats = torch.sum(logits.argmax(dim=1) == targets), _cross_entropy(logits, targets)
        tokens = float(len(targets))
        return {"token_accuracy": (float(correct), tokens), "perplexity": (float(nats), tokens)}  # sync, in validation

    def summarise(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """`token_accuracy`, and `perplexity`: e to the power of the mean loss."""
        means = super().summarise(sums)
        nats = means["perplexity"]
        return {**means, "perplexity": math.exp(nats) if nats < 700 else math.inf}

    def predictions(self, model: nn.Module, sample: Batch) -> list[str]:
        """The most likely continuation of each text, or the next answer of each conversation, as a JSON string.

        It continues at most as many of the last tokens of a prompt as leave the model room for `--max-new-tokens`.
        """
        prompts, ids, most = [], sample["input_ids"].flatten(), self._longest_prompt
        if not self._has_told_of_cut and (sample["prompt_lengths"] > most).any():
            self._has_told_of_cut = True
            logger.warning("the model has no room for the beginning of some prompts: their last %d tokens count", most)
        for start, length in zip(sample["starts"].tolist(), sample["prompt_lengths"].tolist()):
            prompts.append(ids[start + max(0, length - most) : start + length].tolist())
        tokens, mask = _padded_left(prompts)
        tokens, mask = (rows.to(ids.device) for rows in (tokens, mask))
        new = networks.continuations(model, tokens, mask, most=self.options.max_new_tokens)
        if self._tokenizer is None:
            return [json.dumps(row) for row in new.tolist()]
        texts = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return [json.dumps(text, ensure_ascii=False) for text in texts]

    @functools.cached_property
    def _files(self) -> CausalLmFiles:
        return CausalLmFiles(self.config, self.options.model)

    @functools.cached_property
    def _folder(self) -> Path:
        return self._files.folder()

    @functools.cached_property
    def _network(self) -> Any:
        return networks.read_config(self._folder)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """None: the directory has none, and the data are records."""
        return open_tokenizer(self._folder) if self._files.tokenizer_files() else None

    @functools.cached_property
    def _keeps_small_documents_apart(self) -> bool:
        """Found out before `build_model`, whose model has no numbers with --delayed-init."""
        return networks.small_keeps_documents_apart(self._folder, self._setting())

    def _setting(self) -> networks.Setting:
        lora, dtype = self._lora(), torch.float32
        if self.config.optimization.precision == "fp64":
            dtype = torch.float64
        elif self.config.optimization.precision == "bf16" and lora is not None:
            dtype = torch.bfloat16
        return networks.Setting(dtype, self.config.task.dropout, lora, self.options.activation_checkpointing)

    def _max_length(self) -> int | None:
        """The longest row, in tokens; None: any, for records. Raises ConfigError for more than the model takes."""
        most, given = networks.most_positions(self._network), self.options.max_length
        if given is None:
            return most if self._files.records() is not None else min(_LONGEST, most or _LONGEST)
        if most is not None and given > most:
            raise ConfigError(
                f"--max-length {given}: the model in {self._folder} has {most} positions; give at most as many"
            )
        return int(given)

    @functools.cached_property
    def _longest_prompt(self) -> int:
        """The tokens that `predictions` continues at most. Raises ConfigError if there is no room for any."""
        positions, new = networks.most_positions(self._network), self.options.max_new_tokens
        if positions is None:
            return sys.maxsize
        if new >= positions:
            raise ConfigError(
                f"--max-new-tokens {new}: the model in {self._folder} has {positions} positions, for the prompt too:"
                " give fewer"
            )
        return int(positions - new)

    def _lora(self) -> networks.Lora | None:
        options = self.options
        if options.lora_rank is None:
            return None
        alpha = 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
        targets = tuple(filter(None, map(str.strip, (options.lora_targets or "").split(","))))
        return networks.Lora(options.lora_rank, alpha, targets)

    def _predicted(self, model: nn.Module, sample: Batch) -> tuple[Tensor, Tensor]:
        """Logits (m, vocabulary) and the correct tokens, (m,)."""
        ids, places = sample["input_ids"], sample["target_positions"]
        positions = sample["position_ids"] if self._is_packed else None
        if model not in self._predicted_only:
            self._predicted_only[model] = networks.PredictedOnly(model)
        logits = self._predicted_only[model].logits(model, ids, positions, places)
        return logits, ids.flatten().index_select(0, places + 1)


def _padded_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens (n, L) int64 that end together, and the mask (n, L) int64 of real ones."""
    longest = max(map(len, prompts))
    tokens = [[_PADDING] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed, in 32 bits or more."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, reduction="sum")
