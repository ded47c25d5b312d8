"""Coordinator of a run: admits nodes, checks that they agree, starts them together, and decides how the run ended.

Pure: records from members go in, records for members come out of `outbox`; no sockets, no clock (`now_s` is passed in).
The members are the launchers, and the head's own launcher is member 0. A run on one node has a coordinator with one
member. Ranks talk to their launcher only; the small store through which they find each other is kept here.

The one idea: a start is a sequence of phases, each with a deadline, and all members pass each phase together. A fatal
error ends the run on every node with the same code and reason. After the start, `worker_roster` leads the ranks from
generation to generation. The ends of all workers are collected until every member has reported, then judged once
(`exit_status.judge`).

    member: claim              reached  owned | seen            present, set, get      ready           end, over
    hub:            reach               own | see       begin                    go           begun       ebb  ending
    phase:  GATHERING  REACHING         DIRECTORIES             STARTING                       RUNNING  ENDING   OVER
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from hetseq.cluster.membership.admission import Claim, Roster
from hetseq.cluster.membership.compatibility import difference
from hetseq.cluster.membership.decide import SplitBrainError
from hetseq.cluster.membership.exit_status import Ending, WorkerEnd, judge, lost
from hetseq.cluster.membership.late_join import Latecomers
from hetseq.cluster.membership.participants import TELL_EVERY_S, ParticipantPlace, Record, StartPhase
from hetseq.cluster.membership.run_directory_discovery import FoundDirectories, choose_run_id
from hetseq.cluster.membership.worker_roster import Crews, Site
from hetseq.errors import EXIT_DISAGREE, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE

logger = logging.getLogger(__name__)

_REACH_S = 30.0  # a probe gives up after 8 s
_DIRECTORY_S = 60.0  # per answer; looking for a mark on a network file system takes 15 s
_LOAD_S = 1800.0  # loading data may take minutes; a worker that dies meanwhile is reported
_LINGER_S = 3.0
_EARLY_S = 60.0
_CUT_S = 20.0  # after an abnormal end: launchers wait 5 s for their workers
_END_S = 90.0  # after the first normal end, for the others to finish their step and their save


_BEFORE_WORKERS = (StartPhase.GATHERING, StartPhase.REACHING, StartPhase.DIRECTORIES)


class Coordinator(Latecomers):
    """All decisions at the start and at the end. `outbox` holds (member, record) for the caller to send, in order."""

    def __init__(
        self,
        *,
        join_timeout_s: float,
        paste: str,
        now_s: float,
        hint: str = "",
        min_ranks: int = 1,
        quiet_s: float = 0.0,
    ) -> None:
        super().__init__(now_s=now_s, patience_s=join_timeout_s)
        self.ending: Ending | None = None
        self._wanted = 0  # ranks, as the first node's options say
        self.sent_away = 0  # how often a node with another secret was rejected; the caller counts
        self._hint = hint  # where to look if nodes wait in another place
        self._min_ranks, self._join_timeout_s, self._paste = min_ranks, join_timeout_s, paste
        self._early_word_s = now_s + _EARLY_S  # when nodes that came early are told next that they still wait
        self._quiet_until_s = now_s + quiet_s  # nodes that are missing until then are no news
        self._is_polite = True  # whether the ranks may finish their work, once the run is ending
        self._roster = Roster()
        self._presented: dict[int, Mapping[str, str]] = {}  # rank -> contract
        self._store: dict[str, str] = {}
        self._awaited: dict[str, list[tuple[int, int]]] = {}  # key -> (member, rank) waiting for it
        self._ends: list[WorkerEnd] = []
        self._silent: list[int] = []
        self._cut_short, self._has_commit = "", False
        self._lost: list[str] = []

    def handle(self, member: int, record: Record, now_s: float) -> None:
        """Handle a record from a member. A malformed record ends the run, and the reason names the record's kind."""
        self._now_s = now_s
        known = member in self._members
        kind = record.get("kind")
        if (known and self._members[member].is_gone) or (kind == "claim") == known:
            return
        try:
            handler, phases = _HANDLERS[kind]
            if self.phase in phases:
                handler(self, member, record)
        except SplitBrainError as error:
            self._end(Ending(EXIT_FAILED, str(error)))
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            if not known:  # the sender is not part of this run; it may have another HetSeq version
                text = f"the head cannot read what this node claims ({error!r}): install the same HetSeq on both"
                self._send(member, "ending", code=EXIT_DISAGREE, message=text)
                return
            self._end(Ending(EXIT_FAILED, f"{self._name(member)} sent an invalid {kind!r} record: {error!r}"))

    def gone(self, member: int, why: str, now_s: float) -> None:
        """The channel to a member ended. Ignored if the member never claimed or has reported everything."""
        self._now_s = now_s
        self._early.pop(member, None)
        if member not in self._members or self._members[member].is_gone or self.phase is StartPhase.OVER:
            return
        if self.phase is StartPhase.GATHERING:
            del self._members[member]
            self._roster.remove(member)
            self._next_word_s = now_s
            return
        self._members[member].is_gone = True
        if self._members[member].is_heard and self.phase is StartPhase.ENDING:
            return
        if self.phase in (StartPhase.REACHING, StartPhase.DIRECTORIES):
            self._end(Ending(EXIT_FAILED, f"{self._name(member)} left before the start ({why})"))
            return
        if self._members[member].is_heard and self.phase is StartPhase.RUNNING:
            return  # it has reported that it has nothing left to do
        if member in self._late:
            self._late.discard(member)
            return
        told = f"the connection to {self._name(member)} was lost ({why})"
        if self._crews is None or not self._is_training:
            self._lost.append(told)
            self._begin_ending(is_polite=False)
        else:
            if self._crews.living & set(self._ranks(member)):
                self._lost.append(told)
            for rank in self._ranks(member):
                self._crews.gone(rank, told, now_s)
            self._after_crews()
        self._end_if_all_are_heard()

    @property
    def linger_s(self) -> float:
        """How long to keep the coordinator after an early refusal, so that nodes still on their way hear the reason."""
        here = sum(member.wanted for member in self._members.values())
        is_early = self.ending is not None and self.ending.code == EXIT_DISAGREE and not self._seats
        return _LINGER_S if is_early and here < self._wanted else 0.0

    def tick(self, now_s: float) -> float:
        """Act on everything due at `now_s`; returns the seconds until the next call."""
        self._now_s = now_s
        if self.phase in _BEFORE_WORKERS and self._members and now_s >= self._next_word_s:
            self._next_word_s = now_s + TELL_EVERY_S
            self._tell_what_is_awaited()
        if now_s >= self._deadline_s:
            self._give_up()
        tells = self.phase in _BEFORE_WORKERS and bool(self._members)
        next_s = self._next_word_s if tells else now_s + 60
        if self._early:
            if now_s >= self._early_word_s:
                self._early_word_s = now_s + _EARLY_S
                for early in self._early:  # else it would take the head for silent
                    self._send(early, "tell", text=f"the run has not begun yet: {self.phase.value}")
            next_s = min(next_s, self._early_word_s)
        if self._crews is not None and self._is_training:
            next_s = min(next_s, now_s + self._crews.tick(now_s))
            self._after_crews()
        return max(0.0, min(self._deadline_s, next_s) - now_s)

    def _tell_what_is_awaited(self) -> None:
        text = self.phase.value
        if self.phase is StartPhase.GATHERING:
            if self._now_s < self._quiet_until_s:
                return
            if self._hint:
                self._send_all("tell", text=self._hint)
            self._hint = ""  # tell it only once
            text = self._roster.waiting(left_s=self._deadline_s - self._now_s, paste=self._paste)
        self._send_all("tell", text=text)

    # Gathering

    def _claim(self, member: int, record: Record) -> None:
        claim = Claim.from_record(record["claim"])
        # a refusal also applies to nodes that arrive a moment later, including the head's own launcher
        if self.ending is not None and not self._seats:
            self._send(member, "ending", code=self.ending.code, message=self.ending.message)
            return
        if self.phase in (StartPhase.ENDING, StartPhase.OVER):
            self._send(member, "tell", text="a run is still ending there; waiting for it to finish")
            return
        if self.phase is not StartPhase.GATHERING and self._crews is not None and self._is_training:
            self._claim_late(member, claim, self._member_of(claim, record))
            return
        if self.phase is not StartPhase.GATHERING:
            self._claim_early(member, claim, record)
            return
        if claim.is_shadow:
            self._claim_of_shadow(member, claim, record)
            return
        new = self._member_of(claim, record)
        first = next(iter(self._members), None)
        if first is None:
            self._wanted = claim.world_size or claim.min_ranks or 0
        refusal = self._roster.admit(member, claim)
        self._members[member] = new
        if refusal is None and first is not None:
            refusal = difference([(self._name(first), self._members[first].fields), (self._name(member), new.fields)])
        if refusal is not None:
            self._end(Ending(EXIT_DISAGREE, refusal))
        elif self._roster.is_complete:
            self._seats = self._roster.seats()
            self._say_builds()
            self._begin_reaching()
        else:
            self._next_word_s = self._now_s

    def _claim_of_shadow(self, member: int, claim: Claim, record: Record) -> None:
        """Have a shadow wait until the others train; the first node can't be one."""
        if member != 0:
            self._claim_early(member, claim, record)
            return
        text = f"{claim.host} is the first node, and --shadow follows the others: start a node without --shadow first"
        self._end(Ending(EXIT_USAGE, text))
        self._send(member, "ending", code=EXIT_USAGE, message=text)

    def _say_builds(self) -> None:
        builds = {member: self._members[member].build for member in self._order}
        if len(set(builds.values())) > 1:
            listed = ", ".join(f"{build or 'none'} on {self._name(member)}" for member, build in builds.items())
            self._send_all("tell", text=f"builds of torch differ, which is fine: {listed}")

    # Reaching

    def _begin_reaching(self) -> None:
        if len(self._seats) == 1:
            self._begin_directories()
            return
        self._enter(StartPhase.REACHING, _REACH_S)
        for member in self._order:
            # in both directions: gloo chooses which rank of a pair connects
            others = [self._members[other] for other in self._order if other != member]
            peers = [{"host": peer.host, "address": peer.address, "port": peer.door} for peer in others]
            self._send(member, "reach", peers=peers)

    def _reached(self, member: int, record: Record) -> None:
        self._lost.extend(str(failure) for failure in record["failures"])
        self._members[member].is_heard = True
        if self._all_are_heard():
            if self._lost:
                self._end(Ending(EXIT_FAILED, "; ".join(self._lost)))
            else:
                self._begin_directories()

    # Directories

    def _begin_directories(self) -> None:
        self._enter(StartPhase.DIRECTORIES, _DIRECTORY_S)
        for member in self._members.values():
            member.is_heard = True  # a member owes no answer until it is asked
        self._settle_next_directory()

    def _settle_next_directory(self) -> None:
        """Have the first node without a directory prepare one; nodes that may share it then look for it."""
        self._deadline_s = self._now_s + _DIRECTORY_S
        homeless = [member for member in self._order if self._members[member].place is None]
        if homeless:
            self._members[homeless[0]].is_heard = False
            self._send(homeless[0], "own")
        else:
            self._begin_starting()

    def _owned(self, member: int, record: Record) -> None:
        if member in self._late:
            self._owned_late(member, record)
            return
        found = FoundDirectories(
            self._members[member].host, str(record["path"]), str(record["run_id"]), record["newest"]
        )  # fmt: skip
        place = ParticipantPlace(str(record["path"]), record["mark"], found, [member])
        self._members[member].place = place
        self._members[member].is_heard = True
        self._places.append(place)
        lookers = [other for other in self._order if self._may_look(other, place)]
        for other in lookers:
            self._members[other].is_heard = False
            self._send(other, "see", mark=place.mark)
        if not lookers:
            self._settle_next_directory()

    def _may_look(self, member: int, place: ParticipantPlace) -> bool:
        """All nodes look for the first run directory; for a later one, only nodes whose own path is the same."""
        looker = self._members[member]
        return looker.place is None and (place is self._places[0] or looker.save_dir == place.path)

    def _seen(self, member: int, record: Record) -> None:
        if member in self._late:
            self._seen_late(member, record)
            return
        self._members[member].is_heard = True
        if record["is_shared"] is True:
            self._members[member].place = self._places[-1]
            self._places[-1].members.append(member)
        if self._all_are_heard():
            self._settle_next_directory()

    # Starting

    def _begin_starting(self) -> None:
        run_id, refusal = choose_run_id([place.found for place in self._places])
        if refusal is not None:
            self._end(Ending(EXIT_DISAGREE, refusal))
            return
        # a single node needs no limit: its launcher notices when a worker dies
        self._enter(StartPhase.STARTING, _LOAD_S if len(self._seats) > 1 else float("inf"))
        parts = [self._ranks_at(place) for place in self._places]
        nodes = [self._members[seat.member].host for seat in self._seats for _ in seat.ranks]
        name = self._run_name = secrets.token_hex(8)
        self._run_id = run_id
        for seat in self._seats:
            place = self._members[seat.member].place
            assert place is not None
            self._send(
                seat.member, "begin", name=name, first_rank=seat.first_rank, nodes=nodes,
                parts=[sorted(part) for part in parts], path=place.path, run_id=run_id,
            )  # fmt: skip

    def _present(self, member: int, record: Record) -> None:
        rank = self._own_rank(member, record)
        if self.phase is StartPhase.ENDING:
            self._send(member, "dismiss", rank=rank, starts=record["starts"], why="the run is ending")
            return
        if self.phase is not StartPhase.STARTING:
            self._of_crews(member, record)
            return
        self._presented[rank] = dict(record["fields"])
        if len(self._presented) < len(self._hosts):
            return
        parties = [(f"rank {rank} on {self._hosts[rank]}", self._presented[rank]) for rank in sorted(self._presented)]
        refusal = difference(parties)
        if refusal is not None:
            self._end(Ending(EXIT_DISAGREE, refusal))
            return
        self._deadline_s = max(self._deadline_s, self._now_s + _LOAD_S)
        self._send_all("go")

    def _set(self, member: int, record: Record) -> None:
        key, value = str(record["key"]), str(record["value"])
        self._store[key] = value
        for waiter, rank in self._awaited.pop(key, []):
            self._send(waiter, "value", rank=rank, key=key, value=value)

    def _get(self, member: int, record: Record) -> None:
        key, rank = str(record["key"]), self._own_rank(member, record)
        if key in self._store:
            self._send(member, "value", rank=rank, key=key, value=self._store[key])
        else:
            self._awaited.setdefault(key, []).append((member, rank))

    def _ready(self, member: int, record: Record) -> None:
        self._members[member].is_heard = True
        if self.phase is StartPhase.STARTING and self._all_are_heard():
            self._enter(StartPhase.RUNNING, float("inf"))
            places = {rank: self._places.index(place) for place in self._places for rank in self._ranks_at(place)}
            nodes = {rank: seat.member for seat in self._seats for rank in seat.ranks}
            sites = {
                rank: Site(host, places[rank], nodes[rank], self._members[nodes[rank]].address)
                for rank, host in self._hosts.items()
            }
            self._crews = Crews(sites, self._presented, min_ranks=self._min_ranks, wait_s=self._join_timeout_s)
            self._send_all("begun", parts=sorted(self._crews.parts))
            for late in list(self._early):
                self._claim(late, self._early.pop(late))

    # Training

    @property
    def _is_training(self) -> bool:
        """Whether the others can continue without a rank that is lost."""
        return self.phase is StartPhase.RUNNING or (self.phase is StartPhase.ENDING and self._is_polite)

    def _of_crews(self, member: int, record: Record) -> None:
        """Handle what a rank says about generations."""
        rank = self._own_rank(member, record)
        if self._crews is not None and self._is_training:
            self._crews.handle(rank, record, self._now_s)
            self._after_crews()
        elif record["kind"] == "report":
            self._send(member, "dismiss", rank=rank, why="the run is ending")

    def _leave(self, member: int, record: Record) -> None:
        """A rank is asked to leave, or a node is taken away. Taking the head away ends the coordinator: all stop."""
        if self._crews is not None:
            is_rank = "rank" in record
            slots = [self._own_rank(member, record)] if is_rank else list(self._ranks(member))
            self._crews.leave(slots, is_everybody=member == 0 and not is_rank, now_s=self._now_s)
            self._after_crews()

    def _after_crews(self) -> None:
        """Send the records of `worker_roster`, and end the run if no worker is left or it cannot continue."""
        assert self._crews is not None
        while self._crews.outbox:
            rank, kind, facts = self._crews.outbox.pop(0)
            if kind == "record" and self._crews.is_hopeless:
                kind, facts = "dismiss", {"starts": facts["starts"], "why": "a step has crashed two processes"}
            elif kind == "record":
                self._ends = [end for end in self._ends if not end.is_loss]  # the run survived these losses
                self._lost.clear()
            member = next((seat.member for seat in self._seats if rank in seat.ranks), None)
            if member is not None and not self._members[member].is_gone:
                self._send(member, kind, rank=rank, **facts)
        if (self._crews.is_extinct or self._crews.is_hopeless) and self.phase is StartPhase.RUNNING:
            self._begin_ending(is_polite=False)

    # Ending

    def _worker_end(self, member: int, record: Record) -> None:
        end, starts = WorkerEnd(**record["end"]), int(record["starts"])
        self._own_rank(member, {"rank": end.rank})
        if self._crews is None or end.is_peaceful or self._crews.is_member(end.rank, starts):
            self._ends.append(end)
        if self._crews is None or not self._is_training:
            if end.code != EXIT_DONE:
                self._begin_ending(is_polite=end.code == EXIT_STOPPED and not end.is_secondary)
            return
        if end.is_peaceful:
            self._crews.finished(end.rank, starts)
            self._begin_ending(is_polite=True)
        elif end.is_loss or not self._crews.is_member(end.rank, starts):
            self._crews.left(end, starts, is_restarting=record["is_restarting"], now_s=self._now_s)
            self._after_crews()
        else:
            self._ends = [known for known in self._ends if not known.is_loss]  # the run was about to survive these
            self._begin_ending(is_polite=False)

    def _over(self, member: int, record: Record) -> None:
        self._members[member].is_heard = True
        is_last = all(self._is_excused(other) for other in self._members)
        is_head = member == 0 and bool(record["cut_short"])  # the coordinator ends with it
        if self.phase is not StartPhase.RUNNING or is_last or is_head or self._crews is None:
            self._begin_ending(is_polite=not record["cut_short"])
            self._members[member].is_heard = True
        else:
            if record["cut_short"] and self._crews.living & set(self._ranks(member)):
                self._lost.append(f"{self._name(member)}: {record['cut_short']}")
                record = {**record, "cut_short": ""}
            for rank in self._ranks(member):
                self._crews.gone(rank, f"{self._name(member)} has left", self._now_s)
            self._after_crews()
        self._silent.extend(int(rank) for rank in record["silent"])
        self._has_commit = self._has_commit or bool(record["has_commit"])
        if record["cut_short"] and not self._cut_short:
            where = f"{self._name(member)}: " if len(self._seats) > 1 else ""
            self._cut_short = where + str(record["cut_short"])
        self._end_if_all_are_heard()

    def _refused(self, member: int, record: Record) -> None:
        """A member cannot take part, for a reason that it found itself."""
        where = f"{self._name(member)}: " if len(self._members) > 1 else ""
        if member in self._late:
            self._send(member, "ending", code=int(record["code"]), message=str(record["message"]))
            self.gone(member, "it cannot take part", self._now_s)
        elif self.phase is StartPhase.GATHERING:
            self.gone(member, "it left", self._now_s)
        else:
            self._end(Ending(int(record["code"]), where + str(record["message"])))

    def _begin_ending(self, *, is_polite: bool) -> None:
        """Tell all members that the run is ending; with `is_polite` their workers may finish their work first."""
        if self.phase in (StartPhase.ENDING, StartPhase.OVER):
            return
        over = [
            member for member, known in self._members.items() if known.is_heard and self.phase is StartPhase.RUNNING
        ]
        over += self._late
        over += [m for m in self._order if self._crews is not None and not self._crews.counts(set(self._ranks(m)))]
        self._enter(StartPhase.ENDING, _END_S if is_polite else _CUT_S)
        for member in over:
            self._members[member].is_heard = True
        self._is_polite = is_polite
        self._send_all("ebb", is_polite=is_polite)
        if self._crews is not None and is_polite:
            self._crews.dismiss_waiting("the run is ending")
            self._after_crews()

    def _end_if_all_are_heard(self) -> None:
        if self.phase is StartPhase.ENDING and self._all_are_heard():
            self._judge()

    def _judge(self) -> None:
        ending = judge(
            self._ends, has_commit=self._has_commit, cut_short=self._cut_short, silent=self._silent,
            hosts=self._hosts if len(self._seats) > 1 else None,
        )  # fmt: skip
        is_bereaved = all(end.is_secondary or end.code == EXIT_DONE for end in self._ends)
        if self._lost and is_bereaved and not self._cut_short:
            ending = lost("; ".join(self._lost), self._has_commit)
        self._end(ending)

    def _give_up(self) -> None:
        silent = [self._name(member) for member in self._order if not self._is_excused(member)]
        if self.phase is StartPhase.STARTING:
            absent = [member for member in self._order if not set(self._ranks(member)) <= set(self._presented)]
            silent = [self._name(member) for member in absent] or silent
        if self.phase is StartPhase.GATHERING:
            waiting = self._roster.waiting(left_s=0.0, paste=self._paste)
            text = f"the other nodes did not come in time [ranks-missing]: {waiting}"
            if self.sent_away:
                text += f"; {self.sent_away} times a node with another secret was sent away"
            # numbers that do not fit, or a node that could not prove itself: not the same as no node arriving
            is_disagreement = self._roster.has_hole or self.sent_away
            self._end(Ending(EXIT_DISAGREE if is_disagreement else EXIT_FAILED, text))
        elif self.phase is StartPhase.ENDING:
            self._lost.extend(f"{name} did not say how it ended" for name in silent)
            self._judge()
        elif self.phase is not StartPhase.OVER:
            who = ", ".join(silent) or "no node"
            text = f"{who} did not answer in time while {self.phase.value}: is a machine stopped, or a disk stuck?"
            self._end(Ending(EXIT_FAILED, text))

    def _end(self, ending: Ending) -> None:
        self.phase, self.ending, self._deadline_s = StartPhase.OVER, ending, float("inf")
        self._send_all("ending", code=ending.code, message=ending.message)


_BEFORE = (StartPhase.GATHERING, StartPhase.REACHING, StartPhase.DIRECTORIES, StartPhase.STARTING)
_AT_WORK = (StartPhase.STARTING, StartPhase.RUNNING)
#: the handler of each kind of record, and the phases in which it applies; in other phases the record is ignored
_HANDLERS: dict[Any, tuple[Callable[[Coordinator, int, Record], None], tuple[StartPhase, ...]]] = {
    "claim": (Coordinator._claim, tuple(StartPhase)),
    "refused": (Coordinator._refused, (*_BEFORE, StartPhase.RUNNING)),
    "reached": (Coordinator._reached, (StartPhase.REACHING,)),
    "owned": (Coordinator._owned, (StartPhase.DIRECTORIES, StartPhase.RUNNING)),
    "seen": (Coordinator._seen, (StartPhase.DIRECTORIES, StartPhase.RUNNING)),
    "present": (Coordinator._present, (*_AT_WORK, StartPhase.ENDING)),
    "set": (Coordinator._set, (*_AT_WORK, StartPhase.ENDING)),
    "get": (Coordinator._get, (*_AT_WORK, StartPhase.ENDING)),
    "ready": (Coordinator._ready, (StartPhase.STARTING,)),
    **dict.fromkeys(("report", "frozen", "heard", "stands"), (Coordinator._of_crews, (*_AT_WORK, StartPhase.ENDING))),
    "leave": (Coordinator._leave, (StartPhase.RUNNING,)),
    "end": (Coordinator._worker_end, (*_AT_WORK, StartPhase.ENDING)),
    "over": (Coordinator._over, (*_AT_WORK, StartPhase.ENDING)),
}
