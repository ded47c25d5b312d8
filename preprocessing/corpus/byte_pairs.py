"""Tokenizers of causal language models: byte pairs trained, or a published `tokenizer.json` read, and applied.

The work is done by `tokenizers`. Its trainer of byte pairs depends on no order: merges are ranked by count and then by
the ids of both halves, the 256 bytes are numbered by their characters, and no piece has a mark of its own that would be
numbered as it is met (as in WordPiece). So the same text gives the same file; a test holds it to that.
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

#: what a trained tokenizer calls the end of a text, as GPT-2's does, and what others call it
END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
#: the bytes and the end of a text: smaller is no tokenizer
LEAST_TOKENS = 257
#: pairs seen less often are no token
_MIN_FREQUENCY = 2


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """At most `size` tokens for `texts`, the same ones each time: id 0 is the end of a text, then come the bytes.

    Text is split as GPT-2 splits it, and any text can be written with these tokens.
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
    """The tokenizer in a file, which cuts nothing off and pads nothing. Raises DataError."""
    read_tokens(path)  # which tells most of what can be wrong
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing narrower
        raise DataError(
            f"{path} is no tokenizer that tokenizers can open ({error}): expected the tokenizer.json of a GPT-2 or"
            " Llama; give --tokenizer FILE"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(tokenizer: Tokenizer, name: str | None) -> int:
    """The id of the token that stands behind every document: that of `name`, else of the usual names the first."""
    for token in _ENDS if name is None else (name,):
        number = tokenizer.token_to_id(token)
        if number is not None:
            return int(number)
    if name is not None:
        raise ConfigError(f"--end-of-text {name}: the tokenizer has no such token; expected one that it has")
    raise DataError(
        f"the tokenizer has none of the tokens {', '.join(_ENDS)}: say which of its tokens ends a text, with"
        " --end-of-text TOKEN"
    )


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
    """The ids of each text, without any that are put in front or behind; names of special tokens in it are text."""
    tokenizer.encode_special_tokens = True
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in found]
