"""Small files of tagged words and of labelled texts, and the vocabulary and network for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetseq import Task, registry
from hetseq import config as options
from hetseq.task import make_task

PIECES = ["the", "cat", "sat", "in", "paris", "on", "un", "##walk", "##ed", "walk", "anna", "bob", ".", "mat"]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PIECES]
CONFIG = {
    "vocab_size": len(TOKENS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 12, "initializer_range": 0.5,
}  # fmt: skip
#: the last word is three pieces
TAGGED = "Anna\tB-PER\nsat\tO\nin\tO\nParis\tB-LOC\n.\tO\n\nthe\tO\ncat\tO\nunwalked\tO\n"
TEXTS = 'text,category\nthe cat sat,cat\n"anna, bob",people\nunwalked mat,cat\nin paris,place\n'


def write_network(folder: Path, **changes: Any) -> list[str]:
    """A configuration and a vocabulary, as words of a command line."""
    (folder / "network.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "words.txt").write_text("".join(f"{token}\n" for token in TOKENS))
    return ["--config-file", str(folder / "network.json"), "--dict", str(folder / "words.txt")]


def make(name: str, data: Path, words: list[str]) -> Any:
    """An included task by its name."""
    config = options.complete(options.parse(["--task", name, "--data", str(data), "--save-dir", "none", *words]))
    task: Task = make_task(registry.find_task(name), config)
    return task


def batch_of(dataset: Any, *indices: int) -> Any:
    """These samples, or all, as the loader would give them."""
    return dataset.collater(dataset.__getitems__(list(indices or range(len(dataset)))))
