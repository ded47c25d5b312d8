"""Lanes: every record once, read forward, in an order that no cluster changes; what cannot be read so is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetseq import Lanes
from hetseq.balance.shares import assign_shares
from hetseq.data.lane_layout import Cursor, Cursors, LaneLayout
from hetseq.data.lanes import check_is_indexed
from hetseq.data.loader import Source, StepLoader, range_reader
from hetseq.data.plan import GlobalBatch, MicroBatchCap, Planner, Position
from hetseq.errors import ConfigError, TaskError
from tests.support.trials import until

LANES, PART, BATCH = 6, 41, 24
LENGTH = LANES * PART - 3  # the last step is ragged


class Tape:
    """The records of one lane, forward only; `read` counts what was read of each lane, over all tapes."""

    def __init__(self, lane: int, read: Counter[int], first: int = 0) -> None:
        self.lane, self.at, self._read = lane, first, read

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        if self.at == PART:
            raise StopIteration
        self._read[self.lane] += 1
        self.at += 1
        return self.lane, self.at - 1


class SavedTape(Tape):
    """A tape that knows where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class LazyTape(SavedTape):
    """It knows where it is from its first record on, as a generator does."""

    first = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]

    def __next__(self) -> tuple[int, int]:
        self.at, self.first = max(self.at, self.first), 0
        self._read[self.lane] += 1
        self.at += 1
        return self.lane, self.at - 1


def make(kind: type[Tape] = Tape, **more: Any) -> tuple[Lanes, Counter[int]]:
    read = Counter[int]()
    return Lanes(lambda lane: kind(lane, read), **{"lanes": LANES, "length": LENGTH, **more}), read


def planner_of(weights: tuple[float, ...], length: int = LENGTH, batch: int = BATCH) -> Planner:
    return Planner(length, 7, GlobalBatch(batch), lambda total: assign_shares(total, weights), curriculum=9)


def source_of(lanes: Any) -> Source:
    return Source(lanes, list, lambda sample, size: (float(size),), lambda sample: sample, 1, 7)


def steps_of(
    lanes: Lanes, weights: tuple[float, ...], group: int, *, first: Position | None = None, steps: int, workers: int = 0
) -> list[list[Any]]:
    """The records that a rank gets in each step."""
    first = first or Position()
    lanes.bind(lambda epoch: BATCH)
    loader = StepLoader(source_of(lanes), planner_of(weights), first, group=group, cap=MicroBatchCap(5),
                        num_workers=workers)  # fmt: skip
    try:
        found, position = [], first
        for _ in range(steps):
            plan = planner_of(weights).plan(position)
            data = loader.take(plan)
            found.append([record for batch in data.micro_batches for record in batch.sample])
            position = plan.next_position()
        return found
    finally:
        loader.close()


STEPS = -(-LENGTH // BATCH)


@pytest.mark.parametrize(
    ("lanes", "length", "batch"), [(6, 243, 24), (6, 243, 243), (4, 64, 8), (5, 7, 5), (3, 3, 300)]
)
def test_each_record_comes_once_and_each_lane_forward(lanes: int, length: int, batch: int) -> None:
    layout = LaneLayout(lanes, length, min(batch, length))
    places = [layout.place(index) for index in range(length)]
    for lane in range(lanes):
        assert [place for of, place in places if of == lane] == list(range(layout.part(lane)))
    for start in range(0, length, layout.batch):
        step = [lane for lane, _ in places[start : start + layout.batch]]
        assert step == sorted(step), "the lanes of a step follow one another"
        assert max(Counter(step).values()) <= layout.per_lane


@pytest.mark.parametrize("window", [1, 7])
@pytest.mark.parametrize("weights", [(5.0, 2.0, 1.0), (1.0, 0.0, 3.0, 3.0)])
def test_the_order_is_the_same_on_any_ranks_and_few_records_are_read_twice(
    weights: tuple[float, ...], window: int
) -> None:
    alone = steps_of(make(window=window)[0], (1.0,), 0, steps=STEPS)
    assert sorted(record for step in alone for record in step) == sorted(
        (lane, place) for lane in range(LANES) for place in range(LaneLayout(LANES, LENGTH, BATCH).part(lane))
    )
    total, ranks = Counter[int](), []
    for group in range(len(weights)):
        lanes, read = make(window=window)
        ranks.append(steps_of(lanes, weights, group, steps=STEPS))
        assert all(number <= PART for number in read.values()), "no lane is read again by one rank"
        total += read
    for step, whole in enumerate(alone):
        assert [record for rank in ranks for record in rank[step]] == whole
    borders = sum(weight > 0 for weight in weights) - 1
    # at most one lane at each border in a full step, and one more in the ragged one; the ranks read one step ahead
    assert total.total() <= LENGTH + 2 * borders * PART
    if window > 1:
        assert alone != steps_of(make()[0], (1.0,), 0, steps=STEPS)


def test_a_rank_reads_its_lanes_alone() -> None:
    lanes, read = make()
    steps_of(lanes, (2.0, 1.0), 1, steps=STEPS - 2)
    assert set(read) == {4, 5}


def test_a_second_epoch_opens_the_lanes_again_and_is_shuffled_anew() -> None:
    opened = []

    def open_lane(lane: int, epoch: int) -> Iterator[Any]:
        opened.append((lane, epoch))
        return iter([(lane, place) for place in range(PART)])

    found = steps_of(Lanes(open_lane, lanes=LANES, length=LENGTH, window=5), (1.0,), 0, steps=2 * STEPS)
    first, second = ([record for step in part for record in step] for part in (found[:STEPS], found[STEPS:]))
    assert sorted(first) == sorted(second)
    assert first != second
    assert sorted(opened) == sorted((lane, epoch) for lane in range(LANES) for epoch in (1, 2))


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_rank_opens_its_lanes_at_the_cursors(workers: int, window: int) -> None:
    part = 400
    read, length = Counter[int](), 3 * part

    def run(lanes: Lanes, first: Position, steps: int) -> list[Any]:
        lanes.bind(lambda epoch: 12)
        planner = planner_of((1.0,), length, 12)
        loader = StepLoader(source_of(lanes), planner, first, group=0, cap=MicroBatchCap(5), num_workers=workers)
        try:
            return [
                [record for batch in loader.take(planner.plan(place)).micro_batches for record in batch.sample]
                for place in (
                    Position(number, 1, 12 * (number - 1)) for number in range(first.step, first.step + steps)
                )
            ]
        finally:
            loader.close()

    before = Lanes(lambda lane: LazyTape(lane, read), lanes=3, length=length, window=window)
    run(before, Position(), 80)
    state = json.loads(json.dumps(before.state_dict()))
    assert state["cursors"]
    whole = run(Lanes(lambda lane: LazyTape(lane, read), lanes=3, length=length, window=window), Position(), 90)
    after = Lanes(lambda lane: LazyTape(lane, read), lanes=3, length=length, window=window)
    after.load_state_dict(state)
    read.clear()
    assert run(after, Position(66, 1, 12 * 65), 25) == whole[65:]
    if not workers:  # else another process has read
        assert all(number <= 150 for number in read.values()), f"{read} records for 40 of each lane"


def test_a_lane_that_comes_to_a_loader_process_is_opened_at_a_cursor() -> None:
    lanes, _ = make()
    lanes.learn([Cursor(1, 2, 30, "{}"), Cursor(1, 3, 10, "{}")])
    lanes.bind(lambda epoch: BATCH)
    layout, asked = LaneLayout(LANES, LENGTH, BATCH), dict[tuple[int, int], int]()
    at = {place: index for index in range(LENGTH) if (place := layout.place(index))[0] == 2}
    assert lanes.hints(asked, 1, np.array([at[2, 32], at[2, 33]])) == (Cursor(1, 2, 30, "{}"),)
    assert lanes.hints(asked, 1, np.array([at[2, 34]])) == ()
    assert lanes.hints(asked, 1, np.array([at[2, 5]])) == (), "no cursor is before it"


def test_of_the_cursors_of_a_lane_the_newest_before_a_place_is_taken() -> None:
    cursors = Cursors()
    cursors.learn(Cursor(1, 0, at, str(at)) for at in (60, 20, 40))
    found = [cursors.before(1, 0, place) for place in (70, 59, 39)]
    assert [None if cursor is None else cursor.at for cursor in found] == [60, 40, None]
    cursors.learn([Cursor(3, 0, 8, "8")])
    assert cursors.all() == [Cursor(3, 0, 8, "8")]


def test_a_step_that_is_done_again_is_not_read_again() -> None:
    lanes, read = make()
    lanes.bind(lambda epoch: BATCH)
    first = [lanes[index] for index in range(3 * BATCH)]
    assert [lanes[index] for index in range(BATCH, 3 * BATCH)] == first[BATCH:]
    assert read.total() == 3 * BATCH
    assert [lanes[index] for index in range(BATCH)] == first[:BATCH], "it may also begin anew"


class LoggedTape(Tape):
    """Adds a byte to a file for each record, whichever process reads it."""

    def __init__(self, lane: int, file: Path) -> None:
        super().__init__(lane, Counter())
        self._file = file

    def __next__(self) -> tuple[int, int]:
        record = super().__next__()
        with self._file.open("a") as file:
            file.write(".")
        return record


def test_new_sizes_send_a_loader_process_back_and_it_reads_nothing_again(tmp_path: Path) -> None:
    log = tmp_path / "read"

    def read() -> int:
        return log.stat().st_size if log.exists() else 0

    lanes = Lanes(lambda lane: LoggedTape(lane, log), lanes=LANES, length=LENGTH)
    lanes.bind(lambda epoch: BATCH)
    planner = planner_of((1.0,))
    plans = list(islice(planner.plans(Position()), STEPS))
    loader = StepLoader(source_of(lanes), planner, Position(), group=0, cap=MicroBatchCap(), num_workers=1)
    try:
        loader.take(plans[0])
        until(lambda: loader.peek(plans[1]) is not None, "the second step")
        until(lambda: read() >= 6 * BATCH, "as much as is read ahead")
        loader.change(2, cap=MicroBatchCap(7))
        again = [record for batch in loader.take(plans[1]).micro_batches for record in batch.sample]
        assert again == steps_of(make()[0], (1.0,), 0, steps=2)[1]
        for plan in plans[2:5]:
            loader.take(plan)
        assert read() <= 10 * BATCH, "five steps, and five ahead"
    finally:
        loader.close()


def test_random_numbers_belong_to_the_record() -> None:
    """Also in a source that drops records at random, and where records were skipped to come to it."""

    def open_lane(lane: int) -> Iterator[Any]:
        shift = random.random()
        for place in range(1000):
            if random.random() < 0.6:
                yield place, shift, float(torch.rand(())), float(np.random.rand())

    whole = steps_of(Lanes(open_lane, lanes=LANES, length=LENGTH), (1.0,), 0, steps=6)
    late = steps_of(Lanes(open_lane, lanes=LANES, length=LENGTH), (1.0,), 0, first=Position(5, 1, 4 * BATCH), steps=2)
    assert late == whole[4:]


def test_for_an_evaluation_lanes_are_read_one_after_the_other_by_other_readers() -> None:
    lanes, read = make(window=4)
    steps_of(lanes, (1.0,), 0, steps=3)
    read.clear()
    read_range = range_reader(source_of(lanes))
    found = [record for start in range(0, LENGTH, 10) for record in read_range(start, min(start + 10, LENGTH)).sample]
    assert found == sorted(found)
    assert len(set(found)) == LENGTH == read.total()


def test_what_is_compared_between_ranks_is_near_the_beginning_of_lanes() -> None:
    many, read = Counter[int](), Counter[int]()
    lanes = Lanes(lambda lane: Tape(lane, read), lanes=20, length=20 * PART).apart()
    found = [lanes[index] for index in lanes.indices_to_compare()]
    assert [place for _, place in found] == [0, 1] * 8
    assert (min(found), max(found)) == ((0, 0), (19, 1))
    assert read.total() == 16
    assert not many


class Forgetful(SavedTape):
    """Says where it is, and comes back elsewhere."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + 1


class Twisted(SavedTape):
    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}


@pytest.mark.parametrize(
    ("lanes", "told"),
    [
        (lambda: make(length=LANES * PART + 1)[0],
         r"lane 5 ended after 41 records, expected 42: give Lanes a length of at most .* here 246 or less"),
        (lambda: Lanes(lambda lane: 7, lanes=6, length=60), r"open_lane\(0\) returned a int: expected an iterable"),
        (lambda: Lanes(dict.fromkeys(range(6), Tape(0, Counter())).__getitem__, lanes=6, length=60),
         r"open_lane\(1\) returned a Tape that it has returned before: expected a new one from each call"),
    ],
    ids=["a lane that ends early", "no iterable", "the same for all lanes"],
)  # fmt: skip
def test_a_source_that_cannot_be_read_so_is_refused(lanes: Any, told: str) -> None:
    stream = lanes()
    stream.bind(lambda epoch: BATCH)
    with pytest.raises(TaskError, match=told):
        [stream[index] for index in range(len(stream))]


def test_an_object_that_is_given_twice_is_refused() -> None:
    tapes = [SavedTape(lane, Counter()) for lane in range(LANES)]
    stream = Lanes(lambda lane: tapes[lane], lanes=LANES, length=LENGTH)
    stream.bind(lambda epoch: BATCH)
    [stream[index] for index in range(5 * BATCH)]
    with pytest.raises(TaskError, match=r"open_lane\(0\) returned a SavedTape that it has returned before"):
        stream[0]


@pytest.mark.parametrize(
    ("kind", "told"),
    [(Forgetful, r"lane 0: load_state_dict does not lead back to record \d+, as after shuffle\(buffer_size"),
     (Twisted, r"the state_dict of lane 0 holds what JSON cannot \(Object of type Tensor")],
)  # fmt: skip
def test_a_reader_whose_state_is_of_no_use_is_refused(kind: type[SavedTape], told: str) -> None:
    class Endless(kind):  # type: ignore[misc, valid-type]
        def __next__(self) -> Any:
            self.at += 1
            return self.at - 1

    stream = Lanes(lambda lane: Endless(lane, Counter()), lanes=1, length=400)
    stream.bind(lambda epoch: 4)
    with pytest.raises(TaskError, match=told):
        [stream[index] for index in range(400)]


@pytest.mark.parametrize(
    ("given", "told"),
    [({"length": None}, r"Lanes needs length, the number of records in an epoch .* give max_steps \* global_batch"),
     ({"lanes": 0}, r"Lanes got lanes=0, length=243, window=1: expected at least one lane"),
     ({"window": 0}, "window=0: expected")],
)  # fmt: skip
def test_lanes_without_measure_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        make(**given)
    with pytest.raises(TaskError, match="Lanes got a list as open_lane"):
        Lanes([], lanes=1, length=1)  # type: ignore[arg-type]


def test_a_batch_that_is_no_multiple_of_the_lanes_is_refused() -> None:
    with pytest.raises(ConfigError, match="a step has 25 samples and Lanes has 6 lanes: a step takes as many"):
        make()[0].bind(lambda epoch: 25)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("data", [Stream(), (number for number in [1])])
def test_a_stream_is_refused_with_the_way_out(data: Any) -> None:
    with pytest.raises(TaskError, match=r"which has no index: wrap it in hetseq.Lanes\(lambda i: ds.shard\(64, i\)"):
        check_is_indexed(data, "run.steps got")


@pytest.mark.parametrize("data", [[1], (1,), np.arange(3), torch.utils.data.TensorDataset(torch.ones(2))])
def test_data_with_an_index_are_taken(data: Any) -> None:
    check_is_indexed(data, "run.steps got")
