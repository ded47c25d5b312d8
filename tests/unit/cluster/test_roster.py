"""The roster: whoever contradicts another node is refused at once, whoever is missing is named."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hetseq.cluster.membership.admission import Claim, Roster, why_ranks_do_not_fit
from hetseq.config.sections import DistributedConfig


def given(host: str, rank: int, workers: int = 1, *, world: int = 4, pid: int = 1) -> Claim:
    return Claim(host, pid, workers, rank=rank, world_size=world)


def joins(host: str, workers: int = 1, *, least: int = 4, most: int | None = None, pid: int = 1) -> Claim:
    return Claim(host, pid, workers, min_ranks=least, max_ranks=most)


def roster_of(*claims: Claim) -> Roster:
    roster = Roster()
    for member, claim in enumerate(claims):
        assert roster.admit(member, claim) is None
    return roster


def refusal(first: Claim, second: Claim) -> str:
    """What the second node is told; it leaves the roster as it was."""
    roster = roster_of(first)
    before = roster.waiting(left_s=60, paste="")
    reason = roster.admit(1, second)
    assert reason is not None
    assert roster.waiting(left_s=60, paste="") == before
    return reason


def places(roster: Roster) -> list[tuple[int, list[int]]]:
    return [(seat.member, list(seat.ranks)) for seat in roster.seats()]


def test_nodes_with_given_ranks_sit_where_they_say_in_whatever_order_they_come() -> None:
    claims = {0: given("labA", 0, 2, world=7), 1: given("labB", 2, 1, world=7), 2: given("labC", 3, 4, world=7)}
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        roster = Roster()
        for member in order:
            assert not roster.is_complete
            assert roster.admit(member, claims[member]) is None
        assert roster.is_complete
        assert roster.world_size == 7
        assert places(roster) == [(0, [0, 1]), (1, [2]), (2, [3, 4, 5, 6])]


def test_with_join_the_head_sits_first_and_the_others_in_the_order_of_their_admission() -> None:
    roster = Roster()
    for member, workers in ((2, 1), (0, 2), (1, 1)):
        assert not roster.is_complete
        assert roster.world_size is None
        assert roster.admit(member, joins("lab", workers)) is None
    assert places(roster) == [(0, [0, 1]), (2, [2]), (1, [3])]


def test_a_last_node_with_more_ranks_than_are_missing_brings_all_of_them() -> None:
    roster = roster_of(joins("labA", 3), joins("labB", 4))
    assert roster.is_complete
    assert roster.world_size == 7
    assert places(roster) == [(0, [0, 1, 2]), (1, [3, 4, 5, 6])]


def test_a_roster_without_the_head_is_not_complete_however_many_ranks_it_has() -> None:
    roster = Roster()
    assert roster.admit(1, joins("labB", 9)) is None
    assert not roster.is_complete
    assert "the head's own ranks are missing" in roster.waiting(left_s=1, paste="")
    assert roster.admit(0, joins("labA", 1)) is None
    assert roster.is_complete


def test_a_node_that_comes_when_the_roster_is_complete_is_too_late() -> None:
    reason = refusal(joins("labA", 4), joins("labB", 1, pid=7))
    assert reason.startswith("labB pid 7 came too late: the run has its 4 ranks (labA)")


def test_seats_of_an_incomplete_roster_are_a_fault_of_the_caller() -> None:
    with pytest.raises(RuntimeError):
        roster_of(given("labA", 0)).seats()


def test_a_rank_that_is_claimed_twice_names_both_processes_and_the_rank_that_nobody_has() -> None:
    reason = refusal(given("labA", 1, world=3), given("labB", 1, world=3, pid=2))
    assert reason == (
        "rank 1 is claimed twice (labA pid 1, labB pid 2); ranks 0, 2 are not claimed yet; use --join, which"
        " assigns ranks itself, or change --distributed-rank on one of them, or, if these are two runs, give each its"
        " own meeting place [rank-claimed-twice]"
    )


def test_ranges_that_overlap_are_claimed_twice_and_ranges_that_touch_are_not() -> None:
    assert "ranks 2-3 are claimed twice (labA pid 1, labB pid 2)" in refusal(
        given("labA", 0, 4, world=6), given("labB", 2, 4, world=6, pid=2)
    )
    assert roster_of(given("labA", 0, 2), given("labB", 2, 2)).is_complete


def test_two_heads_of_2020_claim_rank_zero_twice() -> None:
    assert refusal(given("labA", 0), given("labB", 0, pid=2)).startswith("rank 0 is claimed twice (labA pid 1, labB")


def test_unequal_world_sizes_are_refused_with_both() -> None:
    reason = refusal(given("labA", 0, world=2), given("labB", 1, world=3, pid=2))
    assert reason.startswith("labA pid 1 was told world size 2, labB pid 2 3: ")
    assert "--distributed-world-size" in reason


def test_unequal_min_ranks_are_refused_with_both() -> None:
    reason = refusal(joins("labA", least=4), joins("labB", least=6, pid=2))
    assert reason.startswith("labA pid 1 was told --min-ranks 4, labB pid 2 6: ")


def test_a_node_with_which_there_would_be_more_than_max_ranks_is_refused_and_a_smaller_one_is_not() -> None:
    roster = Roster()
    assert roster.admit(0, joins("labA", 3, least=5, most=5)) is None
    reason = roster.admit(1, joins("labB", 3, least=5, most=5, pid=2))
    assert reason is not None
    assert reason.startswith("labB pid 2 would make it 6 ranks, and --max-ranks is 5: ")
    assert roster.admit(2, joins("labC", 2, least=5, most=5)) is None
    assert roster.is_complete


@pytest.mark.parametrize("turned", [False, True])
def test_given_ranks_beside_join_are_refused_whoever_was_first(turned: bool) -> None:
    pair = joins("labA"), given("labB", 1, pid=2)
    reason = refusal(*(reversed(pair) if turned else pair))
    assert reason.startswith("labA pid 1 came with --join and labB pid 2 with ranks of its own (--distributed-rank 1 ")


def test_ranks_beyond_the_world_are_refused_and_the_last_of_the_world_is_not() -> None:
    reason = Roster().admit(0, given("labB", 3, 2, world=4))
    assert reason is not None
    assert reason.startswith("labB pid 1 claims ranks 3-4, and 4 ranks are 0 to 3: ")
    assert Roster().admit(0, given("labB", 3, 1, world=4)) is None


def test_a_member_claims_once() -> None:
    roster = roster_of(given("labA", 0))
    assert roster.admit(0, given("labA", 1)) == "labA pid 1 claimed its ranks a second time"


def test_a_node_that_left_makes_room_for_the_one_that_is_started_again() -> None:
    roster = roster_of(given("labA", 0, 2), given("labB", 2, 2))
    roster.remove(1)
    assert not roster.is_complete
    assert roster.admit(2, given("labB", 2, 2, pid=5)) is None
    assert [(seat.member, seat.pid) for seat in roster.seats()] == [(0, 1), (2, 5)]
    roster.remove(17)  # never admitted: nothing


def test_a_hole_between_claimed_ranks_is_named_while_waiting_and_may_still_be_filled() -> None:
    roster = roster_of(given("labA", 0), given("labB", 2, 2, pid=2))
    assert roster.waiting(left_s=590, paste="hetseq train --distributed-rank 0") == (
        "waiting: 3 of 4 ranks are here: labA (1), labB (2); rank 1 is not claimed yet; deadline in 09:50;"
        " paste there: hetseq train --distributed-rank 1"
    )
    line = roster.waiting(left_s=590, paste="hetseq train --config run.yaml")  # rank zero is the default
    assert line.endswith("paste there: hetseq train --config run.yaml --distributed-rank 1")
    assert roster.admit(2, given("labC", 1)) is None
    assert roster.is_complete


def test_waiting_with_join_counts_what_is_missing() -> None:
    line = roster_of(joins("labA", 2, least=8), joins("labB", 4, least=8)).waiting(left_s=3600, paste="")
    assert line == "waiting: 6 of 8 ranks are here: labA (2), labB (4); 2 missing; deadline in 1:00:00"
    assert Roster().waiting(left_s=-1, paste="x") == "waiting for the first node; deadline in 00:00; paste there: x"


def test_several_holes_are_written_as_ranges() -> None:
    line = roster_of(given("labA", 1, world=8)).waiting(left_s=5, paste="")
    assert "ranks 0, 2-7 are not claimed yet" in line


def test_whatever_the_order_of_arrival_the_ranks_are_all_of_the_world_once() -> None:
    generator = random.Random(0)
    for _ in range(200):
        sizes = [generator.randint(1, 4) for _ in range(generator.randint(1, 5))]
        world, roster = sum(sizes), Roster()
        claims = [given(f"lab{at}", sum(sizes[:at]), size, world=world) for at, size in enumerate(sizes)]
        if generator.random() < 0.5:
            claims = [joins(f"lab{at}", size, least=world) for at, size in enumerate(sizes)]
        members = list(range(len(sizes)))
        generator.shuffle(members)
        for member in members:
            assert roster.admit(member, claims[member]) is None
        assert [rank for seat in roster.seats() for rank in seat.ranks] == list(range(world))


def test_a_claim_comes_back_from_json_as_it_was() -> None:
    for claim in (given("labA", 2, 3, world=9, pid=77), joins("labB", 2)):
        assert Claim.from_record(json.loads(json.dumps(claim.to_record()))) == claim


@pytest.mark.parametrize(
    "change",
    [
        {"host": ""}, {"host": 5}, {"host": "a" * 300}, {"host": "lab\nA"}, {"pid": 0}, {"pid": "1"}, {"pid": True},
        {"workers": 0}, {"workers": 1.0}, {"workers": 2**40}, {"rank": -1}, {"rank": None}, {"world_size": None},
        {"world_size": 0}, {"min_ranks": 4}, {"max_ranks": 4}, {"more": 1},
    ],
)  # fmt: skip
def test_nonsense_is_no_claim(change: dict[str, Any]) -> None:
    record = given("labA", 0).to_record()
    assert Claim.from_record(record) == given("labA", 0)
    with pytest.raises(ValueError, match="no claim"):
        Claim.from_record({**record, **change})


def test_a_record_without_a_field_or_no_record_at_all_is_no_claim() -> None:
    record: Any
    for record in ({}, None, [], "labA", {"host": "labA"}):
        with pytest.raises(ValueError, match="no claim"):
            Claim.from_record(record)


def test_own_ranks_beyond_the_world_are_seen_on_the_command_line() -> None:
    config = DistributedConfig(
        distributed_world_size=4, distributed_rank=3, distributed_init_method="tcp://labA:29400"
    )  # fmt: skip
    assert why_ranks_do_not_fit(config, 1) is None
    fault = why_ranks_do_not_fit(config, 2)
    assert fault is not None
    assert "--distributed-rank 3 and 2 workers on this node mean ranks 3-4, and 4 ranks are 0 to 3" in fault
    joins = DistributedConfig(join="tcp://labA:29400", min_ranks=2)
    assert why_ranks_do_not_fit(joins, 5) is None  # ranks are given out there
