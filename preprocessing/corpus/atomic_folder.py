"""Atomic updates of a corpus folder: it is either complete or unchanged.

Files are written into a hidden folder inside it and renamed when all of them exist, `corpus.json` last. One process at
a time works in a folder, and removes what a killed process left in the hidden folder. Pieces of an unfinished corpus
are kept in another hidden folder. `bert_corpus` and `gpt_corpus` define what the files hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetseq import ConfigError, DataError
from hetseq.tasks.rows.record_index import FORMAT, GPT_FORMAT, INDEX, SUFFIX

from .folders import flush, locked

#: the files of every BERT corpus, besides its data
FACTS, VOCABULARY, MODEL = INDEX, "vocab.txt", "bert_config.json"
#: the configuration and the tokenizer of a GPT corpus; the latter's name is repeated here because tasks/gpt/tokenizer
#: imports torch, which each process that makes a corpus would then import too
GPT_MODEL, _TOKENIZER = "config.json", "tokenizer.json"

_DATA = (".hdf5", ".h5", SUFFIX)
_STAGE, _PIECES = ".unfinished-corpus", ".unfinished-pieces"
#: by format: its files besides data and index -> the index field with their checksum
_STATED = {
    FORMAT: {VOCABULARY: "vocabulary", MODEL: "configuration"},
    GPT_FORMAT: {_TOKENIZER: "tokenizer", GPT_MODEL: "configuration"},
}


@contextlib.contextmanager
def staged(folder: Path, *, overwrite: bool, names: Sequence[str] = (VOCABULARY, MODEL)) -> Iterator[Path]:
    """A folder to write into; if the block succeeds, its files become the corpus in `folder`.

    `names` are its files besides data and index, so that files from elsewhere are never replaced. Raises DataError if
    `folder` cannot be written, is in use, or holds files that may not be replaced.
    """
    with _made(folder), locked(folder, "another corpus is being made in it"):
        stage = folder / _STAGE
        shutil.rmtree(stage, ignore_errors=True)  # left by a killed run: this process holds the lock
        previous = _previous(folder, names, overwrite=overwrite)
        stage.mkdir()
        try:
            yield stage
            _move(stage, folder, previous)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def shared(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """As `staged` for BERT rows, for one of several processes that make pieces in `folder` without blocking others."""
    with _made(folder):
        _previous(folder, (VOCABULARY, MODEL), overwrite=overwrite)
        yield


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create the folder and its parents; if the block fails, remove the new ones that are empty."""
    missing: list[Path] = []
    try:
        try:
            missing += [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise DataError(
                f"{folder} cannot be written: {os.strerror(error.errno) if error.errno else error};"
                " expected a writable folder with free space"
            ) from error
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):  # another file is in it by now
                path.rmdir()
        raise


@contextlib.contextmanager
def pieces_for(folder: Path, key: Any, *, is_shared: bool, say: Callable[[str], None]) -> Iterator[Path]:
    """A hidden folder in `folder` for the pieces of the corpus that `key`, a JSON value, identifies.

    It remains if this process is interrupted or killed or the disk is full, so that the same command can resume, and
    is removed if the corpus cannot be made. Pieces of other corpora are removed, unless the folder is shared.
    """
    name = _sha256(json.dumps(key, sort_keys=True).encode())[:16]
    root = folder / _PIECES / name
    if not is_shared and (others := [path for path in _listing(root.parent) if path.name != name]):
        say(f"{root.parent} has pieces made from other text, options or versions: they are removed and made again")
        for path in others:
            shutil.rmtree(path, ignore_errors=True)
    if kept := [path for path in _listing(root) if not path.name.startswith(".")]:
        say(f"resuming: {len(kept):,} finished pieces in {root}")
    root.mkdir(parents=True, exist_ok=True)
    try:
        yield root
    except (ConfigError, DataError):
        if not is_shared:
            forget_pieces(folder)
        raise
    finally:
        if not is_shared and all(path.name.startswith(".") for path in _listing(root)):
            forget_pieces(folder)


def forget_pieces(folder: Path) -> None:
    """Remove all pieces in `folder`."""
    shutil.rmtree(folder / _PIECES, ignore_errors=True)


def kept_pieces(folder: Path) -> Path | None:
    """The folder of pieces from which the same command resumes; None if there are none."""
    return folder / _PIECES if _listing(folder / _PIECES) else None


def _listing(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _previous(folder: Path, names: Sequence[str], *, overwrite: bool) -> list[Path]:
    """The files of the corpus in `folder`, its index last. Raises DataError if it may not be replaced."""
    data = sorted(path for path in folder.iterdir() if path.suffix in _DATA)
    listed, hashes = _listed(folder / FACTS)
    besides = dict.fromkeys([*names, *(name for name in hashes if name != FACTS), FACTS])
    others = [folder / name for name in besides if os.path.lexists(folder / name)]
    if foreign := [path.name for path in data if path.name not in listed]:
        raise DataError(
            f"{folder} has data files that the corpus in its {FACTS} does not list ({', '.join(foreign[:3])}), which"
            " would be trained on with the new ones; remove them or give another folder"
        )
    # the user may have put them there, or edited them since
    for path in others:
        if not path.is_file() or _sha256(path.read_bytes()) != hashes.get(path.name):
            found = "was changed after its corpus was made" if path.name in hashes else "belongs to no corpus"
            raise DataError(f"{path} {found} and would be lost; move it away or give another folder")
    if not overwrite and (data or others):
        names = ", ".join(path.name for path in (*others, *data)[:3])
        raise DataError(f"{folder} already holds a corpus ({names}); give another folder, or replace it: --overwrite")
    return [*data, *others]


def _listed(facts: Path) -> tuple[set[str], dict[str, str]]:
    """The names of the data of a corpus, and the SHA-256 of its other files."""
    files: set[str] = set()
    hashes: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # an unreadable index lists nothing further
        content = facts.read_bytes()
        stated = json.loads(content)
        names = _STATED[stated["format"]["name"]]
        hashes[FACTS] = _sha256(content)
        files = set(stated["files"] if "files" in stated else _names_of(stated["splits"]))
        hashes.update({name: stated[field]["sha256"] for name, field in names.items() if field in stated})
    return files, hashes


def _names_of(splits: dict[str, Any]) -> Iterator[str]:
    """The names of record files, which are listed by split."""
    for split in splits.values():
        yield from (file["name"] for file in split["files"])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _move(stage: Path, folder: Path, previous: Sequence[Path]) -> None:
    """Replace the previous files with the new ones, `corpus.json` last; on failure, restore the previous ones."""
    new = sorted(stage.iterdir(), key=lambda path: (path.name == FACTS, path.name))
    for path in new:
        flush(path)
    kept = stage / "previous"
    kept.mkdir()
    try:
        for path in reversed(previous):
            os.replace(path, kept / path.name)
        for path in new:
            os.replace(path, folder / path.name)
    except BaseException:
        for path in new:
            if not path.exists():  # it has been moved
                (folder / path.name).unlink(missing_ok=True)
        for path in kept.iterdir():
            os.replace(path, folder / path.name)
        raise
    flush(folder)
