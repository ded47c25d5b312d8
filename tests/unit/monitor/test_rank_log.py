"""The file of a rank's prints: how large it gets, and what it says of what is not there any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetseq.monitor import rank_log
from hetseq.monitor.rank_log import RankOutput
from hetseq.run_directory import RunDirectory


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankOutput:
    monkeypatch.setattr(rank_log, "_MOST_BYTES", 1 << 20)
    RunDirectory.prepare(tmp_path, config_yaml="")
    return RankOutput(RunDirectory(tmp_path), 3)


def test_a_file_of_prints_has_one_older_file_and_says_so(output: RankOutput, tmp_path: Path) -> None:
    path, older = tmp_path / "log" / "rank-3.out", tmp_path / "log" / "rank-3.out.1"
    output.limit_prints()
    assert not path.exists()
    printing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # as the rank holds it, and its loaders
    for number in range(5):
        os.write(printing, b"%d" % number * (1 << 19))
        output.limit_prints()
    os.close(printing)
    note = b"---- earlier prints: the last 1 MiB of them are in rank-3.out.1\n"
    assert path.read_bytes() == note
    assert older.read_bytes() == b"3" * (1 << 19) + b"4" * (1 << 19)
    assert older.stat().st_mode & 0o777 == 0o600


def test_what_a_terminal_does_not_take_is_in_the_file_behind_a_line_that_says_so(
    output: RankOutput, tmp_path: Path
) -> None:
    output._spill(b"a\n")
    output._spill(b"b\n")
    os.close(output._spilt)
    said = (tmp_path / "log" / "rank-3.out").read_text()
    assert said == "---- the terminal takes no text; what follows was for it\na\nb\n"
