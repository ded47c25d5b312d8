"""Finds the text file of a split in a folder, and reads its lines.

Responsible for file names; knows nothing about the content of lines. Refuses to guess: two files for one split, or one
for two, are errors. The one idea: a file belongs to the split whose name occurs in its file name; for other naming
schemes, the user gives the whole file name as the name of the split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetseq import DataError, MissingSplitError
from hetseq.tasks.rows.text_file import lines_of, read_text

#: other words for a split in file names
_OTHER_WORDS = {"valid": ("dev",)}
#: words that count only on their own: "val" is also the beginning of "value"
_WHOLE_WORDS = {"valid": ("val",)}
LARGEST_FILE = 1 << 32  # bytes; the whole file is read into memory


def find_split(data: Path, split: str, *, suffixes: Sequence[str], other_splits: Iterable[str] = ()) -> Path:
    """The file of a split in the folder `data`: the file of that name, or one with `suffixes` and the split's word.

    `other_splits`: the splits of the same run. Raises MissingSplitError if there is no file, DataError if there are
    two or if it also belongs to another split.
    """
    names = _names_in(data)
    found = _names_of(split, names, suffixes)
    if not found:
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise MissingSplitError(
            f"--data {data} has no file for the split {split!r}: expected one whose name contains"
            f" {' or '.join(_words_of(split))} and ends in {', '.join(suffixes)}, found {shown or 'nothing'}; set"
            " --train-subset and --valid-subset to the names of your splits, or of the files themselves"
        )
    if len(found) > 1:
        raise DataError(
            f"--data {data} has several files for the split {split!r}, {' and '.join(found[:3])}: expected one; move"
            " the others away, or give the file name as --train-subset or --valid-subset"
        )
    for other in () if split in names else other_splits:  # a file name given by the user is unambiguous
        if other != split and found[0] in _names_of(other, names, suffixes):
            raise DataError(
                f"{data / found[0]} belongs to two splits, because its name contains the words of both {split!r} and"
                f" {other!r}: rename it, or give the file names as --train-subset and --valid-subset"
            )
    return data / found[0]


def read_lines(path: Path, expected: str) -> list[str]:
    """The lines of a UTF-8 text file, without line ends or byte order mark.

    `expected` describes the file in error messages. Raises DataError if it is unreadable, empty or not UTF-8.
    """
    return lines_of(read_text(path, expected, most_bytes=LARGEST_FILE).removeprefix("\ufeff"))


def _names_in(data: Path) -> list[str]:
    try:
        return sorted(path.name for path in data.iterdir() if path.is_file() and not path.name.startswith("."))
    except FileNotFoundError as error:
        raise DataError(f"--data {data} does not exist: expected a folder with a file for each split") from error
    except NotADirectoryError as error:
        raise DataError(
            f"--data {data} is a file: expected a folder with a file for each split; give {data.parent}, and the file"
            " name as --train-subset or --valid-subset"
        ) from error
    except OSError as error:
        raise DataError(
            f"--data {data} cannot be read: {error.strerror}; expected a folder you may read and enter"
        ) from error


def _names_of(split: str, names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    if split in names:
        return [split]
    return [name for name in names if name.lower().endswith(tuple(suffixes)) and _says(name.lower(), split)]


def _says(name: str, split: str) -> bool:
    is_inside = any(word in name for word in (split.lower(), *_OTHER_WORDS.get(split, ())))
    return is_inside or not set(_WHOLE_WORDS.get(split, ())).isdisjoint(re.split(r"[^a-z]+", name))


def _words_of(split: str) -> list[str]:
    return [split, *_OTHER_WORDS.get(split, ()), *_WHOLE_WORDS.get(split, ())]
