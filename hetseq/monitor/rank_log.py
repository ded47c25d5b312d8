"""What one rank lets be seen: its log file, its lines on the terminal, and what the user's code prints.

Responsible for: who of many ranks speaks. Everything goes into `log/rank-N.txt`; the terminal gets the lines of rank
zero and the warnings of all, the user's prints once, those of the other ranks going to `log/rank-N.out`. Refuses to
know what is said. The one idea: who is rank zero changes with the generations, so it can be asked for again and again.
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

from hetseq.run_directory import RunDirectory, open_appending

logger = logging.getLogger(__name__)


class RankOutput:
    """The outputs of the rank in this slot; `log_to` before anything is logged."""

    def __init__(self, directory: RunDirectory, slot: int) -> None:
        self._log, self._prints = directory.logs / f"rank-{slot}.txt", directory.logs / f"rank-{slot}.out"
        self._where = f"[rank {slot} {socket.gethostname()}] "
        self._terminal: logging.Handler = logging.NullHandler()
        self._stdout, self._is_shown = -1, True

    def log_to(self, terminal: logging.Handler, closing: ExitStack) -> None:
        """Log into the file, and to the terminal by this handler, until `closing` is closed."""
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
        """Let the terminal have all, or warnings alone."""
        self._terminal.setLevel(logging.INFO if is_shown else logging.WARNING)
        if is_shown == self._is_shown:
            return
        sys.stdout.flush()
        self._is_shown = is_shown
        if is_shown:
            os.dup2(self._stdout, 1)
            return
        if self._stdout < 0:
            self._stdout = os.dup(1)
        with open_appending(self._prints) as file:
            os.dup2(file.fileno(), 1)

    def write_last_words(self, text: str) -> None:
        """Say why this rank is over in its log alone: the terminal hears from its launcher what all died of."""
        self._terminal.setLevel(logging.CRITICAL)
        logger.error("this rank is over: %s", text)


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file with mode 0600 that is made anew if it was deleted; trouble with it is nobody's trouble."""

    def _open(self) -> Any:
        return open_appending(Path(self.baseFilename))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, or not."""
        with suppress(OSError):
            super().emit(record)


class _TerminalFormatter(logging.Formatter):
    """Plain lines, with rank and node before a warning."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{self._where}{record.levelname.lower()}: {text}"
