"""Worker roster: translates between the coordinator's slots and processes and the incarnations of `regroup_rounds`.

Pure, like the coordinator. Here a worker is a slot and the number of its earlier starts; in `regroup_rounds` it is one
name. A record is sent together with its ranks (hosts, directory groups) and with the story of what happened, in words
for users.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetseq.balance.layout import has_whole_model
from hetseq.cluster.membership.admission import clock
from hetseq.cluster.membership.assignment import GenerationRanks
from hetseq.cluster.membership.compatibility import PART, TENSORS, difference
from hetseq.cluster.membership.decide import Record, Report
from hetseq.cluster.membership.exit_status import WorkerEnd, how_it_ended
from hetseq.cluster.membership.participants import TELL_EVERY_S
from hetseq.cluster.membership.regroup_rounds import Generations
from hetseq.cluster.rendezvous.leader_election import Standing
from hetseq.system.rank_phase import in_words

logger = logging.getLogger(__name__)

_TOGETHER_S = 5.0  # nodes asked to leave within this time leave together
_FIRST_WORD_S = 2.0  # before the first message about missing ranks: a restarted worker is back by then


def incarnation(slot: int, starts: int) -> str:
    """The name of a process: its slot, and the number of earlier starts of that slot."""
    return f"{slot}.{starts}"


def slot_of(name: str) -> int:
    """The slot of an incarnation."""
    return int(name.partition(".")[0])


@dataclass(frozen=True)
class Site:
    """Location of the worker of a slot."""

    host: str
    place: int  # the number of the run directory that it uses
    node: int  # the number of its launcher
    address: str = "127.0.0.1"  # of its interface


class Crews:
    """The workers of a run while they train. `outbox` holds (slot, kind, facts) for the coordinator to send.

    `presented` holds the fields that each rank presented at the start; its replacement must present the same. The other
    arguments are as for `Generations`.
    """

    def __init__(
        self, sites: Mapping[int, Site], presented: Mapping[int, Mapping[str, str]], *, min_ranks: int, wait_s: float
    ) -> None:  # fmt: skip
        self.outbox: list[tuple[int, str, dict[str, Any]]] = []
        self._sites, self._presented, self._min_ranks = dict(sites), dict(presented), min_ranks
        self._part_of = {slot: fields[PART] for slot, fields in presented.items() if PART in fields}
        #: parts of the training data at the start of the run; it trains while each is on some rank
        self.parts = frozenset(self._part_of.values())
        sizes = next((fields[TENSORS] for fields in presented.values() if TENSORS in fields), "1")
        self._sizes = tuple(map(int, sizes.split("+")))  # of groups that divide the model
        self._hosts = {slot: site.host for slot, site in sites.items()}
        self._starts = dict.fromkeys(sites, 0)
        names = {incarnation(slot, 0): slot for slot in sorted(sites)}
        self._generations = Generations(
            Record(0, tuple(names)), names, min_ranks=min_ranks, wait_s=wait_s, home=self._node_of,
            part=self._part_of.get, parts=self.parts,
        )  # fmt: skip
        self._generations.suffices = self._has_whole_model
        self._story: list[str] = []
        self._stands: dict[str, tuple[dict[str, Any], float]] = {}  # last reported phase of a process, and when
        self._told = 0  # the newest generation whose record was sent
        self._has_crashed = False  # a process of the newest generation crashed by its own fault
        self._crashed_after: set[int | None] = set()  # steps; None: the step of the newest checkpoint
        #: the same step has crashed a second process, so it would crash all of them
        self.is_hopeless = False
        self._new: set[int] = set()  # slots that no worker had before
        self._shadows: set[int] = set()  # slots whose worker follows the run, or will once it has loaded
        self._ranked = set(sites)  # slots that a rank has had
        self._leaving: set[int] = set()  # slots that were asked to leave
        self._leave_s = math.inf  # when they leave, at the latest
        self._has_yielded = False
        self._next_word_s: float | None = None  # when the next message about missing ranks is due

    def _has_whole_model(self, slots: Iterable[int]) -> bool:
        return self._sizes == (1,) or has_whole_model(slots, self._sizes)

    @classmethod
    def amid(
        cls,
        newest: Record,
        sites: Mapping[int, Site],
        presented: Mapping[int, Mapping[str, str]],
        starts: Mapping[int, int],
        *,
        min_ranks: int,
        wait_s: float,
        parts: Iterable[str] = (),
    ) -> Crews:
        """The roster of a run whose coordinator was lost in the generation `newest`.

        `presented` holds the fields of the remaining slots, `parts` the data parts at the start of the run. `starts`
        counts the starts of every slot ever used, as far as this node knows. It keeps names unique: a process with a
        reused name would be taken for one that has ended.
        """
        crews = cls(sites, presented, min_ranks=min_ranks, wait_s=wait_s)
        crews.parts = frozenset(parts)
        names = {name: slot_of(name) for name in (*newest.roster, *newest.shadows)}
        shadows = [name for name in newest.shadows if names[name] in presented]  # of this node
        crews._shadows = {names[name] for name in shadows}
        crews._ranked = {names[name] for name in newest.roster}
        crews._generations = Generations(
            newest, names, min_ranks=min_ranks, wait_s=wait_s, home=crews._node_of, part=crews._part_of.get,
            parts=crews.parts, shadows=shadows,
        )  # fmt: skip
        crews._generations.suffices = crews._has_whole_model
        crews._starts |= starts
        for name in names:
            slot, _, count = name.partition(".")
            crews._starts[int(slot)] = max(int(count), crews._starts[int(slot)])
        return crews

    def _node_of(self, slot: int) -> int:
        return self._sites[slot].node

    def bereave(self, slots: Collection[int], how: str, now_s: float) -> None:
        """Mark all workers as lost except those in these slots."""
        self._story.append(how)
        for name in self._generations.members:
            if self._generations.slots[name] not in slots:
                self._generations.ended(name, now_s)
        self._pass_on(now_s)

    @property
    def generation(self) -> int:
        return self._generations.newest.generation

    @property
    def is_extinct(self) -> bool:
        """Whether no worker is left or on the way."""
        return self._generations.is_extinct

    @property
    def living(self) -> set[int]:
        """The slots of the ranks that take part."""
        return {self._generations.slots[name] for name in self._generations.members}

    def counts(self, slots: Collection[int]) -> bool:
        """Whether any of these slots is in the newest generation or taken by a rank."""
        newest = {self._generations.slots[name] for name in self._generations.newest.roster}
        return bool(set(slots) & (newest | self.taken))

    @property
    def shadows(self) -> set[int]:
        """The slots with a worker that follows the run, or will once it has loaded."""
        return set(self._shadows)

    @property
    def next_slot(self) -> int:
        """The first slot behind all that ranks have had so far."""
        return 1 + max(self._ranked, default=-1)

    @property
    def taken(self) -> set[int]:
        """The slots with a rank that trains, waits to be admitted, or is being started."""
        return (
            self.living | self._generations.expected | {self._generations.slots[n] for n in self._generations.waiting}
        )

    def seat(self, slot: int, site: Site, *, is_shadow: bool = False) -> int:
        """A late node starts a worker for this slot; returns the number of earlier starts."""
        starts = self._starts[slot] + 1 if slot in self._starts else 0
        if slot not in self._starts:
            self._new.add(slot)
        self._starts[slot], self._sites[slot], self._hosts[slot] = starts, site, site.host
        self._leaving.discard(slot)
        self._shadows.discard(slot)
        if is_shadow:
            self._shadows.add(slot)
        else:
            self._ranked.add(slot)
            self._generations.expect(slot)
        return starts

    def handle(self, slot: int, record: Mapping[str, Any], now_s: float) -> None:
        """Handle a record from a worker. Raises KeyError, TypeError or ValueError if it is malformed."""
        name, kind = incarnation(slot, int(record["starts"])), record["kind"]
        if kind == "report":
            self._generations.reported(Report.from_record({**record["report"], "incarnation": name}), now_s)
        elif kind == "frozen":
            self._generations.answered(name, float(record["patience_s"]), now_s)
        elif kind == "heard":
            self._generations.heard(name, int(record["generation"]))
        elif kind == "stands":
            in_words(record)  # raises if malformed
            self._stands[name] = dict(record), now_s
        elif kind == "present":
            self._admit(slot, int(record["starts"]), dict(record["fields"]), now_s)
        self._pass_on(now_s)

    def _admit(self, slot: int, starts: int, fields: Mapping[str, str], now_s: float) -> None:
        """Admit a replacement if it presents the same fields as its predecessor; else dismiss it."""
        if slot in self._leaving:
            self.dismiss(slot, starts, "its node was asked to leave", now_s)
            return
        known = slot if slot in self._presented else min(self._presented)
        refusal = difference([(f"rank {known} at first", self._presented[known]), (f"rank {slot} now", fields)])
        if refusal is not None:
            self.dismiss(slot, starts, refusal, now_s)
            return
        self._starts[slot] = starts
        word = "is new" if slot in self._new else "is back"
        self._new.discard(slot)
        self._presented.setdefault(slot, fields)
        if PART in fields:  # may differ from the part of its predecessor
            self._part_of[slot] = fields[PART]
        self.outbox.append((slot, "go", {"starts": starts}))
        if slot in self._shadows:
            self._story.append(f"{self._hosts[slot]} follows as a shadow")
            self._generations.follows(incarnation(slot, starts), slot)
            return
        self._story.append(f"rank {slot} on {self._hosts[slot]} {word}")
        self._generations.arrived(incarnation(slot, starts), slot, now_s)

    def dismiss(self, slot: int, starts: int, why: str, now_s: float) -> None:
        """Dismiss a replacement."""
        self.outbox.append((slot, "dismiss", {"starts": starts, "why": why}))
        self._generations.do_not_expect(slot, now_s)

    def dismiss_waiting(self, why: str) -> None:
        """Dismiss all workers that wait to be admitted."""
        for name in self._generations.waiting:
            facts = {"starts": int(name.partition(".")[2]), "why": why}
            self.outbox.append((self._generations.slots[name], "dismiss", facts))

    def leave(self, slots: Collection[int], *, is_everybody: bool, now_s: float) -> None:
        """A node is asked to leave. Its ranks leave a little later, since a queue may take all nodes at the same time.
        With `is_everybody`, or if too few ranks or not all data parts would remain, all stop together."""
        self._wish(self._shadows.intersection(slots), "LEAVE")
        self._leaving.update(slots)
        staying = self.living - self._leaving
        keeps_all = self.parts <= {self._part_of.get(slot) for slot in staying}
        if is_everybody or len(staying) < self._min_ranks or not keeps_all:
            self._leave_s = math.inf
            self._wish(self.living, "STOP")
            self._generations.stop(now_s)
            self._pass_on(now_s)
        elif self._leave_s == math.inf:
            self._leave_s = now_s + _TOGETHER_S

    def _wish(self, slots: Collection[int], what: str) -> None:
        self.outbox.extend((slot, "wish", {"what": what}) for slot in sorted(slots))

    def is_member(self, slot: int, starts: int) -> bool:
        """Whether this process takes part; the end of one that does not changes nothing for the run."""
        return self._generations.is_member(incarnation(slot, starts))

    def stand(self, standing: Standing, now_s: float) -> bool:
        """Update how sure this coordinator is that it leads; returns whether this call has asked all ranks to stop."""
        self._generations.standing = standing
        if self._has_yielded or not self._generations.has_yielded:
            return False
        self._has_yielded = True
        self.leave(self.living, is_everybody=True, now_s=now_s)
        return True

    def finished(self, slot: int, starts: int) -> None:
        """A worker ended normally."""
        self._generations.finished(incarnation(slot, starts))

    def left(self, end: WorkerEnd, starts: int, *, is_restarting: bool, now_s: float) -> None:
        """A worker ended before the run; with `is_restarting` a replacement is being started."""
        if self._generations.is_member(incarnation(end.rank, starts)):  # else it was fenced, or not yet admitted
            self._story.append(how_it_ended(end, self._hosts))
            self._has_crashed = self._has_crashed or end.is_own_fault
        self._generations.heard_of(end.rank)
        if is_restarting and end.rank not in self._shadows:
            self._generations.expect(end.rank)
        self._generations.ended(incarnation(end.rank, starts), now_s)
        if not is_restarting:
            self._shadows.discard(end.rank)
            self._generations.do_not_expect(end.rank, now_s)
        self._pass_on(now_s)

    def gone(self, slot: int, how: str, now_s: float) -> None:
        """The process in this slot is unreachable."""
        if slot in self.living or any(self._generations.slots[name] == slot for name in self._generations.waiting):
            self._story.extend([how] if how not in self._story else [])  # once per node, not per rank
        self._shadows.discard(slot)
        self._generations.do_not_expect(slot, now_s)
        self._generations.ended(incarnation(slot, self._starts.get(slot, 0)), now_s)
        self._pass_on(now_s)

    def tick(self, now_s: float) -> float:
        """Act on everything due at `now_s`; returns the seconds until the next call."""
        left_s = self._generations.tick(now_s)
        if now_s >= self._leave_s:
            self._leave_s = math.inf
            self._wish(self.living & self._leaving, "LEAVE")
        self._pass_on(now_s)
        return min(left_s, self._leave_s - now_s, self._tell_what_is_awaited(now_s))

    def _tell_what_is_awaited(self, now_s: float) -> float:
        """Tell users at intervals which ranks are missing, once per node; returns the seconds until the next time."""
        until_s = self._generations.awaited_until_s
        if until_s is None:
            self._next_word_s = None
            return math.inf
        if self._next_word_s is None:
            self._next_word_s = now_s + _FIRST_WORD_S
        elif now_s >= self._next_word_s:
            self._next_word_s = now_s + TELL_EVERY_S
            lacking = self._generations.lacking
            more = f"{lacking} more rank{'' if lacking == 1 else 's'} (--min-ranks {self._min_ranks})"
            before, most = "; ".join(self._story), clock(until_s - now_s)
            before = f"{before}: " if before else ""
            text = (
                f"{before}waiting for {more if lacking else 'a host with its part of the data'},"
                f" {most} at most; Ctrl-C saves the state and ends the run"
            )
            if not lacking and not self._has_whole_model(self.living):
                text = (
                    f"{before}waiting for the other ranks that hold parts of the model (--tensor-parallel-degree),"
                    f" {most} at most; Ctrl-C ends the run, and the next start continues from the newest state"
                )
            told = {self._sites[slot].node: slot for slot in sorted(self.living | self._shadows, reverse=True)}
            self.outbox.extend((slot, "tell", {"text": text}) for slot in sorted(told.values()))
        return self._next_word_s - now_s

    def _pass_on(self, now_s: float) -> None:
        kinds = {order["kind"] for _, order in self._generations.outbox}
        if "record" in kinds and "fence" not in kinds and self.generation > self._told and not self._story:
            self._blame_the_last()
        story = "; ".join(self._story)
        has_record = False
        for name, order in self._generations.outbox:
            slot, kind = self._generations.slots[name], order.pop("kind")
            facts = {"starts": int(name.partition(".")[2]), **order}
            if kind == "wish":
                facts["what"] = "CHANGE"
            elif kind == "record":
                if not has_record:
                    story = self._note_promotion(story)
                facts |= {"crew": self._crew().to_record(), "story": story, "started": sorted(self._starts.items())}
                has_record = True
            elif kind == "fence" and slot in self._shadows:
                logger.debug("the shadow in slot %d is needed and silent: it is fenced", slot)
            elif kind == "fence":
                where = self._where(name, now_s)
                self._story.append(f"rank {slot} on {self._hosts[slot]} fell silent{where} [worker-silent]")
                story = "; ".join(self._story)
            self.outbox.append((slot, kind, facts))
        self._generations.outbox.clear()
        if has_record and self.generation > self._told:
            self._told = self.generation
            self._story.clear()
            self._stands.clear()
            self._judge_crash()

    def _note_promotion(self, story: str) -> str:
        """The story with the shadow that the newest record has made a rank, if there is one."""
        for slot in sorted(self._shadows & {self._generations.slots[name] for name in self._generations.newest.roster}):
            self._shadows.discard(slot)
            self._ranked.add(slot)
            story = "; ".join(filter(None, (story, f"the shadow on {self._hosts[slot]} takes over as rank {slot}")))
        return story

    def _where(self, name: str, now_s: float) -> str:
        """The last known phase of a process, as the end of a sentence; empty if its node has not reported one."""
        if name not in self._stands:
            return ""
        told, at_s = self._stands[name]
        return f", {in_words(told, more_s=now_s - at_s)}"

    def _blame_the_last(self) -> None:
        """No rank was lost, but a step missed its deadline: name the rank that was still busy when others gave up."""
        late = {
            name: float(told["for_s"])
            for name, (told, _) in self._stands.items()
            if not told["is_waiting"] and float(told["for_s"]) >= float(told["deadline_s"])
        }
        if late:
            name = max(late, key=late.__getitem__)
            told, _ = self._stands[name]
            slot = self._generations.slots[name]
            self._story.append(f"rank {slot} on {self._hosts[slot]} kept the others waiting, {in_words(told)}")

    def _judge_crash(self) -> None:
        base = self._generations.newest.base
        step = None if base is None else base.step
        if self._has_crashed:
            self.is_hopeless = step in self._crashed_after or (step is None and bool(self._crashed_after))
            self._crashed_after.add(step)
        self._has_crashed = False

    def _crew(self) -> GenerationRanks:
        newest = self._generations.newest
        slots = [self._generations.slots[name] for name in newest.roster]
        by_place: dict[int, list[int]] = {}
        for rank, slot in enumerate(slots):
            by_place.setdefault(self._sites[slot].place, []).append(rank)
        hosts = tuple(self._hosts[slot] for slot in slots)
        parts = tuple(sorted(tuple(part) for part in by_place.values()))
        is_only_node = len({self._sites[slot].node for slot in slots}) == 1
        following = [self._generations.slots[name] for name in newest.shadows]
        addresses = tuple(sorted({self._sites[slot].address for slot in (*slots, *following)}))
        return GenerationRanks(newest.generation, tuple(slots), hosts, parts, is_only_node, addresses)
