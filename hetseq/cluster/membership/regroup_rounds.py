"""Regroup rounds: how a run moves from one generation to the next, which members it asks, and how long it waits.

Pure: reports, ends of workers and the time go in, orders to workers come out of `outbox`. It knows incarnations (one
start of one process each) and their slots, but no nodes, sockets or steps. `membership.decide` interprets the reports.

A round begins with the first report or the end of a member; a wish that was carried by a commit shows up as reports
too. All members are told to freeze. A live process answers at once, whatever its training thread does. A process that
does not answer is stopped or cut off, so the round does not wait for it. Launchers acknowledge each record: a member
that can send but not receive, as in a network cut in one direction, counts as silent. A member that is left out is
fenced: its launcher ends the process before it can take part in anything again.

Shadows follow a generation without being members: a round waits for their reports only if the members that are left do
not hold the state together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hetseq.cluster.membership.decide import Record, Report, decide, hold_base
from hetseq.cluster.rendezvous.leader_election import Standing

Order = dict[str, Any]

ANSWER_S = 1.5  # for a process to show that it is alive
HEARD_S = 3.0  # for a record to arrive and be acknowledged; the kernel retransmits both three times in that time
_BARREN = 2  # failed attempts to form a generation before the newest members are left out
_HOPELESS = 6  # ... before only one node continues, if no member is newer than the others
_REPLACED_S = 1800.0  # for a replacement to load its data, since any process last arrived or ended
_SLACK_S = 0.5  # after the deadline of a collective, for its failure to be reported


class Generations:
    """The generations of one run.

    `slots` maps the first roster to its slots. With fewer than `min_ranks`, without one of the data `parts` that the
    run began with (default: the parts of the first roster), or with slots that don't do for `suffices`, the run waits
    for newcomers for at most `wait_s`, then saves and stops. `shadows` are processes that follow the first record.
    `part` and `home` give, for the current worker of a slot, the data part that it reads and its node; workers on one
    node can most likely reach each other.
    `outbox` holds (incarnation, order) for the caller to send, in order: `freeze`, `record`, `wish`, and `fence` for
    the launcher of a worker.
    """

    def __init__(
        self,
        first: Record,
        slots: Mapping[str, int],
        *,
        min_ranks: int = 1,
        wait_s: float = 0.0,
        home: Callable[[int], object] = lambda slot: slot,
        part: Callable[[int], object] = lambda slot: None,
        parts: Iterable[object] | None = None,
        shadows: Iterable[str] = (),
    ) -> None:
        self.newest = first
        self.outbox: list[tuple[str, Order]] = []
        self.slots = dict(slots)  # of all members ever, including ended ones
        self._min_ranks, self._wait_s, self._home, self._part = min_ranks, wait_s, home, part
        self.suffices: Callable[[Iterable[int]], bool] = lambda slots: True
        self._parts = frozenset(map(part, self.slots.values()) if parts is None else parts)
        self._shadows = set(shadows)  # living processes that are to follow each generation
        self._alive = set(first.roster) | self._shadows
        self._newcomers: list[str] = []  # ready to take part, in order of arrival
        self._expected: set[int] = set()  # slots whose replacement is being started
        self._reports: dict[str, Report] = {}
        self._followed: dict[str, Report] = {}  # the reports of shadows, in the open round
        self._survivors: dict[str, Report] = {}  # from which the newest record was made
        self._patience: dict[str, float] = {}  # of members that have answered: deadline for their report
        self._unheard: dict[str, float] = {}  # of members that may lack the newest record: deadline to acknowledge it
        self._began_s: float | None = None  # of the open round
        self._has_wished = False
        self._has_lost = False  # a member was lost since the newest record
        self._has_finished = False  # a member finished all its work
        #: how sure it is that no other coordinator leads this run
        self.standing = Standing.SURE
        self._out_of_reach: set[int] = set()  # slots of silent members: they may be alive and led by another head
        self._barren = 0  # consecutive generations that never formed although all members were alive
        self._barren_with_late = 0  # the same, of generations in which some member had to receive the state
        self._counted = 0  # the newest generation that these two counters include
        self._heard_s = 0.0  # when a process last ended or arrived
        self._is_stopping = False  # stop waiting for newcomers

    @property
    def is_open(self) -> bool:
        """Whether a round is open, so that the run is not training."""
        return self._began_s is not None

    @property
    def members(self) -> list[str]:
        """The members of the newest generation that have not ended."""
        return [name for name in self.newest.roster if name in self._alive]

    def is_member(self, name: str) -> bool:
        """Whether a process takes part in the newest generation and has not ended."""
        return name in self._alive and name in self.newest.roster

    @property
    def expected(self) -> set[int]:
        """Slots whose replacement is being started."""
        return set(self._expected)

    @property
    def waiting(self) -> list[str]:
        """Processes that wait to be admitted."""
        return list(self._newcomers)

    @property
    def awaited_until_s(self) -> float | None:
        """Until when the run waits for newcomers; None if it also waits for something else, or for nothing."""
        if self._began_s is None or self._missing() or not self._is_waiting_for_more:
            return None
        return self._began_s + self._wait_s

    @property
    def lacking(self) -> int:
        """How many more ranks the run waits for; 0 if only a data part is missing."""
        return max(0, self._min_ranks - len(self._here()))

    @property
    def is_extinct(self) -> bool:
        """Whether no worker is left or on the way, nor a shadow that may have the state."""
        return not (self.members or self._newcomers or self._expected or self._hopes())

    @property
    def shadows(self) -> set[str]:
        """The living shadows, whether they follow the newest generation yet or not."""
        return set(self._shadows)

    def _hopes(self) -> list[str]:
        """The shadows that may have a state: those that follow this generation and have not denied it."""
        following = self._shadows.intersection(self.newest.shadows)
        return [name for name in sorted(following) if name not in self._followed or self._followed[name].lineage]

    @property
    def has_yielded(self) -> bool:
        """Whether other nodes may already, or soon, train without this side: it must not commit any more."""
        may_lead = self.standing is Standing.OVERDUE and bool(self._out_of_reach)
        return may_lead or self.standing is Standing.REPLACED

    def heard_of(self, slot: int) -> None:
        """The launcher of this slot is reachable."""
        self._out_of_reach.discard(slot)

    def reported(self, report: Report, now_s: float) -> None:
        """A frozen worker reports the state it holds."""
        name = report.incarnation
        if name not in self._alive:
            return
        is_shadow = name in self._shadows and name in self.newest.shadows
        if report.generation < self.newest.generation and (is_shadow or name in self.newest.roster):
            self._send_record(name)  # it has not received the newest one
        elif is_shadow and report.generation == self.newest.generation:
            self._followed[name] = report
            self._close_if_possible(now_s)
        elif report.generation == self.newest.generation and name in self.newest.roster:
            self._unheard.pop(name, None)
            self._reports[name] = report
            self._open(now_s)
            self._close_if_possible(now_s)

    def answered(self, name: str, patience_s: float, now_s: float) -> None:
        """The process of a member is alive; wait at most `patience_s` for its training thread."""
        if self._began_s is not None and name in self._alive:
            self._patience[name] = now_s + patience_s + _SLACK_S

    def heard(self, name: str, generation: int) -> None:
        """The record of this generation has reached the launcher of a member."""
        if generation == self.newest.generation:
            self._unheard.pop(name, None)

    def expect(self, slot: int) -> None:
        """A replacement for the worker of this slot is being started."""
        self._expected.add(slot)

    def do_not_expect(self, slot: int, now_s: float) -> None:
        """There will be no replacement after all."""
        self._expected.discard(slot)
        self._close_if_possible(now_s)

    def arrived(self, name: str, slot: int, now_s: float) -> None:
        """A new process is ready to take part: it holds no state."""
        if name in self.slots:
            return
        self.slots[name] = slot
        self._heard_s = now_s
        self._alive.add(name)
        self._newcomers.append(name)
        self._out_of_reach.discard(slot)
        self._expected.discard(slot)
        self._wish()
        self._close_if_possible(now_s)

    def follows(self, name: str, slot: int) -> None:
        """A new process is ready to follow the run as a shadow."""
        if name not in self.slots:
            self.slots[name] = slot
            self._alive.add(name)
            self._shadows.add(name)
            self._wish()

    def stop(self, now_s: float) -> None:
        """All ranks are asked to stop: with too few ranks the run saves its state now, without waiting for more."""
        self._is_stopping = True
        self._close_if_possible(now_s)

    def finished(self, name: str) -> None:
        """A process finished all its work: that is no loss, and from now on no generation starts without a state."""
        self._has_finished = True
        self._alive.discard(name)
        self._unheard.pop(name, None)

    def ended(self, name: str, now_s: float) -> None:
        """The process is gone."""
        if name in self._shadows:
            self._forget_shadow(name)
            self._close_if_possible(now_s)
            return
        was_alive = name in self._alive
        self._heard_s = now_s
        self._has_lost = self._has_lost or was_alive
        self._alive.discard(name)
        self._reports.pop(name, None)
        self._unheard.pop(name, None)
        if name in self._newcomers:
            self._newcomers.remove(name)
        if was_alive and name in self.newest.roster:
            self._open(now_s)
        self._close_if_possible(now_s)

    def tick(self, now_s: float) -> float:
        """Act on everything due at `now_s`; returns the seconds until the next call."""
        self._leave_the_deaf(now_s)
        self._close_if_possible(now_s)
        heard_s = min((until_s for until_s in self._unheard.values() if until_s > now_s), default=now_s + 60.0)
        return max(0.0, min(self._next_s(now_s), heard_s) - now_s)

    def _next_s(self, now_s: float) -> float:
        """When the open round is next due; a minute from now if there is none."""
        if self._began_s is None:
            return now_s + 60.0
        wait_until_s = self._began_s + self._wait_s
        awaited = self._missing()
        if not (awaited or self._holds_state()):
            awaited = self._silent_shadows()
        if awaited:
            return max(self._due(name) for name in awaited)  # nothing happens before the last of them
        return wait_until_s if self._is_waiting_for_more and wait_until_s > now_s else now_s + 60.0

    def _leave_the_deaf(self, now_s: float) -> None:
        """Begin a round without the members that did not acknowledge the newest record in time, if the others hold the
        state. If they do not, wait: a silent member may have the record, and would train on separately.
        """
        deaf = [name for name, until_s in self._unheard.items() if now_s >= until_s]
        hearing = set(self.members) - self._unheard.keys()
        reports = [report for name, report in self._survivors.items() if name in hearing]
        has_state = self.newest.base is None or not self._survivors or hold_base(self.newest, reports)
        if not (deaf and hearing and has_state):
            return
        for name in deaf:
            self._fence(name)
        self._open(now_s)

    def _open(self, now_s: float) -> None:
        if self._began_s is not None:
            return
        self._began_s, self._patience = now_s, {}
        for name in [*self._missing(), *self._silent_shadows()]:
            self.outbox.append((name, {"kind": "freeze", "generation": self.newest.generation}))

    def _silent_shadows(self) -> list[str]:
        """Shadows of this generation whose report may still come."""
        return [name for name in self._hopes() if name not in self._followed]

    def _missing(self) -> list[str]:
        """Members whose report may still come."""
        return [name for name in self.members if name not in self._reports]

    def _due(self, name: str) -> float:
        assert self._began_s is not None
        return self._patience.get(name, self._began_s + ANSWER_S)

    @property
    def _is_waiting_for_more(self) -> bool:
        """Whether fewer than `min_ranks` would be left, or a part of the data or of the model would be on no rank."""
        here = self._here()
        slots = [self.slots[name] for name in here]
        return len(here) < self._min_ranks or not self._parts <= set(map(self._part, slots)) or not self.suffices(slots)

    def _here(self) -> list[str]:
        """Who would take part in the next generation, as far as is known."""
        if self._followed_far():
            return list(self._decide().roster)
        return [*self._reports, *self._newcomers]

    def _close_if_possible(self, now_s: float) -> None:
        if self._began_s is None or any(now_s < self._due(name) for name in self._missing()):
            return
        for name in self._missing():
            self._fence(name)
        self._drop_the_unreachable()
        if not self._holds_state():
            if any(now_s < self._due(name) for name in self._silent_shadows()):
                return
            for name in self._silent_shadows():  # it would continue a course that is given up
                self.outbox.append((name, {"kind": "fence"}))
                self._forget_shadow(name)
        has_state = self._has_state()
        if self._has_finished and not has_state:
            return
        if not has_state and self._expected:
            if now_s < self._heard_s + _REPLACED_S:
                return  # all would start from the newest checkpoint, so wait for the replacements
            self._expected.clear()
        if self._out_of_reach and self.standing is Standing.UNSURE:
            return  # a moment later the standing is known: sure again, or overdue
        is_late = now_s >= self._began_s + self._wait_s or self.has_yielded or self._is_stopping
        is_last = self._is_waiting_for_more or self.has_yielded
        if not (self._reports or self._newcomers or has_state) or (is_last and not is_late):
            return
        self._close(now_s, is_last=is_last)

    def _has_state(self) -> bool:
        """Whether the members that have reported hold a state together, or may go back to one in their memory, or a
        shadow has one."""
        return bool(self._reports or self._followed_far()) and self._decide().base is not None

    def _holds_state(self) -> bool:
        """Whether the members that have reported hold the newest state together."""
        if not self._reports:
            return False
        record = decide(self.newest, self._reports, order=self.slots)
        return record.base is not None and not record.image

    def _followed_far(self) -> dict[str, Report]:
        """The reports of shadows that have a state."""
        return {name: report for name, report in self._followed.items() if report.lineage is not None}

    def _decide(self) -> Record:
        return decide(self.newest, self._reports, self._newcomers, order=self.slots, shadows=self._followed_far())

    def _forget_shadow(self, name: str) -> None:
        self._shadows.discard(name)
        self._alive.discard(name)
        self._followed.pop(name, None)

    def _fence(self, name: str) -> None:
        self._has_lost = True
        self._alive.discard(name)
        self._reports.pop(name, None)
        self._unheard.pop(name, None)
        self._out_of_reach.add(self.slots[name])
        self.outbox.append((name, {"kind": "fence"}))

    def _drop_the_unreachable(self) -> None:
        """Drop members if a generation repeatedly fails to form although all are alive: some cannot reach each other.
        First drop the newest members. If all are new, or none, keep only one node; then only one rank, which needs no
        peer."""
        self._count_barren()
        here = [name for name in self.slots if name in self._reports]  # in order of arrival
        late = [name for name in here if name in self.newest.fresh]
        if self.newest.image:  # which all members read; late are those that had no part in the generation before
            late = [name for name in here if name not in self._survivors]
        if 0 < len(late) < len(here):
            is_enough, dropped = self._barren_with_late >= _BARREN, late
        else:
            homes = {name: self._home(self.slots[name]) for name in here}
            away = [name for name in here if homes[name] != homes[here[0]]]
            is_enough, dropped = self._barren >= _HOPELESS, away or here[1:]
        if is_enough:
            for name in sorted(dropped):
                self._fence(name)
            self._barren = self._barren_with_late = 0

    def _count_barren(self) -> None:
        """Count the newest generation if it never made a step; once each, since a round may stay open for long."""
        if self._counted < self.newest.generation:
            self._counted = self.newest.generation
            is_same = all(report.lineage in (self.newest.base, None) for report in self._reports.values())
            is_barren = is_same and not self._has_lost
            self._barren = self._barren + 1 if is_barren else 0
            self._barren_with_late = self._barren_with_late + 1 if is_barren and self.newest.fresh else 0

    def _close(self, now_s: float, *, is_last: bool) -> None:
        self._has_lost = False
        record = self._decide()
        self._shadows.difference_update(record.roster)
        self.newest = replace(record, is_last=is_last, shadows=tuple(sorted(self._shadows)))
        self._survivors = {**self._followed, **self._reports}
        self._reports, self._followed, self._newcomers, self._began_s, self._has_wished = {}, {}, [], None, False
        self._unheard = dict.fromkeys(record.roster, now_s + HEARD_S)
        for name in [*record.roster, *self.newest.shadows]:
            self._send_record(name)

    def _send_record(self, name: str) -> None:
        self.outbox.append((name, {"kind": "record", "record": self.newest.to_record()}))

    def _wish(self) -> None:
        """Have the members stop after a step to admit a newcomer or a shadow; one is asked, and all see the wish in the
        commit."""
        is_awaited = self._newcomers or not self._shadows.issubset(self.newest.shadows)
        if self._began_s is None and is_awaited and self.members and not self._has_wished:
            self._has_wished = True
            self.outbox.append((self.members[0], {"kind": "wish", "generation": self.newest.generation}))
