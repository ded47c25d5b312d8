"""Shadow links: the connections through which the ranks of one generation send to a shadow.

Responsible for letting ranks in, for reading whole messages without waiting for a single rank, and for the end: when
the generation is over, what the ranks had sent by then is still read. Does not know what the messages mean.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hetseq.cluster.rendezvous.byte_stream import FrameReader, Guest, StreamDoor, StreamError, send_frame
from hetseq.run.shadow_outlet import Following

_LOOK_S = 0.2
_DRAIN_S = 2.0  # at the end of a generation, for ranks that are alive to send what waits
_MOST_GUESTS = 64  # processes that have connected and not proven themselves yet
_PATIENCE_S = 30.0  # asked for when the generation is over: reading the rest, and one update


class ShadowLinks:
    """The connections of one shadow in one generation. `sever` may be called by any thread."""

    def __init__(self, following: Following, shadow: str, *, generation: int, world_size: int) -> None:
        self.generation, self.deadline_s = generation, _PATIENCE_S
        #: by rank: what has arrived from it
        self.readers: dict[int, FrameReader] = {}
        self._greeted: set[int] = set()  # ranks that have got an answer
        self._guests: list[Guest] = []  # that have connected and may be ranks, in order of arrival
        self._world_size = world_size
        self._over_s: float | None = None
        self._bell, self._rope = socket.socketpair()
        self._door = StreamDoor(
            following.host, following.place_of(shadow), following.key, sources=following.sources
        )  # fmt: skip
        following.store.set(following.place_of(shadow), f"{following.host}:{self._door.port}".encode())

    def allow_for(self, seconds: float) -> None:
        """Ask for more time when the generation is over, since the last work has taken so long."""
        self.deadline_s = max(self.deadline_s, _PATIENCE_S + 2 * seconds)

    def sever(self) -> None:
        """The generation is over: read the rest, and no more."""
        self._over_s = self._over_s or time.monotonic()
        with suppress(OSError):
            self._rope.send(b"!")

    def wait(self, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> bool:
        """Read what comes within 0.2 s; returns whether more may come in this generation.

        `answer` gives what a rank is told that has introduced itself.
        """
        if self._over_s is not None and (self._is_drained() or time.monotonic() > self._over_s + _DRAIN_S):
            return False
        by_descriptor = {one.connection.fileno(): rank for rank, one in self.readers.items() if not one.is_whole}
        poll = select.poll()
        guests = [guest.connection.fileno() for guest in self._guests]
        for descriptor in (self._door.fileno(), self._bell.fileno(), *guests, *by_descriptor):
            poll.register(descriptor, select.POLLIN)
        happened = [descriptor for descriptor, _ in poll.poll(1000 * _LOOK_S)]
        if self._bell.fileno() in happened:
            self._bell.recv(64)
        if self._door.fileno() in happened and (guest := self._door.accept()) is not None:
            self._guests.append(guest)
        self._let_in()
        for descriptor in happened:
            if descriptor in by_descriptor and by_descriptor[descriptor] in self.readers:
                self._read(by_descriptor[descriptor])
        strangers = {rank: one for rank, one in self.readers.items() if rank not in self._greeted}
        # all together: a rank that has an answer sends, which is of no use without the others
        if len(self.readers) == self._world_size and all(one.is_whole for one in strangers.values()):
            for rank in sorted(strangers):
                self._greet(rank, answer)
        return True

    def close(self) -> None:
        """Close all connections."""
        for rank in list(self.readers):
            self._forget(rank)
        for guest in self._guests:
            guest.close()
        self._door.close()
        self._bell.close()
        self._rope.close()

    def _is_drained(self) -> bool:
        """Whether nothing of use can come any more: a rank is gone, and all is read that needs rank zero alone."""
        first = self.readers.get(0)
        return len(self.readers) < self._world_size and (first is None or first.is_whole)

    def _let_in(self) -> None:
        """Read from the guests that have proven to be ranks; the others wait, or go."""
        for guest in list(self._guests):
            try:
                rank = guest.advance()
            except StreamError:
                rank = self._world_size
            if rank is None and len(self._guests) <= _MOST_GUESTS:
                continue
            self._guests.remove(guest)
            if rank is None or rank >= self._world_size:
                guest.close()
                continue
            self._forget(rank)  # it has come again
            self.readers[rank] = FrameReader(guest.connection)

    def _read(self, rank: int) -> None:
        reader = self.readers[rank]
        reader.read()
        if reader.has_ended and not reader.is_whole:
            self._forget(rank)

    def _greet(self, rank: int, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        reader = self.readers[rank]
        assert reader.header is not None
        try:
            send_frame(reader.connection, dict(answer(reader.header)), is_wanted=lambda: False)
        except (OSError, StreamError):
            self._forget(rank)
            return
        self._greeted.add(rank)
        reader.clear()

    def _forget(self, rank: int) -> None:
        self._greeted.discard(rank)
        if (reader := self.readers.pop(rank, None)) is not None:
            reader.close()
