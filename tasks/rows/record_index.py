"""The index of a folder of records, `corpus.json`: the files of each split, their columns and their checksums.

Responsible for reading and checking the index, and for verifying whole files against it. `records` reads rows, and
`preprocessing/records.py` writes a folder; docs/design/records.md specifies both.

The one idea: a folder consists of the files in its index. The index is written last, so a folder without one is
incomplete, and a file that is not in the index is never read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq import DataError, MissingSplitError
from hetseq.tasks.rows.mapped_files import refusal

#: file name of the index, name of the format, and its version; version 1 is a folder of HDF5 files
INDEX, FORMAT, VERSION = "corpus.json", "hetseq BERT corpus", 2
#: name of the format for causal language models, which never used HDF5 files
GPT_FORMAT = "hetseq GPT corpus"
#: suffix of record files
SUFFIX = ".safetensors"
#: suffix that turns the name of a ragged column into the name of its offsets
OFFSETS = ".offsets"
#: types of a column: name in safetensors -> name in NumPy
TYPES = {"U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8"}
#: types of the offsets of a ragged column
OFFSET_TYPES = ("I64", "U64")
AGAIN = "copy the folder again, or make it again"

_LARGEST_INDEX = 64 << 20  # bytes
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Column:
    """One field of every row: an array of fixed shape or, if ragged, a list of any length."""

    dtype: str  # one of TYPES
    is_ragged: bool = False
    shape: tuple[int, ...] = ()  # of a row; () is one number


@dataclass(frozen=True)
class File:
    """A file, as described by the index."""

    path: Path
    rows: int
    size: int  # bytes
    sha256: str
    copy_of: Path | None = None  # the original, if `local_copy` copied it

    @property
    def told(self) -> str:
        """The path for messages; for a copy, with the remedy."""
        if self.copy_of is None:
            return str(self.path)
        return f"{self.path} (a copy of {self.copy_of}: remove the copy, and the next start makes it again)"


@dataclass(frozen=True)
class Split:
    """The rows of a split, in the order of its files."""

    files: tuple[File, ...]
    longest: dict[str, int]  # values of the longest row, by ragged column

    def files_up_to(self, count: int) -> list[File]:
        """The first `count` files; all of them for 0."""
        return list(self.files[:count] if count > 0 else self.files)


@dataclass(frozen=True)
class Index:
    """The content of `corpus.json`."""

    path: Path
    columns: dict[str, Column]
    vocab_tokens: int
    vocab_sha256: str  # of `vocab_digest`
    splits: dict[str, Split]

    def split(self, name: str) -> Split:
        """The split of this name. Raises MissingSplitError."""
        if name not in self.splits:
            raise MissingSplitError(
                f"{self.path} has no split {name!r}: expected one of {', '.join(self.splits) or 'its splits (none)'};"
                " give --train-subset and --valid-subset"
            )
        return self.splits[name]


def vocab_digest(vocab: Sequence[str]) -> str:
    """The SHA-256 of a vocabulary: of its tokens in UTF-8, each followed by a line feed."""
    return hashlib.sha256("".join(f"{token}\n" for token in vocab).encode()).hexdigest()


def version_of(folder: Path) -> int | None:
    """The version in the index of a folder; None without an index, or if the file of that name is something else.

    Raises DataError for an unreadable index.
    """
    facts = _facts(folder / INDEX)
    stated = facts.get("format") if isinstance(facts, dict) else None
    if not isinstance(stated, dict) or stated.get("name") not in (FORMAT, GPT_FORMAT):
        return None
    version = stated.get("version")
    return version if isinstance(version, int) else -1


def read_index(folder: Path) -> Index:
    """The index of a folder of records. Raises DataError unless it has this version and is valid."""
    path = folder / INDEX
    version = version_of(folder)
    if version is None and not path.exists():
        raise DataError(f"{path} does not exist: expected the index of a folder of records, which is written last")
    if version != VERSION:
        found = "is not an index of records" if version is None else f"has version {version} of the format"
        raise DataError(
            f"{path} {found}: expected version {VERSION}, the only one that this HetSeq reads; update HetSeq or make"
            " the folder again"
        )
    stated = _Stated(path, _facts(path))
    columns = {name: _column(stated, name) for name in stated.mapping("columns")}
    if not columns:
        raise stated.wrong("columns", {}, "at least one column")
    return Index(
        path, columns, vocab_tokens=stated.count("vocabulary", "tokens"),
        vocab_sha256=stated.digest("vocabulary", "sha256"),
        splits={name: _split(stated, name, columns) for name in stated.mapping("splits")},
    )  # fmt: skip


def verify(files: Sequence[File], advance: Callable[[int], None]) -> dict[Path, str]:
    """Problems of whole files, by path: "missing", a wrong size or a wrong checksum; empty if all are right.

    `advance` receives the number of bytes as they are read. Raises DataError for an unreadable file.
    """
    problems = {}
    for file in files:
        try:
            found = _sha256(file.path, advance)
        except FileNotFoundError:
            problems[file.path] = "missing"
            continue
        except OSError as error:
            raise DataError(f"{file.path} {refusal(error)}") from error
        if found != (file.size, file.sha256):
            problems[file.path] = (
                f"{found[0]:,} bytes, expected {file.size:,}"
                if found[0] != file.size
                else f"sha256 {found[1]}, expected {file.sha256}"
            )
    return problems


def _sha256(path: Path, advance: Callable[[int], None]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            advance(len(piece))
    return size, digest.hexdigest()


def _facts(path: Path) -> Any:
    """The parsed JSON of the index; None if it is missing or the file is something else."""
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            return None
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise DataError(f"{path} {refusal(error)}") from error


def _column(stated: _Stated, name: str) -> Column:
    dtype = stated.text("columns", name, "dtype")
    if dtype not in TYPES:
        raise stated.wrong(f"columns.{name}.dtype", dtype, f"one of {', '.join(TYPES)}")
    if name.endswith(OFFSETS):
        raise stated.wrong("columns", name, f"no name that ends in {OFFSETS}")
    shape = stated.get("columns", name, "shape")
    if shape is None:
        return Column(dtype, is_ragged=True)
    # type() rather than isinstance(): bool is an int in Python
    if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**31 for size in shape):
        raise stated.wrong(f"columns.{name}.shape", shape, "the shape of a row, [] for one number, or null for lists")
    return Column(dtype, shape=tuple(shape))


def _split(stated: _Stated, name: str, columns: Mapping[str, Column]) -> Split:
    listed = stated.get("splits", name, "files")
    if not isinstance(listed, list) or not listed:
        raise stated.wrong(f"splits.{name}.files", listed, "a list of files")
    files = tuple(_file(_Stated(stated.path, entry, f"splits.{name}.files.{at}")) for at, entry in enumerate(listed))
    rows = stated.count("splits", name, "rows")
    if rows != sum(file.rows for file in files):
        raise stated.wrong(f"splits.{name}.rows", rows, f"{sum(file.rows for file in files)}, as its files have")
    ragged = [column for column, kind in columns.items() if kind.is_ragged]
    return Split(files, {column: stated.count("splits", name, "longest", column) for column in ragged})


def _file(stated: _Stated) -> File:
    name = stated.text("name")
    # only in this folder: an index must not make HetSeq read other files of this machine
    if Path(name).name != name or not name.endswith(SUFFIX) or not name.isprintable():
        raise stated.wrong("name", name, f"a name that ends in {SUFFIX}, without a folder")
    return File(stated.path.parent / name, stated.count("rows"), stated.count("bytes"), stated.digest("sha256"))


class _Stated:
    """The fields of an index, checked by type. Raises DataError for another type."""

    def __init__(self, path: Path, facts: Any, within: str = "") -> None:
        self.path, self._facts, self._within = path, facts, within

    def get(self, *names: str) -> Any:
        """A field; None if it is missing."""
        found = self._facts
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def wrong(self, field: str, found: Any, expected: str) -> DataError:
        field = f"{self._within}.{field}" if self._within else field
        return DataError(f"{self.path}: {field} is {json.dumps(found)[:80]}, expected {expected}; {AGAIN}")

    def mapping(self, *names: str) -> dict[str, Any]:
        found = self.get(*names)
        if not isinstance(found, dict):
            raise self.wrong(".".join(names), found, "an object")
        return found

    def text(self, *names: str) -> str:
        found = self.get(*names)
        if not isinstance(found, str):
            raise self.wrong(".".join(names), found, "a string")
        return found

    def count(self, *names: str) -> int:
        found = self.get(*names)
        if type(found) is not int or not 0 <= found < 2**63:
            raise self.wrong(".".join(names), found, "an integer, 0 or more")
        return found

    def digest(self, *names: str) -> str:
        found = self.text(*names)
        if len(found) != 64 or not set(found) <= set("0123456789abcdef"):
            raise self.wrong(".".join(names), found, "a SHA-256 of 64 digits")
        return found
