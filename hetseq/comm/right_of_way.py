"""The right of way of a step: what else a rank sends waits while the step's own transfers are under way.

Responsible for their count and for that wait. It moves nothing.
"""

from __future__ import annotations

import threading


class RightOfWay:
    """Counts the transfers of the steps that are under way on this rank. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0

    def begin(self) -> None:
        """A transfer of a step begins."""
        with self._changed:
            self._under_way += 1

    def end(self) -> None:
        """One that had begun is over, however it ended."""
        with self._changed:
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()

    def give_way(self, at_most_s: float) -> None:
        """Wait while one is under way, at most so long: who gives way for ever never arrives."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, at_most_s)
