"""The benchmark of goodput without its processes: what runs with kills have cost, and what is simulated of them."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
STEP_S, KILL_S = 0.1, 7.04  # the kill comes within step 71


@pytest.fixture
def goodput(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("goodput")


def lines(goodput: Any, *told: tuple[int, int, float]) -> list[Any]:
    """Lines from (step, process, second), in order of time."""
    made = [goodput.recover.Line(step, pid, round(at_s * 1e9), 0, 0) for step, pid, at_s in told]
    return sorted(made, key=lambda line: line.made_ns)


def steps(pids: tuple[int, ...], first: int, last: int, begin_s: float, step_s: float = STEP_S) -> Any:
    """Steps of some processes; the first one is made at `begin_s`."""
    return [(step, pid, begin_s + (step - first) * step_s) for step in range(first, last + 1) for pid in pids]


def in_place(goodput: Any) -> Any:
    """Step 70 is made at 7.0 s; the others notice at 7.1 s, regroup until 7.15 s, and do step 71 in 0.148 s; the new
    process is back with step 72, 0.06 s later than without it."""
    calm, alone = steps((7, 8, 9), 1, 70, 0.1), steps((7, 8), 71, 71, 7.298)
    return goodput.Record(lines(goodput, *calm, *alone, *steps((7, 8, 10), 72, 90, 7.458)), [round(KILL_S * 1e9)])


def restarted(goodput: Any, halts_s: tuple[float, ...] = (4.0,)) -> Any:
    """Ten steps after each checkpoint of ten, and then a kill."""
    told, kills_s, at_s = steps((7, 8, 9), 1, 70, 0.1), list[float](), 7.0
    for number, halt_s in enumerate(halts_s, start=1):
        kills_s.append(at_s + 0.04)
        began_s, pid = kills_s[-1] + halt_s, 7 + 3 * number
        told += steps((pid, pid + 1, pid + 2), 61 + 10 * number, 70 + 10 * number, began_s + STEP_S)
        at_s = began_s + 10 * STEP_S
    return goodput.Record(lines(goodput, *told), [round(at_s * 1e9) for at_s in kills_s])


def test_costs_in_place_are_taken_from_the_lines(goodput: Any) -> None:
    arguments = goodput.parse([])
    found = goodput.measure(in_place(goodput), goodput.KINDS["replicas"], arguments)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.kills_s == (pytest.approx(1.04),), "since step 60, a checkpoint"
    assert (found.steps, found.wall_s) == (30, pytest.approx(7.458 + 18 * STEP_S - 6.0))
    assert found.halt_s == pytest.approx(0.05), "of 7.298 s, less the end of the step at 7.1 s and 0.148 s"
    assert found.join_s == pytest.approx(0.06)
    assert found.back_s == pytest.approx(7.298 - KILL_S)
    simulated = goodput.simulate(goodput.KINDS["replicas"], found, arguments)
    assert simulated == pytest.approx(found.goodput, rel=0.01)


def test_a_kill_that_meets_another_one_says_nothing_of_their_costs(goodput: Any) -> None:
    record, arguments = in_place(goodput), goodput.parse([])
    also = goodput.Record(record.lines, [*record.kills_ns, record.kills_ns[0] + 10**8])
    assert goodput.costs_in_place(also, STEP_S, arguments) == goodput.Costs()


def test_costs_of_restarts_are_evened_out(goodput: Any) -> None:
    arguments = goodput.parse([])
    found = goodput.measure(restarted(goodput, (3.0, 5.0)), goodput.KINDS["restart"], arguments)
    assert found.halt_s == pytest.approx(4.0)
    assert found.kills_s == (pytest.approx(1.04), pytest.approx(1.04 + 4.0 + 1.0 + 0.04)), "as long after the halt"
    assert found.steps == 30
    assert found.wall_s == pytest.approx(1.04 + 3.0 + 1.04 + 5.0 + 1.0)
    simulated = goodput.simulate(goodput.KINDS["restart"], found, arguments)
    assert simulated == pytest.approx(found.goodput, rel=0.01)


def test_a_step_after_a_kill_is_new_where_no_rank_had_made_it_or_the_process_is_new(goodput: Any) -> None:
    told = lines(goodput, (5, 7, 1.0), (5, 8, 1.0), (5, 7, 2.5), (6, 8, 3.0), (5, 9, 3.5))
    in_place, restart = (
        [(line.step, line.pid) for line in goodput.resumed(told, 2 * 10**9, goodput.KINDS[kind])]
        for kind in ("replicas", "restart")
    )
    assert (in_place, restart) == ([(6, 8)], [(5, 9)])


def test_kills_are_of_ranks_that_are_there(goodput: Any) -> None:
    found = goodput.absences_of((1.0, 1.1, 1.2, 5.0), 0.5, 2)
    assert [(one.begin_s, one.end_s, one.node) for one in found] == [(1.0, 1.5, 0), (1.1, 1.6, 1), (5.0, 5.5, 0)]


def test_a_step_takes_longer_where_fewer_ranks_share_it(goodput: Any) -> None:
    step_s = goodput.step_of(0.1, goodput.parse(["--sample-ms", "10"]))
    assert [step_s((left,)) for left in (3, 2, 1, 0)] == pytest.approx([0.1, 0.14, 0.26, math.inf])


@pytest.mark.parametrize("words", [["--every", "0"], ["--ranks", "1"], ["--rates", "0"], ["--seconds", "0"]])
def test_arguments_that_cannot_be_meant_end_in_words(
    goodput: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        goodput.parse(words)
    assert "expected" in capsys.readouterr().err


def test_the_bar_is_for_each_run(goodput: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"what": "replicas", "steps_per_kill": 10, "kills_s": (1.0,), "steps": 30, "halt_s": 0.1, "goodput": 0.5,
         "simulated": simulated, "load": 1.0}
        for simulated in (0.54, 0.46)
    ]  # fmt: skip
    assert goodput.report(rows, goodput.parse([])) == 0
    assert goodput.report([*rows, {**rows[0], "simulated": 0.56}], goodput.parse([])) == 1
    said = capsys.readouterr().out
    assert "2 of 3 within 10% of the measured goodput" in said
    assert json.loads(said.splitlines()[-1])["bench"] == "goodput"
