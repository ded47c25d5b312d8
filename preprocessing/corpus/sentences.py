"""Sentence splitting: text to documents of sentences, hold-out, and the choice of text files. Opens no file.

A document is a list of sentences in reading order. Three file formats are understood (`FORMATS`). The splitter uses
rules: a stop, closing quotes, a space, a capital, and no abbreviation before the stop. It is approximate in English
and more so in other languages: a sentence cut in two, or two merged into one, makes a training row slightly less
meaningful and has no other effect. Tokens are unknown here.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetseq import DataError

#: with at least this many documents, whole ones are held out; with fewer, the end of each
WHOLE_DOCUMENTS = 100
#: format -> what its files look like, for --help and messages
FORMATS = {
    "paragraphs": "a blank line between paragraphs, hard-wrapped or not, as in books; one document per file",
    "lines": "one sentence per line, a blank line between documents",
    "wikitext": "one paragraph per line, punctuation separated by spaces; ` = Title = ` begins a document",
}


@dataclass(frozen=True)
class Document:
    """A text, and the name of its source."""

    name: str
    sentences: list[str]


def text_files(inputs: Sequence[Path], *, besides: Sequence[Path] = ()) -> list[Path]:
    """The text files among `inputs`: each file itself, and the *.txt files of each folder, sorted by name.

    In a folder, files in `besides` and hidden files are skipped. Raises DataError for a missing input, a folder without
    text, and a file named twice, which could end up in both training and test data.
    """
    found: list[Path] = []
    excluded = {os.path.realpath(path) for path in besides}
    for path in inputs:
        try:
            found += _texts_of(path, excluded)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{path} does not exist; expected a text file or a folder of *.txt") from None
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror or error}; expected a text file or a folder of *.txt that you"
                " may read"
            ) from error
    seen: dict[str, Path] = {}
    for file in found:
        if (twin := seen.setdefault(os.path.realpath(file), file)) is not file:
            raise DataError(f"{file} is named twice (also as {twin}): name it once, or test data would be trained on")
    return found


def _texts_of(path: Path, excluded: Collection[str]) -> list[Path]:
    """The files of one input. Raises OSError if the input cannot be examined."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise DataError(f"{path} is neither a file nor a folder; expected text files or folders of *.txt")
    names = (file for file in sorted(path.iterdir()) if file.suffix == ".txt" and not file.name.startswith("."))
    files = [file for file in names if file.is_file() and os.path.realpath(file) not in excluded]
    if not files:
        raise DataError(f"{path} has no text: expected files *.txt in that folder (subfolders are not read)")
    return files


def printable(name: str) -> str:
    """A name, or a line with names, with bytes that are not UTF-8 escaped, such as "\\xe9"."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def many(count: int, thing: str) -> str:
    """A count with its noun, such as "3 rows"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def documents_of(text: str, form: str) -> list[list[str]]:
    """The sentences of each document of a text in the format `form`, a key of FORMATS; some may have none.

    If the text is a part of a file, the first document may continue one from the part before.
    """
    return list({"paragraphs": _paragraphs, "lines": _lines, "wikitext": _wikitext}[form](text))


def split_sentences(paragraph: str) -> list[str]:
    """The approximate sentences of a paragraph. White space is collapsed; sentences without letters are dropped."""
    paragraph = " ".join(paragraph.split())
    sentences, begin = [], 0
    for match in _STOP.finditer(paragraph):
        # a few characters on both sides suffice; longer slices would be copied for each stop of a long paragraph
        before = paragraph[max(begin, match.start() - 20) : match.start()]
        if match["stop"] == "." and _is_abbreviation(before, paragraph[match.end() : match.end() + 5]):
            continue
        sentences.append(paragraph[begin : match.end()].rstrip())
        begin = match.end()
    sentences.append(paragraph[begin:])
    return [sentence for sentence in sentences if _has_letters(sentence)]


def hold_out(sizes: Sequence[int], share: float, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """The number of leading sentences of each document for training; a fraction of about `share` is left for testing.

    Whole documents are held out if there are at least 100, else the end of each. `sizes`: sentences per document.
    """
    if len(sizes) < WHOLE_DOCUMENTS:
        return np.array([size - round(size * share) for size in sizes], np.int64)
    kept = np.array(sizes, np.int64)
    room = max(sum(sizes) * share, min(sizes) if share else 0)
    for number in generator.permutation(len(sizes)).tolist():
        if sizes[number] <= room:
            kept[number] = 0
            room -= sizes[number]
    return kept


# a stop, closing quotes and brackets, spaces; then, after opening ones, a capital or a digit; or `code`
_STOP = re.compile(r"(?P<stop>\.\.\.|[.!?…])[\"”’')\]»*_]*\s+(?=(?:[\"“‘'(\[«*_]*(?:[^\W\d_a-zß-öø-ÿ]|\d)|`+\w))")
# fmt: off
# a stop after these words does not end a sentence
_TITLES = frozenset((
    "mr", "mrs", "ms", "messrs", "mme", "mlle", "dr", "prof", "rev", "hon", "st", "sr", "jr", "esq", "gen",
    "col", "maj", "capt", "lieut", "lt", "sgt", "gov", "sen", "rep", "pres", "supt", "mt", "ft", "viz", "vs",
    "cf", "eg", "ie", "e.g", "i.e", "al", "approx", "ed", "eds", "trans", "bros", "dept", "univ",
))
# after these words it does, unless a number follows: "He said no. Then", "No. 7"
_COUNTED = frozenset((
    "no", "nos", "vol", "vols", "p", "pp", "fig", "figs", "ch", "chap", "art", "par", "sec", "sect", "pt", "bk",
    "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sept", "sep", "oct", "nov", "dec",
))
# fmt: on
_LAST_WORD = re.compile(r"[^\s\"“‘'(\[«*_`—–-]*$")


def _is_abbreviation(before: str, after: str) -> bool:
    """Whether the stop after the last word of `before` belongs to the word and does not end the sentence."""
    match = _LAST_WORD.search(before)
    word = match.group() if match else ""
    lower = word.lower()
    if lower in _COUNTED:
        return after.lstrip("\"“‘'([«*_`")[:1].isdigit()
    # J. S. Bach, U.S. Army; but "It was I. Then"
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return lower in _TITLES or is_initial or re.fullmatch(r"(?:[A-Za-z]\.)+[A-Za-z]", word) is not None


def _paragraphs(text: str) -> Iterator[list[str]]:
    yield [sentence for paragraph in _blocks(text) for sentence in split_sentences(" ".join(paragraph))]


def _lines(text: str) -> Iterator[list[str]]:
    for block in _blocks(text):
        yield [" ".join(line.split()) for line in block if _has_letters(line)]


def _wikitext(text: str) -> Iterator[list[str]]:
    sentences: list[str] = []
    for line in text.split("\n"):
        words = line.split()
        if len(words) > 2 and words[0] == words[-1] == "=":
            # " = Title = " begins an article, " = = Section = = " is not a sentence
            if words[1] != "=":
                yield sentences
                sentences = []
        else:
            sentences += _split_apart(_JOINED.sub(r"\1", " ".join(words)).replace("<unk>", "[UNK]"))
    yield sentences


# "0 @.@ 7", "500 @,@ 000", "14 @-@ year"
_JOINED = re.compile(r" @([-.,])@(?: |$)")


def _split_apart(paragraph: str) -> Iterator[str]:
    """Split text in which spaces separate punctuation from words, so that a stop is never part of a word."""
    sentence: list[str] = []
    is_over, quotes = False, 0
    for word in paragraph.split():
        # a quote after a stop belongs to the sentence if it closes an open one
        if is_over and not (word == '"' and quotes % 2):
            yield " ".join(sentence)
            sentence, is_over, quotes = [], False, 0
        sentence.append(word)
        is_over = is_over or word in (".", "!", "?")
        quotes += word == '"'
    if _has_letters(" ".join(sentence)):
        yield " ".join(sentence)


def _blocks(text: str) -> Iterator[list[str]]:
    """Runs of lines separated by blank lines."""
    block: list[str] = []
    for line in text.split("\n"):
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def _has_letters(text: str) -> bool:
    return any(character.isalnum() for character in text)
