"""Makes causal language model data from raw text: `python -m hetseq.preprocessing.gpt_corpus --output DIR`.

Responsible for the order of work, the definition of a document, and packing tokens into rows. `corpus.sentences` finds
files and holds text out, `byte_pairs` makes tokens, `records` writes rows, and `corpus.atomic_folder` keeps the folder
whole. The same input, seed and versions give the same bytes.

The one idea: a split is one long sequence of tokens, with an end token after each document, cut into rows of equal
length regardless of document boundaries. Text is kept unchanged, line ends included; nothing is padded, and no token is
in two rows. The last row of a split holds the remainder and is shorter.

The text of the corpus is held in memory, and the ids of one split, two bytes each (four from 65,536 tokens on).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from rich.console import Console
from tokenizers import Tokenizer

from hetseq import ConfigError, DataError, HetSeqError, __version__
from hetseq.tasks.gpt.config import GptConfig
from hetseq.tasks.gpt.dataset import IDS, columns_of
from hetseq.tasks.gpt.tokenizer import TOKENIZER, read_tokens
from hetseq.tasks.rows.record_index import GPT_FORMAT, TYPES, VERSION, vocab_digest
from hetseq.tasks.rows.text_file import documents_of

from .corpus import byte_pairs
from .corpus import sentences as plain_text
from .corpus.atomic_folder import FACTS, GPT_MODEL, staged
from .corpus.progress import Track, bar, bars
from .corpus.python_docs import python_documents
from .corpus.sentences import Document, many, printable
from .corpus.text_chunks import Source, read_text
from .records import ROWS_PER_FILE, Ragged, Rows, columns_in_json, write_split

Ids = npt.NDArray[np.unsignedinteger[Any]]

# must not contain the name of a split
_NAME = "corpus"
_SPLITS = ("train", "test")
_ROWS_AT_ONCE = 4096
#: characters per stretch, and per call of the encoder: a token takes 440 bytes meanwhile (measured on English books)
_STRETCH, _STRETCHES = 1 << 20, 2 << 20


@dataclass(frozen=True)
class Options:
    """The options of a corpus. Raises ConfigError for impossible values."""

    inputs: tuple[Path, ...] = ()  # none: the text that ships with Python
    tokenizer_file: Path | None = None
    vocab_size: int = 4096
    end_of_text: str | None = None
    max_seq_length: int = 128
    test_share: float = 0.05
    rows_per_file: int = ROWS_PER_FILE
    seed: int = 19940802

    def __post_init__(self) -> None:
        for flag, value, is_right, expected in (
            ("--max-seq-length", self.max_seq_length, self.max_seq_length >= 2, "at least 2"),
            ("--test-share", self.test_share, 0 <= self.test_share <= 0.5, "0 (nothing is held out) to 0.5"),
            ("--rows-per-file", self.rows_per_file, self.rows_per_file >= 1, "at least 1"),
            ("--seed", self.seed, self.seed >= 0, "0 or more"),
            (
                "--vocab-size",
                self.vocab_size,
                self.vocab_size >= byte_pairs.LEAST_TOKENS,
                f"at least {byte_pairs.LEAST_TOKENS}, the bytes and the end of a text",
            ),
        ):
            if not is_right:
                raise ConfigError(f"{flag} {value}: expected {expected}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit codes: 0 the corpus is complete, 2 it could not be made, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    folder = _path(arguments.output)
    try:
        if arguments.vocab_size is not None and arguments.tokenizer is not None:
            raise ConfigError(
                f"--vocab-size {arguments.vocab_size} applies when a tokenizer is trained, but --tokenizer"
                f" {arguments.tokenizer} is given; give only one of the two"
            )
        with bars(console) as progress:
            facts = make_corpus(
                _options(arguments),
                folder,
                overwrite=arguments.overwrite,
                say=lambda line: console.print(printable(line), markup=False),
                track=lambda work, total: bar(progress, work, total),
            )
    except HetSeqError as error:
        errors.print(printable(f"error: {error}"), markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print(printable(f"interrupted: {folder} is unchanged"), markup=False)
        return 130
    command = printable(training_command(folder, facts))
    console.print("the corpus is complete; train on it:", command, sep="\n", markup=False)
    return 0


def make_corpus(
    options: Options, folder: Path, *, overwrite: bool = False, say: Callable[[str], None], track: Track
) -> dict[str, Any]:
    """Make the corpus in `folder` and return the content of its `corpus.json`.

    `say` receives lines about the results, `track` each long piece of work. If the corpus cannot be made, raises
    DataError or ConfigError and leaves nothing behind.
    """
    with staged(folder, overwrite=overwrite, names=(TOKENIZER, GPT_MODEL)) as stage:
        tokenizer = None if options.tokenizer_file is None else byte_pairs.read_tokenizer(options.tokenizer_file)
        documents, sources = _read(options, say, track)
        chance = np.random.default_rng((options.seed, len(_SPLITS)))
        kept = plain_text.hold_out([len(document.sentences) for document in documents], options.test_share, chance)
        halves = {
            split: [Document(document.name, own) for document, own in zip(documents, lines) if own]
            for split, lines in zip(_SPLITS, _cut(documents, kept.tolist()))
        }
        say(f"text: {many(len(documents), 'document')}, {many(sum(map(_characters, documents)), 'character')}")
        del documents
        tokenizer = tokenizer or _trained(options, halves["train"], say)
        end = byte_pairs.end_of_text(tokenizer, options.end_of_text)
        content = (
            tokenizer.to_str(pretty=True).encode() + b"\n"
            if options.tokenizer_file is None
            else options.tokenizer_file.read_bytes()
        )
        (stage / TOKENIZER).write_bytes(content)
        tokens = read_tokens(stage / TOKENIZER)
        columns = columns_of(len(tokens))

        splits: dict[str, Any] = {}
        for split in _SPLITS if options.test_share else _SPLITS[:1]:
            half = halves.pop(split)
            ids = _encode(half, tokenizer, end, TYPES[columns[IDS].dtype], track)
            _check(split, ids, options)
            found = write_split(
                stage, f"{_NAME}_{split}", _rows(ids, options.max_seq_length, track("writing", len(ids))), columns,
                rows_per_file=options.rows_per_file,
            )  # fmt: skip
            size = sum(len(line.encode()) for document in half for line in document.sentences)
            about = _about(ids, options.max_seq_length, tokenizer)
            splits[split] = {"documents": len(half), "text_bytes": size, "tokens": len(ids), **about, **found}
            say(f"{split}: {_in_words(splits[split])}")

        model = _json(_model(len(tokens), options.max_seq_length, end).to_hugging_face())
        (stage / GPT_MODEL).write_bytes(model)
        name = "training part" if options.tokenizer_file is None else printable(options.tokenizer_file.name)
        facts = {
            "format": {"name": GPT_FORMAT, "version": VERSION},
            "versions": _versions(),
            "options": _stated(options),
            "sources": [asdict(source) for source in sources],
            "vocabulary": {"from": name, "tokens": len(tokens), "sha256": vocab_digest(tokens)},
            "end_of_text": {"token": tokens[end], "id": end},
            "tokenizer": {"sha256": hashlib.sha256(content).hexdigest()},
            "configuration": {"sha256": hashlib.sha256(model).hexdigest()},
            "columns": columns_in_json(columns),
            "splits": splits,
        }
        (stage / FACTS).write_bytes(_json(facts))
    return facts


def training_command(folder: Path, facts: dict[str, Any]) -> str:
    """A command line that trains the small model of `config.json` on the corpus: ten epochs, within limits."""
    batch = 32
    steps = min(20_000, max(200, 10 * facts["splits"]["train"]["rows"] // batch // 100 * 100))
    valid = "--valid-subset test" if "test" in facts["splits"] else "--disable-validation"
    return (
        f"hetseq train --task gpt --data {shlex.quote(str(folder))} {valid} --global-batch-size {batch} --lr 0.001"
        f" --warmup-updates {steps // 10} --total-num-update {steps} --max-update {steps}"
    )


# From text to ids


def _read(options: Options, say: Callable[[str], None], track: Track) -> tuple[list[Document], list[Source]]:
    """Documents with lines in place of sentences; lines keep their line end, so that joining them gives the text."""
    if not options.inputs:
        say("reading the text that ships with Python; give your own with --input")
        documents, source = python_documents()
        lines = [[f"{sentence}\n" for sentence in document.sentences] for document in documents]
        return [Document(document.name, own) for document, own in zip(documents, lines)], [source]
    besides = [] if options.tokenizer_file is None else [options.tokenizer_file]
    paths = plain_text.text_files(options.inputs, besides=besides)
    found: list[Document] = []
    sources = []
    advance = track("reading", len(paths))
    for path in paths:
        text, source = read_text(path)
        found += [Document(source.name, part.splitlines(keepends=True)) for part in documents_of(text)]
        sources.append(source)
        advance(1)
    if not found:
        raise DataError(f"{_named(options)}: found only document separators; expected text in UTF-8")
    return found, sources


def _cut(documents: Sequence[Document], kept: Sequence[int]) -> tuple[list[list[str]], list[list[str]]]:
    """The first `kept` lines of each document, and the others."""
    pairs = list(zip(documents, kept))
    return [document.sentences[:cut] for document, cut in pairs], [document.sentences[cut:] for document, cut in pairs]


def _characters(document: Document) -> int:
    return sum(map(len, document.sentences))


def _trained(options: Options, documents: Sequence[Document], say: Callable[[str], None]) -> Tokenizer:
    texts = (text for document in documents for text in _stretches(document))
    trained = byte_pairs.train_tokenizer(texts, options.vocab_size)
    characters = sum(map(_characters, documents))
    say(
        f"tokenizer: {trained.get_vocab_size():,} byte pairs, trained on the {characters:,} characters of the training"
        " part"
    )
    return trained


def _stretches(document: Document) -> Iterator[str]:
    """The text of a document, in pieces that begin at a line if it is long: no encoder takes a gigabyte at once."""
    held, size = [], 0
    for line in document.sentences:
        held.append(line)
        size += len(line)
        if size >= _STRETCH:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, end: int, kind: str, track: Track) -> Ids:
    """The ids of a split: its documents one after another, each followed by the end-of-text token."""
    parts = [np.zeros(0, kind)]
    advance = track("encoding", sum(map(_characters, documents)))
    for texts, is_last in _batches(documents):
        for ids, is_end in zip(byte_pairs.encode(tokenizer, texts), is_last):
            parts.append(np.append(ids, end).astype(kind) if is_end else ids.astype(kind))
        advance(sum(map(len, texts)))
    return np.concatenate(parts)


def _batches(documents: Sequence[Document]) -> Iterator[tuple[list[str], list[bool]]]:
    """Batches of stretches for the encoder, and whether each is the last of its document."""
    texts: list[str] = []
    is_last: list[bool] = []
    size = 0
    for document in documents:
        stretches = list(_stretches(document))
        for number, text in enumerate(stretches, 1):
            texts.append(text)
            is_last.append(number == len(stretches))
            size += len(text)
            if size >= _STRETCHES:
                yield texts, is_last
                texts, is_last, size = [], [], 0
    if texts:
        yield texts, is_last


def _check(split: str, ids: Ids, options: Options) -> None:
    if len(ids) < 2:
        remedy = "raise --test-share, or hold nothing out with --test-share 0" if split == "test" else "give more text"
        raise DataError(
            f"{_named(options)}: the {split} part has {many(len(ids), 'token')}, expected at least 2; {remedy} (with"
            f" fewer than {plain_text.WHOLE_DOCUMENTS} documents, the last lines are held out, else whole documents)"
        )


def _named(options: Options) -> str:
    return ", ".join(map(str, options.inputs)) or "the text of this Python"


# From ids to files


def _rows(ids: Ids, length: int, advance: Callable[[int], None]) -> Iterator[Rows]:
    """Rows of `length` tokens, the last one shorter. A single leftover token, which predicts nothing, is dropped."""
    most = _ROWS_AT_ONCE * length
    for start in range(0, len(ids), most):
        part = ids[start : start + most]
        lengths = np.diff(np.append(np.arange(0, len(part), length), len(part)))
        if lengths[-1] == 1:
            part, lengths = part[:-1], lengths[:-1]
        yield {IDS: Ragged(part, lengths)}
        advance(len(part))


# Facts


def _about(ids: Ids, length: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The baseline of a model that ignores its input: the most frequent token, and the entropy of the frequencies."""
    predicted = ids[np.arange(len(ids)) % length > 0]  # all but the first of each row
    counts = np.bincount(predicted)
    shares = counts[counts > 0] / len(predicted)
    return {
        "predicted_tokens": len(predicted),
        "most_frequent": {
            "token": tokenizer.decode([int(counts.argmax())], skip_special_tokens=False),
            "share": round(float(counts.max() / counts.sum()), 6),
        },
        "unigram_entropy": round(float(-(shares * np.log(shares)).sum()), 6),  # nats
    }


def _in_words(split: dict[str, Any]) -> str:
    frequent = split["most_frequent"]
    return (
        f"{many(split['rows'], 'row')} from {many(split['tokens'], 'token')} of"
        f" {many(split['documents'], 'document')};"
        f" {split['predicted_tokens']:,} predicted, {frequent['share']:.1%} of them {frequent['token']!r}, unigram"
        f" entropy {split['unigram_entropy']:.2f} nats"
    )


def _model(vocab_size: int, max_seq_length: int, end: int) -> GptConfig:
    """A small GPT-2 that fits the tokenizer: 2 layers of 128."""
    return GptConfig(
        vocab_size=vocab_size, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=64, intermediate_size=512, max_position_embeddings=max(128, max_seq_length), bos_token_id=end,
        eos_token_id=end,
    )  # fmt: skip


def _versions() -> dict[str, str]:
    return {
        "hetseq": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
    }


def _stated(options: Options) -> dict[str, Any]:
    """The options by the names of their flags, without those that `sources` and `vocabulary` cover."""
    return {
        "vocab_size": options.vocab_size if options.tokenizer_file is None else None,
        "max_seq_length": options.max_seq_length,
        "test_share": options.test_share,
        "rows_per_file": options.rows_per_file,
        "seed": options.seed,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


# The command line


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # pathlib's expanduser raises for an unknown ~user


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        inputs=tuple(map(_path, arguments.input)),
        tokenizer_file=None if arguments.tokenizer is None else _path(arguments.tokenizer),
        vocab_size=Options.vocab_size if arguments.vocab_size is None else arguments.vocab_size,
        end_of_text=arguments.end_of_text,
        max_seq_length=arguments.max_seq_length,
        test_share=arguments.test_share,
        rows_per_file=arguments.rows_per_file,
        seed=arguments.seed,
    )


# fmt: off
def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m hetseq.preprocessing.gpt_corpus",
        description="Make causal language model data from text: rows of tokens, as records.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="folder for the corpus; pass it to --data afterwards")
    add("--overwrite", action="store_true", help="replace the corpus in the output folder")
    add("--input", nargs="+", default=[], action="extend", metavar="PATH",
        help=f"text files in UTF-8, or folders of *.txt; a file is one document, or several separated by lines"
        f" {byte_pairs.END_OF_TEXT}; default: the manual and docstrings that ship with Python")
    add("--tokenizer", metavar="FILE",
        help="tokenizer.json of a GPT-2 or Llama; default: train byte pairs on the training part")
    add("--vocab-size", type=int, metavar="N",
        help=f"size of the trained tokenizer, in tokens (default: {default.vocab_size})")
    add("--end-of-text", metavar="TOKEN",
        help="token after every document; default: the one of GPT-2 or Llama")
    add("--max-seq-length", type=int, default=default.max_seq_length, metavar="L",
        help="tokens per row (default: %(default)s)")
    add("--test-share", type=float, default=default.test_share, metavar="X",
        help="fraction of the text to hold out: whole documents if there are at least"
        f" {plain_text.WHOLE_DOCUMENTS}, else the last lines of each (default: %(default)s)")
    add("--rows-per-file", type=int, default=default.rows_per_file, metavar="N",
        help="rows per file (default: %(default)s)")
    add("--seed", type=int, default=default.seed, metavar="N",
        help="the same seed gives the same bytes (default: %(default)s)")
    return parser
# fmt: on


if __name__ == "__main__":
    sys.exit(main())
