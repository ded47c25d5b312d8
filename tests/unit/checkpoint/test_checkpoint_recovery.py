"""What is found at the start of a run: whole attempts are completed, litter is removed, everything else is left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.checkpoint import Identity
from tests.support.checkpoints import LINEAGE, contents, folder, loaded_step, manager, save, together


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 and 2 in two parts; step 2 lacks its COMMIT.json."""
    for step in (1, 2):
        together(2, lambda group, step=step: save(tmp_path, step, group=group))
    (folder(tmp_path, 2) / "COMMIT.json").unlink()
    assert loaded_step(tmp_path) == 1
    return tmp_path


def test_a_whole_attempt_is_completed_by_whoever_starts_next(run: Path) -> None:
    (folder(run, 2) / "COMMIT.json.tmp").write_text("half a com")
    said = together(3, lambda group: manager(run, group).recover())
    assert said[0] == [f"completed {folder(run, 2)}, which lacked only its commit"]
    assert said[1:] == [[], []]
    assert loaded_step(run) == 2
    assert not list(run.rglob("*.tmp"))
    assert manager(run).recover() == []


def test_the_commit_is_the_same_whoever_writes_it(run: Path, tmp_path: Path) -> None:
    together(2, lambda group: save(tmp_path / "twin", 2, group=group))
    manager(run).recover()
    assert (folder(run, 2) / "COMMIT.json").read_bytes() == (folder(tmp_path / "twin", 2) / "COMMIT.json").read_bytes()


@pytest.mark.parametrize("name", ["state.json", "part-00001.json", "part-00001.safetensors"])
@pytest.mark.parametrize("change", ["gone", "cut", "flipped", "of another step"])
def test_an_attempt_that_is_not_whole_is_never_committed(run: Path, name: str, change: str) -> None:
    path = folder(run, 2) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    if change == "gone":
        path.unlink()
    elif change == "of another step":
        shutil.copy(folder(run, 1) / name, path)
    else:
        path.write_bytes(content if change == "flipped" else content[:-9])
    assert manager(run).recover() == []
    assert loaded_step(run) == 1
    assert folder(run, 2).is_dir()  # newer than the newest commit: it may still be in the making
    save(run, 3)
    assert {name[:14] for name in contents(run)} == {"step-000000001", "step-000000003"}


def test_attempts_older_than_the_newest_commit_are_litter_even_if_whole(run: Path) -> None:
    kept = run / "checkpoints" / f"step-000000003.{99:016x}"
    together(2, lambda group: save(run, 3, group=group))
    kept.mkdir()  # no state.json yet: of the same step, so it may be somebody's who is just beginning
    (run / "checkpoints" / "notes").mkdir()
    old = folder(run, 1)
    (run / "checkpoints" / f"step-000000001.{99:016x}").mkdir()
    (old / "COMMIT.json").unlink()  # as retention does, and is then killed
    assert len(manager(run).recover()) == 2
    assert contents(run) == {kept.name, manager(run).list()[0].path.name}
    assert (run / "checkpoints" / "notes").is_dir()


def test_litter_of_a_newer_generation_is_left(run: Path) -> None:
    save(run, 2, generation=1, nonce=77)
    (run / "checkpoints" / f"step-000000002.{77:016x}" / "COMMIT.json").unlink()
    save(run, 3, generation=0)
    assert f"step-000000002.{77:016x}" in contents(run)
    assert folder(run, 3).name in contents(run)
    save(run, 4, generation=1)
    assert f"step-000000002.{77:016x}" not in contents(run)


def test_a_damaged_commit_is_neither_completed_nor_removed(run: Path) -> None:
    (folder(run, 2) / "COMMIT.json").write_text("{}")
    before = sorted(folder(run, 2).iterdir())
    assert manager(run).recover() == []
    assert sorted(folder(run, 2).iterdir()) == before
    assert loaded_step(run) == 1


def test_recovery_of_nothing(tmp_path: Path) -> None:
    assert manager(tmp_path / "absent").recover() == []
    assert not (tmp_path / "absent").exists()


def test_a_run_killed_before_its_first_commit_goes_on_from_the_whole_attempt(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (folder(tmp_path, 1) / "COMMIT.json").unlink()
    assert loaded_step(tmp_path) is None
    manager(tmp_path).recover()
    assert loaded_step(tmp_path) == 1


def test_what_a_disk_refuses_at_the_start_is_a_warning(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hetseq.checkpoint import manager as engine

    def refuse(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(engine, "complete_newer", refuse)
    assert manager(run).recover() == []
    assert "Input/output error" in caplog.text


def test_an_attempt_of_one_rank_that_came_back_with_another_world_size(run: Path) -> None:
    """The manifests name the number of parts: three ranks complete what two have written."""
    together(3, lambda group: manager(run, group).recover())

    def job(group: Any) -> Any:
        identity = Identity(3, 0, LINEAGE)
        return manager(run, group).save({"w": torch.ones(2)}, {}, identity=identity, nonce=3, kinds=["time"])

    assert all(result.ok for result in together(3, job))
    assert [len(commit.parts) for commit in manager(run).list()] == [3, 2, 2]
