"""Rounds with shadows: when they are asked, when they are waited for, and when one becomes a rank."""

from __future__ import annotations

from typing import Any

import pytest

from hetseq.cluster.membership.admission import Claim
from hetseq.cluster.membership.coordinator import Coordinator
from hetseq.cluster.membership.decide import Image, Record, Report, SplitBrainError, decide
from hetseq.cluster.membership.exit_status import WorkerEnd
from hetseq.cluster.membership.failover import Orphans, orphaned_hub
from hetseq.cluster.membership.regroup_rounds import ANSWER_S
from hetseq.cluster.membership.run_directory_discovery import Mark
from hetseq.cluster.membership.step_commit import Lineage
from hetseq.cluster.membership.worker_roster import Crews, Site
from hetseq.errors import EXIT_USAGE
from tests.unit.cluster.test_generations import Rounds, kinds, rosters

AHEAD, BEHIND = Lineage(9, 99), Lineage(7, 77)
FIELDS = {"parameters": "weight"}


# decide


def newest(workers: int = 2, *shadows: str) -> Record:
    return Record(3, tuple(f"{slot}.0" for slot in range(workers)), base=BEHIND, shadows=shadows)


def report(name: str, lineage: Lineage | None, **facts: Any) -> Report:
    return Report(name, 3, lineage, **facts)


ORDER = {f"{slot}.0": slot for slot in range(6)}


def test_members_that_hold_the_state_need_no_shadow() -> None:
    members = {name: report(name, AHEAD) for name in ("0.0", "1.0")}
    record = decide(newest(2, "2.0"), members, order=ORDER, shadows={"2.0": report("2.0", AHEAD)})
    assert (record.roster, record.base, record.fresh) == (("0.0", "1.0"), AHEAD, frozenset())


def test_without_a_member_the_furthest_shadow_becomes_one() -> None:
    shadows = {"2.0": report("2.0", BEHIND), "3.0": report("3.0", AHEAD), "4.0": report("4.0", AHEAD)}
    record = decide(newest(2, *shadows), {}, ["5.0"], order=ORDER, shadows=shadows)
    assert record.roster == ("3.0", "5.0")
    assert (record.base, record.donors, record.last) == (AHEAD, ("3.0",), None)
    assert Record.from_record(record.to_record()) == record


def test_owners_that_lack_a_part_receive_the_state_of_a_shadow_that_is_a_step_behind() -> None:
    members = {"0.0": report("0.0", AHEAD, part=(60, 100))}
    record = decide(newest(2, "2.0"), members, order=ORDER, shadows={"2.0": report("2.0", BEHIND)})
    assert (record.roster, record.base, record.fresh, record.lost) == (("0.0", "2.0"), BEHIND, frozenset({"0.0"}), "")


def test_a_shadow_that_holds_everything_contradicts_no_parts() -> None:
    parts = {"0.0": report("0.0", AHEAD, part=(60, 100)), "1.0": report("1.0", AHEAD, part=(40, 100))}
    decide(newest(2, "2.0"), parts, order=ORDER, shadows={"2.0": report("2.0", AHEAD)})
    with pytest.raises(SplitBrainError):  # as a member without a part would
        decide(newest(3), {**parts, "2.0": report("2.0", AHEAD)}, order=ORDER)


def test_what_is_newer_than_a_shadow_is_preferred_to_it() -> None:
    image = Image("plan", Lineage(8, 88), 3, (0,), 1)
    shadow = {"2.0": report("2.0", BEHIND)}
    lost = {"0.0": report("0.0", AHEAD, part=(60, 100), images=(image,))}
    record = decide(newest(2, "2.0"), lost, order=ORDER, shadows=shadow)
    assert (record.image, record.base, record.roster) == ("plan", image.lineage, ("0.0",))
    saved = {"0.0": report("0.0", AHEAD, part=(60, 100), saved=8)}
    record = decide(newest(2, "2.0"), saved, order=ORDER, shadows=shadow)
    assert (record.base, record.roster) == (None, ("0.0",))
    as_new = {"0.0": report("0.0", AHEAD, part=(60, 100), saved=7)}
    assert decide(newest(2, "2.0"), as_new, order=ORDER, shadows=shadow).base == BEHIND


def test_a_shadow_without_a_state_is_no_member() -> None:
    record = decide(newest(2, "2.0"), {}, ["5.0"], order=ORDER, shadows={"2.0": report("2.0", None)})
    assert (record.roster, record.base) == (("5.0",), None)
    with pytest.raises(ValueError, match="no member is left"):
        decide(newest(2, "2.0"), {}, order=ORDER, shadows={"2.0": report("2.0", None)})


# rounds


class Followed(Rounds):
    """Rounds of two ranks with shadows, which follow them."""

    def __init__(self, *shadows: int, **options: Any) -> None:
        super().__init__(2, **options)
        for slot in shadows:
            self.those.follows(f"{slot}.0", slot)
        self.asked = kinds(self.told())
        self.report(0, 1)


def test_a_shadow_that_arrives_has_the_ranks_regroup_without_losing_a_step() -> None:
    followed = Followed(2)
    assert followed.asked == [("0.0", "wish")]
    newest = followed.those.newest
    assert (newest.generation, newest.roster, newest.shadows, newest.fresh) == (1, ("0.0", "1.0"), ("2.0",), set())


def test_a_round_asks_shadows_and_does_not_wait_for_them_while_a_rank_holds_the_state() -> None:
    followed = Followed(2)
    assert kinds(followed.end(1)) == [("0.0", "freeze"), ("2.0", "freeze")]
    told = followed.report(0)
    assert kinds(told) == [("0.0", "record"), ("2.0", "record")]
    assert followed.those.newest.roster == ("0.0",)


def test_without_ranks_a_round_waits_for_the_shadow_and_makes_it_a_rank() -> None:
    followed = Followed(2)
    followed.end(0)
    assert kinds(followed.end(1)) == []
    assert not followed.those.is_extinct
    told = followed.report(2, lineage=AHEAD)
    assert rosters(told) == {("2.0",)}
    assert (followed.those.newest.base, followed.those.shadows) == (AHEAD, set())
    assert followed.those.is_member("2.0")


def test_it_does_not_wait_for_replacements_that_are_being_started() -> None:
    followed = Followed(2)
    followed.end(0, is_restarting=True)
    followed.end(1, is_restarting=True)
    assert rosters(followed.report(2, lineage=AHEAD)) == {("2.0",)}


def test_a_silent_shadow_is_fenced_where_it_is_needed_and_only_there() -> None:
    followed = Followed(2)
    followed.end(0, is_restarting=True)
    followed.end(1, is_restarting=True)
    assert kinds(followed.wait(ANSWER_S / 2)) == []
    assert kinds(followed.wait(ANSWER_S)) == [("2.0", "fence")]
    followed.arrive(0)
    assert followed.those.newest.roster == ("0.0", "1.0"), "the other replacement is awaited"
    followed.arrive(1)
    assert (followed.those.newest.roster, followed.those.newest.base) == (("0.1", "1.1"), None)


@pytest.mark.parametrize("how", ["denies", "dies", "is silent", "never followed"])
def test_a_run_without_ranks_ends_when_no_shadow_can_help(how: str) -> None:
    followed = Followed() if how == "never followed" else Followed(2)
    if how == "never followed":
        followed.those.follows("2.0", 2)
    followed.end(0)
    followed.end(1)
    if how == "denies":
        followed.report(2, lineage=None)
    elif how == "dies":
        followed.end(2)
    elif how == "is silent":
        followed.wait(2 * ANSWER_S)
    assert followed.those.is_extinct


def test_the_death_of_a_shadow_opens_no_round() -> None:
    followed = Followed(2)
    assert followed.end(2) == []
    assert not followed.those.is_open
    followed.those.follows("2.1", 2)
    assert kinds(followed.told()) == [("0.0", "wish")]


def test_a_shadow_counts_for_min_ranks_only_when_it_is_a_rank() -> None:
    followed = Followed(2, min_ranks=2, wait_s=30.0)
    followed.end(1)
    assert followed.report(0) == [], "one rank is too few"
    followed.end(0)
    assert followed.report(2, lineage=AHEAD) == [], "and so is the shadow alone"
    assert rosters(followed.arrive(0)) == {("0.1", "2.0")}


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_round_that_waits_for_ranks_sleeps_until_then_whatever_a_shadow_does(is_alive: bool) -> None:
    followed = Followed(2, min_ranks=2, wait_s=30.0)
    followed.end(1)
    if is_alive:  # and takes long for its report
        followed.answer(2, patience_s=100.0)
    assert followed.report(0) == []
    followed.wait(2 * ANSWER_S)
    assert followed.those.tick(followed.now_s) == 30.0 - 2 * ANSWER_S


def test_a_late_report_gets_the_newest_record_again() -> None:
    followed = Followed(2)
    followed.report(0, 1)
    assert kinds(followed.report(2, generation=1)) == [("2.0", "record")]


# workers and nodes


def test_a_worker_that_was_a_shadow_is_a_rank_from_then_on() -> None:
    crews = Crews({0: Site("labA", 0, 0)}, {0: FIELDS}, min_ranks=1, wait_s=0.0)
    assert crews.next_slot == 1
    crews.seat(1, Site("labB", 1, 1), is_shadow=True)
    crews.handle(1, {"kind": "present", "starts": 0, "fields": FIELDS}, 1.0)
    assert (crews.shadows, crews.taken, crews.next_slot) == ({1}, {0}, 1)
    crews.handle(0, {"kind": "report", "starts": 0, "report": Report("", 0, BEHIND).to_record()}, 2.0)
    crews.outbox.clear()
    crews.left(WorkerEnd(0, -9), 0, is_restarting=False, now_s=3.0)
    crews.handle(1, {"kind": "report", "starts": 0, "report": Report("", 1, AHEAD).to_record()}, 4.0)
    (told,) = [facts for _, kind, facts in crews.outbox if kind == "record"]
    assert "the shadow on labB takes over as rank 1" in told["story"]
    assert (crews.living, crews.shadows, crews.next_slot) == ({1}, set(), 2)
    crews.left(WorkerEnd(1, -9), 0, is_restarting=True, now_s=5.0)
    assert crews.taken == {1}, "its replacement is awaited like a rank's"


def hub_with(*claims: tuple[int, Claim]) -> Coordinator:
    hub = Coordinator(join_timeout_s=600.0, paste="", now_s=0.0)
    for member, claim in claims:
        hub.handle(member, claim_record(claim), 1.0)
    return hub


def claim_record(claim: Claim) -> dict[str, Any]:
    return {
        "kind": "claim", "claim": claim.to_record(), "address": "127.0.0.1", "door": 1, "fields": FIELDS, "build": "",
        "save_dir": "/run",
    }  # fmt: skip


SHADOW = Claim("labB", 2, 1, min_ranks=2, is_shadow=True)


def test_the_node_of_a_shadow_is_told_that_more_ranks_are_awaited() -> None:
    """No rank is left that would say so."""
    crews = Crews(
        {slot: Site("labA", 0, 0) for slot in (0, 1)}, dict.fromkeys((0, 1), FIELDS), min_ranks=2, wait_s=60.0
    )
    crews.seat(2, Site("labB", 1, 1), is_shadow=True)
    crews.handle(2, {"kind": "present", "starts": 0, "fields": FIELDS}, 1.0)
    for slot in (0, 1):
        crews.handle(slot, {"kind": "report", "starts": 0, "report": Report("", 0, BEHIND).to_record()}, 2.0)
    for slot in (0, 1):
        crews.left(WorkerEnd(slot, -9), 0, is_restarting=False, now_s=3.0)
    crews.handle(2, {"kind": "report", "starts": 0, "report": Report("", 1, AHEAD).to_record()}, 4.0)
    crews.outbox.clear()
    for now_s in (5.0, 8.0):
        crews.tick(now_s)
    told = [(slot, facts["text"]) for slot, kind, facts in crews.outbox if kind == "tell"]
    assert [slot for slot, _ in told] == [2]
    assert "waiting for 1 more rank (--min-ranks 2)" in told[0][1]


def test_a_shadow_is_not_the_first_node() -> None:
    hub = hub_with((0, SHADOW))
    assert hub.ending is not None
    assert hub.ending.code == EXIT_USAGE
    assert (0, "ending") in [(member, record["kind"]) for member, record in hub.outbox]


def test_a_shadow_that_comes_before_the_run_has_begun_waits_and_counts_for_nothing() -> None:
    hub = hub_with((0, Claim("labA", 1, 1, min_ranks=2)), (1, SHADOW))
    assert hub.ending is None
    assert "joins once they train" in hub.outbox[-1][1]["text"]
    hub.outbox.clear()
    left_s = hub.tick(2.0)
    assert left_s <= 60.0
    hub.tick(62.0)
    assert [record["kind"] for member, record in hub.outbox if member == 1] == ["tell"], "it hears that the head lives"
    hub.gone(1, "it left", 2.0)  # nothing is lost
    assert hub.ending is None


@pytest.mark.parametrize("facts", [{"workers": 2}, {"min_ranks": None, "rank": 0, "world_size": 1}])
def test_a_claim_of_a_shadow_is_checked(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a shadow has one worker and comes with --join"):
        Claim.from_record({**SHADOW.to_record(), **facts})


def test_a_shadow_whose_head_is_gone_takes_over_under_its_own_coordinator() -> None:
    newest = Record(4, ("0.0",), base=BEHIND, shadows=("1.0", "2.0"))
    orphans = Orphans("labB", 7, "127.0.0.1", FIELDS, {1: 0}, {0: 0, 1: 0, 2: 0}, {1: FIELDS}, (), "/run", "id", "run")
    hub = orphaned_hub(orphans, newest, now_s=0.0, mark=Mark("/run", "name", "text", "/"))
    hub.tick(0.5)
    assert [(record["kind"], record["rank"]) for _, record in hub.outbox] == [("freeze", 1)]
    hub.handle(0, {"kind": "report", "rank": 1, "starts": 0, "report": Report("", 4, AHEAD).to_record()}, 1.0)
    (told,) = [record for _, record in hub.outbox if record["kind"] == "record"]
    record = Record.from_record(told["record"])
    assert (record.roster, record.base, record.is_last) == (("1.0",), AHEAD, False)
    assert record.shadows == (), "the other shadow was on another node"
