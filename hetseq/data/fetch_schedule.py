"""Fetch schedule: the micro-batches that one rank fetches, step by step, while shares may change. Pure, no torch.

Where steps begin never depends on shares, so a change only names the step from which the old division is invalid.
Walkers that are ahead (a DataLoader's sampler, a thread that collects a step) are sent back to that step. The version
of a step is the number of changes that affect it; data fetched for another version is not used. Advancing to a step and
reading its plan is one atomic operation: otherwise a walker could use an old plan after a change had sent it back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

from hetseq.data.plan import Assign, Indices, MicroBatchCap, Planner, Position, StepPlan


class Key(NamedTuple):
    """A micro-batch: its step, and its first and end position in the epoch order."""

    step: int
    start: int
    stop: int


@dataclass
class Walker:
    """A reader's place in an itinerary. It advances step by step and can be sent back, only by the itinerary."""

    next_step: int


class Itinerary:
    """This rank's micro-batches of all steps from `first` on; safe to walk and change from several threads.

    `group` is the number of its data-parallel group. `first_cap`, if given, cuts the first step.
    """

    def __init__(
        self,
        planner: Planner,
        first: Position,
        group: int,
        *,
        cap: MicroBatchCap,
        first_cap: MicroBatchCap | None = None,
    ) -> None:
        self._planner, self._first, self._group = planner.copy(), first.step, group
        self._lock = threading.Lock()
        self._caps = [(first.step, first_cap or cap), (first.step + 1, cap)]  # (first step, cap), steps ascending
        self._changed: list[int] = []  # the first affected step of each change that is not forgotten
        self._forgotten = 0  # changes that affect every step that can still be requested
        self._positions = {first.step: first}  # by step, as far as any walker has come
        self._walkers: list[Walker] = []

    def walk(self, step: int | None = None) -> Walker:
        """A new walker, at the first step or at `step`, which must not be forgotten."""
        with self._lock:
            self._walkers.append(Walker(self._first if step is None else step))
            return self._walkers[-1]

    def leave(self, walker: Walker) -> None:
        """Remove a walker that is done; may be called twice."""
        with self._lock:
            self._walkers = [other for other in self._walkers if other is not walker]

    def change(self, step: int, *, assign: Assign | None = None, cap: MicroBatchCap | None = None) -> None:
        """From step `step` on, use `assign` for shares or `cap` for micro-batches; walkers ahead of it are sent back.

        `step` is not before the last step given to `forget_before`; changes of `assign` come in the order of steps.
        """
        with self._lock:
            if assign is not None:
                self._planner.change(step, assign)
            if cap is not None:
                self._caps = [(first, known) for first, known in self._caps if first < step] + [(step, cap)]
            self._changed.append(step)
            for walker in self._walkers:
                walker.next_step = min(walker.next_step, step)

    def go_on(self, walker: Walker) -> tuple[StepPlan, int, list[Key]]:
        """The next step of a walker: its plan, its version, and this rank's micro-batches in order.

        A step without samples has one empty micro-batch: a search for the next step with samples might never end.
        """
        with self._lock:
            step = walker.next_step
            plan = self._planner.plan(self._position(step))
            cap = next(cap for first, cap in reversed(self._caps) if first <= step)
            walker.next_step += 1
            return plan, self._version(step), self._keys(plan, cap) or [Key(step, 0, 0)]

    def is_sent_back(self, walker: Walker, step: int) -> bool:
        """Whether the walker has been sent back to step `step` or before."""
        with self._lock:
            return walker.next_step <= step

    def forget_before(self, step: int) -> None:
        """Forget the steps before this one, which can no longer be requested."""
        with self._lock:
            self._positions = {number: at for number, at in self._positions.items() if number >= step}
            self._forgotten += sum(first <= step for first in self._changed)
            self._changed = [first for first in self._changed if first > step]
            self._caps = self._caps[sum(first <= step for first, _ in self._caps) - 1 :]

    def version(self, step: int) -> int:
        """The number of changes that affect step `step`."""
        with self._lock:
            return self._version(step)

    def cut_again(self, plan: StepPlan, cap: MicroBatchCap) -> list[Key]:
        """This rank's micro-batches of a step with another cap."""
        with self._lock:
            return self._keys(plan, cap)

    def indices(self, epoch: int, key: Key) -> Indices:
        """The samples of a micro-batch."""
        with self._lock:
            return self._planner.order(epoch).take(key.start, key.stop)

    def work(self, epoch: int, key: Key) -> int:
        """The work of a micro-batch in samples, tokens or units, in which a step is divided."""
        with self._lock:
            return self._planner.work(epoch, key.start, key.stop)

    def _version(self, step: int) -> int:
        return self._forgotten + sum(first <= step for first in self._changed)

    def _position(self, step: int) -> Position:
        known = max(number for number in self._positions if number <= step)
        while known < step:
            self._positions[known + 1] = self._planner.plan(self._positions[known]).next_position()
            known += 1
        return self._positions[step]

    def _keys(self, plan: StepPlan, cap: MicroBatchCap) -> list[Key]:
        return [Key(plan.step, *piece) for piece in self._planner.micro_batches(plan, self._group, cap)]
