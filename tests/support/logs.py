"""Captured log records for a test that runs where pytest's fixtures do not reach: in a rank."""

from __future__ import annotations

import logging


class Keeping(logging.Handler):
    """A handler that keeps its records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class KeepingLines(logging.Handler):
    """A handler that adds level and words of its records to `lines`."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")
