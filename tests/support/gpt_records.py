"""Small folders of a causal language model's records, the task on them, and the reference loop.

Rows are of unequal lengths, and a stretch of them has one token each, with nothing to predict: a rank or a
micro-batch may have samples and nothing to count. The reference takes the global batch in one piece and computes the
logits of every position.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hetseq.preprocessing.records import Ragged, columns_in_json, write_split
from hetseq.tasks.gpt.config import GptConfig
from hetseq.tasks.gpt.dataset import IDS
from hetseq.tasks.gpt.task import GptTask
from hetseq.tasks.rows.record_index import GPT_FORMAT, INDEX, Column, vocab_digest
from tests.support import toys
from tests.support.gpt import GPT2

LENGTH, VOCAB = 14, GPT2.vocab_size
L = 16  # LENGTH, rounded up
TOKENS = ["<|endoftext|>", *(f"w{number}" for number in range(1, VOCAB))]
BARE = range(8, 50)  # rows of one token
Rows = list[list[int]]


class RecordingGpt(GptTask):
    """Trained by SGD, whose gradients are kept."""

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return toys.recording(torch.optim.SGD)(parameter_groups, lr=0.1)


def make_rows(count: int, *, seed: int = 0, bare: Sequence[int] = ()) -> Rows:
    """Rows of 2 to LENGTH tokens, the last of them the longest; those in `bare` have one."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, LENGTH + 1, count)
    lengths[-1] = LENGTH
    lengths[[row for row in bare if row < count]] = 1
    return [generator.integers(0, VOCAB, length).tolist() for length in lengths]


def tokenizer_json(tokens: Sequence[str] = TOKENS) -> dict[str, Any]:
    """A tokenizer whose first token is special and whose others are whole words."""
    first = {"id": 0, "content": tokens[0], "special": True, "normalized": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    vocab = {token: number for number, token in enumerate(tokens)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[0]}
    return {"version": "1.0", "added_tokens": [first | plain], "pre_tokenizer": {"type": "Whitespace"}, "model": model}


def write_folder(
    folder: Path, *, rows_per_file: int = 1000, config: GptConfig = GPT2, is_ragged: bool = True, dtype: str = "U16",
    **splits: Rows,
) -> Path:  # fmt: skip
    """A folder of records with these splits, its configuration, its tokenizer and its index."""
    folder.mkdir(parents=True)
    column = Column(dtype, is_ragged=is_ragged, shape=() if is_ragged else (len(next(iter(splits.values()))[0]),))
    facts = {
        "format": {"name": GPT_FORMAT, "version": 2},
        "vocabulary": {"tokens": len(TOKENS), "sha256": vocab_digest(TOKENS)},
        "columns": columns_in_json({IDS: column}),
        "splits": {
            name: write_split(
                folder, name, [{IDS: ragged(rows) if is_ragged else np.array(rows)}] if rows else [], {IDS: column},
                rows_per_file=rows_per_file,
            )
            for name, rows in splits.items()
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_hugging_face()))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / INDEX).write_text(json.dumps(facts))
    return folder


def ragged(rows: Rows) -> Ragged:
    return Ragged(np.array([token for row in rows for token in row]), np.array([len(row) for row in rows]))


def columns_of(rows: Rows) -> dict[str, torch.Tensor]:
    """For `loss_of`: tokens (rows, LENGTH) and the next token of each, -1 where there is none."""
    ids, labels = torch.zeros(len(rows), LENGTH, dtype=torch.int64), torch.full((len(rows), LENGTH), -1)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
        labels[at, : len(row) - 1] = torch.tensor(row[1:])
    return {"ids": ids, "labels": labels}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the predicted tokens of the whole batch."""
    logits = model(batch["ids"], torch.arange(batch["ids"].numel()))
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-1)
