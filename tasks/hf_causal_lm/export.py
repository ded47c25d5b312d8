"""Writes a trained causal language model into a directory for other programs: an adapter, or a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetseq import ConfigError
from hetseq.tasks.hf_causal_lm.tokenizer import Tokenizer


def write(model: Any, folder: Path, tokenizer: Tokenizer | None, *, is_merged: bool) -> None:
    """Write the model and its tokenizer, with the functions of transformers and peft.

    A PeftModel becomes an adapter folder, or with `is_merged` a whole model: the adapters are added to the base, which
    keeps its type. The model is not to be used afterwards. Raises ConfigError if there is nothing to merge.
    """
    is_adapted = hasattr(model, "peft_config")
    if is_merged and not is_adapted:
        raise ConfigError("--merge: the run has trained all weights and no adapters, so its export is a whole model")
    if is_adapted and not is_merged:
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        whole = model.merge_and_unload() if is_adapted else model
        whole.config.use_cache = True
        whole.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
