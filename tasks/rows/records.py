"""Record reader: rows of integers in plain `.safetensors` files, memory-mapped and gathered a batch at a time.

Responsible for the location of rows in a file and for reading any of them by number; it knows neither words nor
tensors, and does not import torch. `record_index` lists the files; docs/design/records.md specifies their bytes.

The one idea: a column is one array in its file, so a batch is one gather. A ragged column holds the values of all rows
one after another, and `name.offsets` the beginning of each row; padding is not stored.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hetseq import DataError
from hetseq.tasks.rows.mapped_files import Indices, Maps, PerProcess, Views, by_file, refusal
from hetseq.tasks.rows.record_index import AGAIN, OFFSET_TYPES, OFFSETS, TYPES, Column, File

Numbers = npt.NDArray[Any]  # of a stored integer type

_LENGTH_BYTES = 8  # the field before the header, with its length
_LARGEST_HEADER = 1 << 20  # bytes; a few columns take a few hundred


@dataclass(frozen=True)
class Place:
    """The location of an array in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class Shard:
    """A file with rows, as found at the start."""

    path: Path
    told: str  # the path, for messages
    size: int  # bytes
    rows: int
    places: dict[str, Place]  # by column, and by column.offsets


@dataclass(frozen=True)
class Found:
    """The requested rows, by file."""

    count: int
    parts: list[tuple[int, Indices, Indices]]  # per file: its number, places in the request, rows in the file


class Records:
    """The rows of all files one after another, read on request.

    Can be pickled and forked: each process maps the files itself, only as many at once as it may open.
    """

    def __init__(self, shards: Sequence[Shard], longest: Mapping[str, int]) -> None:
        """`longest`: maximum number of values in a row, by ragged column; each shard must have rows."""
        self._shards, self._longest = list(shards), dict(longest)
        self._ends = list(itertools.accumulate(shard.rows for shard in shards))
        self._maps = PerProcess(functools.partial(_mapped, self._shards))

    def __len__(self) -> int:
        return self._ends[-1]

    def place_of(self, index: int) -> str:
        """The origin of a row, for messages: its file and its number there."""
        at = bisect.bisect_right(self._ends, index)
        return f"{self._shards[at].told}, row {index - self._ends[at] + self._shards[at].rows}"

    def find(self, wanted: Indices) -> Found:
        """Locate rows (n,) for the methods below, once for all columns of a batch."""
        return Found(len(wanted), list(by_file(self._ends, wanted)))

    def fixed(self, name: str, wanted: Found) -> Numbers:
        """Rows (n,) of a column that is not ragged, (n, ...), in the requested order, as a new array."""
        place = self._shards[0].places[name]
        found = np.empty((wanted.count, *place.shape[1:]), TYPES[place.dtype])
        for at, places, rows in wanted.parts:
            found[places] = self._maps.get().views(at)[name].take(rows, axis=0)
        return found

    def padded(self, name: str, wanted: Found, width: int, fill: int) -> tuple[Numbers, Indices]:
        """Rows (n,) of a ragged column, (n, width), padded with `fill` at the end, and the length of each, (n,).

        `width` is at least the length of the longest row. Raises DataError for impossible offsets.
        """
        found = np.full((wanted.count, width), fill, TYPES[self._shards[0].places[name].dtype])
        lengths = np.zeros(wanted.count, np.int64)
        column = np.arange(width)
        for at, places, rows in wanted.parts:
            begins, ends = self._spans(name, at, rows, min(width, self._longest[name]))
            values = self._maps.get().views(at)[name]
            lengths[places] = ends - begins
            if len(values):
                found[places] = values.take(begins[:, None] + column, mode="clip")
        np.copyto(found, fill, where=column >= lengths[:, None])
        return found, lengths

    def lengths(self, name: str, wanted: Found) -> Indices:
        """The lengths (n,) of rows (n,) of a ragged column, without reading the values. Raises DataError as above."""
        lengths = np.zeros(wanted.count, np.int64)
        for at, places, rows in wanted.parts:
            begins, ends = self._spans(name, at, rows, self._longest[name])
            lengths[places] = ends - begins
        return lengths

    def _spans(self, name: str, at: int, rows: Indices, most: int) -> tuple[Indices, Indices]:
        """The begin and end of rows (n,) of a file among its values, (n,) each."""
        views = self._maps.get().views(at)
        values, offsets = views[name], views[name + OFFSETS]
        begins, ends = (offsets.take(rows + after).astype(np.int64) for after in (0, 1))
        is_wrong = (begins < 0) | (ends < begins) | (ends > len(values)) | (ends - begins > most)
        if is_wrong.any():
            self._refuse_offsets(at, name, int(rows[is_wrong][0]), len(values))
        return begins, ends

    def _refuse_offsets(self, at: int, name: str, row: int, values: int) -> NoReturn:
        begin, end = self._maps.get().views(at)[name + OFFSETS][row : row + 2].tolist()
        raise DataError(
            f"{self._shards[at].told}, row {row}: {name}{OFFSETS} spans {begin} to {end}, expected at most"
            f" {self._longest[name]} of the {values} values of {name}; the file is damaged: {AGAIN}"
        )


def open_shard(file: File, columns: Mapping[str, Column]) -> Shard:
    """Locate the columns in a file. Raises DataError unless the file matches its index entry."""
    try:
        with file.path.open("rb") as raw:
            size = raw.seek(0, 2)
            if size != file.size:
                raise DataError(
                    f"{file.told} has {size:,} bytes, expected {file.size:,} as in the index; the file is"
                    f" incomplete or another one: {AGAIN}"
                )
            raw.seek(0)
            length = int.from_bytes(raw.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_LARGEST_HEADER, size - _LENGTH_BYTES):
                raise _foreign(file.told, f"its header would have {length:,} bytes")
            header = _parsed(file.told, raw.read(length))
            begin = _LENGTH_BYTES + length
            places = _places(file, columns, header, begin=begin, size=size)
            for name, column in columns.items():
                if column.is_ragged:
                    _check_offsets(file, name, places, raw)
    except OSError as error:
        raise DataError(f"{file.told} {refusal(error)}") from error
    return Shard(file.path, file.told, size, file.rows, places)


def _parsed(told: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _foreign(told, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _foreign(told, "its header is not a JSON object")
    return header


def _places(
    file: File, columns: Mapping[str, Column], header: Mapping[str, Any], *, begin: int, size: int
) -> dict[str, Place]:
    """The location of each array; `begin` is the offset of the first byte after the header."""
    places: dict[str, Place] = {}
    for name, column in columns.items():
        if column.is_ragged:
            places[name + OFFSETS] = _place(file, name + OFFSETS, header, begin=begin, size=size)
        places[name] = _place(file, name, header, begin=begin, size=size)
        shape = places[name].shape
        expected: dict[str, tuple[Any, Any]] = {f"{name}: dtype": (places[name].dtype, column.dtype)}
        if column.is_ragged:
            offsets = places[name + OFFSETS]
            expected[f"{name}: dimensions"] = len(shape), 1
            expected[f"{name}{OFFSETS}: shape"] = list(offsets.shape), [file.rows + 1]
            if offsets.dtype not in OFFSET_TYPES:
                expected[f"{name}{OFFSETS}: dtype"] = offsets.dtype, " or ".join(OFFSET_TYPES)
        else:
            expected[f"{name}: shape"] = list(shape), [file.rows, *column.shape]
        for field, (found, stated) in expected.items():
            if found != stated:
                raise DataError(f"{file.told}, {field} is {found}, expected {stated}; {AGAIN}")
    return places


def _place(file: File, name: str, header: Mapping[str, Any], *, begin: int, size: int) -> Place:
    entry = header.get(name)
    if not isinstance(entry, dict):
        there = ", ".join(sorted(header)[:6]) or "nothing"
        raise DataError(f"{file.told} has no array {name!r}: found {there[:200]}; {AGAIN}")
    dtype, shape, span = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise DataError(f"{file.told}, {name}: dtype is {dtype}, expected one of {', '.join(TYPES)}; {AGAIN}")
    if shape is None or span is None or len(span) != 2:
        raise _foreign(file.told, f"its header has no shape and place of {name}")
    item = np.dtype(TYPES[dtype]).itemsize
    if span[1] - span[0] != math.prod(shape) * item or begin + span[1] > size:
        raise _foreign(file.told, f"{name} of shape {shape} and {dtype} would lie in the bytes {span[0]} to {span[1]}")
    if (begin + span[0]) % item:  # NumPy would copy the whole array first
        raise _foreign(file.told, f"{name} begins at byte {begin + span[0]}, which is not a multiple of {item}")
    return Place(dtype, tuple(shape), begin + span[0])


def _counts(found: Any) -> list[int] | None:
    """`found` if it is a list of integers, 0 or more; otherwise None."""
    is_right = isinstance(found, list) and all(type(count) is int and 0 <= count < 2**63 for count in found)
    return found if is_right else None


def _check_offsets(file: File, name: str, places: Mapping[str, Place], raw: Any) -> None:
    """Raise DataError unless the first and last offsets enclose the values; the others are checked when read."""
    place, values = places[name + OFFSETS], places[name].shape[0]
    ends = []
    for number in (0, file.rows):
        raw.seek(place.offset + 8 * number)
        ends.append(int.from_bytes(raw.read(8), "little"))
    if ends != [0, values]:
        raise DataError(
            f"{file.told}, {name}{OFFSETS} goes from {ends[0]} to {ends[1]}, expected 0 to {values}, the values of"
            f" {name}; the file is damaged: {AGAIN}"
        )


def _foreign(told: str, why: str) -> DataError:
    return DataError(f"{told} is not a file of records, or is damaged ({why}); {AGAIN}")


def _mapped(shards: Sequence[Shard]) -> Maps:
    def look(at: int, mapped: mmap.mmap) -> Views:
        places = shards[at].places
        return {  # an empty array may be located past the last byte
            name: np.ndarray(place.shape, TYPES[place.dtype], mapped, place.offset if math.prod(place.shape) else 0)
            for name, place in places.items()
        }

    return Maps([(shard.path, shard.size) for shard in shards], look)
