"""`checkpointHistories.csv`: a line for every save, and a torn one is no line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hetseq.checkpoint import read_history
from hetseq.checkpoint.history import COLUMNS, HISTORY_NAME, append_history
from tests.support.checkpoints import manager, save, together


def test_every_save_has_its_line(tmp_path: Path) -> None:
    result = together(2, lambda group: save(tmp_path, 1, group=group, kinds=["best", "epoch"]))[0]
    save(tmp_path, 1, nonce=16)  # the folder is there already
    first, second = read_history(tmp_path / HISTORY_NAME)
    assert tuple(first) == COLUMNS
    assert [first[key] for key in ("run", "step", "kinds", "parts", "world_size", "result", "error")] == [
        "a-run", "1", "epoch+best", "2", "2", "ok", ""
    ]  # fmt: skip
    assert first["bytes"] == str(result.bytes)
    assert first["time_utc"] == "2023-11-14T22:13:20Z"
    assert float(first["write_s"]) + float(first["commit_s"]) <= float(first["duration_s"]) + 1e-5
    assert float(first["throughput_MBps"]) == pytest.approx(result.bytes / 1e6 / float(first["duration_s"]), rel=0.01)
    assert (second["result"], second["bytes"]) == ("failed", "0")
    assert "EEXIST" in second["error"]


@pytest.mark.parametrize("torn", ["2023-11-14T22:13:2", "x" * 10_000, '2023,"unended, 5\x00'])
def test_a_torn_last_line_is_passed_over_and_cut(tmp_path: Path, torn: str) -> None:
    path = tmp_path / HISTORY_NAME
    append_history(path, {"step": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode())
    assert [row["step"] for row in read_history(path)] == ["1"]
    append_history(path, {"step": 2})
    assert [row["step"] for row in read_history(path)] == ["1", "2"]
    assert path.read_bytes().startswith(whole)
    assert torn.encode() not in path.read_bytes()


def test_a_file_that_is_one_torn_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / HISTORY_NAME
    path.write_text("time_utc,run,st")
    append_history(path, {"step": 1})
    assert [row["step"] for row in read_history(path)] == ["1"]
    assert read_history(tmp_path / "absent") == []


def test_an_error_of_many_lines_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / HISTORY_NAME
    append_history(path, {"error": 'disk "full",\nsays\r\nthe disk'})
    assert path.read_bytes().count(b"\n") == 2
    with path.open(newline="") as file:
        assert next(csv.DictReader(file))["error"] == 'disk "full", says the disk'


def test_a_column_that_does_not_exist_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weather"):
        append_history(tmp_path / HISTORY_NAME, {"weather": "fine"})


def test_a_history_that_is_a_link_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / HISTORY_NAME).symlink_to(tmp_path / "victim")
    assert save(tmp_path, 1).ok
    assert (tmp_path / "victim").read_text() == "precious\n"


def test_a_save_that_lost_ranks_gave_up_has_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = manager(tmp_path)
    result = own.give_up(10, nonce=7, kinds=["interval", "best"], error="a rank was lost")
    assert (result.ok, result.error, result.path.name) == (False, "a rank was lost", "step-000000010.0000000000000007")
    (line,) = read_history(tmp_path / HISTORY_NAME)
    assert (line["step"], line["kinds"], line["result"], line["error"]) == (
        "10", "interval+best", "failed", "a rank was lost",
    )  # fmt: skip
    assert caplog.messages == ["checkpoint of step 10 failed, the older ones stay: a rank was lost"]
