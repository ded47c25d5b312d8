"""Fetching and collating samples, in this process or in loader processes, with a stock DataLoader.

Responsible for seeds and loader processes: it starts them, ends them and detects dead ones. It knows nothing of steps.
The one idea: samples arrive in the order of the requests, or `LoaderDied` reports that they will not; the caller then
opens a new `Fetched`. Randomness in a data set is seeded by sample, never by rank or process, so the samples are the
same on any cluster. A data set that returns whole batches (`__getitems__`) is seeded by the first sample of the batch,
so that a resumed run repeats it.
"""

from __future__ import annotations

import mmap
import multiprocessing
import multiprocessing.queues
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from hetseq.data.lane_layout import Cursor
from hetseq.data.plan import Indices, derive_seed
from hetseq.errors import HetSeqError, TaskFileError, few
from hetseq.system.device_memory import is_exhausted
from hetseq.system.processes import die_with_parent, ignore_stop_signals
from hetseq.system.task_failure import TaskRaised, note, summary, trace_of

_LOOK_S = 1.0  # wait for a sample this long before checking that the processes are alive
# A process may hang before its first instruction: threads of the transport take the interpreter to release tensors,
# and a fork at that moment copies a CPython lock that is never released (python/cpython#112275, before 3.12).
_BEGIN_S = 20.0
TRAINING_DATA = "the training data"  # in errors before the run has begun
_REAPED_S = 1.0  # a process closes its pipes before its parent can see that it has ended


class LoaderDied(HetSeqError):
    """A loader process ended without being asked to, or never began; the samples it was to fetch are lost."""


@dataclass(frozen=True)
class Request:
    """The samples to fetch; pickled and sent to a loader process."""

    epoch: int
    indices: Indices  # (samples,)
    cursors: tuple[Cursor, ...] = ()  # where to open lanes that the process has not read


@dataclass(frozen=True)
class Refused:
    """An error that a data set raised, returned from a loader process: torch would wrap it in a traceback."""

    error: HetSeqError


@dataclass(frozen=True)
class Uncollated:
    """Samples and their indices, for the collate function."""

    samples: Any
    indices: Indices
    cursors: tuple[Cursor, ...] = ()


class WithCursors(NamedTuple):
    """A collated sample, and the cursors of its lanes. A tuple, so that torch pins the tensors in it."""

    sample: Any
    cursors: tuple[Cursor, ...]


class Fetcher(torch.utils.data.Dataset[Any]):
    """Fetches requests from a data set: all at once if it has `__getitems__`, else one seeded sample at a time.

    `split` names the data set in errors.
    """

    def __init__(self, dataset: Any, seed: int, *, epoch: int = -1, split: str = "") -> None:
        self._dataset, self._seed, self._epoch, self._split = dataset, seed, epoch, split

    def __getitems__(self, request: Request) -> Uncollated | Refused:
        try:
            if request.cursors:
                self._dataset.learn(request.cursors)
            samples = self.samples(request)
            fresh: tuple[Cursor, ...] = getattr(self._dataset, "fresh_cursors", tuple)()
            return Uncollated(samples, request.indices, fresh)
        except Exception as error:
            if (portable := _portable(error)) is None:
                raise
            return Refused(portable)

    def samples(self, request: Request) -> Any:
        if not len(request.indices):
            return []
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(request.epoch)
        if hasattr(self._dataset, "__getitems__"):
            seed_everything(derive_seed(self._seed, self._epoch, int(request.indices[0])))
            try:
                return self._dataset.__getitems__(request.indices.tolist())
            except Exception as error:
                note(error, samples_in_words(request.indices, self._split), is_of_task=True)
                raise
        return [self._sample(index) for index in request.indices.tolist()]

    def _sample(self, index: int) -> Any:
        seed_everything(derive_seed(self._seed, self._epoch, index))
        try:
            return self._dataset[index]
        except Exception as error:
            note(error, samples_in_words([index], self._split), is_of_task=True)
            raise


def samples_in_words(indices: Sequence[int] | Indices, split: str = "") -> str:
    """`sample 13 of train`, `samples 4, 7, 9 and 2 more of train`."""
    names = [str(index) for index in indices]
    return f"sample{'' if len(names) == 1 else 's'} {few(names)}{f' of {split}' if split else ''}"


def _portable(error: Exception) -> HetSeqError | None:
    """The error as a batch can bring it to the rank; None if it is to be raised here.

    In a loader process an error of the user's code becomes text, before torch wraps it in a traceback of its own.
    Memory that ran out keeps its class, by which the rank knows it.
    """
    if isinstance(error, HetSeqError):
        return error
    if torch.utils.data.get_worker_info() is None or is_exhausted(error):
        return None
    return TaskRaised(summary(error) or trace_of(error), trace_of(error))


class Collate:
    """The user's collate function, which never sees a batch without samples."""

    def __init__(self, collate: Callable[[list[Any]], Any], split: str = "") -> None:
        self._collate, self._split = collate, split

    def __call__(self, fetched: Uncollated | Refused) -> Any:
        if isinstance(fetched, Refused):
            return fetched
        try:
            sample = self._collate(fetched.samples) if len(fetched.samples) else None
            return WithCursors(sample, fetched.cursors) if fetched.cursors else sample
        except Exception as error:
            note(error, samples_in_words(fetched.indices, self._split), is_of_task=True)
            if (portable := _portable(error)) is None:
                raise
            return Refused(portable)


class Fetched:
    """The collated sample of each request, or `Refused`, in the order of the requests, which are read ahead.

    Loader processes, if any, are forked in the constructor; the caller must call `close` in the end.
    """

    def __init__(
        self, fetcher: Fetcher, collate: Collate, requests: Iterable[Request], *, num_workers: int, pin_memory: bool
    ) -> None:
        self._begun = mmap.mmap(-1, max(1, num_workers))  # shared: each process sets its byte
        before = set(multiprocessing.active_children())
        with warnings.catch_warnings(), _no_handler_of_torch():
            # ranks share the cores on purpose; torch counts the loaders of one rank, here and as they start
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: DataLoader[Any] = DataLoader(
                fetcher,
                batch_sampler=requests,  # type: ignore[arg-type]
                collate_fn=collate,  # type: ignore[arg-type]
                num_workers=num_workers,
                # a user's task file has no importable name in a spawned process
                multiprocessing_context="fork" if num_workers else None,
                worker_init_fn=_WorkerInit(os.getpid(), self._begun) if num_workers else None,
                persistent_workers=num_workers > 0,
                pin_memory=pin_memory,
                timeout=_LOOK_S if num_workers else 0.0,
                generator=torch.Generator(),  # otherwise it would draw from the default generator
            )
            self._batches: Iterator[Any] = iter(loader)
        started = set(multiprocessing.active_children()) - before
        self._processes = [child for child in started if isinstance(child, ForkProcess)]
        self._forked_s = time.monotonic()
        self._is_closed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next sample. Raises LoaderDied, and any error of the data set or the collate function."""
        while True:
            try:
                return next(self._batches)
            except Exception as error:
                # a data set's error leaves its process alive; a dying process breaks pipes, with many kinds of error
                is_late = str(error).startswith("DataLoader timed out")
                if not is_late and not self._dead(_REAPED_S):
                    raise
            self.check()  # outside the handler: the caught error would keep the processes' pipes open

    def check(self) -> None:
        """Raise LoaderDied if a loader process has ended, or has not begun; may be called from another thread."""
        if time.monotonic() - self._forked_s > _BEGIN_S and not self._have_begun():
            raise LoaderDied(f"a process that loads data has not begun within {_BEGIN_S:.0f} s")
        for child in self._dead(0.0):
            child.join(_REAPED_S)
            deadline = time.monotonic() + _REAPED_S
            while child.exitcode is None and time.monotonic() < deadline:  # another thread has just taken it
                time.sleep(0.01)
            raise LoaderDied(f"a process that loads data (pid {child.pid}) {_how_it_ended(child.exitcode)}")

    def close(self) -> None:
        """End the loader processes; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        held, self._batches = [self._batches], iter(())
        deadline = time.monotonic() + _REAPED_S  # for processes that are only just starting
        while not self._have_begun() and not self._dead(0.001) and time.monotonic() < deadline:
            pass
        if not self._have_begun() or self._dead(0.0):
            for child in self._processes:
                child.kill()
            # a killed process may have held the lock of this event, for which torch would wait; no process needs it now
            held[0]._workers_done_event = threading.Event()  # type: ignore[attr-defined]
            # torch cleans up when the iterator is freed, and waits briefly for each of its processes and threads
            threading.Thread(target=held.clear, name="lost-loader", daemon=True).start()

    def _have_begun(self) -> bool:
        return sum(self._begun[:]) >= len(self._processes)

    def _dead(self, patience_s: float) -> list[ForkProcess]:
        if not self._processes:
            return []
        ended = wait([child.sentinel for child in self._processes], patience_s)
        return [child for child in self._processes if child.sentinel in ended]


class _WorkerInit:
    def __init__(self, parent_pid: int, begun: mmap.mmap) -> None:
        self._parent_pid, self._begun = parent_pid, begun

    def __call__(self, worker_id: int) -> None:
        self._begun[worker_id] = 1
        ignore_stop_signals()
        die_with_parent(self._parent_pid)
        multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_unsent)  # type: ignore[attr-defined]
        sys.excepthook = _tell_unless_reader_is_gone


def _tell_unless_reader_is_gone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook that hides the traceback of a standard library thread when the rank it serves was killed.

    That thread passes file descriptors to the rank. The launcher already reports the kill, and this process ends too.
    """
    is_helper = threading.current_thread() is not threading.main_thread()
    if not (is_helper and isinstance(error, (EOFError, ConnectionError))):
        sys.__excepthook__(kind, error, trace)


def _end_unsent(error: Exception, item: object) -> None:
    """End a loader process that cannot send a batch (out of shared memory or file descriptors).

    The standard library would print the error and drop the batch, and training would wait for it for ever. A dead
    process is detected.
    """
    traceback.print_exception(error)
    sys.stderr.write(f"a loader process could not send its batch ({error}); is /dev/shm too small? --num-workers 0\n")
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def _no_handler_of_torch() -> Iterator[None]:
    """Without torch's SIGCHLD handler, which raises in the training thread at any point when a loader process dies.

    A DataLoader of the user may have installed it before.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # only it may set signal handlers
            is_torchs = str(getattr(before, "__module__", "")).startswith("torch.")
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_torchs or before is None else before)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with {exit_code}"
    hint = ", as the kernel does when memory runs out" if -exit_code == signal.SIGKILL else ""
    return f"was killed by signal {-exit_code}{hint}"


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python; cheap enough for every micro-batch."""
    # torch.manual_seed asks every backend: 0.1 ms
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def base_order(dataset: Any) -> Indices | None:
    """The indices that a 2020 data set lists in `ordered_indices`, or None if they are simply 0..n-1.

    Raises TaskFileError if it does not list each of its samples exactly once.
    """
    if not hasattr(dataset, "ordered_indices"):
        return None
    listed = np.asarray(dataset.ordered_indices(), np.int64)
    if not np.array_equal(np.sort(listed), np.arange(len(dataset))):
        raise TaskFileError(
            f"{type(dataset).__name__}.ordered_indices lists {len(listed)} numbers: expected each of its {len(dataset)}"
            " samples once; to leave samples out, remove them from the data set itself"
        )
    return None if np.array_equal(listed, np.arange(len(dataset))) else listed
