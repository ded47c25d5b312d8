"""Checks that a path given to a command is the directory of a run.

Responsible for refusing any other path, for all commands that read a run. Opens nothing for writing, and does not
judge the content of a run's files. The one idea: one file that only a run writes is enough, since a run may have lost
the others; the content of a file tells a run's from another program's.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hetseq.errors import ConfigError, few
from hetseq.registry import nearest
from hetseq.run_directory import MARKER, RunDirectory

_EXPECTED = "expected the --save-dir of a run"
_LOOK_BYTES = 8192
_MOST_LOOKED_AT = 200  # entries of one folder, which may be on a slow disk
_ROW = re.compile(rb'^{.*"step": ?[0-9]', re.MULTILINE)


def existing_run(path: Path) -> RunDirectory:
    """An existing run directory. Raises ConfigError if the path is none, or holds no file written by a run."""
    try:
        is_there, is_folder = path.exists(), path.is_dir()
        is_run = is_folder and _is_run(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {_EXPECTED} [run-missing]") from None
    if not is_folder:
        found = "is a file" if is_there else "does not exist"
        raise ConfigError(f"{path} {found}: {_EXPECTED}{_near(path)} [run-missing]")
    if not is_run:
        raise ConfigError(
            f"{path} is no run directory, as no file in it was written by a run: {_EXPECTED}{_near(path)} [run-missing]"
        )
    return RunDirectory(path)


def _near(path: Path) -> str:
    """The run that may be meant: above the path, in it, beside it, here or in `runs`; "" if there is none."""
    above = next((folder for folder in list(path.parents)[:2] if _is_run(folder)), None)
    if above is not None:
        return f"; did you mean {above}?"
    found: dict[str, Path] = {}
    for folder in dict.fromkeys([path, path.parent, Path(), Path("runs")]):
        with suppress(OSError):
            found |= {run.name: run for run in islice(folder.iterdir(), _MOST_LOOKED_AT) if _is_run(run)}
    guess = nearest(path.name, found)
    if guess is not None:
        return f"; did you mean {found[guess]}?"
    return f"; runs near it are {few(sorted(map(str, found.values())))}" if found else ""


def _is_run(folder: Path) -> bool:
    """Whether a run has written one of the files that identify it."""
    if _head(folder / "config.yaml").startswith(MARKER.encode()):
        return True
    if any(any(folder.glob(pattern)) for pattern in ("status/rank-*.json", "checkpoints/step-*.*/")):
        return True
    rows = folder / "metrics.jsonl"
    return rows.is_file() and (not rows.stat().st_size or _ROW.search(_head(rows)) is not None)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LOOK_BYTES)
    except OSError:
        return b""
