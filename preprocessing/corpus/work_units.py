"""Work units: finished pieces of a long computation, kept in a folder so that a later process can resume from them.

Responsible for pieces that are either complete or absent, and for their checksums. A piece is a folder of files with a
list of their checksums; the caller defines their content. It is written under another name and then renamed, which
needs no lock on any file system. If two processes make the same piece, on one machine or two, the first is kept; both
are equal, since a piece is a function of its name and of the folder's purpose.

No file is flushed to disk: a piece whose checksums do not match after a crash is made again.
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
    """A finished piece, with the facts that its maker recorded."""

    folder: Path
    facts: dict[str, Any]

    def array(self, name: str, kind: npt.DTypeLike) -> Array:
        """The numbers in one of its files, memory-mapped: read from disk on access."""
        path = self.folder / name
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.zeros(0, kind)
        return np.asarray(np.memmap(path, kind, mode="r"))


def finished(root: Path, name: str, make: Callable[[Path], dict[str, Any]]) -> Piece:
    """The piece `name` of the folder `root`: the existing one, or else a new one.

    `make` writes files into an empty folder and returns facts about them that JSON can hold.
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
            if (found := _read(folder)) is None:  # no other process was faster, so renaming failed
                raise
            return found
        return Piece(folder, facts)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _read(folder: Path) -> Piece | None:
    """A piece whose checksums match; None if it is damaged or missing."""
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
