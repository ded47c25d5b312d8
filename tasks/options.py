"""The options that included tasks have besides those of every task. Imports no torch, so that `--help` is quick.

Each class is a task's `Options`; a field is a flag, a key of the YAML file and an attribute of `self.options`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetseq import option


@dataclass(frozen=True)
class BertOptions:
    """Pre-training of BERT."""

    whole_words: bool = option(False, "records: mask all pieces of a word or none, not single pieces")
    no_packing: bool = option(False, "compute the padding of batches too, as networks elsewhere do")


@dataclass(frozen=True)
class GptOptions:
    """Training of a causal language model."""

    init_from: str | None = option(
        None,
        "begin with the model in a directory of Hugging Face (GPT-2 or Llama), in place of a fresh one",
        metavar="DIR",
        per_node=True,
    )
