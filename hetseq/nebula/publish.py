"""Publishing the folder of a tag on disk: opening, committing, and removing older tags.

Responsible for: the acts that a process without torch can do. Knows nothing of arenas or of the caller. The one idea:
several ranks exchange no messages; each leaves a file that says what it has written, in a folder whose name all know,
and rank zero commits once it has seen all of these files. An act that was cut short may be repeated.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.checkpoint.history import HISTORY_NAME, append_history
from hetseq.checkpoint.records import STATE_LIMIT, DamagedError, unseal
from hetseq.errors import CheckpointError
from hetseq.nebula.tags import (
    FileRecord,
    TagAttempt,
    TagCommit,
    TagManifest,
    check,
    commit_bytes,
    done_bytes,
    done_name,
    folders,
    manifest_name,
    numbers_in,
    read_commit,
    read_done,
    read_manifest,
    scan,
    superseded,
    tag_of,
    written_names,
)
from hetseq.system.files import (
    COMMIT_NAME,
    free_bytes,
    lock,
    publish,
    read_bounded,
    remove_attempt,
    sync_directory,
    write_new,
)

logger = logging.getLogger(__name__)

FREE_MARGIN = 1.1  # a file is started only if this many times its bytes are free
RETRY_S = 0.05
_LOCKED_S = 10.0  # a process that tidies up holds the lock for a moment
COLUMNS = (
    "time_utc",
    "tag",
    "tier",
    "is_best",
    "bytes",
    "files",
    "world_size",
    "stall_s",
    "write_s",
    "duration_s",
    "throughput_MBps",
    "result",
    "error",
)


@dataclass(frozen=True)
class TagPlace:
    """Where tags are saved, how many are kept (-1: all), which rank this is, and how long to wait for others."""

    root: Path
    keep: int
    rank: int
    patience_s: float

    @property
    def run_id(self) -> str:
        """The common id of the arenas of all processes that save to this path."""
        return f"nebula {self.root}"


class TagPublisher:
    """The folders that one process writes; it locks each until the tag is over, so that no process tidies it up."""

    def __init__(self, place: TagPlace) -> None:
        self._place = place
        self._locks: dict[str, int] = {}

    def folder(self, attempt: TagAttempt) -> Path:
        return self._place.root / attempt.folder_name

    def open(self, attempt: TagAttempt, *, size_bytes: int) -> Path:
        """The folder of an attempt, with room for a file of this size. OSError if the disk refuses."""
        folder = self.folder(attempt)
        self._make_room(int(FREE_MARGIN * size_bytes))
        with suppress(FileExistsError):  # another rank, or another name
            os.mkdir(folder, 0o700)
            sync_directory(folder.parent)
        if attempt.folder_name not in self._locks:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with suppress(OSError):  # a file system without locks, where no folder is tidied up; or a stopped tidier
                lock(descriptor, fcntl.LOCK_SH, patience_s=_LOCKED_S)
            self._locks[attempt.folder_name] = descriptor
        return folder

    def close(self, attempt: TagAttempt) -> None:
        """Release the lock on a folder."""
        descriptor = self._locks.pop(attempt.folder_name, None)
        if descriptor is not None:
            with suppress(OSError):  # nothing was written through it
                os.close(descriptor)

    def write_manifest(self, manifest: TagManifest) -> None:
        """Write the manifest of a file that is on disk; with several ranks, commit if it was the last one."""
        folder = self.folder(manifest.attempt)
        write_new(folder / manifest_name(manifest.name), manifest.to_bytes())
        sync_directory(folder)
        if manifest.attempt.world_size > 1 and manifest.attempt.num_of_files > 0:
            self._commit_if_full(manifest.attempt)

    def commit(
        self, attempt: TagAttempt, names: Sequence[str], *, error: str | None, has_ended: bool
    ) -> TagCommit | None:
        """End this rank's part of a tag. Returns the commit on rank zero, None on other ranks.

        CheckpointError if a rank failed, did not respond in time, or the number of names differs from the promise. Rank
        zero then removes the folder. `has_ended`: the script is gone, so this does not wait either.
        """
        folder = self.folder(attempt)
        try:
            files = [] if error else [read_manifest(folder, attempt, name)[1] for name in names]
            if attempt.world_size > 1:
                self.open(attempt, size_bytes=0)
                publish(folder / done_name(self._place.rank), done_bytes(attempt, self._place.rank, files, error))
            if self._place.rank != 0:
                return None
            if attempt.world_size == 1 and error:
                raise CheckpointError(error)
            if attempt.world_size > 1:
                patience_s = min(self._place.patience_s, 60.0) if has_ended else self._place.patience_s
                files = self._gather(attempt, patience_s)
            return self._commit(attempt, files)
        except CheckpointError:
            if self._place.rank == 0:
                self.discard(attempt)
            raise
        finally:
            self.close(attempt)

    def discard(self, attempt: TagAttempt) -> None:
        """Remove the folder of an attempt that will never be complete."""
        self.close(attempt)
        _remove(self.folder(attempt))

    def tidy(self, attempt: TagAttempt) -> None:
        """After a commit: remove superseded tags and the litter of killed scripts. A failure here does no harm."""
        try:
            commits = scan(self._place.root).commits
            own = self.folder(attempt)  # just written, so it verifies
            newest = next((commit for commit in commits if commit.path == own or _is_intact(commit)), None)
            for commit in superseded(commits, keep=self._place.keep):
                if newest is not None and commit.path not in (newest.path, own):
                    _remove(commit.path)
            for folder in folders(self._place.root):
                is_litter = folder.name not in self._locks and not os.path.lexists(folder / COMMIT_NAME)
                if is_litter and _is_older(folder, attempt):
                    _remove_unless_held(folder)
        except OSError as error:
            logger.warning("could not tidy up %s: %s", self._place.root, error)

    def note(self, row: Mapping[str, Any]) -> None:
        """One line of `checkpointHistories.csv`."""
        try:
            append_history(self._place.root / HISTORY_NAME, dict(row), columns=COLUMNS)
        except OSError as error:
            logger.warning("could not write %s in %s: %s", HISTORY_NAME, self._place.root, error)

    def _commit(self, attempt: TagAttempt, files: Sequence[FileRecord]) -> TagCommit:
        folder = self.folder(attempt)
        with suppress(FileNotFoundError):
            return read_commit(folder)  # it exists already: a repetition, or the last file triggered the commit
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"two ranks saved the name {twice[0]!r}: names of ranks differ, as in model-rank0")
        if not names or (attempt.num_of_files > 0 and len(names) != attempt.num_of_files):
            raise CheckpointError(f"{len(names)} names were saved, expected {max(attempt.num_of_files, 1)}")
        sync_directory(folder)  # the names of the files, before the file that names them
        publish(folder / COMMIT_NAME, commit_bytes(attempt, files))
        sync_directory(folder.parent)
        return read_commit(folder)

    def _commit_if_full(self, attempt: TagAttempt) -> None:
        names = written_names(self.folder(attempt))
        if len(names) != attempt.num_of_files:
            return
        with suppress(DamagedError, FileExistsError, FileNotFoundError):  # another rank is committing
            self._commit(attempt, [read_manifest(self.folder(attempt), attempt, name)[1] for name in names])

    def _gather(self, attempt: TagAttempt, patience_s: float) -> list[FileRecord]:
        """The files of all ranks; reads each rank's file by name, because folders are listed late."""
        deadline = time.monotonic() + patience_s
        missing, files, errors = list(range(attempt.world_size)), list[FileRecord](), list[str]()
        while missing:
            for rank in list(missing):
                with suppress(FileNotFoundError, DamagedError):  # missing or incomplete so far
                    found, error = read_done(self.folder(attempt), attempt, rank)
                    errors += [f"rank {rank}: {error}"] if error is not None else []
                    files += found
                    missing.remove(rank)
            if missing and time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {', '.join(map(str, missing))} did not complete its part in {patience_s:.0f} s: every rank"
                    " calls Checkpoint and commit, or pass together=False to init where only one saves"
                )
            if missing:
                time.sleep(RETRY_S)
        if errors:  # raised only now: a rank that is not done would create the removed folder again
            raise CheckpointError("; ".join(errors))
        return files

    def _make_room(self, needed: int) -> None:
        """Delete tags that will be superseded while the disk is too full; never the last one that verifies."""
        root = self._place.root
        if self._place.rank == 0 and free_bytes(root) < needed and self._place.keep != -1:
            commits = scan(root).commits
            goes = superseded(commits, keep=max(self._place.keep - 1, 1))
            if goes and _is_intact(commits[0]):
                for commit in goes:
                    if free_bytes(root) < needed:
                        _remove(commit.path)
        free = free_bytes(root)
        if free < needed:
            text = f"{free} bytes are free, {needed} are needed, and no older tag may be deleted"
            raise OSError(errno.ENOSPC, text, str(root))


def _is_older(folder: Path, attempt: TagAttempt) -> bool:
    """Whether an attempt was begun before this one; with several ranks another rank may be ahead of this one."""
    tag = tag_of(folder.name) or ""
    for entry in sorted(folder.glob("*.json")):
        with suppress(OSError, EOFError, ValueError, CheckpointError):
            record = unseal(read_bounded(entry, STATE_LIMIT), source=entry)
            return TagAttempt.from_json(record, source=entry).created_ns < attempt.created_ns
    return numbers_in(tag) < numbers_in(attempt.tag)


def _is_intact(commit: TagCommit) -> bool:
    try:
        check(commit, deep=True)
    except CheckpointError:
        return False
    return True


def _remove(folder: Path) -> None:
    try:
        remove_attempt(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be deleted: %s", folder, error)


def _remove_unless_held(folder: Path) -> None:
    """Remove a folder that no process writes; on a file system without locks that is unknown, and it stays."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        finally:
            os.close(descriptor)
