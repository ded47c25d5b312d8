"""The tokenizer of a model directory, opened with transformers.

Responsible for opening it without code from the directory or files from elsewhere, and for its tokens in the order of
their ids, by which a model and its data are known to share a vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetseq import DataError
from hetseq.tasks.gpt.tokenizer import TOKENIZER, read_tokens
from hetseq.tasks.hf_causal_lm.libraries import first_line, library

#: a PreTrainedTokenizerBase of transformers, which mypy does not see
Tokenizer = Any


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a model directory. Raises DataError, and ConfigError if transformers is missing."""
    transformers = library("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # it raises whatever its many readers raise
        raise DataError(
            f"transformers cannot open the tokenizer in {folder} ({first_line(error)}): expected the tokenizer.json"
            " and tokenizer_config.json of the model; copy all its files, without those that need code of their own"
        ) from error


def read_vocabulary(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """The tokens in the order of their ids, "" for an unused id; from `tokenizer.json` if there is one."""
    if (folder / TOKENIZER).is_file():
        return read_tokens(folder / TOKENIZER)
    vocab: dict[str, int] = tokenizer.get_vocab()
    tokens = [""] * (max(vocab.values()) + 1)
    for token, number in vocab.items():
        tokens[number] = token
    return tokens
