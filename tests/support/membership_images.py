"""The model of membership, with images of the state that have second places in the memory of other nodes.

Every worker is a node of its own, and owns some elements of the state. After a step that the commit allows, each worker
copies its part into memory, and sends it to the next member. These moves interleave with steps, deaths and rounds.
`ImageSearch` looks whether an image that was whole at two places is ever lost by one death, and whether what a record
names can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

from hetseq.cluster.membership.decide import decide
from tests.support.membership_model import (
    ALL,
    HANDING,
    Broken,
    Budget,
    Formed,
    Heard,
    History,
    Memory,
    Move,
    Plan,
    Row,
    Rule,
    Search,
    State,
    Worker,
    is_voter,
    name_of,
)

SAVING = ("computing", "reducing", "committing", "done")  # while an image may be under way
#: rules of images, of which a mutant may lack some
ANSWER = "a part is sealed when its second place has answered"
ALL_SEALED = "an image begins, and the older one goes, when all are sealed"
KEPT = "the image that a generation began with is kept until one of its own is sealed on all"
FREED = "other images are freed when a generation begins"
KNOWN = "a live generation keeps no image that only newcomers have"
TWICE = "of the images that could be kept, one that is at two places is kept rather than a newer one"


class ImageSearch(Search):
    """All that may happen to workers that keep images; `without`: rules that are left out.

    Two kinds of moves are made at once, before anything else: a report arrives, and a worker enters a new generation.
    They commute with all moves of others, and before them their worker can do nothing but die. Then the same follows as
    if it had died before it froze, or after it entered. The other search looks at gradients: here a worker gives its
    row without one. Parts in memory, parts under way and answers interleave with everything else. Records that no
    worker can ask for are forgotten. `is_reduced=False` searches without the first two.
    """

    def __init__(
        self, rule: Rule = decide, *, workers: int, steps: int, budget: Budget,
        named: Callable[[Plan], str] = name_of, has_stops: bool = True, without: Collection[str] = (),
        is_prompt: bool = False, every: int = 1, is_reduced: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            rule, workers=workers, steps=steps, budget=budget, has_owners=True, named=named, has_stops=has_stops
        )
        self.without, self.is_prompt, self.every, self.is_reduced = frozenset(without), is_prompt, every, is_reduced
        self.most_again = 0  # steps that all did again after one death

    def moves(self, state: State) -> Iterator[Move]:
        for slot, worker in enumerate(state.workers if self.is_reduced else ()):
            if worker.status == "up" and (move := self._at_once(state, slot, worker)):
                yield move
                return
        yield from super().moves(state)

    def _at_once(self, state: State, slot: int, worker: Worker) -> Move | None:
        newest = len(state.records) - 1
        if worker.phase in ("frozen", "newcomer") and newest > worker.generation:
            return next(self._adopt(state, slot, worker, newest), None)
        if worker.phase == "frozen":
            return next(self._moves_of(state, slot, worker), None)
        return next(self._save(state, slot, worker), None) if self.is_prompt else None

    def _move(self, state: State, slot: int, worker: Worker, told: str, *, is_fault: bool = False, **more: Any) -> Move:
        before = state.workers[slot]
        if worker.status == "dead":  # only what is in memory of its node matters
            worker = Worker(worker.name, status="dead", generation=-1, history=None, memory=worker.memory)
        elif worker.phase not in SAVING and (worker.image or worker.stage != "sealed"):
            worker = worker._replace(image=None, stage="sealed")
        move = super()._move(state, slot, worker, told, is_fault=is_fault, **more)
        if worker.memory != before.memory and worker.name == before.name:
            if len({plan for plan, _ in worker.memory}) > 2:
                raise Broken(f"{move.told}: there is no room for a third image")
            # an image that is read after a death may be at one place, until the new generation has sealed another one
            goes_back = before.phase in HANDING and state.records[before.generation].image
            if not goes_back and self._safe(move.after) < self._safe(state):
                raise Broken(f"{move.told}: an image that was whole at two places is gone")
        return move._replace(after=_without_the_old(move.after))

    def _restart(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        """On its node, which has kept its memory, or on another one."""
        for move in super()._restart(state, slot, worker):
            yield move
            if worker.memory:
                new = move.after.workers[slot]._replace(memory=worker.memory)
                workers = (*move.after.workers[:slot], new, *move.after.workers[slot + 1 :])
                yield Move(f"{move.told} on its node", False, move.after._replace(workers=workers))

    # A step.

    def _compute(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        if self.is_reduced:
            return self._enter_commit(state, slot, worker, [worker.history])
        return super()._compute(state, slot, worker)

    def _is_sealed(self, worker: Worker) -> bool:
        return worker.stage == "sealed" or (ANSWER in self.without and worker.stage == "here")

    def _after_update(self, worker: Worker, rows: list[Row], state: State) -> Worker:
        """Begin an image; the one that all have sealed stays, and older ones go."""
        if ALL_SEALED not in self.without and not all(row.sealed for row in rows):
            return worker
        assert worker.history is not None
        kept = worker.image
        if KEPT in self.without and kept is not None and kept.generation < worker.generation:
            kept = None
        new = None
        if len(worker.history) % self.every == 0:
            new = Plan(worker.generation, worker.history, state.records[worker.generation].roster)
        memory = frozenset(part for part in worker.memory if part[0] in (kept, new))
        if new is None:
            return worker._replace(memory=memory)
        return worker._replace(memory=memory, image=new, stage="begun" if worker.name in new.owners else "sealed")

    # An image.

    def _moves_of(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        yield from super()._moves_of(state, slot, worker)
        yield from self._save(state, slot, worker)

    def _save(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        """Its part of the newest image comes into its memory, and into that of the next member, which answers."""
        plan = worker.image
        if plan is None or worker.stage == "sealed" or worker.phase not in SAVING:
            return
        part = plan, plan.owners.index(worker.name)
        place = plan.roster[(plan.roster.index(worker.name) + 1) % len(plan.roster)]
        if worker.stage == "begun":
            stage = "sealed" if place == worker.name else "here"
            here = worker._replace(memory=worker.memory | {part}, stage=stage)
            yield self._move(state, slot, here, "has its part in memory")
            return
        for at, other in enumerate(state.workers):
            if other.name != place:
                continue
            if part in other.memory:
                yield self._move(state, slot, worker._replace(stage="sealed"), f"has the answer of {place}")
            elif other.status == "up" and other.phase in SAVING and other.generation == worker.generation:
                held = other.memory if plan == other.image else _only(other.memory, other.image, plan)
                yield self._move(state, at, other._replace(memory=held | {part}), f"has the part of {worker.name}")

    def _entered(self, worker: Worker, state: State) -> Worker:
        kept = self._kept(worker, state)
        memory = worker.memory if FREED in self.without else _only(worker.memory, kept)
        return self._begin(worker)._replace(memory=memory, image=kept, stage="sealed")

    def _kept(self, worker: Worker, state: State) -> Plan | None:
        """Of images that are whole among the members: the one that was read, or the newest one that is at two places,
        or the newest one. All members come to the same."""
        record = state.records[worker.generation]
        if record.base is None:
            return None
        members = [one for one in state.workers if one.name in record.roster]
        parts = {part for one in members for part in one.memory}
        plans = {plan for plan, part in parts if plan.elements({p for of, p in parts if of == plan}) == ALL}
        if record.image:
            return next(plan for plan in plans if self.named(plan) == record.image)
        if KNOWN not in self.without:
            plans &= {plan for one in members if one.name not in record.fresh for plan, _ in one.memory}
        memories = tuple(one.memory for one in members)
        twice = set() if TWICE in self.without else {plan for plan in plans if _is_twice(plan, memories)}
        return max(twice or plans, key=lambda plan: (plan.generation, len(plan.history)), default=None)

    # The coordinator.

    def _form(self, state: State) -> Iterator[Move]:
        number = len(state.records) - 1
        newest = state.records[number]
        for move in super()._form(state):
            record = move.after.records[-1]
            members = [one for one in state.workers if one.name in record.roster]
            if record.image and len(members) == len(record.roster):  # or one has died since it was heard
                parts = {part for one in members for part in one.memory if self.named(part[0]) == record.image}
                if not any(plan.elements({p for of, p in parts if of == plan}) == ALL for plan, _ in parts):
                    raise Broken("the base of a record is in no memory")
            voters = [one for one in state.heard if is_voter(one, number, newest)]
            if record.image:
                self._check_course(record, [one for one in voters if one.history is not None])
            if len({*newest.roster} - {one.name for one in voters}) == 1:
                self._check_one_death(state, record, voters)
            yield move._replace(after=_without_the_old(move.after._replace(heard=frozenset())))

    # What must hold.

    def _check_course(self, record: Formed, voters: Collection[Heard]) -> None:
        """A generation reads an image of the course of its members."""
        base = record.base or ()
        for one in voters:
            history = one.history or ()
            if history[: len(base)] != base[: len(history)]:
                raise Broken("a course that was given up comes back")

    def _check_one_death(self, state: State, record: Formed, voters: Collection[Heard]) -> None:
        safe = self._safe(state)
        if safe >= 0 and record.base is None:
            raise Broken("after one death an image that was whole at two places is not read")
        if record.base is not None and len(record.base) < safe:
            raise Broken("after one death an older image is read than the newest one at two places")
        if record.base is not None:
            longest = max((len(one.history) for one in voters if one.history is not None), default=0)
            self.most_again = max(self.most_again, longest - len(record.base))

    def _safe(self, state: State) -> int:
        """The step of the newest image that the death of any one member leaves whole; -1: there is none."""
        number = len(state.records) - 1
        record = state.records[number]
        known = {one.name: one.memory for one in state.workers}
        memories = tuple(known.get(name, frozenset()) for name in record.roster)
        return _safe_step(memories, number, record.base)


@cache
def _safe_step(memories: tuple[Memory, ...], number: int, base: History | None) -> int:
    """Of images that are of the course of this generation: its own, and those that its base comes after."""
    safe = -1
    for plan in {plan for memory in memories for plan, _ in memory}:
        is_on_course = plan.generation == number or (base is not None and base[: len(plan.history)] == plan.history)
        if is_on_course and _is_twice(plan, memories):
            safe = max(safe, len(plan.history))
    return safe


def _is_twice(plan: Plan, memories: tuple[Memory, ...]) -> bool:
    """Whether it is whole without any one of them."""
    parts = [{part for of, part in memory if of == plan} for memory in memories]
    without_one = (set[int]().union(*parts[:at], *parts[at + 1 :]) for at in range(len(parts)))
    return all(plan.elements(left) == ALL for left in without_one)


def _only(memory: Memory, *plans: Plan | None) -> Memory:
    return frozenset(part for part in memory if part[0] in plans)


def _without_the_old(state: State) -> State:
    """Without records that are neither the newest nor that of a worker."""
    used = {len(state.records) - 1, *(one.generation for one in state.workers if one.status != "dead")}
    records = tuple(one if at in used else Formed(()) for at, one in enumerate(state.records))
    return state if records == state.records else state._replace(records=records)
