"""Words that make prose read like a translation: none in comments, docstrings, messages, README and manual.

The table names the better word. A phrase may break over lines. Identifiers and names of files are not prose.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path

import pytest

from tests.support.docs import ROOT

CODE = tuple(
    sorted(path for name in ("hetseq", "tasks", "preprocessing", "bench") for path in (ROOT / name).rglob("*.py"))
)
MANUAL = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
#: pattern -> the better words; a space stands for any white space
WORDS = {
    "nobody": '"no rank", "no process", "no user"',
    "somebody": '"a rank", "another process", "someone" for a person',
    "anybody": '"any rank", "anyone" for a person',
    "everybody": '"every rank", "all users"',
    "whoever": '"the process that", "the first rank to"',
    "he who|those who": '"a process that", "ranks that"',
    "for want of": '"because ... is missing"',
    "heed|heeds|heeded": '"follow", "handle", "use"',
    "of then": '"in 2020", "of that version"',
    "as ever": '"as before"',
    "no matter": '"regardless of", "whatever the"',
    "(?:go|goes|going|went|gone) on(?! to)": '"continue", "resume", "happen"',
    "mend|mends|mended": '"fix", "repair", "correct"',
    "stands? (?:beside|there)": '"is beside", "is there"',
    "thereof|therein|whilst|albeit|lest": "a shorter sentence",
}
#: right now and then, but not as a habit; how often code and manual may have them
COUNTED = "what is|that of|those of"
MOST_IN_CODE, MOST_IN_MANUAL = 80, 20

_TEXT = {getattr(tokenize, name) for name in ("COMMENT", "STRING", "FSTRING_MIDDLE") if hasattr(tokenize, name)}


def prose(path: Path) -> str:
    """The text of a file. Of Python it keeps comments and strings; everything else is blank, the lines stay."""
    text = path.read_text(encoding="utf-8")
    return only_prose(text) if path.suffix == ".py" else text


def only_prose(source: str) -> str:
    lines = source.splitlines(keepends=True)
    kept = [["\n" if letter == "\n" else " " for letter in line] for line in lines]
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type in _TEXT:
            for number in range(token.start[0] - 1, token.end[0]):
                begin = token.start[1] if number == token.start[0] - 1 else 0
                end = token.end[1] if number == token.end[0] - 1 else len(lines[number])
                kept[number][begin:end] = re.sub("[\"'#]", " ", lines[number][begin:end])
    return "".join(letter for line in kept for letter in line)


def found(text: str, words: str) -> Iterator[tuple[int, str]]:
    """Line and phrase of each occurrence."""
    pattern = rf"(?<![\w-])(?:{words})(?![\w-])".replace(" ", r"\s+")
    for match in re.finditer(pattern, text, re.IGNORECASE):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].lower().split())


def faults(text: str, name: str, words: Mapping[str, str] = WORDS) -> list[str]:
    """A sentence for each word of a text that the table has."""
    return [
        f"{name}:{line}: {phrase!r}; better: {better}"
        for word, better in words.items()
        for line, phrase in found(text, word)
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("paths", [CODE, MANUAL], ids=["code", "manual"])
def test_no_word_of_the_table_is_used(paths: tuple[Path, ...]) -> None:
    seen = [fault for path in paths for fault in faults(prose(path), name_of(path))]
    assert not seen, "\n".join(seen)


@pytest.mark.parametrize(("paths", "most"), [(CODE, MOST_IN_CODE), (MANUAL, MOST_IN_MANUAL)], ids=["code", "manual"])
def test_relative_clauses_without_a_named_subject_are_few(paths: tuple[Path, ...], most: int) -> None:
    places = [f"{name_of(path)}:{line}: {phrase}" for path in paths for line, phrase in found(prose(path), COUNTED)]
    assert len(places) <= most, "\n".join(places)


def test_a_word_is_seen_in_comments_docstrings_and_messages_but_not_in_names() -> None:
    source = (
        'def nobody(goes):  # nobody waits\n    """It goes\n    on."""\n'
        '    raise ValueError(f"{goes} for "\n                     "want of memory")\n'
    )
    assert faults(only_prose(source), "here.py") == [
        'here.py:1: \'nobody\'; better: "no rank", "no process", "no user"',
        "here.py:4: 'for want of'; better: \"because ... is missing\"",
        'here.py:2: \'goes on\'; better: "continue", "resume", "happen"',
    ]
    assert faults(only_prose("nobody = goes + on\n"), "here.py") == []
    assert faults("It goes on to say `heedless`; see [a run](runs-mended.json).", "here.md") == []
    assert list(found("That of\nthe rank, those\nof all", COUNTED)) == [(1, "that of"), (2, "those of")]
