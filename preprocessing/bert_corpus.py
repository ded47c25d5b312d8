"""Raw text to the data of BERT's pre-training: `python -m preprocessing.bert_corpus --output DIR [--input FILE ...]`.

Responsible for the order of work and for the files. What a sentence is, and what is held out, is decided by
`plain_text`, what a token is by `wordpiece`, what a row is by `bert_pairs`; `corpus_folder` keeps the folder whole.
The same input, seed and versions give the same bytes: nothing depends on the clock, on paths, or on who works first.

The token ids of the whole corpus are held in memory, two bytes each (four beyond 65,535 tokens of vocabulary), its
sentences as text until they are encoded, and 64 bytes for each row; the rows themselves are made 4,096 at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from rich.console import Console

from hetseq import ConfigError, DataError, HetSeqError, __version__
from tasks.record_index import FORMAT

from . import bert_hdf5, bert_pairs, plain_text, wordpiece
from .bert_pairs import Documents, Integers, Pairs, Recipe
from .corpus_folder import FACTS, MODEL, VOCABULARY, staged
from .plain_text import Document, Source
from .progress import Track, bar, bars
from .python_text import python_documents
from .wordpiece import Encoder, Vocabulary

# the name holds no name of a split but its own, so that one split is never taken for another
_NAME = "corpus"
_SPLITS = ("train", "test")
_SENTENCES_AT_ONCE = 4096
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Options:
    """What a corpus is made of and how; ConfigError for what cannot be meant."""

    inputs: tuple[Path, ...] = ()  # none: the text that ships with Python
    form: str = "paragraphs"
    vocab_file: Path | None = None
    vocab_size: int = 4096
    is_lower_case: bool = True
    max_seq_length: int = 128
    max_predictions: int | None = None
    masked_share: float = 0.15
    short_sequence_share: float = 0.1
    duplicate: int = 5
    test_share: float = 0.05
    files: int = 1
    seed: int = 19940802

    def __post_init__(self) -> None:
        checks = (
            ("--max-seq-length", self.max_seq_length, self.max_seq_length >= 8, "at least 8"),
            ("--masked-share", self.masked_share, 0 < self.masked_share < 1, "more than 0 and less than 1"),
            ("--short-sequence-share", self.short_sequence_share, 0 <= self.short_sequence_share <= 1, "0 to 1"),
            ("--test-share", self.test_share, 0 <= self.test_share <= 0.5, "0 (nothing is held out) to 0.5"),
            ("--duplicate", self.duplicate, self.duplicate >= 1, "at least 1"),
            ("--files", self.files, self.files >= 1, "at least 1"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
            ("--vocab-size", self.vocab_size, self.vocab_size >= 1, "at least 1"),
            (
                "--max-predictions",
                self.max_predictions,
                self.max_predictions is None or 1 <= self.max_predictions <= self.max_seq_length,
                f"1 to --max-seq-length, {self.max_seq_length}",
            ),
        )
        for flag, value, is_right, expected in checks:
            if not is_right:
                raise ConfigError(f"{flag} {value}: expected {expected}")
        if self.form not in plain_text.FORMATS:
            raise ConfigError(f"--format {self.form}: expected one of {', '.join(plain_text.FORMATS)}")

    @property
    def recipe(self) -> Recipe:
        """What a row is like; by default there is room for the masked tokens of the longest one (20 of 128)."""
        predictions = self.max_predictions or math.ceil(self.max_seq_length * self.masked_share)
        return Recipe(self.max_seq_length, predictions, self.masked_share, self.short_sequence_share)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code: 0 the corpus is there, 2 it could not be made, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    folder = _path(arguments.output)
    try:
        if arguments.format is not None and not arguments.input:
            raise ConfigError(f"--format {arguments.format} is about the files of --input, and there are none")
        if arguments.vocab_size is not None and arguments.vocab_file is not None:
            raise ConfigError(
                f"--vocab-size {arguments.vocab_size} is about a vocabulary that is trained, and --vocab-file"
                f" {arguments.vocab_file} is there already; give one of the two"
            )
        options = _options(arguments)
        with bars(console) as progress:
            facts = make_corpus(
                options,
                folder,
                overwrite=arguments.overwrite,
                say=lambda line: console.print(plain_text.printable(line), markup=False),
                track=lambda work, total: bar(progress, work, total),
            )
    except HetSeqError as error:
        errors.print(plain_text.printable(f"error: {error}"), markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print(plain_text.printable(f"interrupted: {folder} is as it was before"), markup=False)
        return 130
    command = plain_text.printable(training_command(folder, facts))
    console.print("the corpus is complete; train on it:", command, sep="\n", markup=False)
    return 0


def make_corpus(
    options: Options, folder: Path, *, overwrite: bool = False, say: Callable[[str], None], track: Track
) -> dict[str, Any]:
    """Make the corpus in `folder` and give what is in its `corpus.json`.

    `say` is told in a line what was found or made, `track` of each long piece of work. Raises DataError or ConfigError
    and leaves nothing behind if it cannot be made.
    """
    bert_hdf5.require_h5py()
    if os.path.realpath(folder) in map(os.path.realpath, options.inputs):
        raise ConfigError(
            f"--input and --output are both {folder}: its vocab.txt would be text the next time; give two"
        )
    with staged(folder, overwrite=overwrite) as stage:
        given = options.vocab_file and wordpiece.read_vocabulary(
            options.vocab_file, is_lower_case=options.is_lower_case
        )
        documents, sources = _read(options, say, track)
        chance = np.random.default_rng((options.seed, len(_SPLITS)))  # the rows of the splits have (seed, 0 or 1, ...)
        halves = dict(zip(_SPLITS, plain_text.hold_out(documents, options.test_share, chance)))
        sentences = sum(len(document.sentences) for document in documents)
        say(f"text: {_many(len(documents), 'document')}, {_many(sentences, 'sentence')}")
        vocabulary = given or _trained(options, halves["train"], say)
        del documents

        splits: dict[str, Any] = {}
        files: list[str] = []
        for number, split in enumerate(_SPLITS if options.test_share else _SPLITS[:1]):
            corpus = _encode(halves[split], vocabulary, track)
            halves[split] = []  # from here on the ids are enough
            pairs = bert_pairs.find_pairs(
                corpus, options.recipe, seed=(options.seed, number), duplicate=options.duplicate
            )
            _check(split, corpus, len(pairs), options)
            names = _file_names(split, options.files if split == "train" else 1)
            masked = _write_rows(stage, names, corpus, pairs.shuffled(), options.recipe, vocabulary, track)
            if not masked.any():
                raise DataError(
                    f"{_named(options)}: no word of the {split} part is in {options.vocab_file}; give another"
                )
            splits[split] = {
                "documents": len(corpus),
                "sentences": len(corpus.sentences) - 1,
                "tokens": len(corpus.ids),
                "unknown_tokens": int((corpus.ids == vocabulary.id_of(wordpiece.UNK)).sum()),
                "instances": len(pairs),
                "random_next": int(pairs.labels.sum()),
                **_about(masked, vocabulary),
            }
            files += names
            say(f"{split}: {_in_words(splits[split])}")

        _write_text(stage / VOCABULARY, vocabulary.text())
        model = _json(_model(vocabulary, options.max_seq_length))
        _write_text(stage / MODEL, model)
        facts = {
            "format": {"name": FORMAT, "version": 1},
            "versions": _versions(),
            "options": _stated(options),
            "sources": [asdict(source) for source in sources],
            "vocabulary": {
                "from": plain_text.printable(options.vocab_file.name) if options.vocab_file else "training part",
                "tokens": len(vocabulary.tokens),
                "lower_case": vocabulary.is_lower_case,
                "sha256": hashlib.sha256(vocabulary.text().encode()).hexdigest(),
            },
            "configuration": {"sha256": hashlib.sha256(model.encode()).hexdigest()},
            "splits": splits,
            "files": files,
        }
        _write_text(stage / FACTS, _json(facts))
    return facts


def training_command(folder: Path, facts: dict[str, Any]) -> str:
    """A command line that trains the small model of `bert_config.json` on the corpus: ten epochs, within reason."""
    batch = 64
    steps = min(20_000, max(200, 10 * facts["splits"]["train"]["instances"] // batch // 100 * 100))
    valid = "--valid-subset test" if "test" in facts["splits"] else "--disable-validation"
    return (
        f"hetseq train --task bert --data {shlex.quote(str(folder))} {valid} --global-batch-size {batch} --lr 0.001"
        f" --warmup-updates {steps // 10} --total-num-update {steps} --max-update {steps}"
    )


# From text to ids


def _read(options: Options, say: Callable[[str], None], track: Track) -> tuple[list[Document], list[Source]]:
    if not options.inputs:
        say("reading the text that ships with Python; give your own with --input")
        documents, source = python_documents()
        return documents, [source]
    besides = [] if options.vocab_file is None else [options.vocab_file]
    paths = plain_text.text_files(options.inputs, besides=besides)
    found: list[Document] = []
    sources = []
    advance = track("reading", len(paths))
    for path in paths:
        text, source = plain_text.read_text(path)
        found += plain_text.documents_of(text, source.name, options.form)
        sources.append(source)
        advance(1)
    if not found:
        raise DataError(f"{_named(options)}: no sentence found; expected text as --format {options.form} describes it")
    return found, sources


def _trained(options: Options, documents: Sequence[Document], say: Callable[[str], None]) -> Vocabulary:
    sentences = [sentence for document in documents for sentence in document.sentences]
    trained = wordpiece.train_vocabulary(sentences, options.vocab_size, is_lower_case=options.is_lower_case)
    say(f"vocabulary: {len(trained.tokens):,} tokens, trained on the {len(sentences):,} sentences of the training part")
    return trained


def _encode(documents: Sequence[Document], vocabulary: Vocabulary, track: Track) -> Documents:
    """The ids of a split; sentences without a token, and documents without a sentence, are left out."""
    encoder = Encoder(vocabulary)
    kind = bert_hdf5.id_type(len(vocabulary.tokens))
    sentences = [sentence for document in documents for sentence in document.sentences]
    advance = track("encoding", len(sentences))
    lengths: list[int] = []
    parts: list[Integers] = []
    for start in range(0, len(sentences), _SENTENCES_AT_ONCE):
        encoded = encoder.encode(sentences[start : start + _SENTENCES_AT_ONCE])
        lengths += map(len, encoded)
        parts.append(np.concatenate(encoded).astype(kind))
        advance(len(encoded))
    sizes = np.array(lengths, np.int64)
    homes = np.repeat(np.arange(len(documents)), np.array([len(d.sentences) for d in documents], np.int64))
    counts = np.bincount(homes[sizes > 0], minlength=len(documents))
    return Documents(
        ids=np.concatenate(parts) if parts else np.zeros(0, kind),
        sentences=_offsets(sizes[sizes > 0]),
        documents=_offsets(counts[counts > 0]),
    )


def _offsets(sizes: Integers) -> Integers:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _check(split: str, corpus: Documents, rows: int, options: Options) -> None:
    found = f"{_named(options)}: the {split} part has {_many(len(corpus.sentences) - 1, 'sentence')}"
    if rows == 0:
        remedy = "raise --test-share, or hold nothing out with --test-share 0" if split == "test" else "give more text"
        raise DataError(
            f"{found} in {_many(len(corpus), 'document')} and no two that follow each other;"
            f" {remedy}, or name the right --format ({options.form} here)"
        )
    if split == "train" and rows < options.files:
        raise DataError(f"{found}, which give {_many(rows, 'row')}, too few for --files {options.files}")


def _named(options: Options) -> str:
    return ", ".join(map(str, options.inputs)) or "the text of this Python"


# From ids to files


def _write_rows(
    stage: Path, names: Sequence[str], corpus: Documents, pairs: Pairs, recipe: Recipe, vocabulary: Vocabulary,
    track: Track,
) -> Integers:  # fmt: skip
    """Write the rows into the files `names`, about equally many each; how often each token is masked, (vocab_size,)."""
    pad, unk, cls, sep, mask = map(vocabulary.id_of, wordpiece.SPECIAL_TOKENS)
    ids = bert_pairs.Ids(pad, unk, cls, sep, mask, vocab_size=len(vocabulary.tokens))
    masked = np.zeros(ids.vocab_size, np.int64)
    advance = track("writing", len(pairs))
    for number, name in enumerate(names):
        first, last = (len(pairs) * turn // len(names) for turn in (number, number + 1))
        with bert_hdf5.writing(stage / name, count=last - first, vocab_size=ids.vocab_size) as append:
            for start in range(first, last, _ROWS_AT_ONCE):
                rows = bert_pairs.fill(corpus, pairs[start : min(start + _ROWS_AT_ONCE, last)], recipe, ids)
                append(rows)
                masked += np.bincount(rows.masked_lm_ids[rows.masked_lm_positions > 0], minlength=ids.vocab_size)
                advance(len(rows.next_sentence_labels))
    return masked


def _file_names(split: str, count: int) -> list[str]:
    width = len(str(count - 1))  # so that the order of the names is that of the numbers
    return [f"{_NAME}_{split}_{number:0{width}}.hdf5" for number in range(count)]


# Facts


def _about(masked: Integers, vocabulary: Vocabulary) -> dict[str, Any]:
    """What a model must beat that looks at nothing: the most frequent token, and the entropy of the frequencies."""
    total = int(masked.sum())
    shares = masked[masked > 0] / total
    return {
        "masked_tokens": total,
        "most_frequent": {
            "token": vocabulary.tokens[int(masked.argmax())],
            "share": round(float(masked.max() / total), 6),
        },
        "unigram_entropy": round(float(-(shares * np.log(shares)).sum()), 6),  # nats
    }


def _in_words(split: dict[str, Any]) -> str:
    frequent = split["most_frequent"]
    unknown = split["unknown_tokens"] / split["tokens"]
    aside = f" ({unknown:.1%} [UNK])" if unknown > 0.01 else ""  # not worth a word in English with BERT's vocabulary
    return (
        f"{_many(split['instances'], 'row')} from {_many(split['tokens'], 'token')}{aside};"
        f" {split['masked_tokens']:,} masked, {frequent['share']:.1%} of them {frequent['token']!r},"
        f" unigram entropy {split['unigram_entropy']:.2f} nats"
    )


def _model(vocabulary: Vocabulary, max_seq_length: int) -> dict[str, Any]:
    """A small BERT that fits the vocabulary: 2 layers of 128."""
    return {
        "vocab_size": len(vocabulary.tokens),
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": max(128, max_seq_length),
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "pad_token_id": vocabulary.id_of(wordpiece.PAD),  # BERT's own is 0, another one need not be
    }


def _versions() -> dict[str, str]:
    import h5py

    return {
        "hetseq": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


def _stated(options: Options) -> dict[str, Any]:
    """The options by the names of their flags, without what `sources` and `vocabulary` say better."""
    recipe = options.recipe
    return {
        "format": options.form if options.inputs else None,
        "vocab_size": options.vocab_size if options.vocab_file is None else None,
        **asdict(recipe),
        "duplicate": options.duplicate,
        "test_share": options.test_share,
        "files": options.files,
        "seed": options.seed,
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


# The command line


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # that of pathlib raises for ~somebody who is unknown


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        inputs=tuple(map(_path, arguments.input)),
        form=arguments.format or "paragraphs",
        vocab_file=None if arguments.vocab_file is None else _path(arguments.vocab_file),
        vocab_size=Options.vocab_size if arguments.vocab_size is None else arguments.vocab_size,
        is_lower_case=arguments.lower_case,
        max_seq_length=arguments.max_seq_length,
        max_predictions=arguments.max_predictions,
        masked_share=arguments.masked_share,
        short_sequence_share=arguments.short_sequence_share,
        duplicate=arguments.duplicate,
        test_share=arguments.test_share,
        files=arguments.files,
        seed=arguments.seed,
    )


# fmt: off
def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m preprocessing.bert_corpus",
        description="Make the data of BERT's pre-training from text: masked tokens and next sentences, as HDF5.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder of the corpus; then give it to --data")
    add("--overwrite", action="store_true", help="replace the corpus that is in it")
    add("--input", nargs="+", default=[], action="extend", metavar="PATH",
        help="text files in UTF-8, or folders of *.txt; default: the manual and docstrings that ship with Python")
    add("--format", choices=list(plain_text.FORMATS),
        help="; ".join(f"{name}: {meaning}" for name, meaning in plain_text.FORMATS.items()) + " (default: paragraphs)")
    add("--vocab-file", metavar="FILE", help="WordPiece vocabulary, one token a line; default: one is trained")
    add("--vocab-size", type=int, metavar="N",
        help=f"tokens of the vocabulary that is trained (default: {default.vocab_size})")
    case = parser.add_mutually_exclusive_group()
    case.add_argument("--lower-case", action="store_true", default=True,
                      help="lower case, without accents (the default)")
    case.add_argument("--cased", dest="lower_case", action="store_false", help="letters as they are")
    add("--max-seq-length", type=int, default=default.max_seq_length, metavar="L",
        help="tokens of a row, with [CLS] and two [SEP] (default: %(default)s)")
    add("--max-predictions", type=int, metavar="P",
        help="most masked tokens of a row; default: as many as the longest row has, 20 of 128")
    add("--masked-share", type=float, default=default.masked_share, metavar="X",
        help="share of the tokens that are masked (default: %(default)s)")
    add("--short-sequence-share", type=float, default=default.short_sequence_share, metavar="X",
        help="share of the rows that are shorter on purpose (default: %(default)s)")
    add("--duplicate", type=int, default=default.duplicate, metavar="N",
        help="times the text is gone through, with other masks and pairs each time (default: %(default)s)")
    add("--test-share", type=float, default=default.test_share, metavar="X",
        help="share of the text that is held out: whole documents if there are"
        f" {plain_text.WHOLE_DOCUMENTS}, else the end of each (default: %(default)s)")
    add("--files", type=int, default=default.files, metavar="N",
        help="files of the training part (default: %(default)s)")
    add("--seed", type=int, default=default.seed, metavar="N",
        help="the same seed gives the same bytes (default: %(default)s)")
    return parser
# fmt: on


if __name__ == "__main__":
    sys.exit(main())
