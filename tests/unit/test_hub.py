"""The head's decisions, record by record: who is let in, what is asked of whom, and how a run ends on every node."""

from __future__ import annotations

from typing import Any

import pytest

from hetseq.cluster.hub import Hub, Phase
from hetseq.cluster.roster import Claim
from hetseq.ending import Ending

Record = dict[str, Any]
FIELDS = {"--lr": "0.1"}
ONE, TWO = [(2, 0, 2)], [(3, 0, 4), (1, 3, 4)]  # workers, first rank, world size


class Talk:
    """A hub and what it said; launchers answer as told."""

    def __init__(self, *, join_timeout_s: float = 60.0) -> None:
        self.hub = Hub(join_timeout_s=join_timeout_s, paste="hetseq train --distributed-rank 0", now_s=0.0)
        self.now_s = 0.0

    def say(self, member: int, kind: str, **facts: Any) -> list[tuple[int, Record]]:
        self.hub.handle(member, {"kind": kind, **facts}, self.now_s)
        return self.heard()

    def heard(self) -> list[tuple[int, Record]]:
        said, self.hub.outbox[:] = list(self.hub.outbox), []
        return said

    def wait(self, seconds: float) -> list[tuple[int, Record]]:
        self.now_s += seconds
        self.hub.tick(self.now_s)
        return self.heard()

    def claim(self, member: int, workers: int, rank: int, world: int, **other: Any) -> list[tuple[int, Record]]:
        claim = Claim(other.pop("host", f"lab{'ABC'[member]}"), 100 + member, workers, rank, world, None)
        facts = {"address": f"10.0.0.{member}", "door": 4000 + member, "fields": FIELDS, "build": "cpu"}
        facts |= {"save_dir": "/run", **other}
        return self.say(member, "claim", claim=claim.to_record(), **facts)

    def own(self, member: int, path: str = "/run", run_id: str = "a" * 16, newest: int | None = None) -> Any:
        return self.say(member, "owned", path=path, mark={"path": path}, run_id=run_id, newest=newest)

    def begin(self, nodes: list[tuple[int, int, int]]) -> list[tuple[int, Record]]:
        """Up to the workers' start, all on one shared directory."""
        for member, (workers, rank, world) in enumerate(nodes):
            said = self.claim(member, workers, rank, world)
        if len(nodes) > 1:
            for member in range(len(nodes)):
                said = self.say(member, "reached", failures=[])
        said = self.own(0)
        for member in range(1, len(nodes)):
            said = self.say(member, "seen", is_shared=True)
        return said

    def run(self, nodes: list[tuple[int, int, int]]) -> list[tuple[int, Record]]:
        """Up to the first step."""
        self.begin(nodes)
        for member, (workers, rank, _) in enumerate(nodes):
            for local in range(workers):
                said = self.say(member, "present", rank=rank + local, fields={"parameters": "weight"})
        assert [record["kind"] for _, record in said] == ["go"] * len(nodes)
        for member in range(len(nodes)):
            said = self.say(member, "ready")
        return said

    def end(self, member: int, rank: int, code: int | None = 0, **other: Any) -> list[tuple[int, Record]]:
        end = {"rank": rank, "exit_code": code if code is not None else -9, "code": code, "message": ""}
        return self.say(member, "end", end={**end, "is_secondary": False, **other})

    def over(self, member: int, **other: Any) -> list[tuple[int, Record]]:
        return self.say(member, "over", **{"silent": [], "cut_short": "", "has_commit": False, **other})


def kinds(said: list[tuple[int, Record]]) -> list[tuple[int, str]]:
    return [(member, record["kind"]) for member, record in said]


def endings(said: list[tuple[int, Record]]) -> dict[int, Ending]:
    return {member: Ending(record["code"], record["message"]) for member, record in said if record["kind"] == "ending"}


# A start.


def test_a_run_on_one_node_asks_for_its_directory_and_begins() -> None:
    talk = Talk()
    assert kinds(talk.claim(0, *ONE[0])) == [(0, "own")]
    said = talk.own(0)
    assert kinds(said) == [(0, "begin")]
    record = said[0][1]
    assert (record["first_rank"], record["nodes"], record["parts"]) == (0, ["labA"] * 2, [[0, 1]])
    assert (record["path"], record["run_id"]) == ("/run", "a" * 16)


def test_nodes_try_each_other_in_both_directions_once_all_are_there() -> None:
    talk = Talk()
    talk.claim(0, 1, 0, 3)
    talk.claim(1, 1, 2, 3)
    said = talk.claim(2, 1, 1, 3)
    assert kinds(said) == [(0, "reach"), (2, "reach"), (1, "reach")]
    peers = {member: [peer["host"] for peer in record["peers"]] for member, record in said}
    assert peers == {0: ["labC", "labB"], 2: ["labA", "labB"], 1: ["labA", "labC"]}


def test_nodes_that_cannot_reach_each_other_do_not_start() -> None:
    talk = Talk()
    talk.claim(0, 1, 0, 2)
    talk.claim(1, 1, 1, 2)
    assert talk.say(0, "reached", failures=[]) == []
    said = talk.say(1, "reached", failures=["labB cannot reach labA at port 4000: a firewall?"])
    assert endings(said) == dict.fromkeys((0, 1), Ending(1, "labB cannot reach labA at port 4000: a firewall?"))


def test_who_shares_the_directory_of_rank_zero_uses_it_and_the_others_prepare_their_own() -> None:
    talk = Talk()
    for member in range(3):
        talk.claim(member, 1, member, 3, save_dir=f"/run{min(member, 1)}")
    for member in range(3):
        talk.say(member, "reached", failures=[])
    assert kinds(talk.own(0, "/run0")) == [(1, "see"), (2, "see")]
    assert talk.say(1, "seen", is_shared=False) == []
    assert kinds(talk.say(2, "seen", is_shared=False)) == [(1, "own")]
    assert kinds(talk.own(1, "/run1")) == [(2, "see")]
    said = talk.say(2, "seen", is_shared=True)
    assert [record["parts"] for _, record in said] == [[[0], [1, 2]]] * 3
    assert [record["path"] for _, record in said] == ["/run0", "/run1", "/run1"]


def test_a_directory_of_another_path_is_not_looked_for_in_a_group_that_is_not_rank_zeros() -> None:
    talk = Talk()
    for member in range(3):
        talk.claim(member, 1, member, 3, save_dir=f"/run{member}")
    for member in range(3):
        talk.say(member, "reached", failures=[])
    talk.own(0, "/run0")
    talk.say(1, "seen", is_shared=False)
    talk.say(2, "seen", is_shared=False)
    assert kinds(talk.own(1, "/run1")) == [(2, "own")]
    assert [record["parts"] for _, record in talk.own(2, "/run2")] == [[[0], [1], [2]]] * 3


def test_ranks_find_each_other_over_the_store_whoever_comes_first() -> None:
    talk = Talk()
    talk.begin(TWO)
    assert talk.say(1, "get", rank=3, key="address/0") == []
    assert talk.say(0, "set", key="address/0", value="AAAA") == [
        (1, {"kind": "value", "rank": 3, "key": "address/0", "value": "AAAA"})
    ]
    assert kinds(talk.say(0, "get", rank=2, key="address/0")) == [(0, "value")]


def test_training_has_begun_when_all_nodes_are_ready() -> None:
    assert kinds(Talk().run(TWO)) == [(0, "begun"), (1, "begun")]


# Refusals: the same on all nodes.


def test_nodes_that_were_told_different_things_end_with_both_values() -> None:
    talk = Talk()
    talk.claim(0, 3, 0, 4)
    said = endings(talk.claim(1, 1, 3, 4, fields={"--lr": "0.2"}))
    assert said[0] == said[1]
    assert said[0].code == 78
    assert all(word in said[0].message for word in ("--lr", "0.1", "0.2", "labA", "labB"))
    talk = Talk()
    talk.claim(0, 3, 0, 4)
    assert kinds(talk.claim(1, 1, 3, 4, build="cu126")) == [(0, "tell"), (1, "tell"), (0, "reach"), (1, "reach")]


def test_ranks_whose_models_differ_end_before_they_connect() -> None:
    talk = Talk()
    talk.begin(TWO)
    for rank in range(3):
        assert talk.say(0, "present", rank=rank, fields={"parameters": "weight\nbias"}) == []
    said = endings(talk.say(1, "present", rank=3, fields={"parameters": "bias\nweight"}))
    assert said[0] == said[1]
    assert said[0].code == 78
    assert "rank 3 on labB" in said[0].message


def test_a_rank_that_is_claimed_twice_ends_the_run_on_both_nodes() -> None:
    talk = Talk()
    talk.claim(0, 3, 0, 4)
    said = endings(talk.claim(1, 1, 2, 4))
    assert {ending.code for ending in said.values()} == {78}
    assert "rank 2 is claimed twice (labA pid 100, labB pid 101)" in said[0].message


def test_directories_of_two_runs_are_refused_with_both() -> None:
    talk = Talk()
    talk.claim(0, 1, 0, 2)
    talk.claim(1, 1, 1, 2, save_dir="/other")
    for member in range(2):
        talk.say(member, "reached", failures=[])
    talk.own(0, newest=40)
    talk.say(1, "seen", is_shared=False)
    said = endings(talk.own(1, "/other", "b" * 16, newest=50))
    assert said[0] == said[1]
    assert said[0].code == 78
    assert all(word in said[0].message for word in ("labA", "/run", "labB", "/other", "40", "50"))


def test_what_one_node_finds_by_itself_ends_all_with_its_name() -> None:
    talk = Talk()
    for member, (workers, rank, world) in enumerate(TWO):
        talk.claim(member, workers, rank, world)
    for member in range(2):
        talk.say(member, "reached", failures=[])
    said = endings(talk.say(0, "refused", code=2, message="--save-dir /run is a file"))
    assert said == dict.fromkeys((0, 1), Ending(2, "labA: --save-dir /run is a file"))


def test_who_comes_when_the_run_has_begun_goes_alone() -> None:
    talk = Talk()
    talk.run(TWO)
    said = talk.claim(2, 1, 3, 4)
    assert kinds(said) == [(2, "ending")]
    assert "labC came too late: the run has begun with labA (3), labB (1)" in said[0][1]["message"]
    assert talk.hub.phase is Phase.RUNNING


def test_who_comes_a_moment_after_a_refusal_hears_the_same() -> None:
    talk = Talk()
    talk.claim(0, 1, 0, 3)
    said = endings(talk.claim(1, 1, 1, 3, fields={"--lr": "0.2"}))
    assert talk.hub.linger_s > 0, "the third one is on its way"
    complete = Talk()
    complete.claim(0, 1, 0, 2)
    complete.claim(1, 1, 1, 2, fields={"--lr": "0.2"})
    assert complete.hub.linger_s == 0, "all have heard it"
    strangers = Talk()  # to the head's own launcher, which is slower than two that claim the same rank
    strangers.claim(1, 1, 1, 2)
    refused = endings(strangers.claim(2, 1, 1, 2))
    assert endings(strangers.claim(0, 1, 0, 2)) == {0: refused[1]}
    assert endings(talk.claim(2, 1, 2, 3)) == {2: said[0]}
    talk = Talk()
    talk.run(ONE)
    talk.end(0, 0)
    talk.end(0, 1)
    talk.over(0)
    assert talk.hub.linger_s == 0


def test_who_leaves_between_coming_and_starting_ends_the_start_for_all() -> None:
    talk = Talk()
    for member, (workers, rank, world) in enumerate(TWO):
        talk.claim(member, workers, rank, world)
    said = endings(talk.say(1, "refused", code=1, message="stopped by SIGTERM before the first step"))
    assert said[0] == Ending(1, "labB: stopped by SIGTERM before the first step")
    talk = Talk()
    for member, (workers, rank, world) in enumerate(TWO):
        talk.claim(member, workers, rank, world)
    talk.hub.gone(1, "reset", 0.0)
    assert endings(talk.heard()) == {0: Ending(1, "labB left before the start (reset)")}


# Waiting.


def test_missing_ranks_are_named_at_once_and_every_ten_seconds() -> None:
    talk = Talk()
    talk.claim(0, 3, 0, 4)
    talk.wait(0)
    assert talk.wait(9.9) == []
    said = talk.wait(0.1)
    assert kinds(said) == [(0, "tell")]
    assert "rank 3" in said[0][1]["text"]
    assert "labA (3)" in said[0][1]["text"]


def test_who_leaves_while_all_wait_is_waited_for_again() -> None:
    talk = Talk()
    talk.claim(0, 1, 0, 3)
    talk.claim(1, 1, 1, 3)
    talk.hub.gone(1, "closed", 1.0)
    assert talk.claim(2, 1, 2, 3) == []
    assert [member for member, record in talk.wait(10) if record["kind"] == "tell"] == [0, 2]


def test_after_the_join_timeout_the_run_ends_and_says_who_never_came() -> None:
    talk = Talk(join_timeout_s=30)
    talk.claim(0, 3, 0, 4)
    assert endings(talk.wait(29.9)) == {}
    ending = endings(talk.wait(0.2))[0]
    assert ending.code == 1
    assert "rank 3" in ending.message


def test_that_nobody_came_is_a_failure_but_numbers_that_fit_nobody_are_a_disagreement() -> None:
    def end(*claims: tuple[int, int], sent_away: int = 0) -> Ending:
        talk = Talk()
        for member, (workers, rank) in enumerate(claims):
            talk.claim(member, workers, rank, 4)
        talk.hub.sent_away = sent_away
        return endings(talk.wait(61))[0]

    assert end((1, 0), (1, 1)).code == 1
    assert end((1, 0), (2, 2)).code == 78
    assert "rank 1 is claimed by nobody" in end((1, 0), (2, 2)).message
    assert end((1, 0), sent_away=2).code == 78
    assert "2 times a node with another secret was sent away" in end((1, 0), sent_away=2).message


@pytest.mark.parametrize("phase", ["reaching", "directories", "loading"])
def test_a_node_that_says_nothing_is_named_when_the_time_is_over(phase: str) -> None:
    talk = Talk()
    if phase == "loading":
        talk.begin(TWO)
        for rank in range(3):
            talk.say(0, "present", rank=rank, fields={})
        talk.say(0, "ready")
    else:
        for member, (workers, rank, world) in enumerate(TWO):
            talk.claim(member, workers, rank, world)
        talk.say(0, "reached", failures=[])
    if phase == "directories":
        talk.say(1, "reached", failures=[])
        talk.own(0)
    assert endings(talk.wait(29)) == {}
    ending = endings(talk.wait(3600))[0]
    assert ending.code == 1
    assert "labB did not answer in time" in ending.message
    assert "labA" not in ending.message


# Ends.


def test_a_run_that_ends_well_ends_with_zero_on_all_nodes_once_all_have_told() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3)
    assert kinds(talk.over(1)) == [(0, "ebb"), (1, "ebb")]
    for rank in range(3):
        talk.end(0, rank)
    assert endings(talk.over(0)) == dict.fromkeys((0, 1), Ending(0))


def test_the_first_cause_is_told_to_all_nodes_with_rank_and_host() -> None:
    talk = Talk()
    talk.run(TWO)
    secondary = {"message": "lost a peer", "is_secondary": True}
    assert [record["is_polite"] for _, record in talk.end(0, 0, 75, **secondary)] == [False, False]
    talk.end(0, 1, 75, **secondary)
    talk.end(1, 3, 1, message="ValueError: no")
    talk.over(1)
    talk.end(0, 2, 75, **secondary)
    said = endings(talk.over(0, has_commit=True))
    assert said == dict.fromkeys((0, 1), Ending(1, "rank 3 on labB: ValueError: no"))


def test_a_node_that_falls_silent_is_named_and_the_run_can_go_on_from_a_commit() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.hub.gone(1, "reset by peer", talk.now_s)
    assert kinds(talk.heard()) == [(0, "ebb")]
    for rank in range(3):
        talk.end(0, rank, 75, message="lost a peer", is_secondary=True)
    ending = endings(talk.over(0, has_commit=True))[0]
    assert ending.code == 75
    assert ending.message.startswith("the connection to labB was lost (reset by peer)")
    assert "the same command goes on" in ending.message


def test_a_stop_on_one_node_stops_all_politely() -> None:
    talk = Talk()
    talk.run(TWO)
    said = talk.end(1, 3, 75, message="stopped after step 7; the same command goes on from step 7")
    assert [record["is_polite"] for _, record in said] == [True, True]
    talk.over(1, has_commit=True)
    for rank in range(3):
        talk.end(0, rank, 75, message="stopped after step 7; the same command goes on from step 7")
    said = endings(talk.over(0, has_commit=True))
    assert said[1] == Ending(75, "stopped after step 7; the same command goes on from step 7")


def test_a_launcher_that_was_stopped_at_once_gives_the_reason_for_all() -> None:
    talk = Talk()
    talk.run(TWO)
    said = talk.over(1, cut_short="stopped at once by a second signal (SIGINT)", silent=[3])
    assert [record["is_polite"] for _, record in said] == [False, False]
    for rank in range(3):
        talk.end(0, rank, 75, message="lost a peer", is_secondary=True)
    ending = endings(talk.over(0))[1]
    assert ending == Ending(1, "labB: stopped at once by a second signal (SIGINT); nothing had been saved yet")


def test_a_launcher_that_never_reports_its_end_does_not_keep_the_others() -> None:
    talk = Talk()
    talk.run(TWO)
    for rank in range(3):
        talk.end(0, rank)
    assert endings(talk.over(0, has_commit=True)) == {}
    ending = endings(talk.wait(91))[0]
    assert ending.code == 75
    assert "labB did not say how it ended" in ending.message


def test_who_restarts_while_the_others_end_waits_for_the_place_and_is_not_told_their_ending() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None)
    assert kinds(talk.claim(2, 1, 3, 4)) == [(2, "tell")]
    talk = Talk()
    talk.run(ONE)
    talk.over(0)
    assert talk.hub.phase is Phase.OVER
    assert kinds(talk.claim(1, 1, 0, 1)) == [(1, "tell")]


def test_after_a_loss_nobody_is_waited_for_as_long_as_after_a_stop_in_peace() -> None:
    def patience(**end: Any) -> float:
        talk = Talk()
        talk.run(TWO)
        talk.end(0, 0, **end)
        seconds = 0.0
        while not endings(talk.wait(5)):
            seconds += 5
        return seconds

    assert patience(code=None) < 30 < patience(code=75) < 120


def test_alone_a_node_may_load_as_long_as_it_likes() -> None:
    talk = Talk()
    talk.begin(ONE)
    assert talk.wait(100_000) == []
    talk = Talk()
    talk.begin(TWO)
    for rank in range(3):
        talk.say(0, "present", rank=rank, fields={})
    ending = endings(talk.wait(3600))[0]
    assert ending.message.startswith("labB did not answer in time while loading the data")


# Nonsense.


@pytest.mark.parametrize("claim", [{}, {"claim": {"host": "labC"}}, {"door": float("inf")}])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_claim_of_another_form_is_refused_alone(claim: Record, has_begun: bool) -> None:
    """Another version, or anybody else who holds the secret."""
    talk = Talk()
    if has_begun:
        talk.run(TWO)
    else:
        talk.claim(0, 3, 0, 4)
    full = {"claim": Claim("labC", 1, 1, 3, 4, None).to_record(), "address": "a", "door": 1, "fields": {}, "build": ""}
    said = talk.say(2, "claim", **({**full, **claim} if claim else {}))
    assert kinds(said) == [(2, "ending")]
    if not has_begun or "door" not in claim:
        assert said[0][1]["code"] in (1, 78)
    assert talk.hub.phase is (Phase.RUNNING if has_begun else Phase.GATHERING)


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "present", "rank": 0, "fields": {}},  # not its own rank
        {"kind": "present", "rank": "x", "fields": {}},
        {"kind": "end", "end": {"rank": 3}},
        {"kind": "over"},
        {"kind": "no such thing"},
        {},
    ],
)
def test_a_record_that_no_launcher_sends_ends_the_run_with_the_node_that_sent_it(record: Record) -> None:
    talk = Talk()
    talk.begin(TWO)
    talk.hub.handle(1, record, talk.now_s)
    ending = endings(talk.heard())[0]
    assert ending.code == 1
    assert ending.message.startswith("labB sent a")


def test_a_record_that_comes_too_late_changes_nothing() -> None:
    talk = Talk()
    talk.run(TWO)
    assert talk.say(1, "seen", is_shared=False) == []
    assert talk.say(1, "reached", failures=["x"]) == []
    assert talk.say(7, "ready") == []  # nobody who was let in
    assert talk.hub.phase is Phase.RUNNING
