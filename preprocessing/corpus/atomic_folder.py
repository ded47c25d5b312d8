"""The folder of a corpus: complete, or as it was before.

Files are written into a hidden folder in it and renamed when all of them are there, `corpus.json` last. One process at
a time works in a folder; what a killed one left in the hidden folder, the next one removes. Pieces of a corpus that is
being made are in another hidden folder, and stay. What the files hold is the affair of `bert_corpus` and `gpt_corpus`.
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

#: the files that every corpus of BERT has, besides its data
FACTS, VOCABULARY, MODEL = INDEX, "vocab.txt", "bert_config.json"
#: the configuration and the tokenizer in one of a causal language model; tasks/gpt/tokenizer, which has the name of the
#: latter too, imports torch, and each process that makes a corpus would
GPT_MODEL, _TOKENIZER = "config.json", "tokenizer.json"

_DATA = (".hdf5", ".h5", SUFFIX)
_STAGE, _PIECES = ".unfinished-corpus", ".unfinished-pieces"
#: by format: its files besides data and index -> where the index states their sums
_STATED = {
    FORMAT: {VOCABULARY: "vocabulary", MODEL: "configuration"},
    GPT_FORMAT: {_TOKENIZER: "tokenizer", GPT_MODEL: "configuration"},
}


@contextlib.contextmanager
def staged(folder: Path, *, overwrite: bool, names: Sequence[str] = (VOCABULARY, MODEL)) -> Iterator[Path]:
    """A folder to write into; what is in it when the block ends well becomes the corpus of `folder`.

    `names` are the files that it will have besides its data and its index, so that nobody else's are replaced.
    Raises DataError if `folder` cannot be written, is in use, or holds what may not be replaced.
    """
    with _made(folder), locked(folder, "another corpus is being made in it"):
        stage = folder / _STAGE
        shutil.rmtree(stage, ignore_errors=True)  # of a run that was killed: ours is the only one
        previous = _previous(folder, names, overwrite=overwrite)
        stage.mkdir()
        try:
            yield stage
            _move(stage, folder, previous)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def shared(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """As `staged` for rows of BERT, for one of several who make pieces in `folder`; none holds another up."""
    with _made(folder):
        _previous(folder, (VOCABULARY, MODEL), overwrite=overwrite)
        yield


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder is there; those that were made for it are gone if the block fails and leaves nothing in them."""
    missing: list[Path] = []
    try:
        try:
            missing += [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise DataError(
                f"{folder} cannot be written: {os.strerror(error.errno) if error.errno else error};"
                " expected a folder with room that you may write to"
            ) from error
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):  # it holds somebody's file by now
                path.rmdir()
        raise


@contextlib.contextmanager
def pieces_for(folder: Path, key: Any, *, is_shared: bool, say: Callable[[str], None]) -> Iterator[Path]:
    """A hidden folder in `folder` for the pieces of one corpus, which is what `key` says: JSON.

    It stays for the same command to go on with if this process is interrupted or killed or the disk is full, and goes
    if the corpus cannot be made. Pieces of another corpus are removed, but by nobody who shares the folder.
    """
    name = _sha256(json.dumps(key, sort_keys=True).encode())[:16]
    root = folder / _PIECES / name
    if not is_shared and (others := [path for path in _listing(root.parent) if path.name != name]):
        say(f"{root.parent} has pieces made of other text, options or versions: they are removed, all is made anew")
        for path in others:
            shutil.rmtree(path, ignore_errors=True)
    if kept := [path for path in _listing(root) if not path.name.startswith(".")]:
        say(f"going on with what is finished: {len(kept):,} pieces in {root}")
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
    """No pieces are left in `folder`."""
    shutil.rmtree(folder / _PIECES, ignore_errors=True)


def kept_pieces(folder: Path) -> Path | None:
    """Where pieces are that the same command goes on with; None: there are none."""
    return folder / _PIECES if _listing(folder / _PIECES) else None


def _listing(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _previous(folder: Path, names: Sequence[str], *, overwrite: bool) -> list[Path]:
    """The files of the corpus that is in `folder`, its index last; DataError if it may not be replaced."""
    data = sorted(path for path in folder.iterdir() if path.suffix in _DATA)
    listed, hashes = _listed(folder / FACTS)
    besides = dict.fromkeys([*names, *(name for name in hashes if name != FACTS), FACTS])
    others = [folder / name for name in besides if os.path.lexists(folder / name)]
    if foreign := [path.name for path in data if path.name not in listed]:
        raise DataError(
            f"{folder} has data files that are not of the corpus in its {FACTS} ({', '.join(foreign[:3])}), which"
            " would be trained on with the new ones; remove them or give another folder"
        )
    # somebody may have put them there, or worked on them since
    for path in others:
        if not path.is_file() or _sha256(path.read_bytes()) != hashes.get(path.name):
            found = "is not as the corpus in that folder came with it" if path.name in hashes else "is of no corpus"
            raise DataError(f"{path} {found} and would be lost; move it away or give another folder")
    if not overwrite and (data or others):
        names = ", ".join(path.name for path in (*others, *data)[:3])
        raise DataError(f"{folder} holds a corpus already ({names}); give another folder, or replace it by --overwrite")
    return [*data, *others]


def _listed(facts: Path) -> tuple[set[str], dict[str, str]]:
    """The names of the data of a corpus, and the SHA-256 of its other files."""
    files: set[str] = set()
    hashes: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # whatever it is, it lists no more then
        content = facts.read_bytes()
        stated = json.loads(content)
        names = _STATED[stated["format"]["name"]]
        hashes[FACTS] = _sha256(content)
        files = set(stated["files"] if "files" in stated else _names_of(stated["splits"]))
        hashes.update({name: stated[field]["sha256"] for name, field in names.items() if field in stated})
    return files, hashes


def _names_of(splits: dict[str, Any]) -> Iterator[str]:
    """The files of records, which belong to splits."""
    for split in splits.values():
        yield from (file["name"] for file in split["files"])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _move(stage: Path, folder: Path, previous: Sequence[Path]) -> None:
    """Put the new files in the place of the previous ones, `corpus.json` last; if that fails, put those back."""
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
