"""Finished pieces of a long piece of work, kept in a folder so that whoever comes later goes on with them.

Responsible for pieces that are complete or not there, and for their sums. A piece is a folder of files with a list of
their sums; what is in them is the affair of whoever makes it. It is made under another name and then renamed, and
renaming needs no lock, on no file system: of two who make the same piece, on one machine or on two, the first one's is
kept, and theirs are equal, since a piece is a function of its name and of what the folder is for.

No file is flushed to the disk: a piece that does not have its sums after a crash is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_LIST = "piece.json"
_BLOCK_BYTES = 1 << 20

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """A piece that is there, with what its maker says of it."""

    folder: Path
    facts: dict[str, Any]

    def array(self, name: str, kind: npt.DTypeLike) -> Array:
        """The numbers in one of its files, one after another, mapped: read from the disk as they are looked at."""
        path = self.folder / name
        if path.stat().st_size == 0:  # nothing cannot be mapped
            return np.zeros(0, kind)
        return np.asarray(np.memmap(path, kind, mode="r"))


def finished(root: Path, name: str, make: Callable[[Path], dict[str, Any]]) -> Piece:
    """The piece `name` of the folder `root`: the one that is there, or else a new one.

    `make` writes files into an empty folder and says what is to be known of them, as JSON has it.
    """
    folder = root / name
    if folder.is_dir():
        if (found := _read(folder)) is not None:
            return found
        damaged = root / f".{name}.{secrets.token_hex(8)}"
        os.rename(folder, damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    own = root / f".{name}.{secrets.token_hex(8)}"
    own.mkdir()
    try:
        facts = make(own)
        sums = {path.name: _sum(path) for path in sorted(own.iterdir())}
        (own / _LIST).write_text(json.dumps({"facts": facts, "files": sums}), encoding="utf-8")
        try:
            os.rename(own, folder)
        except OSError:
            if (found := _read(folder)) is None:  # nobody was faster: it cannot be done
                raise
            return found
        return Piece(folder, facts)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _read(folder: Path) -> Piece | None:
    """A piece that has its sums; None if it is damaged or gone."""
    try:
        stated = json.loads((folder / _LIST).read_bytes())
        if all(_sum(folder / name) == found for name, found in stated["files"].items()):
            return Piece(folder, stated["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
