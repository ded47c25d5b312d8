"""Builds a BERT corpus from text, in pieces that several processes make.

Responsible for the list of pieces, the order in which they are assembled, and the decisions about all of them: which
sentences are held out, the vocabulary, the order of the rows. `jobs` defines the pieces.

The one idea: work is divided by the text alone, never by process, so any number of processes, and of nodes that share
the folder, write the same bytes. This module holds about 100 bytes per document, and 8 per row while rows are
shuffled; text, tokens and rows are in files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hetseq import DataError
from hetseq.tasks.bert import wordpiece
from hetseq.tasks.bert.wordpiece import Vocabulary

from ..corpus import sentences as plain_text
from ..corpus.atomic_folder import VOCABULARY
from ..corpus.process_pool import Crew
from ..corpus.progress import Track
from ..corpus.python_docs import python_documents
from ..corpus.text_chunks import Part, Scan, Source, scanned
from ..corpus.work_units import Piece, finished
from ..records import ROWS_PER_FILE
from . import jobs as bert_pieces
from .jobs import SPLITS, EncodeJob, RowJob, Split, TextJob, Words
from .options import HDF5, Options
from .pairs import Ids, Integers

Job = TypeVar("Job")
Result = TypeVar("Result")

_NAME = "corpus"


@dataclass(frozen=True)
class Shard:
    """One of several commands that make the same corpus in the same folder."""

    number: int
    count: int


@dataclass(frozen=True)
class Text:
    """The input: parts of files to read, or documents in memory."""

    sources: list[Source]
    parts: list[Part]
    documents: list[plain_text.Document]


@dataclass(frozen=True)
class Sentences:
    """The sentences of all documents, and which of them are for training."""

    pieces: list[Piece]
    sizes: Integers  # (documents,) sentences
    kept: Integers  # (documents,) number of leading sentences for training

    def by_piece(self, split: str) -> Iterator[tuple[int, npt.NDArray[np.bool_], Integers]]:
        """For each piece: its number, which of its sentences are in the split, and the document of each sentence."""
        ends = np.cumsum(self.sizes)
        begins, begin = ends - self.sizes, 0
        for number, piece in enumerate(self.pieces):
            end = begin + sum(piece.facts["sizes"])
            first, last = int(ends.searchsorted(begin, side="right")), int(begins.searchsorted(end))
            within = np.minimum(ends[first:last], end) - np.maximum(begins[first:last], begin)
            homes = np.repeat(np.arange(first, last), within)
            is_train = np.arange(begin, end) - begins[homes] < self.kept[homes]
            yield number, is_train if split == SPLITS[0] else ~is_train, homes
            begin = end

    def texts(self, split: str) -> _Texts:
        """The sentences of a split, read again in each iteration."""
        return _Texts(self, split)


@dataclass(frozen=True)
class _Texts(Iterable[str]):
    sentences: Sentences
    split: str

    def __iter__(self) -> Iterator[str]:
        for number, is_chosen, _ in self.sentences.by_piece(self.split):
            yield from itertools.compress(bert_pieces.sentences_in(self.sentences.pieces[number]), is_chosen.tolist())

    def __len__(self) -> int:
        return sum(int(is_chosen.sum()) for _, is_chosen, _ in self.sentences.by_piece(self.split))


class Builder:
    """Makes all pieces of a corpus in the folder `root`, or reuses existing ones."""

    def __init__(
        self, options: Options, root: Path, crew: Crew, shard: Shard | None, *, say: Callable[[str], None], track: Track
    ) -> None:
        self._options, self._root, self._crew, self._shard = options, root, crew, shard
        self._say, self._track = say, track

    def sentences(self, text: Text) -> Sentences:
        """Split the text into sentences, and hold some of them out. Raises DataError if there are none."""
        if text.documents:
            content = [document.sentences for document in text.documents]
            pieces = [
                finished(
                    self._root,
                    "text-000000",
                    lambda folder: bert_pieces.write_sentences(folder, content, goes_on=False),
                )
            ]
        else:
            jobs = [TextJob(self._root, number, part) for number, part in enumerate(text.parts)]
            pieces = list(self._all("reading", bert_pieces.make_text, jobs))
        counts: list[int] = []
        for piece in pieces:
            sizes = piece.facts["sizes"]
            if piece.facts["goes_on"] and counts and sizes:
                counts[-1] += sizes[0]
                sizes = sizes[1:]
            counts += sizes
        counts = [size for size in counts if size]
        if not counts:
            raise DataError(
                f"{self._options.named}: no sentence found; expected text as --format {self._options.form} describes it"
            )
        # rows of the splits use the seeds (seed, 0 or 1, ...)
        chance = np.random.default_rng((self._options.seed, len(SPLITS)))
        kept = plain_text.hold_out(counts, self._options.test_share, chance)
        self._say(f"text: {plain_text.many(len(counts), 'document')}, {plain_text.many(sum(counts), 'sentence')}")
        return Sentences(pieces, np.array(counts, np.int64), kept)

    def vocabulary(self, given: Vocabulary | None, sentences: Sentences) -> tuple[Vocabulary, Words]:
        """The given vocabulary, or one trained on the training sentences; and its file."""
        options, texts = self._options, sentences.texts(SPLITS[0])

        def make(folder: Path) -> dict[str, Any]:
            found = given or wordpiece.train_vocabulary(texts, options.vocab_size, is_lower_case=options.is_lower_case)
            (folder / VOCABULARY).write_text(found.text(), encoding="utf-8", newline="\n")
            return {}

        path = finished(self._root, "vocabulary", make).folder / VOCABULARY
        found = given or wordpiece.read_vocabulary(path, is_lower_case=options.is_lower_case)
        if given is None:
            trained = f"trained on the {len(texts):,} sentences of the training part"
            self._say(f"vocabulary: {len(found.tokens):,} tokens, {trained}")
        return found, Words(path, found.sha256(), found.is_lower_case)

    def splits(self, sentences: Sentences, vocabulary: Vocabulary, words: Words) -> Iterator[tuple[Split, Piece]]:
        """All splits, each with its pairs and their order. Raises DataError for a split without pairs."""
        options = self._options
        jobs = [EncodeJob(self._root, number, piece, words) for number, piece in enumerate(sentences.pieces)]
        encoded = list(self._all("encoding", bert_pieces.make_ids, jobs))
        pad, unk, cls, sep, mask = map(vocabulary.id_of, wordpiece.SPECIAL_TOKENS)
        ids = Ids(pad, unk, cls, sep, mask, vocab_size=len(vocabulary.tokens))
        for number, name in enumerate(SPLITS if options.test_share else SPLITS[:1]):
            corpus = bert_pieces.make_corpus(
                self._root, name,
                ((encoded[at], is_chosen, homes) for at, is_chosen, homes in sentences.by_piece(name)),
                ids, len(sentences.sizes),
            )  # fmt: skip
            split = Split(self._root, name, corpus, ids, options.recipe, (options.seed, number), options.duplicate)
            found = list(self._all("pairing", bert_pieces.make_pairs, bert_pieces.pair_jobs(split)))
            self._check(split, sum(piece.facts["rows"] for piece in found))
            yield split, bert_pieces.make_rows(split, found)

    def records(self, split: Split, rows: Piece) -> list[Piece]:
        """Make the files of records of a split; with a shard, only its own files."""
        jobs = self.files(split, rows)
        if self._shard is not None:
            jobs = jobs[self._shard.number :: self._shard.count]
        advance, made = self._track("writing", len(jobs)), []
        for piece in self._crew.map(bert_pieces.make_records, jobs):
            made.append(piece)
            advance(1)
        return made

    def files(self, split: Split, rows: Piece) -> list[RowJob]:
        """The files of a split, with about equally many rows each."""
        options, total = self._options, rows.facts["rows"]
        is_hdf5, wanted = options.output_format == HDF5, options.files if split.name == SPLITS[0] else None
        count = wanted or (1 if is_hdf5 else -(-total // ROWS_PER_FILE))
        width = len(str(count - 1)) if is_hdf5 else 5  # so that names sort like numbers
        suffix = "hdf5" if is_hdf5 else "safetensors"
        return [
            RowJob(
                split, rows, total * number // count, total * (number + 1) // count,
                f"{_NAME}_{split.name}_{number:0{width}}.{suffix}",
            )
            for number in range(count)
        ]  # fmt: skip

    def _all(self, title: str, work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
        """The results of all jobs, in their order.

        A shard begins with its own jobs, then helps the others from their ends. It never waits for another shard, but
        makes unfinished pieces itself.
        """
        advance = self._track(title, len(jobs))
        if self._shard is not None:
            own = set(range(self._shard.number, len(jobs), self._shard.count))
            order = [*sorted(own), *(number for number in reversed(range(len(jobs))) if number not in own)]
            for _ in self._crew.map(work, [jobs[number] for number in order]):
                pass
        for result in self._crew.map(work, jobs):
            yield result
            advance(1)

    def _check(self, split: Split, rows: int) -> None:
        options, facts = self._options, split.corpus.facts
        found = f"{options.named}: the {split.name} part has {plain_text.many(facts['sentences'], 'sentence')}"
        if rows == 0:
            is_test = split.name == SPLITS[1]
            remedy = "raise --test-share, or hold nothing out with --test-share 0" if is_test else "give more text"
            raise DataError(
                f"{found} in {plain_text.many(facts['documents'], 'document')} and no two that follow each other;"
                f" {remedy}, or give the right --format (now {options.form})"
            )
        if split.name == SPLITS[0] and options.files is not None and rows < options.files:
            raise DataError(f"{found}, which give {plain_text.many(rows, 'row')}, too few for --files {options.files}")


def text_of(options: Options, crew: Crew, *, say: Callable[[str], None], track: Track) -> Text:
    """Read the input of the options once, completely. Raises DataError if it is missing or not text."""
    if not options.inputs:
        say("reading the text that ships with Python; give your own with --input")
        documents, source = python_documents()
        return Text([source], [], documents)
    besides = [] if options.vocab_file is None else [options.vocab_file]
    paths = plain_text.text_files(options.inputs, besides=besides)
    advance = track("scanning", len(paths))
    sources, parts = [], []
    for source, found in crew.map(scanned, [Scan(path, options.form, options.piece_bytes) for path in paths]):
        sources.append(source)
        parts += found
        advance(1)
    return Text(sources, parts, [])


def key_of(options: Options, sources: Sequence[Source], vocabulary: Vocabulary | None, versions: Any) -> dict[str, Any]:
    """Everything that pieces depend on, as JSON."""
    return {
        "versions": versions,
        "options": {**options.stated(), "output_format": options.output_format, "piece_bytes": options.piece_bytes},
        "lower_case": options.is_lower_case,
        "sources": [asdict(source) for source in sources],
        "vocabulary": vocabulary and vocabulary.sha256(),
    }
