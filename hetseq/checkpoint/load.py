"""Loading: rank zero chooses, every rank reads and verifies, and either all of them get the state or none.

Responsible for the order of events of one load. The one idea: rank zero proposes a commit whose small files agree; all
ranks, rank zero included, read it with every checksum and exchange the results. If one rank fails, all of them skip
that commit, so the ranks cannot resume from different checkpoints.

If ranks want different slices, each of them reads what it wants, and the rest is divided among them for verification.

Where possible, tensors are read straight into memory that the caller lends. That memory is overwritten
before the last checksum is known, so the caller must not use it after a failed load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hetseq.checkpoint.context import CheckpointContext
from hetseq.checkpoint.directory import part_name, read_commit
from hetseq.checkpoint.layout import TensorSpec
from hetseq.checkpoint.leftover_memory import Remains
from hetseq.checkpoint.memory_recovery import LeftState, believed, choose_state, recall, recall_wanted
from hetseq.checkpoint.part_io import allocate, read_part
from hetseq.checkpoint.rank_messages import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.records import Attempt, DamagedError, Identity, TooNewError
from hetseq.checkpoint.selection import (
    IN_MEMORY,
    NOWHERE,
    Choice,
    Skipped,
    choose,
    describe,
    locate,
    none_verifies,
    used_instead,
)
from hetseq.checkpoint.shared_read import PartTargets, agree, read_chunks
from hetseq.checkpoint.target_memory import Wanted, memory_for
from hetseq.checkpoint.tensor_slices import Held
from hetseq.checkpoint.verification import Inspected, inspect, patiently, reason_of, verify
from hetseq.errors import CheckpointError, CheckpointRefused

logger = logging.getLogger(__name__)

_REMEDY = "name another checkpoint, or restore its files from a copy"


@dataclass(frozen=True)
class Loaded:
    """A verified state. Tensors are contiguous, on the CPU, and not shared, except for those that the caller lent.

    `tensors` has a Tensor for each name, but a tuple of TensorSlice for a name of which this rank wanted slices.
    `skipped` has one sentence per newer checkpoint that was skipped: all of them on rank zero, on other ranks those
    that failed while all were reading.
    """

    tensors: dict[str, Any]
    state: dict[str, Any]
    identity: Identity
    kinds: tuple[str, ...]
    path: Path
    skipped: list[str]
    run_id: str
    nonce: int  # of the attempt; with run and identity it identifies this checkpoint
    is_from_memory: bool = False  # then `path` is where it would have been written

    @property
    def place(self) -> str:
        """The source of the state, in words."""
        return "the memory of this run's nodes" if self.is_from_memory else str(self.path)


class Load:
    """One load on one rank; `into`, `fits` and `wanted` as in `CheckpointManager.load`."""

    def __init__(
        self,
        setting: CheckpointContext,
        which: str,
        *,
        into: Mapping[str, Held],
        fits: Callable[[Loaded], bool] | None,
        wanted: Callable[[Loaded], Wanted | None] | None = None,
        remains: Remains | None = None,
        left: Sequence[LeftState] = (),
    ) -> None:
        self._setting = setting
        self._which = which
        self._remains = remains
        self._believed: list[LeftState] = []  # on rank zero
        self._left = list(left) if which == "latest" and remains is not None else []  # the same on all ranks
        self._into, self._fits, self._wanted = into, fits, wanted
        self._skipped: list[Skipped] = []
        self._choice: Choice | None = None
        self._refusal: CheckpointError | None = None

    def run(self) -> Loaded | None:
        """The state, or None if "latest" finds no checkpoint at all; every rank calls it."""
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
                step = loaded.identity.step
                self._warn(f"the state of step {step} in memory" if loaded.is_from_memory else f"step {step}")
                return loaded

    def _choose(self) -> None:
        where = self._setting.run_directory
        try:
            self._choice = choose(self._which, where)
        except CheckpointError as error:
            self._refusal = error
        except OSError as error:
            self._refusal = CheckpointRefused(f"{where}: {error}: make it readable, or {_REMEDY}")
        choice = self._choice
        self._skipped += choice.skipped if choice is not None else ()
        newest = choice.commits[0] if choice is not None and choice.commits else None
        self._believed = believed(self._left, newest)
        if newest is None:
            return
        known = max([newest.order[:2], *(state.order for state in self._believed)])
        for state in self._left:
            if state not in self._believed and state.order > known:  # an older one is not needed
                logger.warning(
                    "the state of step %d in memory does not follow the newest checkpoint, step %d, and is not used",
                    state.order[0], newest.identity.step,
                )  # fmt: skip

    def _propose(self) -> Row:
        """Rank zero: the next candidate whose small files agree. `fatal` in it: there is no further candidate."""
        if self._refusal is not None:
            if not self._believed or isinstance(self._refusal, TooNewError):
                return Row(failed=True, text=str(self._refusal))
            self._skip(Skipped(str(self._refusal), str(self._refusal)))
            return Row(place=IN_MEMORY, plan=self._believed.pop(0).plan)
        choice = self._choice
        if choice is None:
            return Row()
        while choice.commits:
            commit = choice.commits[0]
            problems = verify(commit, deep=False)
            if not problems and (left := choose_state(self._believed, commit)) is not None:
                self._believed.remove(left)
                return Row(place=IN_MEMORY, plan=left.plan)  # of two equal ones, memory is faster
            choice.commits.pop(0)
            if not problems:
                return Row(
                    step=commit.identity.step,
                    nonce=commit.attempt.nonce,
                    digest=commit.sha256,
                    place=choice.place,
                    fatal=choice.is_explicit,
                )
            skipped = Skipped.of(commit.path, "; ".join(problems))
            if choice.is_explicit:
                return Row(failed=True, text=f"{skipped.sentence}: {_REMEDY}")
            self._skip(skipped)
        if (left := choose_state(self._believed, None)) is not None:
            self._believed.remove(left)
            return Row(place=IN_MEMORY, plan=left.plan)
        if self._skipped:
            return Row(failed=True, text=none_verifies(self._setting.root, self._skipped))
        return Row(place=NOWHERE)

    def _read_together(self, proposal: Row) -> Loaded | None:
        """The proposed checkpoint if every rank could read all of it; else None, or an exception if it was the last."""
        loaded, row, unexpected = None, Row(), None
        left = None
        if proposal.place == IN_MEMORY:
            left = next(state for state in self._left if state.plan == proposal.plan)
        path = Path(f"of step {left.order[0]} in memory") if left is not None else self._locate(proposal)
        try:
            loaded = self._recall(left) if left is not None else self._read(path, proposal.digest)
        except (OSError, CheckpointError) as error:
            row = failure_row(error)
        except Exception as error:  # raised only after the others were told, or they would wait
            row, unexpected = replace(failure_row(error), fatal=True), error
        rows = exchange(self._setting.group, row)
        reason = first_failure(rows)
        if reason is None:
            return loaded
        skipped = _skipped(path, reason, rank=self._setting.group.rank, is_in_memory=left is not None)
        if proposal.fatal or any(other.fatal for other in rows):
            self._warn("none")
            raise unexpected or CheckpointRefused(f"{skipped.sentence}: {_REMEDY}")
        self._skip(skipped)
        return None

    def _locate(self, proposal: Row) -> Path:
        where = self._setting.run_directory
        return locate(self._which, where, place=proposal.place, step=proposal.step, nonce=proposal.nonce)

    def _recall(self, left: LeftState) -> Loaded:
        """Read a state that killed processes left in memory. DamagedError after all ranks have what they need."""
        assert self._remains is not None
        outlines: list[Loaded] = []

        def allocate(attempt: Attempt, state: dict[str, Any], specs: Sequence[TensorSpec]) -> Mapping[str, Any]:
            path = self._setting.place.folder(attempt)
            outlines.append(replace(self._outline(attempt, state, specs, path), is_from_memory=True))
            return self._targets(outlines[0], specs)

        read_state = recall if self._wanted is None else recall_wanted
        recalled = read_state(self._setting.group, self._remains, left, allocate)
        return replace(outlines[0], tensors=dict(recalled.tensors))

    def _read(self, path: Path, digest: str) -> Loaded:
        if self._wanted is not None:
            return self._read_wanted(path, digest)
        inspected, outline = self._inspect(path, digest)
        return replace(outline, tensors=read(inspected, self._targets(outline, inspected.specs)))

    def _read_wanted(self, path: Path, digest: str) -> Loaded:
        """As `_read`, of what this rank wants; every rank calls it."""
        group, opened = self._setting.group, []

        def open_parts() -> list[PartTargets]:
            inspected, outline = self._inspect(path, digest)
            opened.append(replace(outline, tensors=self._targets(outline, inspected.specs)))
            return [
                PartTargets(Path(part_name(index)), header, manifest.size_bytes, manifest.crc32, opened[0].tensors)
                for index, (manifest, header) in enumerate(zip(inspected.manifests, inspected.headers))
            ]

        parts, plan = agree(group, open_parts)
        for index, part in enumerate(parts):
            try:
                read_chunks(path / part_name(index), part, plan.chunks(group.rank, index))
            except (OSError, EOFError) as error:
                raise DamagedError(f"{part_name(index)}: {reason_of(error)}") from None
        return opened[0]

    def _inspect(self, path: Path, digest: str) -> tuple[Inspected, Loaded]:
        def look() -> Inspected:
            commit = read_commit(path)
            if commit.sha256 != digest:
                raise DamagedError("COMMIT.json: it is not the one that rank 0 sees")
            return inspect(commit)

        patience_s = 0.0 if self._setting.is_rank_zero else self._setting.patience_s
        inspected = patiently(look, patience_s=patience_s)
        return inspected, self._outline(inspected.commit.attempt, inspected.state, inspected.specs, path)

    def _outline(self, attempt: Attempt, state: dict[str, Any], specs: Sequence[TensorSpec], path: Path) -> Loaded:
        """What will be loaded, with tensors of shape and type alone."""
        return Loaded(
            allocate(specs, device="meta"), state, attempt.identity, attempt.kinds, path,
            [one.sentence for one in self._skipped],
            attempt.run_id, attempt.nonce,
        )  # fmt: skip

    def _targets(self, outline: Loaded, specs: Sequence[TensorSpec]) -> dict[str, Any]:
        """Memory for what is wanted of each tensor: that which the caller lent if it is suitable, else new memory."""
        may_fill = self._fits is None or self._fits(outline)
        wanted = self._wanted(outline) if self._wanted is not None else None
        return memory_for(specs, self._into if may_fill else {}, wanted or {})

    def _skip(self, skipped: Skipped) -> None:
        self._skipped.append(skipped)

    def _warn(self, title: str) -> None:
        """Say what was skipped and what is used: rank zero as a warning, the others in their logs."""
        if self._skipped:
            level = logging.WARNING if self._setting.is_rank_zero else logging.INFO
            logger.log(level, "%s", used_instead(self._skipped, title))


def _skipped(path: Path, reason: str, *, rank: int, is_in_memory: bool) -> Skipped:
    """A checkpoint that the rank of `reason` could not read; its own number would be in each of its lines twice."""
    own = reason.removeprefix(f"rank {rank}: ")
    if not is_in_memory:
        return Skipped(describe(path, reason), Skipped.of(path, own).line)
    return Skipped(describe(path, reason), f"the state {path} is damaged ({own})")


def read(inspected: Inspected, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill `tensors`, which are all of a checkpoint by name, contiguous and on the CPU; returns them.

    DamagedError if a byte has changed: the tensors then hold unverified values.
    """
    directory = inspected.commit.path
    for index, (manifest, header) in enumerate(zip(inspected.manifests, inspected.headers)):
        try:
            read_part(directory / part_name(index), header, manifest.crc32, tensors)
        except (OSError, EOFError) as error:
            raise DamagedError(f"{part_name(index)}: {reason_of(error)}") from None
    return tensors
