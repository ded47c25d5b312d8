"""Lane layout: which record of which lane is record i of an epoch, and where lanes were last read. Pure, integers only.

A stream is read as lanes, sequential sources whose number never changes. Every step takes the next records of every
lane, and the records of a lane follow one another within the step. So the slice of a rank is a run of neighbouring
lanes, which it reads forward, and the order depends on the lanes and the global batch alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_KEPT = 2  # cursors of a lane: a step that is repeated may begin before the newest one


@dataclass(frozen=True)
class LaneLayout:
    """The records of one epoch: `length` in `lanes` lanes, taken in steps of `batch`, a multiple of `lanes`.

    A `batch` of at least `length` takes all in one step: the lanes follow one another.
    """

    lanes: int
    length: int
    batch: int

    @property
    def per_lane(self) -> int:
        """The records that a whole step takes of a lane."""
        return -(-min(self.batch, self.length) // self.lanes)

    def place(self, index: int) -> tuple[int, int]:
        """The lane of record `index`, and its place in the lane."""
        step, within = divmod(index, self.batch)
        size = min(self.batch, self.length - step * self.batch)
        lane = ((within + 1) * self.lanes - 1) // size
        return lane, step * (self.batch // self.lanes) + within - lane * size // self.lanes

    def part(self, lane: int) -> int:
        """The number of records of a lane that an epoch takes; the same for every batch."""
        return (lane + 1) * self.length // self.lanes - lane * self.length // self.lanes


class Cursor(NamedTuple):
    """The state of a lane's reader before it gave record `at` of the lane, as JSON."""

    epoch: int
    lane: int
    at: int
    state: str


class Cursors:
    """The newest known cursors of each lane. Safe to read from several threads and after a fork: it holds no lock."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Cursor, ...]] = {}  # (epoch, lane) -> by `at`, descending

    def learn(self, cursors: Iterable[Cursor]) -> None:
        """Keep the newest of these and of those known; cursors of epochs before the last but one are forgotten."""
        known = {key: {cursor.at: cursor for cursor in kept} for key, kept in self._known.items()}
        for cursor in cursors:
            known.setdefault((cursor.epoch, cursor.lane), {})[cursor.at] = cursor
        newest = max((epoch for epoch, _ in known), default=0)
        self._known = {
            key: tuple(by_place[at] for at in sorted(by_place, reverse=True)[:_KEPT])
            for key, by_place in known.items()
            if key[0] >= newest - 1
        }

    def before(self, epoch: int, lane: int, place: int) -> Cursor | None:
        """The newest cursor of a lane that is not behind `place`."""
        return next((cursor for cursor in self._known.get((epoch, lane), ()) if cursor.at <= place), None)

    def all(self) -> list[Cursor]:
        """All that are known, in a fixed order: ranks that know the same say the same."""
        return [cursor for key in sorted(self._known) for cursor in self._known[key]]

    def clear(self) -> None:
        """Forget all."""
        self._known = {}
