"""State of a launcher's workers: which run, how the others ended, the deadline to end, and the checkpoints left behind.

Only keeps this state. The launcher decides what follows from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hetseq.checkpoint.leftover_memory import await_writers, has_remains
from hetseq.checkpoint.recovery import complete_newer
from hetseq.cluster.membership.exit_status import WorkerEnd
from hetseq.cluster.membership.run_directory_discovery import has_commits
from hetseq.errors import HetSeqError
from hetseq.launch.stall_detector import Standstill
from hetseq.launch.worker_processes import Worker
from hetseq.run_directory import RunDirectory

_WRITERS_S = 3.0


def may_go_on(directory: RunDirectory) -> bool:
    """Whether there is a checkpoint to resume from; a checkpoint that lacks only its commit is committed now."""
    if has_commits(directory) or not directory.checkpoints.is_dir():
        return has_commits(directory)
    is_in_memory = False
    with suppress(OSError, HetSeqError):
        await_writers(directory.run_id, patience_s=_WRITERS_S)  # writers outlive their trainers to finish
        is_in_memory = has_remains(directory.run_id, directory.path)
        complete_newer(directory.checkpoints, None)
    return is_in_memory or has_commits(directory)


class WorkerWatch:
    """The workers of this node while they run."""

    def __init__(self, workers: Sequence[Worker], standstill: Standstill) -> None:
        self.running, self.standstill = list(workers), standstill
        self.ends: list[WorkerEnd] = []
        self.is_ready_told = False
        self.is_training = False  # the run has begun, and has not begun to end
        self.is_ending = False  # the run is ending, and training workers may finish their step
        self.hub_is_there = True
        self._deadline_s: float | None = None

    @property
    def has_left(self) -> bool:
        """Whether all workers of this node have left, as they were asked to."""
        return bool(self.ends) and all(end.has_left for end in self.ends)

    def named(self, record: Mapping[str, Any]) -> list[Worker]:
        """The workers that a record is for: all workers, a slot's, or one process."""
        return [
            worker
            for worker in self.running
            if record.get("rank", worker.rank) == worker.rank and record.get("starts", worker.starts) == worker.starts
        ]

    def take_loading(self) -> list[Worker]:
        """Remove and return the workers that have not begun to train: they have nothing to save."""
        loading = [worker for worker in self.running if not worker.is_ready]
        self.running = [worker for worker in self.running if worker.is_ready]
        return loading

    def pass_on(self, record: Mapping[str, Any]) -> None:
        """Pass a record to its workers; if it freezes a worker, also report the worker's phase to the coordinator."""
        for worker in self.named(record):
            worker.tell(**record)
            if record["kind"] == "freeze":
                self.standstill.asked(worker)
            elif record["kind"] == "record":
                self.standstill.answered(worker)

    def say_who_is_left(self, tell: Callable[[str], None]) -> None:
        """Tell the last known phase of each worker that has not ended in time."""
        for worker in self.running if self.hub_is_there else ():
            tell(f"rank {worker.rank} has not ended, {self.standstill.words(worker)}")

    def left_s(self) -> float:
        return math.inf if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline by which the workers must end; later calls have no effect."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + seconds

    def ended(self, happened: set[Any]) -> list[tuple[Worker, WorkerEnd]]:
        """The workers that have just ended, or were killed but are held by the kernel, each with its end."""
        ended = [worker for worker in self.running if worker.sentinel in happened or worker.is_held]
        ends = [worker.end() for worker in ended]
        self.running = [worker for worker in self.running if worker not in ended]
        self.ends.extend(ends)
        return list(zip(ended, ends))
