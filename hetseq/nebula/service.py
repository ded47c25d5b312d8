"""The life of saved tags in a script's process: copied at once, written in the background, and never lost.

Responsible for: when a tag is complete, whether it goes to the disk, and which tag's memory is reused. Knows nothing
of files and torch.distributed. The one idea: there is room for two tags, the current one and the one
before it. A save that needs memory waits for tags on their way to the disk, sends those that are only in memory, and
discards only tags that a newer complete tag has superseded.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.part_io import spec_of, write_part
from hetseq.checkpoint.records import sha256, utc_text
from hetseq.checkpoint.snapshot import image_bytes
from hetseq.errors import CheckpointError, DisagreementError
from hetseq.nebula.courier import Courier
from hetseq.nebula.memory_budget import Budget
from hetseq.nebula.publish import RETRY_S, TagPlace, TagPublisher
from hetseq.nebula.saving import (
    ABANDONED,
    AT_COMMIT,
    AT_NEXT,
    FAILED,
    MEMORY,
    PERSISTED,
    SUPERSEDED,
    WRITING,
    SavedFile,
    Saving,
)
from hetseq.nebula.slots import Slot, Slots, anchor, holder_mark
from hetseq.nebula.state_tree import Flat, flatten
from hetseq.nebula.tags import TagAttempt, TagManifest, data_name
from hetseq.nebula.writer import setting_of
from hetseq.system.files import COMMIT_NAME, describe_os_error

logger = logging.getLogger(__name__)

_IN_MEMORY = 2  # tags
_WARN_S = 60.0  # interval of warnings during a long wait for memory


@dataclass(frozen=True)
class Rules:
    """The settings of `init`: seconds between two tags on disk, memory, and the optimizers that overlap."""

    interval_s: float
    allowed: Budget
    optimizers: tuple[torch.optim.Optimizer, ...]


Agree = Callable[[list[int]], list[int]]


class Service:
    """All tags that this process saves to one place. `agree` returns rank zero's integers on every rank."""

    def __init__(self, place: TagPlace, rules: Rules, *, world_size: int, agree: Agree) -> None:
        self.place, self._rules, self._world_size, self._agree = place, rules, world_size, agree
        self.savings: list[Saving] = []  # the unfinished tags, and the newest ones in memory, oldest first
        self._calls = threading.RLock()  # one call of the script at a time
        self._changed = threading.Condition()
        self._slots = Slots(place, rules.allowed)
        self._anchor = anchor(place)
        self._courier = Courier(setting_of(place), [self._anchor.descriptor] if self._anchor is not None else [])
        self._publisher = TagPublisher(place)
        self._serial = 0
        self._last_due_s: float | None = None
        self._has_warned = False
        self._hooks = [optimizer.register_step_pre_hook(self._settle_hook) for optimizer in rules.optimizers]

    @property
    def is_shared(self) -> bool:
        """Whether several ranks save its tags together."""
        return self._world_size > 1

    @property
    def writer_pid(self) -> int:
        """The pid of the writer process."""
        return self._courier.writer_pid

    @property
    def memory_bytes(self) -> int:
        """Bytes of shared memory that saved states take in this process."""
        return self._slots.memory_bytes

    def begin(self, tag: str, num_of_files: int, *, is_best: bool) -> Saving:
        """Create a tag and complete the one before, unless its files are counted. Collective with several ranks."""
        with self._calls:
            for saving in [saving for saving in self.savings if saving.is_open]:
                if saving.attempt.num_of_files == AT_NEXT or (self._world_size > 1 and saving.attempt.num_of_files > 0):
                    self.complete(saving)
            attempt, is_due = self._agreed(tag, num_of_files, is_best=is_best)
            if is_due:
                self._last_due_s = time.monotonic()
            saving = Saving(attempt, is_due, time.monotonic(), is_awaited=is_due)
            with self._changed:
                self.savings.append(saving)
            return saving

    def save(self, saving: Saving, name: str, state: Any) -> None:
        """Copy a state; it may change when this returns, except for tensors that the optimizers own."""
        with self._calls:
            began = time.monotonic()
            if not saving.is_open:
                raise ValueError(f"the tag {saving.tag!r} is {saving.status}: nothing can be added, create another one")
            if name in saving.files:
                raise ValueError(f"the tag {saving.tag!r} has {name!r} already: each name can be saved once per tag")
            flat = flatten(state)
            tree = json.dumps(flat.tree, separators=(",", ":")).encode()
            pieces = [_whole(name, tensor) for name, tensor in flat.tensors.items()]
            slot = self._slot_for(saving, image_bytes(pieces) + len(tree))
            if slot is None:
                self._write_now(saving, name, flat, pieces)
            else:
                self._copy(saving, name, flat, pieces, tree, slot)
            saving.stall_s += time.monotonic() - began
            if self._world_size == 1 and len(saving.files) == saving.attempt.num_of_files:
                self.complete(saving)

    def complete(self, saving: Saving) -> None:
        """Complete a tag: no more names are added. If it is due it is written, otherwise it stays in memory."""
        with self._calls:
            if not saving.is_open:
                return
            if not saving.files and self._world_size == 1:
                self._forget(saving, ABANDONED)
                return
            with self._changed:
                saving.status = MEMORY
            self._courier.announce(saving.attempt.folder_name, saving.announcement())
            self._release_superseded()
            if saving.is_due:
                self._send(saving)

    def wait(self, saving: Saving, timeout_s: float | None) -> None:
        """Wait until a complete tag is in its place. CheckpointError if it failed, TimeoutError if time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            in_time = self._changed.wait_for(lambda: saving.status != WRITING, timeout_s)
        if in_time and saving.status == PERSISTED and self.place.rank != 0 and saving.is_awaited:
            in_time = self._await_rank_zero(saving, deadline)
        if not in_time:
            raise TimeoutError(f"the tag {saving.tag!r} was not on the disk after {timeout_s} s")
        if saving.status == FAILED:
            raise CheckpointError(f"the tag {saving.tag!r} was not saved: {saving.error}")

    def _await_rank_zero(self, saving: Saving, deadline: float | None) -> bool:
        """On other ranks: wait for the commit, or until rank zero has removed a tag that cannot be committed."""
        folder, patience_s = self._publisher.folder(saving.attempt), self.place.patience_s
        deadline = min(deadline or math.inf, time.monotonic() + patience_s)
        while not (folder / COMMIT_NAME).exists():
            if not folder.exists():
                saving.status, saving.error = FAILED, "rank 0 gave it up"
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(RETRY_S)
        return True

    def flush(self, timeout_s: float | None) -> None:
        """Complete the open tag, send the newest tag in memory to the disk, and wait for all writes."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._calls:
            for saving in [saving for saving in self.savings if saving.is_open]:
                if saving.attempt.num_of_files != AT_COMMIT and (
                    saving.attempt.num_of_files == AT_NEXT or self._world_size > 1
                ):
                    self.complete(saving)
            newest = self.newest_complete()
            if newest is not None and newest.status == MEMORY:
                self._last_due_s = time.monotonic()
                newest.is_awaited = True
                self._send(newest)
            failure: CheckpointError | None = None
            for saving in [saving for saving in self.savings if saving.status == WRITING]:
                try:
                    self.wait(saving, None if deadline is None else max(0.0, deadline - time.monotonic()))
                except CheckpointError as error:
                    failure = failure if saving.is_abandoned else error
            if failure is not None:
                raise failure

    def complete_tags(self) -> list[Saving]:
        """The tags that are complete and not known to be on disk."""
        return [saving for saving in self.savings if saving.status in (MEMORY, WRITING) and not saving.is_abandoned]

    def newest_complete(self) -> Saving | None:
        """The newest complete tag in memory or on its way to the disk."""
        complete = self.complete_tags()
        return complete[-1] if complete else None

    def settle(self) -> None:
        """Wait until all tensors that are being copied may change again."""
        for saving in list(self.savings):
            for file in list(saving.files.values()):
                slot = file.slot
                if slot is not None and slot.serial == file.serial:
                    slot.settle()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within this context nothing in this process leaves its slot."""
        with self._calls:
            yield

    def close(self, *, is_normal: bool = True) -> None:
        """Finish all requests and release everything. An open tag is completed only at a normal end."""
        with self._calls:
            for hook in self._hooks:
                hook.remove()
            try:
                self.settle()
                for saving in [saving for saving in self.savings if saving.is_open]:
                    if not is_normal or saving.attempt.num_of_files == AT_COMMIT:
                        self._abandon(saving)
                self.flush(None)
                for saving in [saving for saving in self.savings if saving.is_open]:
                    self._abandon(saving)
            finally:
                self._courier.close()
                self._slots.close()
                if self._anchor is not None:
                    self._anchor.close(unlink=True)

    def _agreed(self, tag: str, num_of_files: int, *, is_best: bool) -> tuple[TagAttempt, bool]:
        now_s = time.monotonic()
        is_due = is_best or self._last_due_s is None or now_s - self._last_due_s >= self._rules.interval_s
        nonce, mine = secrets.randbits(63), _number(f"{tag} {num_of_files} {is_best}")
        values = [nonce, time.time_ns(), int(is_due), mine]
        if self._world_size > 1:
            values = self._agree(values)
            if values[3] != mine:
                raise DisagreementError(
                    f"rank {self.place.rank} creates the tag {tag!r} (num_of_files={num_of_files}, is_best={is_best})"
                    " and rank 0 another one: every rank must create the same Checkpoints in the same order"
                )
        attempt = TagAttempt(tag, f"{values[0]:016x}", values[1], self._world_size, num_of_files, is_best)
        return attempt, bool(values[2])

    def _copy(
        self, saving: Saving, name: str, flat: Flat, pieces: list[Piece], tree: bytes, slot: Slot
    ) -> None:  # fmt: skip
        self._serial += 1
        file = SavedFile(name, slot, self._serial, tree)
        record = {"attempt": saving.attempt.to_json(), "name": name, "holder": holder_mark()}
        hidden = self._hidden(flat.tensors) if self._rules.optimizers else frozenset()
        try:
            slot.fill(
                self._serial,
                record,
                pieces=pieces,
                tensors=flat.tensors,
                tree=tree,
                at_once=flat.tensors.keys() - hidden,
                when_whole=lambda: self._courier.say({"do": "go"}),
            )
            if not hidden:
                slot.settle()
        except BaseException:
            with self._changed:
                self._slots.give_back(slot)
            raise
        with self._changed:
            saving.files[name] = file
        if saving.is_due:
            self._ask(saving, file)

    def _hidden(self, tensors: Mapping[str, Tensor]) -> frozenset[str]:
        """The tensors that only an optimizer's step changes: these may be copied until the next step."""
        owned: set[tuple[torch.device, int]] = set()
        for optimizer in self._rules.optimizers:
            for group in optimizer.param_groups:
                owned.update(_memory_of(parameter) for parameter in group["params"])
            for state in optimizer.state.values():
                owned.update(_memory_of(value) for value in state.values() if isinstance(value, Tensor))
        return frozenset(name for name, tensor in tensors.items() if _memory_of(tensor) in owned)

    def _settle_hook(self, *_: Any) -> None:
        self.settle()

    def _write_now(self, saving: Saving, name: str, flat: Flat, pieces: list[Piece]) -> None:
        """Write a state that does not fit into memory, chunk by chunk, while the script waits."""
        size = image_bytes(pieces)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%.1f MB of %r do not fit into the %.1f MB of memory for saved states (%s): the script waits while they"
                " are written",
                size / 1e6, name, self._rules.allowed.limit_bytes / 1e6, self._rules.allowed.source,
            )  # fmt: skip
        saving.is_due = True
        file = SavedFile(name, None, 0, b"", is_asked=True)
        with self._changed:
            saving.files[name] = file
        try:
            folder = self._publisher.open(saving.attempt, size_bytes=size)
            _, crc32 = write_part(folder / data_name(name), pieces, flat.tensors)
            self._publisher.write_manifest(TagManifest(saving.attempt, name, size, crc32, flat.tree))
            file.is_written = True
        except OSError as error:
            self._note_failure(saving, f"{name}: {describe_os_error(error)}")
        for other in saving.unasked:
            self._ask(saving, other)

    def _slot_for(self, saving: Saving, size_bytes: int) -> Slot | None:
        """Memory for a state; waits until there is some. None if there never will be."""
        if not self._slots.could_hold(size_bytes):
            return None
        while True:
            with self._changed:
                others = [other for other in self.savings if other is not saving and other.holds_memory]
                slot = self._slots.take(size_bytes) if len(others) < _IN_MEMORY else None
                if slot is not None:
                    return slot
            if self._release_superseded():
                continue
            if self._await_memory():
                continue
            victim = next((other for other in (*others, saving) if other.unasked), None)
            if victim is None:
                return None
            self._send(victim)

    def _await_memory(self) -> bool:
        """Wait until one more file is on disk; False at once if none is being written."""
        self._courier.say({"do": "hurry"})
        with self._changed:
            if not any(saving.is_on_its_way for saving in self.savings):
                return False
            before = self._filled()
            while self._filled() == before:
                if not self._changed.wait(_WARN_S):
                    logger.warning("a save has waited %.0f s for an earlier one to reach the disk", _WARN_S)
        return True

    def _filled(self) -> int:
        return sum(1 for saving in self.savings for _ in saving.slots)

    def _release_superseded(self) -> bool:
        """Discard the complete tags in memory that a newer complete tag supersedes; whether there were any."""
        newest = self.newest_complete()
        released = [saving for saving in self.savings if saving.status == MEMORY and saving is not newest]
        released = [saving for saving in released if not saving.is_due]
        for saving in released:
            self._note(saving, "memory", "superseded")
            self._forget(saving, SUPERSEDED)
        return bool(released)

    def _send(self, saving: Saving) -> None:
        """Have a tag written, and committed if it is complete."""
        saving.is_due = True
        for file in saving.unasked:
            self._ask(saving, file)
        if saving.status == MEMORY:
            with self._changed:
                saving.status = WRITING
            # built when its turn comes: only then is the result of the writing known
            self._courier.ask(saving.commit_request, lambda answer: self._on_committed(saving, answer))

    def _ask(self, saving: Saving, file: SavedFile) -> None:
        assert file.slot is not None
        file.is_asked = True
        request = {"do": "write", "arena": str(file.slot.arena.path), "image": file.serial}
        self._courier.ask(lambda: request, lambda answer: self._on_written(saving, file, answer))

    def _on_written(self, saving: Saving, file: SavedFile, answer: Mapping[str, Any]) -> None:
        if "failed" in answer:
            self._note_failure(saving, f"{file.name}: {answer['failed']}")
        with self._changed:
            file.is_written = "failed" not in answer
            saving.write_s += answer.get("seconds", 0.0)
            slot, file.slot = file.slot, None
            if slot is not None:
                self._slots.give_back(slot)
            self._changed.notify_all()

    def _on_committed(self, saving: Saving, answer: Mapping[str, Any]) -> None:
        if "failed" in answer and saving.error is None:
            self._note_failure(saving, answer["failed"])
        self._courier.forget(saving.attempt.folder_name)
        self._publisher.close(saving.attempt)
        with self._changed:
            saving.status = PERSISTED if "failed" not in answer else FAILED
            if saving in self.savings:
                self.savings.remove(saving)
            self._changed.notify_all()

    def _note_failure(self, saving: Saving, text: str) -> None:
        logger.error("the tag %r was not saved: %s", saving.tag, text)
        self._last_due_s = None  # the next tag is due again
        with self._changed:
            saving.error = saving.error or text

    def _abandon(self, saving: Saving) -> None:
        """Give up an open tag that will never be complete."""
        if saving.files:
            logger.warning(
                "the tag %r is abandoned: it had %d names and was never complete", saving.tag, len(saving.files)
            )  # fmt: skip
            saving.error, saving.is_abandoned = "it was never complete", True
            if saving.is_due:
                with self._changed:
                    saving.status = MEMORY
                self._send(saving)
                return
        self._forget(saving, ABANDONED)

    def _forget(self, saving: Saving, status: str) -> None:
        self._courier.forget(saving.attempt.folder_name)
        with self._changed:
            saving.status = status
            for file in saving.files.values():
                slot, file.slot = file.slot, None
                if slot is not None:
                    slot.settle()
                    self._slots.give_back(slot)
            self.savings.remove(saving)
            self._changed.notify_all()

    def _note(self, saving: Saving, tier: str, result: str) -> None:
        if self.place.rank == 0:
            row = {name: value for name, value in saving.commit_request()["row"].items() if name != "began_s"}
            row.update(time_utc=utc_text(int(time.time())), tier=tier, result=result, files=len(saving.files))
            self._courier.say({"do": "note", "row": row})


def _whole(name: str, tensor: Tensor) -> Piece:
    spec = spec_of(name, tensor)
    return Piece(spec, 0, spec.elements)


def _memory_of(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _number(text: str) -> int:
    """A number from a text, different for different texts."""
    return int(sha256(text.encode())[:15], 16)
