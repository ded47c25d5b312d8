"""What `hetseq top` reads of a run besides status files: rows, events, and the start of its launcher."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hetseq.monitor.lookout import Lookout, RankSign, Start, Tail
from tests.support.recorded import step_row, validation_row

STARTED_NS = 1_000_000_000_000


def lock(run: Path, **changes: Any) -> None:
    """A launcher that took the lock 1000 s after the beginning of time."""
    (run / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **changes}))
    os.utime(run / ".lock", ns=(STARTED_NS, STARTED_NS))


def log(run: Path, slot: int, *, at_ns: int = STARTED_NS + 1) -> None:
    (run / "log").mkdir(exist_ok=True)
    path = run / "log" / f"rank-{slot}.txt"
    path.touch()
    os.utime(path, ns=(at_ns, at_ns))


def write_rows(path: Path, *rows: dict[str, Any], end: str = "") -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + end)


def test_rows_of_a_file_that_grows_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    tail = Tail(path, 1000)
    assert tail.rows() == []  # there is no file yet
    write_rows(path, {"a": 1}, end='{"a": ')
    assert tail.rows() == [{"a": 1}]
    assert tail.rows() == []
    write_rows(path, end='2}\nnull\n{"a": 3\n')
    assert tail.rows() == [{"a": 2}]  # what is no row is left out
    path.write_text('{"a": 4}\n')  # another file of this name
    assert tail.rows() == [{"a": 4}]


def test_of_a_long_file_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_rows(path, *({"a": number} for number in range(1000)))
    tail = Tail(path, 100)
    rows = tail.rows()
    assert 5 <= len(rows) <= 10
    assert [row["a"] for row in rows] == list(range(1000 - len(rows), 1000))
    write_rows(path, *({"a": number} for number in range(1000, 2000)))
    assert tail.rows()[-1] == {"a": 1999}  # and what was missed is not read later


def test_steps_are_those_of_the_rows_and_the_later_of_two_counts(tmp_path: Path) -> None:
    rows = [step_row(1, 4.0), step_row(2, 3.0), validation_row(2, 9.0), step_row(3, None), step_row(2, 2.0, seconds=0)]
    write_rows(tmp_path / "metrics.jsonl", *rows)
    look = Lookout(tmp_path)
    look.signs()
    [first, second] = look.steps
    assert first == (1, 4.0, 120.0)
    assert second[:2] == (2, 2.0)
    assert math.isnan(second[2])


def test_routine_events_do_not_push_out_an_incident(tmp_path: Path) -> None:
    story = {"event": "generation", "story": "rank 1 on labB was killed"}
    write_rows(tmp_path / "events.jsonl", story, *({"event": "save", "step": step} for step in range(200)))
    look = Lookout(tmp_path)
    look.signs()
    assert list(look.events) == [story]


def test_without_a_report_the_newest_rows_tell_of_the_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", *(step_row(step, 1 / step) for step in (1, 2, 3)))
    look = Lookout(tmp_path)
    assert look.signs() == []
    regrouping, starting = ([RankSign(0, {"pid": 1, "state": state}, 0.0)] for state in ("train", "start"))
    told = look.teller(regrouping)
    assert told is not None
    assert (told.is_current, told.facts.row["step"], told.facts.eta_s) == (False, 3, None)
    assert told.facts.summary is not None
    assert told.facts.summary.share.tolist() == [30, 30]
    assert look.teller(starting) is None  # those rows are of an earlier start


def test_rows_of_another_program_tell_nothing(tmp_path: Path) -> None:
    odd = [{"step": 1, "shares": "x", "ranks": {}}, {"step": 2, "loss": "x", "shares": [1], "ranks": [7]}]
    write_rows(tmp_path / "metrics.jsonl", *odd)
    look = Lookout(tmp_path)
    look.signs()
    assert look.teller([RankSign(0, {"pid": 1, "state": "train"}, 0.0)]) is None


@pytest.mark.parametrize(
    ("config", "size"),
    [("distributed_world_size: 3\njoin: null\n", 3), ("distributed_world_size: 3\njoin: file:///x\n", None),
     ("", None), (": {", None)],
)  # fmt: skip
def test_a_start_is_the_launchers_and_counts_who_has_loaded(tmp_path: Path, config: str, size: int | None) -> None:
    look = Lookout(tmp_path, wall=lambda: 1012.0)
    assert look.start() is None
    lock(tmp_path)
    (tmp_path / "config.yaml").write_text(config)
    log(tmp_path, 0)
    log(tmp_path, 1)
    log(tmp_path, 2, at_ns=STARTED_NS - 1)  # of an earlier start
    assert look.start() == Start(loaded=2, size=size, age_s=12.0, is_lost=False)
    (tmp_path / ".lock").write_text("")  # as the launcher leaves it
    assert look.start() is None


def test_a_launcher_that_was_killed_has_lost_its_start(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for told, is_lost in (({"pid": pid}, True), ({"pid": pid, "host": "elsewhere"}, False)):
        lock(tmp_path, **told)
        start = Lookout(tmp_path).start()
        assert start is not None
        assert start.is_lost == is_lost


def test_reports_of_an_earlier_start_are_not_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    path = tmp_path / "status" / "rank-0.json"
    path.write_text('{"pid": 1, "state": "stopped"}')
    os.utime(path, ns=(STARTED_NS - 1, STARTED_NS - 1))
    look = Lookout(tmp_path)
    assert [sign.told["state"] for sign in look.signs()] == ["stopped"]
    lock(tmp_path)
    assert look.signs() == []
    path.write_text('{"pid": 2, "state": "start"}')
    assert [sign.told["state"] for sign in look.signs()] == ["start"]


def test_the_age_of_an_event_is_measured_if_its_time_can_be_read(tmp_path: Path) -> None:
    look = Lookout(tmp_path, wall=lambda: 1012.0)
    assert look.since({"time_utc": "1970-01-01T00:16:40.000Z"}) == 12.0
    assert look.since({"time_utc": "1970-01-01T01:16:40.000Z"}) == 0.0  # a clock that is fast
    assert math.isnan(look.since({"time_utc": "soon"}))
    assert math.isnan(look.since({}))
