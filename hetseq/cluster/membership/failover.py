"""What is left of a run on one node when the node with the hub is gone: a hub of its own, for its own ranks.

Pure. The new hub is an ordinary one, in the middle of a run. Where the nodes meet in a directory, the directory elects
its launcher among all that are left, and it goes on; the others come to it late, as anybody would. Over TCP alone
nobody can know whether the hub's side still trains, and two sides that both go on would be two runs of one name: so
each side makes the step that is under way, saves, and stops (exit code 75), for to its hub too few ranks are left.
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
    """The workers of a node as their launcher knows them, and the run."""

    host: str
    pid: int
    address: str  # of its interface
    fields: Mapping[str, str]  # what all nodes have to have in common
    starts: Mapping[int, int]  # by slot: how often it was started before
    started: Mapping[int, int]  # the same of all slots of the run, as the newest generation began
    presented: Mapping[int, Mapping[str, str]]  # by slot: what it trains
    parts: Collection[str]  # of the training data, that the run has begun with
    path: str  # of the run directory
    run_id: str
    name: str  # of the run's groups


def orphaned_hub(
    orphans: Orphans, newest: Record, *, now_s: float, mark: Mark | None = None, min_ranks: int = 1, wait_s: float = 0.0
) -> Coordinator:
    """A hub in the middle of a run whose newest generation was `newest`: only these workers are left of it.

    With a `mark` in the run directory others may come, and the run goes on; without one it saves and stops.
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
    sites = {slot_of(name): site for name in newest.roster} | dict.fromkeys(slots, site)
    crews = Crews.amid(
        newest, sites, orphans.presented, {**orphans.started, **orphans.starts}, min_ranks=enough, wait_s=wait_s,
        parts=orphans.parts,
    )  # fmt: skip
    hub.go_on(member, seat, place, crews, name=orphans.name, run_id=orphans.run_id, now_s=now_s)
    crews.bereave(slots, "the node that the others call is gone", now_s)
    return hub
