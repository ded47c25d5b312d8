"""Admission roster: which launcher brings which ranks, and whether their claims together fill the world.

Admits claims one by one, reports which ranks are still missing, and refuses at once a claim that no later node can
correct: a rank claimed twice, two world sizes, fixed ranks mixed with --join. No clock, network or files: the head
calls it and acts on the answers.

The one idea: a gap between claimed ranks is no error yet, because a later node may fill it. A rank claimed twice stays
claimed twice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetseq.config.sections import DistributedConfig

_LONGEST_HOST = 255
_MOST = 2**20  # ranks; a larger claim is nonsense, and enumerating its ranks would take too long


@dataclass(frozen=True)
class Claim:
    """What one launcher brings to the run: `rank` and `world_size` with fixed ranks, `min_ranks` with --join.

    `max_ranks` (None: no limit) applies to --join only. The compatibility check ensures that all nodes agree. A shadow
    brings a worker that follows the run and is none of its ranks.
    """

    host: str
    pid: int
    workers: int
    rank: int | None = None
    world_size: int | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    is_shadow: bool = False

    def __post_init__(self) -> None:
        if type(self.host) is not str or not self.host.isprintable() or not 0 < len(self.host) <= _LONGEST_HOST:
            raise ValueError(f"no claim: {self.host!r} is no host name")
        _require_number("pid", self.pid, 1, 2**31)
        _require_number("workers", self.workers, 1, _MOST)
        if self.is_shadow not in (True, False) or (self.is_shadow and (self.workers != 1 or self.min_ranks is None)):
            raise ValueError("no claim: a shadow has one worker and comes with --join")
        if self.min_ranks is not None:
            _require_number("min_ranks", self.min_ranks, 1, _MOST)
            if self.rank is not None or self.world_size is not None:
                raise ValueError("no claim: both given ranks and min_ranks")
            if self.max_ranks is not None:
                _require_number("max_ranks", self.max_ranks, 1, _MOST)
        else:
            if self.max_ranks is not None:
                raise ValueError("no claim: max_ranks without min_ranks")
            _require_number("rank", self.rank, 0, _MOST)
            _require_number("world_size", self.world_size, 1, _MOST)

    def to_record(self) -> dict[str, Any]:
        """The claim as a JSON object."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: object) -> Claim:
        """The claim in a record from a peer. Raises ValueError if it is not a valid one."""
        names = {"host", "pid", "workers", "rank", "world_size", "min_ranks", "max_ranks", "is_shadow"}
        if not isinstance(record, Mapping) or set(record) != names:
            raise ValueError(f"no claim: {str(record)[:200]}")
        return cls(**record)

    @property
    def name(self) -> str:
        """`labA pid 4242`, for messages."""
        return f"{self.host} pid {self.pid}"

    @property
    def ranks(self) -> range:
        """The ranks assigned to this node by its options; empty with --join."""
        return range(0) if self.rank is None else range(self.rank, self.rank + self.workers)

    def too_many(self, here: int) -> str | None:
        """Why this node cannot join a run that has `here` ranks, or None if it can."""
        if self.max_ranks is None or here + self.workers <= self.max_ranks:
            return None
        return (
            f"{self.name} would make it {here + self.workers} ranks, and --max-ranks is {self.max_ranks}: let it bring"
            " fewer workers (--ranks), come when others have left, or raise --max-ranks on all nodes"
        )

    @property
    def wanted(self) -> int:
        """How many of its workers the run can wait for; 0 if the node's ranks exceed the world size."""
        return self.workers if self.world_size is None or self.ranks.stop <= self.world_size else 0


@dataclass(frozen=True)
class Seat:
    """The ranks of one member in a complete roster."""

    member: int
    host: str
    pid: int
    first_rank: int
    workers: int

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.first_rank, self.first_rank + self.workers)


class Roster:
    """The members admitted so far; member 0 is the head's own launcher."""

    def __init__(self) -> None:
        self._claims: dict[int, Claim] = {}  # member -> claim, in order of admission

    def admit(self, member: int, claim: Claim) -> str | None:
        """Admit a member. Returns None, or why it cannot take part, naming both hosts and a remedy.

        A refused claim leaves the roster unchanged. A claim that arrives after the roster is complete is refused too,
        and the other members continue without it.
        """
        if member in self._claims:
            return f"{claim.name} claimed its ranks a second time"
        reason = self._why_not(claim)
        if reason is None:
            self._claims[member] = claim
        return reason

    def remove(self, member: int) -> None:
        """Remove a member that left before the start; does nothing if it was never admitted."""
        self._claims.pop(member, None)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks are claimed; with --join, whether at least `min_ranks` are here, including the head's."""
        first = self._first
        if first is None:
            return False
        if first.min_ranks is not None:
            return 0 in self._claims and self._here >= first.min_ranks
        return not self._missing(first)

    @property
    def world_size(self) -> int | None:
        """Ranks of the run; None with --join until the roster is complete."""
        first = self._first
        if first is None or first.min_ranks is None:
            return None if first is None else first.world_size
        return self._here if self.is_complete else None

    def seats(self) -> list[Seat]:
        """Seats of a complete roster, by first rank. With --join the head is first, then in order of admission."""
        if not self.is_complete:
            raise RuntimeError("the roster is not complete, so it has no seats yet")
        members = sorted(self._claims, key=lambda member: member != 0)  # stable: keeps the others in admission order
        begins = itertools.accumulate((self._claims[member].workers for member in members), initial=0)
        seats = []
        for member, begin in zip(members, begins, strict=False):  # begins has one extra entry, after the last member
            claim = self._claims[member]
            first_rank = begin if claim.rank is None else claim.rank
            seats.append(Seat(member, claim.host, claim.pid, first_rank, claim.workers))
        return sorted(seats, key=lambda seat: seat.first_rank)

    def waiting(self, *, left_s: float, paste: str) -> str:
        """One line: the ranks that are here, the missing ones, the time left, and the command for the other nodes."""
        first = self._first

        def ending(command: str) -> str:
            return f"; deadline in {clock(left_s)}" + (f"; paste there: {command}" if command else "")

        deadline = ending(paste)
        if first is None:
            return "waiting for the first node" + deadline
        here = ", ".join(f"{claim.host} ({claim.workers})" for claim in self._claims.values())
        if first.min_ranks is not None:
            wanted = first.min_ranks
            missing = max(0, wanted - self._here)
            lack = f"{missing} missing" if missing else "the head's own ranks are missing"
        else:
            wanted, absent = first.world_size or 0, self._missing(first)
            lack = _by_nobody(absent)
            deadline = ending(command_of_rank(paste, absent[0]) if absent else paste)
        return f"waiting: {self._here} of {wanted} ranks are here: {here}; {lack}" + deadline

    @property
    def has_hole(self) -> bool:
        """Whether an unclaimed rank lies below a claimed one."""
        first = self._first
        if first is None or first.min_ranks is not None:
            return False
        missing = self._missing(first)
        return bool(missing) and missing[0] < max(claim.ranks[-1] for claim in self._claims.values())

    @property
    def _first(self) -> Claim | None:
        return next(iter(self._claims.values()), None)

    @property
    def _here(self) -> int:
        return sum(claim.workers for claim in self._claims.values())

    def _missing(self, first: Claim, *others: Claim) -> list[int]:
        taken = set(itertools.chain(*(claim.ranks for claim in (*self._claims.values(), *others))))
        return [rank for rank in range(first.world_size or 0) if rank not in taken]

    def _why_not(self, claim: Claim) -> str | None:
        first = self._first
        if first is not None:
            reason = _difference(first, claim)
            if reason is not None:
                return reason
        if claim.min_ranks is not None:
            return self._too_late(claim) if self.is_complete else claim.too_many(self._here)
        world_size = claim.world_size or 0
        if claim.ranks[-1] >= world_size:
            return f"{claim.name} claims {_ranks(claim.ranks)}, and {_beyond(world_size)}"
        for other in self._claims.values():
            twice = sorted(set(other.ranks) & set(claim.ranks))
            if twice:
                missing = self._missing(claim, claim)
                lack = f"; {_by_nobody(missing)}" if missing else ""
                verb = "is" if len(twice) == 1 else "are"
                return (
                    f"{_ranks(twice)} {verb} claimed twice ({other.name}, {claim.name}){lack}; use --join, which"
                    " assigns ranks itself, or change --distributed-rank on one of them, or, if these are two runs,"
                    " give each its own meeting place [rank-claimed-twice]"
                )
        return None

    def _too_late(self, claim: Claim) -> str:
        here = ", ".join(other.host for other in self._claims.values())
        return (
            f"{claim.name} came too late: the run has its {self._here} ranks ({here}). Start it before the others next"
            " time, or raise --min-ranks on all nodes"
        )


def command_of_rank(command: str, rank: int) -> str:
    """The command line with another `--distributed-rank`; unchanged with --join, where all nodes type the same."""
    if re.search(r"--join[= ]", command):
        return command
    changed, count = re.subn(r"(--distributed[-_]rank[= ]\s*)\d+", rf"\g<1>{rank}", command)
    return changed if count or not command else f"{command} --distributed-rank {rank}"


def why_ranks_do_not_fit(config: DistributedConfig, workers: int) -> str | None:
    """Why the ranks of this node's `workers` do not fit its configured world size, or None if they do."""
    world_size, first = config.distributed_world_size, config.distributed_rank
    if config.meeting_url is None or config.join is not None or world_size is None or first + workers <= world_size:
        return None
    return (
        f"--distributed-rank {first} and {workers} worker{'s' * (workers != 1)} on this node mean"
        f" {_ranks(range(first, first + workers))}, and {_beyond(world_size)}"
    )


def _difference(first: Claim, claim: Claim) -> str | None:
    """What two nodes were configured with differently."""
    if (first.min_ranks is None) != (claim.min_ranks is None):
        joins, given = (claim, first) if first.min_ranks is None else (first, claim)
        return (
            f"{joins.name} came with --join and {given.name} with ranks of its own (--distributed-rank"
            f" {given.rank} --distributed-world-size {given.world_size}): use one way on all nodes"
        )
    if first.min_ranks != claim.min_ranks:
        return (
            f"{first.name} was told --min-ranks {first.min_ranks}, {claim.name} {claim.min_ranks}: give all nodes the"
            " same number"
        )
    if first.world_size != claim.world_size:
        return (
            f"{first.name} was told world size {first.world_size}, {claim.name} {claim.world_size}: give all nodes the"
            " same --distributed-world-size [world-size-differs]"
        )
    return None


def _beyond(world_size: int) -> str:
    return (
        f"{world_size} ranks are 0 to {world_size - 1}: --distributed-rank is the first rank of a node and"
        " --distributed-world-size counts the workers of all nodes; correct one of them [rank-outside-world]"
    )


def _by_nobody(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} not claimed yet"


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 6-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {words}" if len(runs) == 1 and len(runs[0]) == 1 else f"ranks {words}"


def clock(left_s: float) -> str:
    """`09:50`, `1:00:00`."""
    minutes, seconds = divmod(max(0, round(left_s)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"


def _require_number(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"no claim: {name} {value!r}, expected a number from {least} to {most}")
