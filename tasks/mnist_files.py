"""The files of MNIST under `--data`, found by their names and headers.

Responsible for finding them and for opening one, compressed or not; imports no torch. The *name* of a file decides its
half, its *header* decides between images and labels; names of parent folders never matter.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from hetseq import DataError, MissingSplitError

#: half of the data for each split; MNIST has no separate validation half
_HALVES = {"train": "train", "valid": "test", "test": "test"}
#: folders under --data that may hold the files, in search order
_PLACES = (".", "MNIST/raw", "MNIST/processed", "raw", "processed")
_NAME_WORDS = {"train": ("train",), "test": ("t10k", "test")}
_IDX_NAMES = {
    half: f"{stem}-images-idx3-ubyte[.gz] and {stem}-labels-idx1-ubyte[.gz]"
    for half, stem in (("train", "train"), ("test", "t10k"))
}
_PT_NAMES = {"train": "training.pt", "test": "test.pt"}
_REMEDY = (
    "give --data the folder with the files, fetch them with `python -m hetseq.preprocessing.mnist --output DIR`,"
    " or leave --data out for the small digits that scikit-learn bundles"
)


def half_of(split: str) -> str:
    """The half of the data for a split, "train" or "test". Raises DataError for an unknown split."""
    if split not in _HALVES:
        raise DataError(
            f"mnist has no split {split!r}: give --train-subset and --valid-subset one of {', '.join(_HALVES)}"
            " (test and valid are the same)"
        )
    return _HALVES[split]


def find_files(path: Path, half: str) -> tuple[Path, ...]:
    """The idx files of a half under `path`, images and labels, or its single .pt file.

    Raises MissingSplitError if no file of that half is found, and DataError for an invalid file.
    """
    folder, seen = _folder_of(path), []
    for place in _PLACES:
        names = _names_in(folder / place)
        seen += [name if place == "." else f"{place}/{name}" for name in names]
        idx = _idx_files(folder / place, names, half)
        if idx:
            return _pair(folder / place, idx, half)
        if _PT_NAMES[half] in names:
            return (folder / place / _PT_NAMES[half],)
    shown = f"{', '.join(seen[:6])}{', ...' if len(seen) > 6 else ''}" if seen else "nothing"
    raise MissingSplitError(
        f"--data {path} has no {half} files of MNIST: looked in it and in {', '.join(_PLACES[1:])} for"
        f" {_IDX_NAMES[half]}, or {_PT_NAMES[half]}, and found {shown}; {_REMEDY}"
    )


def _folder_of(path: Path) -> Path:
    try:
        if path.is_dir():
            return path
        if path.exists():
            return path.parent
    except OSError as error:
        raise DataError(f"--data {path} cannot be read: {error.strerror}; expected a folder you may read") from error
    raise DataError(f"--data {path} does not exist: expected a folder with the files of MNIST; {_REMEDY}")


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read: {error.strerror}; expected a folder you may read and enter"
        ) from error


def _idx_files(folder: Path, names: list[str], half: str) -> dict[str, Path]:
    """The idx files of a half by role, "images" and "labels"; an unpacked file is preferred to its .gz."""
    found: dict[str, Path] = {}
    for name in names:  # sorted, so a plain file comes before the same one with .gz
        lowered = name.lower()
        is_of_half = any(word in lowered for word in _NAME_WORDS[half])
        if not is_of_half or lowered.startswith(".") or lowered.endswith((".pt", ".part")):
            continue
        path = folder / name
        is_known_unpacked = any(name == f"{known.name}.gz" for known in found.values())
        if is_known_unpacked or not path.is_file():
            continue
        role = _role_of(path)
        if role in found:
            raise DataError(
                f"{folder} has two files for the {role} of the {half} half, {found[role].name} and {name}:"
                " expected one; move the other away"
            )
        if role is not None:
            found[role] = path
    return found


def _role_of(path: Path) -> str | None:
    """The role of an idx file by its header, "images" or "labels"; None for a file that is not idx and need not be."""
    name = path.name.lower()
    must_be_idx = re.search(r"idx|ubyte", name) is not None
    with reading(path) as file:
        magic = file.read(4)
    if must_be_idx and not magic:
        raise DataError(f"{path} is empty (0 bytes): expected an idx file; copy or fetch it again")
    is_idx = len(magic) == 4 and magic[:2] == b"\0\0" and magic[3] in (1, 3)
    if not is_idx:
        if must_be_idx:
            raise DataError(
                f"{path} begins with {magic.hex(' ')}: expected an idx header, 00 00 08 03 (images) or 00 00 08 01"
                " (labels); copy or fetch it again"
            )
        return None
    role = "images" if magic[3] == 3 else "labels"
    named = "images" if re.search(r"images?|idx3", name) else "labels" if re.search(r"labels?|idx1", name) else role
    if role != named:
        expected = "2051 (00 00 08 03)" if named == "images" else "2049 (00 00 08 01)"
        raise DataError(
            f"{path}: its name says {named}, its header says {role} (magic number {int.from_bytes(magic, 'big')}):"
            f" expected magic number {expected}; give the file its right name, or fetch it again"
        )
    return role


def _pair(folder: Path, files: dict[str, Path], half: str) -> tuple[Path, Path]:
    for role, other in (("images", "labels"), ("labels", "images")):
        if role not in files:
            raise DataError(
                f"{folder} has the {other} of the {half} half ({files[other].name}) but not its {role}:"
                f" expected {_IDX_NAMES[half]}; {_REMEDY}"
            )
    return files["images"], files["labels"]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked if its first two say gzip. Raises DataError for errors inside the block."""
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw) if is_packed else contextlib.nullcontext(raw) as file:
                yield cast("IO[bytes]", file)
    except EOFError as error:
        raise DataError(
            f"{path} ends in the middle of its gzip data: the file is incomplete; copy or fetch it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} has damaged gzip data ({error}): copy or fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; expected a file you may read") from error
