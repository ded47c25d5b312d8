"""Publishing one attempt on disk: its folder, its commit, and the removal of what it supersedes.

Responsible for: the acts of the one process that opens, commits and concludes attempts. Knows nothing of ranks, rows
and tensors, so that a process without torch can do them. The one idea: an act that was cut short may be repeated, by
the same process or another one: an attempt's name is its own, and a commit follows from its files.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.checkpoint.directory import (
    STATE_NAME,
    attempt_name,
    manifest_name,
    part_name,
    scan,
    write_commit,
    write_latest,
)
from hetseq.checkpoint.history import HISTORY_NAME, append_history
from hetseq.checkpoint.part_format import read_header
from hetseq.checkpoint.records import Attempt, Commit, DamagedError, Manifest, PartRecord, sha256
from hetseq.checkpoint.recovery import remove_all, remove_litter
from hetseq.checkpoint.retention import Kept, Retention, superseded
from hetseq.checkpoint.verification import check_size, inspect_manifest, patiently, verify
from hetseq.errors import CheckpointError
from hetseq.system.files import free_bytes, make_directory, sync_directory, write_new

logger = logging.getLogger(__name__)

CHECKPOINTS_NAME = "checkpoints"
FREE_MARGIN = 1.1  # a save starts only if this many times its bytes are free


@dataclass(frozen=True)
class Place:
    """Where the checkpoints of a run are, and which of them stay.

    `patience_s` is how late a file may become visible. Attempts that changed within `underway_s` count as still being
    written: a stopping node that has lost the others saves on its own.
    """

    run_directory: Path
    retention: Retention
    patience_s: float
    underway_s: float

    @property
    def root(self) -> Path:
        return self.run_directory / CHECKPOINTS_NAME

    def folder(self, attempt: Attempt) -> Path:
        return self.root / attempt_name(attempt.identity.step, attempt.nonce)

    def quietly(self, purpose: str, action: Callable[[], object]) -> None:
        """Do something that no save or load depends on; if the disk refuses, log a warning."""
        try:
            action()
        except (OSError, CheckpointError) as error:
            logger.warning("could not %s in %s: %s", purpose, self.run_directory, error)


class Publisher:
    """Opens, commits and concludes attempts, one after the other."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[Path, Commit] = {}  # a commit never changes, so each COMMIT.json is read once

    def open(self, attempt: Attempt, state: bytes, *, size_bytes: int) -> None:
        """Make room, the folder, and the statement of intent; OSError, and nothing left behind, if the disk refuses."""
        _ensure_directory(self._place.root)
        self._make_room(attempt, int(FREE_MARGIN * (size_bytes + len(state))))
        folder = self._place.folder(attempt)
        make_directory(folder)
        try:
            write_new(folder / STATE_NAME, state)
        except OSError:
            remove_all([folder])
            raise

    def commit(self, attempt: Attempt, *, state_sha256: str, state_bytes: int, parts: Sequence[PartRecord]) -> None:
        """Check every part on disk, then commit. DamagedError for a part that differs from its record."""
        folder = self._place.folder(attempt)
        for index, part in enumerate(parts):
            check = _WrittenPart(folder, attempt, index, part).check
            patiently(check, patience_s=self._place.patience_s)
        write_commit(folder, attempt, state_sha256=state_sha256, state_bytes=state_bytes, parts=list(parts))

    def retire(self, attempt: Attempt) -> None:
        """After a commit: update the hint and remove superseded checkpoints. A failure here spoils no commit."""
        self._place.quietly("retire older checkpoints", lambda: self._retire(attempt))

    def discard(self, attempt: Attempt) -> None:
        """After a failure: remove the folder of an attempt that will never be complete."""
        remove_all([self._place.folder(attempt)])

    def note(self, row: Mapping[str, Any]) -> None:
        """One line of `checkpointHistories.csv`."""
        path = self._place.run_directory / HISTORY_NAME
        self._place.quietly(f"write {HISTORY_NAME}", lambda: append_history(path, dict(row)))

    def _make_room(self, attempt: Attempt, needed: int) -> None:
        """On a full disk: delete failed attempts, then what this save supersedes while a valid one remains."""
        root = self._place.root
        if free_bytes(root) >= needed:
            return
        commits = [commit for commit in scan(root, self._known).commits if not verify(commit, deep=False)]
        expected: list[Kept] = sorted([attempt, *commits], key=_age, reverse=True)
        if commits:
            remove_litter(root, commits[0], generation=attempt.identity.generation)
        goes = superseded(expected, self._place.retention, generation=attempt.identity.generation)
        oldest_first = [kept for kept in (expected[index] for index in goes) if isinstance(kept, Commit)]
        if oldest_first and verify(commits[0], deep=True):
            oldest_first = []  # the newest is damaged: an older one may be the only state left
        for commit in oldest_first:
            if commit is not commits[0] and free_bytes(root) < needed:
                remove_all([commit.path])
        free = free_bytes(root)
        if free < needed:
            text = f"{free} bytes are free, {needed} are needed, and no older checkpoint may be deleted"
            raise OSError(errno.ENOSPC, text, str(root))

    def _retire(self, attempt: Attempt) -> None:
        generation, root = attempt.identity.generation, self._place.root
        commits = scan(root, self._known).commits
        folder = self._place.folder(attempt)
        own = next((commit for commit in commits if commit.path == folder), None)
        if own is None:
            return  # it has just been deleted
        if commits[0] is own:
            write_latest(root, own)
        goes = superseded(commits, self._place.retention, generation=generation)
        # after a restart from an older step `own` need not be the newest: its success was just reported, so it stays
        remove_all(commits[index].path for index in goes if commits[index] is not own)
        remove_litter(root, own, generation=generation, quiet_s=self._place.underway_s)


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write a part's manifest, for good; returns its sha256, which the commit will name."""
    content = manifest.to_bytes()
    write_new(folder / manifest_name(manifest.index), content)
    sync_directory(folder)
    return sha256(content)


@dataclass(frozen=True)
class _WrittenPart:
    directory: Path
    attempt: Attempt
    index: int
    record: PartRecord

    def check(self) -> None:
        manifest = inspect_manifest(self.directory, self.index, self.record.manifest_sha256)
        if manifest.attempt != self.attempt or manifest.size_bytes != self.record.size_bytes:
            raise DamagedError(f"{manifest_name(self.index)}: it belongs to another checkpoint")
        path = self.directory / part_name(self.index)
        check_size(path, self.record.size_bytes)
        read_header(path)


def _age(kept: Kept) -> tuple[int, int]:
    return kept.identity.step, kept.identity.generation


def _ensure_directory(path: Path) -> None:
    if path.is_dir():
        return
    if not path.parent.is_dir():
        _ensure_directory(path.parent)
    make_directory(path)
