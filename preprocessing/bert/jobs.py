"""Jobs of a BERT corpus: each makes one piece, which is text, ids, pairs or a file of rows.

Responsible for the work of one process at a time, and for the files that pass results between kinds of pieces. `build`
decides the order and distribution of the jobs; `work_units` guarantees that pieces are whole.

The one idea: all numbers of a corpus are in files, one after another, and are memory-mapped where needed. A process
holds one piece of text, the words that it has seen, and the rows of one file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetseq.tasks.bert import wordpiece
from hetseq.tasks.bert.wordpiece import Encoder
from hetseq.tasks.rows.record_index import Column

from ..corpus import text_chunks as text_pieces
from ..corpus.text_chunks import Part
from ..corpus.work_units import Piece, finished
from ..records import Ragged, Rows, write_file
from . import pairs as bert_pairs
from .pairs import Documents, Ids, Integers, Recipe

SPLITS = ("train", "test")
#: the columns of BERT's rows
IDS, FIRST_LENGTHS, LABEL = "ids", "first_lengths", "next_sentence_labels"
#: fraction of the words of a row that training masks, as in tasks/bert/masking
MASKED_SHARE = 0.15

ROWS_AT_ONCE = 4096
#: sentences whose pairs one job finds
SENTENCES_AT_ONCE = 65_536

_SENTENCES, _IDS, _LENGTHS = "sentences.txt", "ids", "lengths"
_STARTS, _DOCUMENTS = "sentences", "documents"
_TABLE, _ORDER, _COUNTS = "table", "order", "counts"


# From text to sentences


@dataclass(frozen=True)
class TextJob:
    """Split one part of a file into sentences."""

    root: Path
    number: int
    part: Part

    def __str__(self) -> str:
        return f"{self.part.path}, bytes {self.part.begin:,} to {self.part.end:,},"


def make_text(job: TextJob) -> Piece:
    """The sentences of a part. Facts: `sizes`, the sentences of each document, and `goes_on`."""

    def make(folder: Path) -> dict[str, Any]:
        documents, goes_on = text_pieces.sentences_of(job.part)
        return write_sentences(folder, documents, goes_on=goes_on)

    return finished(job.root, f"text-{job.number:06}", make)


def write_sentences(folder: Path, documents: list[list[str]], *, goes_on: bool) -> dict[str, Any]:
    """Write sentences, which contain no line ends, one per line; returns their facts."""
    content = "\n".join(sentence for document in documents for sentence in document)
    (folder / _SENTENCES).write_text(content, encoding="utf-8", newline="\n")
    return {"sizes": [len(document) for document in documents], "goes_on": goes_on}


def sentences_in(piece: Piece) -> list[str]:
    """The sentences of a piece of text."""
    if not sum(piece.facts["sizes"]):
        return []
    return (piece.folder / _SENTENCES).read_text(encoding="utf-8").split("\n")


# From sentences to ids


@dataclass(frozen=True)
class Words:
    """The file of the vocabulary."""

    path: Path
    sha256: str
    is_lower_case: bool


@dataclass(frozen=True)
class EncodeJob:
    """Encode the sentences of a piece of text."""

    root: Path
    number: int
    text: Piece
    words: Words

    def __str__(self) -> str:
        return f"the encoding of piece {self.number}"


def make_ids(job: EncodeJob) -> Piece:
    """The ids of all sentences of a piece, and the number of ids in each sentence."""

    def make(folder: Path) -> dict[str, Any]:
        vocab_tokens, encoder = _encoder(job.words)
        ids, lengths = encoder.encode_joined(sentences_in(job.text))
        ids.astype(id_type(vocab_tokens)).tofile(folder / _IDS)
        lengths.astype(np.int32).tofile(folder / _LENGTHS)
        return {}

    return finished(job.root, f"ids-{job.number:06}", make)


@functools.lru_cache(maxsize=1)
def _encoder(words: Words) -> tuple[int, Encoder]:
    vocabulary = wordpiece.read_vocabulary(words.path, is_lower_case=words.is_lower_case)
    return len(vocabulary.tokens), Encoder(vocabulary)


def id_type(vocab_tokens: int) -> type[np.integer]:
    """The type of ids in the files of pieces."""
    return np.uint16 if vocab_tokens <= 1 << 16 else np.uint32


def make_corpus(
    root: Path, split: str, pieces: Iterable[tuple[Piece, npt.NDArray[np.bool_], Integers]], of: Ids, documents: int
) -> Piece:  # fmt: skip
    """The ids of a split, one after another; sentences without a token, and documents without a sentence, are left out.

    `pieces`: each piece of `make_ids`, with two arrays over its sentences: whether it belongs to the split, and the
    number of its document, less than `documents`. Facts: `documents`, `sentences`, `tokens` and `unknown_tokens`.
    """

    def make(folder: Path) -> dict[str, Any]:
        unknown, tokens, counts = 0, 0, np.zeros(documents, np.int64)
        with (folder / _IDS).open("wb") as ids_file, (folder / _STARTS).open("wb") as starts_file:
            starts_file.write(np.zeros(1, np.int64).tobytes())
            for piece, is_chosen, homes in pieces:
                lengths = piece.array(_LENGTHS, np.int32)
                ids = piece.array(_IDS, id_type(of.vocab_size))[np.repeat(is_chosen, lengths)]
                chosen = is_chosen & (lengths > 0)
                ids_file.write(ids.tobytes())
                starts_file.write((tokens + np.cumsum(lengths[chosen], dtype=np.int64)).tobytes())
                tokens += len(ids)
                unknown += int((ids == of.unk).sum())
                if len(homes):
                    first, after = int(homes[0]), int(homes[-1]) + 1
                    counts[first:after] += np.bincount(homes[chosen] - first, minlength=after - first)
        counts = counts[counts > 0]
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).tofile(folder / _DOCUMENTS)
        return {
            "documents": len(counts), "sentences": int(counts.sum()), "tokens": tokens, "unknown_tokens": unknown,
        }  # fmt: skip

    return finished(root, f"corpus-{split}", make)


def corpus_of(piece: Piece, vocab_tokens: int) -> Documents:
    """The tokens of a split, memory-mapped."""
    return Documents(
        ids=piece.array(_IDS, id_type(vocab_tokens)),
        sentences=piece.array(_STARTS, np.int64),
        documents=piece.array(_DOCUMENTS, np.int64),
    )


# From ids to pairs


@dataclass(frozen=True)
class Split:
    """A split to make rows from: its tokens and the recipe."""

    root: Path
    name: str
    corpus: Piece
    ids: Ids
    recipe: Recipe
    seed: tuple[int, ...]
    duplicate: int


@dataclass(frozen=True)
class PairJob:
    """Find the pairs of some sentences."""

    split: Split
    begin: int
    end: int

    def __str__(self) -> str:
        return f"the pairs of sentences {self.begin:,} to {self.end:,} of the {self.split.name} part"


def make_pairs(job: PairJob) -> Piece:
    """The stretches of a split that become rows. Facts: `rows`, `random_next`."""

    def make(folder: Path) -> dict[str, Any]:
        split = job.split
        pairs = bert_pairs.find_pairs(
            corpus_of(split.corpus, split.ids.vocab_size), split.recipe, seed=split.seed, duplicate=split.duplicate,
            begin=job.begin, end=job.end,
        )  # fmt: skip
        pairs.table().tofile(folder / _TABLE)
        return {"rows": len(pairs), "random_next": int(pairs.labels.sum())}

    return finished(job.split.root, f"pairs-{job.split.name}-{job.begin:012}", make)


def pair_jobs(split: Split) -> list[PairJob]:
    """The jobs of a whole split, in the order in which their rows are numbered."""
    sentences = split.corpus.facts["sentences"]
    starts = range(0, sentences, SENTENCES_AT_ONCE)
    return [PairJob(split, start, min(start + SENTENCES_AT_ONCE, sentences)) for start in starts]


def make_rows(split: Split, pieces: list[Piece]) -> Piece:
    """The pairs of a whole split, and the order of their rows. Facts: `rows`, `random_next`."""

    def make(folder: Path) -> dict[str, Any]:
        with (folder / _TABLE).open("wb") as file:
            for piece in pieces:
                file.write(piece.array(_TABLE, np.int64).tobytes())
        rows, random = (sum(piece.facts[name] for piece in pieces) for name in ("rows", "random_next"))
        bert_pairs.order_of(rows, split.seed).tofile(folder / _ORDER)
        return {"rows": rows, "random_next": random}

    return finished(split.root, f"rows-{split.name}", make)


# From pairs to rows


@dataclass(frozen=True)
class RowJob:
    """Fill some rows of a split."""

    split: Split
    rows: Piece
    begin: int
    end: int
    name: str  # of their file

    def __str__(self) -> str:
        return f"rows {self.begin:,} to {self.end:,} of the {self.split.name} part, for {self.name},"

    def blocks(self, rows: int) -> list[RowJob]:
        """This job split into smaller ones of `rows` rows."""
        starts = range(self.begin, self.end, rows)
        return [replace(self, begin=start, end=min(start + rows, self.end)) for start in starts]

    def pairs(self) -> bert_pairs.Pairs:
        """The pairs of its rows, not yet filled; row numbers count after shuffling."""
        order = self.rows.array(_ORDER, np.int64)[self.begin : self.end]
        table = self.rows.array(_TABLE, np.int64).reshape(-1, bert_pairs.TABLE_COLUMNS)
        return bert_pairs.pairs_of(table[order], self.split.seed)


def filled(job: RowJob) -> bert_pairs.Rows:
    """The arrays of rows with masked words, for HDF5 files."""
    split = job.split
    corpus = corpus_of(split.corpus, split.ids.vocab_size)
    return bert_pairs.fill(corpus, job.pairs(), split.recipe, split.ids)


def columns_of(vocab_tokens: int) -> dict[str, Column]:
    """The columns of BERT's rows, repeated from tasks/bert/dataset, which imports torch."""
    return {
        IDS: Column("U16" if vocab_tokens < 1 << 16 else "U32", is_ragged=True),
        FIRST_LENGTHS: Column("U16"),
        LABEL: Column("U8"),
    }


def make_records(job: RowJob) -> Piece:
    """A file of records. Its fact `masked` is the number of words that training masks, which no seed changes."""

    def make(folder: Path) -> dict[str, Any]:
        split, masked = job.split, 0
        corpus = corpus_of(split.corpus, split.ids.vocab_size)
        counts = np.zeros(split.ids.vocab_size, np.int64)
        is_word = np.zeros(split.ids.vocab_size, bool)
        is_word[split.ids.ordinary()] = True

        def batches() -> Iterator[Rows]:
            nonlocal counts, masked
            for block in job.blocks(ROWS_AT_ONCE):
                pairs = block.pairs()
                tokens, lengths, first = bert_pairs.unmasked(corpus, pairs, split.ids)
                counts += np.bincount(tokens, minlength=len(counts))
                words = np.add.reduceat(is_word[tokens], np.cumsum(lengths) - lengths, dtype=np.int64)
                share = np.floor(words * MASKED_SHARE + 0.5).astype(np.int64)
                masked += int(np.maximum(share, np.minimum(words, 1)).sum())
                yield {IDS: Ragged(tokens, lengths), FIRST_LENGTHS: first, LABEL: pairs.labels}

        stated = write_file(folder / job.name, batches(), columns_of(split.ids.vocab_size))
        counts[~is_word] = 0
        counts.tofile(folder / _COUNTS)
        return {"stated": stated, "masked": masked}

    return finished(job.split.root, f"file-{job.name}", make)


def stated_in(piece: Piece) -> dict[str, Any]:
    """The result of `records.write_file` for the file of a piece."""
    return dict(piece.facts["stated"])


def counts_in(piece: Piece) -> Integers:
    """How often each token of the vocabulary occurs in a file of records where it may be masked, (V,)."""
    return piece.array(_COUNTS, np.int64)


def move_file(piece: Piece, folder: Path) -> None:
    """Move the file of records out of its piece, which is invalid afterwards."""
    name = piece.facts["stated"]["name"]
    os.rename(piece.folder / name, folder / name)
