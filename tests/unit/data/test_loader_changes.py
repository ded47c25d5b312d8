"""Shares and micro-batches that change while worker processes run ahead: every step is that of the plan in force."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetseq.data.plan import MicroBatchCap, Position
from tests.support.journeys import Change, Journey, Samples, apply, drive, expected, some_journey
from tests.unit.data.test_loader import PATIENCE_S, await_peek, samples_of

# the middle rank loses its share and gets it back, over two ends of an epoch
CHANGES = (
    Change(1, 3, weights=(3, 0, 1)), Change(2, 3, cap=MicroBatchCap(1)), Change(2, 4, weights=(0, 0, 1)),
    Change(4, 5, cap=MicroBatchCap(3)), Change(5, 7, weights=(1, 2, 3)), Change(6, 8, weights=(4, 1, 1)),
)  # fmt: skip
JOURNEY = Journey(n=17, batch=7, weights=(1, 1, 1), changes=CHANGES, steps=9)
JOURNEYS = {
    "samples": JOURNEY,
    "units": replace(JOURNEY, unit=2),
    "tokens": replace(JOURNEY, lengths=(5, 0, 1, 2, 9, 1) * 2 + (3, 0, 0, 7, 30), cap=MicroBatchCap(None, 9)),
    "whole shares": replace(JOURNEY, cap=MicroBatchCap(), first_cap=MicroBatchCap(is_ramp=True)),
    "from a resume": replace(
        JOURNEY, first=Position(5, 2, 3), changes=(Change(4, 6, weights=(1, 0, 0)), Change(6, 8, weights=(1, 2, 3)))
    ),
}


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", JOURNEYS)
def test_steps_that_change_under_way_are_those_of_the_plan_in_force(kind: str, num_workers: int) -> None:
    journey, in_order = JOURNEYS[kind], [[] for _ in range(JOURNEY.steps)]  # type: ignore[var-annotated]
    for rank in range(3):
        with journey.loading(rank, num_workers=num_workers) as loader:
            steps = drive(loader, journey)
        assert steps == expected(journey, rank) != expected(replace(journey, changes=()), rank)
        for samples, batches in zip(in_order, steps):
            samples += [sample for _, pairs, _ in batches for sample, _ in pairs]
    alone = replace(journey, weights=(1,), changes=(), cap=MicroBatchCap())
    assert in_order == [[sample for _, pairs, _ in step for sample, _ in pairs] for step in expected(alone, 0)]


def await_that(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    assert is_so()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_that_is_as_far_ahead_as_it_can_be_is_sent_back(rank: int) -> None:
    changes = tuple(Change(step, step + 2, weights=(step % 3, 1 + step % 2)) for step in range(1, 9))
    journey = Journey(n=15, batch=4, weights=(1, 1), cap=MicroBatchCap(), changes=changes, steps=10)
    furthest = 0
    with journey.loading(rank, num_workers=3) as loader:

        def pause(where: str) -> None:
            nonlocal furthest
            if where == "change":
                # the next step is at hand, another one in the queue, one waits for its place, and six are asked for
                thread: Any = loader._stream._thread
                await_that(thread._queue.full)
                furthest = max(furthest, loader._stream._requests.walker.next_step - loader._ahead.plan.step)  # type: ignore[union-attr]

        assert drive(loader, journey, pause=pause, look=await_peek) == expected(journey, rank)
    assert furthest >= 6


class HeldSamples(Samples):
    """Does not answer until the gate is open."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.gate = torch.multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> Any:
        assert self.gate.wait(PATIENCE_S)
        return super().__getitem__(index)


def test_changes_of_steps_that_nobody_has_fetched_yet_hold_as_well() -> None:
    changes = (Change(0, 1, cap=MicroBatchCap(1)), Change(0, 2, weights=(0, 1)), Change(0, 3, weights=(5, 1)))
    journey = Journey(n=10, batch=4, weights=(1, 1), changes=changes, steps=4)
    dataset = HeldSamples(journey.n)
    with journey.loading(1, num_workers=2, dataset=dataset) as loader:
        steps = drive(loader, journey, pause=lambda where: dataset.gate.set() if where == "take" else None)
    assert steps == expected(journey, 1) != expected(replace(journey, changes=changes[:2]), 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_peeked_at_is_dropped_if_its_micro_batches_change(num_workers: int) -> None:
    journey = Journey(n=10, batch=4, weights=(1,), changes=(Change(1, 2, cap=MicroBatchCap(1)),), steps=2)
    plans = journey.planner().plans(Position())
    with journey.loading(0, num_workers=num_workers) as loader:
        loader.take(next(plans))
        second = next(plans)
        seen = await_peek(loader, second)
        apply(journey.changes[0], loader, journey.planner())
        taken = loader.take(second)
    assert [batch.size for batch in seen.micro_batches] == [2, 2]
    assert [batch.size for batch in taken.micro_batches] == [1] * 4
    assert samples_of(taken) == samples_of(seen) != []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_many_changes_leave_nothing_behind(num_workers: int) -> None:
    changes = tuple(
        change
        for step in range(1, 120)
        for change in (Change(step, step + 2, weights=(step % 2, 1)), Change(step, step + 1, cap=MicroBatchCap(1)))
    )
    journey, asked = Journey(n=9, batch=4, weights=(1, 1), changes=changes, steps=120), []
    with journey.loading(0, num_workers=num_workers) as loader:
        steps = drive(loader, journey, pause=lambda where: asked.append(len(loader._stream._requests.asked)))
        assert len(loader._itinerary._walkers) == 2
        assert len(loader._itinerary._positions) <= 12
    assert steps == expected(journey, 0)
    assert max(asked) <= 2 * num_workers + 1


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 60), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_any_changes_give_the_steps_of_the_plan_with_any_processes(num_workers: int, seeds: range) -> None:
    for seed in seeds:
        generator = random.Random(seed)
        journey = some_journey(generator, steps=12, changes=10)
        rank = generator.randrange(len(journey.weights))
        with journey.loading(rank, num_workers=num_workers) as loader:
            assert drive(loader, journey) == expected(journey, rank), (seed, journey)
