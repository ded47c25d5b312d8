"""Output of one rank: its log file, its lines on the terminal, and the prints of the user's code.

Decides which of many ranks writes to the terminal. All log records go to `log/rank-N.txt`; the terminal gets the lines
of rank zero, the warnings of all ranks, and the user's prints once. `log/rank-N.out` gets the prints of the other
ranks, and the text that a stalled terminal does not take. The one idea: rank zero changes with the generations, so
`show` may be called again and again.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hetseq.monitor.patient_stream import PatientWriter, patient
from hetseq.run_directory import RunDirectory, open_appending, open_private, replace_file

logger = logging.getLogger(__name__)

_MOST_BYTES = 8 << 20  # of a file of prints; there are at most two
_UNREAD = "---- the terminal takes no text; what follows was for it\n"


class RankOutput:
    """The outputs of the rank in this slot; call `log_to` before anything is logged."""

    def __init__(self, directory: RunDirectory, slot: int) -> None:
        self._log, self._prints = directory.logs / f"rank-{slot}.txt", directory.logs / f"rank-{slot}.out"
        self._where = f"[rank {slot} {socket.gethostname()}] "
        self._terminal: logging.Handler = logging.NullHandler()
        self._stdout, self._is_shown = -1, True
        self._writer: PatientWriter | None = None
        self._spilt = -1

    def log_to(self, terminal: logging.Handler, closing: ExitStack) -> None:
        """Log to the file, and to the terminal through this handler, until `closing` is closed."""
        root, to_file = logging.getLogger(), _LogFile(self._log)
        closing.callback(to_file.close)
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        terminal.setFormatter(_TerminalFormatter(self._where))
        self._terminal = terminal
        self.show(self._is_shown)
        root.setLevel(logging.INFO)
        for handler in (to_file, terminal):
            root.addHandler(handler)
            closing.callback(root.removeHandler, handler)

    def show(self, is_shown: bool) -> None:
        """Send everything to the terminal, or only warnings."""
        self._terminal.setLevel(logging.INFO if is_shown else logging.WARNING)
        if is_shown == self._is_shown:
            return
        sys.stdout.flush()
        self._is_shown = is_shown
        if self._writer is not None:
            self._writer.is_in_file = not is_shown
        if is_shown:
            os.dup2(self._stdout, 1)
            return
        if self._stdout < 0:
            self._stdout = os.dup(1)
        with open_appending(self._prints) as file:
            os.dup2(file.fileno(), 1)

    def wait_for_no_reader(self) -> None:
        """From now on no print of this process waits for a stalled terminal. Call it before the first `show`."""
        self._writer = PatientWriter(1, self._spill)
        sys.stdout = patient(sys.stdout, self._writer)
        sys.stderr = patient(sys.stderr, PatientWriter(2, self._spill))

    def limit_prints(self) -> None:
        """Keep the file of prints small; call it about once a second, from any thread."""
        with suppress(OSError):
            if self._prints.stat().st_size > _MOST_BYTES:
                _rotate(self._prints)

    def _spill(self, data: bytes) -> None:
        with suppress(OSError):
            if self._spilt < 0:
                self._spilt = open_private(self._prints, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(self._spilt, _UNREAD.encode())
            os.write(self._spilt, data)

    def write_last_words(self, text: str) -> None:
        """Log why this rank ends in its own file only: the launcher tells the terminal why all ranks ended."""
        self._terminal.setLevel(logging.CRITICAL)
        logger.error("this rank is over: %s", text)


def _rotate(path: Path) -> None:
    """Move the content of a file of prints, or the newest part of it, into one older file.

    The file itself stays and is emptied, because processes that the task started hold it open too.
    """
    older = path.with_name(f"{path.name}.1")
    file = open_private(path, os.O_RDWR | os.O_APPEND)
    try:
        end = os.fstat(file).st_size
        replace_file(older, os.pread(file, _MOST_BYTES, max(0, end - _MOST_BYTES)), is_durable=False)
        since = os.pread(file, _MOST_BYTES, end)  # printed in the meantime
        os.ftruncate(file, 0)
        os.write(file, f"---- earlier prints: the last {_MOST_BYTES >> 20} MiB of them are in {older.name}\n".encode())
        os.write(file, since)
    finally:
        os.close(file)


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file with mode 0600 that is created again if it was deleted; its errors are ignored."""

    def _open(self) -> Any:
        return open_appending(Path(self.baseFilename))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, if that is possible."""
        with suppress(OSError):
            super().emit(record)


class _TerminalFormatter(logging.Formatter):
    """Plain lines; a warning begins with rank and node."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{self._where}{record.levelname.lower()}: {text}"
