"""One part of an image on one of its two ranks: copied from the live state, or received from the rank that has it.

Responsible for the memory of a part and for its way to the second place, in a thread of its own. Does not decide when
an image is made. The one idea: both ranks know from the same call which image is next, so no message says what it is.
The owner sends the bytes and their checksums; the keeper computes its own, and answers whether they are equal. If
not, the owner sends them again.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hetseq.balance.second_places import IMAGES
from hetseq.checkpoint.arena import Arena
from hetseq.checkpoint.image_plan import ImagePart
from hetseq.checkpoint.memory_checksums import image_sums
from hetseq.checkpoint.records import DamagedError
from hetseq.checkpoint.snapshot import Snapshot, image_bytes
from hetseq.checkpoint.tensor_slices import Held
from hetseq.comm.messages import Messages
from hetseq.comm.serial_thread import SerialThread
from hetseq.errors import PeerLostError
from hetseq.system import faults

logger = logging.getLogger(__name__)

_PATIENCE_S = 1800.0  # for a message: only a group that is cut ends a transfer, and a stopped rank has that done
_TRIES = 3  # to bring a part to its second place with the right bytes
_END_S = 0.3  # at most, for a message to end; else its thread is left to end at the deadline


@dataclass(frozen=True)
class Way:
    """How a part travels: the messages, and its channel among the channels of all parts."""

    messages: Messages
    channel: int
    channels: int

    def send(self, content: memoryview, target: int) -> None:
        """Send bytes; they may change once this returns."""
        self.messages.send(content, target, channel=self.channel, channels=self.channels, timeout_s=_PATIENCE_S)

    def receive(self, content: memoryview, source: int) -> None:
        """Receive what the other rank sends."""
        self.messages.receive(content, source, channel=self.channel, channels=self.channels, timeout_s=_PATIENCE_S)


class PartCopies:
    """The copies of one part on this rank, in as many slots as there are images at a time.

    Raises OSError if this node does not have the memory.
    """

    def __init__(self, part: ImagePart, run_id: str, way: Way | None) -> None:
        self.part = part
        self.bytes = image_bytes(part.pieces)
        self._way, self._is_closed = way, False
        self._thread = SerialThread("image")
        self._arenas: list[Arena] = []
        try:
            for _ in range(IMAGES):
                self._arenas.append(Arena.create(run_id, self.bytes))
        except BaseException:
            self.close(keep=False)
            raise

    def close(self, *, keep: bool) -> None:
        """Release everything; with `keep` whole copies stay in memory. Cut the connections before."""
        self._is_closed = True
        self._thread.end(patience_s=_END_S if self._way is None else min(_END_S, self._way.messages.end_s()))
        for arena in self._arenas:
            arena.close(unlink=not (keep and arena.is_sealed))
        self._arenas.clear()

    def _in_thread(self, task: Callable[[], None]) -> None:
        def run() -> None:
            # the error is dropped here: in a future its frames would hold the arena
            try:
                task()
            except Exception as error:
                self._say_why_it_failed(error)

        self._thread.put(run)

    def _say_why_it_failed(self, error: Exception) -> None:
        """A lost peer is seen by the training thread as well; nothing else may go unsaid."""
        if not self._is_closed and not isinstance(error, PeerLostError):
            logger.warning(
                "an image in memory has no second copy, and none is made until ranks are lost or join: %s"
                " [no-second-place]", error,
            )  # fmt: skip

    def _sums(self, slot: int) -> list[int]:
        return image_sums(self._arenas[slot].image[: self.bytes])

    def _seal(self, slot: int, serial: int, sums: list[int]) -> None:
        self._arenas[slot].finish(serial)
        self._arenas[slot].seal(serial, sums)


class OwnPart(PartCopies):
    """A part that this rank owns, and sends to its keeper."""

    def __init__(self, part: ImagePart, run_id: str, way: Way | None) -> None:
        super().__init__(part, run_id, way)
        self._snapshots = [Snapshot(arena, part.pieces) for arena in self._arenas]

    def begin(
        self,
        slot: int,
        serial: int,
        record: Mapping[str, Any],
        tensors: Mapping[str, Held],
        *,
        at_once: Collection[str],
        when_safe: Callable[[float], None],
    ) -> None:
        """Copy the part of an image; `when_safe` is called by another thread, with the seconds of a processor that
        helpers took, once the copy is whole at both places; never if it does not get there."""
        self._arenas[slot].begin(serial, dict(record))

        def send() -> None:
            before_s = time.thread_time()
            sums = self._sums(slot)
            self._seal(slot, serial, sums)
            if self._way is not None and self.part.keeper is not None:
                self._bring(self._way, self.part.keeper, self._arenas[slot].image[: self.bytes], sums)
            when_safe(time.thread_time() - before_s)

        self._snapshots[slot].begin(tensors, at_once=at_once, when_whole=lambda: self._in_thread(send))

    def _bring(self, way: Way, keeper: int, image: memoryview, sums: list[int]) -> None:
        """Send the part until the keeper says that it has the right bytes. Raises DamagedError after three times."""
        for _ in range(_TRIES):
            way.send(image[: self.bytes // 2], keeper)
            faults.point("image")
            way.send(image[self.bytes // 2 :], keeper)
            way.send(memoryview(bytearray(_packed(sums))), keeper)
            answer = bytearray(1)
            way.receive(memoryview(answer), keeper)
            if answer[0]:
                return
        raise DamagedError(
            f"part {self.part.index} of an image arrived {_TRIES} times at rank {keeper} with other bytes"
        )

    def settle(self) -> None:
        """Wait until the tensors of the newest copy may change again."""
        for snapshot in self._snapshots:
            snapshot.settle()

    def close(self, *, keep: bool) -> None:
        for snapshot in getattr(self, "_snapshots", ()):
            try:
                snapshot.close()
            except Exception as error:
                logger.warning("the copy of an image failed: %s", error)
        super().close(keep=keep)


class KeptPart(PartCopies):
    """A part of another rank, of which this rank keeps a copy."""

    def begin(self, slot: int, serial: int, record: Mapping[str, Any], *, when_over: Callable[[float], None]) -> None:
        """Receive the part of an image, in the thread; `when_over` as `OwnPart.begin`."""
        arena = self._arenas[slot]
        arena.begin(serial, dict(record))

        def receive() -> None:
            before_s, way, owner = time.thread_time(), self._way, self.part.owner
            assert way is not None
            sums = self._take(way, owner, slot)
            self._seal(slot, serial, sums)  # only now is it an image
            faults.point("image_answer")
            way.send(memoryview(bytearray(b"1")), owner)
            when_over(time.thread_time() - before_s)

        self._in_thread(receive)

    def _take(self, way: Way, owner: int, slot: int) -> list[int]:
        """The checksums of the part, once it has arrived as its owner has it. Raises DamagedError after three times."""
        image = self._arenas[slot].image[: self.bytes]
        for _ in range(_TRIES):
            way.receive(image[: self.bytes // 2], owner)
            way.receive(image[self.bytes // 2 :], owner)
            sums = self._sums(slot)
            expected = bytearray(4 * len(sums))
            way.receive(memoryview(expected), owner)
            if bytes(expected) == _packed(sums):
                return sums
            way.send(memoryview(bytearray(1)), owner)
        raise DamagedError(
            f"part {self.part.index} of an image arrived {_TRIES} times from rank {owner} with other bytes"
        )


def _packed(sums: list[int]) -> bytes:
    return struct.pack(f"<{len(sums)}I", *sums)
