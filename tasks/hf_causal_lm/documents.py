"""Texts as rows of tokens: documents of a text file, or lines of a JSONL file.

Responsible for the two formats, for the table of rows that `chat` fills as well, and for the tokens of a document;
`chat` defines the tokens of a conversation. A document has the tokens that the model's own tokenizer gives, special
ones included, and an end-of-sequence token. It is cut into rows of at most `max_length` tokens. Every token but the
first of a row is a target.

The tokens of a split are in memory, five bytes each. A text of more than a million characters is encoded in stretches
that begin at a line, since an encoder needs hundreds of bytes per token meanwhile.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetseq import DataError
from hetseq.tasks.hf_causal_lm.files import JSONL
from hetseq.tasks.hf_causal_lm.tokenizer import Tokenizer
from hetseq.tasks.rows.split_files import LARGEST_FILE, read_lines
from hetseq.tasks.rows.text_file import END_OF_TEXT, documents_of, object_of, read_text

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
#: line of the file, from 1, and what it holds
Item = tuple[int, Any]

#: the two kinds of lines of a JSONL file, and of data
TEXTS, CHATS = "text", "messages"

#: characters per stretch, and per call of the encoder, as in `preprocessing/gpt_corpus.py`
_STRETCH, _STRETCHES = 1 << 20, 2 << 20
#: the beginning of a line after a line with text, where the usual tokenizers never join characters
_LINE = re.compile(r"(?<=\S\n)(?=\S)")

_EXPECTED_TEXT = f"text in UTF-8, with lines {END_OF_TEXT} between documents"
_EXPECTED = 'one JSON object per line, {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


class Row(NamedTuple):
    """One row: its tokens, which of them are targets, and how many `hetseq predict` continues."""

    ids: Ids
    is_target: Flags
    prompt_length: int


class TokenRows:
    """Rows of any length in three arrays. Never changes; can be pickled and forked.

    `ids` and `is_target` (tokens of all rows,); `lengths` and `prompt_lengths` (n,) int64. The first token of a row is
    no target.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        kept = list(rows)
        self.ids: Ids = np.concatenate([np.zeros(0, np.int32), *(row.ids for row in kept)])
        self.is_target: Flags = np.concatenate([np.zeros(0, np.bool_), *(row.is_target for row in kept)])
        self.lengths = np.fromiter((len(row.ids) for row in kept), np.int64, len(kept))
        self.prompt_lengths = np.fromiter((row.prompt_length for row in kept), np.int64, len(kept))
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        end = int(self._ends[index])
        span = slice(end - int(self.lengths[index]), end)
        return Row(self.ids[span], self.is_target[span], int(self.prompt_lengths[index]))


def read_items(path: Path) -> tuple[str, Iterator[Item]]:
    """The kind of a file, TEXTS or CHATS, and its documents or conversations.

    The first line of a JSONL file determines the kind: CHATS if it has "messages". Lines are checked when the iterator
    reaches them. Raises DataError naming file and line.
    """
    if path.suffix.lower() == JSONL:
        lines = [(number, line) for number, line in enumerate(read_lines(path, _EXPECTED), 1) if line.strip()]
        kind = CHATS if CHATS in object_of(path, *lines[0], _EXPECTED) else TEXTS
        return kind, _of_lines(path, lines, kind)
    text = read_text(path, _EXPECTED_TEXT, most_bytes=LARGEST_FILE).removeprefix("\ufeff")
    documents = documents_of(text.replace("\r\n", "\n").replace("\r", "\n"))
    if not documents:
        raise DataError(f"{path} has only {END_OF_TEXT} lines: expected {_EXPECTED_TEXT}")
    return TEXTS, iter(list(enumerate(documents, 1)))


def _of_lines(path: Path, lines: Sequence[tuple[int, str]], kind: str) -> Iterator[Item]:
    for number, line in lines:
        found = object_of(path, number, line, _EXPECTED)
        if kind not in found:
            other = next((each for each in (TEXTS, CHATS) if each in found), None)
            if other is not None:
                raise DataError(
                    f"{path}, line {number} has {other!r}, but line {lines[0][0]} has {kind!r}: expected one kind of"
                    " lines in a file; divide it"
                )
            raise DataError(
                f"{path}, line {number} has no {kind!r}: it has {', '.join(found)[:80] or 'nothing'}; expected"
                f" {_EXPECTED}"
            )
        if found.get("tools"):
            raise DataError(
                f"{path}, line {number} has 'tools', which do not reach the chat template: put their text into the"
                " system message"
            )
        if kind == CHATS:
            _check_messages(f"{path}, line {number}", found[kind])
        else:
            _check_string(f"{path}, line {number}: its text", found[kind])
        yield number, found[kind]


def _check_messages(place: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: its messages are {messages!r:.60}: expected a list of one or more; {_EXPECTED}")
    for at, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise DataError(f"{place}: message {at} is {message!r:.60}: expected an object with role and content")
        if "weight" in message:
            raise DataError(
                f"{place}: message {at} has a 'weight': the loss is on all answers alike; leave the key out, and the"
                " answers that are not to be learned"
            )
        for key in ("role", "content"):
            if key not in message:
                raise DataError(
                    f"{place}: message {at} has no {key!r}: it has {', '.join(message)[:80] or 'nothing'}; expected"
                    f" {_EXPECTED}"
                )
            _check_string(f"{place}: the {key} of message {at}", message[key])


def _check_string(what: str, found: Any) -> None:
    if not isinstance(found, str):
        raise DataError(f"{what} is {found!r:.60}: expected a string in quotes")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has the half character \\u{ord(found[error.start]):04x} at {error.start}: expected both halves, or"
            " neither"
        ) from error


def rows_of_texts(
    documents: Iterable[Item], tokenizer: Tokenizer, path: Path, *, max_length: int
) -> tuple[TokenRows, int]:
    """The rows of texts, and the number of documents.

    Texts of white space only, and texts without tokens, are left out, which the log says. Raises DataError.
    """
    rows: list[Row] = []
    texts = [text for _, text in documents]
    count = 0
    end: int | None = tokenizer.eos_token_id
    if end is None:
        logger.warning("%s: the tokenizer has no end of text, so the model does not learn where one ends", path)
    for ids in _Encoder(tokenizer).encode(text for text in texts if text.strip()):
        if len(ids):
            count += 1
            whole = ids if end is None or ids[-1] == end else np.append(ids, np.int32(end))
            rows += _cut(whole, max_length, unprompted=int(end is not None))
    if count < len(texts):
        logger.warning("%s: %d of %d texts are empty and are left out", path, len(texts) - count, len(texts))
    return TokenRows(rows), count


def _cut(ids: Ids, most: int, *, unprompted: int) -> Iterator[Row]:
    """Rows of at most `most` tokens. All are a prompt but the `unprompted` last ones of the document."""
    for begin in range(0, len(ids), most):
        part = ids[begin : begin + most]
        is_target = np.arange(len(part)) > 0
        # a row that is nothing but the end of its document is continued too: a prompt has a token
        yield Row(part, is_target, max(1, min(len(part), len(ids) - unprompted - begin)))


class _Encoder:
    """Encodes documents in batches, and those that are long in stretches; adds the tokenizer's special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: tuple[Ids, Ids] | None = None  # at the beginning and the end of a text; from its first one

    def encode(self, texts: Iterable[str]) -> Iterator[Ids]:
        """The ids of each text, as `tokenizer(text)` gives them; empty if the text itself has no tokens."""
        held: list[Ids] = []
        for batch in _batches(texts):
            found = self._ids([stretch for stretch, _ in batch], has_special=False)
            for (stretch, is_last), ids in zip(batch, found):
                if len(ids) and self._added is None:
                    self._added = self._around(stretch, ids)
                held.append(ids)
                if is_last:
                    yield self._whole(held)
                    held = []

    def _ids(self, texts: list[str], *, has_special: bool) -> list[Ids]:
        found = self._tokenizer(
            texts, add_special_tokens=has_special, return_attention_mask=False, return_token_type_ids=False,
            verbose=False,
        )  # fmt: skip
        return [np.array(ids, np.int32) for ids in found["input_ids"]]

    def _around(self, text: str, ids: Ids) -> tuple[Ids, Ids]:
        """The special tokens before and after the ids of a text."""
        whole = self._ids([text], has_special=True)[0]
        for at in range(len(whole) - len(ids) + 1):
            if np.array_equal(whole[at : at + len(ids)], ids):
                return whole[:at], whole[at + len(ids) :]
        raise DataError(
            f"the tokenizer in {self._tokenizer.name_or_path} adds special tokens within a text: expected some before"
            " and after it only; make records with `python -m hetseq.preprocessing.gpt_corpus --tokenizer FILE`"
        )

    def _whole(self, parts: Sequence[Ids]) -> Ids:
        if self._added is None or not any(map(len, parts)):
            return np.zeros(0, np.int32)
        before, after = self._added
        return np.concatenate([before, *parts, after])


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Batches of stretches for the encoder, and whether each is the last of its document."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        stretches = list(_stretches(text))
        for number, stretch in enumerate(stretches, 1):
            batch.append((stretch, number == len(stretches)))
            size += len(stretch)
            if size >= _STRETCHES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _stretches(text: str) -> Iterator[str]:
    begin = 0
    while found := _LINE.search(text, begin + _STRETCH):
        yield text[begin : found.start()]
        begin = found.start()
    yield text[begin:]
