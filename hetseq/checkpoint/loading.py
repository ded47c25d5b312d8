"""Loading: rank zero chooses, every rank reads and verifies, and either all of them have the state or none.

Responsible for the order of events of one load. The one idea: rank zero proposes a commit whose small files agree; all
ranks, rank zero included, read it with every checksum and gather how it went; one rank's failure makes all pass over
that commit, so the ranks cannot go on from different checkpoints.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hetseq.checkpoint.choice import NOWHERE, Choice, choose, describe, locate, none_verifies
from hetseq.checkpoint.directory import part_name, read_commit
from hetseq.checkpoint.parts import allocate, read_part
from hetseq.checkpoint.reader import Inspected, inspect, patiently, reason_of, verify
from hetseq.checkpoint.records import DamagedError, Identity
from hetseq.checkpoint.rows import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.setting import Setting
from hetseq.errors import CheckpointError, CheckpointRefused

logger = logging.getLogger(__name__)

_REMEDY = "name another checkpoint, or restore its files from a copy"


@dataclass(frozen=True)
class Loaded:
    """A verified state. Tensors are contiguous, on the CPU, and nobody else's.

    `skipped` says in sentences which newer checkpoints were passed over: all of them on rank zero, on other ranks those
    that failed while all were reading.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    identity: Identity
    kinds: tuple[str, ...]
    path: Path
    skipped: list[str]
    run_id: str
    nonce: int  # of the attempt, which with run and identity names this checkpoint among all


class Load:
    """One load on one rank."""

    def __init__(self, setting: Setting, which: str) -> None:
        self._setting = setting
        self._which = which
        self._skipped: list[str] = []
        self._choice: Choice | None = None
        self._refusal: CheckpointError | None = None

    def run(self) -> Loaded | None:
        """The state, or None where "latest" finds no checkpoint at all; every rank calls it."""
        if self._setting.is_rank_zero:
            self._choose()
        while True:
            row = self._propose()
            proposal = exchange(self._setting.group, row)[0]
            if proposal.failed:
                raise self._refusal or CheckpointRefused(row.text or proposal.text)
            if proposal.place == NOWHERE:
                return None
            loaded = self._read_together(proposal)
            if loaded is not None:
                return loaded

    def _choose(self) -> None:
        where = self._setting.run_directory
        try:
            self._choice = choose(self._which, where)
        except CheckpointError as error:
            self._refusal = error
        except OSError as error:
            self._refusal = CheckpointRefused(f"{where}: {error}: make it readable, or {_REMEDY}")
        for sentence in self._choice.skipped if self._choice is not None else ():
            self._skip(sentence)

    def _propose(self) -> Row:
        """Rank zero: the next candidate whose small files agree. `fatal` in it: there will be no other one."""
        if self._refusal is not None:
            return Row(failed=True, text=str(self._refusal))
        choice = self._choice
        if choice is None:
            return Row()
        while choice.commits:
            commit = choice.commits.pop(0)
            problems = verify(commit, deep=False)
            if not problems:
                return Row(
                    step=commit.identity.step,
                    nonce=commit.attempt.nonce,
                    digest=commit.sha256,
                    place=choice.place,
                    fatal=choice.is_explicit,
                )
            sentence = describe(commit.path, "; ".join(problems))
            if choice.is_explicit:
                return Row(failed=True, text=f"{sentence}: {_REMEDY}")
            self._skip(sentence)
        if self._skipped:
            return Row(failed=True, text=none_verifies(self._setting.root, self._skipped))
        return Row(place=NOWHERE)

    def _read_together(self, proposal: Row) -> Loaded | None:
        """The proposed checkpoint if every rank could read all of it; else None, or an exception if it is the last."""
        path = locate(
            self._which,
            self._setting.run_directory,
            place=proposal.place,
            step=proposal.step,
            nonce=proposal.nonce,
        )
        loaded, row, unexpected = None, Row(), None
        try:
            loaded = self._read(path, proposal.digest)
        except (OSError, CheckpointError) as error:
            row = failure_row(error)
        except Exception as error:  # the others are told before it is raised, or they would wait for this rank
            row, unexpected = replace(failure_row(error), fatal=True), error
        rows = exchange(self._setting.group, row)
        if unexpected is not None:
            raise unexpected
        reason = first_failure(rows)
        if reason is None:
            return loaded
        sentence = describe(path, reason)
        if proposal.fatal or any(other.fatal for other in rows):
            raise CheckpointRefused(f"{sentence}: {_REMEDY}")
        self._skip(sentence)
        return None

    def _read(self, path: Path, digest: str) -> Loaded:
        def look() -> Inspected:
            commit = read_commit(path)
            if commit.sha256 != digest:
                raise DamagedError("COMMIT.json: it is not the one that rank 0 sees")
            return inspect(commit)

        patience_s = 0.0 if self._setting.is_rank_zero else self._setting.patience_s
        inspected = patiently(look, patience_s=patience_s)
        commit = inspected.commit
        run_id, nonce = commit.attempt.run_id, commit.attempt.nonce
        return Loaded(
            read(inspected), inspected.state, commit.identity, commit.kinds, path, self._skipped, run_id, nonce
        )

    def _skip(self, sentence: str) -> None:
        self._skipped.append(sentence)
        logger.warning("rank %d: %s", self._setting.group.rank, sentence)


def read(inspected: Inspected) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, contiguous and on the CPU; DamagedError where a byte is not what it was."""
    tensors = allocate(inspected.specs)
    directory = inspected.commit.path
    for index, (manifest, header) in enumerate(zip(inspected.manifests, inspected.headers)):
        try:
            read_part(directory / part_name(index), header, manifest.crc32, tensors)
        except (OSError, EOFError) as error:
            raise DamagedError(f"{part_name(index)}: {reason_of(error)}") from None
    return tensors
