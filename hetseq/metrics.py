"""The numbers of a run: `metrics.jsonl`, `events.jsonl`, TensorBoard, and the display of the steps.

Responsible for every number that leaves the run while it goes on. It computes none of them and talks to no other rank:
the controller hands it finished rows, and only one rank of each run directory writes. How rows are shown is
`progress`' affair.

The one idea: a step never waits for a file system. `step` turns the row into a line of text and puts it into a queue;
one helper thread writes the lines. A disk that hangs or is full delays rows, and they are written when it recovers.

A row of a step has the keys `step, epoch, loss, terms, counts, samples, lr, grad_norm, seconds, generation, world_size,
shares`: `loss` in nats at the parameters before the update (null, with `skipped: true`, for a skipped step); `terms`
each term's sum divided by its global denominator, which stands in `counts`, without the terms that no sample had (count
0); `samples` of this step over all ranks, `shares` of each.

With more than one rank a row also has
* `efficiency`: global speed / sum of what the ranks do alone; null while that is not known;
* `pace`: the rank that the others wait for, as it waits least; null if that is unclear;
* `communication_s`: what every rank spent in communication that computing did not hide, the least wait of all;
* `ranks`, lists by rank: `names` (node/device); of this step the seconds `compute_s` (without any wait for peers),
  `data_s` (waiting for the loader), `wait_s` (for slower peers), `overhead_s` (optimizer, reporting and the like); the
  cost that is reckoned with, `fixed_s` of a step and `per_sample_s` (null while not known); `memory_bytes` in use and
  `memory_limit_bytes` (0: not known).

A row that has `ranks` needs no other row to be understood, so rows may be lost, repeated and handed over one by one. In
a world of more than 64 ranks only every tenth step has them.

A row of a validation has `step, epoch`, keys that begin with `valid_` (`valid_loss`, `valid_accuracy`), and if need be
`subset` (default `valid`) and `best`; it has no `loss`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from hetseq.config import LogConfig
from hetseq.progress import (
    LiveProgress,
    PlainProgress,
    ProgressHandler,
    progress_for,
    samples_per_second,
    validation_numbers,
)
from hetseq.rank_table import Row, rank_speeds
from hetseq.run_directory import RunDirectory, json_line, open_private, utc_now, write_all

logger = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 50_000_000  # what a hanging file system may cost in memory: 100,000 rows of one rank
_MOST_RANKS_IN_FILE, _MOST_RANKS_ON_BOARD = 64, 8  # with more, only every tenth step tells of each rank
_THINNING = 10
_LINES_PER_WRITE = 1000
_CLOSE_DEADLINE_S = 10.0
_TAIL_BYTES = 65536


class Metrics:
    """Takes the rows of a run; every rank makes one and calls it alike, a writer's goes to files and the display.

    `directory` None writes no files. `has_display` (default: every writer) is for a run in several directories: each
    has a writer, and only one of these shows what happens. `total_steps` (None: unknown) is for the display, which uses
    `stream` (default: standard output) and the clock `now` in seconds. Close it on both roads out, or use it as a
    context manager.
    """

    def __init__(
        self,
        directory: RunDirectory | None,
        config: LogConfig,
        *,
        is_writer: bool,
        total_steps: int | None,
        has_display: bool | None = None,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        has_tensorboard: bool = True,
    ) -> None:
        self._recorder: _Recorder | None = None
        self._progress: PlainProgress | LiveProgress | None = None
        if is_writer if has_display is None else has_display:
            self._progress = progress_for(config, stream or sys.stdout, total_steps=total_steps, now=now)
        if is_writer and directory is not None:
            self._recorder = _Recorder(directory, has_tensorboard=has_tensorboard)
        self._sinks: list[_Sink] = [sink for sink in (self._recorder, self._progress) if sink is not None]
        #: for the worker's root logger: records appear above the live line, or on standard error
        self.log_handler: logging.Handler = ProgressHandler(self._progress)

    def set_total(self, steps: int | None) -> None:
        """How many steps the run has, once that is known; for the display."""
        if self._progress is not None:
            self._progress.set_total(steps)

    def step(self, row: Row) -> None:
        """Record and show one committed step; numbers may be Python's, NumPy's or tensors on the CPU. Never blocks."""
        for sink in self._sinks:
            sink.step(row)

    def saving(self, progress: tuple[int, float] | None) -> None:
        """Show from the next step on how far the save of a step is, from 0 to 1; None: no save is under way."""
        if self._progress is not None:
            self._progress.saving = progress

    def validation(self, row: Row) -> None:
        """Record and show the result of one validation."""
        for sink in self._sinks:
            sink.validation(row)

    def event(self, name: str, **fields: Any) -> None:
        """Record that something happened to the run: a join, death, retry, rebalance or save."""
        if self._recorder is not None:
            self._recorder.event(name, fields)

    def close(self, *, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        """Write what is waiting, for `deadline_s` seconds at most, and end the display; may be called twice."""
        try:
            if self._progress is not None:
                self._progress.close()
        finally:
            if self._recorder is not None:
                self._recorder.close(deadline_s=deadline_s)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl` by step, also while it is being written.

    A torn last line is left out. A step has one row, the later of two; a validation has its own, after the step's.
    Raises OSError if the file cannot be read.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for row in _read_lines(path):
        if not isinstance(row.get("step"), int):
            logger.warning("%s: a row without a step is left out", path)
            continue
        rows[row_key(row)] = row
    return [rows[key] for key in sorted(rows)]


def row_key(row: Row) -> tuple[int, str]:
    """What there is one row of: a step, and for a validation its subset; sorts as rows are read."""
    is_validation = any(key.startswith("valid_") for key in row)
    # "" sorts before every subset, so that a step comes before its validations
    return row["step"], str(row.get("subset", "valid")) if is_validation else ""


def read_events(path: Path) -> list[dict[str, Any]]:
    """The rows of an `events.jsonl` in the order of writing, without a torn last line; raises OSError."""
    return list(_read_lines(path))


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield row
        else:
            logger.warning("%s: line %d is not a row and is left out", path, number)


class _Sink(Protocol):
    def step(self, row: Row) -> None: ...

    def validation(self, row: Row) -> None: ...


class _Recorder:
    """The queue and the one thread behind the files."""

    def __init__(self, directory: RunDirectory, *, has_tensorboard: bool) -> None:
        self._directory = directory
        self._has_tensorboard = has_tensorboard
        self._wakeup = threading.Condition()
        # the four below are touched only while holding `_wakeup`
        self._waiting: deque[tuple[str, bytes]] = deque()  # (kind, line); kind: "step", "validation" or "event"
        self._waiting_bytes = 0
        self._is_closing = False
        self._lost = 0
        # A daemon, because a thread inside a hanging write can be neither ended nor waited for.
        self._thread = threading.Thread(target=self._run, name="hetseq-metrics", daemon=True)
        self._thread.start()

    def step(self, row: Row) -> None:
        self._put("step", _thinned(row))

    def validation(self, row: Row) -> None:
        self._put("validation", row)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        self._put("event", {"time_utc": utc_now(), "event": name, **fields})

    def close(self, *, deadline_s: float) -> None:
        with self._wakeup:
            if self._is_closing:
                return
            self._is_closing = True
            self._wakeup.notify()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.warning(
                "%s could not be written within %g s: the last rows of this run may be missing",
                self._directory.metrics,
                deadline_s,
            )

    def _put(self, kind: str, row: Row) -> None:
        line = json_line(row)  # here and not in the thread, so that the caller may go on changing its row
        with self._wakeup:
            is_full = self._waiting_bytes + len(line) > _MOST_WAITING_BYTES
            if not is_full:
                self._waiting.append((kind, line))
                self._waiting_bytes += len(line)
                self._wakeup.notify()
            self._lost += is_full
            is_first_loss, waiting = is_full and self._lost == 1, len(self._waiting)
        if is_first_loss:
            logger.warning(
                "%s has not been writable for %d rows: later rows are lost until it is",
                self._directory.metrics,
                waiting,
            )

    def _run(self) -> None:
        metrics = _AppendFile(self._directory.metrics)
        events = _AppendFile(self._directory.events)
        opening = _Opening(self._directory.tensorboard) if self._has_tensorboard else None
        board: _Board | None = None
        unshown: list[tuple[str, bytes]] = []  # until the board is open
        is_last = False
        while not is_last:
            with self._wakeup:
                self._wakeup.wait_for(lambda: self._waiting or self._is_closing)
                batch, is_last = list(self._waiting), self._is_closing
                self._waiting.clear()
                self._waiting_bytes = 0
            metrics.append(line for kind, line in batch if kind != "event")
            events.append(line for kind, line in batch if kind == "event")
            unshown += batch
            if opening is not None and (is_last or opening.is_over):
                board, opening = opening.board(), None
            if board is not None and not _add_to_board(board, unshown):
                board.file.close()
                board = None
            if opening is None:
                unshown.clear()
        for file in (metrics, events, *([board.file] if board is not None else [])):
            file.close()


def _thinned(row: Row) -> Row:
    """`row`, in most steps of a very large world without what each rank did: 1,000 ranks take 140 kB."""
    is_left_out = "ranks" in row and len(row["shares"]) > _MOST_RANKS_IN_FILE and row["step"] % _THINNING
    return {key: value for key, value in row.items() if key != "ranks"} if is_left_out else row


class _AppendFile:
    """A file that grows by whole records, and keeps in memory what the file system does not take yet.

    Belongs to the helper thread. A record is a line of JSON, or where `is_lines` is false a record of TensorBoard.
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
        """Write `records` after those still pending; trouble is warned about once and tried again next time."""
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
                    "cannot write %s (%s): the run goes on, and the last rows (up to %d MB) are written once this works"
                    " again",
                    self.path,
                    error.strerror,
                    _MOST_WAITING_BYTES // 1_000_000,
                )
            self._has_warned = True
            self._close_descriptor()
            while self._pending_bytes > _MOST_WAITING_BYTES:
                self._forget_first()
                self._lost += 1

    def close(self) -> None:
        """Try once more to write what is pending, and close."""
        self.append(())
        if self._pending or self._lost:
            logger.warning("%s lacks %d rows of this run", self.path, len(self._pending) + self._lost)
        self._close_descriptor()

    def _write_pending(self) -> None:
        if self._descriptor is None:
            self._descriptor = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._cut_torn_tail(self._descriptor)
        while self._pending:
            records = list(itertools.islice(self._pending, _LINES_PER_WRITE))
            self._write(self._descriptor, b"".join(records))
            for _ in records:
                self._forget_first()

    def _forget_first(self) -> None:
        self._pending_bytes -= len(self._pending.popleft())

    def _write(self, descriptor: int, data: bytes) -> None:
        """Append all of `data` or nothing of it."""
        start = os.lseek(descriptor, 0, os.SEEK_END)
        try:
            write_all(descriptor, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            raise
        self._good_bytes = start + len(data)

    def _cut_torn_tail(self, descriptor: int) -> None:
        """Cut what a killed writer, or a failed write, left of a record at the end."""
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
        begin = max(0, end - _TAIL_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


class _Opening:
    """A thread that opens the TensorBoard log: its import takes seconds, for which no row is to wait."""

    def __init__(self, folder: Path) -> None:
        self._found: list[_Board | None] = []
        self._thread = threading.Thread(
            target=lambda: self._found.append(_open_board(folder)), name="hetseq-tensorboard", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def board(self) -> _Board | None:
        """The log; waits for it. None where there is none."""
        self._thread.join()
        return self._found[0] if self._found else None


def _open_board(folder: Path) -> _Board | None:
    """A TensorBoard log, or None with a line that says why not; takes the time of an import."""
    try:
        return _Board(folder)
    except ImportError as error:
        logger.warning("no TensorBoard log: %s (metrics.jsonl holds the same numbers)", error)
    except Exception as error:  # a broken installation fails in many ways, and none of them may end a run
        logger.warning("no TensorBoard log: importing tensorboard failed with %s: %s", type(error).__name__, error)
    return None


def _add_to_board(board: _Board, batch: list[tuple[str, bytes]]) -> bool:
    """Whether the rows of `batch` were taken; a row that TensorBoard cannot show ends its log, not the run."""
    try:
        board.add([(kind, json.loads(line)) for kind, line in batch if kind != "event"])
    except Exception as error:  # as above
        logger.warning("the TensorBoard log ends here: %s: %s", type(error).__name__, error)
        return False
    return True


class _Board:
    """One event file, in TensorBoard's own record format, through the same writer as the rows.

    Not `SummaryWriter`: it starts a thread of its own, which a full disk ends for good. Raises ImportError.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary, self._records = Event, SessionLog, Summary, RecordWriter
        # TensorBoard looks for this form and reads the files of a run in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = _AppendFile(folder / name, is_lines=False)
        self._is_new = True
        self._has_steps = False

    def add(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        """Add the numbers of `rows`: (kind, row)."""
        events: list[Any] = []
        if rows and self._is_new:
            events.append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
            self._is_new = False
        for kind, row in rows:
            if kind == "step" and not self._has_steps:
                # Tells TensorBoard to forget what an earlier start of this run logged from here on.
                session = self._session(status=self._session.START)
                events.append(self._event(wall_time=time.time(), step=row["step"], session_log=session))
                self._has_steps = True
            numbers = _step_numbers(row) if kind == "step" else _validation_numbers(row)
            values = [
                self._summary.Value(tag=tag, simple_value=number)
                for tag, number in numbers
                if isinstance(number, (int, float))
            ]
            events.append(self._event(wall_time=time.time(), step=row["step"], summary=self._summary(value=values)))
        self.file.append(self._record(event) for event in events)

    def _record(self, event: Any) -> bytes:
        buffer = io.BytesIO()
        self._records(buffer).write(event.SerializeToString())
        return buffer.getvalue()


def _step_numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """Tags and numbers of a step; a term that no sample had (count 0) has no number to show."""
    for key in ("loss", "lr", "grad_norm"):
        yield f"train/{key}", row.get(key)
    yield "train/samples_per_s", samples_per_second(row)
    terms, counts = row.get("terms") or {}, row.get("counts") or {}
    for term, number in terms.items():
        if term != "loss" and counts.get(term) != 0:  # a term called loss is the loss
            yield f"train/{term}", number
    for key in ("efficiency", "communication_s"):
        yield f"train/{key}", row.get(key)
    if "ranks" in row and (len(row["shares"]) <= _MOST_RANKS_ON_BOARD or row["step"] % _THINNING == 0):
        yield from _rank_numbers(row)  # 0.03 ms of this thread for each rank


def _rank_numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """Tags and numbers of each rank; what is not known has no number to show."""
    ranks = row["ranks"]
    size = len(row["shares"])
    unknown = [None] * size
    speeds = [speed if math.isfinite(speed) else None for speed in rank_speeds(row).tolist()]
    memory_gib = [used and used / 2**30 for used in ranks.get("memory_bytes") or unknown]
    by_name = {"share": row["shares"], "samples_per_s": speeds, "memory_gib": memory_gib}
    by_name |= {name: ranks.get(name) or unknown for name in ("compute_s", "wait_s", "data_s")}
    for rank in range(size):
        for name, numbers in by_name.items():
            yield f"ranks/{rank}/{name}", numbers[rank]


def _validation_numbers(row: Row) -> Iterator[tuple[str, Any]]:
    subset = row.get("subset", "valid")
    for name, number in validation_numbers(row):
        yield f"valid/{subset}/{name}", number
