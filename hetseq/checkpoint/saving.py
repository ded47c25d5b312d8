"""Saving: every rank writes its part, rank zero commits.

Responsible for the order of events of one save, and for what rank zero does after it: the hint, retention, history.
The one idea: a phase ends with one gathered row per rank, and whether the next phase takes place is decided by those
rows alone, so ranks never disagree about a save; success is reported only after the row that follows the commit.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hetseq.checkpoint.directory import (
    STATE_NAME,
    attempt_name,
    manifest_name,
    part_name,
    scan,
    write_commit,
    write_latest,
)
from hetseq.checkpoint.files import free_bytes, make_directory, sync_directory, write_new
from hetseq.checkpoint.history import HISTORY_NAME, append_history
from hetseq.checkpoint.layout import Piece, TensorSpec, divide
from hetseq.checkpoint.parts import read_header, spec_of, write_part
from hetseq.checkpoint.reader import check_size, inspect_manifest, patiently, verify
from hetseq.checkpoint.records import (
    KINDS,
    Attempt,
    Commit,
    DamagedError,
    Identity,
    Manifest,
    PartRecord,
    sha256,
    state_bytes,
    utc_text,
)
from hetseq.checkpoint.recovery import remove_all, remove_litter
from hetseq.checkpoint.retention import Kept, superseded
from hetseq.checkpoint.rows import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.setting import Setting
from hetseq.errors import DisagreementError

logger = logging.getLogger(__name__)

FREE_MARGIN = 1.1  # a save begins only where this many times its bytes are free


@dataclass(frozen=True)
class SaveResult:
    """How a save went, the same on all ranks but for `seconds`; `error` names the rank and the reason."""

    path: Path
    ok: bool
    error: str | None
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What a save will write, before anything is written; equal on all ranks if `digest` is."""

    attempt: Attempt  # its `created` is still empty: the time is rank zero's
    directory: Path
    parts: list[list[Piece]]
    bytes: int
    digest: str


def make_plan(
    setting: Setting, tensors: Mapping[str, Tensor], *, identity: Identity, nonce: int, kinds: Sequence[str]
) -> Plan:
    """Check the arguments of a save; ValueError or TypeError says what cannot be saved."""
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"kinds {kinds!r}: expected one or several of {', '.join(KINDS)}")
    if not 0 <= nonce < 2**64:
        raise ValueError(f"nonce {nonce}: expected an integer from 0 to 2^64 - 1")
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    if not all(spec.name for spec in specs):
        raise ValueError("a tensor has an empty name")
    ordered = tuple(kind for kind in KINDS if kind in kinds)
    attempt = Attempt(setting.run_id, identity, nonce, ordered, "", setting.group.world_size)
    facts = [attempt.to_json(), setting.weights, [(spec.name, spec.dtype, spec.shape) for spec in specs]]
    directory = setting.root / attempt_name(identity.step, nonce)
    parts = divide(specs, setting.weights)
    return Plan(attempt, directory, parts, _total(specs), sha256(json.dumps(facts).encode()))


class Save:
    """One save on one rank: `run` goes through the phases."""

    def __init__(self, setting: Setting, plan: Plan, known: dict[Path, Commit]) -> None:
        self._setting = setting
        self._group = setting.group
        self._plan = plan
        self._known = known
        self._began = time.perf_counter()
        self._write_s = self._commit_s = 0.0
        self._has_created = False
        self._error: Exception | None = None

    def run(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> SaveResult:
        """All phases; every rank calls it."""
        plan = self._plan
        rows = opening = self._phase(lambda: self._open(state), only_zero=True)
        if any(other.plan != plan.digest for other in opening):
            failure: str | None = "the ranks were given different checkpoints to save"
        else:
            failure = first_failure(opening)
        attempt = replace(plan.attempt, created=utc_text(opening[0].time))
        size = opening[0].bytes
        if failure is None:
            rows = self._phase(lambda: self._write(attempt, tensors, state_sha256=opening[0].digest))
            failure, size = first_failure(rows), size + sum(row.bytes for row in rows)
            self._write_s = self._elapsed()
        if failure is None:
            parts = [PartRecord(row.bytes, row.digest) for row in rows]
            rows = self._phase(lambda: self._commit(attempt, opening[0], parts), only_zero=True)
            failure = first_failure(rows)
            self._commit_s = self._elapsed() - self._write_s
        result = SaveResult(plan.directory, failure is None, failure, 0 if failure else size, self._elapsed())
        if self._setting.is_rank_zero:
            self._conclude(result)
        if self._error is not None and not isinstance(self._error, (OSError, DamagedError)):
            raise self._error
        self._check_agreement(opening)
        return result

    def _phase(self, action: Callable[[], Row], *, only_zero: bool = False) -> list[Row]:
        """Act, then tell everyone; an exception becomes a row first, so that nobody waits for a rank that raised."""
        row = Row()
        if self._setting.is_rank_zero or not only_zero:
            try:
                row = action()
            except Exception as error:
                row, self._error = failure_row(error), error
        return exchange(self._group, replace(row, plan=self._plan.digest))

    def _open(self, state: Mapping[str, Any]) -> Row:
        """Rank zero: make room, the folder, and the statement of intent."""
        plan, now = self._plan, int(self._setting.clock())
        content = state_bytes(replace(plan.attempt, created=utc_text(now)), state)
        _ensure_directory(self._setting.root)
        self._make_room(int(FREE_MARGIN * (plan.bytes + len(content))))
        make_directory(plan.directory)
        self._has_created = True
        write_new(plan.directory / STATE_NAME, content)
        return Row(bytes=len(content), time=now, digest=sha256(content))

    def _make_room(self, needed: int) -> None:
        """Delete what this save would supersede while the disk is too full for it and another valid one remains."""
        root = self._setting.root
        if free_bytes(root) >= needed:
            return
        attempt = self._plan.attempt
        commits = [commit for commit in scan(root, self._known).commits if not verify(commit, deep=False)]
        expected: list[Kept] = sorted([attempt, *commits], key=_age, reverse=True)
        goes = superseded(expected, self._setting.retention, generation=attempt.identity.generation)
        oldest_first = [kept for kept in (expected[index] for index in goes) if isinstance(kept, Commit)]
        if oldest_first and verify(commits[0], deep=True):
            oldest_first = []  # the newest is rotten: an older one may be the only state there is
        for commit in oldest_first:
            if commit is not commits[0] and free_bytes(root) < needed:
                remove_all([commit.path])
        free = free_bytes(root)
        if free < needed:
            text = f"{free} bytes are free, {needed} are needed, and no older checkpoint may go"
            raise OSError(errno.ENOSPC, text, str(root))

    def _write(self, attempt: Attempt, tensors: Mapping[str, Tensor], *, state_sha256: str) -> Row:
        rank, directory = self._group.rank, self._plan.directory
        if rank != 0:
            patiently(lambda: sync_directory(directory), patience_s=self._setting.patience_s)
        size, crc32 = write_part(directory / part_name(rank), self._plan.parts[rank], tensors)
        content = Manifest(attempt, state_sha256, rank, size, crc32).to_bytes()
        write_new(directory / manifest_name(rank), content)
        sync_directory(directory)
        return Row(bytes=size, digest=sha256(content))

    def _commit(self, attempt: Attempt, opening: Row, parts: list[PartRecord]) -> Row:
        """Rank zero: look at every part with its own eyes, then commit."""
        directory = self._plan.directory
        for index, part in enumerate(parts):
            check = _WrittenPart(directory, attempt, index, part).check
            patiently(check, patience_s=self._setting.patience_s)
        write_commit(directory, attempt, state_sha256=opening.digest, state_bytes=opening.bytes, parts=parts)
        return Row()

    def _conclude(self, result: SaveResult) -> None:
        """Rank zero, after the last exchange. A fault here spoils no commit."""
        step = self._plan.attempt.identity.step
        if result.ok:
            logger.info("checkpoint of step %d: %s, %.1f MB", step, result.path, result.bytes / 1e6)
            self._setting.quietly("retire older checkpoints", self._retire)
        else:
            logger.warning("checkpoint of step %d failed, the older ones stay: %s", step, result.error)
            if self._has_created:
                remove_all([result.path])
        path, row = self._setting.run_directory / HISTORY_NAME, self._history_row(result)
        self._setting.quietly(f"write {HISTORY_NAME}", lambda: append_history(path, row))

    def _retire(self) -> None:
        generation = self._plan.attempt.identity.generation
        commits = scan(self._setting.root, self._known).commits
        own = next((commit for commit in commits if commit.path == self._plan.directory), None)
        if own is None:
            return  # somebody has just deleted it
        if commits[0] is own:
            write_latest(self._setting.root, own)
        goes = superseded(commits, self._setting.retention, generation=generation)
        # after a restart from an older step `own` need not be the newest: what was just promised stays all the same
        remove_all(commits[index].path for index in goes if commits[index] is not own)
        remove_litter(self._setting.root, own, generation=generation)

    def _history_row(self, result: SaveResult) -> dict[str, Any]:
        attempt = self._plan.attempt
        return {
            "time_utc": utc_text(int(self._setting.clock())),
            "run": attempt.run_id,
            "step": attempt.identity.step,
            "tier": "persistent",
            "kinds": "+".join(attempt.kinds),
            "bytes": result.bytes,
            "parts": attempt.number_of_parts,
            "world_size": self._group.world_size,
            "stall_s": f"{result.seconds:.6f}",  # all of it, as long as saving is synchronous
            "write_s": f"{self._write_s:.6f}",
            "commit_s": f"{self._commit_s:.6f}",
            "duration_s": f"{result.seconds:.6f}",
            "throughput_MBps": f"{result.bytes / 1e6 / max(result.seconds, 1e-9):.3f}",
            "result": "ok" if result.ok else "failed",
            "error": result.error or "",
        }

    def _check_agreement(self, opening: list[Row]) -> None:
        different = [rank for rank, row in enumerate(opening) if row.plan != opening[0].plan]
        if different:
            raise DisagreementError(
                f"checkpoint of step {self._plan.attempt.identity.step}: ranks {different} were given another step,"
                " generation, lineage, nonce, run, kinds, weights or other tensors than rank 0: all must be equal"
            )

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began


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


def _total(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.bytes for spec in specs)


def _ensure_directory(path: Path) -> None:
    if path.is_dir():
        return
    if not path.parent.is_dir():
        _ensure_directory(path.parent)
    make_directory(path)
