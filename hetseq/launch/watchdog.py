"""Watchdog: a thread in each rank's process that monitors the training thread and records stacks when it stalls.

Shows that the interpreter runs, writes the stacks of all threads when one phase lasts long, and updates the status file
meanwhile. It makes no decisions: the ranks that wait decide when to give up on this one.

The one idea: stacks are written early, at a quarter of the deadline and then at growing intervals, into memory that the
launcher can read. So they exist when the launcher needs them, whatever has happened to the process by then. A run that
never needs them shows none of this.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hetseq.system.rank_phase import MOST_STACKS_BYTES, Cell, Stand

SHARE = 0.25  # of the deadline, before the stacks are first written
_LEAST_S, _MOST_S = 0.1, 1.0  # between two checks
_LOOKS = 16  # checks per deadline
LOADING_DEADLINE_S = 120.0  # without a group: the user is warned after half of it, and no rank gives up
_TOLD_S = 5.0  # before the status file names the phase that lasts so long


class Watchdog:
    """The watchdog thread. While a phase lasts long, it calls `renew` with the rank's phase, at most once a second."""

    def __init__(self, cell: Cell, deadline: Callable[[], float | None]) -> None:
        self.renew: Callable[[Stand], None] | None = None
        self.upkeep: Callable[[], None] | None = None  # called at each check
        self._cell, self._deadline = cell, deadline
        self._since_s, self._next_s = -1.0, 0.0

    def start(self) -> None:
        self._cell.answer_signal()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        deadline_s = 0.0
        while True:  # as long as the process
            time.sleep(min(max(deadline_s / _LOOKS, _LEAST_S), _MOST_S))
            deadline_s = self.look()

    def look(self) -> float:
        """Check once; returns the current deadline in seconds."""
        given_s = self._deadline()
        deadline_s = LOADING_DEADLINE_S if given_s is None else given_s
        self._cell.beat(deadline_s)
        stand = self._cell.stand()
        if stand.since_s != self._since_s:
            self._since_s, self._next_s = stand.since_s, max(SHARE * deadline_s, _LEAST_S)
            self._cell.forget_stacks()
        elif stand.for_s >= self._next_s and not stand.is_waiting:
            self._next_s = 2 * stand.for_s
            self._dump()
        if stand.for_s >= _TOLD_S and self.renew is not None:
            self.renew(stand)
        if self.upkeep is not None:
            self.upkeep()
        return deadline_s

    def _dump(self) -> None:
        with suppress(OSError):
            if os.fstat(self._cell.descriptor).st_size < 4 * MOST_STACKS_BYTES:
                self._cell.dump()
