"""Small HDF5 files of BERT data, valid or with one fault: synthetic sentences in the 2020 layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Arrays = dict[str, np.ndarray]

#: the types that NVIDIA's scripts write
TYPES = {
    "input_ids": "i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "i4",
    "masked_lm_ids": "i4",
    "next_sentence_labels": "i1",
}


def make_rows(*, rows: int = 8, length: int = 16, predictions: int = 4, vocab: int = 100, seed: int = 0) -> Arrays:
    """Rows of all six data sets: sentences of 4 to `length` tokens with no masked token to `predictions` of them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, length + 1, rows)[:, None]  # (rows, 1)
    column = np.arange(length)
    mask = column < tokens
    ids = np.where(mask, rng.integers(5, vocab, (rows, length)), 0)
    # masked tokens stand in any order, never at 0 ([CLS]) or in the padding
    order = np.argsort(rng.random((rows, length)) + 2 * (~mask | (column == 0)), axis=1)[:, :predictions]
    count = np.minimum(rng.integers(0, predictions + 1, rows)[:, None], tokens - 1)
    is_listed = np.arange(predictions) < count
    arrays = {
        "input_ids": ids,
        "input_mask": mask,
        "segment_ids": mask & (column >= tokens // 2),
        "masked_lm_positions": np.where(is_listed, order, 0),
        "masked_lm_ids": np.where(is_listed, rng.integers(5, vocab, (rows, predictions)), 0),
        "next_sentence_labels": rng.integers(0, 2, rows),
    }
    return {name: array.astype(TYPES[name]) for name, array in arrays.items()}


def write_hdf5(
    path: Path,
    *,
    rows: int = 8,
    length: int = 16,
    predictions: int = 4,
    vocab: int = 100,
    seed: int = 0,
    storage: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Arrays:
    """Write such a file and return its content.

    `overrides` by the name of a data set: an array to write in its place, a type for it, or None to leave it out.
    `storage` is passed to `create_dataset`, such as {"compression": "gzip"}.
    """
    arrays = make_rows(rows=rows, length=length, predictions=predictions, vocab=vocab, seed=seed)
    for name, override in overrides.items():
        if override is None:
            del arrays[name]
        elif isinstance(override, (str, type, np.dtype)):
            arrays[name] = arrays[name].astype(override)
        else:
            arrays[name] = np.asarray(override)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **(storage or {}))
    return arrays
