"""Lanes: a stream as a data set, read forward only by each rank, in an order that no cluster changes.

Responsible for opening, skipping and reopening the sources; `lane_layout` says which record comes when. It knows
neither steps nor ranks. The loader asks for sample i as of any data set.

The one idea: in the order of `lane_layout` a rank asks for neighbouring lanes, step after step. So `Lanes` holds one
reader for each lane that it was asked for. A reader goes forward, and keeps its last records for a step that is done
again. Only a lane that is new to this process is opened, from the newest cursor that is known.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from hetseq.data.fetch import seed_everything
from hetseq.data.lane_layout import Cursor, Cursors, LaneLayout
from hetseq.data.plan import EpochOrder, Indices, derive_seed
from hetseq.errors import ConfigError, TaskError

_CURSOR_EVERY = 64  # records of a lane
_STEPS_KEPT = 2  # a step may be done again after the next one was loaded
_STEPS_KEPT_AHEAD = 6  # a loader process may be sent back by five steps
_PROBED_LANES, _PROBED_RECORDS = 8, 2  # compared between ranks before the first step
_PROVED = 4  # records that are read twice, to see whether a cursor leads back
_PAGE = "docs/guides/streams.md"
#: of derive_seed, beside the place of a record, which is 0 or more
_OPENING, _AFTER = -1, -2


class Lanes(Dataset[Any]):
    """A stream as a data set for `run.steps`, `run.evaluate` and `Task.load_dataset`: sequential sources side by side.

    `open_lane(i)` opens lane i, from 0 to `lanes` - 1, and returns what gives its records one after the other, such as
    `ds.shard(64, i)` of a Hugging Face `IterableDataset`, or a generator over tar files. It is called on every rank
    that reads the lane. It must give the same records each time; if it has a parameter `epoch`, from 1, or returns an
    object with `set_epoch`, they may differ from epoch to epoch. torch, NumPy and Python are seeded for every record.

    `length` is the number of records in an epoch, over all lanes. Each lane gives `length / lanes` of them, rounded;
    the rest of a longer lane is not read, and a lane that ends earlier raises TaskError. For a stream without an end:
    `max_steps * global_batch_size`.

    Every step takes the next records of every lane, so `lanes` divides the global batch, and a rank that takes a part
    of the step reads some neighbouring lanes. More lanes than ranks let shares follow the speed of the ranks without
    reading twice. The order depends on `lanes`, `length`, `window`, `seed` and the global batch alone; `shuffle=` of
    `run.steps` changes nothing.

    `window` shuffles within a lane: each `window` records that follow one another are read together, held in memory,
    and given in an order that `seed`, epoch and lane determine. 1, the default, keeps the order of the lane. `seed`
    also seeds the random numbers that a source draws.

    A reader with `state_dict` (JSON values) and `load_state_dict` is asked for its state now and then; checkpoints hold
    these cursors. A lane that changes hands, or a run that resumes, then continues near its place; without them the
    lane is read again from its beginning.
    """

    def __init__(
        self, open_lane: Callable[..., Iterable[Any]], *, lanes: int, length: int | None, window: int = 1, seed: int = 0
    ) -> None:
        if not callable(open_lane):
            raise TaskError(
                f"Lanes got a {type(open_lane).__name__} as open_lane: expected a function that opens lane i, as in"
                " hetseq.Lanes(lambda i: ds.shard(64, i), lanes=64, length=...)"
            )
        if length is None:
            raise TaskError(
                "Lanes needs length, the number of records in an epoch over all lanes, since every rank must know where"
                " an epoch ends; for a stream without an end give max_steps * global_batch_size"
            )
        for name, value in (("lanes", lanes), ("length", length), ("window", window), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TaskError(f"Lanes got {name}={value!r}: expected a whole number, as in {name}=64")
        if not 1 <= lanes <= length or window < 1:
            raise TaskError(
                f"Lanes got lanes={lanes}, length={length}, window={window}: expected at least one lane, one record for"
                " each, and a window of at least 1"
            )
        self.lanes, self.length, self.window, self.seed = lanes, length, window, seed
        self._open_lane = open_lane
        self._takes_epoch = "epoch" in _parameters_of(open_lane)
        self._epoch = 1
        self._batch_of: Callable[[int], int | None] | None = None  # None: read lane after lane
        self._readers: dict[tuple[int, int], _Reader] = {}
        self._pid, self._inherited = os.getpid(), list[Any]()
        self._known, self._fresh = Cursors(), list[Cursor]()
        self._is_proved = False
        self._given: dict[int, Any] = {}  # what `open_lane` returned last, by lane

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"record {index} of {self.length}")
        lane, place = self._layout.place(index)
        record = self._reader(lane, place).record(place)
        # the same random numbers behind it, whether the record was read now or before
        seed_everything(derive_seed(self.seed, self._epoch, lane, place, _AFTER))
        return record

    def set_epoch(self, epoch: int) -> None:
        """From now on read the records of this epoch, from 1. The loader calls it."""
        self._epoch = epoch
        for key in [key for key in self._readers if key[0] < epoch - 1]:
            del self._readers[key]

    # for the rest of HetSeq

    def bind(self, batch_of: Callable[[int], int | None]) -> None:
        """Read in the order of steps from now on; `batch_of(epoch)` is the global batch in samples.

        Raises ConfigError for a batch that is no multiple of the lanes.
        """
        batch = batch_of(1)
        if batch is None or batch % self.lanes:
            raise ConfigError(
                f"a step has {batch or 'no fixed number of'} samples and Lanes has {self.lanes} lanes: a step takes"
                " as many records of each lane, so give a global batch that is a multiple of lanes"
            )
        before, was_bound, self._batch_of = self._layout, self._batch_of is not None, batch_of
        if self._layout != before or not was_bound:
            self._readers = {}

    def apart(self) -> Lanes:
        """The same records lane after lane, not shuffled, with readers of their own: for evaluation."""
        other = Lanes(self._open_lane, lanes=self.lanes, length=self.length, window=self.window, seed=self.seed)
        other._given = self._given
        return other

    def indices_to_compare(self) -> list[int]:
        """Some records, in the order of `apart`, that are near the beginning of their lanes."""
        count = min(self.lanes, _PROBED_LANES)
        found: list[int] = []
        for lane in np.linspace(0, self.lanes - 1, count).round().astype(int).tolist():
            first, layout = lane * self.length // self.lanes, LaneLayout(self.lanes, self.length, self.length)
            found += range(first, first + min(layout.part(lane), _PROBED_RECORDS))
        return found

    def in_words(self) -> str:
        """What the order of the records depends on, beside the global batch."""
        return f"{self.lanes} lanes, {self.length} records, window {self.window}, seed {self.seed}"

    def fresh_cursors(self) -> tuple[Cursor, ...]:
        """The cursors that reading has left since the last call; the loader takes them along with the records."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def learn(self, cursors: Iterable[Cursor]) -> None:
        """Remember cursors that readers in other processes have left."""
        self._known.learn(cursors)

    def hints(self, asked: dict[tuple[int, int], int], epoch: int, indices: Indices) -> tuple[Cursor, ...]:
        """The cursors that a loader process needs for these records, because it has not read their lanes up to here.

        `asked` is what the process was asked for before, by epoch and lane; it is updated.
        """
        found, layout = [], self._layout_of(epoch)
        for index in indices.tolist():
            lane, place = layout.place(index)
            cursor = self._known.before(epoch, lane, place - place % self.window)
            if cursor is not None and cursor.at > asked.get((epoch, lane), 0):
                found.append(cursor)
            asked[epoch, lane] = place + 1
        return tuple(found)

    def state_dict(self) -> dict[str, Any]:
        """The cursors that this rank knows, for a checkpoint and for other ranks."""
        return {"cursors": [[*cursor[:3], json.loads(cursor.state)] for cursor in self._known.all()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know the cursors of a checkpoint, and no others."""
        self._known.clear()
        self.hear([state])

    def hear(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Learn the cursors that other ranks know."""
        cursors = (cursor for state in states for cursor in state["cursors"])
        self.learn(Cursor(epoch, lane, at, json.dumps(told)) for epoch, lane, at, told in cursors)

    # the readers

    @property
    def _layout(self) -> LaneLayout:
        return self._layout_of(self._epoch)

    def _layout_of(self, epoch: int) -> LaneLayout:
        batch = None if self._batch_of is None else self._batch_of(epoch)
        return LaneLayout(self.lanes, self.length, min(batch or self.length, self.length))

    def _reader(self, lane: int, place: int) -> _Reader:
        """The reader of a lane, which can give this record."""
        if self._pid != os.getpid():  # forked: the readers of the parent share their open files with it
            self._inherited.append(self._readers)  # kept, so that no generator is closed here
            self._readers, self._pid = {}, os.getpid()
        key = self._epoch, lane
        reader = self._readers.get(key)
        cursor = self._known.before(*key, place - place % self._width)
        if reader is not None and reader.reaches(place) and not reader.is_far_behind(cursor):
            return reader
        reader = self._readers[key] = self._open(lane, cursor)
        return reader

    def _open(self, lane: int, cursor: Cursor | None) -> _Reader:
        layout, is_bound = self._layout, self._batch_of is not None
        steps = _STEPS_KEPT if get_worker_info() is None else _STEPS_KEPT_AHEAD
        kept = steps * layout.per_lane if is_bound else 0
        # more than a step apart: of the two cursors that are kept, the older one lies before every step to come
        spacing = max(_CURSOR_EVERY, layout.per_lane) + self._width if is_bound else 0
        return _Reader(self, lane, cursor, part=layout.part(lane), kept=kept, spacing=spacing)

    @property
    def _width(self) -> int:
        """The records that are read together: lanes that are read one after the other are not shuffled."""
        return 1 if self._batch_of is None else self.window

    def _source(self, lane: int, state: str | None) -> Any:
        seed_everything(derive_seed(self.seed, self._epoch, lane, _OPENING))
        source = self._open_lane(lane, **({"epoch": self._epoch} if self._takes_epoch else {}))
        if not isinstance(source, Iterable):
            raise TaskError(
                f"open_lane({lane}) returned a {type(source).__name__}: expected an iterable of the records of a lane"
            )
        is_known = any(source is other for other in self._given.values())
        if is_known and (isinstance(source, Iterator) or hasattr(source, "state_dict")):
            raise TaskError(
                f"open_lane({lane}) returned a {type(source).__name__} that it has returned before: expected a new one"
                " from each call"
            )
        self._given[lane] = source
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._epoch)
        if state is not None:
            given: Any = source
            given.load_state_dict(json.loads(state))
        return source


class _Reader:
    """One lane in one epoch, read forward by windows; the last `kept` records can be asked for again."""

    def __init__(self, stream: Lanes, lane: int, cursor: Cursor | None, *, part: int, kept: int, spacing: int) -> None:
        self._stream, self._lane, self._part, self._kept, self._spacing = stream, lane, part, kept, spacing
        self._epoch, self._window = stream._epoch, stream._width
        self._first = self._at = 0 if cursor is None else cursor.at  # of the next record; a multiple of the window
        self._source = stream._source(lane, None if cursor is None else cursor.state)
        self._records = iter(self._source)
        self._has_state = all(callable(getattr(self._source, name, None)) for name in ("state_dict", "load_state_dict"))
        self._held: dict[int, Sequence[Any]] = {}  # by window
        self._twin: Iterator[Any] | None = None  # reads the same records from a cursor
        self._proved = 0

    def reaches(self, place: int) -> bool:
        """Whether the record is held, or still to come."""
        return place // self._window in self._held or place - place % self._window >= self._at

    def is_far_behind(self, cursor: Cursor | None) -> bool:
        """Whether opening the lane at the cursor is better than reading on."""
        return cursor is not None and cursor.at >= self._at + self._spacing > self._at

    def record(self, place: int) -> Any:
        window, offset = divmod(place, self._window)
        while window not in self._held:
            self._load()
        return self._held[window][offset]

    def _load(self) -> None:
        """Read the next window."""
        begin, number = self._at, self._at // self._window
        if self._is_cursor_due:
            self._leave_cursor()
        size = min(self._window, self._part - begin)
        records = [self._next() for _ in range(size)]
        order = EpochOrder(size, seed=derive_seed(self._stream.seed, self._lane, number), epoch=self._epoch)
        self._held[number] = [records[i] for i in order.take(0, size).tolist()] if size > 1 else records
        first = (begin - self._kept) // self._window
        self._held = {window: kept for window, kept in self._held.items() if window >= first}

    @property
    def _is_cursor_due(self) -> bool:
        """At the same places on every rank; but not where the source was opened, which may not know its place yet."""
        if not self._has_state or not self._spacing or self._at == self._first:
            return False
        return self._at // self._spacing > (self._at - self._window) // self._spacing

    def _next(self) -> Any:
        stream, lane, at = self._stream, self._lane, self._at
        # also for a record that is only skipped: a source may drop records at random
        seed = derive_seed(stream.seed, self._epoch, lane, at)
        seed_everything(seed)
        try:
            record = next(self._records)
        except StopIteration:
            raise TaskError(
                f"lane {lane} ended after {at} records, expected {self._part}: give Lanes a length of at most lanes"
                f" times the records of the shortest lane, here {stream.lanes * at} or less, or longer sources"
            ) from None
        self._at += 1
        if self._twin is not None:
            seed_everything(seed)
            self._prove(record, next(self._twin, None))
        return record

    def _leave_cursor(self) -> None:
        """Have the state of the source before its next record remembered."""
        try:
            state = json.dumps(self._source.state_dict())
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"the state_dict of lane {self._lane} holds what JSON cannot ({error}): expected numbers, text, None,"
                " lists and dicts of them"
            ) from None
        self._stream._fresh.append(Cursor(self._epoch, self._lane, self._at, state))
        if not self._stream._is_proved:
            self._stream._is_proved = True
            self._twin = iter(self._stream._source(self._lane, state))

    def _prove(self, record: Any, again: Any) -> None:
        """Compare the records behind the first cursor with those of a source that was opened from it."""
        self._proved += 1
        if not _is_same(record, again):
            raise TaskError(
                f"lane {self._lane}: load_state_dict does not lead back to record {self._at - 1}, as after"
                " shuffle(buffer_size=...) of Hugging Face datasets, which loses its buffer: use window= of Lanes in"
                " its place, or return iter(...) of the source, which has no state and is read from its beginning"
            )
        if self._proved == min(_PROVED, self._part - self._at + self._proved):
            self._twin = None


def lanes_of(dataset: Any) -> Lanes | None:
    """The data set if it is `Lanes`, which has an order and readers of its own."""
    return dataset if isinstance(dataset, Lanes) else None


def check_is_indexed(dataset: Any, what: str, *, error: type[TaskError] = TaskError) -> None:
    """Raise an error for data without an index, with the way out; `what` begins its text, such as `run.steps got`."""
    kind = type(dataset).__name__
    given = getattr(type(dataset), "__getitem__", None)
    is_indexed = given is not None and given is not Dataset.__getitem__ and hasattr(dataset, "__len__")
    if is_indexed:
        return
    if hasattr(dataset, "__iter__") and not isinstance(dataset, Mapping):
        raise error(
            f"{what} a {kind}, which has no index: wrap it in hetseq.Lanes(lambda i: ds.shard(64, i), lanes=64,"
            f" length=...), or convert it to an indexed format ({_PAGE}); expected __len__ and __getitem__: if it is"
            " short, read it into a list"
        )
    raise error(f"{what} a {kind}: expected a data set with __len__ and __getitem__")


def _parameters_of(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a built-in
        return ()


def _is_same(one: Any, other: Any) -> bool:
    """Whether two readings of a record are equal, as far as values of known kinds go."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor):
        one, other = one.detach().cpu(), other.detach().cpu()
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, np.ndarray) and not one.dtype.hasobject:
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, (str, bytes, int, float)):
        return bool(one == other or one != one)
    return type(one) is type(other)
