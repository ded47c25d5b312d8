"""Saving while training goes on: the copy hides behind a step, the writing in processes of their own.

Responsible for: the order of events of one save that training does not wait for. Refuses to decide when one is due. The
one idea: what a save waits for is waited for by nobody; each rank knows whether its writer is at work (`is_busy`), the
ranks tell each other with the commit of every step, and once nobody's is, all of them go on together (`go_on`):

    begin     all exchange a row: the attempt, and rank zero's state; the writers begin, the copy begins
    go_on     all exchange how the parts went; rank zero's writer commits
    go_on     all exchange how that went: the save is over

Where the writer of one rank has failed (`has_failed`), the ranks tell each other so in the same way, and each of them
has its own writer give up (`cancel`): it may be waiting for a folder that rank zero could not make.

With two slots a state may also stay in memory, for a restart after a kill (`keep`): no writer and no exchange takes
part. It begins once the newest copy is sealed on all ranks, and goes into the slot of the older one, or of the one that
is not being written out, so that at any instant some state is whole on all of them: the last but one at the least, or
the one that is being written out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hetseq.checkpoint.arena import EMPTY, STATE_BYTES, Arena
from hetseq.checkpoint.context import CheckpointContext
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.leftover_memory import directory_mark
from hetseq.checkpoint.memory_checksums import image_sums
from hetseq.checkpoint.publish import Publisher
from hetseq.checkpoint.rank_messages import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.records import Attempt, PartRecord, sha256, state_bytes, utc_text
from hetseq.checkpoint.snapshot import Snapshot, image_bytes
from hetseq.checkpoint.sync_save import Plan, Save, SaveResult, check_agreement, history_row, say
from hetseq.checkpoint.writer import setting_of
from hetseq.checkpoint.writer_client import WriterProcess

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # so often the ranks tell each other how far they are, while training waits for the end of a save


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
    """Saves of states of one layout, one after the other; on every rank, which all make the same calls.

    `parts` are the pieces of each rank; `slots` is 1, or 2 for states that stay in memory. Raises OSError where this
    node has no memory for them.
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
        self._newest = 0  # the slot that was filled last; the same on all ranks
        self._serial = 0
        self._copied_step = self._committed_step = -1  # the newest ones
        #: seconds from the beginning of the last copy that stays in memory until it was sealed
        self.keeping_s = 0.0
        self._save: _Underway | None = None
        self._answer: dict[str, Any] | None = None
        #: bytes of each rank's part and seconds it took, in the last save that went so far; the same on all ranks
        self.last_sizes: list[int] = []
        self.last_seconds: list[float] = []

    def fits(self, plan: Plan) -> bool:
        """Whether a save with this plan has the layout this was made for; the same on all ranks."""
        return plan.parts == self._parts

    @property
    def is_underway(self) -> bool:
        """Whether a save has begun that is not over; the same on all ranks."""
        return self._save is not None

    @property
    def share(self) -> float:
        """How much of this rank's part has been written, as far as is known, from 0 to 1."""
        return 1.0 if self._save is not None and self._save.is_committing else self._writer.share

    @property
    def is_busy(self) -> bool:
        """Whether the save that is under way has to wait for the writer of this rank."""
        if self._answer is None:
            self._answer = self._writer.answer()
        return self._writer.is_busy

    @property
    def has_failed(self) -> bool:
        """Whether this rank's part of the save under way has failed, as far as `is_busy` has heard."""
        return self._answer is not None and _row_of(self._answer).failed

    def cancel(self) -> None:
        """Have this rank's writer give up its part, for that of another rank has failed. This rank alone."""
        if self._save is not None and not self._save.is_committing:
            self._writer.cancel()

    @property
    def keeps_states(self) -> bool:
        """Whether there is room for a state that stays in memory; the same on all ranks."""
        return len(self._arenas) > 1

    @property
    def is_sealed(self) -> bool:
        """Whether the newest copy of this rank would be believed after its death; True where there is none."""
        arena = self._arenas[self._newest]
        return arena.status == (EMPTY, 0) or arena.is_sealed

    def keep(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        at_once: Collection[str],
        known: Sequence[int],
    ) -> bool:
        """Begin to copy a state that stays in memory; every rank calls it, after `is_sealed` was True on all of them.

        The tensors that `at_once` names may change when this returns, the others only after `settle`. `known` are the
        nonces of the commits that the state follows. False where the state is too large for it.
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
        """That of the older copy, whose image may change from now on; never the one that is being written out."""
        written = None if self._save is None else self._save.slot
        slot = self._newest = ((self._newest if written is None else written) + 1) % len(self._arenas)
        self._snapshots[slot].finish()  # at its end a copy writes to the header
        return slot

    def _seal(self, slot: int, serial: int) -> None:
        if self.keeps_states:  # else there is one slot, which is mostly being overwritten or written out
            self._arenas[slot].seal(serial, image_sums(self._arenas[slot].image[: self._snapshots[slot].image_bytes]))

    def _record(self, plan: Plan, attempt: Attempt, content: bytes) -> dict[str, Any]:
        """What is said of an image, for the writer and for the next start of the run."""
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
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        at_once: Collection[str],
        known: Sequence[int],
    ) -> SaveResult | None:
        """Begin to save; collective. A result only where it failed at once.

        The tensors that `at_once` names may change when this returns, the others only after `settle`.
        """
        assert self._save is None, "one save at a time"
        began = time.perf_counter()
        for snapshot in self._snapshots:
            snapshot.finish()  # so that the newest is sealed on all ranks after the exchange, and the older one may go
        now = int(self._setting.clock())
        row = Row(time=now, plan=plan.digest)
        content, error = b"", None
        if self._setting.is_rank_zero:
            try:
                content = state_bytes(replace(plan.attempt, created=utc_text(now)), state)
                row = replace(row, bytes=len(content), digest=sha256(content))
            except Exception as caught:  # the others are told before it is raised
                row, error = replace(failure_row(caught), plan=plan.digest), caught
        rows = exchange(self._group, row)
        if error is not None:
            raise error
        check_agreement(plan, rows)
        opening = rows[0]
        attempt = replace(plan.attempt, created=utc_text(opening.time))
        self._save = _Underway(plan, attempt, opening, began, size_bytes=opening.bytes)
        if opening.bytes > STATE_BYTES:  # too large for the record that an arena holds beside the image
            self._save = None
            return Save(self._setting, plan, self._publisher).run(tensors, state)
        if opening.failed:
            return self._conclude(f"rank 0: {opening.text}")
        self._hand_over(tensors, content, at_once, known)
        self._save.stall_s = time.perf_counter() - began
        return None

    def _hand_over(
        self, tensors: Mapping[str, Tensor], content: bytes, at_once: Collection[str], known: Sequence[int]
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
        # first the request: it then stands in the arena what is to be done, whatever happens to this process
        self._writer.ask({"do": "write", "slot": slot, "serial": serial})

        def say_whole() -> None:
            arena.finish(serial)
            self._writer.say({"do": "go"})
            self._seal(slot, serial)

        self._snapshots[slot].begin(tensors, at_once=at_once, when_whole=say_whole)

    def settle(self) -> None:
        """Return when all tensors of the copy that began last may change again; this rank alone."""
        began = time.perf_counter()
        for snapshot in self._snapshots:
            snapshot.settle()
        if self._save is not None:
            self._save.stall_s += time.perf_counter() - began

    def go_on(self) -> SaveResult | None:
        """The next event of the save under way, once no rank is busy; collective. Its result if that was the last."""
        assert not self._writer.is_busy
        return self._advance(self._exchange())

    def _exchange(self) -> list[Row]:
        """How far the writers of all ranks are. Training stands still for it."""
        save = self._save
        assert save is not None
        began = time.perf_counter()
        row = Row(busy=True) if self._writer.is_busy else _row_of(self._answer)
        rows = exchange(self._group, replace(row, plan=save.plan.digest))
        save.stall_s += time.perf_counter() - began
        return rows

    def _advance(self, rows: Sequence[Row]) -> SaveResult | None:
        """What follows from the rows of all ranks, none of which is busy; the result if the save is over."""
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
        """Wait until the save under way is over; its result, None if there is none. Collective."""
        result = None
        while self._save is not None and result is None:
            self.settle()
            self._writer.say({"do": "hurry"})
            result = self._advance(self._await_writers())
        return result

    def _await_writers(self) -> list[Row]:
        """The rows of all ranks once no writer is at work; where one has failed, the others give up. Collective."""
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
        """Give everything back; a save that is not over is left to the writer, and to the next start of the run.

        With `keep` what is sealed stays in memory for the next start, unless a file holds the newest state.
        """
        for snapshot in self._snapshots:
            try:
                snapshot.close()
            except Exception as error:
                logger.warning("the copy of a checkpoint failed: %s", error)
        if is_hasty and self._writer.is_busy and not self._setting.is_rank_zero:
            self._writer.kill()  # it may wait for a folder that nobody makes; rank zero's waits for nobody
        self._writer.close(is_hasty=is_hasty)
        if keep and self._copied_step > self._committed_step:
            logger.info("the newest states stay in this node's memory for the next start of this run")
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
        return Row()  # not asked: only rank zero's writer commits
    if "failed" in answer:
        return Row(failed=True, errno=answer.get("errno", 0), text=answer["failed"])
    microseconds = int(1e6 * answer.get("writing_s", 0.0))
    return Row(bytes=answer.get("bytes", 0), digest=answer.get("sha256", ""), time=microseconds)
