"""The thread of a tracker: no step waits for it, and what it raises ends no run."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from hetseq.errors import EXIT_STOPPED
from hetseq.monitor.trackers.protocol import Tracker

logger = logging.getLogger(__name__)

_MOST_WAITING = 100_000  # rows; of one rank they take 50 MB
_IDLE_S = 60.0  # a look without being woken
_BUSY_S = 0.1  # before another look whether the rank that sent before has ended
_PAUSES_S = (1.0, 60.0)  # before a failed call is made again: the first, and the longest


class Source(Protocol):
    """What a tracker is to receive: `follow.Follower`, or `Passing`."""

    has_begun: bool

    def deliver(self, tracker: Tracker) -> bool:
        """Call the tracker with all that is new; False if that is another process's until it ends."""
        ...

    def close(self) -> None:
        """After the end of the tracker."""
        ...


class Passing:
    """Rows as they are written, for a tracker that begins with this process: TensorBoard."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waiting: deque[tuple[str, bytes]] = deque()  # one thread appends, the tracker's takes
        self._has_warned = False

    def put(self, batch: Sequence[tuple[str, bytes]]) -> None:
        """Take lines, each with its kind; beyond a limit of memory they are dropped."""
        if len(self._waiting) + len(batch) <= _MOST_WAITING:
            self._waiting.extend(batch)
        elif not self._has_warned:
            logger.warning("TensorBoard has not been writable for %d rows: it lacks later ones", len(self._waiting))
            self._has_warned = True

    def deliver(self, tracker: Tracker) -> bool:
        if not self.has_begun:
            tracker.begin("", {}, False)
            self.has_begun = True
        while self._waiting:
            kind, line = self._waiting.popleft()
            row: dict[str, Any] = json.loads(line)
            if kind == "event":
                tracker.event(row.pop("event"), row)
            else:
                tracker.row(row)
        return True

    def close(self) -> None:
        pass


class TrackerThread:
    """Calls one tracker, from its beginning to its end."""

    def __init__(self, tracker: Tracker, name: str, source: Source) -> None:
        self._tracker, self._name, self._source = tracker, name, source
        self._wakeup = threading.Condition()
        self._is_woken, self._is_closing = True, False
        self._is_busy = False  # another process still sends
        self._code = EXIT_STOPPED
        self._has_warned = False
        # A daemon, because a call that hangs can be neither stopped nor joined.
        self._thread = threading.Thread(target=self._run, name=f"hetseq-{name.partition(':')[0]}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something new."""
        with self._wakeup:
            self._is_woken = True
            self._wakeup.notify()

    def close(self, code: int) -> None:
        """Send the rest, and end; `join` waits for it."""
        with self._wakeup:
            self._is_closing, self._code = True, code
            self._wakeup.notify()

    def join(self, deadline_s: float) -> None:
        """Wait for the end, until `deadline_s` of the monotonic clock at most."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("tracker %s does not end: it may lack the last rows until the next start", self._name)

    def _run(self) -> None:
        pause_s, is_last = 0.0, False
        while not is_last:
            with self._wakeup:
                if pause_s:
                    self._wakeup.wait_for(lambda: self._is_closing and not self._is_busy, pause_s)
                else:
                    self._wakeup.wait_for(lambda: self._is_woken or self._is_closing, _IDLE_S)
                self._is_woken, is_last = False, self._is_closing
            self._is_busy = False
            try:
                self._is_busy, pause_s = not self._source.deliver(self._tracker), 0.0
            except (
                BaseException
            ) as error:  # of any library, or of a user's own class, in a thread that no other looks after
                self._warn(error)
                pause_s = min(max(2 * pause_s, _PAUSES_S[0]), _PAUSES_S[1])
            if self._is_busy:
                pause_s, is_last = _BUSY_S, False
        if self._source.has_begun:
            try:
                self._tracker.end(self._code)
            except BaseException as error:
                self._warn(error)
        self._source.close()

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned:
            logger.warning(
                "tracker %s failed with %s: %s; the run continues without it, and what it lacks is sent later, at the"
                " latest by the next start",
                self._name, type(error).__name__, error,
            )  # fmt: skip
        self._has_warned = True
