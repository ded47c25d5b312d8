"""Dynamic masking for BERT: chooses the words of a row to mask and their replacements, each time a row is read.

Pure: arrays in, arrays out; it knows no file, no tensor and no clock. The recipe follows Devlin et al. (2018, section
3.1): 15 % of the words of a row are predicted; of these, 80 % are replaced by [MASK], 10 % by a random word, and 10 %
are kept. Special tokens, including [UNK], are never masked: there is nothing to predict. Nor is the first position,
which holds [CLS].

The one idea: randomness is a function, not a stream. Every position of every row has a 64-bit number, computed only
from (seed, epoch, sample, position), so masks are the same on any cluster, in any batch, in any order and in any
version of NumPy. The number comes from SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", with Stafford's variant 13 as finaliser): `draw(state, n)` is the n-th output of that generator, and
outputs serve as states in turn: the seed yields the state of each epoch, an epoch those of its samples, a sample the
numbers of its positions. The masked words of a row are the ones with the smallest numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetseq import ConfigError
from hetseq.tasks.bert.vocab import SPECIAL_TOKENS

Numbers = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.integer]
Flags = npt.NDArray[np.bool_]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_NEVER = np.uint64(2**64 - 1)  # larger than the number of any word, whose lowest bits are its position
#: low bits of a key that hold the position, so that no two in a row are equal
_POSITION_BITS = np.uint64(16)
#: the longest row
MOST_POSITIONS = 2**16 - 1
# of 2**32
_HIDDEN, _OTHER = np.uint64(round(0.8 * 2**32)), np.uint64(round(0.9 * 2**32))
# kinds of tokens
_SPECIAL, _BEGIN, _NEXT = range(3)


@dataclass(frozen=True)
class Masking:
    """How to choose the words of a row to predict. Raises ConfigError for impossible values."""

    share: float = 0.15  # of its words
    max_predictions: int | None = None  # upper limit per row
    whole_words: bool = False  # mask all pieces of a word together

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"masking: share is {self.share}, expected more than 0 and less than 1")
        if self.max_predictions is not None and self.max_predictions < 1:
            raise ConfigError(f"masking: max_predictions is {self.max_predictions}, expected 1 or more, or None")


class Words:
    """The properties of a vocabulary for masking: which tokens are words, and which of them continue a word."""

    def __init__(self, vocab: Sequence[str]) -> None:
        """`vocab`: the tokens in the order of their ids, including BERT's five special tokens."""
        kinds = [
            _SPECIAL if token in SPECIAL_TOKENS else _NEXT if token.startswith("##") and len(token) > 2 else _BEGIN
            for token in vocab
        ]
        self._kinds = np.array(kinds, np.uint8)
        self._ordinary = np.flatnonzero(self._kinds)
        self._mask = vocab.index("[MASK]")
        if not len(self._ordinary):
            raise ConfigError(f"the vocabulary has {len(vocab)} tokens, all of them special: expected words")

    def choose(self, ids: Integers, numbers: Numbers, masking: Masking) -> Integers:
        """The places to predict, row * W + column, (m,), ascending; `ids` and `numbers` are (n, W).

        A row of w words has w * share of them, rounded, but at least one if it has a word, and at most max_predictions.
        Whole words are taken in the order of their first pieces' numbers, as long as at least half of a word is within
        w * share; words of more than max_predictions pieces are skipped.
        """
        kinds = self._kinds.take(ids)  # (n, W)
        is_word = kinds != _SPECIAL
        is_word[:, 0] = False  # [CLS]; and in HDF5, position 0 ends the list of masked positions
        words = np.count_nonzero(is_word, axis=1)  # (n,)
        positions = np.arange(ids.shape[1], dtype=np.uint64)
        keys = numbers >> _POSITION_BITS  # (n, W), distinct within a row
        keys <<= _POSITION_BITS
        keys |= positions
        if not masking.whole_words:
            count = np.maximum(np.floor(words * masking.share + 0.5).astype(np.int64), np.minimum(words, 1))  # (n,)
            count = np.minimum(count, masking.max_predictions or MOST_POSITIONS)
            np.copyto(keys, _NEVER, where=~is_word)
            return np.flatnonzero(_smallest(keys, count))
        # continuation pieces without a beginning, because the row was cut there, count as a word
        before = np.concatenate([np.zeros((len(ids), 1), bool), is_word[:, :-1]], axis=1)
        is_first = is_word & ((kinds == _BEGIN) | ~before)
        lengths = _lengths(is_word, is_first)
        is_first &= lengths <= (masking.max_predictions or MOST_POSITIONS)
        np.copyto(keys, _NEVER, where=~is_first)
        taken = _smallest(keys, _whole(keys, lengths, words * masking.share, masking.max_predictions or MOST_POSITIONS))
        pieces = lengths[taken]  # (chosen words,)
        begins = np.flatnonzero(taken) - (np.cumsum(pieces) - pieces)
        return np.asarray(np.repeat(begins, pieces) + np.arange(pieces.sum()))

    def instead(self, originals: Integers, numbers: Numbers) -> Integers:
        """The replacements of the words `originals` (m,), drawn from their `numbers`."""
        drawn = draw(numbers, 0)
        chance, others = drawn >> _HALF, (drawn & _LOW) * np.uint64(len(self._ordinary)) >> _HALF
        random = self._ordinary[others.astype(np.int64)]
        return np.where(chance < _HIDDEN, self._mask, np.where(chance < _OTHER, random, originals))


def numbers_of(seed: int, epoch: int, samples: npt.NDArray[np.int64], width: int) -> Numbers:
    """A 64-bit number for each position of the samples (n,), (n, width)."""
    of_samples = draw(_of_epoch(seed, epoch), samples)
    return draw(of_samples[:, None], np.arange(width))


@functools.lru_cache(maxsize=8)
def _of_epoch(seed: int, epoch: int) -> Numbers:
    return draw(draw(np.array([seed], np.uint64), 0), epoch)


def draw(states: Numbers, numbers: int | Integers) -> Numbers:
    """Outputs `numbers`, from 0, of SplitMix64 generators that begin with `states`; arrays are broadcast."""
    drawn = states + _GAMMA * (np.atleast_1d(np.asarray(numbers, np.uint64)) + np.uint64(1))
    shifted = np.empty_like(drawn)  # one array instead of seven: allocation took half of the time
    for shift, factor in zip(_SHIFTS, _FACTORS):
        drawn ^= np.right_shift(drawn, shift, out=shifted)
        drawn *= factor
    drawn ^= np.right_shift(drawn, _SHIFTS[2], out=shifted)
    return drawn


def _smallest(keys: Numbers, count: Integers) -> Flags:
    """Which of the keys (n, W) are among the `count` (n,) smallest of their row; none if that is 0."""
    ascending = np.sort(keys, axis=1)
    last = ascending[np.arange(len(keys)), np.maximum(count - 1, 0)]
    last[count == 0] = 0  # less than any key except position 0's, which is never chosen
    return keys <= last[:, None]


def _lengths(is_word: Flags, is_first: Flags) -> Integers:
    """The number of pieces of each word, at its first piece; undefined elsewhere. (n, W)"""
    flat_words, flat_first = is_word.ravel(), is_first.ravel()
    firsts = np.flatnonzero(flat_first)
    lengths = np.zeros(is_word.size, np.int64)
    word = np.cumsum(flat_first) - 1  # the word of each piece: in its own row, as every run begins with a first piece
    lengths[firsts] = np.bincount(word[flat_words], minlength=len(firsts))
    return lengths.reshape(is_word.shape)


def _whole(keys: Numbers, lengths: Integers, wanted: npt.NDArray[np.float64], most: int) -> Integers:
    """How many words of each row (n,) to take in the order of their keys, for about `wanted` (n,) pieces."""
    order = np.argsort(keys, axis=1)
    ordered = np.take_along_axis(np.where(keys != _NEVER, lengths, 0), order, axis=1)
    pieces = np.cumsum(ordered, axis=1)  # including this word
    fits = (pieces - ordered / 2 <= wanted[:, None]) & (ordered > 0)
    fits[:, 0] = ordered[:, 0] > 0
    # sums ascend, and so do the middles of words, so the words that fit come first
    return np.asarray(np.count_nonzero(fits & (pieces <= most), axis=1))
