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
