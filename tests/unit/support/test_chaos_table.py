"""The table of chaos without its runs: what follows from events, rows and the times of kills."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.chaos import table
from tests.chaos.table import Growth, Kill, Passage, Run

NOON_S = 1_767_268_800.0  # 2026-01-01T12:00:00Z


def generation(number: int, ranks: list[int], *, second: float, seconds: float | None = 0.1, step: int = 0) -> Any:
    """An event as it stands in events.jsonl."""
    time_utc = f"2026-01-01T12:00:{second:06.3f}Z"
    return {"time_utc": time_utc, "event": "generation", "generation": number, "step": step, "ranks": ranks,
            "story": "", "seconds": seconds}  # fmt: skip


def row(step: int, generation: int, loss: float = 1.0) -> Any:
    return {"step": step, "generation": generation, "loss": loss}


# What happened.


def test_generations_say_when_their_ranks_went_on_and_whether_they_had_lost_one() -> None:
    events = [
        {"time_utc": "2026-01-01T12:00:00.000Z", "event": "save"},
        generation(2, [0, 2], second=1.5, seconds=0.25, step=7),
        generation(3, [0, 1, 2], second=2.0, seconds=None),
        generation(5, [0, 1, 2], second=3.0),  # one was lost, and came back before the others went on
        generation(6, [1, 2], second=4.0),
        generation(8, [0, 1], second=5.0),
    ]
    found = table.passages(events, ranks=3)
    assert found[0] == Passage(2, 7, NOON_S + 1.5, 0.25, frozenset({0, 2}), is_join=False)
    assert found[0].noticed_s == NOON_S + 1.25
    assert found[1].noticed_s == found[1].at_s
    assert [passage.is_join for passage in found] == [False, True, False, False, False]
    assert table.passages(events[1:2], ranks=2)[0].is_join is False  # others, and not only more


def test_survivors_know_of_a_kill_when_they_stop_training() -> None:
    seen = table.passages([generation(1, [0], second=2.0, seconds=0.5), generation(2, [0, 1], second=3.0)], ranks=2)
    assert table.detections([Kill(NOON_S + 1.25, 1)], seen) == [0.25]
    assert table.until_they_went_on([Kill(NOON_S + 1.25, 1)], seen) == [0.75]
    assert table.replacements([Kill(NOON_S + 1.25, 1)], seen) == [1.75]


def test_two_kills_in_a_row_do_not_say_when_each_was_known() -> None:
    seen = table.passages([generation(2, [0], second=2.0), generation(3, [0, 1], second=5.0)], ranks=3)
    kills = [Kill(NOON_S + 1.0, 1), Kill(NOON_S + 1.5, 2)]
    assert table.detections(kills, seen) == []
    assert table.until_they_went_on(kills, seen) == [1.0, 0.5]
    assert table.replacements(kills, seen) == [4.0]  # rank 2 had not come back when the run was over
    assert table.detections([kills[0], Kill(NOON_S + 4.0, 2)], seen) == pytest.approx([0.9, 0.9])


def test_whoever_was_never_missed_has_no_time() -> None:
    seen = table.passages([generation(2, [0], second=2.0), generation(3, [0, 1], second=3.0, seconds=None)], ranks=2)
    late = [Kill(NOON_S + 4.0, 1)]
    assert (table.detections(late, seen), table.replacements(late, seen)) == ([], [])
    assert table.until_they_went_on(late, seen) == [math.inf]
    assert table.detections([Kill(NOON_S + 2.5, 1)], seen) == []  # told by a rank that was not there before
    # the generation that was being formed when it was killed still has it
    assert table.replacements([Kill(NOON_S + 2.95, 1)], table.passages([generation(3, [0, 1], second=3.0)], 2)) == []


# What it has cost.


def test_a_step_that_is_repeated_before_its_commit_is_not_lost() -> None:
    seen = table.passages([generation(1, [0], second=1.0, step=2)], ranks=2)
    rows = [row(1, 0), row(2, 0), row(3, 1), row(4, 1)]
    assert table.steps_lost(rows, seen) == 0
    assert table.steps_lost([*rows, row(2, 0)], seen) == 0  # told twice: by a writer that died, and by its successor
    assert table.steps_lost([row(1, 0), row(2, 0), row(3, 0), row(3, 1)], seen) == 1
    assert table.steps_lost([row(1, 0), row(2, 0), row(3, 0)], seen) == 1  # and never made again
    assert table.steps_lost([row(1, 0), row(2, 0), row(2, 1)], seen) == 1  # made again, whatever was said
    back = table.passages([generation(1, [0], second=1.0, step=0)], ranks=2)
    assert table.steps_lost([row(1, 0), row(2, 0), row(1, 1), row(2, 1)], back) == 2


def test_a_step_whose_only_witness_was_killed_is_made_again_and_not_lost() -> None:
    seen = table.passages([generation(1, [1], second=1.0, step=2)], ranks=2)
    rows = [row(1, 0), row(2, 0), row(3, 0), row(3, 1)]
    witness = Kill(seen[0].at_s - 0.1, 0)
    assert table.steps_lost(rows, seen, [witness], 2) == 0
    for other in (Kill(witness.time_s, 1), Kill(seen[0].at_s + 0.1, 0)):  # who wrote it lived
        assert table.steps_lost(rows, seen, [other], 2) == 1
    # of two steps somebody else had seen the first one, or there would not be the second
    further = [*rows, row(4, 0), row(4, 1)]
    assert table.steps_lost(further, seen, [witness], 2) == 1


def test_the_worst_loss_is_relative_and_steps_must_be_the_same() -> None:
    calm = [row(1, 0, 4.0), row(2, 0, 2.0)]
    assert table.worst_loss_difference(calm, calm) == 0
    assert table.worst_loss_difference([row(1, 0, 4.4), row(2, 3, 1.5)], calm) == 0.25
    assert table.worst_loss_difference(calm[:1], calm) == math.inf
    assert table.worst_loss_difference([row(1, 0, 4.0), row(3, 0, 2.0)], calm) == math.inf


# The table.


def test_a_bar_holds_or_not_and_nothing_holds_none() -> None:
    assert table.at_most("x", [0.5, 1.0], 1.0).holds is True
    found = table.at_most("x", [0.5, 1.1], 1.0, ".2f")
    assert found == table.Line("x", "≤ 1 s", "at most 1.10 s, median 0.80 (n = 2)", False)
    assert table.at_most("x", [], 1.0).holds is False
    assert table.median_at_most("x", [0.1, 0.2, 9.0], 0.2).holds is True
    assert table.median_at_most("x", [0.1, 0.3, 9.0], 0.2).holds is False
    assert table.median_at_most("x", [], 0.2).holds is False
    assert table.all_of("x", 3, 3).holds is True
    assert (table.all_of("x", 2, 3).holds, table.all_of("x", 0, 0).holds) == (False, False)
    assert (table.none_of("x", 0).holds, table.none_of("x", 1).holds) == (True, False)
    assert table.spread("x", [9.0]) == table.Line("x", "", "at most 9.000 s, median 9.000 (n = 1)", None)


def test_growth_is_what_was_held_at_the_end_over_what_was_held_at_the_beginning() -> None:
    first = Growth(memory_bytes=100_000_000, descriptors=20, threads=3, shared_files=0)
    grown = table.grown([first, first, Growth(120_000_000, 20, 2, 1)])
    assert [line.holds for line in grown] == [True, True, False, None]
    assert [line.measured for line in grown] == ["20 to 20", "3 to 2", "0 to 1", "100.0 to 120.0 MB, +10.000 a run"]
    assert all("over 2 runs" in line.what for line in grown)


def run(section: str = "kills", **facts: Any) -> Run:
    """A run of two ranks, of which rank 1 is killed, missed at once, and back a second later; `facts` are others."""
    events = [generation(1, [0], second=2.0, seconds=0.25), generation(2, [0, 1], second=3.0, seconds=0.125)]
    good: dict[str, Any] = {
        "kills": [Kill(NOON_S + 1.5, 1)], "passages": table.passages(events, 2), "is_right": True,
        "is_ledger_right": True, "loss_difference": 1e-15, "distance": 1e-16,
    }  # fmt: skip
    return Run(section, "seed 7", "python -m tests.chaos", 2, **{**good, **facts})


def shown(*runs: Run) -> dict[str, table.Line]:
    return {line.what: line for line in table.table_of(runs)}


def test_a_good_run_of_each_section_holds_all_bars() -> None:
    lines = shown(*(run(section) for section in ("kills", "phases", "kinds", "detection")), run("kills", pairs=1))
    assert [line.what for line in lines.values() if line.holds is False] == []
    assert lines["kills survived"].measured == "2 of 2 (2 runs, 0 of rank zero, 1 times two at once)"
    assert lines["from a kill until the others know"].measured == "at most 0.250 s, median 0.250 (n = 1)"
    assert lines["from a kill until it is replaced"].measured == "at most 1.500 s, median 1.500 (n = 1)"
    assert "(n = 4)" in lines["recovery in process"].measured  # what waits for an answer is not in it
    assert "0.125" in lines["a join: the others wait"].measured
    assert "kills survived" not in shown(run("phases"))


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"is_right": False}, ["kills survived"]),
        ({"loss_difference": 1e-10}, ["losses, relative to a run without faults"]),
        ({"distance": 1e-11}, ["parameters, relative distance"]),
        ({"is_ledger_right": False}, ["runs whose steps took their samples, once"]),
        ({"kills": [Kill(NOON_S - 5.0, 1)]}, ["from a kill until others train"]),
        ({"steps_lost": 1}, ["committed steps lost"]),
        ({"has_hung": True}, ["hangs"]),
        ({"processes_left": 2}, ["processes left"]),
        ({"shared_files": 1}, ["files left in /dev/shm"]),
        (
            {"passages": table.passages([generation(1, [0], second=2.0, seconds=5.5)], 2)},
            ["recovery in process, median", "recovery in process"],
        ),
    ],
)
def test_what_is_wrong_with_one_run_shows_in_its_line(facts: dict[str, Any], what: list[str]) -> None:
    lines = shown(run(), run(**facts))
    assert [line.what for line in lines.values() if line.holds is False] == what


def test_a_run_that_left_nothing_to_compare_misses_every_bar_of_the_kills() -> None:
    lines = shown(Run("kills", "seed 7", "", 3, wrong="it hung", has_hung=True))
    assert all(line.holds is False for line in list(lines.values())[:5])


def test_a_stop_is_judged_from_its_deadline_on() -> None:
    stopped = {"deadline_s": 2.0, "kills": [Kill(NOON_S - 1.5, 1)]}
    line = shown(run("detection", **stopped))["from the deadline after a stop until others train"]
    assert line == table.Line(line.what, "≤ 2 s", "at most 1.500 s, median 1.500 (n = 1)", True)
    late = {**stopped, "kills": [Kill(NOON_S - 2.5, 1)]}
    assert shown(run("detection", **late))[line.what].holds is False
    never = {**stopped, "passages": []}  # did anybody go on
    assert shown(run("detection", **stopped), run("detection", **never))[line.what].holds is False
    assert "recovery in process" not in shown(run("detection", **stopped))


def test_the_table_is_aligned_and_says_what_does_not_hold() -> None:
    lines = table.text([table.none_of("hangs", 0), table.none_of("left", 2), table.spread("join", [1.0])]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split("|")[4].strip() for line in lines[2:]] == ["yes", "NO", ""]
