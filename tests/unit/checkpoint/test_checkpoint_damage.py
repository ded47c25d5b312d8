"""Damaged, mixed and hostile checkpoints: refused or harmless, and the one before is loaded."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint.records import CHUNK_BYTES, seal, unseal
from hetseq.errors import CheckpointRefused
from tests.support.checkpoints import folder, loaded_step, manager, save, together


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of the steps 1 and 2 in two parts each."""
    for step in (1, 2):
        together(2, lambda group, step=step: save(tmp_path / "run", step, group=group))
    assert loaded_step(tmp_path / "run") == 2
    return tmp_path / "run"


FILES = ("COMMIT.json", "state.json", "part-00000.json", "part-00001.json", "part-00000.safetensors")


@pytest.mark.fault("FT-13")
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_refused_or_harmless(run: Path, name: str) -> None:
    generator, path = random.Random(name), folder(run, 2) / name
    whole = path.read_bytes()
    refused = 0
    for _ in range(25):
        torn = bytearray(whole)
        torn[generator.randrange(len(torn))] ^= 1 << generator.randrange(8)
        path.write_bytes(torn)
        refused += loaded_step(run) == 1  # loaded_step itself checks that every number is of that step
    assert refused >= 20  # of 25; a flip in the white space of JSON changes nothing
    if name != "COMMIT.json":
        assert refused == 25
    path.write_bytes(whole)
    assert loaded_step(run) == 2


@pytest.mark.fault("FT-13")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "change",
    ["cut", "gone", *(pytest.param(change, marks=pytest.mark.slow) for change in ("empty", "longer", "folder"))],
)
def test_a_file_of_another_size_is_refused(run: Path, name: str, change: str) -> None:
    path = folder(run, 2) / name
    content = path.read_bytes()
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change != "gone":
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "longer": content + b"\0\0"}[change])
    assert loaded_step(run) == 1
    if change != "folder":
        path.write_bytes(content)
        assert loaded_step(run) == 2


def mix(run: Path, other: Path, names: list[str]) -> None:
    """Put files of one checkpoint into another."""
    for name in names:
        shutil.copy(other / name, folder(run, 2) / name)


@pytest.mark.parametrize(
    "names",
    [
        ["part-00000.safetensors"],
        ["part-00000.safetensors", "part-00000.json"],
        ["state.json"],
        ["COMMIT.json"],
        ["part-00000.safetensors", "part-00000.json", "part-00001.safetensors", "part-00001.json"],
        ["part-00000.safetensors", "part-00000.json", "part-00001.safetensors", "part-00001.json", "state.json"],
    ],
)
@pytest.mark.parametrize(
    "source", ["the step before", "another run", pytest.param("another lineage", marks=pytest.mark.slow)]
)
def test_a_mixture_of_two_checkpoints_is_refused(run: Path, tmp_path: Path, names: list[str], source: str) -> None:
    if source == "the step before":
        other = folder(run, 1)
    else:
        settings: dict[str, Any] = {"run_id": "another"} if source == "another run" else {"generation": 1}
        together(2, lambda group: save(tmp_path / "other", 2, group=group, nonce=99, value=3, **settings))
        other = folder(tmp_path / "other", 2)
    mix(run, other, names)
    assert loaded_step(run) == 1
    mix(run, other, ["COMMIT.json"])  # with all of the rest it still belongs to another folder
    assert loaded_step(run) == 1


def test_parts_that_changed_places_are_refused(run: Path) -> None:
    place = folder(run, 2)
    for suffix in ("safetensors", "json"):
        (place / f"part-00000.{suffix}").rename(place / "aside")
        (place / f"part-00001.{suffix}").rename(place / f"part-00000.{suffix}")
        (place / "aside").rename(place / f"part-00001.{suffix}")
    assert loaded_step(run) == 1


def edit(path: Path, change: Callable[[dict], None], *, resealed: bool = True) -> None:  # type: ignore[type-arg]
    record = unseal(path.read_bytes(), source=path)
    seal_of_old = json.loads(path.read_bytes())["seal"]
    change(record)
    path.write_bytes(seal(record) if resealed else json.dumps({**record, "seal": seal_of_old}).encode())


EDITS: dict[str, Callable[[dict], None]] = {  # type: ignore[type-arg]
    "step": lambda record: record.update(step=3),
    "kinds": lambda record: record.update(kinds=["best"]),
    "kinds text": lambda record: record.update(kinds="best"),
    "lineage": lambda record: record.update(lineage="f" * 16),
    "generation": lambda record: record.update(generation=-1),
    "step is a text": lambda record: record.update(step="2"),
    "lineage is a number": lambda record: record.update(lineage=1),
    "no parts": lambda record: record.update(parts=[], number_of_parts=0),
    "one part": lambda record: record.update(parts=record["parts"][:1], number_of_parts=1),
    "many parts": lambda record: record.update(number_of_parts=2**40),
    "part twice": lambda record: record.update(parts=[record["parts"][0]] * 2),
    "huge part": lambda record: record["parts"][0].update(bytes=2**60),
    "huge state": lambda record: record["state"].update(bytes=2**60),
    "digest": lambda record: record["parts"][0].update(manifest_sha256="../../etc/passwd"),
    "no digest": lambda record: record["state"].pop("sha256"),
    "format": lambda record: record.update(format="something"),
    "version": lambda record: record.update(version=0),
    "nonce": lambda record: record.update(nonce="1"),
}


# without a fitting seal it is one check that refuses them all
SEALS = [pytest.param(name, resealed, marks=[] if resealed or name == "kinds" else pytest.mark.slow)
         for resealed in (False, True) for name in EDITS]  # fmt: skip


@pytest.mark.parametrize(("name", "resealed"), SEALS)
def test_an_edited_commit_is_refused_even_with_a_fitting_seal(run: Path, name: str, resealed: bool) -> None:
    edit(folder(run, 2) / "COMMIT.json", EDITS[name], resealed=resealed)
    assert loaded_step(run) == 1


def test_a_resealed_commit_without_a_change_is_accepted(run: Path) -> None:
    edit(folder(run, 2) / "COMMIT.json", lambda record: record.update(step=2))
    assert loaded_step(run) == 2


@pytest.mark.fault("FT-13")
def test_what_is_skipped_is_said_with_folder_file_and_reason(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder(run, 2) / "part-00001.safetensors").unlink()
    loaded = manager(run).load()
    assert loaded is not None
    (sentence,) = loaded.skipped
    assert all(word in sentence for word in (str(folder(run, 2)), "part-00001.safetensors", "No such file"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    reason = "part-00001.safetensors: No such file or directory"
    assert record.getMessage().startswith(f"step 2 is damaged ({reason}")
    assert record.getMessage().endswith("): step 1 is used instead")


def test_damage_that_is_met_while_reading_is_said_once_without_a_rank_or_a_class(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(run, 2) / "part-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    loaded = together(3, lambda group: manager(run, group).load())
    assert [one.identity.step for one in loaded] == [1, 1, 1]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("step 2 is damaged (part-00001.safetensors: ")
    assert caplog.messages[0].endswith("): step 1 is used instead")
    assert "DamagedError" not in loaded[0].skipped[0]


@pytest.mark.parametrize("name", ["part-00001.safetensors", "COMMIT.json"])
@pytest.mark.parametrize("which", ["2", "best", "PATH"])
def test_a_checkpoint_named_outright_is_loaded_or_refused_never_replaced(tmp_path: Path, name: str, which: str) -> None:
    for step in (1, 2):
        together(2, lambda group, step=step: save(tmp_path, step, group=group, kinds=["best", "epoch"]))
    path = folder(tmp_path, 2) / name
    which = which.replace("PATH", str(folder(tmp_path, 2)))
    assert loaded_step(tmp_path, which) == 2
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    if which == "best" and name == "COMMIT.json":
        assert loaded_step(tmp_path, which) == 1  # nothing says any more that the other one was the best
        return
    for error in together(2, lambda group: manager(tmp_path, group).load(which)):
        assert isinstance(error, CheckpointRefused)
        assert folder(tmp_path, 2).name in str(error)


def test_a_run_of_which_nothing_verifies_does_not_start_anew_unsaid(run: Path) -> None:
    for step in (1, 2):
        (folder(run, step) / "state.json").unlink()
    for error in together(2, lambda group: manager(run, group).load()):
        assert isinstance(error, CheckpointRefused)
        assert "starting anew would hide that" in str(error)
    for step in (1, 2):
        shutil.rmtree(folder(run, step))
    assert loaded_step(run) is None


@pytest.mark.fault("FT-13")
def test_one_rank_that_cannot_read_makes_all_fall_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetseq.checkpoint import load as loading

    real = loading.read
    bad = folder(run, 2)
    unlucky = iter([False, True, False])  # of three ranks, one

    def read(inspected, tensors):  # type: ignore[no-untyped-def]
        if inspected.commit.path == bad and next(unlucky):
            raise OSError(5, "Input/output error", str(bad / "part-00000.safetensors"))
        return real(inspected, tensors)

    monkeypatch.setattr(loading, "read", read)
    loaded = together(3, lambda group: manager(run, group).load())
    assert [one.identity.step for one in loaded] == [1, 1, 1]
    assert all("Input/output error" in one.skipped[0] for one in loaded)


def test_verify_lists_all_that_is_wrong(run: Path) -> None:
    one = manager(run)
    newest = one.list()[0]
    assert one.verify(newest) == []
    content = bytearray((newest.path / "part-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (newest.path / "part-00000.safetensors").write_bytes(content)
    assert one.verify(newest, deep=False) == []
    assert one.latest() == newest
    (newest.path / "state.json").unlink()
    problems = one.verify(newest)
    assert len(problems) == 2
    assert all(any(name in problem for problem in problems) for name in ("state.json", "part-00000.safetensors"))
    latest = one.latest()
    assert latest is not None
    assert latest.identity.step == 1


@pytest.mark.slow
def test_a_thousand_flipped_bits(run: Path) -> None:
    generator = random.Random(0)
    paths = sorted(folder(run, 2).iterdir())
    harmless = 0
    for _ in range(1000):
        path = generator.choice(paths)
        whole = path.read_bytes()
        torn = bytearray(whole)
        torn[generator.randrange(len(torn))] ^= 1 << generator.randrange(8)
        path.write_bytes(torn)
        harmless += loaded_step(run) == 2
        path.write_bytes(whole)
    assert harmless < 20


@pytest.mark.parametrize("elements", [1000, 3_000_000])
def test_a_damaged_chunk_is_told_with_the_bytes_that_the_file_has_there(tmp_path: Path, elements: int) -> None:
    assert save(tmp_path, 1, elements=elements).ok
    path = folder(tmp_path, 1) / "part-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    begin = len(content) // CHUNK_BYTES * CHUNK_BYTES
    told = f"{path.name}: the {len(content) - begin} bytes from byte {begin} on do not match their checksum"
    own = manager(tmp_path)
    assert own.verify(own.list()[0]) == [told]
    with pytest.raises(CheckpointRefused, match=told):
        own.load("1")


@pytest.mark.parametrize("name", FILES)
def test_a_symbolic_link_in_place_of_a_file_is_called_one(run: Path, name: str) -> None:
    path = folder(run, 2) / name
    own = manager(run)
    newest = own.list()[0]
    path.rename(run / name)
    path.symlink_to(run / name)
    told = f"{name}: it is a symbolic link, which HetSeq does not follow here: put the file itself in its place"
    assert own.verify(newest)[0] == told
    assert loaded_step(run) == 1
