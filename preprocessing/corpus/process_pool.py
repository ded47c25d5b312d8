"""Jobs done by several processes, with the results in the order of the jobs.

Responsible for starting the processes, for ending them on every road out, and for naming the job in which one of them
was lost. What a job is does not matter here; it is a plain function of its argument, so it makes no difference who does
it, and one process does it without any other.

The processes are spawned, never forked: libraries that do the work have threads. They hear no Ctrl-C, which is for the
one that started them, and end with it even where it is killed.
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

# jobs that are given out before the result of the first is taken, for each process: none waits for the next
_AHEAD = 2


class LostProcess(HetSeqError):
    """A process was killed from outside, with the job that it did."""


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Crew:
    """Up to so many processes, started with the first jobs that keep more than one busy; a context manager."""

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
        """The results of `work` for the jobs, in their order, no more than a few jobs ahead of who takes them.

        Raises what a job raises, and LostProcess with the first job that has no result if a process was killed.
        `work` is a function of a module, and jobs and results can be pickled, wherever there is more than one process.
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
        # a process inherits what is blocked; a Ctrl-C that comes meanwhile is heard right after
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(work, job)
        except BrokenProcessPool as broken:
            # not told here: jobs given out before this one may have no result either, and theirs is the turn
            return _failed(broken)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _result(job: Job, future: Future[Result]) -> Result:
    try:
        return future.result()
    except BrokenProcessPool:
        raise LostProcess(
            f"a process was killed while {job} was not done yet: where memory is short, give fewer --processes; the"
            " same command goes on with what is finished"
        ) from None


def _failed(error: Exception) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_exception(error)
    return future


def _end_with_parent() -> None:
    """Ends this process when the one that started it ends, however that ends."""
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
