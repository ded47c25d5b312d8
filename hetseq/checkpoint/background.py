"""Saving while training goes on: the copy hides behind a step, the writing in processes of their own.

Responsible for: the order of events of one save that training does not wait for. Refuses to decide when one is due. The
one idea: what a save waits for is waited for by nobody; each rank knows whether its writer is at work (`is_busy`), the
ranks tell each other with the commit of every step, and once nobody's is, all of them go on together (`go_on`):

    begin     all exchange a row: the attempt, and rank zero's state; the writers begin, the copy begins
    go_on     all exchange how the parts went; rank zero's writer commits
    go_on     all exchange how that went: the save is over
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hetseq.checkpoint.arena import STATE_BYTES, Arena
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.publishing import Publisher
from hetseq.checkpoint.records import Attempt, PartRecord, sha256, state_bytes, utc_text
from hetseq.checkpoint.rows import Row, exchange, failure_row, first_failure
from hetseq.checkpoint.saving import Plan, Save, SaveResult, check_agreement, history_row, say
from hetseq.checkpoint.setting import Setting
from hetseq.checkpoint.snapshot import Snapshot, image_bytes
from hetseq.checkpoint.writer import setting_of
from hetseq.checkpoint.writer_process import WriterProcess

logger = logging.getLogger(__name__)


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
    is_committing: bool = False


class Background:
    """Saves of states of one layout, one after the other; on every rank, which all make the same calls.

    `parts` are the pieces of each rank. Raises OSError where this node has no memory for them.
    """

    def __init__(
        self, setting: Setting, parts: Sequence[Sequence[Piece]], publisher: Publisher, *, is_polite: bool
    ) -> None:
        self._setting, self._group, self._publisher = setting, setting.group, publisher
        self._parts = [list(part) for part in parts]
        pieces = self._parts[self._group.rank]
        self._arena = Arena.create(setting.run_id, image_bytes(pieces))
        try:
            self._snapshot = Snapshot(self._arena, pieces)
            self._writer = WriterProcess(
                "hetseq.checkpoint.writer",
                setting_of(setting.place, [self._arena], is_polite=is_polite),
                [self._arena.descriptor],
            )
        except BaseException:
            self._arena.close(unlink=True)
            raise
        self._serial = 0
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

    def begin(
        self, plan: Plan, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, at_once: Collection[str]
    ) -> SaveResult | None:
        """Begin to save; collective. A result only where it failed at once.

        The tensors that `at_once` names may change when this returns, the others only after `settle`.
        """
        assert self._save is None, "one save at a time"
        began = time.perf_counter()
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
        self._hand_over(tensors, content, at_once)
        self._save.stall_s = time.perf_counter() - began
        return None

    def _hand_over(self, tensors: Mapping[str, Tensor], content: bytes, at_once: Collection[str]) -> None:
        save = self._save
        assert save is not None
        self._serial += 1
        serial = self._serial
        record = {
            "attempt": save.attempt.to_json(),
            "part": self._group.rank,
            "image_bytes": self._snapshot.image_bytes,
            "size_bytes": save.plan.bytes,
            "state_sha256": save.opening.digest,
            "state": content.decode() if self._setting.is_rank_zero else None,
        }
        self._snapshot.finish()  # of a save that failed early; it writes to the arena's header when it ends
        try:
            self._arena.begin(serial, record)
        except ValueError as error:
            self._answer = {"failed": str(error)}
            return
        # first the request: it then stands in the arena what is to be done, whatever happens to this process
        self._writer.ask({"do": "write", "slot": 0, "serial": serial})
        self._snapshot.begin(tensors, at_once=at_once, when_whole=lambda: self._say_whole(serial))

    def _say_whole(self, serial: int) -> None:
        self._arena.finish(serial)
        self._writer.say({"do": "go"})

    def settle(self) -> None:
        """Return when all tensors of the save that began last may change again; this rank alone."""
        began = time.perf_counter()
        self._snapshot.settle()
        if self._save is not None:
            self._save.stall_s += time.perf_counter() - began

    def go_on(self) -> SaveResult | None:
        """The next event of the save under way, once no rank is busy; collective. Its result if that was the last."""
        save = self._save
        assert save is not None
        assert not self._writer.is_busy
        answer, self._answer = self._answer, None
        rows = exchange(self._group, replace(_row_of(answer), plan=save.plan.digest))
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
            self._serial += 1
            self._writer.ask(
                {
                    "do": "commit",
                    "serial": self._serial,
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
            began = time.perf_counter()
            self.settle()
            self._writer.say({"do": "hurry"})
            if self._writer.is_busy:
                self._answer = self._writer.answer(None)
            self._save.stall_s += time.perf_counter() - began
            result = self.go_on()
        return result

    def close(self) -> None:
        """Give everything back; a save that is not over is left to the writer, and to the next start of the run."""
        try:
            self._snapshot.close()
        except Exception as error:
            logger.warning("the copy of a checkpoint failed: %s", error)
        self._writer.close()
        self._arena.close(unlink=True)

    def _conclude(self, failure: str | None) -> SaveResult:
        save, self._save = self._save, None
        assert save is not None
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
        return Row(failed=True, text=answer["failed"])
    if "errno" in answer:
        return failure_row(OSError(answer["errno"], answer["strerror"], answer["file"] or None))
    microseconds = int(1e6 * answer.get("writing_s", 0.0))
    return Row(bytes=answer.get("bytes", 0), digest=answer.get("sha256", ""), time=microseconds)
