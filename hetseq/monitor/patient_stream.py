"""Standard output and standard error of a rank that never block for long on a stalled reader.

A stopped terminal (Ctrl-S) or a full pipe blocks a write for hours, in the middle of a step. Here a write waits one
second at most; after that, text goes elsewhere at once until the reader takes text again. Writes of C code and of other
programs do not pass through here.
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

_PATIENCE_S = 1.0  # with a stalled reader; less than any deadline of a step
_PIECE_BYTES = 256  # of a write that might block: a terminal with any room mostly has room for this much


class PatientWriter(io.RawIOBase):
    """Writes bytes to the descriptor of a standard stream; `spill` gets the bytes that its reader does not take."""

    def __init__(self, descriptor: int, spill: Callable[[bytes], None]) -> None:
        self._descriptor, self._spill = descriptor, spill
        self._is_stuck, self._closing = False, ExitStack()
        self._send = _without_waiting(descriptor, self._closing)
        self.is_in_file = False  # the descriptor is redirected to a file for now

    def write(self, data: ReadableBuffer) -> int:
        """Write all of `data`, or give the rest to `spill`. Raises OSError if the reader is gone."""
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
        """Close what this writer opened; the descriptor stays open."""
        self._closing.close()
        super().close()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def patient(stream: TextIO, writer: PatientWriter) -> TextIO:
    """A text stream in place of `stream` that writes through `writer`, line by line."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(writer), encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )  # fmt: skip


def _without_waiting(descriptor: int, closing: ExitStack) -> Callable[[memoryview], int]:
    """A function that writes to the file behind a descriptor, and raises BlockingIOError instead of waiting."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return lambda data: _to_file(descriptor, data)
    if stat.S_ISSOCK(kind):
        line = closing.enter_context(socket.socket(fileno=os.dup(descriptor)))
        return lambda data: line.send(data, socket.MSG_DONTWAIT)
    with suppress(OSError):  # opened again: O_NONBLOCK belongs to an opening, and other processes share the first one
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        closing.callback(os.close, own)
        return lambda data: os.write(own, data)
    return lambda data: _a_piece(descriptor, data)


def _to_file(descriptor: int, data: memoryview) -> int:
    with suppress(OSError):  # a full disk must not end a rank that prints
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
