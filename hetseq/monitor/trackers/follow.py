"""Follows `metrics.jsonl` and `events.jsonl` for one tracker, over killed processes and resumes.

The one idea: a tracker receives the contents of the files, never of the memory. A cursor in the run directory says how
far it is, so that the rank that writes next continues where the killed one was. Each call of the tracker is followed by
one write of the cursor. A process killed between the two leaves a row that was taken and not noted, and a tracker that
buffers loses rows that were noted. Both are put right by the number of rows that `begin` returns; without it, the one
row is sent twice. The write is no fsync: a machine that crashes may lose the ends of the cursor and of the files.

`metrics.jsonl` repeats rows: a step that was done again after a kill, or work that a loss had interrupted. Such a row
is not sent again. A run that resumes with other options is on a new course: its steps are sent again (`courses.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hetseq.monitor.append_file import TAIL_BYTES
from hetseq.monitor.curves import is_validation
from hetseq.monitor.trackers.courses import Courses
from hetseq.monitor.trackers.protocol import Tracker
from hetseq.run_directory import RunDirectory, open_private

logger = logging.getLogger(__name__)

_WIDTH = 512  # bytes of a cursor: its text is overwritten in one write
_LOG, _ALL = "log/", "*"  # among the names of a step: its numbers of `run.log`; whatever there is


@dataclass(frozen=True)
class Cursor:
    """How far a tracker is: rows it took, bytes of both files, the last step, and what it took of that step.

    `line` is a checksum of the last line before `metrics`: the file may have been replaced by another one.
    """

    rows: int = 0
    metrics: int = 0
    events: int = 0
    line: int = 0
    step: int = -1
    names: list[str] = field(default_factory=list)


class Follower:
    """What one tracker still has to receive. It belongs to one thread."""

    def __init__(self, directory: RunDirectory, label: str, config: dict[str, Any], courses: Courses) -> None:
        self._directory, self._config, self._courses = directory, config, courses
        self._file = CursorFile(directory.status / f"tracker-{label}.json")
        self._cursor = Cursor()
        self.has_begun = False

    def deliver(self, tracker: Tracker) -> bool:
        """Send the new rows and events; False while another process still sends. Raises what the tracker raises.

        A later call continues with the same row.
        """
        if not self.has_begun:
            if not self._is_anything_new():
                return True
            if not self._file.lock():
                return False
            self._begin(tracker)
        for row, after in self._new_rows():
            tracker.row(row)
            self._note(replace(after, rows=after.rows + 1))
        for line, end in _lines(self._directory.events, self._cursor.events):
            event = _parsed(line)
            if event is not None:
                tracker.event(str(event.pop("event", "")), event)
            self._note(replace(self._cursor, events=end))
        return True

    def close(self) -> None:
        self._file.close()

    def _is_anything_new(self) -> bool:
        cursor = self._file.read() or Cursor()
        known = ((self._directory.metrics, cursor.metrics), (self._directory.events, cursor.events))
        return any(_size(path) != done for path, done in known)

    def _begin(self, tracker: Tracker) -> None:
        found = self._file.read()
        cursor = found or Cursor()
        held = tracker.begin(self._directory.run_id, self._config, found is not None)
        if held is not None and held != cursor.rows:
            logger.info(
                "tracker %s has %d rows of this run, and was sent %d: continuing there", type(tracker).__name__, held,
                cursor.rows,
            )  # fmt: skip
            cursor = Cursor(events=cursor.events)
            self._cursor = cursor
            for _, after in self._new_rows():
                if self._cursor.rows == held:
                    break
                self._cursor = replace(after, rows=self._cursor.rows + 1)
            cursor = self._cursor
        elif cursor.metrics and _line_before(self._directory.metrics, cursor.metrics) != cursor.line:
            cursor = replace(cursor, metrics=0)  # the steps say what was sent
        self._note(cursor)
        self.has_begun = True

    def _note(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._file.write(cursor)

    def _new_rows(self) -> Iterator[tuple[dict[str, Any], Cursor]]:
        """Each row that the tracker lacks, and the cursor after it."""
        if _size(self._directory.metrics) < self._cursor.metrics:
            self._cursor = replace(self._cursor, metrics=0)  # deleted, and begun anew
        for line, end in _lines(self._directory.metrics, self._cursor.metrics):
            course = self._courses.beginning_at(end - len(line), after=self._cursor.metrics)
            if course is not None:
                self._cursor = replace(self._cursor, step=course, names=[_ALL])
            after = replace(self._cursor, metrics=end, line=zlib.crc32(line))
            row = _parsed(line)
            told = None if row is None else _news(row, self._cursor)
            if told is None:
                self._cursor = after
                continue
            names = self._cursor.names if told["step"] == self._cursor.step else []
            yield told, replace(after, step=told["step"], names=[*names, *_names(told)])


class CursorFile:
    """A cursor in the run directory, and the lock of the process that sends; the kernel frees it when that dies.

    The rank that wrote before may still live, and be sending. Trouble with the file is warned of once: rows may then be
    sent twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._has_warned = False

    def read(self) -> Cursor | None:
        """The cursor; None if there is none."""
        try:
            return Cursor(**json.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def lock(self) -> bool:
        """Whether no other process sends to this tracker, from now until `close`."""
        try:
            fcntl.flock(self._open(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks
            self._warn(error)
        return True

    def write(self, cursor: Cursor) -> None:
        try:
            os.pwrite(self._open(), json.dumps(asdict(cursor)).encode().ljust(_WIDTH), 0)
        except OSError as error:
            self._warn(error)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = open_private(self._path, os.O_RDWR | os.O_CREAT)
        return self._descriptor

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            logger.warning("cannot use %s (%s): the run continues without it", self._path, error.strerror)
        self._has_warned = True

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _news(row: dict[str, Any], cursor: Cursor) -> dict[str, Any] | None:
    """What of a row the tracker lacks: the row, its numbers of `run.log` alone, or nothing."""
    step = row.get("step")
    if not isinstance(step, int) or step < cursor.step:
        return None
    seen = cursor.names if step == cursor.step else []
    if _ALL in seen:
        return None
    new = [name for name in _names(row) if name not in seen]
    if new == [_LOG]:
        return {key: row[key] for key in ("step", "epoch", "log") if key in row}
    return row if new else None


def _names(row: dict[str, Any]) -> list[str]:
    """The parts of a row that arrive once for each step."""
    if is_validation(row):
        return [str(row.get("subset", "valid"))]
    return ["step/"] * (row.keys() != {"step", "epoch", "log"}) + [_LOG] * ("log" in row)


def _lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """The complete lines of a file from `offset` on, each with the number of bytes up to its end."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line, offset


def _line_before(path: Path, end: int) -> int:
    """The checksum of the line that ends at `end`."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        begin = max(0, end - TAIL_BYTES * 4)
        file.seek(begin)
        return zlib.crc32(file.read(end - begin).splitlines(keepends=True)[-1])
    return 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict):
            return row
    return None


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
