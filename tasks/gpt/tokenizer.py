"""Reads the tokens and their ids from `tokenizer.json`, the tokenizer of a causal language model in one file.

Responsible only for the tokens, by which a model and its data are known to share a vocabulary;
`preprocessing/gpt_corpus.py` tokenizes text. Does not need `tokenizers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetseq import DataError
from hetseq.tasks.nn.model_config import read_object

#: the name of the file in folders of data and of models
TOKENIZER = "tokenizer.json"

_LARGEST_FILE = 1 << 27  # bytes; a file with 256,000 tokens has 34 million
_MOST_TOKENS = 1 << 24
_EXAMPLE = (
    'the tokenizer of a model in one file, {"model": {"type": "BPE", "vocab": {...}}, "added_tokens": [...], ...}'
)


def read_tokens(path: Path) -> list[str]:
    """The tokens in the order of their ids, "" for an unused id. Raises DataError for an invalid tokenizer."""
    try:
        return _by_id(read_object(path, _EXAMPLE, largest_bytes=_LARGEST_FILE))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _by_id(found: dict[str, Any]) -> list[str]:
    model, added = found.get("model"), found.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: pairs of token and score, in the order of the ids
        vocab = {pair[0]: number for number, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    if not isinstance(vocab, dict) or not vocab or not isinstance(added, list):
        raise DataError(f"has no model with a vocab: expected {_EXAMPLE}")
    ids = dict(vocab)
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise DataError(f"has an entry of added_tokens without content: expected {_EXAMPLE}")
        ids[token["content"]] = token.get("id")
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < _MOST_TOKENS:
            raise DataError(
                f"the id of the token {token[:40]!r} is {number!r}: expected a whole number below {_MOST_TOKENS:,}"
            )
    tokens = [""] * (max(ids.values()) + 1)
    for token, number in ids.items():
        tokens[number] = token
    return tokens
