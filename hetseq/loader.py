"""This rank's micro-batches of a step: fetched, collated, counted and moved to the device, one step ahead.

The plans of all coming steps are known while the shares stay as they are, so a stock DataLoader can run ahead of
training: its batch sampler walks an itinerary, this rank's micro-batches from some position on, without end. Where the
shares of coming steps change, the walkers are sent back, and what was fetched by an older plan is dropped: every
fetched batch carries the positions it was fetched for. Without worker processes the next step is fetched by the
training thread while its buckets travel; with them a thread drains the DataLoader, and a step that is not ready in time
is simply counted later. Randomness in a data set is seeded by sample, never by rank or worker, so the samples are the
same on any cluster; where a data set answers whole batches (`__getitems__`), by the first sample of the batch, so that
a resume repeats it.
"""

from __future__ import annotations

import multiprocessing.queues
import os
import queue
import random
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from hetseq.errors import HetSeqError, TaskFileError
from hetseq.itinerary import Itinerary, Key
from hetseq.plan import Assign, Indices, MicroBatchCap, Planner, Position, StepPlan, derive_seed
from hetseq.processes import die_with_parent, ignore_stop_signals


@dataclass(frozen=True)
class MicroBatch:
    """One forward's worth: `size` samples from position `start` on, their counts in the order of the run's terms.

    `work` is what they weigh when a step is divided: samples, tokens or units.
    """

    sample: Any
    start: int
    size: int
    counts: tuple[float, ...]
    work: int


@dataclass(frozen=True)
class StepData:
    """This rank's part of one step; `counts` are the sums over its micro-batches."""

    plan: StepPlan
    micro_batches: list[MicroBatch]
    counts: tuple[float, ...]
    version: int = 0  # of the itinerary it was fetched by

    @property
    def samples(self) -> int:
        return sum(batch.size for batch in self.micro_batches)


@dataclass(frozen=True)
class Source:
    """A data set and what turns its samples into counted micro-batches on the device."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    count: Callable[[Any, int], tuple[float, ...]]  # (collated sample, number of samples) -> counts by term
    place: Callable[[Any], Any]  # to this rank's device and precision
    terms: int
    seed: int
    pin_memory: bool = False


@dataclass(frozen=True)
class Request:
    """What a DataLoader worker is asked for; it travels to the worker process."""

    epoch: int
    indices: Indices  # (samples,)


class StepLoader:
    """Hands out the steps of one run in order, from `first` on, for `rank`.

    The first step is cut by `first_cap`, if given.
    """

    def __init__(
        self,
        source: Source,
        planner: Planner,
        first: Position,
        *,
        rank: int,
        cap: MicroBatchCap,
        first_cap: MicroBatchCap | None = None,
        num_workers: int = 0,
    ) -> None:
        self._source = source
        self._itinerary = Itinerary(planner, first, rank, cap=cap, first_cap=first_cap)
        self._requests = _Requests(self._itinerary, base_order(source.dataset))
        self._fetcher, self._collate = _Fetcher(source.dataset, source.seed), _Collate(source.collate)
        self._batches = _fetched(self._fetcher, self._collate, self._requests, num_workers, source.pin_memory)
        self._held: tuple[Key, Any] | None = None  # a batch that turned out to belong to a newer plan
        self._ahead: StepData | None = None
        self._walker = self._itinerary.walk()
        self._thread = _Drain(self._load) if num_workers else None

    def take(self, plan: StepPlan) -> StepData:
        """The data of this step; waits for it."""
        data, self._ahead = self._ahead, None
        while data is None or not self._is_current(data):
            data = self._thread.get() if self._thread else self._load()
        assert data.plan == plan, "steps are taken in order"
        self._itinerary.forget_before(plan.step)
        return data

    def peek(self, plan: StepPlan) -> StepData | None:
        """The data of the step after the last one taken, or None if its worker processes are late."""
        while self._ahead is None or not self._is_current(self._ahead):
            self._ahead = self._thread.poll() if self._thread else self._load()
            if self._ahead is None:
                return None
        assert self._ahead.plan == plan, "steps are looked at in order"
        return self._ahead

    def change(self, step: int, *, assign: Assign | None = None, cap: MicroBatchCap | None = None) -> None:
        """From step `step` on shares follow `assign`, or micro-batches `cap`; what was fetched otherwise is dropped.

        `step` has not been taken yet; changes of `assign` come in the order of steps.
        """
        self._itinerary.change(step, assign=assign, cap=cap)

    def fetch_again(self, data: StepData, cap: MicroBatchCap) -> StepData:
        """The same samples in other micro-batches, fetched by this thread; later steps are not affected."""
        batches = []
        for key in self._itinerary.cut_again(data.plan, cap):
            request = self._requests.request(data.plan.epoch, key)
            batches.append(self._micro_batch(data.plan, key, self._collate(self._fetcher.__getitems__(request))))
        return StepData(data.plan, batches, data.counts, data.version)

    def close(self) -> None:
        """End the worker processes and the thread."""
        if self._thread:
            self._thread.close()
        self._batches = iter(())

    def _is_current(self, data: StepData) -> bool:
        return self._itinerary.version(data.plan.step) == data.version

    def _load(self) -> StepData:
        while True:
            plan, version, keys = self._itinerary.go_on(self._walker)
            batches = self._collect(plan, version, keys)
            if batches is not None:
                totals = tuple(sum(batch.counts[term] for batch in batches) for term in range(self._source.terms))
                return StepData(plan, batches, tuple(map(float, totals)), version)

    def _collect(self, plan: StepPlan, version: int, keys: list[Key]) -> list[MicroBatch] | None:
        """The micro-batches of a step as they come; None if the plan of the step was changed meanwhile."""
        batches = []
        for key in keys:
            found = None
            while found != key:
                held, self._held = self._held, None
                found, sample = held or self._next()
                # before it is used: it may have been asked for by the new plan, and would not come again
                if self._itinerary.version(plan.step) != version:
                    self._held = found, sample
                    return None
            if key.stop > key.start:
                batches.append(self._micro_batch(plan, key, sample))
        return batches

    def _next(self) -> tuple[Key, Any]:
        sample = next(self._batches)
        return self._requests.asked.popleft(), sample

    def _micro_batch(self, plan: StepPlan, key: Key, sample: Any) -> MicroBatch:
        if isinstance(sample, _Refused):
            raise sample.error
        size = key.stop - key.start
        counts = self._source.count(sample, size)
        return MicroBatch(self._source.place(sample), key.start, size, counts, self._itinerary.work(plan.epoch, key))


def load_range(source: Source, pieces: list[tuple[int, int]]) -> Iterator[MicroBatch]:
    """Micro-batches of a data set in its own order, for validation; fetched in this thread."""
    fetcher = _Fetcher(
        source.dataset, source.seed, epoch=0
    )  # no set_epoch: it may be the training data, one step ahead
    base = base_order(source.dataset)
    for start, stop in pieces:
        indices = np.arange(start, stop) if base is None else base[start:stop]
        sample = source.collate(fetcher.samples(Request(0, indices)))
        counts = source.count(sample, stop - start)
        yield MicroBatch(source.place(sample), start, stop - start, counts, stop - start)


class _Requests:
    """The batch sampler: this rank's micro-batches of all steps; `asked` says which, in the order of asking."""

    def __init__(self, itinerary: Itinerary, base: Indices | None) -> None:
        self._itinerary, self._base = itinerary, base
        self._walker = itinerary.walk()
        self.asked: deque[Key] = deque()

    def __iter__(self) -> Iterator[Request]:
        while True:
            plan, _, keys = self._itinerary.go_on(self._walker)
            for key in keys:
                if self._itinerary.is_sent_back(self._walker, plan.step):
                    break
                self.asked.append(key)
                yield self.request(plan.epoch, key)

    def request(self, epoch: int, key: Key) -> Request:
        indices = self._itinerary.indices(epoch, key)
        return Request(epoch, indices if self._base is None else self._base[indices])


@dataclass(frozen=True)
class _Refused:
    """What a data set refuses in words, carried out of a loader process: torch would wrap it into a traceback."""

    error: HetSeqError


class _Fetcher(torch.utils.data.Dataset[Any]):
    """Answers requests from a data set: all at once if it has `__getitems__`, else one seeded sample at a time."""

    def __init__(self, dataset: Any, seed: int, *, epoch: int = -1) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch

    def __getitems__(self, request: Request) -> Any:
        try:
            return self.samples(request)
        except HetSeqError as error:
            return _Refused(error)

    def samples(self, request: Request) -> Any:
        if not len(request.indices):
            return []
        if request.epoch != self._epoch:
            self._epoch = request.epoch
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(request.epoch)
        if hasattr(self._dataset, "__getitems__"):
            seed_everything(derive_seed(self._seed, self._epoch, int(request.indices[0])))
            return self._dataset.__getitems__(request.indices.tolist())
        return [self._sample(index) for index in request.indices.tolist()]

    def _sample(self, index: int) -> Any:
        seed_everything(derive_seed(self._seed, self._epoch, index))
        return self._dataset[index]


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python; cheap enough for every micro-batch."""
    # torch.manual_seed asks every backend: 0.1 ms
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def base_order(dataset: Any) -> Indices | None:
    """The indices a 2020 data set lists in `ordered_indices`, or None where they are simply 0..n-1.

    Raises TaskFileError where it does not list each of its samples once.
    """
    if not hasattr(dataset, "ordered_indices"):
        return None
    listed = np.asarray(dataset.ordered_indices(), np.int64)
    if not np.array_equal(np.sort(listed), np.arange(len(dataset))):
        raise TaskFileError(
            f"{type(dataset).__name__}.ordered_indices lists {len(listed)} numbers: expected each of its {len(dataset)}"
            " samples once; leave samples out of the data set itself"
        )
    return None if np.array_equal(listed, np.arange(len(dataset))) else listed


class _Drain:
    """A thread that keeps one loaded step ready."""

    def __init__(self, load: Callable[[], StepData]) -> None:
        self._queue: queue.Queue[StepData | BaseException] = queue.Queue(maxsize=1)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(load,), name="step-loader", daemon=True)
        self._thread.start()

    def get(self) -> StepData:
        return self._unwrap(self._queue.get())

    def poll(self) -> StepData | None:
        try:
            return self._unwrap(self._queue.get_nowait())
        except queue.Empty:
            return None

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=10)

    def _run(self, load: Callable[[], StepData]) -> None:
        while True:
            try:
                item: StepData | BaseException = load()
            except Exception as error:  # handed to the training thread, which raises it
                # its frames would keep the worker processes alive for as long as somebody keeps the error
                traceback.clear_frames(error.__traceback__)
                item = error
            while not self._is_closing.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._is_closing.is_set() or isinstance(item, BaseException):
                return

    @staticmethod
    def _unwrap(item: StepData | BaseException) -> StepData:
        if isinstance(item, BaseException):
            raise item
        return item


def _fetched(
    fetcher: _Fetcher, collate: _Collate, requests: _Requests, num_workers: int, pin_memory: bool
) -> Iterator[Any]:
    """The collated sample of each request, or `_Refused`, in order."""
    with warnings.catch_warnings():
        # ranks share the cores on purpose; torch counts the loaders of one of them, first here and then as they start
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Any] = DataLoader(
            fetcher,
            batch_sampler=requests,  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=num_workers,
            # a user's task file has no importable name in a process that starts from nothing
            multiprocessing_context="fork" if num_workers else None,
            worker_init_fn=_WorkerInit(os.getpid()) if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # the default one would lose a number to it
        )
        return iter(loader)


class _Collate:
    """The user's collate function, which never sees a batch without samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, _Refused):
            return samples
        try:
            return self._collate(samples) if len(samples) else None
        except HetSeqError as error:
            return _Refused(error)


class _WorkerInit:
    def __init__(self, parent_pid: int) -> None:
        self._parent_pid = parent_pid

    def __call__(self, worker_id: int) -> None:
        ignore_stop_signals()
        die_with_parent(self._parent_pid)
        multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_unsent)  # type: ignore[attr-defined]


def _end_unsent(error: Exception, item: object) -> None:
    """End a loader process that cannot send a batch (shared memory or descriptors have run out).

    The standard library prints the error and forgets the batch, and training would wait for it for ever. A process that
    has died is noticed.
    """
    traceback.print_exception(error)
    sys.stderr.write(f"a loader process could not send its batch ({error}); is /dev/shm too small? --num-workers 0\n")
    sys.stderr.flush()
    os._exit(1)


def place_on(device: torch.device, dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that moves the tensors of a sample to `device` and its floating ones to `dtype`."""

    def place(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            target = dtype if item.is_floating_point() else item.dtype
            return item.to(device, target, non_blocking=True)
        if isinstance(item, dict):
            return {key: place(value) for key, value in item.items()}
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(place, item))
        if isinstance(item, (list, tuple)):
            return type(item)(map(place, item))
        return item

    return place
