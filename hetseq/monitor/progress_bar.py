"""Progress bar with the time left, for long work on a terminal; elsewhere nothing is shown.

Decides when a bar is shown, and removes it before a command prints its answer. The bar is on standard error, so a
program that reads the answer never sees it. rich draws it, and is imported only for work that lasts; without rich there
is no bar.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

#: called with the amount of work done since the last call
Advance = Callable[[int], None]

_SHORT_S = 1.0  # shorter work has no bar


def nobody(_: int) -> None:
    """An `Advance` for work without a bar."""


@contextmanager
def bar(
    what: str,
    total: int,
    *,
    in_bytes: bool = False,
    stream: TextIO | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Yields a function that moves the bar of a task of size `total`, in pieces or in bytes."""
    shown, begun_s, done = _Shown(what, total, in_bytes, sys.stderr if stream is None else stream), now(), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if shown.is_wanted and now() - begun_s >= _SHORT_S:
            shown.move(done)

    try:
        yield advance
    finally:
        shown.end()


class _Shown:
    """The bar on the screen, from the first move on."""

    def __init__(self, what: str, total: int, in_bytes: bool, stream: TextIO) -> None:
        self._what, self._total, self._in_bytes, self._stream = what, total, in_bytes, stream
        self._progress: Progress | None = None
        self.is_wanted = stream.isatty()

    def move(self, done: int) -> None:
        if self._progress is None:
            self._progress = self._drawn()
        if self._progress is not None:
            with suppress(OSError):  # the terminal is gone
                self._progress.update(self._progress.task_ids[0], completed=done)

    def end(self) -> None:
        if self._progress is not None:
            with suppress(OSError):
                self._progress.stop()

    def _drawn(self) -> Progress | None:
        try:
            from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as LeftColumn

            from hetseq.monitor.progress import terminal
        except ImportError:
            self.is_wanted = False
            return None
        count = DownloadColumn() if self._in_bytes else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count, LeftColumn())
        progress = Progress(*columns, console=terminal(self._stream), transient=True)
        progress.add_task(self._what, total=self._total)
        with suppress(OSError):
            progress.start()
        return progress
