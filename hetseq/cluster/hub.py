"""The head of a run: it admits nodes, has them prove that they agree, lets them start, and says how the run ended.

Pure: records of members go in, records for members come out of `outbox`; no sockets, no clock (`now_s` is passed in).
Members are the launchers, the head's own being member 0; a run on one node is a hub with one member. Ranks speak to
their launcher alone, and the small store over which they find each other is kept here.

The one idea: a start is a row of phases that all members pass together, and each has a deadline. Whatever cannot be
mended ends the run on every node with the same code and reason; after the start, the ends of all workers are collected
until everybody has reported, and judged once (`ending.judge`).

    member: claim              reached  owned | seen            present, set, get      ready           end, over
    hub:            reach               own | see       begin                    go           begun       ebb  ending
    phase:  GATHERING  REACHING         DIRECTORIES             STARTING                       RUNNING  ENDING   OVER
"""

from __future__ import annotations

import enum
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetseq.cluster.contract import difference
from hetseq.cluster.directories import Found, choose_run_id
from hetseq.cluster.roster import Claim, Roster, Seat
from hetseq.ending import Ending, WorkerEnd, judge, lost
from hetseq.errors import EXIT_DISAGREE, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED

logger = logging.getLogger(__name__)

Record = dict[str, Any]

TELL_EVERY_S = 10.0
_REACH_S = 30.0  # a probe gives up after 8 s
_DIRECTORY_S = 60.0  # one answer; a look at a network file system takes 15 s
_LOAD_S = 1800.0  # data may take minutes to read; a worker that dies meanwhile is reported
_LINGER_S = 3.0
_CUT_S = 20.0  # after an end that was none in peace: launchers wait 5 s for their workers
_END_S = 90.0  # after the first end, for the others to finish their step and their save


class Phase(enum.Enum):
    """What the members are doing together."""

    GATHERING = "waiting for the nodes"
    REACHING = "trying the connections between the nodes"
    DIRECTORIES = "looking for the run directory"
    STARTING = "loading the data"
    RUNNING = "training"
    ENDING = "ending"
    OVER = "over"


_BEFORE_WORKERS = (Phase.GATHERING, Phase.REACHING, Phase.DIRECTORIES)


@dataclass
class _Member:
    """One launcher, as far as it has told."""

    host: str
    pid: int
    wanted: int  # of its workers, those that the run waits for
    address: str  # of its interface, and the port where it lets its peers knock
    door: int
    fields: Mapping[str, str]
    build: str
    save_dir: str
    place: _Place | None = None  # the run directory it uses
    is_heard: bool = False  # in this phase
    is_gone: bool = False


@dataclass
class _Place:
    """A run directory, and the members that use it; its owner, the first of them, made it."""

    path: str
    mark: Any
    found: Found
    members: list[int]


class Hub:
    """All decisions of a start and of an end. `outbox` holds (member, record) for the caller to send, in order."""

    def __init__(self, *, join_timeout_s: float, paste: str, now_s: float, hint: str = "") -> None:
        self.outbox: list[tuple[int, Record]] = []
        self.phase = Phase.GATHERING
        self.ending: Ending | None = None
        self._wanted = 0  # ranks, as the first node has it
        self.sent_away = 0  # times that somebody with another secret was; the caller counts
        self._hint = hint  # where to look if a node waits elsewhere
        self._paste, self._deadline_s, self._next_word_s = paste, now_s + join_timeout_s, now_s
        self._now_s = now_s
        self._roster = Roster()
        self._members: dict[int, _Member] = {}
        self._seats: list[Seat] = []
        self._places: list[_Place] = []
        self._presented: dict[int, Mapping[str, str]] = {}  # rank -> contract
        self._store: dict[str, str] = {}
        self._awaited: dict[str, list[tuple[int, int]]] = {}  # key -> (member, rank) that wait for it
        self._ends: list[WorkerEnd] = []
        self._silent: list[int] = []
        self._cut_short, self._has_commit = "", False
        self._lost: list[str] = []

    def handle(self, member: int, record: Record, now_s: float) -> None:
        """Take in what a member says. What no launcher would say ends the run with the record's kind in the reason."""
        self._now_s = now_s
        known = member in self._members
        kind = record.get("kind")
        if (known and self._members[member].is_gone) or (kind == "claim") == known:
            return
        try:
            handler, phases = _HANDLERS[kind]
            if self.phase in phases:
                handler(self, member, record)
        except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            if not known:  # whoever says so is none of this run, but for example another version
                text = f"the head cannot read what this node claims ({error!r}): install the same HetSeq on both"
                self._send(member, "ending", code=EXIT_DISAGREE, message=text)
                return
            self._end(Ending(EXIT_FAILED, f"{self._name(member)} sent a {kind!r} that cannot be: {error!r}"))

    def gone(self, member: int, why: str, now_s: float) -> None:
        """The channel to a member has ended; nothing for one that never claimed or has reported everything."""
        self._now_s = now_s
        if member not in self._members or self._members[member].is_gone or self.phase is Phase.OVER:
            return
        if self.phase is Phase.GATHERING:
            del self._members[member]
            self._roster.remove(member)
            self._next_word_s = now_s
            return
        self._members[member].is_gone = True
        if self._members[member].is_heard and self.phase is Phase.ENDING:
            return
        if self.phase in (Phase.REACHING, Phase.DIRECTORIES):
            self._end(Ending(EXIT_FAILED, f"{self._name(member)} left before the start ({why})"))
            return
        self._lost.append(f"the connection to {self._name(member)} was lost ({why})")
        self._begin_ending(is_polite=False)
        self._end_if_all_are_heard()

    @property
    def linger_s(self) -> float:
        """How long the hub is still wanted after the end: for nodes on their way, when the run was refused early."""
        here = sum(member.wanted for member in self._members.values())
        is_early = self.ending is not None and self.ending.code == EXIT_DISAGREE and not self._seats
        return _LINGER_S if is_early and here < self._wanted else 0.0

    def tick(self, now_s: float) -> float:
        """Do what time has made due; gives the seconds until there may be something again."""
        self._now_s = now_s
        if self.phase in _BEFORE_WORKERS and self._members and now_s >= self._next_word_s:
            self._next_word_s = now_s + TELL_EVERY_S
            self._tell_what_is_awaited()
        if now_s >= self._deadline_s:
            self._give_up()
        next_s = self._next_word_s if self.phase in _BEFORE_WORKERS else now_s + 60
        return max(0.0, min(self._deadline_s, next_s) - now_s)

    def _tell_what_is_awaited(self) -> None:
        text = self.phase.value
        if self.phase is Phase.GATHERING:
            if self._hint:
                self._send_all("tell", text=self._hint)
            self._hint = ""  # once will do
            text = self._roster.waiting(left_s=self._deadline_s - self._now_s, paste=self._paste)
        self._send_all("tell", text=text)

    # Gathering

    def _claim(self, member: int, record: Record) -> None:
        claim = Claim.from_record(record["claim"])
        # a refusal holds for who comes a moment later, be it the head's own launcher
        if self.ending is not None and not self._seats:
            self._send(member, "ending", code=self.ending.code, message=self.ending.message)
            return
        if self.phase in (Phase.ENDING, Phase.OVER):
            self._send(member, "tell", text="a run is ending there; waiting for its place")
            return
        if self.phase is not Phase.GATHERING:
            here = ", ".join(f"{seat.host} ({seat.workers})" for seat in self._seats)
            self._send(member, "ending", code=EXIT_FAILED, message=(
                f"{claim.host} came too late: the run has begun with {here}, and this version takes nobody in later."
                " Stop it and start all nodes again (it goes on from its newest checkpoint), or wait for its end"
            ))  # fmt: skip
            return
        new = _Member(
            claim.host, claim.pid, claim.wanted, str(record["address"]), int(record["door"]), dict(record["fields"]),
            str(record["build"]), str(record["save_dir"]),
        )  # fmt: skip
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
        self._enter(Phase.REACHING, _REACH_S)
        for member in self._order:
            # in both directions: which rank of a pair connects is gloo's choice
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
        self._enter(Phase.DIRECTORIES, _DIRECTORY_S)
        for member in self._members.values():
            member.is_heard = True  # nobody owes an answer before he is asked
        self._settle_next_directory()

    def _settle_next_directory(self) -> None:
        """The first node without a directory prepares its own, and those who could share it look for it there."""
        self._deadline_s = self._now_s + _DIRECTORY_S
        homeless = [member for member in self._order if self._members[member].place is None]
        if homeless:
            self._members[homeless[0]].is_heard = False
            self._send(homeless[0], "own")
        else:
            self._begin_starting()

    def _owned(self, member: int, record: Record) -> None:
        found = Found(
            self._members[member].host, str(record["path"]), str(record["run_id"]), record["newest"]
        )  # fmt: skip
        place = _Place(str(record["path"]), record["mark"], found, [member])
        self._members[member].place = place
        self._members[member].is_heard = True
        self._places.append(place)
        lookers = [other for other in self._order if self._may_look(other, place)]
        for other in lookers:
            self._members[other].is_heard = False
            self._send(other, "see", mark=place.mark)
        if not lookers:
            self._settle_next_directory()

    def _may_look(self, member: int, place: _Place) -> bool:
        """The run directory is looked for by all; one of a group, by those whose own has the same path."""
        looker = self._members[member]
        return looker.place is None and (place is self._places[0] or looker.save_dir == place.path)

    def _seen(self, member: int, record: Record) -> None:
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
        # alone a node needs no limit: its launcher sees a worker that dies
        self._enter(Phase.STARTING, _LOAD_S if len(self._seats) > 1 else float("inf"))
        parts = [[rank for member in place.members for rank in self._ranks(member)] for place in self._places]
        nodes = [self._members[seat.member].host for seat in self._seats for _ in seat.ranks]
        name = secrets.token_hex(8)
        for seat in self._seats:
            place = self._members[seat.member].place
            assert place is not None
            self._send(
                seat.member, "begin", name=name, first_rank=seat.first_rank, nodes=nodes,
                parts=[sorted(part) for part in parts], path=place.path, run_id=run_id,
            )  # fmt: skip

    def _present(self, member: int, record: Record) -> None:
        rank = self._own_rank(member, record)
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
        if self.phase is Phase.STARTING and self._all_are_heard():
            self._enter(Phase.RUNNING, float("inf"))
            self._send_all("begun")

    # Ending

    def _worker_end(self, member: int, record: Record) -> None:
        end = WorkerEnd(**record["end"])
        self._own_rank(member, {"rank": end.rank})
        self._ends.append(end)
        if end.code != EXIT_DONE:
            self._begin_ending(is_polite=end.code == EXIT_STOPPED and not end.is_secondary)

    def _over(self, member: int, record: Record) -> None:
        self._begin_ending(is_polite=not record["cut_short"])
        self._members[member].is_heard = True
        self._silent.extend(int(rank) for rank in record["silent"])
        self._has_commit = self._has_commit or bool(record["has_commit"])
        if record["cut_short"] and not self._cut_short:
            where = f"{self._name(member)}: " if len(self._seats) > 1 else ""
            self._cut_short = where + str(record["cut_short"])
        self._end_if_all_are_heard()

    def _refused(self, member: int, record: Record) -> None:
        """A member cannot take part, for a reason that it has found by itself."""
        where = f"{self._name(member)}: " if len(self._members) > 1 else ""
        if self.phase is Phase.GATHERING:
            self.gone(member, "it left", self._now_s)
        else:
            self._end(Ending(int(record["code"]), where + str(record["message"])))

    def _begin_ending(self, *, is_polite: bool) -> None:
        """Tell all that somebody has ended: `is_polite` if the others may finish what they do in peace."""
        if self.phase in (Phase.ENDING, Phase.OVER):
            return
        self._enter(Phase.ENDING, _END_S if is_polite else _CUT_S)
        self._send_all("ebb", is_polite=is_polite)

    def _end_if_all_are_heard(self) -> None:
        if self.phase is Phase.ENDING and self._all_are_heard():
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
        if self.phase is Phase.STARTING:
            absent = [member for member in self._order if not set(self._ranks(member)) <= set(self._presented)]
            silent = [self._name(member) for member in absent] or silent
        if self.phase is Phase.GATHERING:
            text = "the other nodes did not come in time: " + self._roster.waiting(left_s=0.0, paste=self._paste)
            if self.sent_away:
                text += f"; {self.sent_away} times a node with another secret was sent away"
            # numbers that fit nobody, or a node that could not prove itself: it is not that nobody came
            is_disagreement = self._roster.has_hole or self.sent_away
            self._end(Ending(EXIT_DISAGREE if is_disagreement else EXIT_FAILED, text))
        elif self.phase is Phase.ENDING:
            self._lost.extend(f"{name} did not say how it ended" for name in silent)
            self._judge()
        elif self.phase is not Phase.OVER:
            who = ", ".join(silent) or "nobody"
            text = f"{who} did not answer in time while {self.phase.value}: is a machine stopped, or a disk stuck?"
            self._end(Ending(EXIT_FAILED, text))

    def _end(self, ending: Ending) -> None:
        self.phase, self.ending, self._deadline_s = Phase.OVER, ending, float("inf")
        self._send_all("ending", code=ending.code, message=ending.message)

    # What all of them need

    @property
    def _order(self) -> list[int]:
        """The members in the order of their ranks."""
        return [seat.member for seat in self._seats] if self._seats else list(self._members)

    @property
    def _hosts(self) -> dict[int, str]:
        return {rank: seat.host for seat in self._seats for rank in seat.ranks}

    def _ranks(self, member: int) -> range:
        return next(seat.ranks for seat in self._seats if seat.member == member)

    def _own_rank(self, member: int, record: Record) -> int:
        rank = int(record["rank"])
        if rank not in self._ranks(member):
            raise ValueError(f"rank {rank} is not its own")
        return rank

    def _name(self, member: int) -> str:
        """`labA`, with what tells it from another launcher of that host."""
        if member not in self._members:
            return f"member {member}"
        host = self._members[member].host
        twins = [other for other in self._members.values() if other.host == host]
        if len(twins) == 1:
            return host
        return f"{host} ({_span(self._ranks(member)) if self._seats else f'pid {self._members[member].pid}'})"

    def _is_excused(self, member: int) -> bool:
        return self._members[member].is_heard or self._members[member].is_gone

    def _all_are_heard(self) -> bool:
        return all(self._is_excused(member) for member in self._members)

    def _enter(self, phase: Phase, patience_s: float) -> None:
        self.phase, self._deadline_s = phase, self._now_s + patience_s
        self._next_word_s = self._now_s + TELL_EVERY_S
        for member in self._members.values():
            member.is_heard = False

    def _send(self, member: int, kind: str, **facts: Any) -> None:
        self.outbox.append((member, {"kind": kind, **facts}))

    def _send_all(self, kind: str, **facts: Any) -> None:
        for member in self._order:
            if not self._members[member].is_gone:
                self._send(member, kind, **facts)


_BEFORE = (Phase.GATHERING, Phase.REACHING, Phase.DIRECTORIES, Phase.STARTING)
_AT_WORK = (Phase.STARTING, Phase.RUNNING)
#: how a record of each kind is taken in, and in which phases; in others it comes too late to matter
_HANDLERS: dict[Any, tuple[Callable[[Hub, int, Record], None], tuple[Phase, ...]]] = {
    "claim": (Hub._claim, tuple(Phase)),
    "refused": (Hub._refused, _BEFORE),
    "reached": (Hub._reached, (Phase.REACHING,)),
    "owned": (Hub._owned, (Phase.DIRECTORIES,)),
    "seen": (Hub._seen, (Phase.DIRECTORIES,)),
    "present": (Hub._present, (Phase.STARTING,)),
    "set": (Hub._set, _AT_WORK),
    "get": (Hub._get, _AT_WORK),
    "ready": (Hub._ready, (Phase.STARTING,)),
    "end": (Hub._worker_end, (*_AT_WORK, Phase.ENDING)),
    "over": (Hub._over, (*_AT_WORK, Phase.ENDING)),
}


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
