"""A small model of workers that lose each other, around the real `decide`, and a search through all that may happen.

Workers take steps, crash, stop, are wrongly suspected and are started again. `Search` takes them through all
interleavings, or through a random one, and looks whether an update is ever doubled, lost or made from a wrong gradient.
With owners every worker holds some elements of the state, cut anew in every generation, and the holders of a base must
have all of it. `Story` is one set of reports with the record that is to come out.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

from hetseq.cluster.membership.decide import Image, Record, Report, SplitBrainError, Tag, Update, decide
from hetseq.cluster.membership.step_commit import Lineage, Verdict

APPLY, SKIP, REDO = Verdict.APPLY, Verdict.SKIP, Verdict.REDO
History = tuple[tuple[int, int, int, int], ...]  # of updates: step, generation, attempt, verdict
Rule = Callable[..., Record]

HISTORIES: dict[Lineage, History] = {}


@cache
def lineage(history: History) -> Lineage:
    """Of a state that contains these updates."""
    known = Lineage()
    for step, generation, attempt, verdict in history:
        known = known.extend(step, generation=generation, attempt=attempt, verdict=Verdict(verdict))
    HISTORIES[known] = history
    return known


def updated(history: History) -> Update:
    """The last update of a history, as who has made it reports it."""
    step, generation, attempt, verdict = history[-1]
    return Update(Tag(step, generation, attempt), Verdict(verdict), rows=f"rows of {step}, {generation}, {attempt}")


def holds(name: str, history: History | None, gradient: tuple[int, int, int] | None = None, **other: Any) -> Report:
    """The report of a worker with this state, and with this gradient beside it."""
    state = None if history is None else lineage(history)
    return Report(name, other.pop("generation", 0), state, None if gradient is None else Tag(*gradient), **other)


def made(name: str, history: History, **other: Any) -> Report:
    """The report of a worker that has made the last update of this history itself."""
    return holds(name, history, last=updated(history), **other)


NONE: History = ()


class Story(NamedTuple):
    reports: tuple[Report, ...]
    roster: str  # what is to come out; workers have names of one letter
    base: History | None
    fresh: str = ""
    last: History | None = None  # the update that made the base is its last one
    newcomers: str = ""
    newest: Record = Record(0, ("A", "B", "C"))
    lost: str = ""
    image: str = ""

    def tell(self, rule: Rule) -> Record:
        reports = {report.incarnation: report for report in self.reports}
        record: Record = rule(self.newest, reports, tuple(self.newcomers), order=ORDER)
        return record

    def expected(self) -> Record:
        return Record(
            self.newest.generation + 1, tuple(self.roster), None if self.base is None else lineage(self.base),
            None if self.last is None else updated(self.last), frozenset(self.fresh), (None,) * len(self.roster),
            lost=self.lost, image=self.image,
        )  # fmt: skip

    def is_told_by(self, rule: Rule) -> bool:
        try:
            found = self.tell(rule)
        except Exception:
            return False
        return found == self.expected()


ORDER = {name: place for place, name in enumerate("ABCDE")}


# The search.


class Broken(Exception):
    """What must hold does not."""


class Part(NamedTuple):
    """What a worker owns, and the generation that has cut the state so."""

    cut: int
    elements: frozenset[int]


ALL = frozenset(range(4))
MOST_GROUPS = 4


@cache
def cut(generation: int, roster: tuple[str, ...], name: str, groups: int = 1) -> Part:
    """Of each generation another one; of three workers, one owns nothing. Each of the groups has everything."""
    if len(roster) < groups:
        groups = 1
    number = roster.index(name) % groups
    who = owners(generation, roster[number::groups])
    elements = frozenset(one for one in ALL if who[one % len(who)] == name)
    return Part(generation if groups == 1 else generation * MOST_GROUPS + number, elements)


@cache
def owners(generation: int, roster: tuple[str, ...]) -> tuple[str, ...]:
    turned = (*roster[generation % len(roster) :], *roster[: generation % len(roster)])
    return turned if len(turned) < 3 else turned[:-1]


class Plan(NamedTuple):
    """Of an image: the state, and the members among whom the generation that made the image has cut it."""

    generation: int
    history: History
    roster: tuple[str, ...]

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose parts make up the image."""
        return owners(self.generation, self.roster)

    def elements(self, parts: Collection[int]) -> frozenset[int]:
        """What these parts have together."""
        who = self.owners
        return frozenset[int]().union(*(cut(self.generation, self.roster, who[part]).elements for part in parts))


Memory = frozenset[tuple[Plan, int]]  # of a node: parts of images


class Worker(NamedTuple):
    name: str  # slot and how often it was started: "1.0"
    status: str = "up"  # stopped, dead
    #: reducing, committing, done; frozen, newcomer; fresh: it waits for the state; with owners also forming: it has the
    #: part of before, and handed: it has its new part as well
    phase: str = "computing"
    generation: int = 0  # the newest record that it has adopted
    history: History | None = ()
    attempt: int = 0
    held: tuple[int, int, int] | None = None  # whole, and of a step that it has not seen the end of
    last: tuple[int, int, int, int] | None = None  # made by itself in this generation
    part: Part | None = None  # of its history; None: everything
    memory: Memory = frozenset()  # of its node, which keeps what a killed process has left
    image: Plan | None = None  # the newest one that it has begun, or that its generation began with
    stage: str = "sealed"  # of its part of that image: begun, here (in its memory), sealed (its second place answered)


class Formed(NamedTuple):
    """A record, with histories in place of lineages."""

    roster: tuple[str, ...]
    base: History | None = None
    last: tuple[int, int, int, int] | None = None
    fresh: frozenset[str] = frozenset()
    image: str = ""


class Row(NamedTuple):
    """What one worker gives to a commit."""

    vote: Verdict
    wish: bool
    sealed: bool = True


class Heard(NamedTuple):
    """A report."""

    name: str
    generation: int
    history: History | None
    held: tuple[int, int, int] | None
    last: tuple[int, int, int, int] | None
    part: Part | None
    memory: Memory = frozenset()


class Budget(NamedTuple):
    """How much may yet happen."""

    faults: int  # crashes, stops, and living workers that are given up
    restarts: int = 0
    non_finite: int = 0
    redo: int = 0


class State(NamedTuple):
    workers: tuple[Worker, ...]  # by slot
    records: tuple[Formed, ...]
    heard: frozenset[Heard]
    given: frozenset[tuple[Any, ...]]  # contributions: generation, step, attempt, what, name, payload
    budget: Budget


class Move(NamedTuple):
    told: str
    is_fault: bool
    after: State


TRAINING = ("computing", "reducing", "committing", "done", "fresh")
HANDING = ("forming", "handed")


def beginning(workers: int, budget: Budget, *, has_owners: bool, groups: int) -> State:
    names = tuple(f"{slot}.0" for slot in range(workers))
    first = (Worker(name, part=cut(0, names, name, groups) if has_owners else None) for name in names)
    return State(tuple(first), (Formed(names, ()),), frozenset(), frozenset(), budget)


def report_of(worker: Worker) -> Heard:
    return Heard(
        worker.name, worker.generation, worker.history, worker.held, worker.last, worker.part, worker.memory
    )  # fmt: skip


def name_of(plan: Plan) -> str:
    """What identifies an image."""
    return f"{plan.generation} {plan.history} {plan.roster}"


def images_of(memory: Memory, named: Callable[[Plan], str]) -> tuple[Image, ...]:
    """As a report has them."""
    plans = {plan: tuple(sorted(part for of, part in memory if of == plan)) for plan, _ in memory}
    return tuple(
        Image(named(plan), lineage(plan.history), plan.generation, plans[plan], len(plan.owners))
        for plan in sorted(plans)
    )  # fmt: skip


NEEDS_THE_SILENT: set[Rule] = set()


@cache
def formed(
    rule: Rule, number: int, newest: Formed, heard: frozenset[Heard], newcomers: frozenset[str], silent: frozenset[str],
    named: Callable[[Plan], str],
) -> Formed:  # fmt: skip
    """What the rule makes of the reports that a coordinator has in hand. `silent`: alive, as only mutants ask."""
    reports = {
        one.name: holds(
            one.name, one.history, one.held, generation=one.generation,
            last=None if one.last is None else Update(Tag(*one.last[:3]), Verdict(one.last[3]), "rows"),
            part=None if one.part is None else (len(one.part.elements), len(ALL)),
            cut=None if one.part is None else one.part.cut, images=images_of(one.memory, named),
        )
        for one in sorted(heard, key=lambda one: one.generation)
    }  # fmt: skip
    base = None if newest.base is None else lineage(newest.base)
    record = Record(number, newest.roster, base, None, newest.fresh, image=newest.image)
    names = [*newest.roster, *reports, *newcomers]
    told = {"silent": silent} if rule in NEEDS_THE_SILENT else {}
    try:
        found = rule(record, reports, newcomers, order={name: float(name) for name in names}, **told)
    except SplitBrainError as error:
        raise Broken(str(error)) from None
    last = None
    if found.last is not None:
        tag = found.last.tag
        last = tag.step, tag.generation, tag.attempt, int(found.last.verdict)
    after = Formed(
        found.roster, None if found.base is None else HISTORIES[found.base], last, found.fresh, found.image
    )  # fmt: skip
    _check_nothing_forgotten(after, found.lost, [one for one in heard if is_voter(one, number, newest)])
    return after


def is_voter(report: Heard, number: int, newest: Formed) -> bool:
    return report.generation == number and report.name in newest.roster


def _check_nothing_forgotten(after: Formed, lost: str, voters: Collection[Heard]) -> None:
    longest = max((one.history for one in voters if one.history is not None), key=len, default=None)
    if longest is None:
        return
    if after.base is None or after.image:
        if any(map(is_complete, parts_of(voters, longest))):
            raise Broken("an update is forgotten that somebody has made who reports")
        assert lost
    elif len(longest) > len(after.base):
        raise Broken("an update is forgotten that somebody has made who reports")
    elif any(one.name in after.fresh for one in voters if has_reached(one, longest)):
        raise Broken("a holder is given again what it holds")


def parts_of(voters: Collection[Heard], history: History) -> list[list[Part | None]]:
    """Of those who hold this history or can make its last update, by cut."""
    parts = collections.defaultdict[int, list[Part | None]](list)
    for one in voters:
        if has_reached(one, history):
            parts[-1 if one.part is None else one.part.cut].append(one.part)
    return list(parts.values())


def has_reached(one: Heard, history: History) -> bool:
    """Whether it holds this history or can make its last update."""
    can_make = history and one.history == history[:-1] and (history[-1][3] == SKIP or one.held == history[-1][:3])
    return one.history == history or bool(can_make)


def is_complete(parts: Collection[Part | None]) -> bool:
    """Whether nothing of the state is in other hands."""
    return None in parts or frozenset[int]().union(*(part.elements for part in parts if part is not None)) == ALL


class Search:
    """All that may happen to some workers under a rule; `steps` is how many they train."""

    def __init__(
        self, rule: Rule = decide, *, workers: int, steps: int, budget: Budget, has_owners: bool = False,
        named: Callable[[Plan], str] = name_of, has_stops: bool = True, groups: int = 1,
    ) -> None:  # fmt: skip
        self.rule, self.steps, self.has_owners, self.named, self.has_stops = rule, steps, has_owners, named, has_stops
        self.groups = groups
        self.first = beginning(workers, budget, has_owners=has_owners, groups=groups)

    def moves(self, state: State) -> Iterator[Move]:
        for slot, worker in enumerate(state.workers):
            if worker.status == "up":
                yield from self._moves_of(state, slot, worker)
                if state.budget.faults:
                    less = state.budget._replace(faults=state.budget.faults - 1)
                    yield self._move(state, slot, worker._replace(status="dead"), "dies", is_fault=True, budget=less)
                    if self.has_stops and worker.phase not in ("newcomer", "done"):
                        stopped = worker._replace(status="stopped")
                        yield self._move(state, slot, stopped, "is stopped", is_fault=True, budget=less)
            elif worker.status == "stopped":
                yield self._move(state, slot, worker._replace(status="up"), "wakes", is_fault=True)
            else:
                yield from self._restart(state, slot, worker)
        yield from self._form(state)

    def _restart(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        is_lost = all(other.status == "dead" for other in state.workers)  # then somebody types the command again
        if is_lost or state.budget.restarts:
            again = f"{slot}.{int(worker.name.partition('.')[2]) + 1}"
            new = Worker(again, phase="newcomer", generation=len(state.records) - 1, history=None)
            budget = state.budget if is_lost else state.budget._replace(restarts=state.budget.restarts - 1)
            yield self._move(state, slot, new, "is started again", budget=budget)

    def _move(self, state: State, slot: int, worker: Worker, told: str, *, is_fault: bool = False, **more: Any) -> Move:
        workers = (*state.workers[:slot], worker, *state.workers[slot + 1 :])
        after = state._replace(workers=workers, **more)
        if after.given:  # what nobody can need any more is forgotten
            live = {self._tag(one) for one in workers if one.status != "dead" and one.phase in TRAINING[:3]}
            after = after._replace(given=frozenset(one for one in after.given if one[:3] in live))
        self.check(after)
        return Move(f"{state.workers[slot].name} {told}", is_fault, after)

    def _tag(self, worker: Worker) -> tuple[int, int, int]:
        return worker.generation, len(worker.history or ()) + 1, worker.attempt

    def _all_gave(self, state: State, worker: Worker, what: str) -> list[Any] | None:
        key, roster = (*self._tag(worker), what), state.records[worker.generation].roster
        given = {one[4]: one[5] for one in state.given if one[:4] == key}
        return [given[name] for name in roster] if set(roster) <= set(given) else None

    def _give(self, state: State, worker: Worker, what: str, payload: Any) -> frozenset[Any]:
        return state.given | {(*self._tag(worker), what, worker.name, payload)}

    # A worker.

    def _moves_of(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        newest = len(state.records) - 1
        if worker.phase == "computing":
            yield from self._compute(state, slot, worker)
        elif worker.phase == "reducing" and (parts := self._all_gave(state, worker, "gradient")):
            yield from self._enter_commit(state, slot, worker, parts)
        elif worker.phase == "committing" and (rows := self._all_gave(state, worker, "row")):
            yield self._see_commit(state, slot, worker, rows)
        elif worker.phase == "fresh":
            yield from self._receive(state, slot, worker)
        elif worker.phase in HANDING:
            yield from self._hand_over(state, slot, worker)
        elif worker.phase == "frozen" and report_of(worker) not in state.heard:
            heard = frozenset(one for one in state.heard if one.name != worker.name) | {report_of(worker)}
            yield self._move(state, slot, worker, f"is heard: {report_of(worker)[1:]}", heard=heard)
        if worker.phase in (*TRAINING, *HANDING) and self._misses_somebody(state, worker):
            yield self._move(state, slot, worker._replace(phase="frozen"), f"freezes while {worker.phase}")
        if worker.phase in ("frozen", "newcomer") and newest > worker.generation:
            yield from self._adopt(state, slot, worker, newest)

    def _compute(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        given = self._give(state, worker, "gradient", worker.history)
        yield self._move(state, slot, worker._replace(phase="reducing"), "gives its gradient", given=given)

    def _misses_somebody(self, state: State, worker: Worker) -> bool:
        if worker.generation < len(state.records) - 1:
            return True
        known = {other.name: other for other in state.workers}
        for name in state.records[worker.generation].roster:
            other = known.get(name)
            if other is None or other.status != "up":
                return True
            if other.generation == worker.generation and other.phase in ("frozen", "newcomer"):
                return True
        return False

    def _enter_commit(self, state: State, slot: int, worker: Worker, parts: list[Any]) -> Iterator[Move]:
        if set(parts) != {worker.history}:
            raise Broken("a gradient is the sum of gradients of different states")
        budget = state.budget
        step, wish = (
            len(worker.history or ()) + 1,
            any(o.status == "up" and o.phase == "newcomer" for o in state.workers),
        )
        choices = [(APPLY, budget)]
        if budget.non_finite:
            choices.append((SKIP, budget._replace(non_finite=budget.non_finite - 1)))
        if budget.redo:
            choices.append((REDO, budget._replace(redo=budget.redo - 1)))
        for vote, less in choices:
            held = None if vote is REDO else (step, worker.generation, worker.attempt)
            yield self._move(
                state, slot, worker._replace(phase="committing", held=held), f"votes {vote.name}",
                is_fault=vote is not APPLY, budget=less,
                given=self._give(state, worker, "row", Row(vote, wish, self._is_sealed(worker))),
            )  # fmt: skip

    def _is_sealed(self, worker: Worker) -> bool:
        return True

    def _see_commit(self, state: State, slot: int, worker: Worker, rows: list[Row]) -> Move:
        votes = {row.vote for row in rows}
        verdict = REDO if REDO in votes else SKIP if SKIP in votes else APPLY
        if verdict is REDO:
            again = worker._replace(phase="computing", attempt=worker.attempt + 1, held=None)
            return self._move(state, slot, again, "sees redo")
        assert worker.history is not None
        entry = (len(worker.history) + 1, worker.generation, worker.attempt, int(verdict))
        after = self._after_update(self._begin(made_of(worker, entry)._replace(last=entry)), rows, state)
        if any(row.wish for row in rows) and after.phase != "done":
            after = after._replace(phase="frozen")
        return self._move(state, slot, after, f"sees {verdict.name} of step {entry[0]}")

    def _after_update(self, worker: Worker, rows: list[Row], state: State) -> Worker:
        return worker

    def _entered(self, worker: Worker, state: State) -> Worker:
        """It has what it needs, and its generation begins for it."""
        return self._begin(worker)

    def _begin(self, worker: Worker) -> Worker:
        phase = "done" if len(worker.history or ()) == self.steps else "computing"
        return worker._replace(phase=phase, attempt=0, held=None)

    def _receive(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        record = state.records[worker.generation]
        if record.base is None:
            part = cut(worker.generation, record.roster, worker.name, self.groups) if self.has_owners else None
            loaded = self._entered(worker._replace(history=(), part=part), state)
            yield self._move(state, slot, loaded, "loads the checkpoint")
        for donor in state.workers:
            is_there = donor.status == "up" and donor.generation == worker.generation and donor.phase in TRAINING
            if is_there and donor.name not in record.fresh:
                if donor.history != record.base:
                    raise Broken("a donor does not hold the state that it is to give")
                after = self._begin(worker._replace(history=donor.history))
                yield self._move(state, slot, after, f"is given the state by {donor.name}")

    def _hand_over(self, state: State, slot: int, worker: Worker) -> Iterator[Move]:
        """Each is given its new part by those who have the old ones, and drops its own old one when all have theirs."""
        record = state.records[worker.generation]
        here = [one for one in state.workers if one.generation == worker.generation and one.name in record.roster]
        if {one.name for one in here} != set(record.roster) or any(one.phase in ("frozen", "newcomer") for one in here):
            return
        if worker.phase == "forming" and record.image:
            yield self._move(state, slot, self._read(worker, record, here), "reads the image")
        elif worker.phase == "forming":
            donors = [one for one in here if one.name not in record.fresh]
            if any(one.history != record.base for one in donors):
                raise Broken("a donor does not hold the state that it is to give")
            if not is_complete([one.part for one in donors]):
                raise Broken("a part of the base is in nobody's hands")
            yield self._move(state, slot, worker._replace(phase="handed"), "has its part")
        elif all(one.phase != "forming" for one in here):
            part = cut(worker.generation, record.roster, worker.name, self.groups)
            entered = self._entered(worker._replace(history=record.base, part=part), state)
            yield self._move(state, slot, entered, "drops its old part")

    def _read(self, worker: Worker, record: Formed, here: list[Worker]) -> Worker:
        """In memory of the nodes."""
        parts = {(plan, part) for one in here for plan, part in one.memory if self.named(plan) == record.image}
        plans = {plan for plan, _ in parts}
        if len(plans) > 1:
            raise Broken("parts of different images are put together")
        if any(plan.history != record.base for plan in plans):
            raise Broken("an image is not the state that the record says")
        if not any(plan.elements({part for _, part in parts}) == ALL for plan in plans):
            raise Broken("a part of the image is in no memory")
        part = cut(worker.generation, record.roster, worker.name, self.groups)
        return worker._replace(phase="handed", history=record.base, part=part)

    def _adopt(self, state: State, slot: int, worker: Worker, newest: int) -> Iterator[Move]:
        record = state.records[newest]
        told = f"enters generation {newest}"
        begun = worker._replace(generation=newest, attempt=0, held=None, last=None)
        if worker.name not in record.roster:
            if worker.phase == "frozen":
                outside = begun._replace(phase="newcomer", history=None, part=None)
                yield self._move(state, slot, outside, f"is not in generation {newest}")
        elif worker.name in record.fresh:
            phase = "fresh" if record.base is None or not self.has_owners else "forming"
            empty = begun._replace(phase=phase, history=None, part=None)
            yield self._move(state, slot, empty, f"{told} without a state")
        elif self.has_owners:
            kept = self._caught_up(worker, record)._replace(phase="forming", generation=newest, attempt=0)
            yield self._move(state, slot, kept._replace(held=None, last=None), told)
        else:
            yield self._move(state, slot, self._begin(self._caught_up(worker, record)._replace(
                generation=newest, last=None)), told)  # fmt: skip

    def _caught_up(self, worker: Worker, record: Formed) -> Worker:
        if worker.history is None:
            raise Broken("a worker that holds no state is taken for one that does")
        if record.last is not None and record.last[0] == len(worker.history) + 1:
            worker = made_of(worker, record.last)
        if worker.history != record.base:
            raise Broken("a survivor does not come to the base of its generation")
        return worker

    # The coordinator.

    def _form(self, state: State) -> Iterator[Move]:
        number = len(state.records) - 1
        newest = state.records[number]
        up = {worker.name: worker for worker in state.workers if worker.status == "up"}
        heard = {one.name for one in state.heard if is_voter(one, number, newest)}
        newcomers = frozenset(name for name, one in up.items() if one.phase == "newcomer" and name not in newest.roster)
        silent = frozenset(name for name in newest.roster if name in up and name not in heard)
        if not (heard or (newcomers and not silent)) or len(silent) > state.budget.faults:
            return
        record = formed(self.rule, number, newest, state.heard, newcomers, silent, self.named)
        after = state._replace(
            records=(*state.records, record), budget=state.budget._replace(faults=state.budget.faults - len(silent))
        )
        self.check(after)
        told = f"generation {number + 1} of {record.roster}, fresh {sorted(record.fresh)}, base {record.base}"
        yield Move(told, bool(silent), after)

    # What must hold.

    def check(self, state: State) -> None:
        newest = len(state.records) - 1
        record = state.records[newest]
        held = []
        for worker in state.workers:
            if worker.status == "dead" or worker.history is None or worker.name not in record.roster:
                continue
            if [entry[0] for entry in worker.history] != list(range(1, len(worker.history) + 1)):
                raise Broken("a step was made twice, or left out")
            if worker.generation == newest:
                held.append(worker.history)
            elif worker.name not in record.fresh and len(worker.history) > len(record.base or ()):
                raise Broken("a member of a new generation has gone on in an old one")
        for one, other in itertools.combinations(sorted(held, key=len), 2):
            if other[: len(one)] != one:
                raise Broken("two members of one generation hold different histories")
            if len(other) > len(one) + 1:
                raise Broken("two members of one generation are more than one update apart")

    def is_over(self, state: State) -> bool:
        """All that are left have made every step, each once."""
        up = [worker for worker in state.workers if worker.status == "up"]
        done = [one for one in up if one.phase == "done" and one.generation == len(state.records) - 1]
        return bool(done) and all(one in done or one.phase == "newcomer" for one in up)

    # Ways through it.

    def exhaust(self, look: Callable[[Move], None] = lambda move: None) -> int:
        """How many states there are, each looked at; and from each the run can come to its end without a fault."""
        number, before = {self.first: 0}, list[list[int]]([[]])
        todo, over = deque([self.first]), []
        while todo:
            state = todo.popleft()
            if self.is_over(state):
                over.append(number[state])
            for move in self.moves(state):
                look(move)
                if move.after not in number:
                    number[move.after] = len(number)
                    before.append([])
                    todo.append(move.after)
                if not move.is_fault:
                    before[number[move.after]].append(number[state])
        reached = set(over)
        while over:
            for earlier in before[over.pop()]:
                if earlier not in reached:
                    reached.add(earlier)
                    over.append(earlier)
        # a stopped worker wakes for nobody, and with nobody else up there is nobody to go on
        stuck = [s for s, at in number.items() if at not in reached and any(w.status == "up" for w in s.workers)]
        if stuck:
            raise Broken(f"no end can be reached from {stuck[0]}")
        return len(number)

    def wander(self, dice: random.Random, *, most: int = 600) -> list[str]:
        """One way through, to its end; what happened. Raises Broken with it."""
        state, told = self.first, list[str]()
        try:
            while not self.is_over(state):
                ways = list(self.moves(state))
                if not ways or len(told) > most:
                    raise Broken(f"the run does not end: {state}")
                calm = [way for way in ways if not way.is_fault]
                # faults early and late: with all of them at equal odds most would come before the first step
                way = dice.choice(calm) if calm and dice.random() < 0.85 else dice.choice(ways)
                told.append(way.told)
                state = way.after
        except Broken as broken:
            raise Broken("\n".join([*told, str(broken)])) from None
        return told


def made_of(worker: Worker, entry: tuple[int, int, int, int]) -> Worker:
    """The worker after this update; it needs the gradient of exactly this all-reduce."""
    assert worker.history is not None
    if entry[3] == APPLY and worker.held != entry[:3]:
        raise Broken(f"update {entry} is made from {worker.held}")
    return worker._replace(history=(*worker.history, entry))
