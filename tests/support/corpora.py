"""Synthetic texts, a vocabulary for them, and the files of a corpus folder."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from hetseq.preprocessing.corpus import atomic_folder as corpus_folder

SYLLABLES = "ba be bi bo bu da de di do du ka ke ki ko ku la le li lo lu".split()  # noqa: SIM905
# a letter for each digit, so that the numbers of sentences are words that no other sentence has
DIGITS = str.maketrans("0123456789", "ghjmnpqrst")


def story(sentences: int, *, name: str = "z") -> str:
    """Wrapped paragraphs of sentences, each with a word of its own: `zgh` is sentence 01 of story z."""
    generator = np.random.default_rng([sentences, *name.encode()])
    words = np.array([first + second for first in SYLLABLES for second in SYLLABLES])
    text = []
    for number in range(sentences):
        chosen = words[np.minimum(generator.geometric(0.02, size=generator.integers(4, 16)), len(words)) - 1]
        mark = f"{name}{number:04}".translate(DIGITS)
        text.append(f"{' '.join([mark, *chosen]).capitalize()}{'. ' if number % 9 else '.' + chr(10) * 2}")
    return re.sub(r"(.{60}\S*) ", r"\1\n", "".join(text))


def marks(name: str, first: int, last: int) -> set[str]:
    """The words that are only in sentences `first` to `last` of a story."""
    return {f"{name}{number:04}".translate(DIGITS) for number in range(first, last)}


def write_vocab(path: Path) -> Path:
    """A vocabulary with every word of the stories in pieces of two letters or one."""
    pieces = [*SYLLABLES, *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *pieces, *(f"##{p}" for p in pieces)]
    path.write_text("\n".join(tokens) + "\n")
    return path


def contents(folder: Path) -> dict[str, str]:
    """The checksum of every file except unfinished pieces."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and corpus_folder._PIECES not in path.parts
    }


def rows_of(folder: Path, split: str) -> dict[str, np.ndarray]:
    """All rows of a split, its files one after another."""
    import h5py

    parts = []
    for path in sorted(folder.glob(f"*{split}*.hdf5")):
        with h5py.File(path) as file:
            parts.append({name: file[name][:] for name in file})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def restored(rows: dict[str, np.ndarray]) -> np.ndarray:
    """input_ids with the masked tokens put back."""
    ids = rows["input_ids"].copy()
    row, column = np.nonzero(rows["masked_lm_positions"])
    ids[row, rows["masked_lm_positions"][row, column]] = rows["masked_lm_ids"][row, column]
    return ids
