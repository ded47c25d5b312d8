"""Reads a whole UTF-8 text file and splits it into lines, documents, or JSON objects.

Responsible for the error messages; knows nothing about the content.
"""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

from hetseq import DataError

#: the end of a document: a line of its own between two documents of a file, and the token of GPT-2
END_OF_TEXT = "<|endoftext|>"

_BETWEEN = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*$\n?", re.M)


def read_text(path: Path, expected: str, *, most_bytes: int, remedy: str = "") -> str:
    """The text of a file. `expected` describes it in error messages; `remedy` is added if it is missing.

    Raises DataError if it is unreadable, larger than `most_bytes`, empty, or not UTF-8, naming the line.
    """
    after = f"expected {expected}" + (f"; {remedy}" if remedy else "")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise DataError(f"{path} is not a file of at most {most_bytes >> 20:,} MB: {after}")
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path} does not exist: {after}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; {after}") from error
    if not content.strip():
        raise DataError(f"{path} is empty ({len(content)} bytes): expected {expected}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte {content[error.start]:#04x} is not UTF-8; expected {expected}; convert it with"
            " `iconv -f ENCODING -t UTF-8`"
        ) from error


def lines_of(text: str) -> list[str]:
    """The lines of a text, without line ends."""
    # not splitlines: a word may be one of the further characters that it splits at
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def documents_of(text: str) -> list[str]:
    """The documents of a text, without the `<|endoftext|>` lines between them and without blank lines at their ends."""
    return [part.strip("\n") for part in _BETWEEN.split(text) if part.strip()]


def object_of(path: Path, number: int, line: str, expected: str) -> dict[str, Any]:
    """The JSON object in a line of a file. Raises DataError naming both."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number} is not JSON ({error}): expected {expected}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}, line {number} is not a JSON object: expected {expected}")
    return found
