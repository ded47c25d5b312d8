"""Small folders of BERT records, valid or with one fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetseq.preprocessing.records import Ragged, Rows, columns_in_json, write_split
from hetseq.tasks.bert.dataset import FIRST_LENGTHS, IDS, LABEL, columns_of
from hetseq.tasks.rows.record_index import FORMAT, INDEX, vocab_digest

#: words that begin with ## continue a word; 40 ordinary tokens
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(30)), *(f"##{n}" for n in range(10))]
LENGTH = 22


def make_rows(count: int, *, seed: int = 0, vocab: int = len(VOCAB), length: int = LENGTH) -> Rows:
    """Rows `[CLS] A [SEP] B [SEP]` of 7 to `length` tokens; the last one is the longest."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(7, length + 1, count)
    lengths[-1:] = length
    ends = np.cumsum(lengths)
    ids = generator.integers(5, vocab, int(lengths.sum()))
    first = generator.integers(3, lengths - 2)
    ids[ends - lengths], ids[ends - lengths + first - 1], ids[ends - 1] = 2, 3, 3
    return {IDS: Ragged(ids, lengths), FIRST_LENGTHS: first, LABEL: generator.integers(0, 2, count)}


def as_lists(rows: Rows) -> list[list[int]]:
    ids: Any = rows[IDS]
    return [part.tolist() for part in np.split(ids.values, np.cumsum(ids.lengths)[:-1])]


def write_folder(
    folder: Path, *, rows_per_file: int = 1000, vocab: list[str] | None = None, **splits: Rows | list[Rows]
) -> Path:
    """A folder of records with these splits, its vocabulary and its index."""
    folder.mkdir(parents=True)
    tokens = VOCAB if vocab is None else vocab
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    columns = columns_of(len(tokens))
    facts = {
        "format": {"name": FORMAT, "version": 2},
        "vocabulary": {"tokens": len(tokens), "sha256": vocab_digest(tokens)},
        "columns": columns_in_json(columns),
        "splits": {
            name: write_split(
                folder, name, rows if isinstance(rows, list) else [rows], columns, rows_per_file=rows_per_file
            )
            for name, rows in splits.items()
        },
    }
    (folder / INDEX).write_text(json.dumps(facts))
    return folder


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` edit the facts of a folder."""
    facts = json.loads((folder / INDEX).read_text())
    change(facts)
    (folder / INDEX).write_text(json.dumps(facts))


def change_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` edit the header of a file of records, whose size stays as it is; the index too."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    restate(path)


def change_numbers(path: Path, name: str, change: Callable[[np.ndarray], object]) -> None:
    """Let `change` edit the numbers of an array in a file of records."""
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:begin])[name]
    kind = np.dtype(_KINDS[entry["dtype"]])
    change(np.frombuffer(content, kind, int(np.prod(entry["shape"])), begin + entry["data_offsets"][0]))
    path.write_bytes(content)


_KINDS = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "U64": "<u8"}


def restate(path: Path) -> None:
    """State the size of a file, as it is now, in its index."""

    def state(facts: dict[str, Any]) -> None:
        for split in facts["splits"].values():
            for file in split["files"]:
                if file["name"] == path.name:
                    file["bytes"] = path.stat().st_size

    change_index(path.parent, state)
