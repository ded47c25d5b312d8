"""Which launcher leads: the record that the head of an attempt leaves, and what a newcomer does when it sees one.

Responsible for the decision alone: no files, no clock, no network. `file_rendezvous` looks, asks `decide`, and acts.

The one idea: attempts are numbered, the newest number counts, and a number has one winner. So a newcomer only has to
decide whether the newest attempt lives. On the same machine the process tells. From another machine the only signs are
an answer at the head's port and a counter that the head raises every second: a counter that a newcomer itself saw
standing still for `SILENCE_S`, by its own clock, is that of a dead head. No two machines' clocks are ever compared.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, replace

from hetseq.cluster.rendezvous.process_identity import Process

SILENCE_S = 15.0
BEAT_S = 1.0
#: for so long after its last word a head may remove its files; the rest of SILENCE_S is for a machine that is slow
LEASE_S = 10.0
NOTHING, UNKNOWN = "", "?"


class Kind(enum.Enum):
    """What the newest number of a chain is."""

    NONE = "none"  # there is no attempt
    EMPTY = "empty"  # taken, not filled, or void: its writer is between two steps, or died there
    HEAD = "head"  # a running attempt
    ENDED = "ended"  # the last word of a head: its files are being removed


class Action(enum.Enum):
    """What a newcomer does next."""

    LEAD = "lead"
    FOLLOW = "follow"
    CLAIM = "claim"  # try to become head with the next number
    WAIT = "wait"  # and look again


@dataclass(frozen=True)
class LeaderRecord:
    """What the head of an attempt tells all others, signed and never changed.

    `after` is the nonce of the attempt that it replaces, `NOTHING` if there was none and `UNKNOWN` if its number was
    taken and empty. A record above another one than that is void: its writer has judged an attempt that was cleared
    away in that moment, and will take its number back.
    """

    kind: Kind
    nonce: str
    host: str
    address: str
    port: int
    process: Process
    after: str = NOTHING

    def stands_on(self, before: LeaderRecord | None) -> bool:
        """Whether the attempt below is the one that this one replaces."""
        return self.after in (UNKNOWN, NOTHING if before is None else before.nonce)

    def encode(self) -> bytes:
        """JSON for the shared directory."""
        return json.dumps({"record": 1, **asdict(self), "kind": self.kind.value}).encode()

    @staticmethod
    def decode(content: bytes) -> LeaderRecord:
        """The record in a value whose signature was right; ValueError if another version of HetSeq wrote it."""
        try:
            row = json.loads(content)
            process = row["process"]
            record = LeaderRecord(
                kind=Kind(row["kind"]),
                nonce=row["nonce"],
                host=row["host"],
                address=row["address"],
                port=row["port"],
                process=Process(process["machine"], process["pid"], process["start"]),
                after=row["after"],
            )
            version = row["record"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"no record: {error}") from None
        texts = (record.nonce, record.host, record.address, record.process.machine, record.after)
        numbers = (record.port, record.process.pid, record.process.start)
        if version != 1:
            raise ValueError(f"record {version!r}, expected 1")
        if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
            raise ValueError("no record: a field is of another type")
        return record


@dataclass(frozen=True)
class Sight:
    """What one look at a chain shows. `life` is None where the process cannot be seen from here."""

    kind: Kind = Kind.NONE
    number: int = 0
    nonce: str = ""
    is_mine: bool = False
    life: bool | None = None
    pulse: int | None = None
    has_answered: bool = False


@dataclass(frozen=True)
class Watch:
    """What a newcomer remembers: since when, by its own clock, it has seen the same number standing still."""

    kind: Kind = Kind.NONE
    number: int = 0
    nonce: str = ""
    pulse: int | None = None
    since_s: float = 0.0

    def is_of(self, sight: Sight) -> bool:
        """Whether this is the memory of what is seen now."""
        return (self.kind, self.number, self.nonce) == (sight.kind, sight.number, sight.nonce)


class Standing(enum.Enum):
    """How sure a head can be that nobody else leads."""

    SURE = "sure"
    UNSURE = "unsure"  # its counter may be standing still, for those who look
    OVERDUE = "overdue"  # they will soon take it for dead
    REPLACED = "replaced"


def standing_of(silence_s: float, *, is_superseded: bool) -> Standing:
    """Of a head that could raise its counter so long ago for the last time; who looks waits longer, for SILENCE_S."""
    if is_superseded:
        return Standing.REPLACED
    if silence_s > LEASE_S:
        return Standing.OVERDUE
    return Standing.UNSURE if silence_s > 3 * BEAT_S else Standing.SURE


def decide(watch: Watch, sight: Sight, now_s: float) -> tuple[Watch, Action]:
    """From what was seen before and what is seen now to the next step; pure, `now_s` is one's own monotonic clock."""
    if not watch.is_of(sight):
        watch = Watch(sight.kind, sight.number, sight.nonce, sight.pulse, now_s)
    if watch.pulse is None:
        # No sign of life: a listing may have shown late what a dead head had written.
        watch = replace(watch, pulse=sight.pulse)
    is_beating = sight.pulse is not None and sight.pulse != watch.pulse
    is_silent = now_s - watch.since_s >= SILENCE_S

    if sight.kind is Kind.NONE:
        return watch, Action.CLAIM
    if sight.kind is Kind.HEAD and sight.is_mine:
        return watch, Action.LEAD
    if sight.life is False:
        return watch, Action.CLAIM
    if sight.kind is Kind.HEAD and (sight.life or sight.has_answered or is_beating):
        return watch, Action.FOLLOW
    return watch, Action.CLAIM if is_silent else Action.WAIT
