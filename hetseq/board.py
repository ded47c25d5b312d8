"""The TensorBoard log of a run: the rows of `metrics.jsonl` once more, for those who look at curves there.

Responsible for TensorBoard's files and for surviving its absence; it belongs to the thread that writes the rows.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetseq.append_file import AppendFile
from hetseq.progress import samples_per_second, validation_numbers
from hetseq.rank_table import Row, rank_speeds

logger = logging.getLogger(__name__)

_MOST_RANKS = 8  # with more, only every tenth step tells of each rank
_THINNING = 10


class Opening:
    """A thread that opens the TensorBoard log: its import takes seconds, for which no row is to wait."""

    def __init__(self, folder: Path) -> None:
        self._found: list[Board | None] = []
        self._thread = threading.Thread(
            target=lambda: self._found.append(open_board(folder)), name="hetseq-tensorboard", daemon=True
        )
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def board(self) -> Board | None:
        """The log; waits for it. None where there is none."""
        self._thread.join()
        return self._found[0] if self._found else None


def open_board(folder: Path) -> Board | None:
    """A TensorBoard log, or None with a line that says why not; takes the time of an import."""
    try:
        return Board(folder)
    except ImportError as error:
        logger.warning("no TensorBoard log: %s (metrics.jsonl holds the same numbers)", error)
    except Exception as error:  # a broken installation fails in many ways, and none of them may end a run
        logger.warning("no TensorBoard log: importing tensorboard failed with %s: %s", type(error).__name__, error)
    return None


def add_to_board(board: Board, batch: list[tuple[str, bytes]]) -> bool:
    """Whether the rows of `batch` were taken; a row that TensorBoard cannot show ends its log, not the run."""
    try:
        board.add([(kind, json.loads(line)) for kind, line in batch if kind != "event"])
    except Exception as error:  # as above
        logger.warning("the TensorBoard log ends here: %s: %s", type(error).__name__, error)
        return False
    return True


class Board:
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
        self.file = AppendFile(folder / name, is_lines=False)
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
    for key in ("loss", "lr", "grad_norm", "loss_scale", "noise_scale"):
        yield f"train/{key}", row.get(key)
    yield "train/samples_per_s", samples_per_second(row)
    terms, counts = row.get("terms") or {}, row.get("counts") or {}
    for term, number in terms.items():
        if term != "loss" and counts.get(term) != 0:  # a term called loss is the loss
            yield f"train/{term}", number
    for key in ("efficiency", "communication_s"):
        yield f"train/{key}", row.get(key)
    if "ranks" in row and (len(row["shares"]) <= _MOST_RANKS or row["step"] % _THINNING == 0):
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
