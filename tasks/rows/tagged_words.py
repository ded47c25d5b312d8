"""Tagged words in columns, as in the CoNLL shared tasks, and the entities that the tags of a sentence form.

Responsible for the file format and for grouping words into entities; knows no word pieces and no network. The one idea:
an entity never crosses a sentence boundary. So the entities found, expected and correct are counts per sentence, and
their sums over any division of the data give the F1 of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq import DataError
from hetseq.tasks.rows.split_files import read_lines

OUTSIDE = "O"
#: suffixes of such files
SUFFIXES = (".txt", ".conll", ".tsv", ".bio", ".iob", ".iob2")

_EXPECTED = "columns separated by tabs or spaces, the word first and its tag last, and a blank line after each sentence"
_DOCUMENT = "-DOCSTART-"
#: letters before a hyphen -> position: B begins, I is inside, E ends, S is single; the others are synonyms
_POSITIONS = {"B": "B", "I": "I", "E": "E", "S": "S", "M": "I", "L": "E", "U": "S", "W": "S"}
#: tags of one letter, if there is only one kind of entity
_BARE = ("B", "I", "E", "S")


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, with the tag and the line number (from 1) of each."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    lines: tuple[int, ...]


def read_sentences(path: Path) -> list[Sentence]:
    """The sentences of a file, without document lines (-DOCSTART-).

    Raises DataError naming file and line for another encoding, no words, a word without a tag, or missing columns.
    """
    sentences: list[Sentence] = []
    rows: list[tuple[str, str, int]] = []
    columns = first = 0
    for number, line in enumerate([*read_lines(path, _EXPECTED), ""], 1):
        cells = _cells(line)
        if not cells or cells[0] == _DOCUMENT:
            if rows:
                words, tags, lines = zip(*rows)
                sentences.append(Sentence(words, tags, lines))
            rows = []
            continue
        if len(cells) == 1:
            raise DataError(f"{path}, line {number}: {line.strip()[:40]!r} has no tag: expected {_EXPECTED}")
        columns, first = columns or len(cells), first or number
        if len(cells) != columns:
            raise DataError(
                f"{path}, line {number} has {len(cells)} columns, but line {first} has {columns}: expected {_EXPECTED},"
                " as many columns in each line"
            )
        rows.append((cells[0], cells[-1], number))
    if not sentences:
        raise DataError(f"{path} has no words: expected {_EXPECTED}")
    return sentences


def _cells(line: str) -> list[str]:
    """The columns of a line; empty for a blank line."""
    if not line.strip():
        return []
    return [cell.strip() for cell in line.rstrip().split("\t")] if "\t" in line else line.split()


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first word and last word of each entity of a sentence, as in seqeval's default mode (conlleval).

    B-X, I-X, E-X and S-X give the position of a word in an entity of kind X; M, L, U and W are synonyms of I, E, S and
    S. A tag without such a prefix is a kind, and adjacent equal ones form one entity. Invalid tag sequences form
    entities too: a tag that cannot continue an entity begins a new one.
    """
    found: set[tuple[str, int, int]] = set()
    start, before = 0, (OUTSIDE, "")
    for at, tag in enumerate([*tags, OUTSIDE]):
        position, kind = _split(tag)
        goes_on = kind == before[1] and before[0] in "BI" and position in "IE"
        if not goes_on:
            if before[0] != OUTSIDE:
                found.add((before[1], start, at - 1))
            start = at
        before = position, kind
    return found


def _split(tag: str) -> tuple[str, str]:
    """Position (B, I, E, S or O) and kind of a tag."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    letter, hyphen, kind = tag.partition("-")
    if tag in _BARE or (hyphen and letter in _POSITIONS):
        return _POSITIONS[letter], kind or "_"
    return "I", tag


@dataclass(frozen=True)
class Tally:
    """The number of entities found, expected, and correctly found."""

    found: int
    there: int
    right: int


def tally(predicted: Sequence[str], expected: Sequence[str]) -> Tally:
    """Count the entities of one sentence; a correct one has the expected kind, first and last word."""
    own, others = entities(predicted), entities(expected)
    return Tally(len(own), len(others), len(own & others))
