"""The present code reads in the files of earlier versions what those versions read: `tests/golden/old.json`.

Nothing is trained here. tests/end_to_end/test_old_files.py resumes these runs.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hetseq
import hetseq.nebula as nm
from hetseq.cli import main
from tests.support.old_files import GOLDEN, describe, digest, flip, losses, plain, planted, runs, told, unpack

MOST_BYTES = 2_000_000
ARCHIVES = sorted(path.name.removesuffix(".tar.gz") for path in GOLDEN.glob("*.tar.gz"))


def unpacked(name: str, folder: Path) -> Path:
    """The run directory of `runs()[name]`."""
    archive, _, inside = name.partition("/")
    return unpack(archive, folder) / inside


# checkpoints


@pytest.mark.parametrize("name", runs())
def test_every_checkpoint_and_every_loss_is_what_it_was(name: str, tmp_path: Path) -> None:
    run = unpacked(name, tmp_path)
    assert describe(run) == runs()[name]["checkpoints"]
    assert losses(run) == runs()[name]["losses"]


def test_a_wrong_byte_would_be_seen(tmp_path: Path) -> None:
    """The twin: a byte of a file, and a number, the type and the shape of a tensor."""
    run = unpacked("exact", tmp_path)
    (folder,) = (run / "checkpoints").glob("step-000000008.*")
    flip(folder / "part-00000.safetensors", -1)
    before, found = runs()["exact"]["checkpoints"], describe(run)
    assert [entry["step"] for entry in found if entry.get("is_damaged")] == [8]
    assert [entry for entry in found if entry["step"] != 8] == [entry for entry in before if entry["step"] != 8]
    zeros = torch.zeros(3)
    assert len({digest(zeros), digest(-zeros), digest(zeros.double()), digest(zeros[:2])}) == 4


def test_the_archives_hold_every_kind_of_checkpoint_and_a_loss_scale(tmp_path: Path) -> None:
    kinds = {kind for facts in runs().values() for entry in facts["checkpoints"] for kind in entry["kinds"]}
    assert kinds == {"interval", "epoch", "best", "final", "time", "signal"}
    (state,) = unpacked("optimizers/fp16", tmp_path).glob("checkpoints/step-000000004.*/state.json")
    assert json.loads(state.read_text())["loss_scale"][0] == 2.0**14  # it was halved twice


@pytest.mark.parametrize("name", runs())
def test_the_command_checkpoints_lists_and_verifies_them(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, facts = unpacked(name, tmp_path), runs()[name]
    damaged = facts.get("damaged")
    assert main(["checkpoints", "list", str(run), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    listed = [(entry["step"], sorted(entry["kinds"])) for entry in json.loads(line)["checkpoints"]]
    assert listed == [(entry["step"], entry["kinds"]) for entry in reversed(facts["checkpoints"])]
    assert main(["checkpoints", "verify", str(run)]) == (0 if damaged is None else 1)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line[5:14]) for line in lines if ": ok, " not in line] == ([] if damaged is None else [damaged])


@pytest.mark.parametrize("name", runs())
def test_load_run_gives_what_they_recorded(name: str, tmp_path: Path) -> None:
    run, facts = hetseq.load_run(unpacked(name, tmp_path)), runs()[name]
    found = [None if math.isnan(loss) else loss for loss in run.loss.tolist()]  # of a step that was skipped
    assert dict(zip(map(str, run.steps.tolist()), found)) == facts["losses"]
    saved = {(int(row["step"]), *sorted(row["kinds"].split("+"))) for row in run.checkpoints}
    assert {(entry["step"], *entry["kinds"]) for entry in facts["checkpoints"]} <= saved
    assert run.run_id == re.findall("run id ([0-9a-f]{16})", run.config_text)[0]
    assert run.config["save_dir"] == name
    assert {event["event"] for event in run.events} >= {"versions", "save"}
    assert np.isfinite(run.shares).sum(axis=1).tolist() == run.world_size.tolist()
    assert run.world_size.tolist() == [len(run.config["devices"])] * len(run.steps)


# shared memory


def test_the_arenas_of_a_killed_run_are_planted_and_removed(tmp_path: Path) -> None:
    run = unpacked("memory", tmp_path)
    arenas = sorted((tmp_path / "memory_arenas").iterdir())
    with planted(tmp_path / "memory_arenas", run) as paths:
        assert len(paths) == len(arenas) == 6
        assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert not any(path.exists() for path in paths)
    assert int(told()["memory"]["resumed_from"]) > max(entry["step"] for entry in runs()["memory"]["checkpoints"])


# tags of hetseq.nebula


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of three tags."""
    return unpack("nebula", tmp_path)


def test_the_tags_hold_what_was_saved(place: Path) -> None:
    values, damaged = told()["nebula"]["values"], told()["nebula"]["damaged"]
    listed = nm.list_checkpoints(place)
    assert [checkpoint.tag for checkpoint in listed] == sorted(values, reverse=True)
    for checkpoint in listed:
        assert sorted(checkpoint.names) == sorted(values[checkpoint.tag])
        for name, value in values[checkpoint.tag].items():
            if (checkpoint.tag, name) != (damaged, "model"):
                assert as_json(checkpoint.load(name)) == value


def test_tied_tensors_of_a_tag_share_their_memory(place: Path) -> None:
    model = nm.get_checkpoint("global_step2", place).load("model")
    model["tied"][1, 0] = 77
    assert model["same"][1, 0] == model["row"][0] == 77
    model["ordered"].move_to_end("b")
    assert list(model["ordered"]) == ["a", "b"]


def test_the_damaged_tag_is_passed_over_and_refused_by_its_name(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = told()["nebula"]["damaged"]
    (folder,) = place.glob(f"{damaged}.*")
    assert nm.get_latest_checkpoint(place).tag == "global_step2"
    assert str(folder) in caplog.text
    with pytest.raises(hetseq.CheckpointError, match=r"model\.safetensors"):
        nm.get_checkpoint(damaged, place).load("model")
    assert nm.get_checkpoint("global_step4", place).tag == ""
    assert len(list(place.glob("global_step4.*"))) == 1


def test_another_value_in_a_tag_would_be_seen() -> None:
    """The twin: values that Python calls equal have different types here."""
    assert plain([1, (2,)]) != plain([True, (2,)]) != plain([1, [2]])
    assert plain({1: -0.0}) != plain({1: 0.0})


def as_json(value: Any) -> Any:
    """A loaded state in the form of `old.json`."""
    return json.loads(json.dumps(plain(value)))


# the folder itself


def test_the_folder_is_small_and_its_table_names_every_file() -> None:
    files = [path for path in GOLDEN.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    table = (GOLDEN / "README.md").read_text()
    assert [path.name for path in files if f"`{path.name}`" not in table] == ["README.md"]
    assert sorted(told()) == ARCHIVES
    assert {facts["commit"] for facts in told().values()} <= set(re.findall(r"`([0-9a-f]{12})`", table))


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_never_rewritten(name: str) -> None:
    content = (GOLDEN / f"{name}.tar.gz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == told()[name]["sha256"]


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_names_no_machine_and_no_person(name: str) -> None:
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == sorted(
            (member.name for member in members), key=lambda path: path.split("/")
        )
        assert {(member.uid, member.gid, member.uname, member.mtime) for member in members} == {(0, 0, "", 0)}
        for member in members:
            file = archive.extractfile(member) if member.name.endswith((".json", ".jsonl", ".yaml", ".csv")) else None
            text = "" if file is None else file.read().decode(errors="replace")
            assert set(re.findall(r'"(/[a-z]+)', text)) <= {"/mnt"}, member.name
            assert set(re.findall(r'"([^"/]*)/cpu"', text)) <= {"old"}, member.name
            assert set(re.findall(r'"node": "([^"]*)"', text)) <= {"old"}, member.name


def test_the_old_tasks_import_only_torch_and_public_names() -> None:
    tree = ast.parse((GOLDEN / "old_tasks.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert [name.name for name in node.names] == ["torch"]
        if isinstance(node, ast.ImportFrom) and node.module == "hetseq":
            assert {name.name for name in node.names} <= set(hetseq.__all__)
        elif isinstance(node, ast.ImportFrom):
            assert node.module in ("__future__", "torch", "torch.utils.data")
