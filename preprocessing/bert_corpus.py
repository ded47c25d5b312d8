"""Makes BERT pre-training data from raw text: `python -m hetseq.preprocessing.bert_corpus --output DIR`.

Responsible for the command, the files of the folder and the content of `corpus.json`. `bert.build` orders the work and
`bert.options` validates the options. `corpus.sentences` splits sentences and holds some out, `wordpiece` makes tokens,
`bert.pairs` makes rows, and `corpus.atomic_folder` keeps the folder whole.

The one idea: the same input, seed and versions give the same bytes. Nothing depends on the clock, on paths, on the
number and order of processes, or on how often the work was interrupted.

Memory grows with the text only by about 100 bytes per document and 8 per row: each process holds a piece of 1 MiB of
text, a million distinct words, or the rows of one file (150 MB with 128 tokens per row). Text, tokens and pairs are in
a hidden folder in DIR until the corpus is complete: about 4 bytes per byte of text with --duplicate 5.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from rich.console import Console

from hetseq import ConfigError, DataError, HetSeqError, __version__
from hetseq.tasks.bert import wordpiece
from hetseq.tasks.bert.wordpiece import Vocabulary
from hetseq.tasks.rows.record_index import FORMAT, VERSION

from .bert import hdf5 as bert_hdf5
from .bert import jobs as bert_pieces
from .bert.build import Builder, Shard, Text, key_of, text_of
from .bert.jobs import ROWS_AT_ONCE, RowJob
from .bert.options import HDF5, OUTPUT_FORMATS, RECORDS, Options
from .bert.pairs import Integers
from .corpus import atomic_folder as corpus_folder
from .corpus import sentences as plain_text
from .corpus.atomic_folder import FACTS, MODEL, VOCABULARY
from .corpus.process_pool import Crew, usable_cores
from .corpus.progress import Track, bar, bars
from .records import columns_in_json, split_in_json


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit codes: 0 done, 1 a process was killed, 2 it cannot be done, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    folder = _path(arguments.output)
    try:
        if arguments.format is not None and not arguments.input:
            raise ConfigError(f"--format {arguments.format} describes the files of --input, and none are given")
        if arguments.vocab_size is not None and arguments.vocab_file is not None:
            raise ConfigError(
                f"--vocab-size {arguments.vocab_size} applies when a vocabulary is trained, but --vocab-file"
                f" {arguments.vocab_file} is given; give only one of the two"
            )
        options, shard = _options(arguments), _shard(arguments.shard)
        with bars(console) as progress:
            facts = make_corpus(
                options,
                folder,
                overwrite=arguments.overwrite,
                processes=arguments.processes,
                shard=shard,
                say=lambda line: console.print(plain_text.printable(line), markup=False),
                track=lambda work, total: bar(progress, work, total),
            )
    except (HetSeqError, KeyboardInterrupt) as error:
        is_told = isinstance(error, HetSeqError)
        said = f"error: {error}" if is_told else f"interrupted: {folder} is unchanged"
        errors.print(plain_text.printable(said), markup=False)
        if (kept := corpus_folder.kept_pieces(folder)) is not None:
            goes_on = f"finished pieces are kept in {kept}: the same command resumes from them"
            errors.print(plain_text.printable(goes_on), markup=False)
        return error.exit_code if isinstance(error, HetSeqError) else 130
    if facts is None:
        done = f"shard {arguments.shard} is done; once all are, the same command without --shard completes the corpus"
        console.print(done, markup=False)
        return 0
    command = plain_text.printable(training_command(folder, facts))
    console.print("the corpus is complete; train on it:", command, sep="\n", markup=False)
    return 0


def make_corpus(
    options: Options, folder: Path, *, overwrite: bool = False, processes: int = 1, shard: Shard | None = None,
    say: Callable[[str], None], track: Track,
) -> dict[str, Any] | None:  # fmt: skip
    """Make the corpus in `folder` and return the content of its `corpus.json`; with `shard`, make pieces only: None.

    `say` receives lines about the results, `track` each long piece of work. If the corpus cannot be made, raises
    DataError or ConfigError and leaves nothing behind. Raises LostProcess if a process was killed.
    """
    if processes < 1:
        raise ConfigError(f"--processes {processes}: expected at least 1")
    if options.output_format == HDF5:
        bert_hdf5.require_h5py()
        if shard is not None:
            raise ConfigError(f"--shard applies to files of records: leave it out, or --output-format {HDF5}")
    if os.path.realpath(folder) in map(os.path.realpath, options.inputs):
        raise ConfigError(
            f"--input and --output are both {folder}: its vocab.txt would be read as text next time; give two folders"
        )
    if shard is not None:
        with corpus_folder.shared(folder, overwrite=overwrite), Crew(processes) as crew:
            _make(options, folder, None, crew, shard, say, track)
        return None
    with corpus_folder.staged(folder, overwrite=overwrite) as stage, Crew(processes) as crew:
        facts = _make(options, folder, stage, crew, None, say, track)
    corpus_folder.forget_pieces(folder)
    return facts


def training_command(folder: Path, facts: dict[str, Any]) -> str:
    """A command line that trains the small model of `bert_config.json` on the corpus: ten epochs, within limits."""
    batch, train = 64, facts["splits"]["train"]
    steps = min(20_000, max(200, 10 * _rows(train) // batch // 100 * 100))
    valid = "--valid-subset test" if "test" in facts["splits"] else "--disable-validation"
    return (
        f"hetseq train --task bert --data {shlex.quote(str(folder))} {valid} --global-batch-size {batch} --lr 0.001"
        f" --warmup-updates {steps // 10} --total-num-update {steps} --max-update {steps}"
    )


def _make(
    options: Options, folder: Path, stage: Path | None, crew: Crew, shard: Shard | None, say: Callable[[str], None],
    track: Track,
) -> dict[str, Any] | None:  # fmt: skip
    """Make all pieces and, if `stage` is given, assemble the corpus in it."""
    given = options.vocab_file and wordpiece.read_vocabulary(options.vocab_file, is_lower_case=options.is_lower_case)
    text = text_of(options, crew, say=say, track=track)
    key = key_of(options, text.sources, given or None, _versions(options))
    with corpus_folder.pieces_for(folder, key, is_shared=shard is not None, say=say) as root:
        builder = Builder(options, root, crew, shard, say=say, track=track)
        sentences = builder.sentences(text)
        vocabulary, words = builder.vocabulary(given or None, sentences)
        splits: dict[str, Any] = {}
        files: list[str] = []
        for split, rows in builder.splits(sentences, vocabulary, words):
            if options.output_format == RECORDS:
                made = builder.records(split, rows)
                if stage is None:
                    continue
                stated = split_in_json([bert_pieces.stated_in(piece) for piece in made])
                counts = np.sum([bert_pieces.counts_in(piece) for piece in made], axis=0)
                masked = sum(piece.facts["masked"] for piece in made)
                for piece in made:
                    bert_pieces.move_file(piece, stage)
            else:
                assert stage is not None
                jobs = builder.files(split, rows)
                counts = _write_hdf5(stage, jobs, crew, track)
                stated, masked = {"instances": rows.facts["rows"]}, int(counts.sum())
                files += [job.name for job in jobs]
            if not counts.any():
                raise DataError(
                    f"{options.named}: no word of the {split.name} part is in {options.vocab_file}; give another one"
                )
            splits[split.name] = {
                **stated, **split.corpus.facts, "random_next": rows.facts["random_next"], "masked_tokens": masked,
                **_about(counts, vocabulary),
            }  # fmt: skip
            say(f"{split.name}: {_in_words(splits[split.name])}")
        return None if stage is None else _write_facts(options, stage, text, vocabulary, splits, files)


def _write_facts(
    options: Options, stage: Path, text: Text, vocabulary: Vocabulary, splits: dict[str, Any], files: list[str]
) -> dict[str, Any]:
    """Write all files of a corpus besides its rows; returns the content of `corpus.json`."""
    _write_text(stage / VOCABULARY, vocabulary.text())
    model = _json(_model(vocabulary, options.max_seq_length))
    _write_text(stage / MODEL, model)
    is_hdf5, tokens = options.output_format == HDF5, len(vocabulary.tokens)
    facts = {
        "format": {"name": FORMAT, "version": 1 if is_hdf5 else VERSION},
        "versions": _versions(options),
        "options": options.stated(),
        "sources": [asdict(source) for source in text.sources],
        "vocabulary": {
            "from": plain_text.printable(options.vocab_file.name) if options.vocab_file else "training part",
            "tokens": tokens,
            "lower_case": vocabulary.is_lower_case,
            "sha256": vocabulary.sha256(),
        },
        "configuration": {"sha256": hashlib.sha256(model.encode()).hexdigest()},
        **({} if is_hdf5 else {"columns": columns_in_json(bert_pieces.columns_of(tokens))}),
        "splits": splits,
        **({"files": files} if is_hdf5 else {}),
    }
    _write_text(stage / FACTS, _json(facts))
    return facts


def _write_hdf5(stage: Path, jobs: Sequence[RowJob], crew: Crew, track: Track) -> Integers:
    """Write the rows of a split into its files; returns how often each token is masked, (vocab_size,)."""
    vocab_size = jobs[0].split.ids.vocab_size
    masked = np.zeros(vocab_size, np.int64)
    advance = track("writing", sum(job.end - job.begin for job in jobs))
    for job in jobs:
        with bert_hdf5.writing(stage / job.name, count=job.end - job.begin, vocab_size=vocab_size) as append:
            for rows in crew.map(bert_pieces.filled, job.blocks(ROWS_AT_ONCE)):
                append(rows)
                masked += np.bincount(rows.masked_lm_ids[rows.masked_lm_positions > 0], minlength=vocab_size)
                advance(len(rows.next_sentence_labels))
    return masked


# Facts


def _rows(split: dict[str, Any]) -> int:
    return int(split["rows" if "rows" in split else "instances"])


def _about(counts: Integers, vocabulary: Vocabulary) -> dict[str, Any]:
    """The baseline of a model that ignores its input: the most frequent token, and the entropy of the frequencies.

    `counts`: how often each token is masked or, if training draws the masks, may be masked.
    """
    total = int(counts.sum())
    shares = counts[counts > 0] / total
    return {
        "most_frequent": {
            "token": vocabulary.tokens[int(counts.argmax())],
            "share": round(float(counts.max() / total), 6),
        },
        "unigram_entropy": round(float(-(shares * np.log(shares)).sum()), 6),  # nats
    }


def _in_words(split: dict[str, Any]) -> str:
    frequent = split["most_frequent"]
    unknown = split["unknown_tokens"] / split["tokens"]
    aside = f" ({unknown:.1%} [UNK])" if unknown > 0.01 else ""  # negligible in English with BERT's vocabulary
    return (
        f"{plain_text.many(_rows(split), 'row')} from {plain_text.many(split['tokens'], 'token')}{aside};"
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
        "pad_token_id": vocabulary.id_of(wordpiece.PAD),  # 0 in BERT's own vocabulary, not in every other
    }


def _versions(options: Options) -> dict[str, str]:
    versions = {
        "hetseq": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
    }
    if options.output_format == HDF5:
        import h5py

        versions |= {"h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    return versions


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# The command line


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # pathlib's expanduser raises for an unknown ~user


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        inputs=tuple(map(_path, arguments.input)),
        form=arguments.format or "paragraphs",
        output_format=arguments.output_format,
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


def _shard(text: str | None) -> Shard | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--shard {text}: expected I/N, the number of this part, from 0, and the number of parts")
    return Shard(int(match[1]), int(match[2]))


# fmt: off
def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m hetseq.preprocessing.bert_corpus",
        description="Make BERT pre-training data from text: pairs of sentences, and masked words.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder for the corpus; pass it to --data afterwards")
    add("--overwrite", action="store_true", help="replace the corpus in the output folder")
    add("--output-format", choices=OUTPUT_FORMATS, default=default.output_format,
        help="records, which training masks anew in each epoch, or HDF5 with fixed masks, for other programs"
        " (default: %(default)s)")
    add("--processes", type=int, default=usable_cores(), metavar="N",
        help="number of processes; the output does not depend on it (default: the usable cores, %(default)s)")
    add("--shard", metavar="I/N",
        help="make part I (from 0) of N, on nodes that share DIR; afterwards the command without --shard completes it")
    add("--input", nargs="+", default=[], action="extend", metavar="PATH",
        help="text files in UTF-8, or folders of *.txt; default: the manual and docstrings that ship with Python")
    add("--format", choices=list(plain_text.FORMATS),
        help="; ".join(f"{name}: {meaning}" for name, meaning in plain_text.FORMATS.items()) + " (default: paragraphs)")
    add("--vocab-file", metavar="FILE", help="WordPiece vocabulary, one token per line; default: train one")
    add("--vocab-size", type=int, metavar="N",
        help=f"size of the trained vocabulary, in tokens (default: {default.vocab_size})")
    case = parser.add_mutually_exclusive_group()
    case.add_argument("--lower-case", action="store_true", default=True,
                      help="lower case, without accents (the default)")
    case.add_argument("--cased", dest="lower_case", action="store_false", help="keep upper case and accents")
    add("--max-seq-length", type=int, default=default.max_seq_length, metavar="L",
        help="tokens per row, including [CLS] and two [SEP] (default: %(default)s)")
    add("--max-predictions", type=int, metavar="P",
        help="HDF5: maximum number of masked tokens per row; default: that of the longest row, 20 of 128")
    add("--masked-share", type=float, metavar="X", help="HDF5: fraction of tokens to mask (default: 0.15)")
    add("--short-sequence-share", type=float, default=default.short_sequence_share, metavar="X",
        help="fraction of rows that are shorter on purpose (default: %(default)s)")
    add("--duplicate", type=int, default=default.duplicate, metavar="N",
        help="number of passes over the text, each with other pairs (default: %(default)s)")
    add("--test-share", type=float, default=default.test_share, metavar="X",
        help="fraction of the text to hold out: whole documents if there are at least"
        f" {plain_text.WHOLE_DOCUMENTS}, else the end of each (default: %(default)s)")
    add("--files", type=int, metavar="N",
        help="files of the training part (default: one per 262,144 rows for records, 1 for HDF5)")
    add("--seed", type=int, default=default.seed, metavar="N",
        help="the same seed gives the same bytes (default: %(default)s)")
    return parser
# fmt: on


if __name__ == "__main__":
    sys.exit(main())
