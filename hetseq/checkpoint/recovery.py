"""What a killed run leaves behind, and what becomes of it.

Responsible for: completing attempts that lack nothing but their COMMIT.json, and removing those that never will be
complete. Refuses to touch a commit. The one idea: `state.json` is written first and names the number of parts, and
every manifest repeats whose part it is, so a whole attempt is known as such by anyone; an attempt older than the
newest commit is only litter, whole or not, because retention takes a checkpoint's COMMIT.json away first.
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
    """Commit an attempt that is whole: every part there, every byte as its manifest says, all of one checkpoint.

    DamagedError names what is missing or wrong, and nothing is changed then. Reads all of the attempt.
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
    """Roll forward every whole attempt that is newer than the newest commit; those that are not whole are left."""
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
    """Delete the uncommitted attempts that are older than `newest`, except those of a generation above one's own.

    Those of nodes that stop, and of nobody knows whom, stay for `quiet_s`: a node that lost the others saves what it
    has on its own, while they go on and save as well.
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
    """Delete these attempts' folders as far as the disk lets us; those that are gone now."""
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
    """Delete what a writer that was killed in the middle of a rename has left beside its target."""
    for path in [*root.glob("*.json.tmp"), *(path / f"{COMMIT_NAME}.tmp" for path in attempts(root))]:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _read_manifest(directory: Path, index: int) -> tuple[Manifest, str]:
    path = directory / manifest_name(index)
    content = read_bounded(path, RECORD_LIMIT)
    return Manifest.from_bytes(content, source=path), sha256(content)


def _intent(directory: Path) -> Attempt | None:
    """What the attempt says it is; None where it does not say so yet, or says it is another one."""
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
    """Without a readable state.json an attempt of the same step may be one that is just being made: it is left."""
    intent = _intent(directory)
    if intent is None:
        return step_of(directory) < newest.identity.step
    identity = intent.identity
    return identity.generation <= generation and (identity.step, identity.generation) <= newest.order[:2]


def _changed(directory: Path) -> float:
    """When something in it changed last, by the clock of its file system; infinity where it cannot be seen."""
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return math.inf
