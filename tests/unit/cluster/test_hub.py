"""The head's decisions, record by record: who is let in, what is asked of whom, and how a run ends on every node."""

from __future__ import annotations

from typing import Any

import pytest

from hetseq.cluster.membership.admission import Claim
from hetseq.cluster.membership.assignment import GenerationRanks
from hetseq.cluster.membership.coordinator import Coordinator, StartPhase
from hetseq.cluster.membership.decide import Report
from hetseq.cluster.membership.exit_status import Ending
from hetseq.cluster.membership.participants import TELL_EVERY_S
from hetseq.cluster.membership.regroup_rounds import ANSWER_S
from hetseq.cluster.membership.step_commit import Lineage

Record = dict[str, Any]
FIELDS = {"--lr": "0.1"}
ONE, TWO = [(2, 0, 2)], [(3, 0, 4), (1, 3, 4)]  # workers, first rank, world size


ENDS = ("min", "max")


class Talk:
    """A hub and what it said; launchers answer as told."""

    def __init__(self, *, join_timeout_s: float = 60.0, quiet_s: float = 0.0) -> None:
        paste = "hetseq train --distributed-rank 0"
        self.hub = Coordinator(join_timeout_s=join_timeout_s, paste=paste, now_s=0.0, quiet_s=quiet_s)
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

    def claim(
        self, member: int, workers: int, rank: int | None, world: int | None, **other: Any
    ) -> list[tuple[int, Record]]:
        host, limits = other.pop("host", f"lab{'ABCD'[member]}"), (other.pop(f"{each}_ranks", None) for each in ENDS)
        claim = Claim(host, 100 + member, workers, rank, world, *limits)
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
        return self.train(nodes)

    def train(self, nodes: list[tuple[int, int, int]]) -> list[tuple[int, Record]]:
        """From the workers' start to the first step."""
        for member, (workers, rank, _) in enumerate(nodes):
            for local in range(workers):
                said = self.say(member, "present", rank=rank + local, fields={"parameters": "weight"})
        assert [record["kind"] for _, record in said] == ["go"] * len(nodes)
        for member in range(len(nodes)):
            said = self.say(member, "ready")
        return said

    def end(
        self, member: int, rank: int, code: int | None = 0, starts: int = 0, is_restarting: bool = False, **other: Any
    ) -> list[tuple[int, Record]]:
        end = {"rank": rank, "exit_code": code if code is not None else -9, "code": code, "message": ""}
        end |= {"is_secondary": False, **other}
        return self.say(member, "end", end=end, starts=starts, is_restarting=is_restarting)

    def report(self, *ranks: int, generation: int = 0, step: int = 7, chain: int = 1) -> list[tuple[int, Record]]:
        """These ranks, first processes of the nodes in TWO, hold the state after this step."""
        report = Report("somebody", generation, Lineage(step, chain)).to_record()
        return [
            said for rank in ranks for said in self.say(rank // 3, "report", rank=rank, starts=0, report=report)
        ]  # fmt: skip

    def lose(self, member: int, why: str = "reset by peer") -> list[tuple[int, Record]]:
        """The channel to this member ends."""
        self.hub.gone(member, why, self.now_s)
        return self.heard()

    def finish(self, *ranks: int, code: int = 0, has_commit: bool = True) -> Ending:
        """These ranks, all that are left on labA, end in peace, and so does labA."""
        for rank in ranks:
            self.end(0, rank, code)
        self.over(0, has_commit=has_commit)
        assert self.hub.ending is not None
        return self.hub.ending

    def over(self, member: int, **other: Any) -> list[tuple[int, Record]]:
        return self.say(member, "over", **{"silent": [], "cut_short": "", "has_commit": False, **other})


def kinds(said: list[tuple[int, Record]]) -> list[tuple[int, str]]:
    return [(member, record["kind"]) for member, record in said]


def endings(said: list[tuple[int, Record]]) -> dict[int, Ending]:
    return {member: Ending(record["code"], record["message"]) for member, record in said if record["kind"] == "ending"}


# A start.


def test_a_hub_that_nobody_has_reached_waits_and_does_not_spin() -> None:
    """A thread that looks all the time would keep the launcher beside it from reading its own sources."""
    talk = Talk()
    assert talk.hub.tick(talk.now_s) >= 1.0
    talk.claim(0, *TWO[0])
    assert 0.0 < talk.hub.tick(talk.now_s) <= TELL_EVERY_S
    talk.lose(0)
    assert talk.hub.tick(talk.now_s) >= 1.0


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


def test_who_claims_a_rank_that_trains_goes_alone() -> None:
    talk = Talk()
    talk.run(TWO)
    said = talk.claim(2, 1, 3, 4)
    assert kinds(said) == [(2, "ending")]
    assert said[0][1]["code"] == 1
    assert "labC claims rank 3, which trains on labB" in said[0][1]["message"]
    assert talk.hub.phase is StartPhase.RUNNING


def test_who_comes_with_join_while_others_start_waits_until_they_train() -> None:
    talk = Talk()
    talk.begin(TWO)
    said = talk.claim(2, 1, None, None, min_ranks=4)
    assert kinds(said) == [(2, "tell")]
    assert said[0][1]["text"] == "the others are starting; labC joins once they train"
    assert [facts["kind"] for member, facts in talk.train(TWO) if member == 2] == ["tell", "see"]


def test_who_comes_with_a_rank_while_others_start_is_one_too_many() -> None:
    talk = Talk()
    talk.begin(TWO)
    ((_, facts),) = talk.claim(2, 1, 3, 4)
    assert facts["kind"] == "ending"
    assert "labC came while labA (3), labB (1) are starting, without it" in facts["message"]
    assert [member for member, _ in talk.train(TWO) if member == 2] == []


def test_who_waits_for_others_to_train_and_leaves_is_forgotten() -> None:
    talk = Talk()
    talk.begin(TWO)
    talk.claim(2, 1, None, None, min_ranks=4)
    talk.hub.gone(2, "it left", talk.now_s)
    assert [member for member, _ in talk.train(TWO) if member == 2] == []


def test_who_comes_later_with_other_options_goes_alone() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None)
    talk.report(0, 1, 2)
    said = talk.claim(2, 1, 3, 4, fields={"--lr": "0.2"})
    assert kinds(said) == [(2, "ending")]
    assert said[0][1]["code"] == 78
    assert talk.hub.phase is StartPhase.RUNNING


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


def test_ranks_that_another_program_starts_are_not_missed_for_half_a_minute() -> None:
    talk = Talk(join_timeout_s=60, quiet_s=30)
    talk.claim(0, 1, 0, 2)
    assert [len(talk.wait(seconds)) for seconds in (0, 10, 10, 9, 1, 10)] == [0, 0, 0, 0, 1, 1]


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
    assert "rank 1 is not claimed yet" in end((1, 0), (2, 2)).message
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


# While they train: who is lost, and who goes on.


def test_a_rank_that_is_killed_is_missed_by_the_others_and_they_go_on_to_the_end() -> None:
    talk = Talk()
    talk.run(TWO)
    said = talk.end(1, 3, None)
    assert said == [(0, {"kind": "freeze", "rank": rank, "starts": 0, "generation": 0}) for rank in range(3)]
    said = talk.report(0, 1, 2)
    assert kinds(said) == [(0, "record")] * 3
    assert [record["rank"] for _, record in said] == [0, 1, 2]
    record = said[0][1]
    crew = GenerationRanks(1, (0, 1, 2), ("labA",) * 3, ((0, 1, 2),), is_only_node=True, addresses=("10.0.0.0",))
    assert GenerationRanks.from_record(record["crew"]) == crew
    assert (
        record["story"] == "rank 3 on labB was killed (SIGKILL, as the kernel does when memory runs out) [worker-died]"
    )
    assert record["record"]["roster"] == ("0.0", "1.0", "2.0")
    assert talk.over(1) == [], "labB has nobody left, and the others train"
    assert talk.hub.phase is StartPhase.RUNNING
    assert talk.finish(0, 1, 2) == Ending(0)


def test_a_node_that_falls_silent_takes_its_ranks_along_and_the_others_go_on() -> None:
    talk = Talk()
    talk.run(TWO)
    assert kinds(talk.lose(1)) == [(0, "freeze")] * 3
    said = talk.report(0, 1, 2)
    assert said[0][1]["story"] == "the connection to labB was lost (reset by peer)"
    assert talk.finish(0, 1, 2) == Ending(0)


def test_a_node_that_falls_silent_is_named_if_the_others_are_lost_with_it() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.lose(1)
    for rank in range(3):
        said = talk.end(0, rank, 75, message="lost a peer", is_secondary=True)
    assert [record["is_polite"] for _, record in said if record["kind"] == "ebb"] == [False]
    ending = endings(talk.over(0, has_commit=True))[0]
    assert ending.code == 75
    assert ending.message.startswith("the connection to labB was lost (reset by peer)")
    assert "the same command resumes" in ending.message


def test_who_is_silent_is_fenced_and_its_end_is_no_reason_for_anything() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.report(0, 1, 2)
    said = talk.wait(ANSWER_S + 0.1)
    assert kinds(said) == [(1, "fence"), (0, "record"), (0, "record"), (0, "record")]
    assert said[0][1] == {"kind": "fence", "rank": 3, "starts": 0}
    assert talk.end(1, 3, None) == []
    talk.over(1)
    assert talk.lose(1) == []
    assert talk.finish(0, 1, 2) == Ending(0)


def test_who_answers_a_freeze_is_waited_for() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.report(0, 1, 2)
    talk.say(1, "frozen", rank=3, starts=0, patience_s=20.0)
    assert talk.wait(ANSWER_S + 0.1) == []
    assert kinds(talk.report(3)) == [(0, "record")] * 3 + [(1, "record")]


def test_a_worker_that_is_started_again_is_let_in_after_a_step() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None, is_restarting=True)
    talk.report(0, 1, 2)
    said = talk.say(1, "present", rank=3, starts=1, fields={"parameters": "weight"})
    assert said == [
        (1, {"kind": "go", "rank": 3, "starts": 1}),
        (0, {"kind": "wish", "rank": 0, "starts": 0, "generation": 1, "what": "CHANGE"}),
    ]
    said = talk.report(0, 1, 2, generation=1)
    assert kinds(said)[-4:] == [(0, "record")] * 3 + [(1, "record")]
    assert (said[-1][1]["starts"], said[-1][1]["story"]) == (1, "rank 3 on labB is back")
    assert said[-1][1]["record"]["fresh"] == ["3.1"]
    talk.end(1, 3, starts=1)
    talk.over(1)
    assert talk.finish(0, 1, 2) == Ending(0)


def test_a_worker_that_is_started_again_to_train_something_else_is_sent_away() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None, is_restarting=True)
    talk.report(0, 1, 2)
    said = talk.say(1, "present", rank=3, starts=1, fields={"parameters": "bias"})
    assert kinds(said) == [(1, "dismiss")]
    assert "rank 3 now" in said[0][1]["why"]
    assert talk.end(1, 3, 75, starts=1, message="the nodes do not agree", is_secondary=True) == []
    talk.over(1)
    assert talk.finish(0, 1, 2) == Ending(0)


@pytest.mark.parametrize("has_come", [False, True])
def test_a_replacement_that_dies_before_it_takes_part_changes_nothing(has_come: bool) -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None, is_restarting=True)
    talk.report(0, 1, 2)
    if has_come:
        talk.say(1, "present", rank=3, starts=1, fields={"parameters": "weight"})
    assert talk.end(1, 3, None, starts=1) == []
    assert talk.over(1) == []
    assert talk.hub.phase is StartPhase.RUNNING
    assert talk.finish(0, 1, 2) == Ending(0)


def test_a_run_that_has_lost_all_its_workers_begins_again_with_those_that_are_started_again() -> None:
    talk = Talk()
    talk.run(ONE)
    talk.end(0, 0, None, is_restarting=True)
    assert talk.end(0, 1, None, is_restarting=True) == []
    assert kinds(talk.say(0, "present", rank=1, starts=1, fields={"parameters": "weight"})) == [(0, "go")]
    said = talk.say(0, "present", rank=0, starts=1, fields={"parameters": "weight"})
    assert kinds(said) == [(0, "go"), (0, "record"), (0, "record")]
    assert said[-1][1]["record"]["base"] is None
    for rank in range(2):
        talk.end(0, rank, starts=1)
    assert endings(talk.over(0)) == {0: Ending(0)}


@pytest.mark.parametrize("has_commit", [False, True])
def test_a_run_that_has_lost_all_its_workers_for_good_can_go_on_from_a_commit(has_commit: bool) -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None)
    talk.over(1, has_commit=has_commit)
    talk.report(0, 1, 2)
    for rank in range(3):
        said = talk.end(0, rank, None)
    assert [record["is_polite"] for _, record in said if record["kind"] == "ebb"] == [False, False]
    ending = endings(talk.over(0, has_commit=has_commit))[1]
    assert ending.code == (75 if has_commit else 1)
    assert ending.message.startswith("rank 0 on labA was killed")


def test_a_run_whose_last_hope_does_not_come_ends() -> None:
    talk = Talk()
    talk.run(ONE)
    talk.end(0, 0, None)
    talk.end(0, 1, None, is_restarting=True)
    assert talk.hub.phase is StartPhase.RUNNING
    assert kinds(talk.end(0, 1, None, starts=1)) == [(0, "ebb")]
    assert endings(talk.over(0, has_commit=True))[0].code == 75


def test_a_step_that_crashes_one_process_after_another_ends_the_run_with_the_crash() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None, exit_code=-11)
    assert kinds(talk.report(0, 1, 2)) == [(0, "record")] * 3
    talk.end(0, 2, None, exit_code=-11)
    said = talk.report(0, 1, generation=1)
    assert [record["is_polite"] for _, record in said if record["kind"] == "ebb"] == [False, False]
    for rank in range(2):
        talk.end(0, rank, 75, message="the run is ending", is_secondary=True)
    talk.over(1)
    ending = endings(talk.over(0, has_commit=True))[0]
    assert ending.code == 1, "a queue would start it again and again"
    assert ending.message.startswith("rank 2 on labA crashed (SIGSEGV)")


# Nodes that come later.


def late(talk: Talk, member: int = 2, rank: int | None = 3) -> list[tuple[int, Record]]:
    """labC comes with one worker, for this rank or (None) with --join, and shares the run directory."""
    said = talk.claim(member, 1, rank, None if rank is None else 4, min_ranks=1 if rank is None else None)
    assert kinds(said) == [(member, "tell"), (member, "see")]
    return talk.say(member, "seen", is_shared=True)


@pytest.mark.parametrize(("most", "word"), [(3, "ending"), (4, "tell")])
def test_a_node_that_comes_later_counts_too_for_max_ranks(most: int, word: str) -> None:
    talk = without_rank_three()
    (_, record), *_ = talk.claim(2, 1, None, None, min_ranks=1, max_ranks=most)
    assert record["kind"] == word
    if word == "ending":
        assert "labC pid 102 would make it 4 ranks, and --max-ranks is 3" in record["message"]
    assert talk.hub.phase is StartPhase.RUNNING


def without_rank_three() -> Talk:
    """A run whose labB has lost its rank for good; labA trains."""
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None)
    talk.over(1)
    talk.report(0, 1, 2)
    return talk


def test_a_node_whose_ranks_are_gone_may_come_back_and_take_part() -> None:
    talk = without_rank_three()
    begin, begun = late(talk)
    assert (begin[0], begin[1]["kind"], begun[1]["kind"]) == (2, "begin", "begun")
    facts = {name: begin[1][name] for name in ("first_rank", "starts", "path", "addresses")}
    assert facts == {"first_rank": 3, "starts": [1], "path": "/run", "addresses": ["10.0.0.0", "10.0.0.1", "10.0.0.2"]}
    assert kinds(talk.say(2, "present", rank=3, starts=1, fields={"parameters": "weight"})) == [(2, "go"), (0, "wish")]
    said = talk.report(0, 1, 2, generation=1)
    assert kinds(said)[-1] == (2, "record")
    crew = GenerationRanks.from_record(said[-1][1]["crew"])
    assert (crew.slots, crew.nodes) == ((0, 1, 2, 3), ("labA", "labA", "labA", "labC"))
    talk.end(2, 3, starts=1)
    talk.over(2)
    assert talk.finish(0, 1, 2) == Ending(0)


def test_a_node_that_comes_to_join_gets_the_next_rank() -> None:
    talk = Talk()
    talk.run(TWO)
    (_, begin), _ = late(talk, rank=None)
    assert (begin["first_rank"], begin["starts"]) == (4, [0])
    assert kinds(talk.say(2, "present", rank=4, starts=0, fields={"parameters": "weight"})) == [(2, "go"), (0, "wish")]
    said = talk.report(0, 1, 2, 3)
    assert kinds(said)[-2:] == [(1, "record"), (2, "record")]
    assert said[-1][1]["story"] == "rank 4 on labC is new"


def test_a_late_node_without_a_worker_that_lives_changes_nothing() -> None:
    talk = without_rank_three()
    late(talk)
    assert talk.end(2, 3, None, starts=1) == []
    talk.over(2)
    assert talk.finish(0, 1, 2) == Ending(0)


# FAULT: a late node that goes before its workers start has slots that `worker_roster` has never heard of: KeyError in
# `gone` ends the hub's thread; in `refused` it ends the run, "sent an invalid 'refused' record".
@pytest.mark.parametrize("how", ["gone", "refused"])
def test_a_node_that_comes_to_join_and_cannot_goes_alone(how: str) -> None:
    talk = Talk()
    talk.run(TWO)
    talk.claim(2, 1, None, None, min_ranks=1)
    if how == "gone":
        talk.lose(2)
    else:
        talk.say(2, "refused", code=2, message="--save-dir /run is a file")
    assert talk.hub.phase is StartPhase.RUNNING
    talk.end(1, 3)
    talk.over(1)
    assert talk.finish(0, 1, 2) == Ending(0)


# FAULT: it stays among those that are on their way, so its ranks are taken for as long as the run lasts.
def test_a_late_node_that_went_before_it_began_may_come_again() -> None:
    talk = without_rank_three()
    talk.claim(2, 1, 3, 4)
    talk.lose(2)
    assert kinds(talk.claim(3, 1, 3, 4, host="labC")) == [(3, "tell"), (3, "see")]


# FAULT: `ebb` means nothing to a launcher without workers, and what it answers is heard in RUNNING alone: the run waits
# 90 s for its last word, and then ends with 75, "labC did not say how it ended".
def test_a_late_node_that_has_not_begun_does_not_keep_those_that_end() -> None:
    talk = without_rank_three()
    talk.claim(2, 1, 3, 4)
    assert talk.finish(0, 1, 2) == Ending(0)


# FAULT: the seat of the old launcher is gone, so it is told of nothing any more: it waits for an end that it never
# hears, and tells its user another one when the channel closes.
def test_the_launcher_whose_place_another_one_has_taken_hears_the_end_too() -> None:
    talk = without_rank_three()
    late(talk)
    talk.say(2, "present", rank=3, starts=1, fields={"parameters": "weight"})
    talk.report(0, 1, 2, generation=1)
    talk.end(2, 3, starts=1)
    talk.over(2)
    for rank in range(3):
        talk.end(0, rank)
    assert endings(talk.over(0)) == dict.fromkeys(range(3), Ending(0))


def powered_off_and_back(rank: int | None = 3) -> Talk:
    """labB lost its power, so its connection did not end; the others continue, and labB starts the command again."""
    talk = Talk()
    talk.run(TWO)
    talk.report(0, 1, 2)
    talk.wait(ANSWER_S + 0.1)
    world, least = (None, 1) if rank is None else (4, None)
    said = talk.claim(2, 1, rank, world, min_ranks=least, host="labB")
    assert kinds(said) == [(1, "ending"), (2, "tell"), (2, "see")]
    (gone, _) = endings(said).popitem()[1].code, talk.say(2, "seen", is_shared=True)
    assert gone == 75
    return talk


# FAULT: the old launcher has no seat any more, and a search for its ranks ended the hub's thread: StopIteration in
# `gone`, when the kernel at last gave the old connection up, or when a launcher that was cut off spoke again.
@pytest.mark.parametrize("rank", [3, None], ids=["given rank", "join"])
def test_a_node_that_is_back_before_its_old_connection_has_ended_takes_its_own_place(rank: int | None) -> None:
    talk = powered_off_and_back(rank)
    assert talk.lose(1, "Connection timed out") == []
    assert talk.hub.phase is StartPhase.RUNNING
    talk.say(2, "present", rank=3, starts=1, fields={"parameters": "weight"})
    assert kinds(talk.report(0, 1, 2, generation=1))[-1] == (2, "record")
    talk.end(2, 3, starts=1)
    talk.over(2)
    assert talk.finish(0, 1, 2) == Ending(0)


def test_a_launcher_whose_place_was_taken_while_it_was_cut_off_is_not_heard_any_more() -> None:
    talk = powered_off_and_back()
    assert talk.say(1, "present", rank=3, starts=0, fields={"parameters": "weight"}) == []
    assert talk.say(1, "leave") == []
    assert talk.end(1, 3, None) == []
    assert talk.over(1, cut_short="SIGTERM") == []
    assert talk.hub.phase is StartPhase.RUNNING


# Leaving.


def test_a_node_that_is_asked_to_go_goes_after_a_step_and_the_others_go_on() -> None:
    talk = Talk()
    talk.run(TWO)
    assert talk.say(1, "leave") == []
    assert talk.wait(5.1) == [(1, {"kind": "wish", "rank": 3, "what": "LEAVE"})]
    said = talk.end(1, 3, 75, message="left after step 7", has_left=True)
    assert kinds(said) == [(0, "freeze")] * 3
    assert talk.over(1, has_commit=True) == []
    assert talk.lose(1, "closed") == []
    assert talk.report(0, 1, 2)[0][1]["story"] == "rank 3 on labB has left"
    assert talk.finish(0, 1, 2) == Ending(0)


def test_who_leaves_may_say_so_after_the_others_have_gone_on() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.say(1, "leave")
    talk.wait(5.1)
    talk.report(0, 1, 2)
    talk.say(1, "frozen", rank=3, starts=0, patience_s=0.1)
    talk.wait(ANSWER_S + 0.1)
    assert talk.end(1, 3, 75, message="left after step 7", has_left=True) == []
    talk.over(1)
    assert talk.finish(0, 1, 2) == Ending(0)


def test_one_rank_may_be_asked_to_go_also_one_beside_the_hub() -> None:
    talk = Talk()
    talk.run(TWO)
    assert talk.say(0, "leave", rank=2) == []
    assert talk.wait(5.1) == [(0, {"kind": "wish", "rank": 2, "what": "LEAVE"})]


def test_if_the_node_with_the_hub_is_asked_to_go_all_stop() -> None:
    talk = Talk()
    talk.run(TWO)
    said = talk.say(0, "leave")
    assert [(member, record["rank"], record["what"]) for member, record in said] == [
        (0, 0, "STOP"), (0, 1, "STOP"), (0, 2, "STOP"), (1, 3, "STOP"),
    ]  # fmt: skip


# Ends.


def test_a_run_that_ends_well_ends_with_zero_on_all_nodes_once_all_have_told() -> None:
    talk = Talk()
    talk.run(TWO)
    assert [record["is_polite"] for _, record in talk.end(1, 3)] == [True, True]
    assert talk.over(1) == []
    for rank in range(3):
        assert talk.end(0, rank) == []
    assert endings(talk.over(0)) == dict.fromkeys((0, 1), Ending(0))


def test_an_exception_of_the_task_ends_the_run_and_is_told_to_all_nodes_with_rank_and_host() -> None:
    talk = Talk()
    talk.run(TWO)
    secondary = {"message": "lost a peer", "is_secondary": True}
    assert kinds(talk.end(0, 0, 75, **secondary)) == [(0, "freeze"), (0, "freeze"), (1, "freeze")]
    talk.end(0, 1, 75, **secondary)
    said = talk.end(1, 3, 1, message="ValueError: no")
    assert [record["is_polite"] for _, record in said] == [False, False]
    talk.over(1)
    assert talk.report(2) == [(0, {"kind": "dismiss", "rank": 2, "why": "the run is ending"})]
    talk.end(0, 2, 75, **secondary)
    said = endings(talk.over(0, has_commit=True))
    assert said == dict.fromkeys((0, 1), Ending(1, "rank 3 on labB: ValueError: no"))


def test_a_failure_ends_a_run_that_was_about_to_survive_a_loss() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None)
    assert kinds(talk.end(0, 1, 1, message="ValueError: no")) == [(0, "ebb"), (1, "ebb")]
    talk.over(1)
    for rank in (0, 2):
        talk.end(0, rank, 75, message="the run is ending", is_secondary=True)
    assert endings(talk.over(0, has_commit=True))[0] == Ending(1, "rank 1 on labA: ValueError: no")


def test_a_stop_of_all_is_a_stop_in_peace() -> None:
    talk = Talk()
    talk.run(TWO)
    said = talk.end(1, 3, 75, message="stopped after step 7; the same command resumes from step 7")
    assert [record["is_polite"] for _, record in said] == [True, True]
    talk.over(1, has_commit=True)
    for rank in range(3):
        talk.end(0, rank, 75, message="stopped after step 7; the same command resumes from step 7")
    said = endings(talk.over(0, has_commit=True))
    assert said[1] == Ending(75, "stopped after step 7; the same command resumes from step 7")


def test_who_loses_a_peer_while_the_others_end_in_peace_comes_to_its_end_too() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(0, 0)
    talk.end(1, 3, None)
    assert kinds(talk.report(1, 2)) == [(0, "record")] * 2
    talk.over(1)
    assert talk.finish(1, 2) == Ending(0)


def test_a_launcher_that_was_stopped_at_once_gives_the_reason_if_nobody_is_left() -> None:
    talk = Talk()
    talk.run(ONE)
    said = talk.over(0, cut_short="stopped at once by a second signal (SIGINT)", silent=[0, 1])
    assert endings(said)[0] == Ending(130, "stopped at once by a second signal (SIGINT); nothing had been saved yet")


def test_a_launcher_that_never_reports_its_end_does_not_keep_the_others() -> None:
    talk = Talk()
    talk.run(TWO)
    for rank in range(3):
        talk.end(0, rank)
    assert endings(talk.over(0, has_commit=True)) == {}
    assert endings(talk.wait(89)) == {}
    ending = endings(talk.wait(2))[0]
    assert ending.code == 75
    assert "labB did not say how it ended" in ending.message


# FAULT: that a node was stopped at once is told as the end of the run, though the others have finished it.
def test_a_node_that_is_stopped_at_once_among_several_is_a_loss_like_any_other() -> None:
    talk = Talk()
    talk.run(TWO)
    assert (
        kinds(talk.over(1, cut_short="stopped at once by a second signal (SIGINT)", silent=[3])) == [(0, "freeze")] * 3
    )
    talk.report(0, 1, 2)
    assert talk.finish(0, 1, 2) == Ending(0)


# FAULT: a connection that is lost when its ranks are lost already is no reason for a new record, so nothing clears it,
# and a run that has come to its end ends with 75, "the connection to labB was lost".
@pytest.mark.parametrize("is_restarting", [False, True])
def test_a_node_that_goes_after_its_ranks_have_gone_is_no_reason_for_anything(is_restarting: bool) -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None, is_restarting=is_restarting)
    talk.report(0, 1, 2)
    assert talk.lose(1) == []
    assert talk.finish(0, 1, 2) == Ending(0)


# FAULT: in an end that is none in peace a lost channel still goes to the crews; their record, which nobody heeds, makes
# the hub forget the failure that ended the run: 75 in place of 1, so that a queue starts it again and again.
def test_a_node_that_goes_while_the_run_ends_of_a_failure_does_not_hide_the_failure() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.report(0, 1, 2)
    assert kinds(talk.end(1, 3, 1, message="ValueError: no")) == [(0, "ebb"), (1, "ebb")]
    assert talk.lose(1) == []
    for rank in range(3):
        talk.end(0, rank, 75, message="the run is ending", is_secondary=True)
    assert endings(talk.over(0, has_commit=True))[0] == Ending(1, "rank 3 on labB: ValueError: no")


# FAULT: while others end in peace a failure is forgotten with the next record, and the run ends with 0.
def test_a_failure_while_the_others_end_in_peace_is_told() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(0, 0)
    talk.end(1, 3, 1, message="OSError: disk full")
    talk.over(1)
    talk.report(1, 2)
    talk.wait(ANSWER_S + 0.1)
    for rank in (1, 2):
        talk.end(0, rank)
    assert endings(talk.over(0, has_commit=True))[0] == Ending(1, "rank 3 on labB: OSError: disk full")


# FAULT: nobody tells a replacement that there is nothing left to take part in; its launcher, and with it the run, waits
# a minute for it.
@pytest.mark.parametrize("has_come", [False, True])
def test_a_replacement_that_waits_while_the_others_end_in_peace_is_sent_away(has_come: bool) -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, None, is_restarting=True)
    talk.report(0, 1, 2)
    present = {"rank": 3, "starts": 1, "fields": {"parameters": "weight"}}
    said = talk.say(1, "present", **present) if has_come else []
    for rank in range(3):
        said += talk.end(0, rank)
    said += talk.over(0, has_commit=True)
    if not has_come:
        said += talk.say(1, "present", **present)
    assert (1, "dismiss") in kinds(said)


# FAULT: SplitBrainError is none of the errors that `handle` expects: it ends the hub's thread, and all nodes hear
# "the coordinator failed" in place of what it says.
def test_histories_that_differ_end_the_run_on_all_nodes_with_the_reason() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.report(0, 1, 2, chain=1)
    ending = endings(talk.report(3, chain=2))[1]
    assert ending.code == 1
    assert "different histories of step 7" in ending.message


def test_who_restarts_while_the_others_end_waits_for_the_place_and_is_not_told_their_ending() -> None:
    talk = Talk()
    talk.run(TWO)
    talk.end(1, 3, 1)
    assert kinds(talk.claim(2, 1, 3, 4)) == [(2, "tell")]
    talk = Talk()
    talk.run(ONE)
    talk.over(0)
    assert talk.hub.phase is StartPhase.OVER
    assert kinds(talk.claim(1, 1, 0, 1)) == [(1, "tell")]


def test_after_a_failure_nobody_is_waited_for_as_long_as_after_a_stop_in_peace() -> None:
    def patience(code: int) -> float:
        talk = Talk()
        talk.run(TWO)
        talk.end(0, 0, code)
        seconds = 0.0
        while not endings(talk.wait(5)):
            seconds += 5
            assert seconds < 1000
        return seconds

    assert patience(code=1) < 30 < patience(code=75) < 120


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
    assert talk.hub.phase is (StartPhase.RUNNING if has_begun else StartPhase.GATHERING)


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
    assert talk.hub.phase is StartPhase.RUNNING
