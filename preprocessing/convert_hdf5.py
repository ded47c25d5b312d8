"""Converts BERT rows from HDF5 to records and back: `hetseq.preprocessing.convert_hdf5 --input DIR --output DIR`.

Responsible for the order of work. The content of `--input` decides the direction. To records, the original words
replace the masks of a file, since records are masked when they are read. To HDF5, masks are drawn as training would
draw them for one epoch and seed, so that the 2020 reader sees the same batches as that epoch.

Words, segments and labels of a row survive in both directions; padding is written anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hetseq import ConfigError, DataError, HetSeqError, MissingSplitError, __version__
from hetseq.tasks.bert.dataset import FIRST_LENGTHS, IDS, LABEL, BertRecords, columns_of, load_records
from hetseq.tasks.bert.files import find_records, hdf5_names
from hetseq.tasks.bert.hdf5_dataset import BertDataset, load_bert
from hetseq.tasks.bert.masking import Masking
from hetseq.tasks.bert.vocab import read_vocab
from hetseq.tasks.rows.record_index import FORMAT, VERSION, Index, vocab_digest

from .bert import hdf5 as bert_hdf5
from .bert import pairs as bert_pairs
from .corpus.atomic_folder import FACTS, MODEL, VOCABULARY, staged
from .corpus.progress import Track, bar, bars
from .corpus.sentences import printable
from .records import ROWS_PER_FILE, Ragged, Rows, columns_in_json, write_split

_NAME = "corpus"
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Options:
    """The options of a conversion. Raises ConfigError for impossible values."""

    source: Path
    vocab_file: Path | None = None  # none: vocab.txt in the source
    splits: tuple[str, ...] = ("train", "valid", "test")  # of HDF5 files; missing ones are skipped
    rows_per_file: int = ROWS_PER_FILE
    seed: int = 19940802
    epoch: int = 0
    max_predictions: int | None = None
    whole_words: bool = False

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--rows-per-file", self.rows_per_file, 1), ("--seed", self.seed, 0), ("--epoch", self.epoch, 0),
            ("--max-predictions", 1 if self.max_predictions is None else self.max_predictions, 1),
        ):  # fmt: skip
            if not least <= value < 2**63:
                raise ConfigError(f"{flag} {value}: expected {least} or more")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit codes: 0 the folder is complete, 2 it could not be made, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    folder = Path(arguments.output)
    try:
        options = Options(
            Path(arguments.input), None if arguments.vocab_file is None else Path(arguments.vocab_file),
            tuple(arguments.splits), arguments.rows_per_file, arguments.seed, arguments.epoch,
            arguments.max_predictions, arguments.whole_words,
        )  # fmt: skip
        with bars(console) as progress:
            convert(
                options,
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
    console.print(printable(f"the folder is complete; train on it: hetseq train --task bert --data {folder}"))
    return 0


def convert(
    options: Options, folder: Path, *, overwrite: bool = False, say: Callable[[str], None], track: Track
) -> dict[str, Any]:
    """Convert the source into `folder` and return the content of its `corpus.json`.

    If that fails, raises DataError or ConfigError and leaves nothing behind.
    """
    if folder.resolve() == _folder(options.source).resolve():
        raise ConfigError(f"--input {options.source} and --output {folder} are the same folder: give two")
    index = find_records(options.source, hdf5_names(options.source))
    vocab, model = _vocab(options), _model(options.source)
    with staged(folder, overwrite=overwrite) as stage:
        (stage / VOCABULARY).write_text("".join(f"{token}\n" for token in vocab), encoding="utf-8", newline="\n")
        facts: dict[str, Any] = {
            "format": {"name": FORMAT, "version": VERSION if index is None else 1},
            "versions": {"hetseq": __version__, "numpy": np.__version__},
            "vocabulary": {"tokens": len(vocab), "sha256": vocab_digest(vocab)},
        }
        if model is not None:
            (stage / MODEL).write_bytes(model)
            facts["configuration"] = {"sha256": hashlib.sha256(model).hexdigest()}
        if index is None:
            _to_records(options, stage, vocab, facts, say, track)
        else:
            _to_hdf5(options, stage, index, vocab, facts, say, track)
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        (stage / FACTS).write_text(text, encoding="utf-8", newline="\n")
    return facts


# To records


def _to_records(
    options: Options, stage: Path, vocab: Sequence[str], facts: dict[str, Any], say: Callable[[str], None], track: Track
) -> None:
    columns = columns_of(len(vocab))
    facts.update(sources=[], columns=columns_in_json(columns), splits={})
    taken: dict[str, str] = {}
    for split in dict.fromkeys(options.splits):
        try:
            dataset = load_bert(
                options.source, split, vocab_size=len(vocab), max_positions=None, type_vocab_size=2
            )  # fmt: skip
        except MissingSplitError:
            continue
        for path in dataset.files:
            if taken.setdefault(path.name, split) != split:
                raise DataError(
                    f"{path} belongs to two splits, because its name contains both {taken[path.name]!r} and {split!r}:"
                    " rename it, or give --splits longer words"
                )
            facts["sources"].append({"name": printable(path.name), "bytes": path.stat().st_size})
        advance = track(split, len(dataset))
        batches = (_unmasked(dataset, start, advance) for start in range(0, len(dataset), _ROWS_AT_ONCE))
        found = write_split(stage, f"{_NAME}_{split}", batches, columns, rows_per_file=options.rows_per_file)
        facts["splits"][split] = found
        longest, files = found["longest"][IDS], len(dataset.files)
        say(f"{split}: {found['rows']:,} rows of up to {longest} tokens, from HDF5 files: {files}")
    if not facts["splits"]:
        raise DataError(
            f"{options.source} has no files of the splits {', '.join(options.splits)}: expected HDF5 files whose names"
            f" contain one of these words, found {', '.join(hdf5_names(options.source)[:6]) or 'none'}; give --splits"
        )


def _unmasked(dataset: BertDataset, start: int, advance: Callable[[int], None]) -> Rows:
    """Some rows with the original words, without padding."""
    stop = min(start + _ROWS_AT_ONCE, len(dataset))
    batch = {name: tensor.numpy() for name, tensor in dataset.__getitems__(range(start, stop)).items()}
    ids, is_real, segments = batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]  # (n, L)
    ids.ravel()[batch["masked_positions"]] = batch["masked_ids"]
    column, lengths = np.arange(ids.shape[1]), is_real.sum(axis=1)
    first = ((segments == 0) & is_real).sum(axis=1)
    for is_wrong, found, expected in (
        ((is_real != (column < lengths[:, None])).any(axis=1), "input_mask has a 1 behind a 0", "padding at its end"),
        (
            ((segments != (column >= first[:, None])) & is_real).any(axis=1) | (first == 0),
            "segment_ids are not zeros and then ones",
            "a first segment and then a second one",
        ),
    ):
        if is_wrong.any():
            where = dataset.place_of(start + int(np.argmax(is_wrong)))
            raise DataError(f"{where}: {found}, expected {expected}, all that records can hold; leave such rows out")
    advance(stop - start)
    return {IDS: Ragged(ids[is_real], lengths), FIRST_LENGTHS: first, LABEL: batch["next_sentence_labels"]}


# To HDF5


def _to_hdf5(
    options: Options, stage: Path, index: Index, vocab: Sequence[str], facts: dict[str, Any],
    say: Callable[[str], None], track: Track,
) -> None:  # fmt: skip
    bert_hdf5.require_h5py()
    facts.update(options={"seed": options.seed, "epoch": options.epoch}, splits={}, files=[])
    for split, stated in index.splits.items():
        length = stated.longest[IDS]
        predictions = options.max_predictions or max(1, math.ceil(length * Masking.share))
        dataset = load_records(
            index, split, vocab, seed=options.seed,
            masking=Masking(max_predictions=predictions, whole_words=options.whole_words),
        )  # fmt: skip
        dataset.set_epoch(options.epoch)
        advance, begin = track(split, len(dataset)), 0
        for file in stated.files:
            if not file.rows:
                continue
            name = f"{file.path.stem}.hdf5"
            with bert_hdf5.writing(stage / name, count=file.rows, vocab_size=len(vocab)) as append:
                for start in range(begin, begin + file.rows, _ROWS_AT_ONCE):
                    stop = min(start + _ROWS_AT_ONCE, begin + file.rows)
                    append(_masked(dataset, range(start, stop), length, predictions))
                    advance(stop - start)
            begin += file.rows
            facts["files"].append(name)
        facts["splits"][split] = {"instances": len(dataset)}
        say(f"{split}: {len(dataset):,} rows of {length} tokens, with up to {predictions} masked")


def _masked(dataset: BertRecords, rows: range, length: int, predictions: int) -> bert_pairs.Rows:
    batch = {name: tensor.numpy() for name, tensor in dataset.__getitems__(rows).items()}
    at, column = np.divmod(batch["masked_positions"], dataset.length)  # (m,)
    number = np.arange(len(at)) - np.searchsorted(at, at)  # within its row
    positions = np.zeros((len(rows), predictions), np.int16 if length <= 2**15 else np.int32)
    words = np.zeros((len(rows), predictions), np.int64)
    positions[at, number], words[at, number] = column, batch["masked_ids"]
    return bert_pairs.Rows(
        input_ids=batch["input_ids"][:, :length],
        input_mask=batch["attention_mask"][:, :length].astype(np.int8),
        segment_ids=batch["token_type_ids"][:, :length].astype(np.int8),
        masked_lm_positions=positions,
        masked_lm_ids=words,
        next_sentence_labels=batch["next_sentence_labels"].astype(np.int8),
    )


# The other files


def _vocab(options: Options) -> list[str]:
    path = options.vocab_file or _folder(options.source) / VOCABULARY
    if options.vocab_file is None and not path.is_file():
        raise DataError(
            f"{path.parent} has no {VOCABULARY}: expected the vocabulary that the ids refer to; give --vocab-file FILE"
        )
    return read_vocab(path)


def _model(source: Path) -> bytes | None:
    path = _folder(source) / MODEL
    return path.read_bytes() if path.is_file() else None


def _folder(source: Path) -> Path:
    return source if source.is_dir() else source.parent


# fmt: off
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hetseq.preprocessing.convert_hdf5",
        description="Turn HDF5 files of BERT's pre-training into records, or a folder of records into HDF5 files.",
    )
    add = parser.add_argument
    add("--input", required=True, metavar="PATH", help="folder of HDF5 files, a single HDF5 file, or folder of records")
    add("--output", required=True, metavar="DIR", help="folder for the result; pass it to --data afterwards")
    add("--overwrite", action="store_true", help="replace the corpus in the output folder")
    add("--vocab-file", metavar="FILE", help="vocabulary of the rows; default: vocab.txt beside them")
    add("--splits", nargs="+", default=list(Options.splits), metavar="WORD",
        help="to records: words in the names of HDF5 files, one per split (default: train, valid and test, if present)")
    add("--rows-per-file", type=int, default=Options.rows_per_file, metavar="N",
        help="to records: rows per file (default: %(default)s)")
    add("--seed", type=int, default=Options.seed, metavar="N", help="to HDF5: seed of the masks (default: %(default)s)")
    add("--epoch", type=int, default=Options.epoch, metavar="N",
        help="to HDF5: epoch of the masks (default: %(default)s)")
    add("--max-predictions", type=int, metavar="P",
        help="to HDF5: maximum number of masked words per row; default: 15 %% of the longest row")
    add("--whole-words", action="store_true", help="to HDF5: mask all pieces of a word together")
    return parser
# fmt: on


if __name__ == "__main__":
    sys.exit(main())
