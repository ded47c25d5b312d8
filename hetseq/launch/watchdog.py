"""A thread of a rank's process that looks whether the training thread still moves, and keeps what helps to say why not.

Responsible for showing that the interpreter runs, for the stacks of all threads when one phase lasts long, and for a
status file that says so meanwhile. Refuses to judge: who gives up on whom is for those who wait.

The one idea: stacks are written early, at a quarter of the time after which the others give up, and then ever more
rarely, into memory that the launcher can read. So they are there when somebody asks, whatever has become of the process
by then; and nothing of it is seen in a run in which nobody asks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hetseq.system.rank_phase import MOST_STACKS_BYTES, Cell, Stand

SHARE = 0.25  # of the deadline, until the stacks are written for the first time
_LEAST_S, _MOST_S = 0.1, 1.0  # between two looks
_LOOKS = 16  # in a deadline
LOADING_DEADLINE_S = 120.0  # before there is a group: half of it is told to the user, and nobody gives up
_TOLD_S = 5.0  # until the status file says what lasts so long


class Watchdog:
    """The thread; `renew` is called with where the rank stands while a phase lasts long, once a second at most."""

    def __init__(self, cell: Cell, deadline: Callable[[], float | None]) -> None:
        self.renew: Callable[[Stand], None] | None = None
        self.upkeep: Callable[[], None] | None = None  # done at each look
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
        """Look once; gives the deadline that holds."""
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
