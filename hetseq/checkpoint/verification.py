"""Verification of one committed checkpoint.

Responsible for: trusting nothing in a checkpoint until the next digest confirms it, from COMMIT.json through the
manifests to the bytes. Does not choose the checkpoint, and does not use torch. The one idea: `inspect` reads only the
small files and the headers, and everything it returns has been checked against the sizes of the files, so a
hostile file cannot make a reader that fills tensors from it allocate more than is on disk.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hetseq.checkpoint.directory import STATE_NAME, manifest_name, part_name, read_commit
from hetseq.checkpoint.layout import TensorSpec, whole_tensors
from hetseq.checkpoint.part_format import PartHeader, check_sums, read_header
from hetseq.checkpoint.records import (
    RECORD_LIMIT,
    STATE_LIMIT,
    Commit,
    DamagedError,
    Manifest,
    parse_state,
    sha256,
)
from hetseq.errors import CheckpointError
from hetseq.system.files import read_bounded, reading

_T = TypeVar("_T")
RETRY_S = 0.05


@dataclass(frozen=True)
class Inspected:
    """A checkpoint whose small files all agree: state, and per part its manifest and header."""

    commit: Commit
    state: dict[str, Any]
    manifests: tuple[Manifest, ...]
    headers: tuple[PartHeader, ...]
    specs: list[TensorSpec]


def inspect(commit: Commit) -> Inspected:
    """Check all but the tensors' bytes of a checkpoint; DamagedError names the first file that is wrong."""
    if read_commit(commit.path).sha256 != commit.sha256:
        raise DamagedError("COMMIT.json: it has changed since it was read")
    state = _read_state(commit)
    pairs = [_inspect_part(commit, index) for index in range(len(commit.parts))]
    return Inspected(
        commit, state, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), _assemble(pairs)
    )


def verify(commit: Commit, *, deep: bool, advance: Callable[[int], None] = lambda count: None) -> list[str]:
    """All problems of a checkpoint, one sentence per file; `deep` reads every byte of it.

    `advance` is called now and then with the number of bytes read.
    """
    problems: list[str] = []

    def note(file: str, check: Callable[[], _T]) -> _T | None:
        try:
            return check()
        except CheckpointError as error:
            problems.append(str(error))
        except (OSError, EOFError) as error:
            problems.append(f"{file}: {reason_of(error)}")
        return None

    current = note("COMMIT.json", lambda: read_commit(commit.path))
    if current is not None and current.sha256 != commit.sha256:
        problems.append("COMMIT.json: it has changed since it was read")
    note(STATE_NAME, lambda: _read_state(commit))
    pairs = []
    for index in range(len(commit.parts)):
        pair = note(part_name(index), lambda index=index: _inspect_part(commit, index))  # type: ignore[misc]
        if pair is not None:
            pairs.append(pair)
            if deep:
                path, crc32 = commit.path / part_name(index), pair[0].crc32
                note(path.name, lambda path=path, crc32=crc32: check_sums(path, crc32, advance))  # type: ignore[misc]
    if len(pairs) == len(commit.parts):
        note("the parts together", lambda: _assemble(pairs))
    return problems


def inspect_manifest(directory: Path, index: int, expected_sha256: str) -> Manifest:
    """A manifest, which must have the expected digest."""
    path = directory / manifest_name(index)
    content = _content(path, RECORD_LIMIT)
    if sha256(content) != expected_sha256:
        raise DamagedError(f"{path.name}: it is not the one that COMMIT.json names")
    return Manifest.from_bytes(content, source=path)


def patiently(action: Callable[[], _T], *, patience_s: float) -> _T:
    """The action's result, retried while another rank's file is missing or not yet as that rank left it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return action()
        except (FileNotFoundError, DamagedError):
            if time.monotonic() >= deadline:
                raise
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


def check_size(path: Path, expected: int) -> None:
    """Raise DamagedError if a file is missing or its size in bytes differs."""
    try:
        with reading(path) as (_, size):
            pass
    except OSError as error:
        raise DamagedError(f"{path.name}: {reason_of(error)}") from None
    if size != expected:
        raise DamagedError(f"{path.name}: it has {size} bytes, {expected} are expected")


def _read_state(commit: Commit) -> dict[str, Any]:
    path = commit.path / STATE_NAME
    check_size(path, commit.state_bytes)
    content = _content(path, STATE_LIMIT)
    if sha256(content) != commit.state_sha256:
        raise DamagedError(f"{path.name}: it is not the one that COMMIT.json names")
    attempt, state = parse_state(content, source=path)
    if attempt != commit.attempt:
        raise DamagedError(f"{path.name}: it belongs to another checkpoint")
    return state


def _inspect_part(commit: Commit, index: int) -> tuple[Manifest, PartHeader]:
    record = commit.parts[index]
    manifest = inspect_manifest(commit.path, index, record.manifest_sha256)
    belongs = manifest.attempt == commit.attempt and manifest.state_sha256 == commit.state_sha256
    if not belongs or manifest.index != index or manifest.size_bytes != record.size_bytes:
        raise DamagedError(f"{manifest_name(index)}: it belongs to another checkpoint, or to another part")
    path = commit.path / part_name(index)
    check_size(path, record.size_bytes)
    try:
        return manifest, read_header(path)
    except (OSError, EOFError) as error:
        raise DamagedError(f"{path.name}: {reason_of(error)}") from None


def _assemble(pairs: list[tuple[Manifest, PartHeader]]) -> list[TensorSpec]:
    try:
        return whole_tensors(piece for _, header in pairs for piece in header.pieces)
    except ValueError as error:
        raise DamagedError(f"the parts together: {error}") from None


def _content(path: Path, limit: int) -> bytes:
    try:
        return read_bounded(path, limit)
    except (OSError, EOFError, ValueError) as error:
        raise DamagedError(f"{path.name}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """The problem with a file, without its path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
