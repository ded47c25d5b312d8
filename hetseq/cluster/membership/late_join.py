"""Late join: nodes that arrive after the run has begun, either back after a loss or for the first time.

Pure, part of the coordinator. A late node passes the same checks that the others passed together: its claim, the
compatibility check, the run directory. It then starts its workers as replacements, and `worker_roster` admits them like
any other newcomers.

The one idea: a slot is empty when no worker trains in it or is on the way to it. With fixed ranks, a node gets the
slots it claims if they are empty; with --join, the first contiguous empty slots, or else new ones.
"""

from __future__ import annotations

from hetseq.cluster.membership.admission import Claim, Seat
from hetseq.cluster.membership.compatibility import difference
from hetseq.cluster.membership.participants import Assembly, Participant, ParticipantPlace, Record, StartPhase
from hetseq.cluster.membership.run_directory_discovery import FoundDirectories, choose_run_id
from hetseq.cluster.membership.step_commit import MOST_SHADOWS
from hetseq.cluster.membership.worker_roster import Crews, Site
from hetseq.cluster.rendezvous.leader_election import Standing
from hetseq.errors import EXIT_DISAGREE, EXIT_FAILED, EXIT_STOPPED

_DEPOSED = (
    "other nodes are unreachable, and so is the shared directory, where they elect another head, or they have already"
    " elected one: this side stops, and the same command joins the run again"
)


class Latecomers(Assembly):
    """The part of the coordinator that admits nodes while the others train."""

    def __init__(self, *, now_s: float, patience_s: float) -> None:
        super().__init__(now_s=now_s, patience_s=patience_s)
        self._crews: Crews | None = None  # None until training begins
        self._places: list[ParticipantPlace] = []
        self._run_name = ""
        self._run_id = ""
        self._late: set[int] = set()  # late members whose workers have yet to start
        self._following: set[int] = set()  # members that bring a shadow
        self._early: dict[int, Record] = {}  # claims of nodes that came while the others were starting

    def go_on(
        self, member: Participant, seat: Seat, place: ParticipantPlace, crews: Crews, *,
        name: str, run_id: str, now_s: float,
    ) -> None:  # fmt: skip
        """Become the coordinator of a run that is already training; `member` is its only member."""
        self._now_s, self._members, self._seats, self._crews = now_s, {0: member}, [seat], crews
        self._places, self._run_name, self._run_id = [place], name, run_id
        self._enter(StartPhase.RUNNING, float("inf"))

    def stand(self, standing: Standing) -> None:
        """Update how sure this node is that no other node leads the run; called repeatedly, before each `tick`."""
        if self._crews is not None and self._crews.stand(standing, self._now_s):
            self._send_all("tell", text=_DEPOSED)

    def _member_of(self, claim: Claim, record: Record) -> Participant:
        return Participant(
            claim.host, claim.pid, claim.wanted, str(record["address"]), int(record["door"]), dict(record["fields"]),
            str(record["build"]), str(record["save_dir"]),
        )  # fmt: skip

    def _claim_late(self, member: int, claim: Claim, new: Participant) -> None:
        """Give a late node its slots, or reject it with the reason."""
        assert self._crews is not None
        self._members[member] = new
        living = next(other for other in self._order if not self._members[other].is_gone)
        refusal = difference([(self._name(living), self._members[living].fields), (new.host, new.fields)])
        first, why = self._find_slots(claim)
        if refusal is not None or first is None:
            del self._members[member]
            code = EXIT_FAILED if refusal is None else EXIT_DISAGREE
            self._send(member, "ending", code=code, message=refusal or why)
            return
        slots = set(range(first, first + claim.workers))
        for seat in self._seats:
            if slots & set(seat.ranks):
                self._unseat(seat.member, new)
        self._seats = [seat for seat in self._seats if not slots & set(seat.ranks)]
        self._seats.append(Seat(member, claim.host, claim.pid, first, claim.workers))
        self._late.add(member)
        text = f"the run has begun; {claim.host} joins while it trains"
        if claim.is_shadow:
            self._following.add(member)
            text = f"the run has begun; {claim.host} follows it as a shadow"
        self._send(member, "tell", text=text)
        self._send(member, "see", mark=self._places[0].mark)

    def _unseat(self, member: int, new: Participant) -> None:
        """Another node gets the slots of this one. Its launcher may still run (it was cut off), or its connection be
        the only thing left of it (its machine lost power): the kernel gives that up minutes later."""
        known = self._members[member]
        if known.is_heard or known.is_gone:
            return
        self._send(member, "ending", code=EXIT_STOPPED, message=(
            f"{new.host} (pid {new.pid}) has taken the ranks of {known.host} (pid {known.pid}), which the others"
            " could not reach: run the same command again to join with new ranks"
        ))  # fmt: skip
        known.is_gone = True

    def _claim_early(self, member: int, claim: Claim, record: Record) -> None:
        """Handle a node that comes while the others are starting. With --join it waits until they train. With fixed
        ranks the run is complete, so the node is rejected."""
        if claim.min_ranks is not None:
            self._early[member] = record
            self._send(member, "tell", text=f"the others are starting; {claim.host} joins once they train")
            return
        here = ", ".join(f"{seat.host} ({seat.workers})" for seat in self._seats)
        self._send(member, "ending", code=EXIT_FAILED, message=(
            f"{claim.host} came while {here} are starting, without it: run the command again in a minute, when"
            " they train"
        ))  # fmt: skip

    def _find_slots(self, claim: Claim) -> tuple[int | None, str]:
        """The first slot for a claim, or None and the reason."""
        assert self._crews is not None
        late = {slot: seat.member for seat in self._seats if seat.member in self._late for slot in seat.ranks}
        following = self._crews.shadows | {slot for slot, member in late.items() if member in self._following}
        taken = self._crews.taken | following | late.keys()
        if claim.is_shadow and len(following) >= MOST_SHADOWS:
            return None, f"{MOST_SHADOWS} shadows follow this run, which is the most: stop one of them first"
        if claim.min_ranks is None:
            busy = sorted(taken & set(claim.ranks))
            if busy:
                who = next(seat.host for seat in self._seats if busy[0] in seat.ranks)
                return None, (
                    f"{claim.host} claims rank {busy[0]}, which trains on {who}: set --distributed-rank to a rank that"
                    " is gone (see status/ in the run directory), or stop that rank first"
                )
            return claim.rank, ""
        refusal = None if claim.is_shadow else claim.too_many(len(taken - following))
        if refusal is not None:
            return None, refusal
        first = self._crews.next_slot if claim.is_shadow else 0
        while taken & set(range(first, first + claim.workers)) or self._cuts_a_node(first, claim.workers, taken):
            first += 1
        return first, ""

    def _cuts_a_node(self, first: int, workers: int, taken: set[int]) -> bool:
        """Whether these slots include some of a node's slots while its other workers train."""
        wanted = set(range(first, first + workers))
        return any(set(seat.ranks) & wanted and set(seat.ranks) & taken for seat in self._seats)

    def _seen_late(self, member: int, record: Record) -> None:
        """A late node has looked for the shared run directory; if it does not see it, it makes its own."""
        if record["is_shared"] is True:
            self._settle_late(member, self._places[0])
        else:
            self._send(member, "own")

    def _owned_late(self, member: int, record: Record) -> None:
        found = FoundDirectories(
            self._members[member].host, str(record["path"]), str(record["run_id"]), record["newest"]
        )  # fmt: skip
        _, refusal = choose_run_id([FoundDirectories("the run", self._places[0].path, self._run_id, 0), found])
        if refusal is not None:
            self._send(member, "ending", code=EXIT_DISAGREE, message=refusal)
            return
        place = ParticipantPlace(str(record["path"]), record["mark"], found, [])
        self._places.append(place)
        self._settle_late(member, place)

    def _settle_late(self, member: int, place: ParticipantPlace) -> None:
        """The run directory is known: tell the node to start its workers."""
        assert self._crews is not None
        known, seat = self._members[member], next(seat for seat in self._seats if seat.member == member)
        self._late.discard(member)
        place.members.append(member)
        known.place = place
        site = Site(known.host, self._places.index(place), member, known.address)
        is_shadow = member in self._following
        starts = {slot: self._crews.seat(slot, site, is_shadow=is_shadow) for slot in seat.ranks}
        addresses = sorted({other.address for other in self._members.values() if not other.is_gone})
        self._send(
            member, "begin", name=self._run_name, first_rank=seat.first_rank, nodes=[], parts=[], path=place.path,
            run_id=self._run_id, starts=[starts[slot] for slot in seat.ranks], addresses=addresses,
        )  # fmt: skip
        self._send(member, "begun", parts=sorted(self._crews.parts))
