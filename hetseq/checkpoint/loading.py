"""Loading: rank zero chooses, every rank reads and verifies, and either all of them have the state or none.

Responsible for the order of events of one load. The one idea: rank zero proposes a commit whose small files agree; all
ranks, rank zero included, read it with every checksum and gather how it went; one rank's failure makes all pass over
that commit, so the ranks cannot go on from different checkpoints.

Tensors are read straight into memory that the caller lends, as far as it is fit for that. So that memory has been
written to before the last checksum is known, and it is the caller who must not go on with it where a load fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from hetseq.checkpoint.choice import NOWHERE, Choice, choose, describe, locate, none_verifies
from hetseq.checkpoint.directory import part_name, read_commit
from hetseq.checkpoint.layout import TensorSpec
from hetseq.checkpoint.parts import allocate, can_be_filled, read_part
from hetseq.checkpoint.reader import Inspected, inspect, patiently, reason_of, verify
from hetseq.checkpoint.records import DamagedError, Identity
from hetseq.checkpoint.rows import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.setting import Setting
from hetseq.errors import CheckpointError, CheckpointRefused

logger = logging.getLogger(__name__)

_REMEDY = "name another checkpoint, or restore its files from a copy"


@dataclass(frozen=True)
class Loaded:
    """A verified state. Tensors are contiguous, on the CPU, and nobody else's, but for those that the caller lent.

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
    """One load on one rank; `into` and `fits` as in `CheckpointManager.load`."""

    def __init__(
        self, setting: Setting, which: str, *, into: Mapping[str, Tensor], fits: Callable[[Loaded], bool] | None
    ) -> None:
        self._setting = setting
        self._which = which
        self._into, self._fits = into, fits
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
        outline = Loaded(
            allocate(inspected.specs, device="meta"), inspected.state, commit.identity, commit.kinds, path,
            self._skipped, commit.attempt.run_id, commit.attempt.nonce,
        )  # fmt: skip
        may_fill = self._fits is None or self._fits(outline)
        return replace(outline, tensors=read(inspected, self._into if may_fill else {}))

    def _skip(self, sentence: str) -> None:
        self._skipped.append(sentence)
        logger.warning("rank %d: %s", self._setting.group.rank, sentence)


def read(inspected: Inspected, into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, contiguous and on the CPU; DamagedError where a byte is not what it was.

    Those that are fit for it are the ones of `into`; where this raises, they hold what nobody has verified.
    """
    tensors = _targets(inspected.specs, into)
    directory = inspected.commit.path
    for index, (manifest, header) in enumerate(zip(inspected.manifests, inspected.headers)):
        try:
            read_part(directory / part_name(index), header, manifest.crc32, tensors)
        except (OSError, EOFError) as error:
            raise DamagedError(f"{part_name(index)}: {reason_of(error)}") from None
    return tensors


def _targets(specs: Sequence[TensorSpec], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Memory for each tensor: that of `into` where it can be filled, else new."""
    outlines = allocate(specs, device="meta")
    lent = {name: into[name] for name, like in outlines.items() if name in into and can_be_filled(into[name], like)}
    # two threads must not fill the same bytes: of tensors that share memory only the first is filled
    filled, reached = {}, 0
    for name, tensor in sorted(lent.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() >= reached:
            filled[name] = tensor
            reached = tensor.data_ptr() + tensor.nbytes
    increment_version(list(filled.values()))  # as torch does wherever it writes into a tensor
    memory = filled | allocate(spec for spec in specs if spec.name not in filled)
    return {spec.name: memory[spec.name] for spec in specs}
