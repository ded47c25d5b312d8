"""The BERT task on rows with traps, and the reference loop.

Whole stretches of rows have no masked word, so that a rank, a micro-batch or a whole step has none. The reference takes
the global batch in one piece and computes the vocabulary's logits at every position, like the formula in the paper.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.nn.functional as F

from hetseq.tasks.bert.task import BertTask
from tests.support import toys

LENGTH, PREDICTIONS, VOCAB = 12, 3, 40
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": LENGTH, "type_vocab_size": 2,
}  # fmt: skip
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(5, VOCAB))]
BARE = range(8, 50)  # rows without a masked word


class RecordingBert(BertTask):
    """Trained by SGD, whose gradients are kept."""

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return toys.recording(torch.optim.SGD)(parameter_groups, lr=0.1)


def write_folder(folder: Path, rows: int, *, train: str = "x_train", valid: str = "x_valid") -> Path:
    """Two files to train with, one to validate, and the configuration; every file of another integer type."""
    folder.mkdir()
    (folder / "bert_config.json").write_text(json.dumps(CONFIG))
    columns = make_rows(rows)
    cuts = {f"{train}_0": slice(0, rows // 3), f"{train}_1": slice(rows // 3, rows), f"{valid}_0": slice(0, 11)}
    for dtype, (name, cut) in zip(("i4", "u2", "i8"), cuts.items()):
        with h5py.File(folder / f"{name}.hdf5", "w") as file:
            for key, values in columns.items():
                file.create_dataset(key, data=values[cut].astype(dtype))
    return folder


def make_rows(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    """The six columns: lengths from 5 to LENGTH, up to PREDICTIONS masked words, none in BARE."""
    generator = np.random.default_rng(11)
    column = np.arange(LENGTH)
    lengths = generator.integers(5, LENGTH + 1, rows)[:, None]
    mask = column < lengths
    positions = np.zeros((rows, PREDICTIONS), np.int64)
    for row in set(range(rows)) - set(BARE):
        count = generator.integers(1, PREDICTIONS + 1)
        positions[row, :count] = np.sort(generator.choice(np.arange(1, lengths[row, 0]), count, replace=False))
    ids = generator.integers(5, VOCAB, (rows, PREDICTIONS)) * (positions > 0)
    return {
        "input_ids": generator.integers(5, VOCAB, (rows, LENGTH)) * mask,
        "input_mask": mask.astype(np.int64),
        "segment_ids": (column > lengths // 2) * mask,
        "masked_lm_positions": positions,
        "masked_lm_ids": ids,
        "next_sentence_labels": generator.integers(0, 2, rows),
    }


def columns_of(rows: int) -> dict[str, torch.Tensor]:
    """The same, for `loss_of`; the labels are -1 where nothing is masked, as in 2020."""
    made = make_rows(rows)
    labels = np.full((rows, LENGTH), -1)
    for row, (positions, ids) in enumerate(zip(made["masked_lm_positions"], made["masked_lm_ids"])):
        for position, word in zip(positions, ids):
            if position:
                labels[row, position] = word
    return {name: torch.from_numpy(np.asarray(values, np.int64)) for name, values in {**made, "labels": labels}.items()}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over the masked words of the whole batch, plus mean over its pairs."""
    n, length = batch["input_ids"].shape
    words, pairs = model(
        batch["input_ids"], batch["segment_ids"], batch["input_mask"].bool(), torch.arange(n * length)
    )  # fmt: skip
    loss = F.cross_entropy(pairs, batch["next_sentence_labels"])
    labels = batch["labels"].flatten()
    if (labels >= 0).any():
        loss = loss + F.cross_entropy(words, labels, ignore_index=-1)
    return loss
