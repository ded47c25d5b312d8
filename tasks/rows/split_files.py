"""Text files of a folder by split, and their lines.

Responsible for names of files; knows nothing of what the lines say. Refuses to guess: two files for one
split, or one for two, are errors. The one idea: a file belongs to the split whose word its name contains, and whoever
has other names gives the whole name of the file as the name of the split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetseq import DataError, MissingSplitError
from hetseq.tasks.rows.text_file import lines_of, read_text

#: what names of files say for a split besides its own name
_OTHER_WORDS = {"valid": ("dev",)}
#: what they say as a word that stands alone: "val" is also the beginning of "value"
_WHOLE_WORDS = {"valid": ("val",)}
_LARGEST_FILE = 1 << 32  # bytes; all of it is read into memory


def find_split(data: Path, split: str, *, suffixes: Sequence[str], other_splits: Iterable[str] = ()) -> Path:
    """The file of a split in the folder `data`: that is called so, or one of `suffixes` whose name contains its word.

    `other_splits` are those of the same run. Raises MissingSplitError where there is none, DataError where there are
    two or where it is also the one of another split.
    """
    names = _names_in(data)
    found = _names_of(split, names, suffixes)
    if not found:
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise MissingSplitError(
            f"--data {data} has no file for the split {split!r}: expected one whose name contains"
            f" {' or '.join(_words_of(split))} and ends in {', '.join(suffixes)}, found {shown or 'nothing'}; give"
            " --train-subset and --valid-subset the names of your splits, or of the files themselves"
        )
    if len(found) > 1:
        raise DataError(
            f"--data {data} has several files for the split {split!r}, {' and '.join(found[:3])}: expected one; move"
            " the others away, or give the name of the file as --train-subset or --valid-subset"
        )
    for other in () if split in names else other_splits:  # who names a file means it
        if other != split and found[0] in _names_of(other, names, suffixes):
            raise DataError(
                f"{data / found[0]} belongs to two splits, because its name contains the words of both {split!r} and"
                f" {other!r}: rename it, or give the names of the files as --train-subset and --valid-subset"
            )
    return data / found[0]


def read_lines(path: Path, expected: str) -> list[str]:
    """The lines of a text file in UTF-8, without their ends; a mark in front of them is left out.

    `expected` says in errors what the file should be. Raises DataError where it cannot be read, is empty or of another
    encoding.
    """
    return lines_of(read_text(path, expected, most_bytes=_LARGEST_FILE).removeprefix("\ufeff"))


def _names_in(data: Path) -> list[str]:
    try:
        return sorted(path.name for path in data.iterdir() if path.is_file() and not path.name.startswith("."))
    except FileNotFoundError as error:
        raise DataError(f"--data {data} does not exist: expected a folder with a file for each split") from error
    except NotADirectoryError as error:
        raise DataError(
            f"--data {data} is a file: expected a folder with a file for each split; give {data.parent}, and the name"
            " of the file as --train-subset or --valid-subset"
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
