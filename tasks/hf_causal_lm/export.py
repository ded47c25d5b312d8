"""Writes a trained causal language model into a directory for other programs: an adapter, or a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetseq import ConfigError
from hetseq.tasks.hf_causal_lm.tokenizer import Tokenizer


def write(model: Any, folder: Path, tokenizer: Tokenizer | None, *, is_merged: bool) -> None:
    """Write the model and its tokenizer, with the functions of transformers and peft.

    A PeftModel becomes an adapter folder, or with `is_merged` a whole model: the adapters are added to the base, which
    keeps its type. The model is not to be used afterwards. Raises ConfigError if there is nothing to merge, and if an
    adapter cannot be merged without changing another module.
    """
    is_adapted = hasattr(model, "peft_config")
    if is_merged and not is_adapted:
        raise ConfigError("--merge: the run has trained all weights and no adapters, so its export is a whole model")
    if is_merged:
        _check_shared(model)
    if is_adapted and not is_merged:
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        whole = model.merge_and_unload() if is_adapted else model
        whole.config.use_cache = True
        whole.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def _check_shared(model: Any) -> None:
    """Raise ConfigError for adapters over a weight that two modules share, as tied embeddings do."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        adapted = next((name for name in shared if name.endswith(".base_layer.weight")), None)
        if adapted is not None and len(shared) > 1:
            others = [name for name in shared if name != adapted]
            raise ConfigError(
                f"--merge: there are adapters on {_plain(adapted)}, whose weight the model uses in {_plain(others[0])}"
                " too, where they do not count: export the adapters without --merge"
            )


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".base_layer")
