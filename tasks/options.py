"""Task-specific options of the included tasks. Does not import torch, so that `--help` is quick.

Each class is a task's `Options`; a field is a flag, a key of the YAML file and an attribute of `self.options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetseq import ConfigError, option

MASK_PROB = 0.15  # Devlin et al. 2018


def _init_from(what: str) -> Any:
    return option(
        None,
        f"load {what} from a Hugging Face directory, such as `hetseq checkpoints export --format hf` writes",
        metavar="DIR",
        per_node=True,
    )


def _activation_checkpointing() -> Any:
    return option(
        False,
        "keep only the inputs of layers for backward, which recomputes the layers: less memory, more time, identical"
        " results",
        per_node=True,
    )


def _local_copy() -> Any:
    return option(
        None,
        "records: copy the files of this run to a folder on a disk of this node, unless already there, and read them"
        " there",
        metavar="DIR",
        per_node=True,
    )


def _no_packing() -> Any:
    return option(False, "keep padded batches and compute their padding too, as other implementations do")


@dataclass(frozen=True)
class BertOptions:
    """Pre-training of BERT."""

    mask_prob: float = option(
        MASK_PROB, "records: fraction of words to mask in training; validation always masks 0.15", metavar="X"
    )
    whole_words: bool = option(False, "records: mask either all pieces of a word or none, never single pieces")
    no_packing: bool = _no_packing()
    init_from: str | None = _init_from("the network")
    activation_checkpointing: bool = _activation_checkpointing()
    local_copy: str | None = _local_copy()

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise ConfigError(f"--mask-prob {self.mask_prob:g}: expected more than 0 and less than 1")


@dataclass(frozen=True)
class BertNerOptions:
    """Token classification (NER): columns of words and tags in `--data`, a BERT with a tag head."""

    no_packing: bool = _no_packing()
    init_from: str | None = _init_from("the encoder and the vocabulary")
    activation_checkpointing: bool = _activation_checkpointing()


@dataclass(frozen=True)
class BertClassifyOptions:
    """Text classification: CSV, TSV or JSONL in `--data`, a BERT with a label head."""

    no_packing: bool = _no_packing()
    init_from: str | None = _init_from("the encoder and the vocabulary")
    activation_checkpointing: bool = _activation_checkpointing()
    text_column: str | None = option(
        None,
        "column of the text, by name, or by number from 1 in a file without a header line; default: text or sentence",
        metavar="NAME",
    )
    text_pair_column: str | None = option(
        None, "column of a second text, paired with the first; default: none", metavar="NAME"
    )
    label_column: str | None = option(
        None, "column of the label; default: label or category, or the other of two columns", metavar="NAME"
    )
    fresh_pooler: bool = option(
        False, "initialise the pooler of --init-from anew: pre-training fitted it to pairs of passages"
    )

    def __post_init__(self) -> None:
        if self.fresh_pooler and self.init_from is None:
            raise ConfigError("--fresh-pooler: without --init-from all weights are random; leave it out, or name a DIR")


@dataclass(frozen=True)
class GptOptions:
    """Training of a causal language model."""

    init_from: str | None = _init_from("the network")
    activation_checkpointing: bool = _activation_checkpointing()
    local_copy: str | None = _local_copy()


@dataclass(frozen=True)
class HfCausalLmOptions:
    """A causal language model of transformers: text, JSONL, chats or records in `--data`."""

    model: str | None = option(
        None,
        "directory of the model as transformers reads it: config.json, tokenizer, and weights unless they are to be"
        " random",
        metavar="DIR",
        per_node=True,
    )
    lora_rank: int | None = option(
        None, "train LoRA adapters of this rank, and none of the model's own weights; default: all weights", metavar="N"
    )
    lora_alpha: float | None = option(
        None, "the adapters' factor is alpha / rank; default: twice the rank", metavar="A"
    )
    lora_targets: str | None = option(
        None,
        "the modules that get adapters, by the ends of their names, such as q_proj,v_proj, or all-linear; default:"
        " peft's for the architecture",
        metavar="NAMES",
    )
    max_length: int | None = option(
        None, "tokens of a row at most; default: 1024, or as many as the model takes", metavar="N"
    )
    max_new_tokens: int = option(64, "hetseq predict: tokens of a continuation at most", metavar="N")
    activation_checkpointing: bool = _activation_checkpointing()

    def __post_init__(self) -> None:
        for name, value in (("--lora-rank", self.lora_rank), ("--max-new-tokens", self.max_new_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: expected 1 or more")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"--max-length {self.max_length}: expected 2 or more, as a token needs one before it")
        if self.lora_alpha is not None and not 0 < self.lora_alpha < float("inf"):
            raise ConfigError(f"--lora-alpha {self.lora_alpha:g}: expected a number above 0")
        for name, given in (("--lora-alpha", self.lora_alpha), ("--lora-targets", self.lora_targets)):
            if given is not None and self.lora_rank is None:
                raise ConfigError(f"{name} {given}: without --lora-rank there are no adapters; leave it out, or add N")
        if self.lora_targets is not None and not self.lora_targets.strip(" ,"):
            raise ConfigError(f"--lora-targets {self.lora_targets!r}: expected names such as q_proj,v_proj")
