"""Shares that change under way: whoever walks ahead is sent back in time, whenever the change comes in between."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from hetseq.data import loader as loader_module
from hetseq.data.fetch_schedule import Itinerary, Key
from hetseq.data.loader import StepLoader
from hetseq.data.plan import MicroBatchCap, Position
from tests.support.journeys import Change, Journey, Stepwise, apply, by, drive, expected, some_journey

TWO = Journey(n=11, batch=4, weights=(1, 1))


def itinerary(journey: Journey = TWO, rank: int = 0) -> Itinerary:
    return Itinerary(journey.planner(), journey.first, rank, cap=journey.cap, first_cap=journey.first_cap)


# Walking.


def test_a_walker_comes_to_every_step_in_turn_over_the_end_of_an_epoch() -> None:
    way = itinerary()
    walker, other = way.walk(), way.walk()
    legs = [way.go_on(walker) for _ in range(5)]
    assert [keys for _, _, keys in legs] == [
        [Key(1, 0, 2)], [Key(2, 4, 6)], [Key(3, 8, 9)], [Key(4, 0, 2)], [Key(5, 4, 6)]
    ]  # fmt: skip
    assert [(plan.step, plan.epoch, plan.shares) for plan, _, _ in legs[2:4]] == [(3, 1, (1, 2)), (4, 2, (2, 2))]
    assert way.go_on(other)[0].step == 1  # the twin: walkers do not push each other


def test_a_step_without_samples_has_one_micro_batch_without_any() -> None:
    way = itinerary(replace(TWO, weights=(1, 0)), rank=1)
    assert way.go_on(way.walk())[2] == [Key(1, 0, 0)]
    assert itinerary(replace(TWO, weights=(1, 0))).go_on(way.walk())[2] == [Key(1, 0, 2), Key(1, 2, 4)]


def test_the_first_step_has_a_cap_of_its_own() -> None:
    first_cap = MicroBatchCap(is_ramp=True)
    way = itinerary(Journey(40, 10, (1,), MicroBatchCap(5), first=Position(3, 2, 10), first_cap=first_cap))
    walker = way.walk()
    assert way.go_on(walker)[2] == [Key(3, *piece) for piece in ((10, 11), (11, 13), (13, 17), (17, 20))]
    assert way.go_on(walker)[2] == [Key(4, 20, 25), Key(4, 25, 30)]


def test_a_change_sends_back_who_is_beyond_it_and_nobody_else() -> None:
    way = itinerary()
    far, near, still = way.walk(), way.walk(), way.walk()
    for _ in range(5):
        way.go_on(far)
    for _ in range(2):
        way.go_on(near)
    way.change(3, assign=by((1, 0)))
    assert [way.is_sent_back(far, step) for step in (2, 3, 5)] == [False, True, True]
    assert not way.is_sent_back(near, 2)
    assert way.go_on(far)[2] == way.go_on(near)[2] == [Key(3, 8, 10), Key(3, 10, 11)]
    assert not way.is_sent_back(far, 3)
    assert way.go_on(still)[0].step == 1


def test_a_change_of_shares_leaves_the_steps_before_it_as_they_are() -> None:
    changed, calm = itinerary(), itinerary()
    changed.change(3, assign=by((1, 0)))
    changed.change(5, assign=by((0, 1)))
    walker, other = changed.walk(), calm.walk()
    shares = [changed.go_on(walker)[0].shares for _ in range(6)]
    assert shares == [(2, 2), (2, 2), (3, 0), (4, 0), (0, 4), (0, 3)]
    assert [calm.go_on(other)[0].shares for _ in range(2)] == shares[:2]


def test_the_planner_it_was_made_from_is_left_alone() -> None:
    planner = TWO.planner()
    way = Itinerary(planner, Position(), 0, cap=TWO.cap)
    way.change(1, assign=by((1, 0)))
    plan, _, keys = way.go_on(way.walk())
    assert planner.plan(Position()).shares == (2, 2) != plan.shares == (4, 0)  # a controller tells its own
    planner.change(1, by((0, 1)))
    assert way.go_on(way.walk())[2] == keys


def test_a_change_of_micro_batches_may_come_before_one_of_shares_that_was_made_earlier() -> None:
    way = itinerary()
    way.change(3, assign=by((1, 0)))
    way.change(2, cap=MicroBatchCap(1))
    walker = way.walk()
    legs = [way.go_on(walker) for _ in range(3)]
    assert [len(keys) for _, _, keys in legs] == [1, 2, 3]
    assert [version for _, version, _ in legs] == [0, 1, 2]
    way.change(2, cap=MicroBatchCap(5))
    assert [way.go_on(walker)[2] for _ in range(2)] == [[Key(2, 4, 6)], [Key(3, 8, 11)]]


def test_a_version_counts_the_changes_of_a_step_also_when_they_are_forgotten() -> None:
    way = itinerary()
    walker = way.walk()
    way.go_on(walker)
    way.change(3, assign=by((1, 0)))
    way.change(4, cap=MicroBatchCap(1))
    before = [way.version(step) for step in range(3, 7)]
    way.go_on(walker)
    way.go_on(walker)
    way.forget_before(3)
    assert [way.version(step) for step in range(3, 7)] == before == [1, 2, 2, 2]
    way.change(4, assign=by((1, 1)))
    assert [way.version(step) for step in range(3, 7)] == [1, 3, 3, 3]


def test_what_a_rank_once_walked_can_be_cut_again_and_weighed() -> None:
    way = itinerary(Journey(12, 6, (1, 1), MicroBatchCap(3), lengths=tuple(range(12))))
    plan, _, keys = way.go_on(way.walk())
    start, stop = plan.range_of(0)
    assert way.cut_again(plan, MicroBatchCap(1)) == [Key(1, at, at + 1) for at in range(start, stop)]
    assert [way.work(1, key) for key in keys] == [sum(way.indices(1, key).tolist()) for key in keys]
    units = itinerary(Journey(12, 6, (1,), unit=4))
    assert units.work(1, Key(1, 0, 6)) == 2


def test_thousands_of_steps_and_changes_leave_nothing_behind() -> None:
    way, held = itinerary(), []
    walker = way.walk()
    for step in range(1, 1001):
        while walker.next_step < step + 7:  # somebody six steps ahead
            way.go_on(walker)
        way.forget_before(step)
        held.append([len(way._positions), len(way._changed), len(way._caps), len(way._planner._changes)])
        way.change(step + 2, assign=by((1 + step % 3, 1)))
        way.change(step + 1, cap=MicroBatchCap(1 + step % 2))
    assert [max(counts[kind] for counts in held) for kind in range(4)] == [7, 1, 2, 16]
    assert [min(counts[kind] for counts in held[20:]) for kind in range(4)] == [7, 1, 1, 16]
    assert len(way._planner._orders) <= 4


# Every moment at which a change may come.


class Watched(Itinerary):
    """Lets the test come in between before anything that two threads share."""

    point: Callable[[], None] = staticmethod(lambda: None)

    def go_on(self, *args: Any) -> Any:
        self.point()
        return super().go_on(*args)

    def is_sent_back(self, *args: Any) -> bool:
        self.point()
        return super().is_sent_back(*args)

    def version(self, *args: Any) -> int:
        self.point()
        return super().version(*args)

    def indices(self, *args: Any) -> Any:
        self.point()
        return super().indices(*args)

    def work(self, *args: Any) -> int:
        self.point()
        return super().work(*args)


class AskedAhead:
    """In place of loader processes: so many requests lie between the sampler and the drain."""

    requests = 1

    def __init__(self, fetcher: Any, collate: Any, sampler: Any, **how: Any) -> None:
        self._samples = self._fetch(fetcher, collate, iter(sampler))

    def __next__(self) -> Any:
        return next(self._samples)

    def _fetch(self, fetcher: Any, collate: Any, asking: Iterator[Any]) -> Iterator[Any]:
        asked = deque(next(asking) for _ in range(self.requests))
        while True:
            request = asked.popleft()
            asked.append(next(asking))
            yield collate(fetcher.__getitems__(request))

    def check(self) -> None:
        """Nobody can die."""

    def close(self) -> None:
        self._samples.close()  # type: ignore[attr-defined]


def asked_ahead(requests: int) -> type[AskedAhead]:
    return type("So", (AskedAhead,), {"requests": requests})


@contextmanager
def stepwise(journey: Journey, rank: int, requests: int) -> Iterator[tuple[StepLoader, Stepwise]]:
    """A loader whose drain goes on only when it is told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "Itinerary", Watched)
        patch.setattr(loader_module, "Fetched", asked_ahead(requests))
        patch.setattr(loader_module, "_Drain", Stepwise)
        with journey.loading(rank, num_workers=1) as loader:
            drain: Any = loader._stream._thread
            loader._itinerary.point = drain.point  # type: ignore[attr-defined]
            yield loader, drain


def walked(journey: Journey, rank: int, requests: int, points: Callable[[str], int]) -> list[Any]:
    """What the rank gets if the drain goes on by `points` points before each thing that the training thread does."""
    with stepwise(journey, rank, requests) as (loader, drain):
        return drive(loader, journey, pause=lambda where: drain.advance(points(where)))


CHANGING = Journey(
    n=7, batch=4, weights=(1, 1), cap=MicroBatchCap(1), steps=6,
    changes=(Change(1, 3, weights=(3, 1)), Change(1, 2, cap=MicroBatchCap(2)), Change(3, 5, weights=(0, 1))),
)  # fmt: skip


def walk_with_a_first_change_at(moments: range, rank: int, requests: int) -> list[list[Any]]:
    """What the rank gets for each moment of the drain at which the first change comes."""
    found = []
    for points in moments:
        waits = iter([points])
        found.append(walked(CHANGING, rank, requests, lambda where: next(waits, 0) if where == "change" else 3))  # noqa: B023
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("requests", [1, 2, 6])
def test_a_change_at_any_moment_of_the_drain_gives_the_steps_of_the_plan(requests: int, rank: int) -> None:
    right = expected(CHANGING, rank)
    assert walk_with_a_first_change_at(range(40), rank, requests) == [right] * 40
    assert right != expected(replace(CHANGING, changes=CHANGING.changes[:2]), rank)  # the twin: without the last one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("firsts", "seconds"),
    [(range(0, 40, 5), range(0, 25, 3)), pytest.param(range(0, 40, 2), range(25), marks=pytest.mark.nightly)],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("requests", [1, 3, 8])
def test_two_changes_at_any_two_moments_give_the_steps_of_the_plan(
    requests: int, rank: int, firsts: range, seconds: range
) -> None:
    right = expected(CHANGING, rank)
    for pair in itertools.product(firsts, seconds):
        waits = iter(pair)
        assert walked(CHANGING, rank, requests, lambda where: next(waits, 0) if where == "change" else 3) == right  # noqa: B023


def some_walks(seeds: range) -> Iterator[None]:
    for seed in seeds:
        generator = random.Random(seed)
        journey = some_journey(generator)
        rank = generator.randrange(len(journey.weights))
        most = generator.choice([0, 1, 5, 40])
        points = lambda where: generator.randint(0, most)  # noqa: B023, E731
        assert walked(journey, rank, generator.randint(1, 8), points) == expected(journey, rank), (seed, journey)
        yield


def test_any_changes_at_any_moments_give_the_steps_of_the_plan() -> None:
    assert sum(1 for _ in some_walks(range(40))) == 40


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1000, 1200), marks=pytest.mark.slow),
        pytest.param(range(1200, 2500), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_very_many_changes_at_any_moments_give_the_steps_of_the_plan(seeds: range) -> None:
    assert sum(1 for _ in some_walks(seeds)) == len(seeds)


def test_the_oracle_gives_every_sample_to_one_rank_in_every_step() -> None:
    for seed in range(20):
        journey = some_journey(random.Random(seed))
        ranks = [expected(journey, rank) for rank in range(len(journey.weights))]
        in_order = [[pair for batches in step for _, pairs, _ in batches for pair in pairs] for step in zip(*ranks)]
        alone = replace(journey, weights=(1,), changes=(), cap=MicroBatchCap(), first_cap=None)
        assert in_order == [[pair for _, pairs, _ in step for pair in pairs] for step in expected(alone, 0)]


def test_the_walk_notices_a_step_that_is_looked_up_after_it_was_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # the twin of all walks: in a loader that goes to a step first and learns its plan later, some moment shows
    def in_two_acts(self: Watched, walker: Any) -> Any:
        self.point()
        step, walker.next_step = walker.next_step, walker.next_step + 1
        self.point()
        aside = type(walker)(step)
        return Itinerary.go_on(self, aside)

    monkeypatch.setattr(Watched, "go_on", in_two_acts)
    with pytest.raises(AssertionError, match=r"in order|without end"):
        walk_with_a_first_change_at(range(60), 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.nightly)], ids=str)
def test_threads_that_switch_all_the_time_give_the_steps_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in seeds:
            generator = random.Random(seed)
            journey = some_journey(generator, steps=20, changes=20)
            rank = generator.randrange(len(journey.weights))
            monkeypatch.setattr(loader_module, "Fetched", asked_ahead(generator.randint(1, 8)))
            with journey.loading(rank, num_workers=1) as loader:
                assert drive(loader, journey) == expected(journey, rank), (seed, journey)
    finally:
        sys.setswitchinterval(interval_s)


def test_a_change_that_nobody_is_beyond_costs_no_batch() -> None:
    journey = replace(TWO, cap=MicroBatchCap(2))
    with journey.loading(0) as loader:
        planner, fetched, samples = journey.planner(), [], loader._fetcher.samples

        def counting(request: Any) -> Any:
            fetched.append(request)
            return samples(request)

        loader._fetcher.samples = counting  # type: ignore[method-assign]
        position = Position()
        for step in range(1, 5):
            plan = planner.plan(position)
            loader.take(plan)
            position = plan.next_position()
            loader.peek(planner.plan(position))
            apply(Change(step, step + 2, weights=(3 + step, 3)), loader, planner)
        assert len(fetched) == sum(len(step) for step in expected(replace(journey, steps=5), 0))


def test_of_a_step_that_is_not_wanted_any_more_no_further_batch_is_asked_for() -> None:
    way = itinerary(replace(TWO, weights=(1, 0), cap=MicroBatchCap(1)))
    requests = loader_module._Requests(way, way.walk(), None)
    asking = iter(requests)
    next(asking), next(asking)
    way.change(2, cap=MicroBatchCap(3))  # of a step that it has not come to
    next(asking)
    way.change(1, cap=MicroBatchCap(4))
    next(asking)
    assert list(requests.asked) == [Key(1, 0, 1), Key(1, 1, 2), Key(1, 2, 3), Key(1, 0, 4)]
