"""Byte-pair tokenizers for causal language models: train one, read a published `tokenizer.json`, and encode text.

The `tokenizers` library does the work. Its BPE trainer does not depend on order: merges are ranked by count and then by
the ids of both halves, the 256 bytes are numbered by their characters, and there are no continuation marks that would
be numbered in order of appearance (as in WordPiece). So the same text gives the same file, which a test checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from hetseq import ConfigError, DataError
from hetseq.tasks.gpt.tokenizer import read_tokens
from hetseq.tasks.rows.text_file import END_OF_TEXT as END_OF_TEXT

#: the end-of-text token of a trained tokenizer, as in GPT-2, and those of other tokenizers
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
#: the 256 bytes and the end of a text: the smallest possible tokenizer
LEAST_TOKENS = 257
#: pairs that occur less often do not become a token
_MIN_FREQUENCY = 2


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train at most `size` tokens on `texts`, deterministically: id 0 is the end of a text, then come the bytes.

    Text is split as in GPT-2, and the tokens can encode any text.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=_MIN_FREQUENCY,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, without truncation or padding. Raises DataError."""
    read_tokens(path)  # reports most errors in words of its own
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing narrower
        raise DataError(
            f"{path} is not a tokenizer that tokenizers can open ({error}): expected the tokenizer.json of a GPT-2 or"
            " Llama; give --tokenizer FILE"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(tokenizer: Tokenizer, name: str | None) -> int:
    """The id of the token after every document: the token `name`, else the first of the usual names that exists."""
    for token in _ENDS if name is None else (name,):
        number = tokenizer.token_to_id(token)
        if number is not None:
            return int(number)
    if name is not None:
        raise ConfigError(f"--end-of-text {name}: the tokenizer has no such token; expected one of its tokens")
    raise DataError(
        f"the tokenizer has none of the tokens {', '.join(_ENDS)}: name the token that ends a text, with"
        " --end-of-text TOKEN"
    )


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """The ids of each text, without added special tokens; names of special tokens within it are encoded as text."""
    tokenizer.encode_special_tokens = True
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in found]
