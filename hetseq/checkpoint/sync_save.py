"""Synchronous saving: every rank writes its part, rank zero commits.

Responsible for: the order of events of one save while training waits. The one idea: a phase ends with one
gathered row per rank, and those rows alone decide whether the next phase takes place, so ranks never disagree
about a save; success is reported only after the row that follows the commit.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetseq.checkpoint.context import CheckpointContext
from hetseq.checkpoint.directory import part_name
from hetseq.checkpoint.holdings import HoldingsDifferError, Layout, check_holdings
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.part_io import write_part
from hetseq.checkpoint.publish import Publisher, write_manifest
from hetseq.checkpoint.rank_messages import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.records import (
    KINDS,
    Attempt,
    DamagedError,
    Identity,
    Manifest,
    PartRecord,
    sha256,
    state_bytes,
    utc_text,
)
from hetseq.checkpoint.tensor_slices import Held
from hetseq.checkpoint.verification import patiently
from hetseq.errors import DisagreementError
from hetseq.system.files import sync_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveResult:
    """The result of a save, the same on all ranks except for the times; `error` names the rank and the reason.

    `seconds` is its whole duration, `stall_s` the part of it for which training waited.
    """

    path: Path
    ok: bool
    error: str | None
    bytes: int
    seconds: float
    stall_s: float


@dataclass(frozen=True)
class Plan:
    """The content of a save, before anything is written; equal on all ranks if `digest` is."""

    attempt: Attempt  # its `created` is still empty: rank zero sets the time
    directory: Path
    parts: list[list[Piece]]
    bytes: int
    digest: str
    key: int  # of the layout


def make_plan(
    setting: CheckpointContext, layout: Layout, *, identity: Identity, nonce: int, kinds: Sequence[str]
) -> Plan:
    """Check the arguments of a save; ValueError explains an invalid one."""
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"kinds {kinds!r}: expected one or more of {', '.join(KINDS)}")
    if not 0 <= nonce < 2**64:
        raise ValueError(f"nonce {nonce}: expected an integer from 0 to 2^64 - 1")
    ordered = tuple(kind for kind in KINDS if kind in kinds)
    is_prunable = setting.place.retention.keep_newest is not None
    attempt = Attempt(setting.run_id, identity, nonce, ordered, "", setting.group.world_size, is_prunable)
    digest = sha256(json.dumps([attempt.to_json(), layout.digest]).encode())
    return Plan(attempt, setting.place.folder(attempt), layout.parts, layout.bytes, digest, layout.key)


class Save:
    """One save on one rank: `run` does all phases."""

    def __init__(self, setting: CheckpointContext, plan: Plan, publisher: Publisher) -> None:
        self._setting = setting
        self._group = setting.group
        self._plan = plan
        self._publisher = publisher
        self._began = time.perf_counter()
        self._write_s = self._commit_s = 0.0
        self._has_created = False
        self._error: Exception | None = None

    def run(self, tensors: Mapping[str, Held], state: Mapping[str, Any]) -> SaveResult:
        """All phases; every rank calls it. HoldingsDifferError after the first one, with nothing left behind."""
        plan = self._plan
        rows = opening = self._phase(lambda: self._open(state), only_zero=True)
        try:
            check_holdings(opening)
        except HoldingsDifferError:
            if self._has_created:
                self._publisher.discard(plan.attempt)
            raise
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
        seconds = self._elapsed()
        result = SaveResult(plan.directory, failure is None, failure, 0 if failure else size, seconds, seconds)
        if self._setting.is_rank_zero:
            self._conclude(result)
        if self._error is not None and not isinstance(self._error, (OSError, DamagedError)):
            raise self._error
        check_agreement(plan, opening)
        return result

    def _phase(self, action: Callable[[], Row], *, only_zero: bool = False) -> list[Row]:
        """Act, then exchange the result; an exception is sent as a row first, so no rank waits for one that raised."""
        row = Row()
        if self._setting.is_rank_zero or not only_zero:
            try:
                row = action()
            except Exception as error:
                row, self._error = failure_row(error), error
        return exchange(self._group, replace(row, plan=self._plan.digest, nonce=self._plan.key))

    def _open(self, state: Mapping[str, Any]) -> Row:
        plan, now = self._plan, int(self._setting.clock())
        attempt = replace(plan.attempt, created=utc_text(now))
        content = state_bytes(attempt, state)
        self._publisher.open(attempt, content, size_bytes=plan.bytes)
        self._has_created = True
        return Row(bytes=len(content), time=now, digest=sha256(content))

    def _write(self, attempt: Attempt, tensors: Mapping[str, Held], *, state_sha256: str) -> Row:
        rank, directory = self._group.rank, self._plan.directory
        if rank != 0:
            patiently(lambda: sync_directory(directory), patience_s=self._setting.patience_s)
        size, crc32 = write_part(directory / part_name(rank), self._plan.parts[rank], tensors)
        digest = write_manifest(directory, Manifest(attempt, state_sha256, rank, size, crc32))
        return Row(bytes=size, digest=digest)

    def _commit(self, attempt: Attempt, opening: Row, parts: list[PartRecord]) -> Row:
        self._publisher.commit(attempt, state_sha256=opening.digest, state_bytes=opening.bytes, parts=parts)
        return Row()

    def _conclude(self, result: SaveResult) -> None:
        """Rank zero, after the last exchange. A failure here spoils no commit."""
        attempt = self._plan.attempt
        say(result, step=attempt.identity.step)
        if result.ok:
            self._publisher.retire(attempt)
        elif self._has_created:
            self._publisher.discard(attempt)
        now = utc_text(int(self._setting.clock()))
        row = history_row(attempt, result, now=now, write_s=self._write_s, commit_s=self._commit_s)
        self._publisher.note(row)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began


def say(result: SaveResult, *, step: int) -> None:
    """Log the result of a save."""
    if result.ok:
        place = "/".join(result.path.parts[-2:])  # in the run directory
        logger.info("checkpoint of step %d: %s, %.1f MB", step, place, result.bytes / 1e6)
    else:
        logger.warning("checkpoint of step %d failed, the older ones stay: %s", step, result.error)


def history_row(
    attempt: Attempt, result: SaveResult, *, now: str, write_s: float, commit_s: float
) -> dict[str, Any]:  # fmt: skip
    """The line about a save in `checkpointHistories.csv`; every rank has written one part."""
    return {
        "time_utc": now,
        "run": attempt.run_id,
        "step": attempt.identity.step,
        "tier": "persistent",
        "kinds": "+".join(attempt.kinds),
        "bytes": result.bytes,
        "parts": attempt.number_of_parts,
        "world_size": attempt.number_of_parts,
        "stall_s": f"{result.stall_s:.6f}",
        "write_s": f"{write_s:.6f}",
        "commit_s": f"{commit_s:.6f}",
        "duration_s": f"{result.seconds:.6f}",
        "throughput_MBps": f"{result.bytes / 1e6 / max(result.seconds, 1e-9):.3f}",
        "result": "ok" if result.ok else "failed",
        "error": result.error or "",
    }


def check_agreement(plan: Plan, opening: Sequence[Row]) -> None:
    """Raise DisagreementError if the ranks were given different things to save."""
    different = [rank for rank, row in enumerate(opening) if row.plan != opening[0].plan]
    if different:
        raise DisagreementError(
            f"checkpoint of step {plan.attempt.identity.step}: ranks {different} were given another step,"
            " generation, lineage, nonce, run, kinds, weights or other tensors than rank 0: all must be equal"
        )
