"""Standard output and standard error of a rank, which do not wait for whoever reads them.

A terminal that is stopped (Ctrl-S) and a pipe that is full make a write wait, for hours, in the middle of a step. Here
a write waits a second at most; from then on, until the reader takes text again, it goes elsewhere at once. What C code
and other programs write does not pass here.
"""

from __future__ import annotations

import io
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PATIENCE_S = 1.0  # with a reader that takes nothing; less than any deadline of a step
_PIECE_BYTES = 256  # of a write that might wait: a terminal that has room at all has mostly room for that


class PatientWriter(io.RawIOBase):
    """Bytes for the descriptor of a standard stream; `spill` gets what its reader does not take."""

    def __init__(self, descriptor: int, spill: Callable[[bytes], None]) -> None:
        self._descriptor, self._spill = descriptor, spill
        self._is_stuck, self._closing = False, ExitStack()
        self._send = _without_waiting(descriptor, self._closing)
        self.is_in_file = False  # the descriptor leads to a file meanwhile, and not to where it led at first

    def write(self, data: ReadableBuffer) -> int:
        """Write all of it, or give the rest to `spill`. Raises OSError for a reader that has gone."""
        left = memoryview(data).cast("B")
        size, deadline = len(left), time.monotonic() + _PATIENCE_S
        while left:
            try:
                left = left[_to_file(self._descriptor, left) if self.is_in_file else self._send(left) :]
                self._is_stuck = False
            except BlockingIOError:
                if self._is_stuck or not _has_room(self._descriptor, deadline - time.monotonic()):
                    self._is_stuck = True
                    self._spill(bytes(left))
                    break
        return size

    def close(self) -> None:
        """Give back what was opened here; the descriptor stays open."""
        self._closing.close()
        super().close()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def patient(stream: TextIO, writer: PatientWriter) -> TextIO:
    """A text stream in place of `stream` that writes by `writer`, line by line."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(writer), encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )  # fmt: skip


def _without_waiting(descriptor: int, closing: ExitStack) -> Callable[[memoryview], int]:
    """What writes to where a descriptor leads, and raises BlockingIOError where that would wait."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return lambda data: _to_file(descriptor, data)
    if stat.S_ISSOCK(kind):
        line = closing.enter_context(socket.socket(fileno=os.dup(descriptor)))
        return lambda data: line.send(data, socket.MSG_DONTWAIT)
    with suppress(OSError):  # opened anew: whether writes wait is said of each opening, and others share the first one
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        closing.callback(os.close, own)
        return lambda data: os.write(own, data)
    return lambda data: _a_piece(descriptor, data)


def _to_file(descriptor: int, data: memoryview) -> int:
    with suppress(OSError):  # a full disk is no reason to end a rank that prints
        return os.write(descriptor, data)
    return len(data)


def _a_piece(descriptor: int, data: memoryview) -> int:
    if not _has_room(descriptor, 0.0):
        raise BlockingIOError
    return os.write(descriptor, data[:_PIECE_BYTES])


def _has_room(descriptor: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(1000 * max(0.0, seconds)))
