"""Asynchronous saving: the state is copied during a training step, and separate processes write it to disk.

Responsible for: the order of events of one save that runs beside training. Does not decide when to save. The one idea:
no rank waits for a save; each rank knows whether its writer is still working (`is_busy`), the ranks exchange that in
the commit of every step, and once no writer is busy all ranks continue together (`go_on`):

    begin     all exchange a row: the attempt, and rank zero's state; the writers begin, the copy begins
    go_on     all exchange the results of the parts; rank zero's writer commits
    go_on     all exchange the result of the commit: the save is over

If the writer of one rank has failed (`has_failed`), the ranks learn of it in the same way, and each of them cancels its
own writer (`cancel`), which may be waiting for a folder that rank zero could not create.

With two slots a state can also stay in memory, for a restart after a kill (`keep`): no writer and no exchange is
involved. It starts once the newest copy is sealed on all ranks, and overwrites the slot of the older copy, or the one
that is not being written to disk. So at any moment all ranks hold one complete state: at least the last but one, or the
one being written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetseq.checkpoint.arena import EMPTY, STATE_BYTES, Arena
from hetseq.checkpoint.context import CheckpointContext
from hetseq.checkpoint.holdings import check_holdings
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.leftover_memory import directory_mark
from hetseq.checkpoint.memory_checksums import image_sums
from hetseq.checkpoint.publish import Publisher
from hetseq.checkpoint.rank_messages import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.records import Attempt, PartRecord, sha256, state_bytes, utc_text
from hetseq.checkpoint.snapshot import Snapshot, image_bytes
from hetseq.checkpoint.sync_save import Plan, Save, SaveResult, check_agreement, history_row, say
from hetseq.checkpoint.tensor_slices import Held
from hetseq.checkpoint.writer import setting_of
from hetseq.checkpoint.writer_client import WriterProcess

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # interval at which the ranks exchange progress while training waits for the end of a save


@dataclass
class _Underway:
    """A save that has begun."""

    plan: Plan
    attempt: Attempt
    opening: Row  # rank zero's
    began: float
    stall_s: float = 0.0
    write_s: float = 0.0
    size_bytes: int = 0
    parts: list[PartRecord] = field(default_factory=list)
    slot: int | None = None
    is_committing: bool = False


class Background:
    """Saves of states of one layout, one after the other; one object per rank, all of which make the same calls.

    `parts` are the pieces of each rank; `slots` is 1, or 2 to keep states in memory. Raises OSError if this node does
    not have the memory.
    """

    def __init__(
        self,
        setting: CheckpointContext,
        parts: Sequence[Sequence[Piece]],
        publisher: Publisher,
        *,
        is_polite: bool,
        slots: int,
    ) -> None:
        self._setting, self._group, self._publisher = setting, setting.group, publisher
        self._parts = [list(part) for part in parts]
        self._directory = directory_mark(setting.run_directory)
        pieces = self._parts[self._group.rank]
        self._arenas: list[Arena] = []
        self._snapshots: list[Snapshot] = []
        try:
            for _ in range(slots):
                self._arenas.append(Arena.create(setting.run_id, image_bytes(pieces)))
                self._snapshots.append(Snapshot(self._arenas[-1], pieces))
            self._writer = WriterProcess(
                "hetseq.checkpoint.writer",
                setting_of(setting.place, self._arenas, is_polite=is_polite),
                [arena.descriptor for arena in self._arenas],
            )
        except BaseException:
            for snapshot in self._snapshots:
                snapshot.close()
            for arena in self._arenas:
                arena.close(unlink=True)
            raise
        self._newest = 0  # the slot filled last; the same on all ranks
        self._serial = 0
        self._copied_step = self._committed_step = -1  # the newest ones
        #: seconds from the start of the last copy that stays in memory until it was sealed
        self.keeping_s = 0.0
        self._save: _Underway | None = None
        self._answer: dict[str, Any] | None = None
        #: bytes of each rank's part and seconds it took, in the last successful save; the same on all ranks
        self.last_sizes: list[int] = []
        self.last_seconds: list[float] = []

    def fits(self, plan: Plan) -> bool:
        """Whether a save with this plan has the layout that this object was made for; the same on all ranks."""
        return plan.parts == self._parts

    @property
    def is_underway(self) -> bool:
        """Whether a save is in progress; the same on all ranks."""
        return self._save is not None

    @property
    def share(self) -> float:
        """The fraction of this rank's part that is known to be written, from 0 to 1."""
        return 1.0 if self._save is not None and self._save.is_committing else self._writer.share

    @property
    def is_busy(self) -> bool:
        """Whether the current save is still waiting for the writer of this rank."""
        if self._answer is None:
            self._answer = self._writer.answer()
        return self._writer.is_busy

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the current save has failed, as of the last call of `is_busy`."""
        return self._answer is not None and _row_of(self._answer).failed

    def cancel(self) -> None:
        """Have this rank's writer give up its part because another rank's part failed. This rank alone."""
        if self._save is not None and not self._save.is_committing:
            self._writer.cancel()

    @property
    def keeps_states(self) -> bool:
        """Whether there is room to keep a state in memory; the same on all ranks."""
        return len(self._arenas) > 1

    @property
    def is_sealed(self) -> bool:
        """Whether the newest copy of this rank could be recovered after its death; True if there is none."""
        arena = self._arenas[self._newest]
        return arena.status == (EMPTY, 0) or arena.is_sealed

    def keep(
        self,
        plan: Plan,
        tensors: Mapping[str, Held],
        state: Mapping[str, Any],
        *,
        at_once: Collection[str],
        known: Sequence[int],
    ) -> bool:
        """Start copying a state that stays in memory; every rank calls it, after `is_sealed` was True on all of them.

        The tensors named in `at_once` may change when this returns, the others only after `settle`. `known` are the
        nonces of the commits that the state follows. False if the state is too large for the record.
        """
        assert self.keeps_states
        began = time.perf_counter()
        content = state_bytes(plan.attempt, state)  # equal on all ranks
        if len(content) > STATE_BYTES:
            return False
        serial, slot = self._next_serial(), self._choose_slot()
        underway = [] if self._save is None else [self._save.attempt.nonce]
        record = {**self._record(plan, plan.attempt, content), "is_kept": True, "known": [*known, *underway]}
        self._arenas[slot].begin(serial, record)
        self._copied_step = plan.attempt.identity.step

        def finish() -> None:
            self._arenas[slot].finish(serial)
            self._seal(slot, serial)
            self.keeping_s = time.perf_counter() - began

        self._snapshots[slot].begin(tensors, at_once=at_once, when_whole=finish)
        return True

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _choose_slot(self) -> int:
        """The slot of the older copy, whose image may now change; never the one that is being written."""
        written = None if self._save is None else self._save.slot
        slot = self._newest = ((self._newest if written is None else written) + 1) % len(self._arenas)
        self._snapshots[slot].finish()  # the end of a copy writes to the header
        return slot

    def _seal(self, slot: int, serial: int) -> None:
        if self.keeps_states:  # else the only slot is mostly being overwritten or written to disk
            self._arenas[slot].seal(serial, image_sums(self._arenas[slot].image[: self._snapshots[slot].image_bytes]))

    def _record(self, plan: Plan, attempt: Attempt, content: bytes) -> dict[str, Any]:
        """The record of an image, for the writer and for the next start of the run."""
        return {
            "attempt": attempt.to_json(),
            "plan": plan.digest,
            "directory": self._directory,
            "part": self._group.rank,
            "image_bytes": self._snapshots[0].image_bytes,
            "size_bytes": plan.bytes,
            "state": content.decode() if self._setting.is_rank_zero else None,
        }

    def begin(
        self,
        plan: Plan,
        tensors: Mapping[str, Held],
        state: Mapping[str, Any],
        *,
        at_once: Collection[str],
        known: Sequence[int],
    ) -> SaveResult | None:
        """Start a save; collective. Returns a result only if it failed at once. HoldingsDifferError: nothing has begun.

        The tensors named in `at_once` may change when this returns, the others only after `settle`.
        """
        assert self._save is None, "one save at a time"
        began = time.perf_counter()
        for snapshot in self._snapshots:
            snapshot.finish()  # so after the exchange the newest is sealed on all ranks, and the older may be replaced
        now = int(self._setting.clock())
        row = Row(time=now, plan=plan.digest, nonce=plan.key)
        content, error = b"", None
        if self._setting.is_rank_zero:
            try:
                content = state_bytes(replace(plan.attempt, created=utc_text(now)), state)
                row = replace(row, bytes=len(content), digest=sha256(content))
            except Exception as caught:  # raised only after the other ranks have been told
                row, error = replace(failure_row(caught), plan=plan.digest, nonce=plan.key), caught
        rows = exchange(self._group, row)
        check_holdings(rows)
        if error is not None:
            raise error
        check_agreement(plan, rows)
        opening = rows[0]
        attempt = replace(plan.attempt, created=utc_text(opening.time))
        self._save = _Underway(plan, attempt, opening, began, size_bytes=opening.bytes)
        if opening.bytes > STATE_BYTES:  # too large for the record beside the image
            self._save = None
            return Save(self._setting, plan, self._publisher).run(tensors, state)
        if opening.failed:
            return self._conclude(f"rank 0: {opening.text}")
        self._hand_over(tensors, content, at_once, known)
        self._save.stall_s = time.perf_counter() - began
        return None

    def _hand_over(
        self, tensors: Mapping[str, Held], content: bytes, at_once: Collection[str], known: Sequence[int]
    ) -> None:
        save = self._save
        assert save is not None
        serial, slot = self._next_serial(), self._choose_slot()
        save.slot, self._copied_step = slot, save.attempt.identity.step
        record = {
            **self._record(save.plan, save.attempt, content),
            "state_sha256": save.opening.digest,
            "known": list(known),
        }
        arena = self._arenas[slot]
        try:
            arena.begin(serial, record)
        except ValueError as error:
            self._answer = {"failed": str(error)}
            return
        # the request first: the arena then records what to do, whatever happens to this process
        self._writer.ask({"do": "write", "slot": slot, "serial": serial})

        def say_whole() -> None:
            arena.finish(serial)
            self._writer.say({"do": "go"})
            self._seal(slot, serial)

        self._snapshots[slot].begin(tensors, at_once=at_once, when_whole=say_whole)

    def settle(self) -> None:
        """Wait until all tensors of the latest copy may change again; this rank alone."""
        began = time.perf_counter()
        for snapshot in self._snapshots:
            snapshot.settle()
        if self._save is not None:
            self._save.stall_s += time.perf_counter() - began

    def go_on(self) -> SaveResult | None:
        """The next event of the current save, once no rank is busy; collective. The result if that was the last one."""
        assert not self._writer.is_busy
        return self._advance(self._exchange())

    def _exchange(self) -> list[Row]:
        """Exchange how far the writers of all ranks are. Training waits for it."""
        save = self._save
        assert save is not None
        began = time.perf_counter()
        row = Row(busy=True) if self._writer.is_busy else _row_of(self._answer)
        rows = exchange(self._group, replace(row, plan=save.plan.digest))
        save.stall_s += time.perf_counter() - began
        return rows

    def _advance(self, rows: Sequence[Row]) -> SaveResult | None:
        """Act on the rows of all ranks, none of which is busy; the result if the save is over."""
        save, self._answer = self._save, None
        assert save is not None
        failure = first_failure(rows)
        if failure is not None or save.is_committing:
            return self._conclude(failure)
        save.write_s = time.perf_counter() - save.began
        save.parts = [PartRecord(row.bytes, row.digest) for row in rows]
        save.size_bytes += sum(row.bytes for row in rows)
        self.last_sizes = [row.bytes for row in rows]
        self.last_seconds = [row.time / 1e6 for row in rows]
        save.is_committing = True
        if self._setting.is_rank_zero:
            self._writer.ask(
                {
                    "do": "commit",
                    "serial": self._next_serial(),
                    "attempt": save.attempt.to_json(),
                    "state_sha256": save.opening.digest,
                    "state_bytes": save.opening.bytes,
                    "parts": [[part.size_bytes, part.manifest_sha256] for part in save.parts],
                }
            )
        return None

    def finish(self) -> SaveResult | None:
        """Wait for the current save and return its result, None if there is none. Collective."""
        result = None
        while self._save is not None and result is None:
            self.settle()
            self._writer.say({"do": "hurry"})
            result = self._advance(self._await_writers())
        return result

    def _await_writers(self) -> list[Row]:
        """The rows of all ranks once no writer is busy; if one has failed, the others give up. Collective."""
        save = self._save
        assert save is not None
        while True:
            began = time.perf_counter()
            if self._writer.is_busy:
                self._answer = self._writer.answer(_LOOK_S)
            save.stall_s += time.perf_counter() - began
            rows = self._exchange()
            if not any(row.busy for row in rows):
                return rows
            if first_failure(rows) is not None:
                self.cancel()

    def close(self, *, keep: bool, is_hasty: bool = False) -> None:
        """Release everything; an unfinished save is left to the writer and to the next start of the run.

        With `keep`, sealed states stay in memory for the next start, unless a file holds the newest state.
        """
        for snapshot in self._snapshots:
            try:
                snapshot.close()
            except Exception as error:
                logger.warning("the copy of a checkpoint failed: %s", error)
        if is_hasty and self._writer.is_busy and not self._setting.is_rank_zero:
            self._writer.kill()  # it may wait for a folder that nothing will create; rank zero's never waits for one
        self._writer.close(is_hasty=is_hasty)
        if keep and self.keeps_states and self._copied_step > self._committed_step:
            logger.info("kept the newest states in this node's memory for the next start of this run")
        for arena in self._arenas:
            arena.close(unlink=not (keep and arena.is_sealed and self._copied_step > self._committed_step))

    def _conclude(self, failure: str | None) -> SaveResult:
        save, self._save = self._save, None
        assert save is not None
        if failure is None:
            self._committed_step = save.attempt.identity.step
        seconds = time.perf_counter() - save.began
        size = 0 if failure else save.size_bytes
        result = SaveResult(save.plan.directory, failure is None, failure, size, seconds, save.stall_s)
        if self._setting.is_rank_zero:
            say(result, step=save.attempt.identity.step)
            now = utc_text(int(self._setting.clock()))
            commit_s = seconds - save.write_s if save.is_committing else 0.0
            row = history_row(save.attempt, result, now=now, write_s=save.write_s, commit_s=commit_s)
            self._writer.say(
                {"do": "conclude", "attempt": save.attempt.to_json(), "ok": result.ok, "row": row}
            )  # fmt: skip
        return result


def _row_of(answer: Mapping[str, Any] | None) -> Row:
    if answer is None:
        return Row()  # nothing was asked of it: only rank zero's writer commits
    if "failed" in answer:
        return Row(failed=True, errno=answer.get("errno", 0), text=answer["failed"])
    microseconds = int(1e6 * answer.get("writing_s", 0.0))
    return Row(bytes=answer.get("bytes", 0), digest=answer.get("sha256", ""), time=microseconds)
