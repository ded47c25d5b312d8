"""The folder `checkpoints/` of a run: names, commits, and the hint of the newest one.

Responsible for: the file names of a checkpoint, which folders are committed, and their order.
Knows nothing of tensors. The one idea: a folder `step-000000500.<nonce>` is one attempt to save one state; it
is never reused or renamed, and it becomes a checkpoint at the moment when `COMMIT.json` appears in it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hetseq.checkpoint.records import (
    RECORD_LIMIT,
    Attempt,
    Commit,
    DamagedError,
    PartRecord,
    commit_bytes,
    parse_commit,
    parse_json,
)
from hetseq.errors import CheckpointError
from hetseq.system.files import COMMIT_NAME, publish, read_bounded, sync_directory

STATE_NAME = "state.json"
LATEST_NAME = "latest.json"
_ATTEMPT = re.compile(r"step-(\d{9,19})\.([0-9a-f]{16})")


def attempt_name(step: int, nonce: int) -> str:
    """The folder of an attempt: step-000000500.00000000deadbeef."""
    return f"step-{step:09d}.{nonce:016x}"


def parse_attempt_name(name: str) -> tuple[int, int] | None:
    """Step and nonce of the folder of an attempt; None for any other name."""
    match = _ATTEMPT.fullmatch(name)
    if match is None:
        return None
    step, nonce = int(match[1]), int(match[2], 16)
    return (step, nonce) if attempt_name(step, nonce) == name else None


def part_name(index: int) -> str:
    """The file of a part."""
    return f"part-{index:05d}.safetensors"


def manifest_name(index: int) -> str:
    """The file that describes the part."""
    return f"part-{index:05d}.json"


def attempts(root: Path) -> list[Path]:
    """The folders of all attempts in `root`, committed or not, highest step first; links are left out."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    found = {name: parsed for name in names if (parsed := parse_attempt_name(name)) is not None}
    hint = read_latest(root)  # a network file system may open a folder that it does not list yet
    if hint is not None and (root / hint).is_dir():
        found.setdefault(hint, parse_attempt_name(hint) or (0, 0))
    return [root / name for name in sorted(found, key=lambda name: found[name], reverse=True)]


def is_committed(directory: Path) -> bool:
    """Whether there is a COMMIT.json, whatever its content."""
    return os.path.lexists(directory / COMMIT_NAME)


def write_commit(
    directory: Path, attempt: Attempt, *, state_sha256: str, state_bytes: int, parts: list[PartRecord]
) -> Commit:
    """Commit an attempt whose other files are all on disk; the commit is on disk when this returns."""
    content = commit_bytes(attempt, state_sha256=state_sha256, state_bytes=state_bytes, parts=parts)
    sync_directory(directory)  # the names of the parts, before the file that names them
    publish(directory / COMMIT_NAME, content)
    sync_directory(directory.parent)
    return parse_commit(content, source=directory / COMMIT_NAME)


def read_commit(directory: Path) -> Commit:
    """The commit of a folder, parsed but not verified.

    FileNotFoundError if there is none, DamagedError if it is incomplete or belongs to another folder,
    CheckpointRefused for a newer format. A folder that was copied under a name of another form is accepted.
    """
    path = directory / COMMIT_NAME
    try:
        content = read_bounded(path, RECORD_LIMIT)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path.name}: {error}") from None
    commit = parse_commit(content, source=path)
    named = parse_attempt_name(directory.name)
    if named is not None and named != (commit.identity.step, commit.attempt.nonce):
        expected = attempt_name(commit.identity.step, commit.attempt.nonce)
        raise DamagedError(f"{path.name}: it belongs to {expected}")
    return commit


@dataclass(frozen=True)
class Scan:
    """The content of a folder `checkpoints/`: commits, newest first, and why other committed folders were refused."""

    commits: list[Commit]
    refused: dict[Path, CheckpointError]

    def refused_from(self, step: int) -> dict[Path, CheckpointError]:
        """The refused folders of this step or a later one."""
        return {path: error for path, error in self.refused.items() if step_of(path) >= step}


def step_of(directory: Path) -> int:
    """The step in the name of an attempt's folder."""
    named = parse_attempt_name(directory.name)
    return named[0] if named is not None else 0


def scan(root: Path, known: dict[Path, Commit] | None = None) -> Scan:
    """Read every COMMIT.json in `root`, except those already in `known`, which is updated."""
    commits, refused = [], {}
    for directory in attempts(root):
        commit = known.get(directory) if known is not None and is_committed(directory) else None
        if commit is None:
            try:
                commit = read_commit(directory)
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                refused[directory] = error
                continue
            except OSError as error:
                refused[directory] = DamagedError(f"{COMMIT_NAME}: {error.strerror or error}")
                continue
        commits.append(commit)
    if known is not None:
        known.clear()
        known.update((commit.path, commit) for commit in commits)
    return Scan(sorted(commits, key=lambda commit: commit.order, reverse=True), refused)


def write_latest(root: Path, commit: Commit) -> None:
    """Write the hint that names the newest checkpoint; no reader relies on it."""
    identity = commit.identity
    hint = {"directory": commit.path.name, "step": identity.step, "generation": identity.generation}
    publish(root / LATEST_NAME, json.dumps(hint).encode() + b"\n")


def read_latest(root: Path) -> str | None:
    """The folder that `latest.json` names, if it names one at all."""
    path = root / LATEST_NAME
    try:
        name = parse_json(read_bounded(path, 4096), source=path).get("directory")
    except (OSError, ValueError, EOFError, DamagedError):
        return None
    return name if isinstance(name, str) and parse_attempt_name(name) is not None else None
