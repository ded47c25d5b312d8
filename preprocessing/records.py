"""Record files: writes rows, and verifies whole files against their checksums.

`python -m hetseq.preprocessing.records DIR` verifies a folder. Responsible for the bytes of a file and its index entry,
both specified in docs/design/records.md. Callers define the columns; `corpus.atomic_folder` keeps a folder whole.

The one idea: a file is written in one go once all its rows exist, so its header is right from the first byte, and its
checksum is computed from the bytes written, not from bytes read back. The same rows give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from hetseq import ConfigError, DataError, HetSeqError
from hetseq.tasks.rows.record_index import OFFSETS, SUFFIX, TYPES, Column, read_index, verify

from .corpus.progress import bar, bars
from .corpus.sentences import printable

#: default rows per file, all held in memory: 70 MB with 128 tokens per row, 270 MB with 512
ROWS_PER_FILE = 262_144

_ALIGNED = 8  # bytes: where the first array begins

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Ragged:
    """Rows of a ragged column."""

    values: Array  # (values of all rows,)
    lengths: Array  # (rows,)


Rows = dict[str, Array | Ragged]  # by column, all with equally many rows


def columns_in_json(columns: Mapping[str, Column]) -> dict[str, Any]:
    """The columns as they appear in the index."""
    return {
        name: {"dtype": column.dtype, "shape": None if column.is_ragged else list(column.shape)}
        for name, column in columns.items()
    }


def write_split(
    folder: Path, name: str, batches: Iterable[Rows], columns: Mapping[str, Column], *, rows_per_file: int
) -> dict[str, Any]:
    """Write rows into files `name_00000.safetensors` and so on; returns the index entry of the split.

    A split without rows is one file without rows. Raises DataError for numbers that a column cannot hold, and OSError
    if the disk is full.
    """
    files = []
    for number, rows in enumerate(_of_size(batches, columns, rows_per_file)):
        path = folder / f"{name}_{number:05}{SUFFIX}"
        files.append({"name": path.name, "rows": _count(rows), **_write(path, rows, columns)})
    return split_in_json(files)


def write_file(path: Path, batches: Iterable[Rows], columns: Mapping[str, Column]) -> dict[str, Any]:
    """Write one file; returns its `name`, `rows`, `bytes`, `sha256` and `longest`. Raises as `write_split`."""
    rows = _joined(list(batches), columns)
    return {"name": path.name, "rows": _count(rows), **_write(path, rows, columns)}


def split_in_json(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The index entry of a split, from the results of `write_file` for its files, at least one, in their order."""
    longest = {column: max(file["longest"][column] for file in files) for column in files[0]["longest"]}
    stated = [{name: value for name, value in file.items() if name != "longest"} for file in files]
    return {"rows": sum(file["rows"] for file in files), "longest": longest, "files": stated}


def _of_size(batches: Iterable[Rows], columns: Mapping[str, Column], size: int) -> Iterator[Rows]:
    """The rows in pieces of `size`, of which the last may be smaller; at least one piece."""
    if size < 1:
        raise ConfigError(f"--rows-per-file {size}: expected at least 1")
    held: list[Rows] = []
    count, is_first = 0, True
    for batch in batches:
        held.append(batch)
        count += _count(batch)
        while count >= size:
            whole = _joined(held, columns)
            yield _cut(whole, 0, size)
            held, count, is_first = [_cut(whole, size, count)], count - size, False
    if count or is_first:
        yield _joined(held, columns)


def _joined(held: Sequence[Rows], columns: Mapping[str, Column]) -> Rows:
    joined: Rows = {}
    for name, column in columns.items():
        nothing = np.zeros((0, *column.shape), np.int64)
        if column.is_ragged:
            parts = [_ragged(rows[name]) for rows in held]
            joined[name] = Ragged(
                np.concatenate([part.values for part in parts] or [nothing]),
                np.concatenate([part.lengths for part in parts] or [nothing]),
            )
        else:
            joined[name] = np.concatenate([_plain(rows[name]) for rows in held] or [nothing])
    return joined


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    cut: Rows = {}
    for name, found in rows.items():
        if isinstance(found, Ragged):
            ends = np.concatenate([[0], np.cumsum(found.lengths)])
            cut[name] = Ragged(found.values[ends[start] : ends[stop]], found.lengths[start:stop])
        else:
            cut[name] = found[start:stop]
    return cut


def _count(rows: Rows) -> int:
    found = next(iter(rows.values()))
    return len(found.lengths if isinstance(found, Ragged) else found)


def _ragged(found: Array | Ragged) -> Ragged:
    assert isinstance(found, Ragged)
    return found


def _plain(found: Array | Ragged) -> Array:
    assert not isinstance(found, Ragged)
    return found


def _write(path: Path, rows: Rows, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Write one file; returns its size, its checksum, and the length of its longest row by ragged column."""
    longest = {}
    arrays: dict[str, tuple[str, Array]] = {}
    for name, column in columns.items():
        found = rows[name]
        if isinstance(found, Ragged):
            longest[name] = int(found.lengths.max(initial=0))
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(found.lengths, dtype=np.int64)])
            arrays[name + OFFSETS] = "I64", offsets
            arrays[name] = column.dtype, _typed(path, name, column, found.values)
        else:
            arrays[name] = column.dtype, _typed(path, name, column, found)
    # widest first, so that each array is aligned to its item size without gaps, which the format forbids
    order = sorted(arrays, key=lambda name: -arrays[name][1].itemsize)
    header, place = {}, 0
    for name in order:
        dtype, array = arrays[name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [place, place + array.nbytes]}
        place += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        # views of the arrays' memory: a copy would need as much memory as the file again
        parts += [np.ascontiguousarray(arrays[name][1]).reshape(-1).view(np.uint8).data for name in order]
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return {"bytes": size, "sha256": digest.hexdigest(), "longest": longest}


def _typed(path: Path, name: str, column: Column, numbers: Array) -> Array:
    kind = np.dtype(TYPES[column.dtype])
    limits = np.iinfo(kind)
    if numbers.size and not limits.min <= int(numbers.min()) <= int(numbers.max()) <= limits.max:
        raise DataError(
            f"{path.name}, {name} would hold {numbers.min()} to {numbers.max()}, expected {limits.min} to {limits.max},"
            f" the range of {column.dtype}"
        )
    return numbers.astype(kind, copy=False)


# The command line


def main(argv: Sequence[str] | None = None) -> int:
    """Verify the files of a folder against its index. Exit codes: 0 all files match, 1 some do not, 2 failed."""
    words = sys.argv[1:] if argv is None else list(argv)
    console = Console(highlight=False, soft_wrap=True)
    try:
        if len(words) != 1 or words[0].startswith("-"):
            raise ConfigError(
                "usage: python -m hetseq.preprocessing.records DIR, a folder of records, to verify against its sums"
            )
        index = read_index(Path(words[0]).expanduser())
        files = [file for split in index.splits.values() for file in split.files]
        with bars(console) as progress:
            problems = verify(files, bar(progress, "reading", sum(file.size for file in files)))
    except HetSeqError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(printable(f"error: {error}"), markup=False)
        return error.exit_code
    for path, problem in problems.items():
        console.print(printable(f"{path}: {problem}"), markup=False)
    if not problems:
        console.print(f"all files match {index.path.name}: {len(files)}", markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
