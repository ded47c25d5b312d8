"""Step commit: the row that every rank contributes at the end of a step, and the outcome of all rows. Pure, NumPy only.

Once all buckets have arrived without error, a small gather of one row per rank ends the step. A row holds the vote on
the reduced gradient, a digest of everything the ranks must agree on, the counts of the next step, and the loss sums of
this one. All ranks see the same rows and run the same code, so all reach the same verdict. Rows are int64 words (floats
keep their bits), so any collective that moves integers can carry them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from hetseq.balance.noise_scale import UNMEASURED, PartialGradient
from hetseq.balance.shares import Cost
from hetseq.errors import DisagreementError

Words = npt.NDArray[np.int64]

#: that may follow a run: each has a bit in the rows
MOST_SHADOWS = 8

_INTEGERS = 9  # words of a row before the floats
_FLOATS = 9  # measured values
_LACKING = 16  # the first of those bits
_OWNERS = 5  # words at the end of a row, where ranks own parts of the state


class Vote(enum.IntEnum):
    """A rank's verdict on its copy of the reduced gradient."""

    OK = 0
    NON_FINITE = 1
    REDO = 2


class Wish(enum.IntFlag):
    """A rank's request to the run; all ranks act on it once this step is resolved."""

    NONE = 0
    STOP = 1  # save, then end the run
    LEAVE = 2  # this rank leaves, the others continue
    CHANGE = 4  # a newcomer waits to be admitted


class Verdict(enum.IntEnum):
    """What all ranks do with the step."""

    APPLY = 0
    SKIP = 1
    REDO = 2


@dataclass(frozen=True)
class OwnedBytes:
    """What one rank owns of the state, where ranks own parts of it, and what it exchanged since the commit before."""

    owned_bytes: int
    sent_bytes: int
    received_bytes: int
    planned_bytes: int = 0  # the memory that the plan expects this rank to use; 0: not known


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank in a step, and its current estimate of what a share costs."""

    compute_s: float = 0.0  # forward and backward, up to the last gradient; excludes waiting for peers
    data_s: float = 0.0  # waiting for data
    idle_s: float = 0.0  # waiting for peers and for communication
    overhead_s: float = 0.0  # other work, such as the optimizer of the previous step
    memory_bytes: int = 0  # peak use so far
    memory_limit_bytes: int = 0  # 0: not known
    cost: Cost | None = None  # of its next shares; None: not known. Its limit is not sent
    state: OwnedBytes | None = None  # sent if the format has owners


@dataclass(frozen=True)
class SaveStatus:
    """What a rank knows about saving when a step is committed. Only rank zero's `save`, `nonce` and `keep` count."""

    save: bool = False  # a checkpoint is due after this step
    nonce: int = 0  # names the attempt of that checkpoint
    writing: bool = False  # this rank is still writing its part of the current checkpoint
    failed: bool = False  # this rank failed to write its part of the current checkpoint
    keep: bool = False  # the state after this step should stay in memory, for a restart after a kill
    sealed: bool = True  # the newest state in memory would be valid after the death of this rank, or of its node
    lacking: int = 0  # a bit for each shadow that lacks the state, as far as this rank knows, and waits for it
    unsent: bool = False  # this rank has still to send a step before this one to a shadow that follows
    making_us: int = 0  # how long that state took to become so; sent if the format has owners


@dataclass(frozen=True)
class CommitRow:
    """One rank's row. Counts and sums are in the order of the run's terms; `used` has one flag per parameter."""

    digest: int  # of step, generation, attempt, plan and lineage
    vote: Vote
    next_samples: int  # samples of step s+1 counted by this rank; 0 if its loader was late
    next_counts: tuple[float, ...]
    sums: tuple[float, ...]  # this rank's share of each term's sum, at the parameters before the update
    used: npt.NDArray[np.bool_]  # (parameters,): whether this rank had a gradient
    measured: Measured
    wish: Wish
    saving: SaveStatus
    partial: PartialGradient = UNMEASURED  # of this rank's first micro-batch; only in some steps
    norm: float = 0.0  # L2, of this rank's part of the gradient


@dataclass(frozen=True)
class RowFormat:
    """Packs rows into int64 words and back; terms and parameters are fixed for a run, and whether ranks own parts."""

    terms: int
    parameters: int
    has_owners: bool = False

    @property
    def words(self) -> int:
        return _INTEGERS + _FLOATS + 2 * self.terms + -(-self.parameters // 64) + _OWNERS * self.has_owners

    def pack(self, row: CommitRow) -> Words:
        measured, cost, saving = row.measured, row.measured.cost, row.saving
        seconds = [measured.compute_s, measured.data_s, measured.idle_s, measured.overhead_s]
        seconds += [cost.fixed_s, cost.per_unit_s, cost.per_batch_s] if cost else [0.0, math.inf, 0.0]
        floats = [*seconds, row.partial.square, row.norm, *row.next_counts, *row.sums]
        flags = int(row.wish) | int(saving.save) << 8 | int(saving.writing) << 9 | int(saving.keep) << 10
        flags |= int(saving.sealed) << 11 | int(saving.failed) << 12 | int(saving.unsent) << 13
        flags |= saving.lacking << _LACKING
        integers = [row.digest, int(row.vote), row.next_samples, flags, saving.nonce, row.partial.samples]
        integers += [measured.memory_bytes, measured.memory_limit_bytes, (cost and cost.batch) or 0]
        bits = np.zeros(-(-self.parameters // 64) * 64, np.uint8)
        bits[: self.parameters] = row.used
        return np.concatenate(
            [
                np.array(integers, np.int64),
                np.array(floats, np.float64).view(np.int64),
                np.packbits(bits, bitorder="little").view(np.int64),
                np.array(self._owned(row), np.int64),
            ]
        )

    def _owned(self, row: CommitRow) -> tuple[int, ...]:
        if not self.has_owners:
            return ()
        assert row.measured.state is not None, "every rank says what it owns"
        return *astuple(row.measured.state), row.saving.making_us

    def unpack(self, words: Words) -> CommitRow:
        words, owned = (words[:-_OWNERS], words[-_OWNERS:]) if self.has_owners else (words, None)
        digest, vote, next_samples, flags, nonce, samples, in_use, limit, batch = map(int, words[:_INTEGERS])
        end = _INTEGERS + _FLOATS + 2 * self.terms
        floats = words[_INTEGERS:end].copy().view(np.float64).tolist()
        compute_s, data_s, idle_s, overhead_s, fixed_s, per_unit_s, per_batch_s, square, norm = floats[:_FLOATS]
        cost = Cost(fixed_s, per_unit_s, None, per_batch_s, batch or None) if per_unit_s < math.inf else None
        state, making_us = (None, 0) if owned is None else (OwnedBytes(*map(int, owned[:-1])), int(owned[-1]))
        bits = np.unpackbits(words[end:].copy().view(np.uint8), bitorder="little")
        return CommitRow(
            digest=digest,
            vote=Vote(vote),
            next_samples=next_samples,
            next_counts=tuple(floats[_FLOATS : _FLOATS + self.terms]),
            sums=tuple(floats[_FLOATS + self.terms :]),
            used=bits[: self.parameters].astype(np.bool_),
            measured=Measured(compute_s, data_s, idle_s, overhead_s, in_use, limit, cost, state),
            wish=Wish(flags & 0xFF),
            saving=SaveStatus(
                save=bool(flags >> 8 & 1),
                nonce=nonce,
                writing=bool(flags >> 9 & 1),
                keep=bool(flags >> 10 & 1),
                sealed=bool(flags >> 11 & 1),
                failed=bool(flags >> 12 & 1),
                unsent=bool(flags >> 13 & 1),
                lacking=flags >> _LACKING & (1 << MOST_SHADOWS) - 1,
                making_us=making_us,
            ),
            partial=PartialGradient(samples, square),
            norm=norm,
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step, from all rows; equal on every rank."""

    verdict: Verdict
    norm: float  # L2, of the whole gradient
    sums: tuple[float, ...]  # global sum of each term
    used: npt.NDArray[np.bool_]  # (parameters,): whether any rank had a gradient
    wish: Wish
    save: bool
    nonce: int
    writing: bool  # some rank is still writing its part of the current checkpoint
    failed: tuple[int, ...]  # the ranks that failed to write their part of it
    lacking: int  # a bit for each shadow to which all ranks send the state after this step
    unsent: bool  # a rank has still to send a step before this one to a shadow that follows
    keep: bool  # keep the state in memory; on all ranks it may replace the copy before the newest
    next_counts: tuple[float, ...] | None  # None unless every sample of the next step was counted
    rows: tuple[CommitRow, ...]


def resolve(rows: Sequence[CommitRow], *, next_samples: int, leaders: Sequence[int] | None = None) -> Outcome:
    """The outcome of a step from the rows of all ranks, in rank order.

    The sums and counts of a share are in the row of the rank that leads its data-parallel group, so only the rows of
    `leaders`, in ascending order, are added up (None: every rank has its own share). `next_samples` is the global batch
    of the next step; its counts are known only if they cover all of it. Raises DisagreementError if the ranks computed
    different steps.
    """
    digests = [row.digest for row in rows]
    if len(set(digests)) > 1:
        shown = ", ".join(f"rank {rank}: {digest & (2**64 - 1):016x}" for rank, digest in enumerate(digests))
        raise DisagreementError(
            f"the ranks did not compute the same step (digests of step, plan and history: {shown});"
            " check that every rank runs the same HetSeq, data and options"
        )
    votes = [row.vote for row in rows]
    verdict = Verdict.REDO if Vote.REDO in votes else Verdict.SKIP if Vote.NON_FINITE in votes else Verdict.APPLY
    leading = rows if leaders is None else [rows[rank] for rank in leaders]
    is_counted = sum(row.next_samples for row in leading) == next_samples
    wish = Wish.NONE
    for row in rows:
        wish |= row.wish
    if all(row.wish & Wish.LEAVE for row in rows):
        wish |= Wish.STOP  # no rank would be left
    return Outcome(
        verdict=verdict,
        norm=_whole_norm([row.norm for row in rows]),
        sums=add_in_rank_order([row.sums for row in leading]),
        used=np.logical_or.reduce([row.used for row in rows]),
        wish=wish,
        save=rows[0].saving.save,
        nonce=rows[0].saving.nonce,
        writing=any(row.saving.writing for row in rows),
        failed=tuple(rank for rank, row in enumerate(rows) if row.saving.failed),
        lacking=functools.reduce(operator.or_, (row.saving.lacking for row in rows)),
        unsent=any(row.saving.unsent for row in rows),
        keep=rows[0].saving.keep and all(row.saving.sealed for row in rows),
        next_counts=add_in_rank_order([row.next_counts for row in leading]) if is_counted else None,
        rows=tuple(rows),
    )


def _whole_norm(parts: Sequence[float]) -> float:
    """The root of the sum of squares of the parts, in rank order; a single part is returned unchanged. Uses only
    operations that IEEE 754 rounds in exactly one way."""
    largest = max(parts)
    if sum(part != 0 for part in parts) < 2 or not all(map(math.isfinite, parts)):
        return sum(parts)  # a single non-zero part, or NaN or infinite
    return largest * math.sqrt(sum((part / largest) ** 2 for part in parts))


def add_in_rank_order(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Column sums, added from rank zero upwards so that every rank gets the same bits."""
    return tuple(sum(column) for column in zip(*values))


@dataclass(frozen=True)
class Lineage:
    """The history in a state: its last step and a 64-bit hash chain over all its updates.

    Two states are the same if and only if their lineages are equal, even if devices round differently.
    """

    step: int = 0
    chain: int = 0

    def extend(self, step: int, *, generation: int, attempt: int, verdict: Verdict) -> Lineage:
        words = np.array([self.chain, step, generation, attempt, int(verdict)], np.int64).tobytes()
        return Lineage(step, _hash(words))

    def digest(self, *, generation: int, attempt: int, plan: int) -> int:
        """Digest of a step about to be committed on top of this history."""
        return _hash(np.array([self.chain, self.step, generation, attempt, plan], np.int64).tobytes())

    def __str__(self) -> str:
        return f"{self.chain & (2**64 - 1):016x}"


def parse_lineage(step: int, text: str) -> Lineage:
    """The inverse of `str(lineage)`."""
    return Lineage(step, int(np.uint64(int(text, 16)).astype(np.int64)))


def _hash(words: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little", signed=True)
