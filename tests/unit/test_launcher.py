"""What a launcher answers the hub before it has workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetseq.cluster.directories import leave_mark
from hetseq.cluster.member import Member
from hetseq.errors import ConfigError
from hetseq.launcher import Launcher
from hetseq.options import parse
from hetseq.run_directory import RunDirectory


def launcher(save_dir: Path | None) -> Launcher:
    words = [] if save_dir is None else ["--save-dir", str(save_dir)]
    return Launcher(parse(["--cpu", *words]), ["cpu"], command="hetseq train")


def look(launcher: Launcher, run: Path) -> Any:
    """The answer when another node has made `run`, which this node sees."""
    mark = leave_mark(RunDirectory.prepare(run, config_yaml=""))
    nobody = cast(Member, SimpleNamespace())
    return launcher._answer(nobody, {"kind": "see", "mark": dataclasses.asdict(mark)})


def commit(run: Path) -> Path:
    """A run directory that looks as if it had a checkpoint."""
    place = RunDirectory.prepare(run, config_yaml="").checkpoints / f"step-{7:09d}.{'0' * 16}"
    place.mkdir()
    (place / "COMMIT.json").touch()
    return run


def test_a_directory_that_is_seen_is_shared_whatever_ones_own_option_says(tmp_path: Path) -> None:
    for own in (None, tmp_path / "own", tmp_path / "run"):
        assert look(launcher(own), tmp_path / "run") == {"kind": "seen", "is_shared": True}
        assert (own is None) or own.name == "run" or not own.exists()


def test_checkpoints_in_a_directory_of_ones_own_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --join the first rank may be another node's at each start, and then another --save-dir would count."""
    own = commit(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"own holds checkpoints up to step 7, but the run directory is .*run"):
        look(launcher(own), tmp_path / "run")
    assert look(launcher(own), own)["is_shared"] is True
    monkeypatch.chdir(commit(tmp_path / "checkpoints").parent)
    assert look(launcher(None), tmp_path / "run")["is_shared"] is True  # nobody named that directory
