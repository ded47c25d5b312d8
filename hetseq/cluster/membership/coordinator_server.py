"""Coordinator server: the thread in the head's launcher that owns the listener and the channels to all members.

Passes records to the coordinator in order of arrival, sends its answers, and tells it when a channel ends and when
time has passed. Makes no decisions. The head's own launcher is member 0, over an in-process channel (`local_pair`).

A peer that has proven the key and then sends half a record can block the thread for at most `_PATIENCE_S`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any, Protocol

from hetseq.cluster.membership.coordinator import Coordinator
from hetseq.cluster.rendezvous.channel import ChannelClosed, ChannelError, ChannelTimeout, Listener
from hetseq.cluster.rendezvous.leader_election import Standing
from hetseq.errors import EXIT_FAILED

logger = logging.getLogger(__name__)

_PATIENCE_S = 10.0
_LAST_WORDS_S = 1.0  # time for a peer to read the last records
_BEAT_S = 0.5
_MOST_AT_ONCE = 100  # rounds of listening before the clock is checked in any case


class RecordChannel(Protocol):
    """The channel interface used here: `cluster.rendezvous.channel.Channel`, or one end of `local_pair`."""

    def send(self, record: Mapping[str, Any], *, timeout_s: float = ...) -> None: ...

    def receive(self, timeout_s: float) -> dict[str, Any]: ...

    def fileno(self) -> int: ...

    def close(self, *, linger_s: float = ...) -> None: ...


class _Tray:
    """Queue of records to one end of a local channel; `bell` is readable while `take` would return or raise."""

    def __init__(self) -> None:
        self._records: deque[str] = deque()
        self._turn = threading.Lock()
        self._is_shut = self._is_gone = False
        self.bell, self._hammer = os.pipe()

    def put(self, text: str) -> None:
        with self._turn:
            if self._is_shut:
                raise ChannelClosed("the head's launcher has closed its end")
            self._records.append(text)
            if len(self._records) == 1:
                os.write(self._hammer, b"!")

    def take(self, timeout_s: float) -> str:
        if not wait([self.bell], timeout_s):
            raise ChannelTimeout(f"nothing for {timeout_s:.1f} s")
        with self._turn:
            if not self._records:
                raise ChannelClosed("the head's launcher has closed its end")
            text = self._records.popleft()
            if not (self._records or self._is_shut):
                os.read(self.bell, 1)
            return text

    def shut(self, *, is_gone: bool = False) -> None:
        """Accept no more records; with `is_gone` no reader is left either."""
        with self._turn:
            if not (self._is_shut or self._records):
                os.write(self._hammer, b"!")  # left in the pipe, so the bell stays readable
            self._is_shut = True
            if is_gone and not self._is_gone:
                self._is_gone = True
                os.close(self.bell)
                os.close(self._hammer)


class LocalChannel:
    """One end of a channel within this process; raises the same errors as `Channel`. Sending never blocks: with a pipe,
    each end could wait for the other to read."""

    def __init__(self, inbox: _Tray, outbox: _Tray) -> None:
        self._inbox, self._outbox = inbox, outbox

    def send(self, record: Mapping[str, Any], *, timeout_s: float = _PATIENCE_S) -> None:
        self._outbox.put(json.dumps(record, separators=(",", ":")))

    def receive(self, timeout_s: float) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self._inbox.take(timeout_s))
        return record

    def fileno(self) -> int:
        return self._inbox.bell

    def close(self, *, linger_s: float = 0.0) -> None:
        self._outbox.shut()
        self._inbox.shut(is_gone=True)


def local_pair() -> tuple[LocalChannel, LocalChannel]:
    """The two ends of one in-process channel."""
    one, other = _Tray(), _Tray()
    return LocalChannel(one, other), LocalChannel(other, one)


class HubServer:
    """Runs the coordinator in a thread of its own, from `start` to `close`; `own` is its end of member 0's channel.

    `beat`, if set before `start`, is called about twice a second, as a heartbeat for other machines.
    """

    def __init__(self, hub: Coordinator, own: RecordChannel, *, listener: Listener | None = None) -> None:
        self._hub, self._listener = hub, listener
        self.beat: Callable[[], None] | None = None
        #: whether another node may lead; set before the start if a directory may elect another head
        self.standing: Callable[[], Standing] | None = None
        self._channels: dict[int, RecordChannel] = {0: own}
        self.notes = 0  # left in the shared directory by nodes with another secret
        self._count = 0  # of remote members, ever
        self._admitted: list[RecordChannel] = []
        self._is_open, self._is_over = True, threading.Event()
        self._left_s = 0.0  # until the next `tick`
        self._bell, self._hammer = os.pipe()
        # in its own thread, which is never joined: a hanging file system may block it for ever
        self._beating = threading.Thread(target=self._keep_beating, name="hub's heart", daemon=True)
        self._threads = [threading.Thread(target=self._serve, name="hub", daemon=True)]
        if listener is not None:
            self._threads.append(threading.Thread(target=self._admit, name="hub's door", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        if self.beat is not None:
            self._beating.start()

    def close(self) -> None:
        """Stop the coordinator's threads, and close every channel and the listener. Sent records are still delivered.

        Takes a few seconds if nodes on their way must still hear why the run was refused.
        """
        if self._listener is not None and self._threads[0].is_alive():
            self._threads[0].join(self._hub.linger_s)
        self._is_open = False
        self._is_over.set()
        os.write(self._hammer, b"!")
        if self._listener is not None:
            self._listener.close()
        for thread in self._threads:
            thread.join()
        os.close(self._bell)
        os.close(self._hammer)

    def _keep_beating(self) -> None:
        assert self.beat is not None
        while not self._is_over.wait(_BEAT_S):
            self.beat()

    def _admit(self) -> None:
        assert self._listener is not None
        while self._is_open:
            try:
                self._admitted.append(self._listener.accept(1.0))
                os.write(self._hammer, b"!")
            except ChannelTimeout:
                continue
            except ChannelClosed:
                return

    def _serve(self) -> None:
        try:
            while self._is_open:
                self._turn()
        except Exception:
            logger.error("the head's own part failed:\n%s", traceback.format_exc())
            for channel in self._channels.values():
                with contextlib.suppress(ChannelError):
                    text = "the coordinator failed; its launcher has logged the error"
                    channel.send({"kind": "ending", "code": EXIT_FAILED, "message": text}, timeout_s=1.0)
        closing = [threading.Thread(target=_say_goodbye, args=(channel,)) for channel in self._channels.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _turn(self) -> None:
        # read all records first: a member that has answered must not count as silent because this thread was delayed
        left_s = self._left_s
        for _ in range(_MOST_AT_ONCE):
            if not self._hear(left_s):
                break
            left_s = 0.0
        if self._listener is not None:
            self._hub.sent_away = self._listener.refused["secret"] + self.notes
        if self.standing is not None:
            self._hub.stand(self.standing())
        left_s = self._hub.tick(time.monotonic())
        self._left_s = left_s if self.standing is None else min(left_s, _BEAT_S)
        self._deliver()

    def _hear(self, timeout_s: float) -> bool:
        """Read one record from each ready member, and accept new members; returns whether there was anything."""
        by_descriptor = {channel.fileno(): number for number, channel in self._channels.items()}
        ready = wait([self._bell, *by_descriptor], timeout=timeout_s)
        if self._bell in ready:
            os.read(self._bell, 64)
            while self._admitted:
                self._count += 1
                self._channels[self._count] = self._admitted.pop(0)
        for descriptor in ready:
            if descriptor in by_descriptor:
                self._listen(by_descriptor[descriptor])
        self._deliver()
        return bool(ready)

    def _listen(self, member: int) -> None:
        try:
            record = self._channels[member].receive(_PATIENCE_S)
        except ChannelError as error:
            self._drop(member, str(error))
            return
        self._hub.handle(member, record, time.monotonic())

    def _deliver(self) -> None:
        while self._hub.outbox:
            member, record = self._hub.outbox.pop(0)
            if member not in self._channels:
                continue
            try:
                self._channels[member].send(record, timeout_s=_PATIENCE_S)
            except (ChannelError, ValueError) as error:  # disconnected, or the record is too long
                self._drop(member, str(error))

    def _drop(self, member: int, why: str) -> None:
        self._channels.pop(member).close()
        self._hub.gone(member, why, time.monotonic())


def _say_goodbye(channel: RecordChannel) -> None:
    with contextlib.suppress(ChannelError):
        channel.close(linger_s=_LAST_WORDS_S)
