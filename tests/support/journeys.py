"""Steps whose shares and micro-batches change during the run: what each rank must get, and what a loader gives.

The oracle walks the steps with plain loops. Of the product it uses the order of an epoch, which has its own tests.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetseq.data.loader import MicroBatch, Source, StepData, StepLoader
from hetseq.data.plan import Assign, EpochOrder, GlobalBatch, MicroBatchCap, Planner, Position, StepPlan

SEED = 7
Fact = tuple[int, list[tuple[int, int]], int]  # of a micro-batch: start, (sample, epoch) each, work


@dataclass(frozen=True)
class Change:
    """Made when step `after` was committed; holds from `step` on."""

    after: int
    step: int
    weights: tuple[int, ...] | None = None
    cap: MicroBatchCap | None = None


@dataclass(frozen=True)
class Journey:
    """Some steps of a run, and what changes under way."""

    n: int
    batch: int
    weights: tuple[int, ...]
    cap: MicroBatchCap = MicroBatchCap(2)  # noqa: RUF009 - frozen
    changes: tuple[Change, ...] = ()
    steps: int = 8
    first: Position = Position()  # noqa: RUF009 - frozen
    first_cap: MicroBatchCap | None = None
    unit: int = 1
    lengths: tuple[int, ...] | None = None

    def planner(self) -> Planner:
        table = None if self.lengths is None else np.array(self.lengths, np.int64)
        lengths = None if table is None else table.__getitem__
        return Planner(self.n, SEED, GlobalBatch(self.batch), by(self.weights), lengths=lengths, unit=self.unit)

    def loader(self, rank: int, *, num_workers: int = 0, dataset: Any = None) -> StepLoader:
        source = Source(
            dataset or Samples(self.n), list, lambda sample, size: (float(size), 1.0), lambda sample: sample, 2, SEED
        )
        return StepLoader(
            source, self.planner(), self.first,
            group=rank, cap=self.cap, first_cap=self.first_cap, num_workers=num_workers,
        )  # fmt: skip

    @contextmanager
    def loading(self, rank: int, *, num_workers: int = 0, dataset: Any = None) -> Iterator[StepLoader]:
        loader = self.loader(rank, num_workers=num_workers, dataset=dataset)
        try:
            yield loader
        finally:
            loader.close()


class Samples:
    """Sample i is (i, the epoch it was told)."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


def by(weights: tuple[int, ...]) -> Assign:
    """Work in proportion to whole numbers, rounded by its borders."""
    ends = list(itertools.accumulate(weights))

    def assign(total: int) -> tuple[int, ...]:
        borders = [0, *(total * end // ends[-1] for end in ends)]
        return tuple(stop - start for start, stop in itertools.pairwise(borders))

    return assign


def drive(
    loader: StepLoader,
    journey: Journey,
    *,
    pause: Callable[[str], None] = lambda where: None,
    look: Callable[[StepLoader, StepPlan], StepData | None] = StepLoader.peek,
) -> list[list[Fact]]:
    """What a rank gets in each step: it takes, peeks at the next one, and makes the changes, as a controller does.

    `pause` receives the next item; `look` may be more patient than a peek.
    """
    planner, position = journey.planner(), journey.first
    facts = []
    for change in changes_after(journey, journey.first.step - 1):
        pause("change")
        apply(change, loader, planner)
    for _ in range(journey.steps):
        pause("take")
        plan = planner.plan(position)
        data = loader.take(plan)
        assert list(data.counts) == [data.samples, len(data.micro_batches)]
        facts.append([fact(batch) for batch in data.micro_batches])
        position = plan.next_position()
        pause("peek")
        look(loader, planner.plan(position))
        for change in changes_after(journey, plan.step):
            pause("change")
            apply(change, loader, planner)
    return facts


def apply(change: Change, loader: StepLoader, planner: Planner) -> None:
    assign = None if change.weights is None else by(change.weights)
    if assign is not None:
        planner.change(change.step, assign)
    loader.change(change.step, assign=assign, cap=change.cap)


def changes_after(journey: Journey, step: int) -> list[Change]:
    return [change for change in journey.changes if change.after == step]


def fact(batch: MicroBatch) -> Fact:
    assert batch.size == len(batch.sample)
    return batch.start, batch.sample, batch.work


# The oracle.


def expected(journey: Journey, rank: int) -> list[list[Fact]]:
    """What a rank must get in each step."""
    epoch, start, facts = journey.first.epoch, journey.first.consumed, []
    for step in range(journey.first.step, journey.first.step + journey.steps):
        order = EpochOrder(journey.n, seed=SEED, epoch=epoch).take(0, journey.n).tolist()
        stop = min(journey.n, start + journey.batch)
        lengths = None if journey.lengths is None else [journey.lengths[index] for index in order]
        own = divide(journey, start, stop, weights_of(journey, step), lengths)[rank]
        facts.append([
            (begin, [(index, epoch) for index in order[begin:end]], work_of(journey, begin, end, lengths))
            for begin, end in cut_plainly(*own, cap_of(journey, step), lengths)
        ])  # fmt: skip
        epoch, start = (epoch + 1, 0) if stop == journey.n else (epoch, stop)
    return facts


def weights_of(journey: Journey, step: int) -> tuple[int, ...]:
    made = [change.weights for change in journey.changes if change.weights and change.step <= step]
    return made[-1] if made else journey.weights


def cap_of(journey: Journey, step: int) -> MicroBatchCap:
    made = [change.cap for change in journey.changes if change.cap and change.step <= step]
    is_first = step == journey.first.step
    return made[-1] if made else (journey.first_cap if is_first and journey.first_cap else journey.cap)


def divide(
    journey: Journey, start: int, stop: int, weights: tuple[int, ...], lengths: list[int] | None
) -> list[tuple[int, int]]:
    """First and end position of each rank."""
    if lengths is None:
        shares = [share * journey.unit for share in by(weights)(-(-(stop - start) // journey.unit))]
        borders = [start, *(min(stop, start + end) for end in itertools.accumulate(shares))]
        return list(itertools.pairwise(borders))
    quotas = by(weights)(sum(lengths[start:stop]))
    owners, before = [], 0
    for length in lengths[start:stop]:
        ends = itertools.accumulate(quotas)
        last = max((rank for rank, quota in enumerate(quotas) if quota), default=0)
        owners.append(next((rank for rank, end in enumerate(ends) if before + length / 2 < end), last))
        before += length
    borders = [start + sum(owner < rank for owner in owners) for rank in range(len(quotas) + 1)]
    return list(itertools.pairwise(borders))


def cut_plainly(start: int, stop: int, cap: MicroBatchCap, lengths: list[int] | None) -> list[tuple[int, int]]:
    """Sample by sample; multiples are left to the tests of the planner."""
    pieces: list[tuple[int, int]] = []
    while start < stop:
        largest = max((end - begin for begin, end in pieces), default=0)
        most = max(1, 2 * largest) if cap.is_ramp else stop - start
        if cap.is_ramp and most >= stop - start > largest > 0:
            most = largest
        end = start + 1
        while end < stop and end - start < min(most, cap.samples or most):
            if cap.tokens is not None and lengths is not None and sum(lengths[start : end + 1]) > cap.tokens:
                break
            end += 1
        pieces.append((start, end))
        start = end
    return pieces


def work_of(journey: Journey, start: int, stop: int, lengths: list[int] | None) -> int:
    return sum(lengths[start:stop]) if lengths is not None else -(-(stop - start) // journey.unit)


# Journeys by chance.


def some_journey(generator: random.Random, *, steps: int = 8, changes: int = 6) -> Journey:
    """Any shares, also none; epochs of two or three steps; a change of shares two steps ahead, of micro-batches one."""
    ranks, kind = generator.randint(2, 3), generator.choice(["samples", "units", "tokens"])
    n = generator.randint(5, 24)

    def weights() -> tuple[int, ...]:
        return generator.choice([
            tuple(generator.randint(1, 4) for _ in range(ranks)),
            tuple(int(rank == generator.randrange(ranks)) or generator.randint(0, 1) for rank in range(ranks)),
            (*(0,) * (ranks - 1), 1), (1, *(0,) * (ranks - 1)),
        ])  # fmt: skip

    def some_weights() -> tuple[int, ...]:
        drawn = weights()
        return drawn if any(drawn) else (1,) * ranks

    def cap(*, is_ramp: bool = False) -> MicroBatchCap:
        tokens = generator.choice([None, 9]) if kind == "tokens" else None
        return MicroBatchCap(generator.choice([None, 1, 2, 3]), tokens, is_ramp=is_ramp)

    first = generator.choice([Position(), Position(step=5, epoch=2, consumed=generator.randrange(n))])
    made = []
    for after in sorted(first.step - 1 + generator.randrange(steps) for _ in range(changes)):
        if generator.random() < 0.7:
            made.append(Change(after, after + 2, weights=some_weights()))
        if generator.random() < 0.4:
            made.append(Change(after, after + 1, cap=cap()))
    return Journey(
        n, generator.randint(2, n), some_weights(), cap(), tuple(made), steps, first,
        first_cap=generator.choice([None, cap(is_ramp=True)]),
        unit=generator.randint(2, 3) if kind == "units" else 1,
        lengths=tuple(generator.randint(0, 6) for _ in range(n)) if kind == "tokens" else None,
    )  # fmt: skip


# A drain that continues only on request.


class _ClosedError(BaseException):
    """Ends the thread of a drain at any point."""


class Stepwise:
    """In place of the loader's drain: its thread stops at every point, and the test resumes it, point by point."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._item: Any = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._is_closing, self.is_full = False, False
        self._thread = threading.Thread(target=self._run, args=(load,), daemon=True)
        self._thread.start()

    def point(self) -> None:
        """Called by the code under test, where another thread may come in between."""
        if threading.current_thread() is self._thread:
            self._stopped.release()
            self._go.acquire()
            if self._is_closing:
                raise _ClosedError

    def advance(self, points: int) -> None:
        for _ in range(points):
            if self.is_full or not self._thread.is_alive():
                return
            self._go.release()
            self._stopped.acquire()

    def get(self, timeout_s: float) -> Any:
        for _ in range(5000 if timeout_s else 1):
            item = self._poll()
            if item is not None:
                return item
            if not timeout_s:
                return None
            self.advance(1)
        raise AssertionError("the drain searches without end")

    def _poll(self) -> Any:
        item, self._item, self.is_full = self._item, None, False
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self, patience_s: float) -> None:
        self._is_closing = True
        self._go.release()
        self._thread.join()

    def _run(self, load: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            while not self._is_closing:
                item = load()
                while self._item is not None:
                    self.is_full = True
                    self.point()
                self._item = item
                self.point()
        except _ClosedError:
            pass
        except Exception as error:
            self._item = error
        finally:
            self._stopped.release()
