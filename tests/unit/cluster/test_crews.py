"""From generations to workers and words: who is where, what users are told, who is let in again, who leaves when."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from hetseq.cluster.membership.assignment import GenerationRanks
from hetseq.cluster.membership.compatibility import PART
from hetseq.cluster.membership.decide import Record, Report
from hetseq.cluster.membership.exit_status import WorkerEnd
from hetseq.cluster.membership.regroup_rounds import ANSWER_S
from hetseq.cluster.membership.step_commit import Lineage, Wish
from hetseq.cluster.membership.worker_roster import Crews, Site
from hetseq.cluster.rendezvous.leader_election import Standing
from hetseq.launch.launcher_link import LauncherLink

Told = list[tuple[int, str, dict[str, Any]]]
FIELDS = {"parameters": "weight", "--lr": "0.1"}
#: rank 0 and 1 on labA, 2 and 3 on labB, which has a run directory of its own
LAB_A, LAB_B = Site("labA", 0, 0, "10.0.0.1"), Site("labB", 1, 1, "10.0.0.2")
TWO_NODES = {0: LAB_A, 1: LAB_A, 2: LAB_B, 3: LAB_B}
KILLED = " was killed (SIGKILL, as the kernel does when memory runs out) [worker-died]"


class Run:
    """Crews of some sites, and what they were told; `now_s` is the clock."""

    def __init__(
        self,
        sites: dict[int, Site] | None = None,
        *,
        min_ranks: int = 1,
        wait_s: float = 30.0,
        parts: dict[int, str] | None = None,
    ) -> None:
        sites = sites or TWO_NODES
        presented = {slot: FIELDS | ({PART: parts[slot]} if parts else {}) for slot in sites}
        self.crews = Crews(sites, presented, min_ranks=min_ranks, wait_s=wait_s)
        self.now_s, self.starts = 100.0, dict.fromkeys(sites, 0)

    def report(self, *slots: int, generation: int | None = None, step: int = 7) -> Told:
        of = self.crews.generation if generation is None else generation
        report = Report("somebody", of, Lineage(step, 99)).to_record()
        return [entry for slot in slots for entry in self.say(slot, "report", report=report)]

    def say(self, slot: int, kind: str, **facts: Any) -> Told:
        self.crews.handle(slot, {"kind": kind, "starts": self.starts[slot], **facts}, self.now_s)
        return self.told()

    def end(self, slot: int, *, is_restarting: bool = False, exit_code: int = -9, **other: Any) -> Told:
        end = WorkerEnd(slot, exit_code, **other)
        self.crews.left(end, self.starts[slot], is_restarting=is_restarting, now_s=self.now_s)
        self.starts[slot] += is_restarting
        return self.told()

    def come_back(self, slot: int, fields: dict[str, str] = FIELDS) -> Told:
        return self.say(slot, "present", fields=fields)

    def leave(self, *slots: int, is_everybody: bool = False) -> Told:
        self.crews.leave(slots, is_everybody=is_everybody, now_s=self.now_s)
        return self.told()

    def wait(self, seconds: float) -> Told:
        self.now_s += seconds
        self.crews.tick(self.now_s)
        return self.told()

    def told(self) -> Told:
        said, self.crews.outbox[:] = list(self.crews.outbox), []
        for slot, kind, facts in said:
            if kind == "record":
                heard = {"kind": "heard", "starts": facts["starts"], "generation": facts["record"]["generation"]}
                self.crews.handle(slot, heard, self.now_s)
        return said


def kinds(told: Told) -> list[tuple[int, str]]:
    return [(slot, kind) for slot, kind, _ in told]


def wishes(told: Told) -> list[tuple[int, str]]:
    return [(slot, facts["what"]) for slot, kind, facts in told if kind == "wish"]


def crew_of(told: Told) -> GenerationRanks:
    """Of the records that were sent, which all say the same."""
    crews = [GenerationRanks.from_record(facts["crew"]) for _, kind, facts in told if kind == "record"]
    assert len(crews) == len(crews[0].slots)
    assert all(crew == crews[0] for crew in crews)
    return crews[0]


def story_of(told: Told) -> str:
    stories = {facts["story"] for _, kind, facts in told if kind == "record"}
    assert len(stories) == 1
    return str(stories.pop())


# Who is where.


def test_a_record_goes_to_each_process_with_the_crew_that_it_means() -> None:
    run = Run()
    run.end(1)
    told = run.report(0, 2, 3)
    assert kinds(told)[-3:] == [(0, "record"), (2, "record"), (3, "record")]
    crew = GenerationRanks(1, (0, 2, 3), ("labA", "labB", "labB"), ((0,), (1, 2)), False, ("10.0.0.1", "10.0.0.2"))
    assert crew_of(told) == crew
    facts = told[-1][2]
    assert facts["starts"] == 0
    assert Record.from_record(facts["record"]).roster == ("0.0", "2.0", "3.0")


def test_when_one_node_is_left_its_ranks_know_it() -> None:
    run = Run()
    run.end(2)
    run.end(3)
    assert crew_of(run.report(0, 1)) == GenerationRanks(1, (0, 1), ("labA", "labA"), ((0, 1),), True, ("10.0.0.1",))


def test_nodes_that_share_a_directory_are_one_part_whatever_order_their_ranks_have() -> None:
    sites = {0: Site("labA", 0, 0), 1: Site("labB", 1, 1), 2: Site("labC", 0, 2), 3: Site("labD", 1, 3)}
    run = Run(sites)
    run.end(0)
    assert crew_of(run.report(1, 2, 3)).parts == ((0, 2), (1,))


def test_a_process_is_meant_by_its_slot_and_by_how_often_that_was_started() -> None:
    run = Run()
    run.end(2, is_restarting=True)
    run.report(0, 1, 3)
    assert run.come_back(2)[0] == (2, "go", {"starts": 1})
    told = run.report(0, 1, 3)
    assert crew_of(told).slots == (0, 1, 2, 3)
    assert [facts["starts"] for slot, kind, facts in told if kind == "record"] == [0, 0, 1, 0]
    run.starts[2] = 0
    assert run.report(2) == [], "the one before it has no word any more"


def test_who_is_silent_is_fenced_by_its_process() -> None:
    run = Run()
    run.end(2, is_restarting=True)
    run.report(0, 1, 3)
    run.come_back(2)
    run.report(0, 1, 3)
    run.report(0, 1, 3)
    assert run.wait(ANSWER_S + 0.1)[0] == (2, "fence", {"starts": 1})


def test_who_answers_a_freeze_is_waited_for() -> None:
    run = Run()
    assert kinds(run.report(0)) == [(1, "freeze"), (2, "freeze"), (3, "freeze")]
    run.report(1, 2)
    run.say(3, "frozen", patience_s=20.0)
    assert run.wait(20.0) == []
    assert run.crews.tick(run.now_s) == pytest.approx(0.5)
    assert (3, "fence") in kinds(run.wait(0.6))


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "report", "starts": 0},
        {"kind": "report", "starts": 0, "report": 5},
        {"kind": "report", "starts": "x", "report": {}},
        {"kind": "frozen", "starts": 0},
        {"kind": "frozen", "starts": 0, "patience_s": "long"},
        {"kind": "present", "starts": 0, "fields": 5},
        {"kind": "report"},
    ],
)
def test_what_no_worker_says_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Run().crews.handle(0, record, 100.0)


# Words.


def test_the_story_says_what_has_happened_since_the_last_record() -> None:
    run = Run()
    run.end(1)
    run.end(3, exit_code=75, code=75, has_left=True)
    assert story_of(run.report(0, 2)) == f"rank 1 on labA{KILLED}; rank 3 on labB has left"
    run.end(2, exit_code=75, code=75, is_secondary=True, message="lost a peer")
    assert story_of(run.report(0)) == "rank 2 on labB: lost a peer"


def test_the_story_of_who_fell_silent_is_told_with_the_record_that_leaves_it_out() -> None:
    run = Run()
    run.report(0, 1, 3)
    told = run.wait(ANSWER_S + 0.1)
    assert kinds(told)[0] == (2, "fence")
    assert story_of(told) == "rank 2 on labB fell silent [worker-silent]"


STANDS = {
    "phase": "reading data (loader)", "step": 1204, "for_s": 30.0, "is_waiting": False, "deadline_s": 20.0,
    "device": "cuda:0", "process": "", "stacks": "RUN/stacks/rank-2-step-1204.txt",
}  # fmt: skip


def test_who_fell_silent_is_named_with_what_it_did_and_for_how_long() -> None:
    run = Run()
    run.report(0, 1, 3)
    run.say(2, "stands", **STANDS)
    told = run.wait(ANSWER_S + 0.1)
    assert story_of(told) == (
        "rank 2 on labB fell silent, last seen on cuda:0 in step 1,204, reading data (loader) for 32 s;"
        " what its threads do: RUN/stacks/rank-2-step-1204.txt [worker-silent]"
    )


def test_who_reports_last_when_nobody_was_lost_has_kept_the_others_waiting() -> None:
    run = Run()
    run.report(0, 1, 3)
    for slot in (0, 1):
        run.say(slot, "stands", **{**STANDS, "is_waiting": True})
    run.say(3, "stands", **{**STANDS, "for_s": 19.0})
    run.say(2, "stands", **STANDS)
    run.say(2, "frozen", patience_s=20.0)
    run.wait(ANSWER_S + 0.1)
    assert story_of(run.report(2)).startswith("rank 2 on labB kept the others waiting, last seen on cuda:0 in step")
    run.report(0, 1, 3)
    assert story_of(run.report(2)) == "", "of the round before nothing is left"


def test_nobody_is_blamed_for_a_round_in_which_somebody_was_lost() -> None:
    run = Run()
    run.say(2, "stands", **STANDS)
    run.end(1)
    assert story_of(run.report(0, 2, 3)) == f"rank 1 on labA{KILLED}"


def test_what_no_launcher_would_say_of_a_worker_is_refused() -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Run().say(2, "stands", step="soon")


def test_who_comes_back_is_told_of() -> None:
    run = Run()
    run.end(2, is_restarting=True)
    run.report(0, 1, 3)
    run.come_back(2)
    assert story_of(run.report(0, 1, 3)) == "rank 2 on labB is back"


def test_ranks_out_of_reach_are_told_of_with_the_reason_and_others_of_that_node_are_not() -> None:
    run = Run()
    run.end(3)
    run.report(0, 1, 2)
    for slot in (2, 3):
        run.crews.gone(slot, "the connection to labB was lost", run.now_s)
    assert kinds(run.told()) == [(0, "freeze"), (1, "freeze")]
    assert story_of(run.report(0, 1)) == "the connection to labB was lost"
    assert run.crews.living == {0, 1}


# FAULT: each of the ranks that a lost connection takes along adds the same sentence to the story.
def test_a_lost_node_of_two_ranks_is_told_of_once() -> None:
    run = Run()
    for slot in (2, 3):
        run.crews.gone(slot, "the connection to labB was lost", run.now_s)
    run.told()
    assert story_of(run.report(0, 1)) == "the connection to labB was lost"


# FAULT: a record that is sent again takes the story of the next one along, and then there is none left to tell.
def test_a_record_that_is_sent_again_does_not_use_up_the_story_of_the_next_one() -> None:
    run = Run()
    run.report(0, 1, 2, 3)
    run.end(3)
    assert kinds(run.report(0, generation=0)) == [(0, "record")]
    assert story_of(run.report(0, 1, 2)) == f"rank 3 on labB{KILLED}"


def test_a_record_that_is_sent_again_comes_with_the_crew_that_it_was_made_for() -> None:
    run = Run()
    first = crew_of(run.report(0, 1, 2, 3))
    run.end(3)
    again = run.report(0, generation=0)
    assert GenerationRanks.from_record(again[0][2]["crew"]) == first


# Replacements.


def test_a_replacement_that_would_train_something_else_is_sent_away_and_not_waited_for() -> None:
    run = Run()
    run.end(2, is_restarting=True)
    run.report(0, 1, 3)
    told = run.come_back(2, {**FIELDS, "--lr": "0.2"})
    assert kinds(told) == [(2, "dismiss")]
    assert told[0][2]["starts"] == 1
    assert all(word in told[0][2]["why"] for word in ("rank 2 at first", "rank 2 now", "--lr", "0.1", "0.2"))
    assert crew_of(run.report(0, 1, 3)).slots == (0, 1, 3)


def test_the_last_hope_is_sent_away_and_the_run_is_extinct() -> None:
    run = Run({0: Site("labA", 0, 0)})
    run.end(0, is_restarting=True)
    assert not run.crews.is_extinct
    run.come_back(0, {"parameters": "another"})
    assert run.crews.is_extinct
    twin = Run({0: Site("labA", 0, 0)})
    twin.end(0, is_restarting=True)
    assert kinds(twin.come_back(0)) == [(0, "go"), (0, "record")]
    assert not twin.crews.is_extinct


def test_a_replacement_that_dies_before_it_comes_may_be_replaced_or_not() -> None:
    run = Run({0: Site("labA", 0, 0)})
    run.end(0, is_restarting=True)
    run.end(0, is_restarting=True)
    assert not run.crews.is_extinct
    run.end(0)
    assert run.crews.is_extinct


def test_a_replacement_that_dies_while_it_waits_changes_nothing_for_the_others() -> None:
    run = Run()
    run.end(2, is_restarting=True)
    run.report(0, 1, 3)
    assert wishes(run.come_back(2)) == [(0, "CHANGE")]
    assert run.end(2) == []
    assert crew_of(run.report(0, 1, 3)).slots == (0, 1, 3)


def test_a_node_that_is_lost_while_its_replacement_loads_is_not_waited_for() -> None:
    run = Run({0: Site("labA", 0, 0), 1: Site("labB", 0, 1)})
    run.end(0)
    run.end(1, is_restarting=True)
    run.crews.gone(1, "the connection to labB was lost", run.now_s)
    assert run.crews.is_extinct


def test_a_node_that_is_lost_while_its_replacement_waits_takes_it_along() -> None:
    run = Run()
    run.end(2, is_restarting=True)
    run.report(0, 1, 3)
    run.come_back(2)
    for slot in (2, 3):
        run.crews.gone(slot, "the connection to labB was lost", run.now_s)
    run.told()
    assert crew_of(run.report(0, 1)).slots == (0, 1)


# Leaving.


def test_nodes_that_are_asked_within_five_seconds_leave_together() -> None:
    run = Run()
    assert run.leave(3) == []
    run.wait(3.0)
    run.leave(1)
    assert run.crews.tick(run.now_s) == pytest.approx(2.0)
    assert wishes(run.wait(1.9)) == []
    assert wishes(run.wait(0.2)) == [(1, "LEAVE"), (3, "LEAVE")]
    assert wishes(run.wait(60.0)) == [], "each is told once"


def test_all_stop_if_the_head_is_asked_or_too_few_would_be_left() -> None:
    everybody = [(slot, "STOP") for slot in range(4)]
    assert wishes(Run().leave(0, 1, is_everybody=True)) == everybody
    assert wishes(Run().leave(0, 1, 2, 3)) == everybody
    assert wishes(Run(min_ranks=3).leave(2, 3)) == everybody
    assert wishes(Run(min_ranks=2).leave(2, 3)) == []
    run = Run()
    run.leave(0, 1)
    assert wishes(run.leave(2, 3)) == everybody, "one after the other, but nobody is left"
    assert wishes(run.wait(60.0)) == []


def test_all_stop_once_where_another_node_leads_the_run() -> None:
    run = Run()
    assert not run.crews.stand(Standing.OVERDUE, run.now_s), "nobody is out of reach: nobody else can lead"
    assert run.crews.stand(Standing.REPLACED, run.now_s)
    assert wishes(run.told()) == [(slot, "STOP") for slot in range(4)]
    assert not run.crews.stand(Standing.REPLACED, run.now_s)
    assert run.told() == []


def test_a_rank_that_fell_silent_and_was_ended_by_its_launcher_is_led_by_nobody_else() -> None:
    run = Run()
    run.report(0, 1, 2)
    run.wait(ANSWER_S)
    run.end(3, is_restarting=True)
    assert not run.crews.stand(Standing.OVERDUE, run.now_s)


def test_all_stop_where_a_rank_fell_silent_that_another_node_may_lead() -> None:
    run = Run()
    run.report(0, 1, 2)
    run.wait(ANSWER_S)
    assert run.crews.stand(Standing.OVERDUE, run.now_s)
    assert wishes(run.told()) == [(slot, "STOP") for slot in range(3)]


def test_who_was_asked_to_leave_and_is_lost_before_is_not_asked_again() -> None:
    run = Run()
    run.leave(2, 3)
    run.end(3)
    run.report(0, 1, 2)
    assert wishes(run.wait(5.1)) == [(2, "LEAVE")]


def test_those_that_left_are_missed_by_nobody() -> None:
    run = Run()
    run.leave(2, 3)
    run.wait(5.1)
    for slot in (2, 3):
        run.end(slot, exit_code=75, code=75, has_left=True)
    told = run.report(0, 1)
    assert crew_of(told).slots == (0, 1)
    assert story_of(told) == "rank 2 on labB has left; rank 3 on labB has left"


class Pipe(LauncherLink):
    """The worker's end, without a pipe."""

    def __init__(self) -> None:
        self._wish, self._heard, self._record_timeout_s = Wish.NONE, queue.SimpleQueue(), 5.0

    def send(self, kind: str, **facts: Any) -> None:
        pass

    def hear(self, slot: int, told: Told) -> None:
        for to, kind, facts in told:
            if (to, kind) == (slot, "wish"):
                self._take_wish(facts)


# FAULT: a rank forgets all wishes when it reports, and nobody tells it again: who was asked to stop, or to leave, while
# another rank died trains on until the second signal, or until the queue kills the node.
@pytest.mark.parametrize(("slots", "what"), [((0, 1), Wish.STOP), ((2, 3), Wish.LEAVE)])
def test_a_wish_outlives_a_regroup_that_comes_before_the_commit_it_was_to_ride_on(
    slots: tuple[int, int], what: Wish
) -> None:
    run, slot, line = Run(), slots[0], Pipe()
    line.hear(slot, run.leave(*slots, is_everybody=what is Wish.STOP))
    line.hear(slot, run.wait(5.1))
    assert what in line.wish()
    other = 1 if slot else 3
    line.hear(slot, run.end(other))
    line._heard.put({"kind": "record", "record": {"generation": 1}})
    line.report({"generation": 0})
    line.hear(slot, run.report(*({0, 1, 2, 3} - {other})))
    line.hear(slot, run.wait(60.0))
    assert run.crews.generation == 1
    assert what in line.wish()


def test_a_record_that_came_twice_is_adopted_once() -> None:
    """As where a report meets a freeze on its way, and is repeated."""
    line = Pipe()
    run = Run()
    told = run.report(0, 1, 2, 3) + run.report(0, generation=0)
    for slot, kind, facts in told:
        if (slot, kind) == (0, "record"):
            line._heard.put({"kind": kind, **facts})
    assert line.report({"generation": 0})["record"]["generation"] == 1
    run.end(3)
    told = run.report(0, 1, 2)
    line._heard.put({"kind": "record", **next(facts for slot, kind, facts in told if (slot, kind) == (0, "record"))})
    assert line.report({"generation": 1})["record"]["generation"] == 2


# FAULT: its node has been asked to go before it came, so it is never told; the node does not end by itself.
def test_a_replacement_that_comes_to_a_node_that_leaves_does_not_stay() -> None:
    run = Run()
    run.end(3, is_restarting=True)
    run.report(0, 1, 2)
    run.leave(2, 3)
    assert wishes(run.wait(5.1)) == [(2, "LEAVE")]
    told = run.come_back(3)
    told += run.end(2, exit_code=75, code=75, has_left=True)
    told += run.report(0, 1)
    told += run.wait(60.0)
    assert (3, "dismiss") in kinds(told) or (3, "LEAVE") in wishes(told)


# Crashes.


def test_a_step_that_crashes_a_second_process_is_hopeless() -> None:
    run = Run()
    run.end(3, exit_code=-11)
    run.report(0, 1, 2, step=7)
    assert not run.crews.is_hopeless
    run.end(2, exit_code=-11)
    run.report(0, 1, step=7)
    assert run.crews.is_hopeless


@pytest.mark.parametrize(("exit_code", "step"), [(-9, 7), (-11, 8)])
def test_another_step_or_another_reason_is_not(exit_code: int, step: int) -> None:
    run = Run()
    run.end(3, exit_code=-11)
    run.report(0, 1, 2, step=7)
    run.end(2, exit_code=exit_code)
    run.report(0, 1, step=step)
    assert not run.crews.is_hopeless


def test_crashes_at_once_are_one() -> None:
    run = Run()
    run.end(3, exit_code=-6)
    run.end(2, exit_code=-6)
    run.report(0, 1)
    assert not run.crews.is_hopeless


def test_nobody_leaves_alone_with_data_that_nobody_else_has() -> None:
    everybody = [(slot, "STOP") for slot in range(4)]
    by_host = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert wishes(Run(parts=by_host).leave(2, 3)) == everybody
    assert wishes(Run(parts=by_host).leave(1, 3)) == []
    assert wishes(Run(parts=dict.fromkeys(range(4), "a")).leave(2, 3)) == []


def test_a_newcomer_may_bring_another_part_of_the_data() -> None:
    run = Run(parts=dict.fromkeys(range(4), "a"))
    run.crews.seat(4, LAB_B)
    run.starts[4] = 0
    told = run.come_back(4, {**FIELDS, PART: "b"})
    assert (4, "go") in kinds(told)


def test_a_rank_whose_data_the_run_has_not_begun_with_is_not_missed() -> None:
    run = Run(parts=dict.fromkeys(range(4), "a"))
    run.crews.seat(4, LAB_B)
    run.starts[4] = 0
    run.come_back(4, {**FIELDS, PART: "b"})
    assert len(crew_of(run.report(*range(4))).slots) == 5
    assert wishes(run.leave(4)) == []
    assert wishes(run.wait(5.1)) == [(4, "LEAVE")]
    run.end(4)
    told = run.report(*range(4))
    assert len(crew_of(told).slots) == 4
    assert not Record.from_record(told[-1][2]["record"]).is_last


def test_the_slot_of_a_host_that_went_does_not_stand_for_its_data() -> None:
    run = Run(parts={0: "a", 1: "a", 2: "b", 3: "b"})
    for slot in (2, 3):
        run.end(slot)
    run.report(0, 1)
    run.crews.seat(2, LAB_A)
    run.starts[2] = 1
    assert kinds(run.come_back(2, {**FIELDS, PART: "c"})) == [(2, "go")]
    assert run.wait(20.0) == []
    run.crews.seat(3, LAB_B)
    run.starts[3] = 1
    told = run.come_back(3, {**FIELDS, PART: "b"})
    assert crew_of(told).slots == (0, 1, 2, 3)
    assert not Record.from_record(told[-1][2]["record"]).is_last


def test_whoever_stops_while_a_part_is_waited_for_stops_all() -> None:
    run = Run(parts={0: "a", 1: "a", 2: "b", 3: "b"})
    for slot in (2, 3):
        run.end(slot)
    run.report(0, 1)
    told = run.leave(1)
    assert wishes(told) == [(0, "STOP"), (1, "STOP")]
    assert Record.from_record(told[-1][2]["record"]).is_last


@pytest.mark.parametrize(("parts", "is_there"), [("ab", True), ("abc", False)])
def test_another_head_waits_for_the_parts_that_the_run_has_begun_with(parts: str, is_there: bool) -> None:
    """It has heard of its own ranks alone; the others come to it anew, into whatever slots are empty."""
    run, roster = Run(), ("0.0", "1.0", "2.0")  # of which rank 0 had led, and read what rank 2 reads too
    run.crews = Crews.amid(
        Record(3, roster, Lineage(7, 99)), dict.fromkeys(range(3), LAB_B), {1: {**FIELDS, PART: "b"}}, {1: 0},
        min_ranks=1, wait_s=30.0, parts=parts,
    )  # fmt: skip
    run.starts = {1: 0, 0: 1}
    run.crews.bereave([1], "the head is gone", run.now_s)
    assert not [kind for _, kind, _ in run.report(1) if kind == "record"]
    run.crews.seat(0, LAB_A)
    told = run.come_back(0, {**FIELDS, PART: "a"})
    assert ((0, "record") in kinds(told)) is is_there


def test_who_comes_back_after_ten_heads_were_lost_in_turn_has_a_name_that_nobody_had() -> None:
    """Two nodes of one rank; whoever leads loses its worker, which is replaced, and is then lost itself."""
    run, used = Run({0: LAB_A, 1: LAB_B}), {"0.0", "1.0"}

    def grown(told: Told) -> tuple[Record, dict[int, int]]:
        facts = next(facts for _, kind, facts in told if kind == "record")
        record = Record.from_record(facts["record"])
        assert len(record.roster) == 2
        assert {name for name in record.roster if name in record.fresh}.isdisjoint(used)
        used.update(record.roster)
        return record, dict(facts["started"])

    for loss in range(10):
        head, other = loss % 2, (loss + 1) % 2
        run.end(head, is_restarting=True)
        run.report(other)
        run.come_back(head)
        newest, started = grown(run.report(head, other))
        run.crews = Crews.amid(
            newest, {0: LAB_A, 1: LAB_B}, {other: FIELDS}, {**started, other: run.starts[other]}, min_ranks=1,
            wait_s=30.0,
        )  # fmt: skip
        run.crews.bereave([other], "the head is gone", run.now_s)
        run.report(other)
        run.starts[head] = run.crews.seat(head, LAB_A)
        assert kinds(run.come_back(head))[0] == (head, "go")
        grown(run.report(other))
    assert len(used) == 2 + 2 * 10


def test_each_node_is_told_what_is_waited_for_and_a_stop_ends_it() -> None:
    run = Run(min_ranks=4, wait_s=1800.0)
    run.end(1)
    assert run.report(0, 2, 3) == []
    assert run.wait(0.0) + run.wait(1.0) == []
    told = run.wait(1.5)
    assert kinds(told) == [(0, "tell"), (2, "tell")], "one rank of each node"
    assert told[0][2]["text"] == (
        f"rank 1 on labA{KILLED}: waiting for 1 more rank (--min-ranks 4), 29:58 at most; Ctrl-C saves the"
        " state and ends the run"
    )
    assert run.wait(9.0) == []
    assert kinds(run.wait(1.1)) == [(0, "tell"), (2, "tell")]
    told = run.leave(0, 2, 3, is_everybody=True)
    assert wishes(told) == [(slot, "STOP") for slot in (0, 2, 3)]
    assert [slot for slot, kind in kinds(told) if kind == "record"] == [0, 2, 3]
    assert run.wait(30.0) == []


def test_a_host_whose_data_nobody_has_is_said_to_be_waited_for() -> None:
    run = Run(parts={0: "a", 1: "a", 2: "b", 3: "b"})
    for slot in (2, 3):
        run.end(slot)
    run.report(0, 1)
    run.wait(0.1)
    (_, _, facts) = run.wait(2.5)[0]
    assert "waiting for a host with its part of the data, 00:2" in facts["text"]


class Deaf:
    """A connection over which nobody says anything, ever."""

    def recv_bytes(self) -> bytes:
        raise EOFError


def test_a_rank_waits_for_the_next_generation_as_long_as_the_run_waits_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection: Any = Deaf()
    line, asked = LauncherLink(connection, join_timeout_s=86400.0), list[float]()
    monkeypatch.setattr(line, "_await", lambda kinds, timeout_s, what: asked.append(timeout_s))
    line.await_record()
    assert asked[0] > 86400.0
