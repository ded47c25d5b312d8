"""Text chunks: files cut into pieces of about 1 MiB, so that several processes can read a file, one piece at a time.

Responsible for where a file is cut, for refusing files that are not UTF-8 text, and for recording what was read.
`sentences` defines what a sentence is.

A file is cut at the first blank line after each MiB (`wikitext`: at the first line end), which does not change its
sentences. If a whole MiB has no blank line, it is cut at a line end, else at a space, else between two characters: a
paragraph or line longer than a MiB becomes several, and a sentence that is cut there becomes two. Invisible characters
stay in the text; the tokenizer drops them.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from hetseq import DataError

from .sentences import documents_of, printable

#: approximate bytes between two cuts
PIECE_BYTES = 1 << 20

_BLANK_LINE = re.compile(rb"(?:\r\n|\r(?=[^\n])|\n)[ \t]*(?:\r\n|\r(?=[^\n])|\n)")
_LINE_END = re.compile(rb"\r\n|\r(?=[^\n])|\n")
_SPACE = re.compile(rb"[ \t]")
_CHARACTER = re.compile(rb"[^\x80-\xbf]")
_AROUND = 64  # longest blank line, in bytes, that may span two blocks


@dataclass(frozen=True)
class Source:
    """A file that was read, as the corpus lists it among its sources."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Cut:
    """A place between two pieces of a file."""

    offset: int  # bytes
    is_blank_line: bool  # then no document of the format `lines` crosses it


@dataclass(frozen=True)
class Part:
    """One piece of a file."""

    path: Path
    form: str  # a key of sentences.FORMATS
    begin: int  # bytes
    end: int
    goes_on: bool  # continues the document of the previous piece


@dataclass(frozen=True)
class Scan:
    """A file to read, and the number of bytes between two cuts."""

    path: Path
    form: str
    piece_bytes: int = PIECE_BYTES

    def __str__(self) -> str:
        return str(self.path)


def scanned(scan: Scan) -> tuple[Source, list[Part]]:
    """Read a UTF-8 file, with or without byte order mark, and return its pieces. Raises DataError for other files."""
    path = scan.path
    remedy = f"convert it: iconv -f LATIN1 -t UTF-8 '{path}' > NEW.txt (with its own encoding for LATIN1)"
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    size, before, has_text, cuts = 0, b"", False, [Cut(0, is_blank_line=True)]
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(scan.piece_bytes)
                digest.update(block)
                pending = len(decoder.getstate()[0])  # bytes of a character that began in the previous block
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
                # the short rest at the end is not a piece of its own: it may contain no blank line
                is_whole = size and len(block) == scan.piece_bytes
                if is_whole and (place := _place(before, block, scan.form)) is not None:
                    cuts.append(Cut(size + place[0], is_blank_line=place[1]))
                size, before = size + len(block), block[-_AROUND:]
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; expected a text file that you may read"
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
    """The text of a whole file, with line ends converted to "\\n". Raises as `scanned`."""
    source, _ = scanned(Scan(path, "lines"))
    text = path.read_bytes().decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n"), source


def sentences_of(part: Part) -> tuple[list[list[str]], bool]:
    """The sentences of each document of a piece, and whether the first continues a document of the previous piece."""
    try:
        with part.path.open("rb") as file:
            file.seek(part.begin)
            content = file.read(part.end - part.begin)
        text = content.decode("utf-8-sig" if part.begin == 0 else "utf-8")
    except (OSError, UnicodeDecodeError):
        content = b""
    if len(content) != part.end - part.begin:
        raise DataError(f"{part.path} changed while it was read: do not modify it until the corpus is complete")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # a blank line right after the cut ends a document too
    goes_on = part.goes_on and not (part.form == "lines" and not text.partition("\n")[0].strip())
    return documents_of(text, part.form), goes_on


def _place(before: bytes, block: bytes, form: str) -> tuple[int, bool] | None:
    """Where to cut a block, and whether at a blank line; None for a few bytes within a character.

    `before` holds the bytes just before the block, where a blank line may begin.
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
