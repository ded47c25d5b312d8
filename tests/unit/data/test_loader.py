"""The data of a step: the same samples whatever fetches them, ready ahead if possible, and nothing left running."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from hetseq.balance.shares import assign_shares
from hetseq.data import fetch as fetching
from hetseq.data.fetch import Collate, Fetched, Fetcher, LoaderDied, Request, base_order, seed_everything
from hetseq.data.loader import Source, StepLoader, place_on, range_reader
from hetseq.data.plan import GlobalBatch, MicroBatchCap, Planner, Position, StepPlan
from hetseq.errors import DataError, HetSeqError
from hetseq.system.task_failure import TaskRaised
from tests.support.journeys import Change, Journey, apply, drive, expected, some_journey

N = 11
PATIENCE_S = 20.0


class Numbers:
    """Sample i is the number i."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return index


class Epochs(Numbers):
    """Sample i is (i, the epoch it was told)."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


class Augmented(Numbers):
    """Sample i with what three generators say."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class AtOnce(Numbers):
    """Answers whole batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        assert indices, "a batch without samples was asked for"
        return [index * 10 for index in indices]


class Backwards(Numbers):
    """Lists its samples in another order, as data sets of 2020 may."""

    def ordered_indices(self) -> Any:
        return np.arange(N)[::-1]


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("sample seven")
        return index


class Refusing(Numbers):
    """Has something to say about a sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise DataError("file x, row 7: expected less")
        return index


class Held(Numbers):
    """Does not answer until the gate is open."""

    def __init__(self) -> None:
        self.gate = torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> Any:
        assert self.gate.wait(PATIENCE_S)
        return index


def as_list(samples: Any) -> Any:
    return list(samples)


def make_source(dataset: Any, collate: Callable[[Any], Any] = as_list, seed: int = 7) -> Source:
    return Source(dataset, collate, lambda sample, size: (float(size), float(size) / 2), lambda sample: sample, 2, seed)


def make_planner(batch: int = 4, weights: tuple[float, ...] = (1.0,), curriculum: int = 0) -> Planner:
    return Planner(N, 7, GlobalBatch(batch), lambda total: assign_shares(total, weights), curriculum)


@contextmanager
def loading(
    dataset: Any,
    planner: Planner,
    *,
    rank: int = 0,
    num_workers: int = 0,
    first: Position = Position(),  # noqa: B008
    cap: MicroBatchCap = MicroBatchCap(2),  # noqa: B008
    collate: Callable[[Any], Any] = as_list,
) -> Iterator[StepLoader]:
    loader = StepLoader(make_source(dataset, collate), planner, first, group=rank, cap=cap, num_workers=num_workers)
    try:
        yield loader
    finally:
        loader.close()


Flat = list[list[Any]]


def run(dataset: Any, steps: int, **how: Any) -> Flat:
    """The samples of each micro-batch of the first steps, by step."""
    planner = how.pop("planner", None) or make_planner()
    first = how.get("first", Position())
    with loading(dataset, planner, **how) as loader:
        plans = planner.plans(first)
        return [[batch.sample for batch in loader.take(next(plans)).micro_batches] for _ in range(steps)]


def samples_by_step(steps: Flat) -> list[list[Any]]:
    return [[sample for batch in step for sample in batch] for step in steps]


# The same samples, whatever fetches them.


@pytest.mark.parametrize("dataset", [Numbers(), Epochs(), Augmented(), AtOnce(), Backwards()])
def test_worker_processes_give_the_same_batches_as_this_process(dataset: Any) -> None:
    here = run(dataset, 7)
    assert run(dataset, 7, num_workers=2) == here
    assert run(dataset, 7, planner=Planner(N, 8, GlobalBatch(4), lambda total: (total,))) != here  # another seed


def test_a_step_has_the_samples_of_its_plan_in_micro_batches_of_the_cap() -> None:
    planner = make_planner(batch=5)
    steps = run(Numbers(), 3, planner=planner)
    assert [[len(batch) for batch in step] for step in steps] == [[2, 2, 1], [2, 2, 1], [1]]
    order = planner.order(1).take(0, N).tolist()
    assert [sample for step in samples_by_step(steps) for sample in step] == order != sorted(order)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_can_begin_anywhere(num_workers: int) -> None:
    whole = run(Epochs(), 7, num_workers=num_workers)
    assert run(Epochs(), 3, num_workers=num_workers, first=Position(step=5, epoch=2, consumed=4)) == whole[4:]
    assert run(Epochs(), 3, num_workers=num_workers, first=Position(step=5, epoch=2, consumed=3)) != whole[4:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_fetcher_is_told_the_epoch(num_workers: int) -> None:
    steps = samples_by_step(run(Epochs(), 7, num_workers=num_workers))
    assert [{epoch for _, epoch in step} for step in steps] == [{1}] * 3 + [{2}] * 3 + [{3}]


def test_random_augmentation_is_the_same_for_any_ranks_and_workers() -> None:
    def everything(weights: tuple[float, ...], num_workers: int, cap: int) -> list[Any]:
        steps: list[list[Any]] = [[] for _ in range(6)]
        for rank in range(len(weights)):
            how = {"planner": make_planner(5, weights), "rank": rank, "num_workers": num_workers}
            for step, samples in zip(steps, samples_by_step(run(Augmented(), 6, cap=MicroBatchCap(cap), **how))):
                step += samples
        return steps

    seed_everything(1)
    alone = everything((1.0,), 0, 5)
    seed_everything(2)  # whatever the rest of the program draws
    assert everything((5.0, 2.0, 1.0), 0, 2) == everything((1.0, 0.0), 2, 1) == alone
    first, second = drawn_by_sample(alone[:3]), drawn_by_sample(alone[3:])
    assert first.keys() == second.keys()
    assert all(first[index] != second[index] for index in first)  # the twin: epochs differ


def drawn_by_sample(steps: list[list[Any]]) -> dict[int, Any]:
    return {index: drawn for step in steps for index, *drawn in step}


def test_the_order_that_a_data_set_lists_is_followed() -> None:
    straight, listed = run(Numbers(), 3), run(Backwards(), 3)
    assert samples_by_step(listed) == [[N - 1 - sample for sample in step] for step in samples_by_step(straight)]
    assert base_order(Numbers()) is None
    read = range_reader(make_source(Backwards()))
    assert [read(0, 2).sample, read(9, 11).sample] == [[10, 9], [1, 0]]
    assert range_reader(make_source(Numbers()))(0, 2).sample == [0, 1]
    assert range_reader(make_source(Backwards()), is_listed=False)(0, 2).sample == [0, 1]


@pytest.mark.parametrize("listed", [[0, 1, 2], [0] * N, list(range(1, N + 1))])
def test_a_listed_order_that_leaves_samples_out_is_refused(listed: list[int]) -> None:
    dataset = Backwards()
    dataset.ordered_indices = lambda: listed  # type: ignore[method-assign]
    with pytest.raises(HetSeqError, match=r"ordered_indices.*each of its 11 samples once"):
        base_order(dataset)


# A rank without samples.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_that_never_gets_a_sample_does_not_search_for_one(num_workers: int) -> None:
    planner = make_planner(4, (1.0, 0.0))
    with loading(AtOnce(), planner, rank=1, num_workers=num_workers) as loader:
        for plan, _ in zip(planner.plans(Position()), range(4)):
            data = loader.take(plan)
            assert (data.samples, data.micro_batches, data.counts) == (0, [], (0.0, 0.0))
    assert samples_by_step(run(AtOnce(), 1, planner=make_planner(4, (1.0, 0.0)), num_workers=num_workers)) != [[]]


# One step ahead.


def await_peek(loader: StepLoader, plan: StepPlan) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (data := loader.peek(plan)) is None and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    return data


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_peeked_at_is_what_is_taken(num_workers: int) -> None:
    planner, right = make_planner(), run(Numbers(), 4)
    plans = planner.plans(Position())
    with loading(Numbers(), planner, num_workers=num_workers) as loader:
        plan, taken = next(plans), []
        for _ in range(4):
            following = next(plans)
            taken.append(loader.take(plan))
            seen = await_peek(loader, following)
            assert seen.plan == following
            assert loader.peek(following) is seen  # twice is once
            plan = following
        assert loader.take(plan) is seen
    assert [[batch.sample for batch in data.micro_batches] for data in taken] == right
    assert taken[0].counts == (4.0, 2.0) != taken[2].counts == (3.0, 1.5)


def test_a_late_loader_gives_none_and_the_step_is_right_all_the_same() -> None:
    planner, dataset = make_planner(), Held()
    plans = planner.plans(Position())
    first, second = next(plans), next(plans)
    with loading(dataset, planner, num_workers=2) as loader:
        assert loader.peek(first) is None
        dataset.gate.set()
        taken = [[batch.sample for batch in loader.take(plan).micro_batches] for plan in (first, second)]
    assert taken == run(Numbers(), 2)


# The same samples once more.

JOURNEY = Journey(n=17, batch=7, weights=(1, 1, 1), steps=6)


def samples_of(data: Any) -> list[Any]:
    return [sample for batch in data.micro_batches for sample in batch.sample]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_fetched_again_has_the_same_samples_and_disturbs_no_later_one(num_workers: int) -> None:
    lengths = (5, 0, 1, 2, 9, 1) * 2 + (3, 0, 0, 7, 30)
    journey = replace(JOURNEY, lengths=lengths, cap=MicroBatchCap(None, 9))
    planner, taken = journey.planner(), []
    with journey.loading(0, num_workers=num_workers) as loader:
        for plan, following in zip(planner.plans(Position()), list(journey_plans(journey, 7))[1:]):
            data = loader.take(plan)
            await_peek(loader, following)  # of another epoch after steps 3 and 6
            again = loader.fetch_again(data, MicroBatchCap(1))
            assert samples_of(again) == samples_of(data)
            assert [batch.size for batch in again.micro_batches] == [1] * data.samples
            assert (again.plan, again.counts, again.samples) == (data.plan, data.counts, data.samples)
            assert sum(batch.work for batch in again.micro_batches) == sum(batch.work for batch in data.micro_batches)
            assert [batch.start for batch in again.micro_batches] == list(range(*plan.range_of(0)))
            taken.append([(batch.start, batch.sample, batch.work) for batch in data.micro_batches])
    assert taken == expected(journey, 0)
    assert {epoch for step in taken for _, pairs, _ in step for _, epoch in pairs} == {1, 2}


def journey_plans(journey: Journey, steps: int) -> Iterator[StepPlan]:
    for plan, _ in zip(journey.planner().plans(journey.first), range(steps)):
        yield plan


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_fetched_again_after_its_shares_changed_for_later_ones_is_still_itself(num_workers: int) -> None:
    journey = replace(JOURNEY, changes=(Change(1, 3, weights=(0, 0, 1)),))
    planner = journey.planner()
    with journey.loading(0, num_workers=num_workers) as loader:
        plan = planner.plan(Position())
        first = loader.take(plan)
        apply(journey.changes[0], loader, planner)
        second = loader.take(planner.plan(plan.next_position()))
        third = loader.take(planner.plan(second.plan.next_position()))
        assert samples_of(loader.fetch_again(second, MicroBatchCap(1))) == samples_of(second) != []
        assert samples_of(loader.fetch_again(first, MicroBatchCap(1))) == samples_of(first)
        assert loader.fetch_again(third, MicroBatchCap(1)).micro_batches == third.micro_batches == []


def test_random_augmentation_is_the_same_when_a_step_is_fetched_again() -> None:
    planner = make_planner()
    with loading(Augmented(), planner) as loader:
        data = loader.take(planner.plan(Position()))
        seed_everything(3)
        assert samples_of(loader.fetch_again(data, MicroBatchCap(3))) == samples_of(data)


class RefusingLater(Numbers):
    """Reads well once, as a file that is damaged under way."""

    is_damaged = False

    def __getitem__(self, index: int) -> Any:
        if self.is_damaged:
            raise DataError("file x: not as it was")
        return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_data_set_says_when_a_step_is_fetched_again_arrives_in_words(num_workers: int) -> None:
    planner, dataset = make_planner(), RefusingLater()
    with loading(dataset, planner, num_workers=num_workers) as loader:
        data = loader.take(planner.plan(Position()))
        assert samples_of(loader.fetch_again(data, MicroBatchCap(1))) == samples_of(data)
        dataset.is_damaged = True
        with pytest.raises(DataError, match=r"^file x: not as it was$"):
            loader.fetch_again(data, MicroBatchCap(1))


# Endings.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_in_a_data_set_reaches_the_training_thread(num_workers: int) -> None:
    kind = TaskRaised if num_workers else KeyError  # a class of the user's may not survive the way to this process
    with pytest.raises(kind, match="sample seven"):
        run(Broken(), 4, num_workers=num_workers)
    assert len(run(Broken(), 1, planner=make_planner(3, curriculum=1), num_workers=num_workers)) == 1  # up to there


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("where", ["data set", "collater"])
def test_what_a_data_set_says_in_words_arrives_without_a_traceback(where: str, num_workers: int) -> None:
    def collate(samples: list[Any]) -> Any:
        raise DataError("file x, row 7: expected less")

    how = {} if where == "data set" else {"collate": collate}
    dataset = Refusing() if where == "data set" else Numbers()
    with pytest.raises(DataError) as caught:
        run(dataset, 4, num_workers=num_workers, **how)
    assert str(caught.value) == "file x, row 7: expected less"


def test_after_an_exception_that_is_kept_no_worker_is_left() -> None:
    planner = make_planner(N)
    with loading(Broken(), planner, num_workers=2) as loader:
        with pytest.raises(TaskRaised) as caught:
            loader.take(next(planner.plans(Position())))
        loader.close()
        assert torch.multiprocessing.active_children() == []
    assert caught.value is not None  # its traceback lives as long as this line


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_closed_loader_leaves_no_process_and_no_thread(steps: int) -> None:
    planner, threads = make_planner(), set(threading.enumerate())
    loader = StepLoader(make_source(Numbers()), planner, Position(), group=0, cap=MicroBatchCap(2), num_workers=2)
    assert len(torch.multiprocessing.active_children()) == 2
    assert set(threading.enumerate()) - threads
    for plan, _ in zip(planner.plans(Position()), range(steps)):
        loader.take(plan)
    loader.close()
    loader.close()  # twice is once
    gc.collect()
    assert torch.multiprocessing.active_children() == []
    assert [thread.name for thread in set(threading.enumerate()) - threads if thread.name == "step-loader"] == []


# Loader processes that die.


@pytest.mark.parametrize("num_workers", [1, 3])
def test_loader_processes_that_are_killed_are_replaced_and_no_sample_is_another(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    journey = Journey(n=N, batch=5, weights=(1,), cap=MicroBatchCap(2), steps=30)
    moments = [2, 5]  # in takes, or as soon as all that were killed before have been replaced

    def kill(where: str) -> None:
        victims = torch.multiprocessing.active_children()
        if where == "take" and moments and next(takes) >= moments[0] and len(victims) == num_workers:
            del moments[0]
            for process in victims if num_workers == 1 else victims[1:]:
                process.kill()
                process.join(5.0)

    takes = itertools.count()
    with journey.loading(0, num_workers=num_workers) as loader:
        assert drive(loader, journey, pause=kill) == expected(journey, 0)
        assert len(torch.multiprocessing.active_children()) == num_workers
    assert caplog.text.count("as the kernel does when memory runs out: new ones take over at step") == 2
    gc.collect()
    assert torch.multiprocessing.active_children() == []


def test_nobody_waits_for_a_lock_that_a_killed_process_held() -> None:
    requests = [Request(0, np.arange(2))] * 3
    fetched = Fetched(Fetcher(Numbers(), 1), Collate(default_collate), requests, num_workers=2, pin_memory=False)
    assert next(fetched).tolist() == [0, 1]
    iterator: Any = fetched._batches
    iterator._workers_done_event._cond.acquire()  # as by a process that looks at it when it is killed
    for process in torch.multiprocessing.active_children():
        process.kill()
        process.join(PATIENCE_S)
    del iterator
    fetched.close()
    deadline = time.monotonic() + PATIENCE_S
    while "lost-loader" in (names := [thread.name for thread in threading.enumerate()]):
        assert time.monotonic() < deadline, names
        time.sleep(0.01)


def some_deaths(seeds: range) -> Iterator[int]:
    """Kills at any instants; how many have been noticed."""
    for seed in seeds:
        generator = random.Random(seed)
        journey = some_journey(generator, steps=12)
        rank = generator.randrange(len(journey.weights))
        records: list[str] = []

        def kill(where: str) -> None:
            if generator.random() < 0.1:  # noqa: B023
                generator.choice(torch.multiprocessing.active_children()).kill()  # noqa: B023

        with journey.loading(rank, num_workers=2) as loader, noted(records):
            assert drive(loader, journey, pause=kill) == expected(journey, rank), seed
        yield len(records)


@contextmanager
def noted(records: list[str]) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hetseq.data.loader").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("hetseq.data.loader").removeHandler(handler)


@pytest.mark.nightly
def test_deaths_at_any_instants_beside_any_changes_give_the_steps_of_the_plan() -> None:
    assert sum(some_deaths(range(8))) > 4


def test_a_process_that_never_begins_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, is_first = fetching._WorkerInit.__call__, torch.multiprocessing.get_context("fork").Lock()

    def hang_once(self: Any, worker_id: int) -> None:
        if is_first.acquire(block=False):
            signal.pause()
        begin(self, worker_id)

    monkeypatch.setattr(fetching._WorkerInit, "__call__", hang_once)
    monkeypatch.setattr(fetching, "_BEGIN_S", 1.0)
    journey = Journey(n=N, batch=5, weights=(1,), steps=4)
    with journey.loading(0, num_workers=2) as loader:
        assert drive(loader, journey) == expected(journey, 0)
        assert len(torch.multiprocessing.active_children()) == 2
    assert "has not begun within 1 s: new ones take over at step 1" in caplog.text


def test_a_death_interrupts_nothing_that_the_training_thread_does() -> None:
    # torch's own handler raises wherever the main thread happens to be; here the user's own loader has brought it
    iter(torch.utils.data.DataLoader([1, 2], num_workers=1))  # type: ignore[arg-type]
    gc.collect()
    with Journey(n=N, batch=5, weights=(1,)).loading(0, num_workers=1):
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL

    def own(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGCHLD, own)
    try:
        with Journey(n=N, batch=5, weights=(1,)).loading(0, num_workers=1):
            assert signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


# To the device.

Pair = namedtuple("Pair", "x y")


def test_placing_moves_the_floats_to_the_precision_and_leaves_the_rest() -> None:
    put = place_on(torch.device("cpu"), torch.float64)
    whole, flag = torch.arange(3), torch.tensor(True)
    item = {"pair": Pair(torch.ones(2), [whole, (flag, "text")]), "n": 3, "none": None}
    placed = put(item)
    assert placed["pair"].x.dtype == torch.float64
    assert type(placed["pair"]) is Pair
    assert placed["pair"].y[0] is whole
    assert placed["pair"].y[1] == (flag, "text")
    assert (placed["n"], placed["none"]) == (3, None)
    assert item["pair"].x.dtype == torch.float32  # the argument is as it was


def test_a_stock_collate_function_works() -> None:
    source = make_source(Numbers(), default_collate)
    batch = range_reader(source)(2, 5)
    assert batch.sample.tolist() == [2, 3, 4]
    assert (batch.start, batch.size, batch.counts) == (2, 3, (3.0, 1.5))


def unsendable(samples: list[Any]) -> Any:
    return {"x": torch.zeros(len(samples)), "why": threading.Lock()}


def test_a_batch_that_cannot_be_sent_ends_the_process_that_made_it(capfd: pytest.CaptureFixture[str]) -> None:
    # forgotten by the standard library: training would wait for it until its peers give up
    with pytest.raises(LoaderDied, match="ended with 1, and so did 2 before it while step 1 was loaded"):
        run(Numbers(), 1, num_workers=1, collate=unsendable)
    assert "could not send its batch (cannot pickle '_thread.lock' object)" in capfd.readouterr().err
    assert unsendable([1])["x"].shape == (1,)


@pytest.mark.parametrize(
    ("error", "in_thread", "is_told"),
    [
        (EOFError(), True, False), (ConnectionResetError(), True, False), (BrokenPipeError(), True, False),
        (ValueError("a bug"), True, True), (EOFError("of a file"), False, True),
    ],
)  # fmt: skip
def test_a_loader_says_nothing_of_a_rank_that_is_gone_and_everything_else(
    error: Exception, in_thread: bool, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The standard library's thread for descriptors calls the hook by itself; a killed rank had two stories."""

    def call() -> None:
        fetching._tell_unless_reader_is_gone(type(error), error, None)

    if in_thread:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    else:
        call()
    assert (type(error).__name__ in capsys.readouterr().err) is is_told
