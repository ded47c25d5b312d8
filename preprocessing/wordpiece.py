"""WordPiece vocabularies of BERT: read, trained and applied. The work is done by `tokenizers`.

Its trainer numbers the pieces `##c` in the order of a hash map, so that the same text gives another vocabulary in each
process. Pieces that are named beforehand are numbered in the order named: therefore every single-character piece is
computed here, sorted, and handed to the trainer; what then remains is deterministic. `tokenizers` is asked for
nothing else that could depend on an order.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from hetseq import ConfigError, DataError
from tasks.bert_vocab import read_vocab

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

#: more different characters than this are no alphabet; words with the rarest of them become [UNK]
_ALPHABET = 1000
#: pieces seen less often are no pieces
_MIN_FREQUENCY = 2


@dataclass(frozen=True)
class Vocabulary:
    """The pieces in the order of their ids, all different, the special ones among them."""

    tokens: tuple[str, ...]
    is_lower_case: bool = True

    def id_of(self, token: str) -> int:
        """The id of a piece that is known to be there."""
        return self.tokens.index(token)

    def text(self) -> str:
        """The content of `vocab.txt`."""
        return "".join(f"{token}\n" for token in self.tokens)


def read_vocabulary(path: Path, *, is_lower_case: bool) -> Vocabulary:
    """The vocabulary in a file with one piece a line; DataError for what training on the corpus would refuse."""
    expected = "expected the vocabulary of a BERT model, one token a line (vocab.txt); give --vocab-file FILE"
    try:  # said here, for training calls the flag --dict
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path} is no file; {expected}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; {expected}") from error
    return Vocabulary(tuple(read_vocab(path)), is_lower_case)


def train_vocabulary(sentences: Sequence[str], size: int, *, is_lower_case: bool) -> Vocabulary:
    """At most `size` pieces for `sentences`, the same ones each time; the special tokens have the ids 0 to 4.

    Raises ConfigError if `size` has no room for the characters of the text.
    """
    normalizer, pre_tokenizer = BertNormalizer(lowercase=is_lower_case), BertPreTokenizer()
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(normalizer.normalize_str(sentence))
    by_count = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    alphabet, rare = sorted(by_count[:_ALPHABET]), frozenset(by_count[_ALPHABET:])
    # signs and Chinese characters stand alone, they continue no word
    pieces = [f"##{c}" for c in alphabet if len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(f"a{c}"))) == 1]
    least = len(SPECIAL_TOKENS) + len(pieces) + len(alphabet)
    if size < least:
        raise ConfigError(
            f"--vocab-size {size} has no room for the {len(alphabet)} different characters of the text; give at least"
            f" {least}, better {max(4 * least, 1000)}"
        )
    tokenizer = Tokenizer(WordPiece(unk_token=UNK))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=_MIN_FREQUENCY,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS, *pieces],
        limit_alphabet=_ALPHABET,
    )
    tokenizer.train_from_iterator(_without(rare, sentences, normalizer) if rare else sentences, trainer)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return Vocabulary(tuple(token for token, _ in by_id), is_lower_case)


class Encoder:
    """Sentences to ids, as BERT's own tokenizer does it: normalised, split at spaces and signs, then into pieces.

    "[UNK]" in a text is the unknown word; any other special token in it is text like all the rest.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = {token: number for number, token in enumerate(vocabulary.tokens)}
        self._tokenizer = Tokenizer(WordPiece(vocab=ids, unk_token=UNK, max_input_chars_per_word=100))
        self._tokenizer.normalizer = BertNormalizer(lowercase=vocabulary.is_lower_case)
        self._tokenizer.pre_tokenizer = BertPreTokenizer()
        self._tokenizer.add_special_tokens([UNK])

    def encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """The ids of each sentence, without [CLS] and [SEP]."""
        found = self._tokenizer.encode_batch_fast(list(sentences), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in found]


def _without(rare: frozenset[str], sentences: Iterable[str], normalizer: BertNormalizer) -> Iterable[str]:
    """The sentences without the words that hold one of the characters `rare`."""
    for sentence in sentences:
        words = normalizer.normalize_str(sentence).split()
        yield " ".join(word for word in words if rare.isdisjoint(word))
