"""Reading speed of BERT rows: from HDF5 and from records here, and as in 2020, opening the file for every row.

    python bench/rows.py [--packed-rows 400000] [--rounds 5]

Writes three synthetic files in the types of NVIDIA's scripts: a plain one, one packed with gzip that fits unpacked into
HetSeq's cache of a split (20,000 rows both), and one that does not; also the rows of the first as records. Prints
the CPU time of a row, in random batches of 64 rows of 128 tokens, with the files in the page cache; ratios are
taken within a round. Rows of records are masked on reading, rows of HDF5 when they were written. A record is
compared with the plain file and with the packed one, as NVIDIA's scripts and the 2020 HetSeq have it. Ends with a line
of JSON.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from figures import json_line, paired, spread, table

from hetseq.preprocessing.convert_hdf5 import Options, convert
from hetseq.tasks.bert.dataset import BertRecords, load_records
from hetseq.tasks.bert.hdf5_dataset import BertDataset, load_bert
from hetseq.tasks.bert.hdf5_reader import NAMES
from hetseq.tasks.bert.masking import Masking
from hetseq.tasks.bert.vocab import SPECIAL_TOKENS
from hetseq.tasks.rows.record_index import read_index

LENGTH, PREDICTIONS, BATCH, ROWS, VOCAB = 128, 20, 64, 20_000, 30_522
#: the width and the type of each data set; the last one has a number a row
COLUMNS = {
    "input_ids": (LENGTH, "i4"), "input_mask": (LENGTH, "i1"), "segment_ids": (LENGTH, "i1"),
    "masked_lm_positions": (PREDICTIONS, "i4"), "masked_lm_ids": (PREDICTIONS, "i4"), "next_sentence_labels": (0, "i1"),
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--packed-rows", type=int, default=400_000, help="rows of the file that does not fit")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.disable()  # it warns that packed files are slow, which is measured here
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hetseq-rows-") as folder:
        for name, rows, is_packed in (
            ("plain", ROWS, False), ("gzip, fits", ROWS, True), ("gzip, does not fit", options.packed_rows, True),
        ):  # fmt: skip
            path = Path(folder) / f"{len(found)}_train.hdf5"
            write(path, rows, is_packed=is_packed)
            dataset = load_bert(path, "train", vocab_size=VOCAB, max_positions=LENGTH, type_vocab_size=2)
            found.append({"file": f"{name}: {rows:,} rows", **measured(dataset, path, rows, options.rounds)})
        for name, number in (("plain", 0), ("gzip", 1)):
            path, records = Path(folder) / f"{number}_train.hdf5", Path(folder) / f"records {name}"
            as_records = read_records(path, records)
            label = f"records, against {name}: {ROWS:,} rows"
            found.append({"file": label, **measured(as_records, path, ROWS, options.rounds)})
    shown = [
        [
            row["file"],
            f"{row['here'].median * 1e6:,.1f} us",
            f"{row['opened'].median * 1e6:,.0f} us",
            row["ratio"].shown(),
        ]
        for row in found
    ]
    print(table(("file", "here", "opened for every row", "ratio (quartiles)"), shown))
    print(json_line("rows", vars(options), found))


def write(path: Path, rows: int, *, is_packed: bool) -> None:
    """A file of rows whose word frequencies are as unequal as in a language."""
    generator = np.random.default_rng(rows)
    storage = {"compression": "gzip"} if is_packed else {}
    with h5py.File(path, "w") as file:
        for name, (width, kind) in COLUMNS.items():
            shape = (rows, width) if width else (rows,)
            if name.endswith("_ids") and name != "segment_ids":
                numbers = np.minimum(1000 + generator.zipf(1.2, shape), VOCAB - 1)
            elif name == "masked_lm_positions":
                numbers = np.broadcast_to(np.arange(1, 6 * PREDICTIONS, 6), shape)
            else:
                numbers = np.ones(shape, np.int8)
                if name == "segment_ids":
                    numbers[:, : LENGTH // 2] = 0
            file.create_dataset(name, data=numbers.astype(kind), **storage)


def read_records(path: Path, folder: Path) -> BertRecords:
    """The rows of a file as records."""
    vocab = path.parent / "vocab.txt"
    words = [*SPECIAL_TOKENS, *(f"word{number}" for number in range(VOCAB - len(SPECIAL_TOKENS)))]
    vocab.write_text("".join(f"{word}\n" for word in words))
    convert(Options(path, vocab), folder, say=lambda _: None, track=lambda *_: lambda _: None)
    return load_records(read_index(folder), "train", words, seed=0, masking=Masking())


def measured(dataset: BertDataset | BertRecords, path: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Seconds of CPU time a row, of `dataset` and of `path` as in 2020, round by round in turn, and their ratio."""
    generator = np.random.default_rng(0)
    ways: dict[str, Callable[[list[int]], object]] = {
        "here": dataset.__getitems__,
        "opened": lambda batch: [opened(path, row) for row in batch],
    }
    # fill the cache first, with all rows in order, since a split that does not fit leaves useless last blocks
    for start in range(0, rows, 10_000):
        dataset.__getitems__(range(start, min(start + 10_000, rows)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            batches, started = 0, time.process_time()
            while batches == 0 or time.process_time() - started < 0.5:
                way(generator.integers(0, rows, BATCH).tolist())
                batches += 1
            times[name].append((time.process_time() - started) / batches / BATCH)
    figures = {name: spread(seconds) for name, seconds in times.items()}
    return {**figures, "ratio": spread(paired(times["opened"], times["here"]))}


def opened(path: Path, row: int) -> list[Any]:
    """One row, as in 2020."""
    with h5py.File(path, "r") as file:
        return [file[name][row] for name in NAMES]


if __name__ == "__main__":
    main()
