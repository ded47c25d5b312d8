"""Text files in pieces of about 1 MiB, so that files of any size are read by many, and no more than a piece is held.

Responsible for where a file is cut, for refusing what is no text in UTF-8, and for what of it was read. What a sentence
is, `sentences` says.

A file is cut at the first blank line behind each MiB (`wikitext`: at the first end of a line), which changes nothing
about its sentences. Where there is none for a whole MiB, it is cut at an end of a line, else at a space, else between
two characters: a paragraph or a line of more than a MiB becomes several, and a sentence that is cut there two.
Characters that nobody sees stay in a text; the tokens are made without them.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hetseq import DataError

from .sentences import documents_of, printable

#: bytes between two cuts, about
PIECE_BYTES = 1 << 20

_BLANK_LINE = re.compile(rb"(?:\r\n|\r(?=[^\n])|\n)[ \t]*(?:\r\n|\r(?=[^\n])|\n)")
_LINE_END = re.compile(rb"\r\n|\r(?=[^\n])|\n")
_SPACE = re.compile(rb"[ \t]")
_CHARACTER = re.compile(rb"[^\x80-\xbf]")
_AROUND = 64  # bytes of a blank line, at most, where a block ends within it


@dataclass(frozen=True)
class Source:
    """What was read, so that a corpus can say what it was made of."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Cut:
    """A place between two pieces of a file."""

    offset: int  # bytes
    is_blank_line: bool  # no document of `lines` lies on both sides


@dataclass(frozen=True)
class Part:
    """One piece of a file."""

    path: Path
    form: str  # a key of plain_text.FORMATS
    begin: int  # bytes
    end: int
    goes_on: bool  # with the document of the piece before


@dataclass(frozen=True)
class Scan:
    """A file to be read, and how much of it lies between two cuts."""

    path: Path
    form: str
    piece_bytes: int = PIECE_BYTES

    def __str__(self) -> str:
        return str(self.path)


def scanned(scan: Scan) -> tuple[Source, list[Part]]:
    """Read a UTF-8 file, with or without byte order mark; its pieces. Raises DataError for anything else."""
    path = scan.path
    remedy = f"convert it: iconv -f LATIN1 -t UTF-8 '{path}' > NEW.txt (with its own encoding for LATIN1)"
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    size, before, has_text, cuts = 0, b"", False, [Cut(0, is_blank_line=True)]
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(scan.piece_bytes)
                digest.update(block)
                pending = len(decoder.getstate()[0])  # the begin of a character, from the block before
                mark = len(codecs.BOM_UTF8) if size == 0 and block.startswith(codecs.BOM_UTF8) else 0
                try:
                    has_text = bool(decoder.decode(block[mark:], final=not block).strip()) or has_text
                except UnicodeDecodeError as error:
                    found, offset = error.object[error.start], size + mark + error.start - pending
                    raise DataError(f"{path} is not UTF-8: byte 0x{found:02x} at offset {offset:,}; {remedy}") from None
                # UTF-16 without a mark is valid UTF-8 as long as it is English
                if (nul := block.find(b"\0")) >= 0:
                    raise DataError(
                        f"{path} is not text in UTF-8: byte 0x00 at offset {size + nul:,}; if it is UTF-16, {remedy}"
                    )
                if not block:
                    break
                # what is left at the end is no piece of its own: there may be no blank line in so little
                is_whole = size and len(block) == scan.piece_bytes
                if is_whole and (place := _place(before, block, scan.form)) is not None:
                    cuts.append(Cut(size + place[0], is_blank_line=place[1]))
                size, before = size + len(block), block[-_AROUND:]
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; expected a text file you may read"
        ) from error
    if not has_text:
        raise DataError(f"{path} has no text: {size:,} bytes, none of them a letter; leave the file out")
    parts = [
        Part(
            path,
            scan.form,
            cut.offset,
            after,
            goes_on=bool(cut.offset) and not (scan.form == "lines" and cut.is_blank_line),
        )
        for cut, after in zip(cuts, [*(cut.offset for cut in cuts[1:]), size])
        if after > cut.offset
    ]
    return Source(printable(path.name), size, digest.hexdigest()), parts


def read_text(path: Path) -> tuple[str, Source]:
    """A file as a whole, its ends of line made "\\n". Raises as `scanned`."""
    source, _ = scanned(Scan(path, "lines"))
    text = path.read_bytes().decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n"), source


def sentences_of(part: Part) -> tuple[list[list[str]], bool]:
    """The sentences of each document of a piece, and whether the first goes on with one of the piece before."""
    try:
        with part.path.open("rb") as file:
            file.seek(part.begin)
            content = file.read(part.end - part.begin)
        text = content.decode("utf-8-sig" if part.begin == 0 else "utf-8")
    except (OSError, UnicodeDecodeError):
        content = b""
    if len(content) != part.end - part.begin:
        raise DataError(f"{part.path} has changed while it was read: leave it as it is until the corpus is complete")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # a blank line that begins right behind the cut ends a document too
    goes_on = part.goes_on and not (part.form == "lines" and not text.partition("\n")[0].strip())
    return documents_of(text, part.form), goes_on


def _place(before: bytes, block: bytes, form: str) -> tuple[int, bool] | None:
    """Where a block is cut, and whether at a blank line; None for a few bytes within a character.

    `before` is what comes right before it: a blank line may begin there.
    """
    blank_lines = _BLANK_LINE.finditer(before + block) if form != "wikitext" else iter(())
    for blank_line in blank_lines:
        if blank_line.end() > len(before):
            return blank_line.end() - len(before), True
    for pattern in (_LINE_END, _SPACE):
        if match := pattern.search(block):
            return match.end(), False
    match = _CHARACTER.search(block)
    return None if match is None else (match.start(), False)
