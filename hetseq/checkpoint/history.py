"""`checkpointHistories.csv`: one line for every save, whether it succeeded or not.

Responsible for: appending to and reading that file. Knows nothing of how a checkpoint is written. The one idea: a line
counts once its line feed is there; a last line without one was torn by a crash: the reader skips it, and the
next writer cuts it off.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetseq.system.files import open_no_follow, write_all

HISTORY_NAME = "checkpointHistories.csv"
COLUMNS = (
    "time_utc",
    "run",
    "step",
    "tier",
    "kinds",
    "bytes",
    "parts",
    "world_size",
    "stall_s",
    "write_s",
    "commit_s",
    "duration_s",
    "throughput_MBps",
    "result",
    "error",
)


def append_history(path: Path, row: dict[str, Any], *, columns: Sequence[str] = COLUMNS) -> None:
    """Append one line (rank zero only). Keys outside `columns` are a programming error; OSError if the disk refuses."""
    descriptor = open_no_follow(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        end = _cut_torn_line(descriptor)
        text = _line(row, columns)
        if end == 0:
            text = _line(dict(zip(columns, columns)), columns) + text
        write_all(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read_history(path: Path) -> list[dict[str, str]]:
    """All complete lines, as text by column; an absent file has none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = content[: content.rfind(b"\n") + 1].decode("utf-8", "replace")
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def _cut_torn_line(descriptor: int) -> int:
    """Make the file end with a line feed, or be empty; returns its size."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - 4096)
        block = os.pread(descriptor, end - begin, begin)
        found = block.rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end != size:
        os.ftruncate(descriptor, end)
    return end


def _line(row: dict[str, Any], columns: Sequence[str]) -> str:
    # an error's text may hold line feeds; a line of this file must not
    plain = {key: " ".join(value.split()) if isinstance(value, str) else value for key, value in row.items()}
    buffer = io.StringIO()
    csv.DictWriter(buffer, columns, restval="", extrasaction="raise", lineterminator="\n").writerow(plain)
    return buffer.getvalue()
