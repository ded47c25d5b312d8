"""Saving and loading over several ranks: what comes back, what is refused, what the files look like to others."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hetseq.checkpoint import Identity
from hetseq.checkpoint.records import seal, unseal
from hetseq.checkpoint.sync_save import SaveResult, say
from hetseq.errors import EXIT_USAGE, CheckpointRefused, DisagreementError
from tests.support.checkpoints import LINEAGE, contents, folder, loaded_step, manager, save, tensors_of, together


@pytest.mark.parametrize("writers", [1, 2, 3, 5])
def test_a_state_saved_by_any_number_of_ranks_is_loaded_by_any_other(tmp_path: Path, writers: int) -> None:
    for step in (9, 10, 100):  # a reader that sorts names as text would take 9
        results = together(writers, lambda group, step=step: save(tmp_path, step, group=group))
        assert all(result.ok and result.error is None for result in results)
        assert len({(result.path, result.bytes) for result in results}) == 1
    files = list(folder(tmp_path, 100).iterdir())
    assert len([file for file in files if file.suffix == ".safetensors"]) == writers
    assert results[0].bytes == sum(f.stat().st_size for f in files if f.name == "state.json" or "safetensors" in f.name)
    for readers in (1, 2, 3):
        for loaded in together(readers, lambda group: manager(tmp_path, group).load()):
            assert (loaded.identity, loaded.kinds) == (Identity(100, 0, LINEAGE), ("epoch",))
            assert (loaded.state, loaded.skipped) == ({"step": 100}, [])
            assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors_of(100).items())
            assert not any(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors_of(99).items())


def test_loaded_tensors_belong_to_the_caller(tmp_path: Path) -> None:
    save(tmp_path, 1)
    loaded = manager(tmp_path).load()
    assert loaded is not None
    loaded.tensors["model.a"].fill_(7)
    assert loaded_step(tmp_path) == 1


def test_unequal_ranks_write_unequal_parts(tmp_path: Path) -> None:
    together(3, lambda group: save(tmp_path, 1, group=group, weights=[6, 0, 2], elements=100_000))
    sizes = [(folder(tmp_path, 1) / f"part-{index:05d}.safetensors").stat().st_size for index in range(3)]
    assert sizes[0] == pytest.approx(3 * sizes[2], rel=0.01)
    assert sizes[1] < 100
    assert loaded_step(tmp_path) == 1


def test_the_generation_decides_between_two_checkpoints_of_a_step(tmp_path: Path) -> None:
    for generation in (2, 10, 1):
        save(tmp_path, 5, generation=generation, nonce=100 - generation)
    found = manager(tmp_path).list()
    assert [commit.identity.generation for commit in found] == [10, 2, 1]
    loaded = manager(tmp_path).load("5")
    assert loaded is not None
    assert loaded.identity.generation == 10


def test_state_comes_back_as_json_gives_it_and_nothing_else_is_taken(tmp_path: Path) -> None:
    state = {"a": [1, 2.5, None, True, "ü"], "deep": {"seed": 2**62, "lr": 1e-300}, "best": math.inf}
    args: dict[str, Any] = {"identity": Identity(1, 0, LINEAGE), "nonce": 1, "kinds": ["best"]}
    assert manager(tmp_path).save({}, state, **args).ok
    loaded = manager(tmp_path).load()
    assert loaded is not None
    assert loaded.state == state
    for wrong in ({"x": torch.zeros(1)}, {"x": {1: 2}}, {"x": b""}, {"x": {1, 2}}):
        with pytest.raises(TypeError, match="state"):
            manager(tmp_path).save({}, wrong, **(args | {"nonce": 2}))
    with pytest.raises(ValueError, match="belongs to HetSeq"):
        manager(tmp_path).save({}, {"checkpoint": 1}, **(args | {"nonce": 2}))
    for change in ({"kinds": []}, {"kinds": "best"}, {"kinds": ["weekly"]}, {"nonce": -1}, {"nonce": 2**64}):
        with pytest.raises(ValueError, match="expected"):
            manager(tmp_path).save({}, {}, **(args | change))
    with pytest.raises(ValueError, match="lineage"):
        Identity(1, 0, "xyz")


def test_ranks_that_would_save_different_states_are_told_so(tmp_path: Path) -> None:
    def job(group: Any) -> Any:
        tensors = tensors_of(1, elements=10 + (group.rank == 1))
        identity = Identity(1, 0, LINEAGE)
        return manager(tmp_path, group).save(tensors, {}, identity=identity, nonce=1, kinds=["time"])

    results = together(3, job)
    assert all(isinstance(result, DisagreementError) for result in results)
    assert all("model.a is F32 of shape (10,) on rank 0, but F32 of shape (11,) on rank 1" in str(r) for r in results)
    assert contents(tmp_path) == set()


def test_a_tensor_that_cannot_be_copied_is_raised_there_and_told_elsewhere(tmp_path: Path) -> None:
    save(tmp_path, 1)

    class Stubborn(torch.Tensor):
        def detach(self) -> Any:
            raise RuntimeError("the device is gone")

    def job(group: Any) -> Any:
        tensors = tensors_of(2)
        if group.rank == 1:
            tensors["optim.a.step"] = torch.Tensor._make_subclass(Stubborn, tensors["optim.a.step"])
        identity = Identity(2, 0, LINEAGE)
        return manager(tmp_path, group).save(tensors, {"step": 2}, identity=identity, nonce=2, kinds=["time"])

    told, raised = together(2, job)
    assert isinstance(raised, RuntimeError)
    assert not told.ok
    assert told.error == "rank 1: RuntimeError: the device is gone"
    assert loaded_step(tmp_path) == 1


def test_files_are_for_their_owner_only_and_open_with_safetensors(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        together(2, lambda group: save(tmp_path / "run", 1, group=group))
    finally:
        os.umask(old)
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    found: dict[str, torch.Tensor] = {}
    for part in folder(tmp_path / "run", 1).glob("*.safetensors"):
        found |= safetensors.torch.load_file(part)
    assert torch.equal(found["model.b"], tensors_of(1)["model.b"])
    state = json.loads((folder(tmp_path / "run", 1) / "state.json").read_text())
    assert (state["step"], state["checkpoint"]["kinds"]) == (1, ["epoch"])
    assert sorted(path.name for path in paths if path.suffix == ".tmp") == []


def test_an_attempt_is_never_used_twice(tmp_path: Path) -> None:
    assert save(tmp_path, 1, nonce=7).ok
    again = save(tmp_path, 1, nonce=7)
    assert not again.ok
    assert "EEXIST" in str(again.error)
    assert loaded_step(tmp_path) == 1  # and the first one was not cleaned away


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / f"step-000000001.{7:016x}").symlink_to(victim)
    assert not save(tmp_path / "run", 1, nonce=7).ok
    assert list(victim.iterdir()) == []
    save(tmp_path / "run", 2)
    part = folder(tmp_path / "run", 2) / "part-00000.safetensors"
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    assert any(
        "part-00000" in problem for problem in manager(tmp_path / "run").verify(manager(tmp_path / "run").list()[0])
    )


# -- which checkpoint ------------------------------------------------------------------------------------------------


def test_which_names_the_newest_the_best_a_step_or_a_path(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert loaded_step(run) is None
    for step, kinds in ((1, ["best"]), (2, ["epoch", "best"]), (3, ["epoch"])):
        save(run, step, kinds=kinds)
    copied = tmp_path / "my model"
    folder(run, 3).rename(copied)
    assert loaded_step(run) == 2
    assert loaded_step(run, "best") == 2
    assert loaded_step(run, "2") == 2
    assert loaded_step(tmp_path, str(copied)) == 3
    assert loaded_step(tmp_path, str(run)) == 2
    assert loaded_step(tmp_path, str(run / "checkpoints")) == 2
    assert loaded_step(tmp_path, str(folder(run, 2))) == 2
    together(2, lambda group: manager(tmp_path, group).load(str(copied)))


@pytest.mark.parametrize(
    "which", ["best", "2", "PATH/nothing", "PATH/run/checkpoints/UNCOMMITTED", "PATH", "PATH/file"]
)
def test_what_is_not_there_is_refused_on_every_rank(tmp_path: Path, which: str) -> None:
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2, kinds=["time"])
    uncommitted = folder(tmp_path / "run", 2)
    (uncommitted / "COMMIT.json").unlink()
    (tmp_path / "file").write_text("hello")
    which = which.replace("PATH", str(tmp_path)).replace("UNCOMMITTED", uncommitted.name)
    for error in together(3, lambda group: manager(tmp_path / "run", group).load(which)):
        assert isinstance(error, CheckpointRefused)
        assert error.exit_code == EXIT_USAGE
        assert len(str(error)) > 40
    assert loaded_step(tmp_path / "run", "latest") == 1
    assert loaded_step(tmp_path / "run", "1") == 1


def test_pickles_of_2020_are_refused_in_words_and_never_opened(tmp_path: Path) -> None:
    marker = tmp_path / "code ran"

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    old = tmp_path / "checkpoint_last.pt"
    old.write_bytes(pickle.dumps(Bomb()))
    renamed = tmp_path / "model"
    renamed.write_bytes(old.read_bytes())
    for which in ("latest", str(old), str(renamed), str(tmp_path)):
        with pytest.raises(CheckpointRefused, match=r"2020 HetSeq.*cannot be loaded.*--resume none"):
            manager(tmp_path).load(which)
    assert not marker.exists()
    save(tmp_path, 1)  # a run that has gone on here since
    assert loaded_step(tmp_path) == 1


def test_a_newer_format_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = folder(tmp_path, 2) / "COMMIT.json"
    path.write_bytes(seal(unseal(path.read_bytes(), source=path) | {"version": 2}))
    for which in ("latest", str(folder(tmp_path, 2)), str(tmp_path)):
        with pytest.raises(CheckpointRefused, match=r"version 2.*up to version 1"):
            manager(tmp_path).load(which)
    assert loaded_step(tmp_path, "1") == 1


def test_the_hint_is_only_a_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    hint = tmp_path / "checkpoints" / "latest.json"
    assert json.loads(hint.read_text())["directory"] == folder(tmp_path, 2).name
    caplog.set_level(logging.WARNING)
    for content in (
        b"",
        b"{",
        b'{"directory": "../../etc"}',
        b'{"directory": "step-000000009.0000000000000001"}',
        b"[" * 9999,
    ):
        hint.write_bytes(content)
        assert loaded_step(tmp_path) == 2
    hint.unlink()
    assert loaded_step(tmp_path) == 2
    assert caplog.records == []


def test_a_checkpoint_is_told_by_its_folder_in_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "checkpoints" / "step-000000015.0f54"
    say(SaveResult(path, ok=True, error=None, bytes=600_000, seconds=0.1, stall_s=0.0), step=15)
    assert caplog.messages == ["checkpoint of step 15: checkpoints/step-000000015.0f54, 0.6 MB"]
