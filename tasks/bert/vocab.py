"""BERT's vocabulary file: one token per line, with ids counting from 0; and the check that it fits the network.

Also reads a `tokenizer.json`, the only file that newer versions of transformers write, whose vocabulary maps each token
to its id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetseq import DataError
from hetseq.tasks.rows.text_file import lines_of, read_text

_PAD = "[PAD]"
SPECIAL_TOKENS = (_PAD, "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_EXPECTED_JSON = "the tokenizer.json of a BERT, with a vocabulary of WordPiece"
_LARGEST_FILE = 64 << 20  # bytes
_PADDED_TO = 128  # a vocabulary may be padded to a multiple of at most this


def read_vocab(path: Path) -> list[str]:
    """The tokens of a UTF-8 vocabulary file, one per line; the line number, from 0, is the id of its token.

    A file that ends in .json is read as a `tokenizer.json` with a WordPiece vocabulary.

    Raises DataError if the file is missing, not UTF-8, empty, or not a BERT vocabulary.
    """
    is_json = path.suffix == ".json"
    expected = _EXPECTED_JSON if is_json else "a vocabulary with one token per line in UTF-8, such as BERT's vocab.txt"
    text = read_text(path, expected, most_bytes=_LARGEST_FILE, remedy="give --dict FILE")
    if text.startswith("\ufeff"):
        raise DataError(f"{path} begins with a byte order mark, which would belong to its first token: save it without")
    tokens = _tokens_of_json(text, path) if is_json else lines_of(text)
    _check_tokens(tokens, path, expected)
    return tokens


def find_vocab_in(folder: Path) -> Path | None:
    """The vocabulary file of a Hugging Face directory, vocab.txt or else tokenizer.json; None if it has neither."""
    return next((folder / name for name in ("vocab.txt", "tokenizer.json") if (folder / name).is_file()), None)


def _tokens_of_json(text: str, path: Path) -> list[str]:
    """The tokens of a tokenizer.json in the order of their ids. Raises DataError."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): expected {_EXPECTED_JSON}") from error
    model = found.get("model") if isinstance(found, dict) else None
    kind = model.get("type") if isinstance(model, dict) else None
    numbers = model.get("vocab") if isinstance(model, dict) else None
    if kind != "WordPiece" or not isinstance(numbers, dict):
        raise DataError(
            f"{path} has model.type {kind!r}: expected {_EXPECTED_JSON}; are these the files of another model?"
        )
    if sorted(map(str, numbers.values())) != sorted(map(str, range(len(numbers)))):
        raise DataError(
            f"{path}: the ids of its {len(numbers):,} tokens are not 0, 1, 2, ...: expected {_EXPECTED_JSON}"
        )
    return sorted(numbers, key=lambda token: int(numbers[token]))


def _check_tokens(tokens: list[str], path: Path, expected: str) -> None:
    lines: dict[str, int] = {}
    for line, token in enumerate(tokens, 1):
        if not token.strip(" \t"):
            raise DataError(
                f"{path}, line {line} is empty, and the tokens after it would have wrong ids: expected {expected}"
            )
        if lines.setdefault(token, line) != line:
            raise DataError(
                f"{path}, line {line}: token {token!r} is also in line {lines[token]}; expected {expected}, each once"
            )
    missing = [token for token in SPECIAL_TOKENS if token not in lines]
    if missing:
        raise DataError(
            f"{path} has {len(tokens):,} lines, the first {tokens[0][:40]!r}, and no {', '.join(missing)}: expected"
            f" {expected}, with the special tokens {', '.join(SPECIAL_TOKENS)}"
        )


def check_vocab(vocab: list[str], vocab_path: Path, *, config_path: Path, vocab_size: int, pad_token_id: int) -> None:
    """Raise DataError unless a configuration has the same vocab_size, possibly padded, and the same padding id."""
    count, most = len(vocab), -(-len(vocab) // _PADDED_TO) * _PADDED_TO
    if not count <= vocab_size <= most:
        padded = f" (or up to {most}, padded to a multiple of {_PADDED_TO})" if most > count else ""
        raise DataError(
            f"{config_path} has vocab_size {vocab_size}, but {vocab_path} has {count} tokens: expected vocab_size"
            f" {count}{padded}; give a --dict and a --config-file that belong together"
        )
    padding = vocab.index(_PAD)
    if pad_token_id != padding:
        raise DataError(
            f"{config_path} has pad_token_id {pad_token_id}{' (the default)' * (not pad_token_id)}, but {_PAD} is token"
            f" {padding} in {vocab_path}: the word at the former would never be learned; write"
            f' "pad_token_id": {padding} into the configuration'
        )


def check_same_vocab(own: Path, other: Path) -> None:
    """Raise DataError unless two vocabularies have the same tokens in the same order."""
    tokens, others = read_vocab(own), read_vocab(other)
    if tokens != others:
        line = next((at for at, (one, two) in enumerate(zip(tokens, others), 1) if one != two), None)
        line = min(len(tokens), len(others)) + 1 if line is None else line
        raise DataError(
            f"{other} is not the vocabulary of {own}: they differ from line {line} on, and the weights beside"
            f" {own.name} are meaningless for other tokens; leave --dict out, or use data that were made with {own}"
        )
