"""WordPiece vocabularies for BERT: read a file, train one, and encode text, with the `tokenizers` library.

Its trainer numbers the pieces `##c` in hash map order, so that the same text gives a different vocabulary in each
process. Pieces that are given in advance are numbered in the given order: therefore every single-character piece is
computed here, sorted, and passed to the trainer; the rest of training is deterministic. No other call of `tokenizers`
depends on an order.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import stat
from collections import Counter, defaultdict
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
from hetseq.tasks.bert.vocab import read_vocab

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

#: maximum size of the alphabet; words with rarer characters become [UNK]
_ALPHABET = 1000
#: pieces that occur less often do not become a token
_MIN_FREQUENCY = 2
#: distinct words that are cached: about 200 MB
_MOST_WORDS = 1_000_000


@dataclass(frozen=True)
class Vocabulary:
    """The distinct pieces in the order of their ids, including the special tokens."""

    tokens: tuple[str, ...]
    is_lower_case: bool = True

    def id_of(self, token: str) -> int:
        """The id of a piece that must be in the vocabulary."""
        return self.tokens.index(token)

    def text(self) -> str:
        """The content of `vocab.txt`."""
        return "".join(f"{token}\n" for token in self.tokens)

    def sha256(self) -> str:
        """The SHA-256 of `vocab.txt`."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def read_vocabulary(path: Path, *, is_lower_case: bool) -> Vocabulary:
    """The vocabulary in a file with one piece per line. Raises DataError for a file that training would refuse."""
    expected = "expected the vocabulary of a BERT model, one token per line (vocab.txt); give --vocab-file FILE"
    try:  # checked here because read_vocab names the flag of training, --dict
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path} is not a file; {expected}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; {expected}") from error
    return Vocabulary(tuple(read_vocab(path)), is_lower_case)


def train_vocabulary(sentences: Iterable[str], size: int, *, is_lower_case: bool) -> Vocabulary:
    """Train at most `size` pieces on `sentences`, deterministically; the special tokens have the ids 0 to 4.

    `sentences` are read twice, so they must not be an iterator.

    Raises ConfigError if `size` has no room for the characters of the text.
    """
    normalizer, pre_tokenizer = BertNormalizer(lowercase=is_lower_case), BertPreTokenizer()
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(normalizer.normalize_str(sentence))
    by_count = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    alphabet, rare = sorted(by_count[:_ALPHABET]), frozenset(by_count[_ALPHABET:])
    # punctuation and Chinese characters are words of their own and never continue one
    pieces = [f"##{c}" for c in alphabet if len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(f"a{c}"))) == 1]
    least = len(SPECIAL_TOKENS) + len(pieces) + len(alphabet)
    if size < least:
        raise ConfigError(
            f"--vocab-size {size} has no room for the {len(alphabet)} distinct characters of the text; give at least"
            f" {least}, preferably {max(4 * least, 1000)}"
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
    """Encodes sentences like BERT's own tokenizer: normalise, split at spaces and punctuation, then into pieces.

    "[UNK]" in a text is the unknown word; any other special token in it is plain text. No rule looks across a space, so
    each word between two spaces is encoded once and cached: a text has few distinct words. At most a million are kept.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = {token: number for number, token in enumerate(vocabulary.tokens)}
        self._tokenizer = Tokenizer(WordPiece(vocab=ids, unk_token=UNK, max_input_chars_per_word=100))
        self._tokenizer.normalizer = BertNormalizer(lowercase=vocabulary.is_lower_case)
        self._tokenizer.pre_tokenizer = BertPreTokenizer()
        self._tokenizer.add_special_tokens([UNK])
        self._forget()

    def encode(self, sentences: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """The ids of each sentence, without [CLS] and [SEP]."""
        ids, lengths = self.encode_joined(sentences)
        return [ids[end - length : end] for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist())]

    def encode_joined(self, sentences: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The ids of all sentences one after another, without [CLS] and [SEP], and their number per sentence."""
        if not sentences:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if len(self._numbers) > _MOST_WORDS:
            self._forget()
        known = len(self._numbers)
        words = " ".join(sentences).split(" ")
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))  # of each word
        self._learn(list(itertools.islice(self._numbers, known, None)))
        counts = np.fromiter((sentence.count(" ") + 1 for sentence in sentences), np.int64, len(sentences))
        sizes = self._ends[numbers + 1] - self._ends[numbers]  # ids of each word
        after = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        # index of each id in self._ids: the beginning of its word there, plus its offset within the word
        places = np.repeat(self._ends[numbers] - after[:-1], sizes) + np.arange(after[-1])
        lengths = np.diff(after[np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])])
        return self._ids[places], lengths

    def _forget(self) -> None:
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self._parts: dict[str, list[int]] = {}  # the ids of the parts of words
        self._ids = np.zeros(0, np.int64)  # of all words, one after another
        self._ends = np.zeros(1, np.int64)  # of each word in them, with a 0 before the first

    def _learn(self, words: Sequence[str]) -> None:
        """Append the ids of new words."""
        if not words:
            return
        parts = [_PARTS.findall(word) if _is_plain(word) else [word] for word in words]
        new = list(dict.fromkeys(part for each in parts for part in each if part not in self._parts))
        encoded = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._parts.update(zip(new, (encoding.ids for encoding in encoded)))
        ids = [[number for part in each for number in self._parts[part]] for each in parts]
        ends = self._ends[-1] + np.cumsum([len(each) for each in ids], dtype=np.int64)
        self._ids = np.concatenate([self._ids, np.fromiter(itertools.chain.from_iterable(ids), np.int64)])
        self._ends = np.concatenate([self._ends, ends])


# runs of letters, and punctuation, that `tokenizers` splits anyway: split here, `dogs,` and `dogs.` share a part
_PLAIN, _PARTS = re.compile("[!-~“”‘’—–…]+"), re.compile("[A-Za-z0-9]+|[^A-Za-z0-9]")


def _is_plain(word: str) -> bool:
    return _PLAIN.fullmatch(word) is not None and UNK not in word


def _without(rare: frozenset[str], sentences: Iterable[str], normalizer: BertNormalizer) -> Iterable[str]:
    """The sentences without the words that contain a character in `rare`."""
    for sentence in sentences:
        words = normalizer.normalize_str(sentence).split()
        yield " ".join(word for word in words if rare.isdisjoint(word))
