"""Step loader: fetches, collates and counts this rank's micro-batches on the host, one step ahead of training.

While shares stay the same, the plans of all coming steps are known, so a stock DataLoader can run ahead of training:
its batch sampler walks an itinerary, an endless sequence of this rank's micro-batches. When the shares of coming steps
change, the walkers are sent back and batches fetched for an older plan are dropped: every batch carries the positions
it was fetched for. Without worker processes, the training thread fetches the next step while the gradient buckets are
being reduced. With them, a thread drains the DataLoader, and a step that is not ready in time is counted later. Dead
loader processes are replaced; the new ones begin at the step that training is waiting for.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hetseq.data.fetch import Collate, Fetched, Fetcher, LoaderDied, Refused, Request, WithCursors, base_order
from hetseq.data.fetch_schedule import Itinerary, Key, Walker
from hetseq.data.lane_layout import Cursor
from hetseq.data.lanes import lanes_of
from hetseq.data.plan import Assign, Indices, MicroBatchCap, Planner, Position, StepPlan

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # wait for a step this long before checking that its loader processes are alive
_CLOSE_S = 10.0
_MOST_DEATHS = 2  # while one step is loaded; one more means that the step itself is the cause


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward: `size` samples from position `start` on, and their counts in the order of the terms.

    `sample` is collated and on the host: its reader moves it to the device, where out-of-memory errors are handled.
    `work` is in samples, tokens or units, in which a step is divided.
    """

    sample: Any
    start: int
    size: int
    counts: tuple[float, ...]
    work: int
    cursors: tuple[Cursor, ...] = ()  # of lanes, before this micro-batch or in it


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
    """A data set and the functions that collate, count and place its micro-batches."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    count: Callable[[Any, int], tuple[float, ...]]  # (collated sample, number of samples) -> counts by term
    place: Callable[[Any], Any]  # to this rank's device and precision; called by the readers of a split
    terms: int
    seed: int
    pin_memory: bool = False
    split: str = ""  # its name in errors


class StepLoader:
    """Yields the steps of one run in order, from `first` on, for the data-parallel group `group`.

    `first_cap`, if given, cuts the first step. Dead loader processes are replaced.
    """

    def __init__(
        self,
        source: Source,
        planner: Planner,
        first: Position,
        *,
        group: int,
        cap: MicroBatchCap,
        first_cap: MicroBatchCap | None = None,
        num_workers: int = 0,
    ) -> None:
        self._source, self._num_workers = source, num_workers
        self._itinerary = Itinerary(planner, first, group, cap=cap, first_cap=first_cap)
        self._fetcher = Fetcher(source.dataset, source.seed, split=source.split)
        self._collate = Collate(source.collate, source.split)
        self._base = base_order(source.dataset)
        self._ahead: StepData | None = None
        self._deaths: list[int] = []  # for each death of a loader process, the step being loaded
        self._stream = self._open(first.step)

    def take(self, plan: StepPlan) -> StepData:
        """The data of this step; waits for it."""
        data, self._ahead = self._ahead, None
        while data is None or not self._is_current(data):
            data = self._load(plan.step, self._stream.get)
        assert data.plan == plan, "steps are taken in order"
        self._itinerary.forget_before(plan.step)
        if (lanes := lanes_of(self._source.dataset)) is not None:
            lanes.learn(cursor for batch in data.micro_batches for cursor in batch.cursors)
        return data

    def peek(self, plan: StepPlan) -> StepData | None:
        """The data of the step after the last one taken, or None if the loader processes are late."""
        while self._ahead is None or not self._is_current(self._ahead):
            self._ahead = self._load(plan.step, self._stream.poll)
            if self._ahead is None:
                return None
        assert self._ahead.plan == plan, "steps are looked at in order"
        return self._ahead

    def change(self, step: int, *, assign: Assign | None = None, cap: MicroBatchCap | None = None) -> None:
        """From step `step` on, use `assign` for shares or `cap` for micro-batches; data fetched otherwise is dropped.

        `step` must not have been taken yet; changes of `assign` come in the order of steps.
        """
        self._itinerary.change(step, assign=assign, cap=cap)

    def fetch_again(self, data: StepData, cap: MicroBatchCap) -> StepData:
        """The same samples in micro-batches of another size, fetched by this thread; later steps are not affected."""
        batches = []
        for key in self._itinerary.cut_again(data.plan, cap):
            request = _request(self._itinerary, self._base, data.plan.epoch, key)
            sample = self._collate(self._fetcher.__getitems__(request))
            batches.append(_micro_batch(self._source, self._itinerary, data.plan, key, sample))
        return StepData(data.plan, batches, data.counts, data.version)

    def close(self) -> None:
        """End the worker processes and the thread."""
        self._stream.close()

    def _is_current(self, data: StepData) -> bool:
        return self._itinerary.version(data.plan.step) == data.version

    def _load(self, step: int, get: Callable[[], StepData | None]) -> StepData | None:
        """The result of `get`; None if loader processes died and new ones were started at `step`."""
        try:
            return get()
        except LoaderDied as error:
            self._deaths = [*(died for died in self._deaths if died == step), step]
            if len(self._deaths) > _MOST_DEATHS:
                raise LoaderDied(
                    f"{error}, and so did {_MOST_DEATHS} before it while step {step} was loaded. If memory ran out, use"
                    " fewer --num-workers; --num-workers 0 loads in the rank itself and shows the cause"
                ) from None
            logger.warning("%s: new ones take over at step %d", error, step)
        self._stream.close(0.0)  # its thread may still be waiting for a batch that will never come
        self._stream = self._open(step)
        return None

    def _open(self, step: int) -> _Stream:
        return _Stream(
            self._source, self._itinerary, self._itinerary.walk(step), self._itinerary.walk(step),
            fetcher=self._fetcher, collate=self._collate, base=self._base, num_workers=self._num_workers,
        )  # fmt: skip


class _Stream:
    """The steps that come out of one `Fetched`, until it dies; with loader processes, a thread collects them."""

    def __init__(
        self,
        source: Source,
        itinerary: Itinerary,
        asker: Walker,
        walker: Walker,
        *,
        fetcher: Fetcher,
        collate: Collate,
        base: Indices | None,
        num_workers: int,
    ) -> None:
        self._source, self._itinerary, self._walker = source, itinerary, walker
        self._requests = _Requests(itinerary, asker, base, source.dataset if num_workers else None)
        self._batches = Fetched(
            fetcher, collate, self._requests, num_workers=num_workers, pin_memory=source.pin_memory
        )  # fmt: skip
        self._held: tuple[Key, Any] | None = None  # a batch that turned out to belong to a newer plan
        self._thread = _Drain(self._load) if num_workers else None

    def get(self) -> StepData:
        """Wait for the next step. Raises LoaderDied if it will never come."""
        if self._thread is None:
            return self._load()
        while True:
            data = self._thread.get(_LOOK_S)
            if data is not None:
                return data
            self._batches.check()

    def poll(self) -> StepData | None:
        """The next step, or None if it is still being loaded."""
        return self._load() if self._thread is None else self._thread.get(0.0)

    def close(self, patience_s: float = _CLOSE_S) -> None:
        """End the thread, waiting at most `patience_s` for it, and the loader processes; may be called twice."""
        if self._thread:
            self._thread.close(patience_s)
        self._batches.close()
        for walker in (self._walker, self._requests.walker):
            self._itinerary.leave(walker)

    def _load(self) -> StepData:
        while True:
            plan, version, keys = self._itinerary.go_on(self._walker)
            batches = self._collect(plan, version, keys)
            if batches is not None:
                totals = tuple(sum(batch.counts[term] for batch in batches) for term in range(self._source.terms))
                return StepData(plan, batches, tuple(map(float, totals)), version)

    def _collect(self, plan: StepPlan, version: int, keys: list[Key]) -> list[MicroBatch] | None:
        """The micro-batches of a step as they arrive; None if the step's plan has changed meanwhile."""
        batches = []
        for key in keys:
            found = None
            while found != key:
                held, self._held = self._held, None
                found, sample = held or self._next()
                # check before use: the batch may belong to the new plan, which will not request it again
                if self._itinerary.version(plan.step) != version:
                    self._held = found, sample
                    return None
            if key.stop > key.start:
                batches.append(_micro_batch(self._source, self._itinerary, plan, key, sample))
        return batches

    def _next(self) -> tuple[Key, Any]:
        sample = next(self._batches)
        return self._requests.asked.popleft(), sample


def _micro_batch(source: Source, itinerary: Itinerary, plan: StepPlan, key: Key, sample: Any) -> MicroBatch:
    if isinstance(sample, Refused):
        raise sample.error
    size, cursors = key.stop - key.start, ()  # type: tuple[int, tuple[Cursor, ...]]
    if isinstance(sample, WithCursors):
        sample, cursors = sample
    counts = source.count(sample, size)
    return MicroBatch(sample, key.start, size, counts, itinerary.work(plan.epoch, key), cursors)


def _request(itinerary: Itinerary, base: Indices | None, epoch: int, key: Key) -> Request:
    indices = itinerary.indices(epoch, key)
    return Request(epoch, indices if base is None else base[indices])


def range_reader(source: Source, *, is_listed: bool = True) -> Callable[[int, int], MicroBatch]:
    """A function that reads samples start..stop-1 of a data set, in its own order, in the caller's thread.

    For validation. With `is_listed`, its own order is `ordered_indices`, if it has them; otherwise the order of its
    indices. Lanes are read by readers of their own.
    """
    lanes = lanes_of(source.dataset)
    dataset = source.dataset if lanes is None else lanes.apart()
    # epoch 0, so set_epoch is not called: this may be the training data, which is one step ahead
    fetcher = Fetcher(dataset, source.seed, epoch=0, split=source.split)
    collate = Collate(source.collate, source.split)
    base = base_order(source.dataset) if is_listed else None

    def read(start: int, stop: int) -> MicroBatch:
        indices = np.arange(start, stop) if base is None else base[start:stop]
        sample = collate(fetcher.__getitems__(Request(0, indices)))
        if isinstance(sample, Refused):
            raise sample.error
        return MicroBatch(sample, start, stop - start, source.count(sample, stop - start), stop - start)

    return read


class _Requests:
    """The batch sampler: this rank's micro-batches of all steps; `asked` holds the pending ones in order of request."""

    def __init__(self, itinerary: Itinerary, walker: Walker, base: Indices | None, dataset: Any = None) -> None:
        self._itinerary, self._base = itinerary, base
        self._lanes = lanes_of(dataset)  # None also if this process reads them itself
        self._places: dict[tuple[int, int], int] = {}  # of the lanes in the loader process
        self.walker = walker
        self.asked: deque[Key] = deque()

    def __iter__(self) -> Iterator[Request]:
        while True:
            plan, _, keys = self._itinerary.go_on(self.walker)
            for key in keys:
                if self._itinerary.is_sent_back(self.walker, plan.step):
                    break
                self.asked.append(key)
                request = _request(self._itinerary, self._base, plan.epoch, key)
                if self._lanes is not None:
                    hints = self._lanes.hints(self._places, plan.epoch, request.indices)
                    request = replace(request, cursors=hints)
                yield request


class _Drain:
    """A background thread that keeps one loaded step ready."""

    def __init__(self, load: Callable[[], StepData]) -> None:
        self._queue: queue.Queue[StepData | BaseException] = queue.Queue(maxsize=1)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(load,), name="step-loader", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> StepData | None:
        """The next step, or None if it was not ready in time; re-raises an error of loading."""
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self, patience_s: float) -> None:
        self._is_closing.set()
        self._thread.join(patience_s)

    def _run(self, load: Callable[[], StepData]) -> None:
        while True:
            try:
                item: StepData | BaseException = load()
            except Exception as error:  # handed to the training thread, which raises it
                # its frames would keep the worker processes alive as long as the error is referenced
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


def place_on(device: torch.device, dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that moves the tensors of a sample to `device` and casts floating-point ones to `dtype`."""

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
