"""Rounds from one generation to the next: who is asked, who is waited for, and how long; alone and over a bad network.

The clock is a number. In the second half workers and one `Generations` talk over a network that drops, delays, doubles
and reorders what they say, while processes die, stop, wake and are started again; a seed is one exact history.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from hetseq.cluster.membership.decide import Image, Record, Report, Tag, Update
from hetseq.cluster.membership.regroup_rounds import ANSWER_S, HEARD_S, Generations, Order
from hetseq.cluster.membership.step_commit import Lineage, Verdict
from hetseq.cluster.rendezvous.leader_election import Standing

PATIENT_S = 10.0
SLACK_S = 0.5  # what is added to a patience that a worker asks for
ONE = Lineage(1, 11)
TWO = Lineage(2, 22)


def image(*parts: int) -> tuple[Image, ...]:
    """These parts of an image in three parts, as a report has them."""
    return (Image("image of step 1", ONE, 0, parts, 3),)


class Rounds:
    """`Generations` of some workers "0.0", "1.0"... and what they are told; `now_s` is the clock.

    Records arrive, but not at the slots in `deaf`.
    """

    def __init__(self, workers: int = 3, *, deaf: Collection[int] = (), **options: Any) -> None:
        self.deaf = deaf
        slots = {f"{slot}.0": slot for slot in range(workers)}
        self.those = Generations(Record(0, tuple(slots)), slots, **options)
        self.now_s = 100.0

    def report(self, *slots: int, generation: int | None = None, **other: Any) -> list[tuple[str, Order]]:
        """These report what they hold, by default to the newest generation and all the same state."""
        of = self.those.newest.generation if generation is None else generation
        for slot in slots:
            facts = {"lineage": ONE, **other}
            self.those.reported(Report(self.name(slot), of, **facts), self.now_s)
        return self.told()

    def name(self, slot: int) -> str:
        return next(name for name in reversed(self.those.slots) if self.those.slots[name] == slot)

    def answer(self, *slots: int, patience_s: float = PATIENT_S) -> None:
        for slot in slots:
            self.those.answered(self.name(slot), patience_s, self.now_s)

    def end(self, slot: int, *, is_restarting: bool = False) -> list[tuple[str, Order]]:
        """As `Crews` has it."""
        if is_restarting:
            self.those.expect(slot)
        self.those.ended(self.name(slot), self.now_s)
        if not is_restarting:
            self.those.do_not_expect(slot, self.now_s)
        return self.told()

    def arrive(self, slot: int, name: str | None = None) -> list[tuple[str, Order]]:
        again = (
            f"{slot}.{1 + int(self.name(slot).partition('.')[2])}" if slot in self.those.slots.values() else f"{slot}.0"
        )
        self.those.arrived(name or again, slot, self.now_s)
        return self.told()

    def wait(self, seconds: float) -> list[tuple[str, Order]]:
        self.now_s += seconds
        self.those.tick(self.now_s)
        return self.told()

    def told(self) -> list[tuple[str, Order]]:
        said, self.those.outbox[:] = list(self.those.outbox), []
        for name, order in said:
            if order["kind"] == "record" and self.those.slots[name] not in self.deaf:
                self.those.heard(name, order["record"]["generation"])
        return said


def kinds(told: list[tuple[str, Order]]) -> list[tuple[str, str]]:
    return [(name, order["kind"]) for name, order in told]


def rosters(told: list[tuple[str, Order]]) -> set[tuple[str, ...]]:
    """Of the records that were sent."""
    return {Record.from_record(order["record"]).roster for _, order in told if order["kind"] == "record"}


# Who is asked.


def test_the_first_report_opens_a_round_and_all_others_are_told_to_freeze() -> None:
    rounds = Rounds()
    assert not rounds.those.is_open
    told = rounds.report(1)
    assert told == [(name, {"kind": "freeze", "generation": 0}) for name in ("0.0", "2.0")]
    assert rounds.those.is_open
    assert rounds.report(0) == [], "nobody is asked twice"


def test_the_end_of_a_member_opens_a_round() -> None:
    rounds = Rounds()
    assert kinds(rounds.end(1)) == [("0.0", "freeze"), ("2.0", "freeze")]
    assert rounds.those.members == ["0.0", "2.0"]


def test_one_member_is_asked_to_stop_after_a_step_when_somebody_wants_to_join() -> None:
    rounds = Rounds()
    rounds.report(0, 1, 2)
    assert rounds.arrive(3) == [("0.0", {"kind": "wish", "generation": 1})]
    assert rounds.arrive(4) == [], "it has been asked"
    assert not rounds.those.is_open, "nobody loses a step for it"
    rounds.report(2)
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0", "2.0", "3.0", "4.0")}
    assert kinds(rounds.arrive(5)) == [("0.0", "wish")], "a new generation is asked again"


def test_who_was_asked_for_a_newcomer_may_die_and_the_newcomer_is_taken_in() -> None:
    rounds = Rounds()
    rounds.arrive(3)
    rounds.end(0)
    assert rosters(rounds.report(1, 2)) == {("1.0", "2.0", "3.0")}


# Who is waited for.


def test_the_next_generation_begins_when_the_last_one_has_reported() -> None:
    rounds = Rounds()
    assert rosters(rounds.report(2, 0)) == set()
    told = rounds.report(1)
    assert kinds(told) == [("0.0", "record"), ("1.0", "record"), ("2.0", "record")]
    assert {order["record"]["generation"] for _, order in told} == {1}
    assert (rounds.those.newest.generation, rounds.those.is_open) == (1, False)
    assert rounds.wait(1000) == []


def test_who_does_not_answer_is_fenced_and_left_out() -> None:
    rounds = Rounds()
    rounds.report(0, 1)
    assert rounds.wait(ANSWER_S - 0.01) == []
    assert kinds(rounds.wait(0.02)) == [("2.0", "fence"), ("0.0", "record"), ("1.0", "record")]
    assert rounds.those.members == ["0.0", "1.0"]


def test_who_does_not_hear_of_the_record_is_left_out_of_the_next_one() -> None:
    """What it says arrives, as in a network that is cut in one direction."""
    rounds = Rounds(deaf={2})
    assert rosters(rounds.report(0, 1, 2)) == {("0.0", "1.0", "2.0")}
    assert rounds.those.tick(rounds.now_s) == HEARD_S
    rounds.those.heard("2.0", 0)  # of the one before
    assert rounds.wait(HEARD_S - 0.1) == []
    assert kinds(rounds.wait(0.1)) == [("2.0", "fence"), ("0.0", "freeze"), ("1.0", "freeze")]
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0")}


@pytest.mark.parametrize("word", ["heard", "report", "end"])
def test_who_has_heard_of_the_record_or_has_ended_is_not_waited_for(word: str) -> None:
    rounds = Rounds(2, deaf={1})
    rounds.report(0, 1)
    if word == "heard":
        rounds.those.heard("1.0", 1)
        assert rounds.wait(HEARD_S) == []
    elif word == "report":
        rounds.report(1)
        assert "fence" not in dict(kinds(rounds.wait(0.1) + rounds.report(0) + rounds.wait(HEARD_S - 0.2))).values()
    else:
        rounds.end(1)
        assert rosters(rounds.report(0)) == {("0.0",)}


@pytest.mark.parametrize(("workers", "holders"), [(1, {0}), (2, {1})])
def test_the_only_one_with_a_state_is_not_left_out_however_deaf_it_is(workers: int, holders: set[int]) -> None:
    """It may have heard, and the word of it is lost: it would train on, and the others go back to a checkpoint."""
    rounds = Rounds(workers, deaf=holders)
    for slot in range(workers):
        rounds.those.reported(Report(f"{slot}.0", 0, ONE if slot in holders else None), rounds.now_s)
    assert rosters(rounds.told()) == {tuple(f"{slot}.0" for slot in range(workers))}
    assert rounds.wait(10 * HEARD_S) == []


@pytest.mark.parametrize(("parts", "is_left_out"), [(((5, 8), (3, 8)), False), (((8, 8), (0, 8)), True)])
def test_a_deaf_owner_is_not_left_out_as_long_as_its_part_is_nowhere_else(
    parts: tuple[tuple[int, int], ...], is_left_out: bool
) -> None:
    rounds = Rounds(2, deaf={1})
    for slot, part in enumerate(parts):
        rounds.report(slot, part=part)
    assert rounds.those.newest.donors == ("0.0", "1.0")
    assert kinds(rounds.wait(HEARD_S + 0.1))[:1] == ([("1.0", "fence")] if is_left_out else [])


@pytest.mark.parametrize(
    ("others", "is_left_out"), [((0, 1), False), ((0, 1, 2), True)], ids=["the only copy", "a second copy"]
)
def test_a_deaf_member_is_not_left_out_as_long_as_its_node_has_the_only_copy_of_a_part_of_the_image(
    others: tuple[int, ...], is_left_out: bool
) -> None:
    """Slot 3 is dead, so all are to read the image."""
    rounds = Rounds(4, deaf={2})
    rounds.end(3)
    rounds.report(0, lineage=TWO, part=(2, 8), images=image(*others[:1]))
    rounds.report(1, lineage=TWO, part=(2, 8), images=image(*others[1:]))
    rounds.report(2, lineage=TWO, part=(2, 8), images=image(1, 2))
    assert (rounds.those.newest.image, rounds.those.newest.base) == ("image of step 1", ONE)
    told = rounds.wait(HEARD_S + 0.1)
    if not is_left_out:
        assert told == [] == rounds.wait(10 * HEARD_S)
        return
    assert kinds(told) == [("2.0", "fence"), ("0.0", "freeze"), ("1.0", "freeze")]
    lost = rounds.those.newest.lost
    rounds.report(0, lineage=None, images=image(*others[:1]))
    assert rosters(rounds.report(1, lineage=None, images=image(*others[1:]))) == {("0.0", "1.0")}
    newest = rounds.those.newest
    assert (newest.image, newest.base, newest.donors, newest.lost) == ("image of step 1", ONE, (), lost)


def test_a_deaf_member_is_left_out_of_a_generation_that_begins_from_a_checkpoint_whatever_its_node_has() -> None:
    rounds = Rounds(3, deaf={1})
    rounds.end(2)
    rounds.report(0, part=(2, 8), images=image(0))
    rounds.report(1, part=(2, 8), images=image(1))
    assert (rounds.those.newest.image, rounds.those.newest.base) == ("", None)
    assert kinds(rounds.wait(HEARD_S + 0.1))[:1] == [("1.0", "fence")]


def test_who_answers_is_waited_for_as_long_as_it_says() -> None:
    rounds = Rounds()
    rounds.report(0, 1)
    rounds.wait(1.0)
    rounds.answer(2)
    assert rounds.wait(PATIENT_S + SLACK_S - 0.01) == []
    assert kinds(rounds.wait(0.02)) == [("2.0", "fence"), ("0.0", "record"), ("1.0", "record")]
    in_time = Rounds()
    in_time.report(0, 1)
    in_time.answer(2)
    in_time.wait(PATIENT_S)
    assert rosters(in_time.report(2)) == {("0.0", "1.0", "2.0")}


def test_an_answer_to_no_question_is_not_kept_for_the_next_one() -> None:
    rounds = Rounds()
    rounds.answer(2, patience_s=1000.0)
    rounds.report(0, 1)
    assert ("2.0", "fence") in kinds(rounds.wait(ANSWER_S + 0.01))


def test_what_one_asked_for_in_one_round_does_not_count_in_the_next() -> None:
    rounds = Rounds()
    rounds.report(0)
    rounds.answer(1, 2, patience_s=1000.0)
    rounds.report(1, 2)
    rounds.report(0, 1)
    assert ("2.0", "fence") in kinds(rounds.wait(ANSWER_S + 0.01))


def test_the_clock_says_when_to_look_again() -> None:
    rounds = Rounds()
    assert rounds.those.tick(rounds.now_s) == 60.0
    rounds.report(0)
    assert rounds.those.tick(rounds.now_s) == pytest.approx(ANSWER_S)
    rounds.answer(1, 2)
    assert rounds.those.tick(rounds.now_s) == pytest.approx(PATIENT_S + SLACK_S)


# FAULT: the deadline of one who is silent lies in the past while another one is waited for, so `tick` gives 0 again
# and again, and the hub's thread spins for as long as that patience lasts (up to an hour).
def test_while_one_is_silent_and_another_one_is_waited_for_the_hub_sleeps() -> None:
    rounds = Rounds()
    rounds.report(0)
    rounds.answer(1)
    rounds.wait(ANSWER_S + 1)
    assert rounds.those.tick(rounds.now_s) > 0


# FAULT: the same once `wait_s` has passed while replacements load: nobody is left who could report.
def test_while_replacements_load_after_a_total_loss_the_hub_sleeps() -> None:
    rounds = Rounds(2)
    rounds.end(0, is_restarting=True)
    rounds.end(1, is_restarting=True)
    rounds.wait(1.0)
    assert rounds.those.tick(rounds.now_s) > 0


# Reports that come otherwise.


def test_a_report_that_is_repeated_changes_nothing() -> None:
    rounds = Rounds()
    rounds.report(0)
    assert rounds.report(0, 0) == []
    assert rosters(rounds.report(1, 2)) == {("0.0", "1.0", "2.0")}


def test_who_has_not_heard_of_the_newest_record_gets_it_again() -> None:
    rounds = Rounds()
    told = rounds.report(0, 1, 2)
    assert rounds.report(1, generation=0) == [entry for entry in told if entry[0] == "1.0" and "record" in entry[1]]
    assert not rounds.those.is_open


def test_who_is_not_in_the_newest_record_gets_no_answer_however_often_it_reports() -> None:
    rounds = Rounds()
    rounds.report(0, 1)
    rounds.wait(ANSWER_S + 0.01)  # 2 is left out, and fenced
    assert rounds.report(2, generation=0) == []
    assert rounds.report(2, generation=1) == []
    assert not rounds.those.is_open


@pytest.mark.parametrize("generation", [1, 7, -1])
def test_a_report_to_another_generation_opens_nothing(generation: int) -> None:
    rounds = Rounds()
    rounds.report(0, generation=generation)
    assert not rounds.those.is_open
    rounds.those.reported(Report("9.9", 0, ONE), rounds.now_s)
    assert not rounds.those.is_open, "nobody knows 9.9"


def test_who_dies_after_its_report_has_no_place() -> None:
    rounds = Rounds()
    rounds.report(0, 1)
    rounds.end(1)
    assert rosters(rounds.report(2)) == {("0.0", "2.0")}
    late = Rounds()
    late.report(0)
    late.end(1)
    late.report(1)  # under way for longer than its death
    assert rosters(late.report(2)) == {("0.0", "2.0")}


def test_a_newcomer_has_nothing_to_report_and_gets_no_record_that_does_not_name_it() -> None:
    rounds = Rounds()
    rounds.report(0, 1, 2)
    rounds.arrive(3)
    for generation in (-1, 0, 1):
        assert rounds.report(3, generation=generation) == []
    assert not rounds.those.is_open
    assert rosters(rounds.report(0, 1, 2)) == {("0.0", "1.0", "2.0", "3.0")}
    assert rosters(rounds.report(3, generation=-1)) == {("0.0", "1.0", "2.0", "3.0")}, "now one does"


def test_who_dies_after_the_record_makes_for_another_round_with_new_reports() -> None:
    rounds = Rounds()
    rounds.report(0, 1, 2)
    told = rounds.end(2)
    assert told == [(name, {"kind": "freeze", "generation": 1}) for name in ("0.0", "1.0")]
    assert rosters(rounds.report(0, generation=0)) == {("0.0", "1.0", "2.0")}, "what it said of generation 0 is history"
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0")}
    assert rounds.those.newest.generation == 2


def test_the_last_one_missing_dies_and_the_round_is_over() -> None:
    rounds = Rounds()
    rounds.report(0, 1)
    assert rosters(rounds.end(2)) == {("0.0", "1.0")}
    again = Rounds()
    again.report(0, 1)
    assert rosters(again.end(2, is_restarting=True)) == {("0.0", "1.0")}


def test_who_is_fenced_and_then_ends_is_missed_by_nobody() -> None:
    rounds = Rounds()
    rounds.report(0, 1)
    rounds.wait(ANSWER_S + 0.01)
    assert rounds.end(2) == []
    assert not rounds.those.is_open


# Newcomers.


def test_who_comes_during_a_round_is_taken_in_without_a_state() -> None:
    rounds = Rounds()
    rounds.end(2, is_restarting=True)
    rounds.report(0)
    assert rounds.arrive(2) == []
    told = rounds.report(1)
    record = Record.from_record(told[0][1]["record"])
    assert (record.roster, record.fresh, record.donors) == (("0.0", "1.0", "2.1"), {"2.1"}, ("0.0", "1.0"))
    assert rounds.those.waiting == []


def test_nobody_with_a_state_waits_for_a_replacement() -> None:
    rounds = Rounds()
    rounds.end(2, is_restarting=True)
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0")}


def test_without_a_state_all_replacements_are_waited_for_since_all_begin_at_the_checkpoint() -> None:
    rounds = Rounds()
    for slot in range(3):
        assert rosters(rounds.end(slot, is_restarting=True)) == set()
    assert rosters(rounds.arrive(1)) == set()
    assert rosters(rounds.arrive(0)) == set()
    told = rounds.arrive(2)
    assert rosters(told) == {("0.1", "1.1", "2.1")}
    assert Record.from_record(told[0][1]["record"]).base is None


def test_without_a_part_of_the_state_all_replacements_are_waited_for_too() -> None:
    """In the memory of its node lies the newest image of the part, and only a process there can read it."""
    rounds = Rounds()
    rounds.end(2, is_restarting=True)
    assert rosters(rounds.report(0, 1, part=(3, 8))) == set()
    told = rounds.arrive(2)
    assert rosters(told) == {("0.0", "1.0", "2.1")}
    record = Record.from_record(told[0][1]["record"])
    assert (record.base, record.donors) == (None, ())
    assert record.lost == "rank 2 owned 25 % of the state, and no other rank holds it"
    nothing_lost = Rounds()
    nothing_lost.end(2, is_restarting=True)
    assert rosters(nothing_lost.report(0, 1, part=(4, 8))) == {("0.0", "1.0")}


def test_with_an_image_of_the_state_nobody_waits_for_a_replacement() -> None:
    rounds = Rounds()
    rounds.end(2, is_restarting=True)
    assert rosters(rounds.report(0, lineage=TWO, part=(3, 8), images=image(0))) == set()
    assert rosters(rounds.report(1, lineage=TWO, part=(3, 8), images=image(1, 2))) == {("0.0", "1.0")}
    newest = rounds.those.newest
    assert (newest.image, newest.base, newest.fresh) == ("image of step 1", ONE, {"0.0", "1.0"})
    assert newest.lost == "rank 2 owned 25 % of the state, and no other rank holds it"
    assert kinds(rounds.arrive(2)) == [("0.0", "wish")], "it is late, and welcome"


def test_with_a_part_of_the_image_lacking_all_replacements_are_waited_for() -> None:
    rounds = Rounds()
    rounds.end(2, is_restarting=True)
    rounds.report(0, lineage=TWO, part=(3, 8), images=image(0))
    assert rosters(rounds.report(1, lineage=TWO, part=(3, 8), images=image(1))) == set()
    assert rosters(rounds.arrive(2)) == {("0.0", "1.0", "2.1")}
    assert (rounds.those.newest.image, rounds.those.newest.base) == ("", None)


def test_with_a_newer_checkpoint_all_replacements_are_waited_for_though_an_image_is_whole() -> None:
    rounds = Rounds()
    rounds.end(2, is_restarting=True)
    rounds.report(0, lineage=TWO, part=(3, 8), images=image(0, 1, 2))
    assert rosters(rounds.report(1, lineage=TWO, part=(3, 8), saved=2)) == set()
    assert rosters(rounds.arrive(2)) == {("0.0", "1.0", "2.1")}
    assert (rounds.those.newest.image, rounds.those.newest.base) == ("", None)


def test_a_member_that_finished_does_not_keep_the_others_from_an_image() -> None:
    rounds = Rounds()
    rounds.those.finished("0.0")
    rounds.end(2)
    assert rosters(rounds.report(1, lineage=TWO, part=(3, 8), images=image(0, 1))) == set(), "nobody begins anew"
    rounds = Rounds()
    rounds.those.finished("0.0")
    rounds.end(2)
    assert rosters(rounds.report(1, lineage=TWO, part=(3, 8), images=image(0, 1, 2))) == {("1.0",)}


def test_a_replacement_that_never_comes_is_not_waited_for_for_ever() -> None:
    """Its data lie on a disk that hangs: it neither comes nor ends."""
    rounds = Rounds(2)
    for slot in (0, 1):
        rounds.end(slot, is_restarting=True)
    rounds.wait(1000.0)
    assert rosters(rounds.arrive(1)) == set()
    assert rosters(rounds.wait(1799.0)) == set(), "from the last that was heard of anybody"
    assert rosters(rounds.wait(2.0)) == {("1.1",)}
    assert kinds(rounds.arrive(0)) == [("1.1", "wish")], "it is late, and welcome"


def test_if_no_replacement_ever_comes_the_run_is_over() -> None:
    rounds = Rounds(2)
    for slot in (0, 1):
        rounds.end(slot, is_restarting=True)
    rounds.wait(1799.0)
    assert not rounds.those.is_extinct
    rounds.wait(2.0)
    assert rounds.those.is_extinct


def test_members_that_have_no_state_yet_wait_for_replacements_too() -> None:
    rounds = Rounds(2)
    rounds.end(1, is_restarting=True)
    assert rosters(rounds.report(0, lineage=None)) == set()
    assert rosters(rounds.arrive(1)) == {("0.0", "1.1")}


def test_a_replacement_that_does_not_come_after_all_is_not_waited_for() -> None:
    rounds = Rounds()
    for slot in range(3):
        rounds.end(slot, is_restarting=True)
    rounds.arrive(0)
    rounds.those.do_not_expect(1, rounds.now_s)
    rounds.those.do_not_expect(2, rounds.now_s)
    assert rosters(rounds.told()) == {("0.1",)}


def test_the_only_rank_is_started_again_and_goes_on() -> None:
    rounds = Rounds(1)
    rounds.end(0, is_restarting=True)
    assert not rounds.those.is_extinct
    assert rosters(rounds.arrive(0)) == {("0.1",)}


def test_the_last_member_dies_while_somebody_waits_to_be_taken_in() -> None:
    rounds = Rounds(2)
    rounds.end(1, is_restarting=True)
    rounds.report(0)
    assert kinds(rounds.arrive(1)) == [("0.0", "wish")]
    assert rosters(rounds.end(0)) == {("1.1",)}


def test_a_newcomer_that_dies_before_it_is_taken_in_is_forgotten() -> None:
    rounds = Rounds()
    rounds.arrive(3)
    assert rounds.end(3) == []
    assert not rounds.those.is_open
    assert rosters(rounds.report(0, 1, 2)) == {("0.0", "1.0", "2.0")}


def test_a_newcomer_that_dies_before_it_has_adopted_the_record_makes_for_another_round() -> None:
    rounds = Rounds()
    rounds.arrive(3)
    rounds.report(0, 1, 2)
    assert len(rounds.end(3)) == 3
    assert rosters(rounds.report(0, 1, 2)) == {("0.0", "1.0", "2.0")}


def test_a_process_arrives_once() -> None:
    rounds = Rounds()
    rounds.arrive(3)
    assert rounds.arrive(3, name="3.0") == []
    assert rounds.those.waiting == ["3.0"]
    rounds.arrive(0, name="0.0")
    assert rounds.those.waiting == ["3.0"], "members are no newcomers"


# Generations that are never formed.


def test_who_came_last_is_left_out_when_two_generations_with_it_were_not_formed() -> None:
    rounds = Rounds(2)
    rounds.arrive(2)
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0", "2.0")}
    rounds.report(0, 1)
    assert rosters(rounds.report(2, lineage=None)) == {("0.0", "1.0", "2.0")}
    rounds.report(0, 1)
    told = rounds.report(2, lineage=None)
    assert kinds(told) == [("2.0", "fence"), ("0.0", "record"), ("1.0", "record")]
    assert rounds.those.members == ["0.0", "1.0"]
    rounds.end(2, is_restarting=True)
    rounds.arrive(2)
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0", "2.1")}, "it may try again"
    rounds.report(0, 1)
    assert rosters(rounds.report(2, lineage=None)) == {("0.0", "1.0", "2.1")}, "as often as before"


@pytest.mark.parametrize("what", ["a step was made", "somebody died", "somebody was silent"])
def test_a_generation_that_came_to_something_or_lost_somebody_says_nothing_of_who_came_last(what: str) -> None:
    rounds = Rounds(3)
    rounds.arrive(3)
    rounds.report(0, 1, 2)
    left = {0, 1, 2}
    for turn in range(2):
        state = Lineage(2 + turn, 22) if what == "a step was made" else ONE
        if what == "somebody died":
            rounds.end(2 - turn)
        left -= set() if what == "a step was made" else {2 - turn}
        rounds.report(*left, lineage=state)
        told = rounds.report(3, lineage=None)
        if what == "somebody was silent":
            told = rounds.wait(ANSWER_S + 0.1)
        assert "3.0" in next(iter(rosters(told)))


def test_if_nobody_holds_a_state_nobody_came_last() -> None:
    rounds = Rounds(2)
    for slot in (0, 1):
        rounds.end(slot, is_restarting=True)
    rounds.arrive(0)
    rounds.arrive(1)
    for _ in range(5):
        assert rosters(rounds.report(0, 1, lineage=None)) == {("0.1", "1.1")}


def never_formed(rounds: Rounds, *slots: int, times: int, **other: Any) -> list[tuple[str, Order]]:
    """Nobody dies, and again and again they report what they held before; what follows from the last report."""
    told: list[tuple[str, Order]] = []
    for _ in range(times):
        rounds.report(*slots[:-1], **other)
        told = rounds.report(slots[-1], **other)
    return told


def test_if_nobody_holds_a_state_and_not_all_reach_each_other_one_node_goes_on() -> None:
    rounds = Rounds(4, home=lambda slot: "labA" if slot in (1, 2) else "labB")
    for slot in range(4):
        rounds.end(slot, is_restarting=True)
    for slot in (2, 0, 3, 1):  # in this order they come back, labA first
        rounds.arrive(slot)
    assert rosters(never_formed(rounds, 0, 1, 2, 3, times=5, lineage=None)) == {("0.1", "1.1", "2.1", "3.1")}
    told = never_formed(rounds, 0, 1, 2, 3, times=1, lineage=None)
    assert kinds(told) == [("0.1", "fence"), ("3.1", "fence"), ("1.1", "record"), ("2.1", "record")]
    assert rounds.those.newest.fresh == {"1.1", "2.1"}


def test_survivors_that_cannot_be_formed_again_go_on_with_the_node_of_the_first() -> None:
    """The network between their nodes has failed, and the one to the hub has not."""
    rounds = Rounds(3, home=lambda slot: slot // 2)
    assert rosters(never_formed(rounds, 0, 1, 2, times=6)) == {("0.0", "1.0", "2.0")}, "the first one had begun well"
    told = never_formed(rounds, 0, 1, 2, times=1)
    assert kinds(told) == [("2.0", "fence"), ("0.0", "record"), ("1.0", "record")]
    assert rounds.those.newest.donors == ("0.0", "1.0")


def test_ranks_of_one_node_that_cannot_be_formed_end_with_the_first_who_needs_nobody() -> None:
    rounds = Rounds(3, home=lambda slot: "labA")
    told = never_formed(rounds, 0, 1, 2, times=7)
    assert kinds(told) == [("1.0", "fence"), ("2.0", "fence"), ("0.0", "record")]
    for _ in range(20):
        assert rosters(rounds.report(0)) == {("0.0",)}


@pytest.mark.parametrize("what", ["a step was made", "somebody died"])
def test_a_generation_that_came_to_something_keeps_all_nodes(what: str) -> None:
    rounds = Rounds(4)
    left = [0, 1, 2, 3]
    for turn in range(3):
        never_formed(rounds, *left, times=5, lineage=Lineage(2 + turn, 22))
        if what == "somebody died" and turn < 2:
            rounds.end(left.pop())
            rounds.report(*left, lineage=Lineage(2 + turn, 22))
    assert rounds.those.members == [f"{slot}.0" for slot in left]


def test_a_round_that_stays_open_counts_once() -> None:
    """It waits for a node that is on its way, and is looked at all the time."""
    rounds = Rounds(2)
    for slot in (0, 1):
        rounds.end(slot, is_restarting=True)
    rounds.arrive(0)
    rounds.arrive(1)
    rounds.those.expect(2)
    rounds.report(0, 1, lineage=None)
    assert [rounds.wait(1.0) for _ in range(20)] == [[]] * 20
    assert rounds.those.members == ["0.1", "1.1"]


# FAULT: whether enough are left is asked before those who came last are left out.
def test_too_few_are_left_without_those_who_came_last() -> None:
    rounds = Rounds(2, min_ranks=3, wait_s=50.0)
    rounds.arrive(2)
    for _ in range(3):
        rounds.report(0, 1)
        rounds.report(2, lineage=None)
    assert "2.0" not in rounds.those.members
    rounds.wait(51.0)
    assert rounds.those.newest.is_last


# Too few.


def test_with_too_few_left_the_run_waits_and_then_stops_with_what_it_has() -> None:
    rounds = Rounds(min_ranks=3, wait_s=50.0)
    rounds.end(2)
    assert rounds.report(0, 1) == []
    assert rounds.those.tick(rounds.now_s) == pytest.approx(50.0)
    assert rounds.wait(49.9) == []
    told = rounds.wait(0.2)
    assert rosters(told) == {("0.0", "1.0")}
    assert rounds.those.newest.is_last
    assert all(order["record"]["is_last"] for _, order in told)


def test_a_newcomer_in_time_makes_it_enough() -> None:
    rounds = Rounds(min_ranks=3, wait_s=50.0)
    rounds.end(2, is_restarting=True)
    rounds.report(0, 1)
    rounds.wait(49.0)
    assert rosters(rounds.arrive(2)) == {("0.0", "1.0", "2.1")}
    assert not rounds.those.newest.is_last


def test_enough_are_left_without_the_one_that_is_lost() -> None:
    rounds = Rounds(min_ranks=2, wait_s=50.0)
    rounds.end(2)
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0")}
    assert not rounds.those.newest.is_last


# The end.


def test_while_another_hub_may_lead_nobody_who_fell_silent_is_left_behind() -> None:
    rounds = Rounds()
    rounds.those.standing = Standing.UNSURE
    rounds.report(0, 2)
    assert kinds(rounds.wait(ANSWER_S)) == [("1.0", "fence")], "and no record: it may be led by another hub by now"
    assert rounds.wait(100) == []
    rounds.those.standing = Standing.SURE
    assert rosters(rounds.wait(0)) == {("0.0", "2.0")}
    assert not rounds.those.newest.is_last


@pytest.mark.parametrize("standing", [Standing.OVERDUE, Standing.REPLACED])
def test_who_does_not_lead_any_more_commits_nothing_without_those_who_fell_silent(standing: Standing) -> None:
    rounds = Rounds(wait_s=30.0)  # for newcomers, of which there is none to wait for
    rounds.report(0, 2)
    rounds.those.standing = standing
    assert rosters(rounds.wait(ANSWER_S)) == {("0.0", "2.0")}
    assert rounds.those.newest.is_last


@pytest.mark.parametrize("standing", [Standing.UNSURE, Standing.OVERDUE])
def test_who_is_known_to_have_ended_is_led_by_nobody_else(standing: Standing) -> None:
    rounds = Rounds()
    rounds.those.standing = standing
    rounds.end(1)
    assert rosters(rounds.report(0, 2)) == {("0.0", "2.0")}
    assert not rounds.those.newest.is_last
    assert not rounds.those.has_yielded


@pytest.mark.parametrize("word", ["its launcher", "its replacement"])
def test_who_fell_silent_is_in_reach_again_when_something_is_heard_of_it(word: str) -> None:
    rounds = Rounds()
    rounds.report(0, 2)
    rounds.wait(ANSWER_S)
    rounds.those.standing = Standing.OVERDUE
    assert rounds.those.has_yielded
    if word == "its launcher":
        rounds.those.heard_of(1)
    else:
        rounds.arrive(1)
    assert not rounds.those.has_yielded


def test_a_run_is_extinct_when_nobody_is_left_and_nobody_on_the_way() -> None:
    rounds = Rounds(2)
    rounds.end(0)
    assert not rounds.those.is_extinct
    rounds.end(1, is_restarting=True)
    assert not rounds.those.is_extinct
    rounds.those.do_not_expect(1, rounds.now_s)
    assert rounds.those.is_extinct
    assert rounds.told()[1:] == []
    waiting = Rounds(2, min_ranks=2, wait_s=50.0)
    waiting.arrive(2)
    waiting.end(0)
    waiting.end(1)
    assert not waiting.those.is_extinct, "there is the one that waits"


def test_who_takes_part_is_known_by_its_process() -> None:
    rounds = Rounds()
    rounds.end(2, is_restarting=True)
    rounds.arrive(2)
    assert [rounds.those.is_member(name) for name in ("0.0", "2.0", "2.1", "9.9")] == [True, False, False, False]
    rounds.report(0, 1)
    assert [rounds.those.is_member(name) for name in ("0.0", "2.0", "2.1")] == [True, False, True]


def test_who_falls_silent_may_be_the_last_one() -> None:
    rounds = Rounds(2)
    rounds.end(0)
    assert kinds(rounds.wait(ANSWER_S + 0.01)) == [("1.0", "fence")]
    assert rounds.those.is_extinct


def test_who_has_done_all_there_was_to_do_is_not_missed() -> None:
    rounds = Rounds()
    rounds.those.finished("0.0")
    assert not rounds.those.is_open
    assert rounds.those.members == ["1.0", "2.0"]
    rounds.those.ended("0.0", rounds.now_s)  # its node takes its leave
    assert not rounds.those.is_open
    assert kinds(rounds.end(2)) == [("1.0", "freeze")]
    assert rosters(rounds.report(1)) == {("1.0",)}
    rounds.those.finished("1.0")
    assert rounds.arrive(2) == [], "nobody is left to be asked"


def test_nobody_begins_anew_when_somebody_has_done_all_there_was_to_do() -> None:
    """A round that was open in that moment, with a newcomer: the checkpoint it would begin with is an old one."""
    rounds = Rounds(2)
    rounds.arrive(2)
    rounds.end(1)
    rounds.those.finished("0.0")
    assert rosters(rounds.wait(100.0)) == set()


def test_nobody_begins_anew_when_an_owner_has_done_all_there_was_to_do() -> None:
    rounds = Rounds()
    rounds.report(1, 2, part=(2, 8))
    rounds.those.finished("0.0")
    assert rosters(rounds.wait(100.0)) == set()


def test_who_finishes_while_it_is_waited_for_holds_up_nobody() -> None:
    rounds = Rounds()
    rounds.report(1, 2)
    rounds.those.finished("0.0")
    assert rosters(rounds.wait(0.0)) == {("1.0", "2.0")}


# Over a bad network.

STEPS = 8
History = tuple[tuple[int, int, int], ...]  # of updates: step, generation, attempt


@cache
def lineage(history: History) -> Lineage:
    known = Lineage()
    for step, generation, attempt in history:
        known = known.extend(step, generation=generation, attempt=attempt, verdict=Verdict.APPLY)
    return known


class Broken(Exception):
    """What must hold does not."""


@dataclass
class Process:
    """A worker: it trains with its generation, freezes when it misses somebody, reports, and adopts records."""

    world: World
    name: str
    slot: int
    generation: int = -1
    history: History | None = None
    held: tuple[int, int, int] | None = None
    last: tuple[int, int, int] | None = None
    is_frozen: bool = True  # or a newcomer
    is_dead: bool = False
    is_stopped: bool = False
    is_cut_off: bool = False  # from its peers, not from the hub
    is_deaf: bool = False  # what the hub says does not arrive, what it says itself does
    missed: list[Callable[[], None]] = field(default_factory=list)  # while it was stopped
    awaited: tuple[int, str] = (-1, "")  # the collective that it is in
    era: int = 0  # what was begun in an earlier one is of no interest any more

    def later(self, seconds: float, job: Callable[[], None], era: int | None = None) -> None:
        """Do it then, unless this process is dead or has come to something else; when stopped, on waking."""
        era = self.era if era is None else era

        def act() -> None:
            if self.is_stopped and not self.is_dead:
                self.missed.append(act)
            elif not self.is_dead and era == self.era:
                job()

        self.world.at(seconds, act)

    def hear(self, order: Order) -> None:
        if self.is_stopped:
            self.missed.append(lambda: self.hear(order))
        elif self.is_dead:
            return
        elif order["kind"] == "freeze":
            self.world.say(self, "frozen", patience_s=3.0)
            if order["generation"] == self.generation and not self.is_frozen:
                self.freeze(after_s=self.world.dice.choice([0.0, 0.0, 1.0]))  # its training thread is busy
        elif order["kind"] == "record":
            self.adopt(Record.from_record(order["record"]))

    # One generation.

    def adopt(self, record: Record) -> None:
        if record.generation <= self.generation or not self.is_frozen or self.name not in record.roster:
            return
        self.era, self.generation, self.is_frozen = self.era + 1, record.generation, False
        if self.name in record.fresh:
            self.history = None
        elif record.last is not None and self.history is not None and record.last.tag.step == len(self.history) + 1:
            tag = record.last.tag
            if self.held != (tag.step, tag.generation, tag.attempt):
                raise Broken(f"{self.name} makes {tag} from {self.held}")
            self.history = (*self.history, self.held)
        self.held = self.last = None
        if self.name not in record.fresh and (self.history is None or lineage(self.history) != record.base):
            raise Broken(f"{self.name} does not come to the base of generation {record.generation}")
        self.take_part("form", self.history, lambda all_have: self.begin(record, all_have))

    def begin(self, record: Record, all_have: list[Any]) -> None:
        """All are there: who holds nothing is given the state, or all load the checkpoint, of step 0."""
        if self.history is None:
            self.history = next((history for history in all_have if history is not None), ())
        if record.base is not None and lineage(self.history) != record.base:
            raise Broken(f"{self.name} was given another state")
        self.step()

    def step(self) -> None:
        assert self.history is not None
        if len(self.history) == STEPS:
            self.take_part("save", self.history, lambda all_have: self.world.finish(self))
            return
        tag = (len(self.history) + 1, self.generation, 0)
        self.take_part(f"gradient {tag}", self.history, lambda all_have: self.commit(tag, all_have))

    def commit(self, tag: tuple[int, int, int], all_have: list[Any]) -> None:
        if set(all_have) != {self.history}:
            raise Broken(f"the gradient {tag} is a sum over different states")
        self.held = tag
        self.take_part(
            f"commit {tag}", self.world.wishes.pop(self.name, False), lambda wishes: self.update(tag, any(wishes))
        )

    def update(self, tag: tuple[int, int, int], is_to_change: bool) -> None:
        newer = [one for one in self.world.records.values() if one.generation > self.generation]
        if any(self.name in one.roster for one in newer):
            raise Broken(f"{self.name} goes on in generation {self.generation} and is in a later one")
        assert self.history is not None
        self.history, self.held, self.last = (*self.history, tag), None, tag
        if is_to_change and len(self.history) < STEPS:
            self.freeze()
        else:
            self.step()

    def take_part(self, what: str, payload: Any, then: Callable[[list[Any]], None]) -> None:
        """A collective: it ends for each member at a time of its own once all have given something, or never."""
        self.awaited = key = (self.generation, what)
        roster = self.world.records[self.generation].roster
        given = self.world.given.setdefault(key, {})
        if not self.is_cut_off:
            given[self.name] = payload
        waiting = self.world.waiting.setdefault(key, [])
        era = self.era
        waiting.append(lambda: self.later(self.world.delay(), lambda: then([given[name] for name in roster]), era))
        self.later(3.0, lambda: self.look_for_peers(key))
        if set(given) == set(roster):
            for go_on in waiting:
                go_on()

    def look_for_peers(self, key: tuple[int, str]) -> None:
        """Its deadline has passed: if it still waits in this collective somebody is lost."""
        if not self.is_frozen and key == self.awaited:
            self.freeze()

    def freeze(self, after_s: float = 0.0) -> None:
        self.era, self.is_frozen = self.era + 1, True
        self.world.peers_notice(self)
        self.later(after_s, self.report)

    def report(self) -> None:
        """Until it is heard."""
        last = None if self.last is None else Update(Tag(*self.last), Verdict.APPLY)
        state = None if self.history is None else lineage(self.history)
        held = None if self.held is None else Tag(*self.held)
        self.world.say(self, "report", report=Report(self.name, self.generation, state, held, last))
        self.later(1.0, self.report)

    def arrive(self) -> None:
        """Until it is taken in; the report is for a record that was lost."""
        self.world.say(self, "arrived")
        self.world.say(self, "report", report=Report(self.name, self.generation))
        self.later(1.0, self.arrive)


class World:
    """One history, drawn by `seed`: some workers, a launcher that starts them again, and the hub's `Generations`."""

    def __init__(self, seed: int, *, is_lossy: bool = True) -> None:
        self.dice = random.Random(seed)
        self.now_s, self.events, self.count = 0.0, list[tuple[float, int, Callable[[], None]]](), 0
        self.is_lossy = is_lossy
        self.told = Counter[str]()
        self.records: dict[int, Record] = {}
        self.given: dict[tuple[int, str], dict[str, Any]] = {}
        self.waiting: dict[tuple[int, str], list[Callable[[], None]]] = {}
        self.wishes: dict[str, bool] = {}
        self.finished: list[Process] = []
        self.restarts, self.ticks = 3, 0
        workers = self.dice.choice([1, 2, 3, 3, 4])
        self.processes = {f"{slot}.0": Process(self, f"{slot}.0", slot, history=()) for slot in range(workers)}
        first = Record(0, tuple(self.processes), lineage(()))
        self.hub = Generations(
            first, {name: one.slot for name, one in self.processes.items()},
            min_ranks=self.dice.choice([1, 1, 2]), wait_s=self.dice.choice([0.0, 5.0]),
        )  # fmt: skip
        self.records[0] = first
        for process in self.processes.values():
            process.adopt(first)
        for _ in range(self.dice.choice([0, 1, 2, 3])):
            self.at(self.dice.random() * 3, self.strike)

    # Time and the network.

    def at(self, seconds: float, job: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now_s + seconds, self.count, job))

    def delay(self) -> float:
        return self.dice.choice([0.001, 0.01, 0.01, 0.1, 0.4])

    def travel(self, job: Callable[[], None]) -> None:
        """Something that is said arrives: late, twice, or never."""
        fate = self.dice.random() if self.is_lossy else 1.0
        for _ in range(0 if fate < 0.07 else 2 if fate < 0.15 else 1):
            self.at(self.delay(), job)

    def say(self, who: Process, kind: str, **facts: Any) -> None:
        def arrive() -> None:
            if kind == "report":
                self.hub.reported(facts["report"], self.now_s)
            elif kind == "frozen":
                self.hub.answered(who.name, facts["patience_s"], self.now_s)
            elif kind == "heard":
                self.hub.heard(who.name, facts["generation"])
            elif not self.finished:  # else the run is ending
                self.hub.arrived(who.name, who.slot, self.now_s)
            self.deliver()

        self.travel(arrive)

    def deliver(self) -> None:
        """What the hub has to say, and when it wants to be asked again."""
        left_s = self.hub.tick(self.now_s)
        for name, order in self.hub.outbox:
            self.told[order["kind"]] += 1
            process = self.processes[name]
            if order["kind"] == "record":
                record = Record.from_record(order["record"])
                if self.records.setdefault(record.generation, record) != record:
                    raise Broken(f"two records of generation {record.generation}")
            if order["kind"] == "fence":
                self.at(self.dice.choice([0.01, 1.0, 8.0]), lambda process=process: self.die(process))
            elif order["kind"] == "wish":
                self.wishes[name] = True  # the pipe of a worker does not lose it
            elif not process.is_deaf:
                self.travel(lambda process=process, order=order: self.arrive(process, order))
        self.hub.outbox.clear()
        self.ticks += 1
        count = self.ticks
        self.at(max(left_s, 0.01), lambda: self.deliver() if count == self.ticks else None)

    def arrive(self, process: Process, order: Order) -> None:
        """The launcher passes it on, and says that it has heard of a record."""
        if order["kind"] == "record":
            self.say(process, "heard", generation=order["record"]["generation"])
        process.hear(order)

    # Faults.

    def strike(self) -> None:
        living = [one for one in self.processes.values() if not one.is_dead and one not in self.finished]
        if not living:
            return
        victim = self.dice.choice(living)
        if self.dice.random() < 0.2:
            self.told["is deaf"] += 1
            victim.is_deaf = True
            self.at(self.dice.choice([2.0, 10.0]), lambda: setattr(victim, "is_deaf", False))
        elif self.dice.random() < 0.5:
            self.told["dies"] += 1
            self.die(victim)
        elif not victim.is_stopped:
            self.told["is stopped"] += 1
            victim.is_stopped = True
            self.at(self.dice.choice([0.5, 2.0, 4.0, 10.0]), lambda: self.wake(victim))

    def wake(self, process: Process) -> None:
        process.is_stopped = False
        missed, process.missed = process.missed, []
        for job in missed:
            job()

    def die(self, process: Process) -> None:
        """Its launcher tells, and may start another one."""
        if process.is_dead or process in self.finished:
            return
        process.is_dead = True
        self.peers_notice(process)
        is_restarting = self.restarts > 0 and self.dice.random() < 0.7
        self.restarts -= is_restarting

        def tell() -> None:
            is_on_the_way = is_restarting and not self.finished
            if is_on_the_way:
                self.hub.expect(process.slot)
            self.hub.ended(process.name, self.now_s)
            if is_on_the_way:
                self.start(process)
            else:
                self.hub.do_not_expect(process.slot, self.now_s)
            self.deliver()

        self.at(self.delay(), tell)

    def start(self, before: Process) -> None:
        starts = int(before.name.partition(".")[2]) + 1
        process = Process(self, f"{before.slot}.{starts}", before.slot)
        self.processes[process.name] = process
        self.told["is started again"] += 1
        process.is_cut_off = self.dice.random() < 0.1 and len(self.hub.members) > 1
        self.told["is cut off"] += process.is_cut_off
        # for good it would be for ever, should nobody with a state be left: then none is the one to be left out
        self.at(30.0, lambda: setattr(process, "is_cut_off", False))
        process.later(self.dice.choice([0.1, 1.0, 5.0]), process.arrive)

    def peers_notice(self, lost: Process) -> None:
        for other in self.processes.values():
            is_peer = other is not lost and other.generation == lost.generation and not other.is_frozen
            if is_peer and self.dice.random() < 0.8:  # else by its deadline
                other.later(self.delay(), other.freeze)

    def finish(self, process: Process) -> None:
        self.finished.append(process)
        process.is_dead = True
        self.peers_notice(process)

        def tell() -> None:
            self.hub.finished(process.name)
            self.deliver()

        self.at(self.delay(), tell)

    # All of it.

    def run(self, most_s: float = 200.0) -> World:
        """To the end. Raises Broken if somebody lives and does not come to one, or comes to a wrong one."""
        self.deliver()
        while self.events and self.now_s < most_s:
            self.now_s, _, job = heapq.heappop(self.events)
            job()
            living = [one for one in self.processes.values() if not one.is_dead]
            # who comes when others have finished is sent away
            if not living or (self.finished and all(one.generation < 0 for one in living)):
                break
        else:
            raise Broken(f"the run hangs: {[one.name for one in living]} live")
        for process in self.finished:
            assert process.history is not None
            if [step for step, _, _ in process.history] != list(range(1, STEPS + 1)):
                raise Broken(f"the samples of a step are used twice, or never: {process.history}")
            if process.history != self.finished[0].history:
                raise Broken(f"two ends: {process.history}, {self.finished[0].history}")
        return self


def histories(seeds: range, **options: Any) -> Iterator[World]:
    for seed in seeds:
        try:
            yield World(seed, **options).run()
        except Broken as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken


@pytest.mark.parametrize(
    "schedules", [300, pytest.param(1500, marks=pytest.mark.nightly), pytest.param(10_000, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("is_lossy", [False, True])
def test_whatever_the_network_and_the_machines_do_the_run_comes_to_one_end(schedules: int, is_lossy: bool) -> None:
    told, ended, generations = Counter[str](), 0, 0
    for world in histories(range(schedules), is_lossy=is_lossy):
        told.update(world.told)
        ended += bool(world.finished)
        generations += len(world.records)
    assert ended > 0.8 * schedules, "or the faults would have left nothing to be seen"
    assert generations > 1.8 * schedules
    assert all(told[kind] > schedules / 10 for kind in ("record", "freeze", "fence", "wish", "dies", "is stopped"))
    assert told["is cut off"] > schedules / 100


# Data in parts.


def test_a_part_of_the_data_that_nobody_else_has_is_waited_for() -> None:
    parts = {0: "a", 1: "b", 2: "a"}
    rounds = Rounds(wait_s=50.0, part=parts.get)
    rounds.end(1)
    assert rounds.report(0, 2) == []
    assert rounds.wait(49.0) == []
    assert rosters(rounds.arrive(1)) == {("0.0", "1.1", "2.0")}
    assert not rounds.those.newest.is_last
    rounds.end(2)
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.1")}, "rank 0 has the same part"
    assert not rounds.those.newest.is_last


def test_without_a_part_of_the_data_the_run_stops_with_what_it_has() -> None:
    rounds = Rounds(wait_s=50.0, part=lambda slot: slot)
    rounds.end(1)
    rounds.report(0, 2)
    assert rosters(rounds.wait(50.1)) == {("0.0", "2.0")}
    assert rounds.those.newest.is_last


def test_what_is_waited_for_is_known_and_a_stop_ends_the_waiting() -> None:
    rounds = Rounds(min_ranks=3, wait_s=50.0)
    assert rounds.those.awaited_until_s is None
    rounds.end(2)
    assert rounds.those.awaited_until_s is None, "reports are still missing"
    rounds.report(0, 1)
    assert (rounds.those.awaited_until_s, rounds.those.lacking) == (rounds.now_s + 50.0, 1)
    rounds.those.stop(rounds.now_s)
    assert rosters(rounds.told()) == {("0.0", "1.0")}
    assert rounds.those.newest.is_last
    assert rounds.those.awaited_until_s is None


def test_a_stop_before_a_loss_waits_for_nobody_and_is_not_the_end_where_enough_are_left() -> None:
    rounds = Rounds(min_ranks=2, wait_s=50.0)
    rounds.those.stop(rounds.now_s)
    rounds.end(2)
    assert rosters(rounds.report(0, 1)) == {("0.0", "1.0")}
    assert not rounds.those.newest.is_last, "they stop by themselves, after a step"
    rounds.end(1)
    assert rosters(rounds.report(0)) == {("0.0",)}
    assert rounds.those.newest.is_last
