"""An append-only file of records that survives trouble with its file system.

Appends whole records, cuts the torn record of a killed writer, and keeps in memory the records that cannot be written
now. It belongs to one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from hetseq.run_directory import open_private
from hetseq.system.files import write_all

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 50_000_000  # memory that a hanging file system may cost: 100,000 rows of one rank
TAIL_BYTES = 65536
_LINES_PER_WRITE = 1000


class AppendFile:
    """A file that grows by whole records and keeps in memory the records that cannot be written yet.

    A record is a line of JSON, or a TensorBoard record if `is_lines` is false. A file of lines that was deleted is
    created again.
    """

    def __init__(self, path: Path, *, is_lines: bool = True) -> None:
        self.path = path
        self._is_lines = is_lines
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._lost = 0
        self._descriptor: int | None = None
        self._good_bytes = 0
        self._has_warned = False

    def append(self, records: Iterable[bytes]) -> None:
        """Write the pending records, then `records`; a failed write warns once and is tried again next time."""
        for record in records:
            self._pending.append(record)
            self._pending_bytes += len(record)
        if not self._pending:
            return
        try:
            self._write_pending()
        except OSError as error:
            if not self._has_warned:
                logger.warning(
                    "cannot write %s (%s): training continues; up to %d MB of the last rows wait in memory until it"
                    " can be written again",
                    self.path,
                    error.strerror,
                    MOST_WAITING_BYTES // 1_000_000,
                )
            self._has_warned = True
            self._close_descriptor()
            while self._pending_bytes > MOST_WAITING_BYTES:
                self._forget_first()
                self._lost += 1

    def end(self) -> int:
        """The size of the file in bytes once what is pending has been written."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size + self._pending_bytes
        return self._pending_bytes

    def close(self) -> None:
        """Try once more to write what is pending, and close."""
        self.append(())
        if self._pending or self._lost:
            logger.warning("%s lacks %d rows of this run", self.path, len(self._pending) + self._lost)
        self._close_descriptor()

    def _write_pending(self) -> None:
        if self._descriptor is not None and self._is_lines and not self._is_there(self._descriptor):
            self._close_descriptor()  # the file was deleted or replaced
        if self._descriptor is None:
            self._descriptor = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._cut_torn_tail(self._descriptor)
        while self._pending:
            records = list(itertools.islice(self._pending, _LINES_PER_WRITE))
            self._write(self._descriptor, b"".join(records))
            for _ in records:
                self._forget_first()

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _forget_first(self) -> None:
        self._pending_bytes -= len(self._pending.popleft())

    def _write(self, descriptor: int, data: bytes) -> None:
        """Append all of `data` or none of it."""
        start = os.lseek(descriptor, 0, os.SEEK_END)
        try:
            write_all(descriptor, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            raise
        self._good_bytes = start + len(data)

    def _cut_torn_tail(self, descriptor: int) -> None:
        """Cut the partial record that a killed writer, or a failed write, left at the end."""
        size = os.fstat(descriptor).st_size
        good = _end_of_last_line(descriptor, size) if self._is_lines else min(self._good_bytes, size)
        if good < size:
            os.ftruncate(descriptor, good)
            logger.info("%s: cut %d bytes of a torn last line", self.path, size - good)

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _end_of_last_line(descriptor: int, size: int) -> int:
    """The number of bytes up to and including the last newline."""
    end = size
    while end > 0:
        begin = max(0, end - TAIL_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
