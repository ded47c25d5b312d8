"""The benchmark of recoveries without its processes: what a kill has cost by the lines of the steps, and the table."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
SECOND_NS = 10**9


@pytest.fixture
def recover(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("recover")


def lines(recover: Any, *told: tuple[int, int, float], began_s: float = 0.0) -> list[Any]:
    """Lines from (step, process, second)."""
    began_ns = int(began_s * SECOND_NS)
    return [recover.Line(step, pid, int(at_s * SECOND_NS), began_ns, began_ns + 1) for step, pid, at_s in told]


# What a kill has cost.


def test_survivors_that_go_on_repeat_no_step(recover: Any) -> None:
    calm = lines(recover, (4, 7, 1.0), (4, 8, 1.0), (4, 9, 1.1), (5, 7, 2.0))
    # 8 makes step 5, whose commit it had seen, a little after the signal
    survivors = lines(recover, (5, 8, 2.6), (6, 7, 3.0), (6, 8, 3.1), (7, 7, 3.5))
    joined = lines(recover, (7, 10, 3.6), (8, 10, 4.0), began_s=2.75)
    found = recover.measure([*calm, *survivors, *joined], int(2.5 * SECOND_NS))
    assert (found.next_s, found.again, found.back_s, found.last_before) == (0.5, 0, 1.1, 5)
    assert found.began_s == 0.25


def test_a_new_start_repeats_the_steps_since_the_checkpoint(recover: Any) -> None:
    calm = lines(recover, *((step, pid, float(step)) for step in range(1, 18) for pid in (7, 8)))
    again = lines(recover, *((step, pid, 20.0 + step) for step in range(11, 20) for pid in (17, 18)), began_s=20.0)
    found = recover.measure([*calm, *again], int(17.5 * SECOND_NS))
    assert found.again == 7  # steps 11 to 17
    assert (found.next_s, found.back_s, found.began_s) == (20.5, 13.5, 2.5)


def test_a_survivor_that_goes_back_repeats_too(recover: Any) -> None:
    calm = lines(recover, (4, 7, 1.0), (4, 8, 1.0), (5, 7, 2.0), (5, 8, 2.0))
    after = lines(recover, (5, 8, 3.0), (6, 8, 4.0), (6, 9, 4.1))
    assert recover.measure([*calm, *after], int(2.5 * SECOND_NS)).again == 1


@pytest.mark.parametrize(
    ("after", "what"), [([(5, 8, 3.0)], "no new process"), ([(4, 9, 3.0)], "no good step"), ([], "no good step")]
)
def test_what_has_not_recovered_has_no_figures(recover: Any, after: list[Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        recover.measure(lines(recover, (4, 7, 1.0), (4, 8, 1.0), *after), int(2.5 * SECOND_NS))


def test_a_kill_is_over_when_all_ranks_have_made_good_steps_together(recover: Any) -> None:
    calm = [(4, pid, 1.0) for pid in (7, 8, 9)]
    two = [(step, pid, 3.0) for step in (5, 6, 7) for pid in (7, 8)]
    whole = [(step, pid, 4.0) for step in (8, 9, 10) for pid in (7, 8, 10)]
    for told, is_over in ((calm, False), (two, False), (two + whole[:-1], False), (two + whole, True)):
        assert recover.is_over(lines(recover, *calm, *told), 2 * SECOND_NS, 3) is is_over
    repeated = [(step, pid, 4.0) for step in (2, 3, 4) for pid in (7, 8, 10)]
    assert not recover.is_over(lines(recover, *calm, *repeated), 2 * SECOND_NS, 3)


def test_a_line_that_is_being_written_is_not_read(recover: Any, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    assert recover.read_lines(path) == []
    assert recover.newest(path) == 0
    path.write_text("1 8 30 10 20\n1 7 31 10 20\n2 7 3")
    assert recover.read_lines(path) == [recover.Line(1, 8, 30, 10, 20), recover.Line(1, 7, 31, 10, 20)]
    assert recover.newest(path) == 1
    assert recover.pids(recover.read_lines(path)) == [7, 8]


# Where it kills.


def test_kills_are_spread_over_the_steps_between_two_checkpoints(recover: Any) -> None:
    kills = recover.kills_of(recover.parse(["--rounds", "5", "--every", "10"]))
    assert sorted(kill.step for kill in kills) == [21, 23, 25, 27, 29]
    assert [kill.victim for kill in kills] == [0, 1, 2, 0, 1]
    assert all(0 <= kill.after_s <= 0.02 for kill in kills)
    assert kills == recover.kills_of(recover.parse(["--rounds", "5", "--every", "10"]))
    assert kills != recover.kills_of(recover.parse(["--rounds", "5", "--every", "10", "--seed", "1"]))
    (late,) = recover.kills_of(recover.parse(["--rounds", "1", "--every", "50"]))
    assert late.step == 51  # there is a checkpoint to go back to


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--ranks", "1"], ["--every", "0"], ["--sample-ms", "-1"]])
def test_arguments_that_cannot_be_meant_end_in_words(
    recover: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        recover.parse(words)
    assert "expected at least 1" in capsys.readouterr().err


# What is started.


def test_both_sides_train_the_same_toy(recover: Any, tmp_path: Path) -> None:
    arguments = recover.parse([])
    sources = []
    for side in (recover.hetseq, recover.torchrun):
        folder = tmp_path / side.__name__
        folder.mkdir()
        assert str(folder / "toy.py") in " ".join(side(folder, arguments))
        sources.append((folder / "toy.py").read_text().replace(str(folder), "FOLDER"))
    ours, theirs = (ast.parse(source).body for source in sources)
    shared = len(ast.parse(recover.toy(tmp_path, arguments)).body)
    assert [ast.dump(each) for each in ours[:shared]] == [ast.dump(each) for each in theirs[:shared]]
    assert len(ours) > shared < len(theirs)
    imported = [name.name for each in theirs if isinstance(each, ast.Import) for name in each.names]
    assert sorted(imported) == ["os", "time", "torch", "torch.distributed"]


def test_a_process_and_what_it_has_started_are_ended(recover: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "GRACE_S", 0.05)
    sleeper = f"{sys.executable} -c 'import time; time.sleep(60)'"
    process = subprocess.Popen(["/bin/sh", "-c", f"{sleeper} & wait"], start_new_session=True)
    try:
        while not (under := recover.below(process.pid)):
            assert process.poll() is None
        assert process.pid in recover.below(os.getpid())
        assert all(recover.start_time(pid) for pid in under)
        recover.end(process)
        assert process.returncode == -15
        assert [recover.start_time(pid) for pid in under] == [""] * len(under)
    finally:
        process.kill()
        process.wait()


# The table.


def rounds_of(recover: Any, ours: list[float], theirs: list[float]) -> list[Any]:
    return [
        {
            "HetSeq": recover.Recovery(one, 0, 2 * one, 25, 0.1, 0.1),
            "torchrun": recover.Recovery(other, 5, other, 25, 0.5, 3.0),
        }
        for one, other in zip(ours, theirs)
    ]


def test_sides_are_compared_round_by_round(recover: Any) -> None:
    # the second round was busy from end to end; a ratio of medians would be the same only by chance
    rows = recover.evaluate(rounds_of(recover, [0.1, 0.9, 0.2], [3.0, 27.0, 6.0]))
    assert rows[1]["times"].low == rows[1]["times"].high == pytest.approx(30)
    assert rows[0]["times"].median == 1
    assert [row["again"].median for row in rows] == [0, 5]


@pytest.mark.parametrize(("theirs", "code"), [(2.0, 0), (1.9, 1)])
def test_a_bar_that_is_missed_is_an_exit_code(
    recover: Any, theirs: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(ranks=3, every=10)
    assert recover.report(rounds_of(recover, [0.1], [theirs]), arguments) == code
    *table, verdict, figures = capsys.readouterr().out.splitlines()
    assert ("NO" in verdict) == bool(code)
    assert len({line.count("|") for line in table[1:]}) == 1
    assert json.loads(figures)["rows"][1]["next_s"]["median"] == theirs
