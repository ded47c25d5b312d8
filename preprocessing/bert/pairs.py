"""Sentence pairs for BERT pre-training: documents of token ids to rows. Pure: no file, no text, no clock.

A row is `[CLS] A [SEP] B [SEP]`, where B follows A in its document or, in half of the rows, comes from elsewhere; some
of its tokens are masked. Rows are made in two steps. `find_pairs` chooses the stretches A and B of the corpus, so that
rows can be shuffled before they exist; `fill` then makes the arrays of any selection of them. Random numbers come from
generators seeded by (seed, purpose, document, duplicate, ...), so the order of the processes has no effect. Long
documents are processed in spans of 8,192 sentences, each with its own generator and by any process: the last sentence
of a span opens no pair, like the last sentence of a document.

The recipe follows Devlin et al. (2018) and their `create_pretraining_data.py`, with four deliberate differences, which
matter if a corpus is a book and not Wikipedia:

* whether a row is short is drawn for each row; in the original, once per document, that is, for a whole book;
* a pair begins with at least two sentences, so that both labels are always possible; in the original, a long sentence,
  or the last one of a document, always gets a random next, which skews the labels;
* a random next is drawn among sentences, not documents, so that a tiny document is not drawn over and over; it is
  about as long as the text it replaces, or its length would reveal the label;
* [UNK] is never predicted, and no special token replaces a masked one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer]

#: sentences of the same document, before A and after B, excluded as a random next; fewer in short documents
_NEAR = 64
#: sentences of a long document that share a generator
SPAN = 8192
#: columns of the table of pairs: stretches, label, origin
TABLE_COLUMNS = 8
#: rows whose random numbers are drawn in one call: a call per number costs more than the number
_DRAWN = 256
# purposes of generators
_PAIRS, _MASKS, _ORDER = range(3)


@dataclass(frozen=True)
class Documents:
    """The tokens of a split, and the beginnings of its sentences and documents."""

    ids: Integers  # (tokens,)
    sentences: Integers  # (sentences + 1,) positions in ids
    documents: Integers  # (documents + 1,) positions in sentences

    def __len__(self) -> int:
        return len(self.documents) - 1


@dataclass(frozen=True)
class Recipe:
    """The parameters of a row."""

    max_seq_length: int = 128  # [CLS] and both [SEP] included
    max_predictions: int = 20
    masked_share: float = 0.15  # of the tokens of a row, including those three as in the original
    short_sequence_share: float = 0.1


@dataclass(frozen=True)
class Ids:
    """The special tokens of a vocabulary, and its size."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    vocab_size: int

    def ordinary(self) -> Integers:
        """All other tokens, in order."""
        special = [self.pad, self.unk, self.cls, self.sep, self.mask]
        return np.setdiff1d(np.arange(self.vocab_size), special)


@dataclass(frozen=True)
class Pairs:
    """Rows that are not filled yet."""

    seed: tuple[int, ...]
    stretches: Integers  # (rows, 4) begin and end of A, begin and end of B, in ids
    labels: Integers  # (rows,) 0 = B follows A, 1 = B is from elsewhere
    origins: Integers  # (rows, 3) document, duplicate, sentence in it: the seed of the row's masks

    def __len__(self) -> int:
        return len(self.labels)

    def table(self) -> npt.NDArray[np.int64]:
        """All but the seed, (rows, TABLE_COLUMNS)."""
        return np.concatenate([self.stretches, self.labels[:, None], self.origins], axis=1, dtype=np.int64)

    def shuffled(self) -> Pairs:
        """The same rows in an order that depends only on the seed."""
        return self[order_of(len(self), self.seed)]

    def __getitem__(self, rows: slice | Integers) -> Pairs:
        return Pairs(self.seed, self.stretches[rows], self.labels[rows], self.origins[rows])


@dataclass(frozen=True)
class Rows:
    """Filled rows, as in a file; P = max_predictions, L = max_seq_length."""

    input_ids: Integers  # (rows, L)
    input_mask: Integers  # (rows, L) 1 = a token, 0 = padding
    segment_ids: Integers  # (rows, L) 1 = B and the last [SEP]
    masked_lm_positions: Integers  # (rows, P) ascending, 0 = no more of them
    masked_lm_ids: Integers  # (rows, P) the original tokens
    next_sentence_labels: Integers  # (rows,)


def find_pairs(
    corpus: Documents, recipe: Recipe, *, seed: tuple[int, ...], duplicate: int, begin: int = 0, end: int | None = None
) -> Pairs:
    """The rows of a split: `duplicate` passes over each document, each pass with other choices.

    Covers the spans that begin at sentences `begin` to `end` of the corpus, by default all: the rows of consecutive
    ranges add up to those of the whole. `seed` identifies split and corpus: non-negative integers. A document of one
    sentence gives no row.
    """
    end = len(corpus.sentences) - 1 if end is None else end
    first, last = np.searchsorted(corpus.documents, [begin, end], side="left")
    first = max(0, int(first) - 1)  # the document in which `begin` may lie
    bounds = corpus.documents[first : int(last) + 1].tolist()
    pairs = [
        _pairs_of(corpus, first + number, span, recipe, seed=seed, turn=turn)
        for number, (start, stop) in enumerate(pairwise(bounds))
        for span in range(start + max(0, -(-(begin - start) // SPAN)) * SPAN, min(stop, end), SPAN)
        for turn in range(duplicate)
    ]
    return pairs_of(np.concatenate([np.zeros((0, TABLE_COLUMNS), np.int64), *pairs]), seed)


def pairs_of(table: npt.NDArray[np.int64], seed: tuple[int, ...]) -> Pairs:
    """Pairs from their table, (rows, TABLE_COLUMNS)."""
    return Pairs(seed, stretches=table[:, :4], labels=table[:, 4], origins=table[:, 5:])


def order_of(rows: int, seed: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The row numbers of a split, in an order that depends only on the seed."""
    return np.random.default_rng((*seed, _ORDER)).permutation(rows)


def fill(corpus: Documents, pairs: Pairs, recipe: Recipe, ids: Ids) -> Rows:
    """The arrays of the rows `pairs`."""
    length, predictions = recipe.max_seq_length, recipe.max_predictions
    input_ids = np.full((len(pairs), length), ids.pad, np.int64)
    input_mask = np.zeros((len(pairs), length), np.int8)
    segment_ids = np.zeros((len(pairs), length), np.int8)
    positions = np.zeros((len(pairs), predictions), np.int16 if length <= 2**15 else np.int32)
    masked_ids = np.zeros((len(pairs), predictions), np.int64)
    ordinary = ids.ordinary()
    rows = zip(input_ids, pairs.stretches.tolist(), pairs.origins.tolist(), strict=True)
    for row, (tokens, (a_begin, a_end, b_begin, b_end), origin) in enumerate(rows):
        first = a_end - a_begin + 2  # where B begins
        last = first + b_end - b_begin  # where the last [SEP] is
        tokens[0] = ids.cls
        tokens[1 : first - 1] = corpus.ids[a_begin:a_end]
        tokens[first - 1] = ids.sep
        tokens[first:last] = corpus.ids[b_begin:b_end]
        tokens[last] = ids.sep
        input_mask[row, : last + 1] = 1
        segment_ids[row, first : last + 1] = 1

        generator = np.random.default_rng((*pairs.seed, _MASKS, *origin))
        chosen = _choose(tokens[: last + 1], recipe, ids, generator)
        positions[row, : len(chosen)] = chosen
        masked_ids[row, : len(chosen)] = tokens[chosen]
        tokens[chosen] = _replace(tokens[chosen], ordinary, ids.mask, generator)
    return Rows(input_ids, input_mask, segment_ids, positions, masked_ids, pairs.labels.astype(np.int8))


def unmasked(corpus: Documents, pairs: Pairs, ids: Ids) -> tuple[Integers, Integers, Integers]:
    """The unmasked tokens of rows one after another, the length of each row, and the length of its first segment."""
    begins, ends = pairs.stretches[:, ::2], pairs.stretches[:, 1::2]  # (rows, 2) of A and B
    sizes = ends - begins
    lengths, first = sizes.sum(axis=1) + 3, sizes[:, 0] + 2
    starts = np.cumsum(lengths) - lengths
    tokens = np.full(int(lengths.sum()), ids.sep, corpus.ids.dtype)
    tokens[starts] = ids.cls
    flat = sizes.ravel()
    steps = np.arange(flat.sum()) - np.repeat(np.cumsum(flat) - flat, flat)  # within each half
    places = np.stack([starts + 1, starts + first], axis=1).ravel()
    tokens[np.repeat(places, flat) + steps] = corpus.ids[np.repeat(begins.ravel(), flat) + steps]
    return tokens, lengths, first


def _pairs_of(
    corpus: Documents, document: int, span: int, recipe: Recipe, *, seed: tuple[int, ...], turn: int
) -> npt.NDArray[np.int64]:
    """One pass over a span of a document, which begins at sentence `span` of the corpus: a table of pairs."""
    first, last = corpus.documents[document : document + 2].tolist()
    before, room = span - first, recipe.max_seq_length - 3
    starts = corpus.sentences[span : min(last, span + SPAN) + 1].tolist()  # of these sentences, and their end
    generator = np.random.default_rng((*seed, _PAIRS, document, before // SPAN, turn))
    chances = _chances(generator, min(_DRAWN, len(starts)))
    reach = max(1, min(_NEAR, (last - first) // 8))
    end_of_span = len(starts) - 1
    rows: list[tuple[int, ...]] = []
    begin = 0
    while begin < end_of_span - 1:  # the last sentence has no next, so it opens no pair
        short, length, half, random, place = next(chances)
        target = 2 + int(length * (room - 1)) if short < recipe.short_sequence_share else room
        end = min(bisect_left(starts, starts[begin] + target, begin + 2), end_of_span)
        middle = begin + 1 + int(half * (end - begin - 1))
        a = (starts[begin], starts[middle])
        b = (starts[middle], starts[end])
        elsewhere = None
        if random < 0.5:
            wanted = min(target, starts[end] - starts[begin]) - (a[1] - a[0])
            near = (max(first, span + begin - reach), min(last, span + end + reach))
            elsewhere = _elsewhere(corpus, (first, last), near, wanted, place)
        origin = before + begin
        if elsewhere is None:
            begin = end
        else:
            b, begin = elsewhere, middle
        rows.append((*_truncated(a, b, room, generator), int(elsewhere is not None), document, turn, origin))
    return np.array(rows, np.int64).reshape(-1, TABLE_COLUMNS)


def _chances(generator: np.random.Generator, rows: int) -> Iterator[list[float]]:
    """Five numbers from 0 to 1 per row: is it short, how short, where is the cut, is the next random, from where."""
    while True:
        yield from generator.random((rows, 5)).tolist()


def _elsewhere(
    corpus: Documents, own: tuple[int, int], near: tuple[int, int], wanted: int, chance: float
) -> tuple[int, int] | None:
    """A stretch of whole sentences with about `wanted` tokens that does not follow A; None if the corpus has none.

    It comes from another document than the one with the sentences `own` if the others hold at least as much text, as
    with many documents. Otherwise, as with a single book or a book and a leaflet, it comes from anywhere but the
    sentences `near`.
    """
    total = len(corpus.sentences) - 1
    hole = own if total - (own[1] - own[0]) >= own[1] - own[0] else near
    if total == hole[1] - hole[0]:
        return None
    start = int(chance * (total - (hole[1] - hole[0])))
    start = start if start < hole[0] else start + hole[1] - hole[0]
    limit = int(corpus.documents[corpus.documents.searchsorted(start, side="right")])  # where its document ends
    if start < hole[0]:
        limit = min(limit, hole[0])
    # a sentence has at least one token
    starts = corpus.sentences[start : min(limit, start + max(0, wanted) + 1)].tolist()
    return starts[0], int(corpus.sentences[start + max(1, bisect_left(starts, starts[0] + wanted))])


def _truncated(
    a: tuple[int, int], b: tuple[int, int], room: int, generator: np.random.Generator
) -> tuple[int, int, int, int]:
    """Shorten both to `room` tokens in total: one token at a time from the longer one, at its front or back."""
    lengths = a[1] - a[0], b[1] - b[0]
    excess = max(0, sum(lengths) - room)
    # while one is longer, only it is shortened; after that they take turns, B first
    difference = lengths[0] - lengths[1]
    alone = min(excess, abs(difference))
    turns = excess - alone
    from_a = (alone if difference > 0 else 0) + turns // 2
    from_b = excess - from_a
    front_a, front_b = (int(generator.binomial(number, 0.5)) for number in (from_a, from_b))
    return a[0] + front_a, a[1] - (from_a - front_a), b[0] + front_b, b[1] - (from_b - front_b)


def _choose(tokens: Integers, recipe: Recipe, ids: Ids, generator: np.random.Generator) -> Integers:
    """The positions of a row to predict, in ascending order."""
    candidates = np.flatnonzero((tokens != ids.cls) & (tokens != ids.sep) & (tokens != ids.unk))
    count = min(recipe.max_predictions, max(1, round(len(tokens) * recipe.masked_share)), len(candidates))
    return np.sort(generator.permutation(candidates)[:count])


def _replace(originals: Integers, ordinary: Integers, mask: int, generator: np.random.Generator) -> Integers:
    """The replacements of masked tokens: 80 % [MASK], 10 % any token, 10 % the original."""
    chance = generator.random(len(originals))
    others = ordinary[generator.integers(len(ordinary), size=len(originals))]
    return np.where(chance < 0.8, mask, np.where(chance < 0.9, others, originals))
