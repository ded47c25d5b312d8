"""Launcher link: a worker's end of the pipe to its launcher, and the store through which ranks connect.

A separate thread listens, so that a live process answers a freeze whatever its training thread does, and so that the
group can be severed under a collective that waits for a lost peer. Records for the training thread go through a queue;
values of the store, which any thread may wait for, are found by their key.
"""

from __future__ import annotations

import base64
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from hetseq.cluster.membership.step_commit import Wish
from hetseq.errors import PeerLostError, RendezvousError
from hetseq.launch.watchdog import Watchdog
from hetseq.system.rank_phase import Stand

Record = dict[str, Any]

_GO_TIMEOUT_S = 3600.0  # the head waits half as long for the slowest rank to load
_RECORD_TIMEOUT_S = 7200.0  # plus --join-timeout, for which a run waits for newcomers; launchers end a round earlier
_PATIENCE_S = 20.0  # asked for by a rank that is between two generations


class Severable(Protocol):
    """The connections of a generation."""

    @property
    def generation(self) -> int: ...

    @property
    def deadline_s(self) -> float: ...

    def sever(self) -> None: ...


class LauncherLink:
    """One worker's pipe. `send` may be called by any thread, the rest by the training thread."""

    def __init__(self, connection: Connection, *, join_timeout_s: float = 0.0) -> None:
        self._connection, self._record_timeout_s = connection, _RECORD_TIMEOUT_S + join_timeout_s
        self._sending = threading.Lock()
        self._heard: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._wish = Wish.NONE
        self._unanswered: Record | None = None  # a report, to be sent again if the coordinator is replaced
        self._changed = threading.Condition()  # around the three below
        self._values: dict[str, str] = {}
        self._frozen = -1  # the newest generation that is over
        self._is_gone = False  # the launcher
        self._group: Severable | None = None
        self.pulse: Watchdog | None = None  # looks whether the training thread moves
        threading.Thread(target=self._listen, name="launcher-line", daemon=True).start()

    def send(self, kind: str, **facts: Any) -> None:
        with self._sending:
            self._connection.send_bytes(json.dumps({"kind": kind, **facts}).encode())

    def present(self, fields: Mapping[str, str]) -> None:
        """Present this rank's fields; returns when all ranks have presented the same. Raises RendezvousError."""
        self.send("present", fields=dict(fields))
        self._await(("go",), _GO_TIMEOUT_S, "the other ranks to have loaded their data")

    def ready(self) -> None:
        self.send("ready")

    def store(self, generation: int) -> StoreOf:
        """The store through which the ranks of a generation connect."""
        return StoreOf(self, generation)

    def value(self, key: str, generation: int, timeout_s: float) -> bytes:
        """A value that a rank of this generation stored. Raises PeerLostError once the generation is over."""
        self.send("get", key=key)
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: key in self._values or self._is_gone or generation <= self._frozen, timeout_s
            )
            if key in self._values:
                return base64.b64decode(self._values.pop(key))
        self.check(generation)
        raise RendezvousError(
            "the launcher of this rank is gone" if has_come else f"waited {timeout_s:.0f} s for a peer ({key})"
        )

    def check(self, generation: int) -> None:
        """Raise PeerLostError if the generation is over."""
        if generation <= self._frozen:
            raise PeerLostError("a peer was lost while the ranks met")

    def wish(self) -> Wish:
        """The launcher's request to the run, for the rows of commits."""
        return self._wish

    def begin(self, generation: int, group: Severable | None) -> None:
        """Set what a freeze severs: a group, or the links of a shadow (None: not formed yet).

        Raises PeerLostError if the generation is over.
        """
        self._group = group
        if generation <= self._frozen and group is not None:
            group.sever()
        self.check(generation)

    def deadline(self) -> float | None:
        """Seconds after which the other ranks currently give up on this one; None without a group. For any thread."""
        return None if self._group is None else self._group.deadline_s

    def show(self, renew: Callable[[Stand], None]) -> None:
        """Have the watchdog call `renew` with the phase of this rank while the phase lasts long."""
        if self.pulse is not None:
            self.pulse.renew = renew

    def look_after(self, upkeep: Callable[[], None]) -> None:
        """Have the watchdog thread call `upkeep` about once a second."""
        if self.pulse is not None:
            self.pulse.upkeep = upkeep

    def report(self, report: Mapping[str, Any]) -> Record:
        """Report the state of this frozen rank; returns the record of the next generation.

        Raises PeerLostError if this rank has no place in it.
        """
        self._wish &= ~Wish.CHANGE
        self._unanswered = dict(report)
        self.send("report", report=self._unanswered)
        record = self.await_record()
        while record["record"]["generation"] <= report["generation"]:  # an old record, received twice
            record = self.await_record()
        self._unanswered = None
        return record

    def await_record(self) -> Record:
        """The record of the next generation of this rank."""
        return self._await(("record",), self._record_timeout_s, "the record of the next generation")

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()

    def _await(self, kinds: tuple[str, ...], timeout_s: float, what: str) -> Record:
        """The next record of these kinds; drops outdated records of other kinds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                record = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RendezvousError(f"waited {timeout_s:.0f} s for {what}") from None
            if record["kind"] in kinds:
                return record
            if record["kind"] == "gone":
                self._heard.put(record)
                raise RendezvousError("the launcher of this rank is gone")
            if record["kind"] == "dismiss":
                self._heard.put(record)
                raise PeerLostError(record["why"])

    def _listen(self) -> None:
        handlers: dict[str, Callable[[Record], None]] = {
            "freeze": self._freeze, "wish": self._take_wish, "value": self._take_value,
        }  # fmt: skip
        while True:
            try:
                record: Record = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError, ValueError, TypeError):
                with self._changed:
                    self._is_gone = True
                    self._changed.notify_all()
                self._heard.put({"kind": "gone"})
                return
            handlers.get(record["kind"], self._heard.put)(record)

    def _freeze(self, record: Record) -> None:
        with self._changed:
            self._frozen = max(self._frozen, record["generation"])
            self._changed.notify_all()
        if (report := self._unanswered) is not None:
            with suppress(OSError):
                self.send("report", report=report)
        group = self._group
        is_met = group is not None and group.generation <= self._frozen
        with suppress(OSError):
            self.send("frozen", patience_s=min(group.deadline_s, 3600.0) if group and is_met else _PATIENCE_S)
        if group is not None and is_met:
            group.sever()

    def _take_value(self, record: Record) -> None:
        with self._changed:
            self._values[record["key"]] = record["value"]
            self._changed.notify_all()

    def _take_wish(self, record: Record) -> None:
        self._wish |= Wish[record["what"]]


class StoreOf:
    """The store of one generation; for any thread."""

    def __init__(self, line: LauncherLink, generation: int) -> None:
        self._line, self._generation = line, generation

    def set(self, key: str, value: bytes) -> None:
        self._line.send("set", key=key, value=base64.b64encode(value).decode())

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._line.value(key, self._generation, timeout_s)

    def check(self) -> None:
        self._line.check(self._generation)


class NoLauncher:
    """Replaces LauncherLink if the only rank runs without a launcher; `on_ready` does what a launcher would do then."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self.ready = on_ready

    def present(self, fields: Mapping[str, str]) -> None:
        pass

    def wish(self) -> Wish:
        return Wish.NONE

    def begin(self, generation: int, group: Severable | None) -> None:
        pass

    def show(self, renew: Callable[[Stand], None]) -> None:
        pass
