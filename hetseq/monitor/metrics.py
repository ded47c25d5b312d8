"""Metrics of a run: `metrics.jsonl`, `events.jsonl`, TensorBoard, and the display of the steps.

Writes and shows every number that a run reports while it trains. It computes none of them and talks to no other rank:
the controller hands it finished rows, and only one rank of each run directory writes. `progress` decides how rows are
shown.

The one idea: a step never waits for a file system. `step` turns the row into a line of text and puts it into a queue;
one helper thread writes the lines. A disk that hangs or is full delays rows, and they are written when it recovers.

A row of a step has the keys `step, epoch, loss, terms, counts, samples, lr, grad_norm, seconds, generation, world_size,
shares`: `loss` in nats at the parameters before the update (null, with `skipped: true`, for a skipped step); `terms`
each term's sum divided by its global denominator, which is in `counts`, without the terms that no sample had (count 0);
`samples` of this step over all ranks, `shares` of each; with fp16 `loss_scale`, the scale of the next step.

With more than one rank a row also has
* `efficiency`: global speed / sum of the ranks' speeds alone; null while it is unknown;
* `pace`: the rank that the others wait for, which waits least; null if that is unclear;
* `communication_s`: time that every rank spent in communication not hidden by computing, the least wait of all;
* `ranks`, lists by rank: `names` (node/device); of this step the seconds `compute_s` (without any wait for peers),
  `data_s` (waiting for the loader), `wait_s` (for slower peers), `overhead_s` (optimizer, reporting and the like); the
  cost used for the shares, `fixed_s` of a step, `per_sample_s`, and `per_micro_batch_s` of each micro-batch of at
  most `micro_batch` samples (null while unknown; `micro_batch` is also given if the other two are the whole cost);
  `memory_bytes` in use and `memory_limit_bytes` (0: unknown). With `--shard-model state` also `owned_bytes` of the
  state, `sent_bytes` and `received_bytes` of the step, and if there is a plan `planned_bytes`, the memory that it
  expects a rank to use.

A row with `ranks` can be read without any other row, so rows may be lost, repeated and handed over one by one. In a
world of more than 64 ranks only every tenth step has them.

A validation row has `step, epoch`, keys that begin with `valid_` (`valid_loss`, `valid_accuracy`), and optionally
`subset` (default `valid`) and `best`; it has no `loss`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from hetseq.config.sections import LogConfig
from hetseq.errors import EXIT_FAILED, EXIT_STOPPED
from hetseq.monitor.advice import Advice
from hetseq.monitor.append_file import MOST_WAITING_BYTES, TAIL_BYTES, AppendFile
from hetseq.monitor.progress import LiveProgress, PlainProgress, ProgressHandler, progress_for
from hetseq.monitor.rank_table import Row
from hetseq.monitor.tensorboard import Hyperparameters, TensorBoard
from hetseq.monitor.trackers.courses import Courses
from hetseq.monitor.trackers.follow import Follower
from hetseq.monitor.trackers.protocol import Tracked
from hetseq.monitor.trackers.thread import Passing, TrackerThread
from hetseq.run_directory import RunDirectory, json_line, utc_now

logger = logging.getLogger(__name__)

_MOST_RANKS_IN_FILE = 64  # with more, only every tenth step has the numbers of each rank
_THINNING = 10
_REMEMBERED = 20
_CLOSE_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Recording:
    """The files that a writer writes: those in `directory` (None: no files), and TensorBoard's with `hparams`."""

    directory: RunDirectory | None
    has_tensorboard: bool = True
    hparams: Hyperparameters | None = None


@dataclass(frozen=True)
class Display:
    """How steps are shown: in the format given by `config`, on `stream` (default: standard output).

    `total_steps` is None while it is unknown. `now` is the clock in seconds.
    """

    config: LogConfig
    total_steps: int | None = None
    stream: TextIO | None = None
    now: Callable[[], float] = time.monotonic


class Metrics:
    """Takes the rows of a run. Every rank makes one and calls it alike; a writer sends rows to files and the display.

    A run in several directories has one writer for each, and only one of them has `has_display` (default: every
    writer). Close it after success and failure, or use it as a context manager.
    """

    def __init__(
        self, recording: Recording, display: Display, *, is_writer: bool, has_display: bool | None = None
    ) -> None:
        self._last: deque[Row] = deque(maxlen=_REMEMBERED)
        self._advised: set[str] = set()
        self._best: Row | None = None
        self._recorder: _Recorder | None = None
        self._progress: PlainProgress | LiveProgress | None = None
        self._recording, self._display, self._total_steps = recording, display, display.total_steps
        self._trackers: tuple[Tracked, ...] = ()
        self._config: dict[str, Any] = {}
        self._ending: list[TrackerThread] = []
        #: the exit code of this rank as far as it is known, for the trackers
        self.code = EXIT_FAILED
        #: for the worker's root logger: records appear above the live line, or on standard error
        self.log_handler = ProgressHandler(None)
        self.lead(is_writer=is_writer, has_display=has_display)

    def lead(self, *, is_writer: bool, has_display: bool | None = None) -> None:
        """Start or stop writing and showing: the next generation may have another writer."""
        has_display = is_writer if has_display is None else has_display
        if has_display and self._progress is None:
            stream, now = self._display.stream or sys.stdout, self._display.now
            self._progress = progress_for(self._display.config, stream, total_steps=self._total_steps, now=now)
        elif not has_display and self._progress is not None:
            self._progress.close()
            self._progress = None
        self.log_handler.progress = self._progress
        directory = self._recording.directory
        if is_writer and self._recorder is None and directory is not None:
            self._recorder = _Recorder(directory, self._recording)
        elif not is_writer and self._recorder is not None:
            self._recorder.close(deadline_s=_CLOSE_DEADLINE_S, code=EXIT_STOPPED)
            self._ending += self._recorder.ending  # the next generation does not wait for trackers
            self._recorder = None
        self._has_display = has_display
        self._follow()
        self._sinks: list[_Sink] = [sink for sink in (self._recorder, self._progress) if sink is not None]

    def track(self, trackers: Sequence[Tracked], config: Mapping[str, Any]) -> None:
        """Also send rows and events to `trackers`, from the rank that writes and shows; `config` is told to them."""
        self._trackers, self._config = tuple(trackers), {**config}
        self._follow()

    def _follow(self) -> None:
        if self._recorder is not None:  # one of several writers
            self._recorder.follow(self._trackers if self._has_display else (), self._config)

    def goes_back(self, step: int) -> None:
        """The rows from now on follow `step`, and differ from earlier rows of the steps after it."""
        if self._recorder is not None:
            self._recorder.goes_back(step)

    def set_total(self, steps: int | None) -> None:
        """Set the number of steps of the run, once it is known; for the display."""
        self._total_steps = steps
        if self._progress is not None:
            self._progress.set_total(steps)

    def step(self, row: Row) -> None:
        """Record and show one committed step; numbers may be Python's, NumPy's or tensors on the CPU. Never blocks."""
        self._last.append({key: value for key, value in row.items() if key != "ranks"})
        for sink in self._sinks:
            sink.step(row)

    def hold(self) -> None:
        """Show the rows that come from now on at once, but write them only after `release`; events are written."""
        if self._recorder is not None:
            self._recorder.hold()

    def release(self) -> None:
        """Write the rows that were held, and later ones as they come."""
        if self._recorder is not None:
            self._recorder.release()

    def last_rows(self) -> tuple[Row, ...]:
        """The last rows, without the numbers of each rank, for the successor of a writer that died."""
        return tuple(self._last)

    def complete(self, rows: Sequence[Row], *, step: int | None = None) -> None:
        """Remember the last rows and write those missing in the file: its writer may have died before writing them.

        Rows that are held of steps after `step` are dropped, since the run makes these steps again.
        """
        known = {row_key(row) for row in self._last}
        self._last.extend(row for row in rows if row_key(row) not in known)
        self._last = deque(sorted(self._last, key=row_key), maxlen=_REMEMBERED)
        directory = self._recording.directory
        if self._recorder is not None and directory is not None:
            there = _last_keys(directory.metrics) | self._recorder.keep_held(until=step)
            for row in rows:
                if row_key(row) not in there:
                    (self._recorder.step if "loss" in row else self._recorder.validation)(row)

    def best(self, step: int | None = None) -> Row | None:
        """The row of the best validation, of this start or of earlier ones, or of the one after `step`; None if there
        is none."""
        directory = self._recording.directory
        if self._best is not None and step in (None, self._best["step"]):
            return self._best
        return best_row(directory.metrics, step) if directory is not None else None

    def saving(self, progress: tuple[int, float] | None) -> None:
        """Show the progress (step, 0 to 1) of a save from the next step on; None: no save is in progress."""
        if self._progress is not None:
            self._progress.saving = progress

    def validation(self, row: Row) -> None:
        """Record and show the result of one validation."""
        self._last.append(dict(row))
        if row.get("best"):
            self._best = dict(row)
        for sink in self._sinks:
            sink.validation(row)

    def event(self, name: str, **fields: Any) -> None:
        """Record an event of the run: a join, death, retry, rebalance or save."""
        if self._recorder is not None:
            self._recorder.event(name, fields)

    def advise(self, advice: Sequence[Advice], *, step: int) -> None:
        """Show `advice` after `step`; advice that is new is also recorded as an event. It is a hint, so it is no log
        record."""
        if self._progress is not None:
            self._progress.advice = tuple(one.text for one in advice)
        for one in advice:
            if one.key not in self._advised:
                self._advised.add(one.key)
                self.event("advice", step=step, about=one.key, text=one.text)

    def close(self, *, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        """Write the queued rows, for `deadline_s` seconds at most, and end the display; may be called twice.

        Trackers get as long again.
        """
        try:
            if self._progress is not None:
                self._progress.close()
        finally:
            if self._recorder is not None:
                self._recorder.close(deadline_s=deadline_s, code=self.code)
                self._ending += self._recorder.ending
                self._recorder.ending.clear()
            until_s = time.monotonic() + deadline_s
            for tracker in self._ending:
                tracker.join(until_s)
            self._ending.clear()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl` by step; the run may still be writing it.

    A torn last line is left out. Of two rows of a step the later counts; a validation's row follows that step's row.
    Raises OSError if the file cannot be read.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for row in _read_lines(path):
        if not isinstance(row.get("step"), int):
            logger.warning("%s: a row without a step is left out", path)
            continue
        rows[row_key(row)] = row
    return [rows[key] for key in sorted(rows)]


def best_row(path: Path, step: int | None = None) -> Row | None:
    """The newest row of a `metrics.jsonl` that is marked as the best validation, or that of `step`; None if there is
    none."""
    found = None
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            if b'"best"' in line:  # few lines are validations, and parsing is slow
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    found = row if row.get("best") and step in (None, row["step"]) else found
    return found


def row_key(row: Row) -> tuple[int, str]:
    """The identity of a row: its step, and the subset of a validation; sorts in the order of reading."""
    is_validation = any(key.startswith("valid_") for key in row)
    # "" sorts before every subset, so that a step comes before its validations
    return row["step"], str(row.get("subset", "valid")) if is_validation else ""


def read_events(path: Path) -> list[dict[str, Any]]:
    """The rows of an `events.jsonl` in file order, without a torn last line; raises OSError."""
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


def _last_keys(path: Path) -> set[tuple[int, str]]:
    """The keys of the last lines of a `metrics.jsonl`; empty if it cannot be read."""
    found = set()
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _REMEMBERED * TAIL_BYTES))
        for line in file.read().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                found.add(row_key(json.loads(line)))
    return found


class _Sink(Protocol):
    def step(self, row: Row) -> None: ...

    def validation(self, row: Row) -> None: ...


class _Recorder:
    """The queue and the thread that writes the files, and the threads of the trackers."""

    def __init__(self, directory: RunDirectory, recording: Recording) -> None:
        self._directory = directory
        self._courses = Courses(directory.status)
        self._passing = Passing()
        self._trackers: dict[str, TrackerThread] = {}
        #: threads of trackers that have been told to end
        self.ending: list[TrackerThread] = []
        if recording.has_tensorboard:
            board = TensorBoard(directory.tensorboard, recording.hparams)
            self._trackers["tensorboard"] = TrackerThread(board, "tensorboard", self._passing)
        self._wakeup = threading.Condition()
        # those below are touched only while holding `_wakeup`
        self._waiting: deque[tuple[str, bytes]] = deque()  # (kind, line); kind: step, validation, event or course
        self._held: list[tuple[str, bytes]] = []  # the same, to be written after the next `release`
        self._is_holding = False
        self._waiting_bytes = 0  # of both
        self._is_closing = False
        self._lost = 0
        # A daemon, because a thread inside a hanging write can be neither stopped nor joined.
        self._thread = threading.Thread(target=self._run, name="hetseq-metrics", daemon=True)
        self._thread.start()

    def follow(self, trackers: Sequence[Tracked], config: dict[str, Any]) -> None:
        """Send rows to these trackers, and to no others."""
        labels = {"tensorboard", *(tracked.label for tracked in trackers)}
        self._end([label for label in self._trackers if label not in labels], EXIT_STOPPED)
        for tracked in trackers:
            if tracked.label not in self._trackers:
                source = Follower(self._directory, tracked.label, config, self._courses)
                self._trackers[tracked.label] = TrackerThread(tracked.tracker, tracked.name, source)

    def step(self, row: Row) -> None:
        self._put("step", _thinned(row))

    def validation(self, row: Row) -> None:
        self._put("validation", row)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        self._put("event", {"time_utc": utc_now(), "event": name, **fields})

    def goes_back(self, step: int) -> None:
        self._put("course", {"step": step})

    def hold(self) -> None:
        """Write no row that comes from now on, until `release`. Events are written."""
        with self._wakeup:
            self._is_holding = True

    def release(self) -> None:
        with self._wakeup:
            self._waiting += self._held
            self._held.clear()
            self._is_holding = False
            self._wakeup.notify()

    def keep_held(self, *, until: int | None) -> set[tuple[int, str]]:
        """Drop the rows that are held of later steps; the keys of the others."""
        with self._wakeup:
            held = [(kind, line, json.loads(line)) for kind, line in self._held]
            held = [one for one in held if until is None or one[0] == "course" or one[2]["step"] <= until]
            self._held = [(kind, line) for kind, line, _ in held]
            self._waiting_bytes = sum(len(line) for _, line in (*self._waiting, *self._held))
            return {row_key(row) for kind, _, row in held if kind != "course"}

    def close(self, *, deadline_s: float, code: int) -> None:
        self.release()
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
        self._end([*self._trackers], code)

    def _end(self, labels: Sequence[str], code: int) -> None:
        for label in labels:
            tracker = self._trackers.pop(label)
            tracker.close(code)
            self.ending.append(tracker)

    def _put(self, kind: str, row: Row) -> None:
        line = json_line(row)  # not in the thread, because the caller may change its row afterwards
        with self._wakeup:
            is_full = self._waiting_bytes + len(line) > MOST_WAITING_BYTES
            if not is_full:
                (self._held if self._is_holding and kind != "event" else self._waiting).append((kind, line))
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
        metrics, events = AppendFile(self._directory.metrics), AppendFile(self._directory.events)
        is_last = False
        while not is_last:
            with self._wakeup:
                self._wakeup.wait_for(lambda: self._waiting or self._is_closing)
                batch, is_last = list(self._waiting), self._is_closing
                self._waiting.clear()
                self._waiting_bytes = sum(len(line) for _, line in self._held)
            for kind, group in itertools.groupby(batch, lambda entry: entry[0] == "course"):
                lines = [*group]
                if kind:
                    self._courses.note(metrics.end(), json.loads(lines[-1][1])["step"])
                else:
                    metrics.append(line for kind, line in lines if kind != "event")
                    events.append(line for kind, line in lines if kind == "event")
                    self._passing.put(lines)
            for tracker in list(self._trackers.values()):
                tracker.wake()
        for file in (metrics, events):
            file.close()


def _thinned(row: Row) -> Row:
    """`row`, without the numbers of each rank in most steps of a very large world: 1,000 ranks take 140 kB."""
    is_left_out = "ranks" in row and len(row["shares"]) > _MOST_RANKS_IN_FILE and row["step"] % _THINNING
    return {key: value for key, value in row.items() if key != "ranks"} if is_left_out else row
