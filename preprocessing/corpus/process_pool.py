"""Process pool: runs jobs in several processes and yields the results in the order of the jobs.

Responsible for starting the processes, ending them on every code path, and naming the job in which a process was lost.
A job is a pure function of its argument, so the result does not depend on which process runs it; with one process the
jobs run in the caller.

Processes are spawned, never forked, because the libraries that do the work use threads. They ignore Ctrl-C, which
their parent handles, and end with the parent even if it is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from types import TracebackType
from typing import TypeVar

from hetseq import HetSeqError

Job = TypeVar("Job")
Result = TypeVar("Result")

# jobs per process that are submitted before the first result is taken, so that no process is idle
_AHEAD = 2


class LostProcess(HetSeqError):
    """A process was killed from outside while it ran a job."""


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew:
    """A pool of up to `processes`, started with the first call of several jobs; a context manager."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def map(self, work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
        """The results of `work` for the jobs, in their order; only a few jobs run ahead of the caller.

        Re-raises errors of jobs, and raises LostProcess with the first job without a result if a process was killed.
        With several processes, `work` must be a module-level function, and jobs and results must be picklable.
        """
        if self._processes == 1 or len(jobs) < 2:
            yield from map(work, jobs)
            return
        waiting: deque[tuple[Job, Future[Result]]] = deque()
        for job in jobs:
            waiting.append((job, self._submit(work, job)))
            if len(waiting) > _AHEAD * self._processes:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())

    def _submit(self, work: Callable[[Job], Result], job: Job) -> Future[Result]:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                self._processes, mp_context=get_context("spawn"), initializer=_end_with_parent
            )
        # a process inherits the blocked signals; a Ctrl-C meanwhile is delivered right after
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(work, job)
        except BrokenProcessPool as broken:
            # reported later: earlier jobs may have no result either, and the first of them must be named
            return _failed(broken)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _result(job: Job, future: Future[Result]) -> Result:
    try:
        return future.result()
    except BrokenProcessPool:
        raise LostProcess(
            f"a process was killed before {job} was done: if memory is short, give fewer --processes; the same command"
            " resumes from the finished pieces"
        ) from None


def _failed(error: Exception) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_exception(error)
    return future


def _end_with_parent() -> None:
    """End this process when its parent ends, however that happens."""
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
