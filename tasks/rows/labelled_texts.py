"""Reads labelled texts from CSV, TSV or JSONL files.

Responsible for the formats, the columns and the refusal of invalid rows; knows no word pieces and no network. Never
guesses whether the first line is a header: it must contain a known or given name, unless columns are given by number.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq import DataError
from hetseq.tasks.rows.split_files import read_lines
from hetseq.tasks.rows.text_file import object_of

SUFFIXES = (".csv", ".tsv", ".jsonl")

_TEXT_NAMES, _LABEL_NAMES = ("text", "sentence"), ("label", "category")
_EXPECTED = "rows of a text and a label, as CSV, as TSV without quotes, or as JSONL (one JSON object a line)"
_REMEDY = "give --text-column and --label-column, by name, or by number from 1 if the file has no header line"


@dataclass(frozen=True)
class Columns:
    """The columns to read, by name or by number from 1; None: the columns with the usual names."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Labelled:
    """One text or a pair, its label, and the line of the file, from 1, in which it begins."""

    texts: tuple[str, ...]
    label: str
    line: int


def read_labelled(path: Path, columns: Columns) -> list[Labelled]:
    """The rows of a file, in the format of its suffix.

    Raises DataError naming file and line for another encoding, no rows, a missing column, or a row without a label.
    """
    lines = read_lines(path, _EXPECTED)
    rows = _of_json(path, lines, columns) if path.suffix.lower() == ".jsonl" else _of_table(path, lines, columns)
    found = list(rows)
    for row in found:
        if not row.label:
            raise DataError(
                f"{path}, line {row.line} has no label: expected one in every row; add it, or remove the row"
            )
    if not found:
        raise DataError(f"{path} has no rows: expected {_EXPECTED}")
    return found


def _of_table(path: Path, lines: Sequence[str], columns: Columns) -> Iterator[Labelled]:
    rows = _cells(path, lines)
    line, first = next(rows, (1, []))
    wanted = [name for name in (columns.text, columns.pair, columns.label) if name is not None]
    is_by_number = columns.text is not None and all(name.isascii() and name.isdigit() for name in wanted)
    places = _numbered(path, columns, len(first)) if is_by_number else _named(path, columns, first)
    if is_by_number:
        yield _row(path, places, first, line)
    for number, cells in rows:
        if len(cells) != len(first):
            hint = "is there a tab in a text?" if path.suffix.lower() == ".tsv" else "a text with a comma is quoted"
            raise DataError(
                f"{path}, line {number} has {len(cells)} columns, but line {line} has {len(first)}: expected as many in"
                f" each row; {hint}"
            )
        yield _row(path, places, cells, number)


def _cells(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, and the line in which it begins; blank lines are skipped."""
    if path.suffix.lower() == ".csv":
        reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}, line {line}: {error}; expected {_EXPECTED}") from error
        if cells:
            yield line, cells


def _row(path: Path, places: tuple[int, ...], cells: Sequence[str], line: int) -> Labelled:
    *texts, label = (cells[place] for place in places)
    return Labelled(tuple(texts), label.strip(), line)


def _numbered(path: Path, columns: Columns, count: int) -> tuple[int, ...]:
    """Indices of text, second text and label, from 0; the label defaults to the second column."""
    given = [columns.text, columns.pair, "2" if columns.label is None else columns.label]
    places = tuple(int(name) - 1 for name in given if name is not None)
    for place in places:
        if not 0 <= place < count:
            raise DataError(f"{path} has {count} columns and no column {place + 1}: {_REMEDY}")
    return places


def _named(path: Path, columns: Columns, names: Sequence[str]) -> tuple[int, ...]:
    """Indices of text, second text and label, from the header line."""
    known = [name.strip().casefold() for name in names]
    text = _place(path, columns.text, _TEXT_NAMES, known)
    pair = None if columns.pair is None else _place(path, columns.pair, (), known)
    label = _place(path, columns.label, _LABEL_NAMES, known)
    if len(known) == 2 and pair is None:  # of two columns, one determines the other
        if text is None and label is not None:
            text = 1 - label
        elif label is None and text is not None:
            label = 1 - text
    if text is None or label is None:
        raise DataError(
            f"{path}: its first line, {', '.join(names)[:60]!r}, names no column"
            f" {' or '.join(_TEXT_NAMES if text is None else _LABEL_NAMES)}: {_REMEDY}"
        )
    return (text, label) if pair is None else (text, pair, label)


def _place(path: Path, given: str | None, usual: Sequence[str], known: Sequence[str]) -> int | None:
    wanted = usual if given is None else (given.strip().casefold(),)
    place = next((known.index(name) for name in wanted if name in known), None)
    if place is None and given is not None:
        raise DataError(f"{path} has no column {given!r}: its first line names {', '.join(known)[:80]}; {_REMEDY}")
    return place


def _of_json(path: Path, lines: Sequence[str], columns: Columns) -> Iterator[Labelled]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found = object_of(path, number, line, _EXPECTED)
        texts = [_value(path, number, found, columns.text, _TEXT_NAMES)]
        texts += [_value(path, number, found, columns.pair, ())] if columns.pair is not None else []
        label = _value(path, number, found, columns.label, _LABEL_NAMES)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{path}, line {number}: its text is {texts!r:.60}: expected a string in quotes")
        if not isinstance(label, str | int):
            raise DataError(f"{path}, line {number}: its label is {label!r:.60}: expected a string or a whole number")
        yield Labelled(tuple(map(str, texts)), (label if isinstance(label, str) else json.dumps(label)).strip(), number)


def _value(path: Path, line: int, found: dict[str, object], given: str | None, usual: Sequence[str]) -> object:
    for name in usual if given is None else (given,):
        if name in found:
            return found[name]
    missing = " or ".join(usual) if given is None else given
    raise DataError(
        f"{path}, line {line} has no {missing!r}: it has {', '.join(found)[:80] or 'nothing'}; give --text-column and"
        " --label-column its names"
    )
