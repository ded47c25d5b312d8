"""Coordinator failover: a new coordinator for the ranks of one node, after the node with the old one is lost.

Pure. The new coordinator is an ordinary one that starts in the middle of a run. If the nodes meet in a directory, the
directory elects one of the remaining launchers, which continues the run; the others rejoin it as late nodes. Over TCP
alone a node cannot know whether the old coordinator's side still trains, and two sides that continue would be two runs
with one name. So each side finishes the current step, saves and stops (exit code 75): its own coordinator demands more
ranks than it can ever have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hetseq.cluster.membership.admission import Seat
from hetseq.cluster.membership.coordinator import Coordinator
from hetseq.cluster.membership.decide import Record
from hetseq.cluster.membership.participants import Participant, ParticipantPlace
from hetseq.cluster.membership.run_directory_discovery import FoundDirectories, Mark
from hetseq.cluster.membership.worker_roster import Crews, Site, slot_of

_NEVER_ENOUGH = 2**31  # ranks


@dataclass(frozen=True)
class Orphans:
    """The workers of a node that lost its coordinator, as their launcher knows them, and the run."""

    host: str
    pid: int
    address: str  # of its interface
    fields: Mapping[str, str]  # of the compatibility check
    starts: Mapping[int, int]  # by slot: the number of earlier starts
    started: Mapping[int, int]  # the same for all slots of the run, when the newest generation began
    presented: Mapping[int, Mapping[str, str]]  # by slot: the fields it presented at its start
    parts: Collection[str]  # of the training data, at the start of the run
    path: str  # of the run directory
    run_id: str
    name: str  # of the run's process groups


def orphaned_hub(
    orphans: Orphans, newest: Record, *, now_s: float, mark: Mark | None = None, min_ranks: int = 1, wait_s: float = 0.0
) -> Coordinator:
    """A coordinator for a run whose newest generation was `newest` and of which only these workers are left.

    With a `mark` in the run directory other nodes can join, and the run continues; without one it saves and stops.
    """
    enough, wait_s = (min_ranks, wait_s) if mark is not None else (_NEVER_ENOUGH, 0.0)
    hub = Coordinator(join_timeout_s=wait_s, paste="", now_s=now_s, min_ranks=enough)
    slots = sorted(orphans.starts)
    seat = Seat(0, orphans.host, orphans.pid, slots[0], len(slots))
    place = ParticipantPlace(
        orphans.path, None, FoundDirectories(orphans.host, orphans.path, orphans.run_id, None), [0]
    )
    if mark is not None:
        place.mark = vars(mark)
    member = Participant(
        orphans.host, orphans.pid, len(slots), orphans.address, 0, orphans.fields, "", orphans.path, place
    )  # fmt: skip
    site = Site(orphans.host, 0, 0, orphans.address)
    sites = {slot_of(name): site for name in (*newest.roster, *newest.shadows)} | dict.fromkeys(slots, site)
    crews = Crews.amid(
        newest, sites, orphans.presented, {**orphans.started, **orphans.starts}, min_ranks=enough, wait_s=wait_s,
        parts=orphans.parts,
    )  # fmt: skip
    hub.go_on(member, seat, place, crews, name=orphans.name, run_id=orphans.run_id, now_s=now_s)
    crews.bereave(slots, "the head node is gone", now_s)
    return hub
