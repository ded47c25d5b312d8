"""Shadow outlet: the thread through which a rank sends to one shadow, and what waits to be sent.

Responsible for one connection: making it, making it again, and sending in order. Does not know what the messages mean.
The training thread only appends; whether a shadow reads, is stopped or is dead is visible to this thread alone.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetseq.cluster.membership.step_commit import Lineage
from hetseq.cluster.rendezvous.byte_stream import FrameReader, Header, StreamError, open_stream, send_frame
from hetseq.comm.group import Store
from hetseq.errors import PeerLostError, RendezvousError
from hetseq.monitor.status import FOLLOWS
from hetseq.parallel.portions import Piece, in_messages, offsets_of, view_of

logger = logging.getLogger(__name__)

_MOST_WAITING = 2  # steps that are kept for a shadow which is slow, or not connected yet
_ADDRESS_S = 60.0  # for a shadow to say where it listens; asked again after that
_CONNECT_S = 10.0
_AGAIN_S, _MOST_PAUSE_S = 0.5, 30.0  # between two attempts to connect: the first and the longest pause
_LOOK_S = 0.2
_FLUSH_S = 2.0  # at the end of a generation, for what a shadow can still use


@dataclass(frozen=True)
class Following:
    """The shadows of a generation, and what a rank or a shadow needs so that they find each other."""

    shadows: tuple[str, ...]
    store: Store
    name: str  # of the generation
    key: bytes  # secret of the run's ranks
    host: str  # the address of this process's interface
    sources: tuple[str, ...] = ()  # addresses of the others

    def place_of(self, shadow: str) -> str:
        """The name under which a shadow says where it listens."""
        return f"{self.name}/shadow-{shadow}"


@dataclass
class Buffer:
    """Memory for one step on its way; free while it has no users, which are the outlets that still have to send it."""

    memory: Tensor
    users: set[int] = field(default_factory=set)


@dataclass
class Message:
    """One frame: a step, or what followed from it. `before`: the lineage that its receiver must have."""

    header: Header
    content: Sequence[memoryview] = ()
    buffer: Buffer | None = None
    before: Lineage | None = None


class StateMessage:
    """The state of this rank's portion, of live tensors, which must not change until `settle` has returned.

    A thread of its own copies them: the one that sends may be waiting for the shadow.
    """

    def __init__(
        self, header: Header, pieces: list[tuple[Piece, Tensor]], ready: torch.cuda.Event | None = None
    ) -> None:
        self.header = header
        self._pieces, self._ready = pieces, ready  # ready: when the GPU has made the state
        self._frames: list[tuple[Header, Tensor]] = []
        self._is_whole, self._is_wanted = False, True
        self._copied = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._copy, name="shadow's state", daemon=True).start()

    def settle(self, *, is_wanted: bool = True) -> None:
        """Wait until the tensors may change; unless it `is_wanted` the copy ends early."""
        self._is_wanted = self._is_wanted and is_wanted
        self._copied.wait()

    def frames(self) -> Iterator[tuple[Header, Tensor]]:
        """Header and content of each frame; the last one says so. Raises StreamError without a whole copy."""
        self._copied.wait()
        if not self._is_whole:
            raise StreamError("the state could not be copied")
        header, part = self.header, 0
        while self._frames:
            own, memory = self._frames.pop(0)
            yield {**header, **own, "part": part, "is_last": not self._frames}, memory
            part += 1
            header = {key: header[key] for key in ("kind", "step")}  # the rest is told once

    def _copy(self) -> None:
        try:
            if self._ready is not None:
                self._ready.synchronize()
            for pieces in in_messages(self._pieces):
                if not self._is_wanted:
                    return
                self._frames.append(_copied([piece for piece, _ in pieces], [source for _, source in pieces]))
            self._is_whole = True
        except RuntimeError as error:  # no memory, or a GPU that has failed, which the training thread will notice
            logger.warning("a shadow gets no state: %s", str(error).partition("\n")[0])
        finally:
            self._pieces = []
            self._copied.set()


class Outlet:
    """The way to one shadow, `place` in the order of the record. Except where noted, for the training thread."""

    def __init__(
        self, place: int, shadow: str, following: Following, hello: Header, *, rank: int, lineage: Lineage
    ) -> None:  # fmt: skip
        self.place, self.shadow = place, shadow
        self.sent_steps, self.sent_bytes = 0, 0  # all bytes, except of states
        self.known: dict[str, int] = {}  # checksums of the frozen parameters that the shadow has
        self._following, self._hello, self._rank = following, hello, rank
        self._changed = threading.Condition()  # around all below
        self._waiting: deque[Message | StateMessage] = deque()
        self._copying: StateMessage | None = None
        self._lineage = lineage  # after all that waits has been sent
        self._lacks_state, self._is_connected, self._is_busy, self._has_state = False, False, False, False
        self._node, self._sent_step = "", 0  # where it is; the newest step that was sent to it
        self._closed_s: float | None = None
        threading.Thread(target=self._run, name=f"shadow-{shadow}", daemon=True).start()

    def has_room(self) -> bool:
        """Whether the shadow can take the next step."""
        with self._changed:
            steps = sum(isinstance(one, Message) and one.buffer is not None for one in self._waiting)
            return not self._lacks_state and steps < _MOST_WAITING

    @property
    def lacks_state(self) -> bool:
        with self._changed:
            return self._lacks_state

    def told(self) -> dict[str, Any]:
        """What a viewer of the run may know: its log's number, its node, whether it follows, the last step sent."""
        with self._changed:
            state = "is out of reach"
            if self._is_connected:
                state = "lacks the state" if self._lacks_state or self._has_state else FOLLOWS
            slot = int(self.shadow.partition(".")[0])
            return {"slot": slot, "node": self._node, "state": state, "step": self._sent_step}

    def lack(self, lineage: Lineage) -> None:
        """The step that led to this lineage was not kept for the shadow, which lacks the state from now on."""
        with self._changed:
            self._lacks_state, self._lineage = True, lineage

    def wants_state(self) -> bool:
        """Whether the shadow lacks the state and has taken all that it was sent."""
        with self._changed:
            return self._lacks_state and self._is_connected and not self._waiting and not self._is_busy

    def has_unsent_step(self) -> bool:
        """Whether the shadow has the state, and something that it should have has not been handed to the network."""
        with self._changed:
            return not self._lacks_state and not self._has_state and (bool(self._waiting) or self._is_busy)

    def append(self, message: Message, lineage: Lineage) -> None:
        """Send a message after all others; the shadow has this lineage then."""
        with self._changed:
            if message.buffer is not None:
                message.buffer.users.add(self.place)
            self._waiting.append(message)
            self._lineage = lineage
            self._changed.notify_all()

    def can_take_state(self) -> bool:
        """Whether the shadow is connected, and no earlier state is still being sent to it."""
        with self._changed:
            return self._is_connected and not self._has_state

    def append_state(self, message: StateMessage, lineage: Lineage) -> None:
        """Send the state after all others, if `can_take_state`."""
        with self._changed:
            self._lacks_state, self._has_state, self._lineage = not self._is_connected, True, lineage
            self._waiting.append(message)
            self._changed.notify_all()
        self._copying = message
        message.begin()

    def settle(self, *, is_wanted: bool = True) -> None:
        """Wait until no part of the state is being copied."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.settle(is_wanted=is_wanted)

    def close(self) -> None:
        """End: what waits is still sent for a moment. Returns once nothing is being copied."""
        with self._changed:
            self._closed_s = time.monotonic()
            self._changed.notify_all()
        self.settle(is_wanted=False)

    # the thread

    def _run(self) -> None:
        pause_s = _AGAIN_S
        while self._closed_s is None:
            try:
                connection = self._connect()
            except (PeerLostError, OSError):
                break  # the generation is over, or this process's launcher is gone
            except RendezvousError as error:
                if pause_s == _AGAIN_S:
                    logger.info("the shadow %s is out of reach, and is tried again: %s", self.shadow, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed_s is not None, pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
                continue
            pause_s = _AGAIN_S
            try:
                self._introduce(connection)
                self._serve(connection)
            except (OSError, StreamError) as error:
                logger.info("lost the shadow %s: %s", self.shadow, error)
            finally:
                connection.close()
                self._give_up()
        self._give_up()

    def _connect(self) -> socket.socket:
        following = self._following
        place = following.store.get(following.place_of(self.shadow), _ADDRESS_S).decode()
        host, _, port = place.rpartition(":")
        name = following.place_of(self.shadow)
        return open_stream(host, int(port), name, self._rank, following.key, timeout_s=_CONNECT_S)

    def _introduce(self, connection: socket.socket) -> None:
        """Tell the shadow what it will get, and hear which state it has."""
        with self._changed:
            lineage = [self._lineage.step, self._lineage.chain]
        send_frame(connection, {**self._hello, "lineage": lineage}, is_wanted=self._is_wanted)
        answer, poll = FrameReader(connection), select.poll()
        poll.register(connection, select.POLLIN)
        while not answer.is_whole:
            poll.poll(1000 * _LOOK_S)
            answer.read()
            if answer.has_ended or not self._is_wanted():
                raise StreamError("it has not answered")
        assert answer.header is not None
        told = answer.header["lineage"]
        has = None if told is None else Lineage(*told)
        with self._changed:
            self.known = answer.header.get("frozen", {})
            while self._waiting and not self._follows(has):
                self._drop(self._waiting.popleft())
            if not self._waiting:  # what an earlier connection has lost may be more than steps
                self._lacks_state = self._lacks_state or has != self._lineage
            self._is_connected, self._node = True, str(answer.header.get("node", ""))[:200]
            if has is not None:
                self._sent_step = has.step

    def _follows(self, has: Lineage | None) -> bool:
        first = self._waiting[0]
        return isinstance(first, Message) and first.before is not None and first.before == has

    def _is_wanted(self) -> bool:
        return self._closed_s is None or time.monotonic() < self._closed_s + _FLUSH_S

    def _serve(self, connection: socket.socket) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.wait_for(lambda: self._waiting or self._closed_s is not None)
                if not self._waiting:
                    return
                message, self._is_busy = self._waiting.popleft(), True
            try:
                if isinstance(message, StateMessage):
                    for header, memory in message.frames():
                        send_frame(connection, header, [memory.numpy().data], is_wanted=self._is_wanted)
                else:
                    size = send_frame(connection, message.header, message.content, is_wanted=self._is_wanted)
                    self.sent_bytes += size
                    self.sent_steps += message.header["kind"] == "step"
                with self._changed:
                    self._sent_step = int(message.header["step"])
            finally:
                self._drop(message)

    def _drop(self, message: Message | StateMessage) -> None:
        with self._changed:
            if isinstance(message, StateMessage):
                self._has_state = False
            elif message.buffer is not None:
                message.buffer.users.discard(self.place)

    def _give_up(self) -> None:
        """Nothing of what waits can be sent: until it has the state again, the shadow follows no more."""
        with self._changed:
            while self._waiting:
                self._drop(self._waiting.popleft())
            self._is_connected, self._is_busy, self._lacks_state = False, False, True


def _copied(pieces: Sequence[Piece], sources: Sequence[Tensor]) -> tuple[Header, Tensor]:
    """The header and the content of one frame with state."""
    offsets, size = offsets_of(pieces)
    memory = torch.empty(size, dtype=torch.uint8)
    with torch.no_grad():
        for piece, offset, source in zip(pieces, offsets, sources):
            view_of(memory, offset, piece).copy_(source)
    return {"pieces": [piece.to_record() for piece in pieces]}, memory
