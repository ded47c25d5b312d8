"""Words with tags in columns, as the CoNLL shared tasks have them, and the entities that the tags of a sentence spell.

Responsible for what such a file may look like and for which words make one entity; knows no word pieces and no network.
The one idea: an entity never leaves its sentence. So what is found, what is there and what is both are numbers of a
sentence, and their sums over any division of the data give the F1 of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq import DataError
from hetseq.tasks.rows.split_files import read_lines

OUTSIDE = "O"
#: how the names of such files end
SUFFIXES = (".txt", ".conll", ".tsv", ".bio", ".iob", ".iob2")

_EXPECTED = "columns separated by tabs or spaces, the word first and its tag last, and a blank line after each sentence"
_DOCUMENT = "-DOCSTART-"
#: letters before a hyphen -> what they mean: B begins, I is inside, E ends, S is single; the rest are other names
_POSITIONS = {"B": "B", "I": "I", "E": "E", "S": "S", "M": "I", "L": "E", "U": "S", "W": "S"}
#: tags of one letter, where there is one kind of entity only
_BARE = ("B", "I", "E", "S")


@dataclass(frozen=True)
class Sentence:
    """Its words with a tag each, and the line of the file in which each stands, from 1."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    lines: tuple[int, ...]


def read_sentences(path: Path) -> list[Sentence]:
    """The sentences of a file, lines of documents (-DOCSTART-) left out.

    Raises DataError naming file and line: another encoding, no words, a word without a tag, columns that are missing.
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
                f"{path}, line {number} has {len(cells)} columns, and line {first} has {columns}: expected {_EXPECTED},"
                " as many columns in each line"
            )
        rows.append((cells[0], cells[-1], number))
    if not sentences:
        raise DataError(f"{path} has no words: expected {_EXPECTED}")
    return sentences


def _cells(line: str) -> list[str]:
    """The columns of a line; none of a blank one."""
    if not line.strip():
        return []
    return [cell.strip() for cell in line.rstrip().split("\t")] if "\t" in line else line.split()


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first word and last word of each entity of a sentence, as seqeval finds them by default (conlleval).

    B-X, I-X, E-X and S-X say where in an entity of kind X a word is, M, L, U and W are other letters for I, E, S and S.
    A tag without such a beginning is a kind, and equal ones side by side are one entity. Tags that no scheme allows
    make entities all the same: one begins where none goes on.
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
    """How many entities were found, how many there are, and how many of the one are of the other."""

    found: int
    there: int
    right: int


def tally(predicted: Sequence[str], expected: Sequence[str]) -> Tally:
    """The entities of one sentence by two taggers; right is what has kind, first and last word in common."""
    own, others = entities(predicted), entities(expected)
    return Tally(len(own), len(others), len(own & others))
