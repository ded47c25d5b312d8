"""This rank's micro-batches of a step: fetched, collated and counted, one step ahead, on the host.

The plans of all coming steps are known while the shares stay as they are, so a stock DataLoader can run ahead of
training: its batch sampler walks an itinerary, this rank's micro-batches from some position on, without end. Where the
shares of coming steps change, the walkers are sent back, and what was fetched by an older plan is dropped: every
fetched batch carries the positions it was fetched for. Without worker processes the next step is fetched by the
training thread while its buckets travel; with them a thread drains the DataLoader, and a step that is not ready in time
is simply counted later. Loader processes that have died are replaced by others, which begin at the step that was waited
for.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetseq.data.fetch import Collate, Fetched, Fetcher, LoaderDied, Refused, Request, base_order
from hetseq.data.fetch_schedule import Itinerary, Key, Walker
from hetseq.data.plan import Assign, Indices, MicroBatchCap, Planner, Position, StepPlan

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # after so long without a step the processes that load it are looked at
_CLOSE_S = 10.0
_MOST_DEATHS = 2  # while one step is loaded; with one more the step itself is to blame


@dataclass(frozen=True)
class MicroBatch:
    """One forward's worth: `size` samples from position `start` on, their counts in the order of the run's terms.

    The sample is as it was collated, on the host: its reader places it where memory that runs out can be handled.
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
    """A data set and what turns its samples into counted micro-batches, and places these."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    count: Callable[[Any, int], tuple[float, ...]]  # (collated sample, number of samples) -> counts by term
    place: Callable[[Any], Any]  # to this rank's device and precision; readers of a split call it
    terms: int
    seed: int
    pin_memory: bool = False


class StepLoader:
    """Hands out the steps of one run in order, from `first` on, for the data-parallel group `group`.

    The first step is cut by `first_cap`, if given. Loader processes that have died are replaced.
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
        self._fetcher, self._collate = Fetcher(source.dataset, source.seed), Collate(source.collate)
        self._base = base_order(source.dataset)
        self._ahead: StepData | None = None
        self._deaths: list[int] = []  # the steps that were waited for when loader processes had died
        self._stream = self._open(first.step)

    def take(self, plan: StepPlan) -> StepData:
        """The data of this step; waits for it."""
        data, self._ahead = self._ahead, None
        while data is None or not self._is_current(data):
            data = self._load(plan.step, self._stream.get)
        assert data.plan == plan, "steps are taken in order"
        self._itinerary.forget_before(plan.step)
        return data

    def peek(self, plan: StepPlan) -> StepData | None:
        """The data of the step after the last one taken, or None if its worker processes are late."""
        while self._ahead is None or not self._is_current(self._ahead):
            self._ahead = self._load(plan.step, self._stream.poll)
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
        """What `get` gives; if loader processes have died, None after others have begun at `step`."""
        try:
            return get()
        except LoaderDied as error:
            self._deaths = [*(died for died in self._deaths if died == step), step]
            if len(self._deaths) > _MOST_DEATHS:
                raise LoaderDied(
                    f"{error}, and so did {_MOST_DEATHS} before it while step {step} was loaded. If memory ran out, use"
                    " fewer --num-workers; --num-workers 0 loads in the rank itself and shows what fails"
                ) from None
            logger.warning("%s: others take over at step %d", error, step)
        self._stream.close(0.0)  # its thread may still wait for what will never come
        self._stream = self._open(step)
        return None

    def _open(self, step: int) -> _Stream:
        return _Stream(
            self._source, self._itinerary, self._itinerary.walk(step), self._itinerary.walk(step),
            fetcher=self._fetcher, collate=self._collate, base=self._base, num_workers=self._num_workers,
        )  # fmt: skip


class _Stream:
    """One step after another as they come out of one `Fetched`, until that dies; with loader processes in a thread."""

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
        self._requests = _Requests(itinerary, asker, base)
        self._batches = Fetched(
            fetcher, collate, self._requests, num_workers=num_workers, pin_memory=source.pin_memory
        )  # fmt: skip
        self._held: tuple[Key, Any] | None = None  # a batch that turned out to belong to a newer plan
        self._thread = _Drain(self._load) if num_workers else None

    def get(self) -> StepData:
        """The next step; waits for it, and raises LoaderDied where it will never come."""
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
        """End the thread, waiting for it so long, and the loader processes; may be called twice."""
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
                batches.append(_micro_batch(self._source, self._itinerary, plan, key, sample))
        return batches

    def _next(self) -> tuple[Key, Any]:
        sample = next(self._batches)
        return self._requests.asked.popleft(), sample


def _micro_batch(source: Source, itinerary: Itinerary, plan: StepPlan, key: Key, sample: Any) -> MicroBatch:
    if isinstance(sample, Refused):
        raise sample.error
    size = key.stop - key.start
    return MicroBatch(sample, key.start, size, source.count(sample, size), itinerary.work(plan.epoch, key))


def _request(itinerary: Itinerary, base: Indices | None, epoch: int, key: Key) -> Request:
    indices = itinerary.indices(epoch, key)
    return Request(epoch, indices if base is None else base[indices])


def range_reader(source: Source, *, is_listed: bool = True) -> Callable[[int, int], MicroBatch]:
    """A function that reads samples start to stop - 1 of a data set, in its own order, in the thread of its caller.

    For validation. Where `is_listed` that is the order of its `ordered_indices`, if it has them; else that of its
    indices.
    """
    fetcher = Fetcher(source.dataset, source.seed, epoch=0)  # no set_epoch: it may be the training data, one step ahead
    base = base_order(source.dataset) if is_listed else None

    def read(start: int, stop: int) -> MicroBatch:
        indices = np.arange(start, stop) if base is None else base[start:stop]
        sample = source.collate(fetcher.samples(Request(0, indices)))
        return MicroBatch(sample, start, stop - start, source.count(sample, stop - start), stop - start)

    return read


class _Requests:
    """The batch sampler: this rank's micro-batches of all steps; `asked` says which, in the order of asking."""

    def __init__(self, itinerary: Itinerary, walker: Walker, base: Indices | None) -> None:
        self._itinerary, self._base = itinerary, base
        self.walker = walker
        self.asked: deque[Key] = deque()

    def __iter__(self) -> Iterator[Request]:
        while True:
            plan, _, keys = self._itinerary.go_on(self.walker)
            for key in keys:
                if self._itinerary.is_sent_back(self.walker, plan.step):
                    break
                self.asked.append(key)
                yield _request(self._itinerary, self._base, plan.epoch, key)


class _Drain:
    """A thread that keeps one loaded step ready."""

    def __init__(self, load: Callable[[], StepData]) -> None:
        self._queue: queue.Queue[StepData | BaseException] = queue.Queue(maxsize=1)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(load,), name="step-loader", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> StepData | None:
        """The next step, or None if it was not there in time; raises what loading it has raised."""
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
