"""Checks that a path given to a command is the directory of a run.

Responsible for refusing any other path, for all commands that read a run. Opens nothing for writing, and does not
judge the content of a run's files. The one idea: one file that only a run writes is enough, since a run may have lost
the others; the content of a file tells a run's from another program's.
"""

from __future__ import annotations

import re
from pathlib import Path

from hetseq.errors import ConfigError
from hetseq.run_directory import MARKER, RunDirectory

_EXPECTED = "expected the --save-dir of a run"
_LOOK_BYTES = 8192
_ROW = re.compile(rb'^{.*"step": ?[0-9]', re.MULTILINE)


def existing_run(path: Path) -> RunDirectory:
    """An existing run directory. Raises ConfigError if the path is none, or holds no file written by a run."""
    try:
        is_there, is_folder = path.exists(), path.is_dir()
        is_run = is_folder and _is_run(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {_EXPECTED}") from None
    if not is_folder:
        raise ConfigError(f"{path} {'is a file' if is_there else 'does not exist'}: {_EXPECTED}")
    if not is_run:
        above = next((folder for folder in list(path.parents)[:2] if _is_run(folder)), None)
        hint = f"did you mean {above}?" if above else _EXPECTED
        raise ConfigError(f"{path} is no run directory, as no file in it was written by a run: {hint}")
    return RunDirectory(path)


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
