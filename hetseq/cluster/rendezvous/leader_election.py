"""Leader election: the record that the head of an attempt publishes, and how a newcomer reacts to it.

Only decides: no files, no clock, no network. `file_rendezvous` looks, asks `decide`, and acts.

The one idea: attempts are numbered, the newest number counts, and each number has one winner. So a newcomer only has to
decide whether the head of the newest attempt is alive. On the same machine it checks the process. From another machine
the only signs of life are an answer at the head's port and a heartbeat counter that the head increments every second.
If a newcomer sees the counter unchanged for `SILENCE_S`, by its own clock, the head is dead. Clocks of different
machines are never compared.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, replace

from hetseq.cluster.rendezvous.process_identity import Process

SILENCE_S = 15.0
BEAT_S = 1.0
#: how long a head may remove its files after its last record; the rest of SILENCE_S is a margin for slow machines
LEASE_S = 10.0
#: how much longer than a launcher of the run a newcomer waits before it replaces a dead head: if it were the first, its
#: coordinator would know of no state, and the ranks that hold one would go back to a checkpoint
HEAD_START_S = 2.0
NOTHING, UNKNOWN = "", "?"


class Kind(enum.Enum):
    """State of the newest number of a chain."""

    NONE = "none"  # there is no attempt
    EMPTY = "empty"  # taken but not filled, or void: its writer is between two steps, or died there
    HEAD = "head"  # a running attempt
    ENDED = "ended"  # the last record of a head: its files are being removed


class Action(enum.Enum):
    """Next action of a newcomer."""

    LEAD = "lead"
    FOLLOW = "follow"
    CLAIM = "claim"  # try to become head with the next number
    WAIT = "wait"  # then look again


@dataclass(frozen=True)
class LeaderRecord:
    """The signed, immutable announcement of the head of an attempt.

    `after` is the nonce of the attempt that it replaces, `NOTHING` if there was none, `UNKNOWN` if its number was
    taken but empty. A record above any other attempt is void: its writer judged an attempt that was being removed at
    that moment, and will withdraw its number.
    """

    kind: Kind
    nonce: str
    host: str
    address: str
    port: int
    process: Process
    after: str = NOTHING

    def stands_on(self, before: LeaderRecord | None) -> bool:
        """Whether this attempt replaces `before`, the attempt below it."""
        return self.after in (UNKNOWN, NOTHING if before is None else before.nonce)

    def encode(self) -> bytes:
        """JSON for the shared directory."""
        return json.dumps({"record": 1, **asdict(self), "kind": self.kind.value}).encode()

    @staticmethod
    def decode(content: bytes) -> LeaderRecord:
        """The record in a value with a valid signature. Raises ValueError if another version of HetSeq wrote it."""
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
    """Observation of a chain. `life` is None if the process is not visible from this machine."""

    kind: Kind = Kind.NONE
    number: int = 0
    nonce: str = ""
    is_mine: bool = False
    life: bool | None = None
    pulse: int | None = None
    has_answered: bool = False


@dataclass(frozen=True)
class Watch:
    """Memory of a newcomer: since when, by its own clock, it has seen the same number without a sign of life."""

    kind: Kind = Kind.NONE
    number: int = 0
    nonce: str = ""
    pulse: int | None = None
    since_s: float = 0.0

    def is_of(self, sight: Sight) -> bool:
        """Whether this memory belongs to the attempt that `sight` shows."""
        return (self.kind, self.number, self.nonce) == (sight.kind, sight.number, sight.nonce)


class Standing(enum.Enum):
    """How sure a head can be that no other launcher leads."""

    SURE = "sure"
    UNSURE = "unsure"  # other launchers may see its counter unchanged
    OVERDUE = "overdue"  # other launchers will soon consider it dead
    REPLACED = "replaced"


def standing_of(silence_s: float, *, is_superseded: bool) -> Standing:
    """The standing of a head that last raised its counter `silence_s` ago; other launchers wait for SILENCE_S."""
    if is_superseded:
        return Standing.REPLACED
    if silence_s > LEASE_S:
        return Standing.OVERDUE
    return Standing.UNSURE if silence_s > 3 * BEAT_S else Standing.SURE


def decide(watch: Watch, sight: Sight, now_s: float, *, head_start_s: float = 0.0) -> tuple[Watch, Action]:
    """The next action and memory, from the previous memory and the current sight. Pure; `now_s` is monotonic.

    A dead head is replaced `head_start_s` later than it could be.
    """
    if not watch.is_of(sight):
        watch = Watch(sight.kind, sight.number, sight.nonce, sight.pulse, now_s)
    if watch.pulse is None:
        # Not a sign of life: the counter of a dead head may have become visible late.
        watch = replace(watch, pulse=sight.pulse)
    is_beating = sight.pulse is not None and sight.pulse != watch.pulse
    wait_s = head_start_s if sight.kind is Kind.HEAD else 0.0
    is_silent = now_s - watch.since_s >= SILENCE_S + wait_s

    if sight.kind is Kind.NONE:
        return watch, Action.CLAIM
    if sight.kind is Kind.HEAD and sight.is_mine:
        return watch, Action.LEAD
    if sight.life is False:
        return watch, Action.CLAIM if now_s - watch.since_s >= wait_s else Action.WAIT
    if sight.kind is Kind.HEAD and (sight.life or sight.has_answered or is_beating):
        return watch, Action.FOLLOW
    return watch, Action.CLAIM if is_silent else Action.WAIT
