"""Recovery of the folders that a killed run leaves on disk: completed or removed.

Responsible for: completing attempts that lack only their COMMIT.json, and removing those that will never be
complete. Never touches a commit. The one idea: `state.json` is written first and names the number of parts, and
every manifest names the checkpoint of its part, so any process can recognize a complete attempt. An attempt older than
the newest commit is only litter, complete or not, because retention removes a checkpoint's COMMIT.json first.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hetseq.checkpoint.directory import (
    STATE_NAME,
    attempt_name,
    attempts,
    is_committed,
    manifest_name,
    part_name,
    scan,
    step_of,
    write_commit,
)
from hetseq.checkpoint.layout import Piece, whole_tensors
from hetseq.checkpoint.part_format import check_sums, read_header
from hetseq.checkpoint.records import (
    RECORD_LIMIT,
    STATE_LIMIT,
    Attempt,
    Commit,
    DamagedError,
    Manifest,
    PartRecord,
    parse_state,
    sha256,
)
from hetseq.checkpoint.verification import check_size, verify
from hetseq.errors import CheckpointError
from hetseq.system.files import COMMIT_NAME, read_bounded, remove_attempt, sync_file

logger = logging.getLogger(__name__)


def roll_forward(directory: Path) -> Commit:
    """Commit a complete attempt: every part present, every byte as in its manifest, all of one checkpoint.

    DamagedError names the missing or wrong file; nothing is changed then. Reads the whole attempt.
    """
    path = directory / STATE_NAME
    try:
        content = read_bounded(path, STATE_LIMIT)
        attempt, _ = parse_state(content, source=path)
        if not _belongs(attempt, directory):
            raise DamagedError(f"{path.name}: it belongs to another checkpoint")
        parts: list[PartRecord] = []
        pieces: list[Piece] = []
        for index in range(attempt.number_of_parts):
            manifest, digest = _read_manifest(directory, index)
            if manifest.attempt != attempt or manifest.index != index or manifest.state_sha256 != sha256(content):
                raise DamagedError(f"{manifest_name(index)}: it belongs to another checkpoint, or to another part")
            part = directory / part_name(index)
            check_size(part, manifest.size_bytes)
            pieces.extend(read_header(part).pieces)
            check_sums(part, manifest.crc32)
            parts.append(PartRecord(manifest.size_bytes, digest))
        whole_tensors(pieces)
        for index in range(attempt.number_of_parts):
            sync_file(directory / part_name(index))
            sync_file(directory / manifest_name(index))
        sync_file(path)
    except (EOFError, ValueError) as error:
        raise DamagedError(str(error)) from None
    return write_commit(directory, attempt, state_sha256=sha256(content), state_bytes=len(content), parts=parts)


def complete_newer(root: Path, newest: Commit | None) -> list[Commit]:
    """Roll forward every complete attempt that is newer than the newest commit; incomplete ones are left."""
    completed = []
    for directory in attempts(root):
        if is_committed(directory) or (newest is not None and not _is_newer(directory, newest)):
            continue
        try:
            completed.append(roll_forward(directory))
        except (CheckpointError, OSError) as error:
            logger.info("%s was never committed and cannot be completed: %s", directory, error)
    return completed


def newest_verified(root: Path) -> Commit | None:
    """The newest commit whose small files verify."""
    return next((commit for commit in scan(root).commits if not verify(commit, deep=False)), None)


def remove_litter(root: Path, newest: Commit, *, generation: int, quiet_s: float = 0.0) -> list[Path]:
    """Delete the uncommitted attempts older than `newest`, except those of a generation newer than `generation`.

    Attempts of stopping nodes, and of unknown origin, stay for `quiet_s`: a node that lost the others saves its
    state on its own, while they continue and save as well.
    """
    litter = [
        directory
        for directory in attempts(root)
        if not is_committed(directory)
        and _is_older(directory, newest, generation=generation)
        and not (quiet_s > 0 and _may_be_alone(directory) and _changed(directory) > _changed(newest.path) - quiet_s)
    ]
    return remove_all(litter)


def remove_all(directories: Iterable[Path]) -> list[Path]:
    """Delete these attempts' folders as far as the disk allows; returns those that are gone."""
    removed = []
    for directory in directories:
        try:
            remove_attempt(directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s could not be deleted: %s", directory, error)
        else:
            removed.append(directory)
    return removed


def remove_temporaries(root: Path) -> None:
    """Delete the files that a writer killed in the middle of a rename left beside its target."""
    for path in [*root.glob("*.json.tmp"), *(path / f"{COMMIT_NAME}.tmp" for path in attempts(root))]:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _read_manifest(directory: Path, index: int) -> tuple[Manifest, str]:
    path = directory / manifest_name(index)
    content = read_bounded(path, RECORD_LIMIT)
    return Manifest.from_bytes(content, source=path), sha256(content)


def _intent(directory: Path) -> Attempt | None:
    """The attempt that the folder's state.json names; None if there is none yet, or it names another one."""
    path = directory / STATE_NAME
    try:
        attempt, _ = parse_state(read_bounded(path, STATE_LIMIT), source=path)
    except (OSError, EOFError, ValueError, CheckpointError):
        return None
    return attempt if _belongs(attempt, directory) else None


def _belongs(attempt: Attempt, directory: Path) -> bool:
    return attempt_name(attempt.identity.step, attempt.nonce) == directory.name


def _may_be_alone(directory: Path) -> bool:
    intent = _intent(directory)
    return intent is None or "signal" in intent.kinds


def _is_newer(directory: Path, newest: Commit) -> bool:
    intent = _intent(directory)
    if intent is None:
        return False
    return (intent.identity.step, intent.identity.generation) > newest.order[:2]


def _is_older(directory: Path, newest: Commit, *, generation: int) -> bool:
    """Whether it is older than `newest`; without a readable state.json, it is kept at the same step: it may be new."""
    intent = _intent(directory)
    if intent is None:
        return step_of(directory) < newest.identity.step
    identity = intent.identity
    return identity.generation <= generation and (identity.step, identity.generation) <= newest.order[:2]


def _changed(directory: Path) -> float:
    """When something in it last changed, by its file system's clock; infinity if that cannot be read."""
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return math.inf
