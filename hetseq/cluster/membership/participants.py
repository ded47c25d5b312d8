"""Participants of a run: the members, their names, and the messages to them, for all phases of the coordinator.

Pure, as the base class of the coordinator. Makes no decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetseq.cluster.membership.admission import Seat
from hetseq.cluster.membership.run_directory_discovery import FoundDirectories

Record = dict[str, Any]

TELL_EVERY_S = 10.0


class StartPhase(enum.Enum):
    """Phase that all members are in together."""

    GATHERING = "waiting for the nodes"
    REACHING = "trying the connections between the nodes"
    DIRECTORIES = "looking for the run directory"
    STARTING = "loading the data"
    RUNNING = "training"
    ENDING = "ending"
    OVER = "over"


@dataclass
class Participant:
    """One launcher, and what it has reported."""

    host: str
    pid: int
    wanted: int  # how many of its workers the run waits for
    address: str  # of its interface
    door: int  # port on which its peers probe it
    fields: Mapping[str, str]
    build: str
    save_dir: str
    place: ParticipantPlace | None = None  # the run directory it uses
    is_heard: bool = False  # it has answered in this phase
    is_gone: bool = False


@dataclass
class ParticipantPlace:
    """A run directory and the members that use it; the first member made it and owns it."""

    path: str
    mark: Any
    found: FoundDirectories
    members: list[int]


class Assembly:
    """The members of a run, their phase and its deadline; `outbox` holds (member, record) for the caller to send."""

    def __init__(self, *, now_s: float, patience_s: float) -> None:
        self.outbox: list[tuple[int, Record]] = []
        self.phase = StartPhase.GATHERING
        self._now_s = self._next_word_s = now_s
        self._deadline_s = now_s + patience_s
        self._members: dict[int, Participant] = {}
        self._seats: list[Seat] = []

    @property
    def _order(self) -> list[int]:
        """The members in rank order; unseated ones last."""
        seated = [seat.member for seat in self._seats]
        return seated + [member for member in self._members if member not in seated]

    @property
    def _hosts(self) -> dict[int, str]:
        return {rank: seat.host for seat in self._seats for rank in seat.ranks}

    def _ranks_at(self, place: ParticipantPlace) -> list[int]:
        return [rank for member in place.members for rank in self._ranks(member)]

    def _ranks(self, member: int) -> range:
        """The ranks of a member; none if another member has taken its place."""
        return next((seat.ranks for seat in self._seats if seat.member == member), range(0))

    def _own_rank(self, member: int, record: Record) -> int:
        rank = int(record["rank"])
        if rank not in self._ranks(member):
            raise ValueError(f"rank {rank} is not its own")
        return rank

    def _name(self, member: int) -> str:
        """`labA`, with its ranks or pid if the host has another launcher."""
        if member not in self._members:
            return f"member {member}"
        host = self._members[member].host
        twins = [other for other in self._members.values() if other.host == host]
        if len(twins) == 1:
            return host
        ranks = self._ranks(member)
        return f"{host} ({_span(ranks) if ranks else f'pid {self._members[member].pid}'})"

    def _is_excused(self, member: int) -> bool:
        return self._members[member].is_heard or self._members[member].is_gone

    def _all_are_heard(self) -> bool:
        return all(self._is_excused(member) for member in self._members)

    def _enter(self, phase: StartPhase, patience_s: float) -> None:
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


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
