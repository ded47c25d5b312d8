"""Whatever happens to the files of a tag: it is refused by name, an older one is loaded, and no code is run."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import hetseq.nebula as nm
from hetseq.checkpoint.records import TooNewError, seal, unseal
from hetseq.errors import CheckpointError
from tests.support.nebula import begun, flip, save, service, state_of, step_in, tags

FILES = ("COMMIT.json", "model.manifest.json", "model.safetensors", "optimizer.safetensors")


@pytest.fixture
def two_tags(tmp_path: Path) -> Path:
    """A place with the tags of steps 1 and 2."""
    with begun(tmp_path):
        save(1, "model", "optimizer")
        save(2, "model", "optimizer")
    return tmp_path


def newest(root: Path) -> Path:
    """The folder of step 2."""
    (folder,) = root.glob("global_step2.*")
    return folder


def drop(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])  # the last byte of a record is only a line feed


def add(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [flip, cut, add, link, drop])
def test_a_damaged_newest_tag_is_passed_over_by_name(
    two_tags: Path, file: str, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert nm.get_latest_checkpoint(two_tags).tag == "global_step2"
    harm(newest(two_tags) / file)
    latest = nm.get_latest_checkpoint(two_tags)
    assert (latest.tag, step_in(latest.load("model"))) == ("global_step1", 1)
    if (harm, file) != (drop, "COMMIT.json"):  # without its commit it is no checkpoint at all
        assert str(newest(two_tags)) in caplog.text
        assert nm.get_latest_checkpoint_path("model", two_tags) == latest.path
    caplog.clear()
    shutil.rmtree(newest(two_tags))
    nm.get_latest_checkpoint(two_tags)
    assert caplog.text == ""


@pytest.mark.parametrize("file", ["model.safetensors", "model.manifest.json"])
def test_a_tag_that_was_named_is_that_one_or_an_error(two_tags: Path, file: str) -> None:
    flip(newest(two_tags) / file)
    named = nm.get_checkpoint("global_step2", two_tags)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        named.load("model")
    assert step_in(named.load("optimizer")) == 2


def test_where_nothing_verifies_there_is_an_error_and_no_fresh_start(two_tags: Path) -> None:
    for folder in two_tags.glob("global_step*"):
        flip(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="2 tags and none of them verifies"):
        nm.get_latest_checkpoint(two_tags)


def test_files_of_two_tags_or_two_names_never_pass_as_one(two_tags: Path) -> None:
    (older,) = two_tags.glob("global_step1.*")
    for name in ("model.safetensors", "model.manifest.json"):
        shutil.copyfile(older / name, newest(two_tags) / name)
    assert nm.get_latest_checkpoint(two_tags).tag == "global_step1"
    for end in ("safetensors", "manifest.json"):
        shutil.copyfile(older / f"optimizer.{end}", older / f"model.{end}")
    with pytest.raises(CheckpointError, match="none of them verifies"):
        nm.get_latest_checkpoint(two_tags)


def test_a_folder_under_another_name_is_refused(two_tags: Path) -> None:
    newest(two_tags).rename(two_tags / "global_step3.0123456789abcdef")
    assert tags(two_tags) == ["global_step1"]
    assert nm.get_latest_checkpoint(two_tags).tag == "global_step1"


def test_a_newer_format_is_refused_and_not_passed_over(two_tags: Path) -> None:
    path = newest(two_tags) / "COMMIT.json"
    record = unseal(path.read_bytes(), source=path)
    path.write_bytes(seal({**record, "version": 2}))
    with pytest.raises(TooNewError, match="format version 2"):
        nm.get_latest_checkpoint(two_tags)


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"name": "../model", "bytes": 10, "manifest_sha256": "0" * 64}]},
        {"files": [{"name": "model", "bytes": -1, "manifest_sha256": "0" * 64}]},
        {"files": {"model": 1}},
        {"tag": "../../elsewhere"},
        {"nonce": "../../"},
        {"world_size": "1"},
        {"created_ns": 1e300},
    ],
)
def test_a_hand_made_commit_is_refused(two_tags: Path, change: dict) -> None:  # type: ignore[type-arg]
    path = newest(two_tags) / "COMMIT.json"
    path.write_bytes(seal({**unseal(path.read_bytes(), source=path), **change}))
    assert nm.get_latest_checkpoint(two_tags).tag == "global_step1"


def test_a_hand_made_manifest_is_refused_although_its_seal_fits(two_tags: Path) -> None:
    path = newest(two_tags) / "model.manifest.json"
    path.write_bytes(seal({**unseal(path.read_bytes(), source=path), "tree": "mine"}))
    assert nm.get_latest_checkpoint(two_tags).tag == "global_step1"
    with pytest.raises(CheckpointError, match=r"not the one that COMMIT\.json names"):
        nm.get_checkpoint("global_step2", two_tags).load("model")


def test_a_file_that_claims_more_than_it_has_allocates_nothing(two_tags: Path) -> None:
    path = newest(two_tags) / "model.safetensors"
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2**33], "data_offsets": [0, 2**35]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="model"):
        nm.get_checkpoint("global_step2", two_tags).load("model")


def test_a_hundred_flipped_bits_are_all_seen(two_tags: Path) -> None:
    draw = random.Random(5)
    files = sorted(newest(two_tags).iterdir())
    for _ in range(100):
        path = draw.choice(files)
        whole = path.read_bytes()
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        assert nm.get_latest_checkpoint(two_tags).tag == "global_step1"
        path.write_bytes(whole)
    assert nm.get_latest_checkpoint(two_tags).tag == "global_step2"


def test_retention_never_removes_the_newest_that_verifies(two_tags: Path) -> None:
    flip(newest(two_tags) / "model.safetensors")  # a byte of a tensor: nothing but reading it all can tell
    with begun(two_tags, num_of_version_in_retention=1):
        save(0).wait(60)  # a branch that begins anew
    assert tags(two_tags) == ["global_step2", "global_step1", "global_step0"]
    with begun(two_tags, num_of_version_in_retention=1):
        save(3).wait(60)
    assert tags(two_tags) == ["global_step3"]


def test_what_a_killed_script_has_left_goes_with_the_next_tag_and_strangers_stay(two_tags: Path) -> None:
    (newest(two_tags) / "COMMIT.json").unlink()
    strangers = [two_tags / "global_step9.0123456789abcdef", two_tags / "runs", two_tags / "model.pt"]
    for path in strangers[:2]:
        path.mkdir()
    strangers[2].touch()
    with begun(two_tags):
        save(3).wait(60)
    assert tags(two_tags) == ["global_step3", "global_step1"]
    assert not list(two_tags.glob("global_step2.*"))
    assert all(path.exists() for path in strangers)


def test_a_file_is_one_that_safetensors_opens(two_tags: Path) -> None:
    assert safetensors.torch.load_file(newest(two_tags) / "model.safetensors")["weight"].equal(
        torch.full((1 << 16,), 2.0)
    )


def test_a_vanished_directory_fails_the_tag_and_not_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "there"
    with begun(root):
        save(1).wait(60)
        root.rename(tmp_path / "gone")  # at once, whatever the writer still does in it
        lost = save(2)
        with pytest.raises(CheckpointError, match=r"'global_step2' was not saved: .*No such file"):
            lost.wait(60)
        assert lost.status == "failed"
        root.mkdir()
        assert save(3).wait(60) == "persisted"
    assert "the tag 'global_step2' was not saved" in caplog.text
    assert tags(root) == ["global_step3"]


def test_a_full_disk_fails_the_tag_and_keeps_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path, memory_buffer_size=0):  # no memory: written here, where a full disk can be played
        save(1).wait(60)
        monkeypatch.setattr("hetseq.nebula.publish.free_bytes", lambda path: 1000)
        with pytest.raises(CheckpointError, match="1000 bytes are free"):
            save(2).wait(60)
        monkeypatch.undo()
        assert save(3).wait(60) == "persisted"
    assert tags(tmp_path) == ["global_step3", "global_step1"]
    assert not list(tmp_path.glob("global_step2.*"))


def test_a_nearly_full_disk_loses_what_is_superseded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path):
        for step in (1, 2, 3):
            save(step)
    with begun(tmp_path, num_of_version_in_retention=2, memory_buffer_size=0):
        room = {3: 1000, 2: 10**9}  # two tags of three: one more fits
        monkeypatch.setattr("hetseq.nebula.publish.free_bytes", lambda path: room.get(len(tags(tmp_path)), 10**9))
        assert save(4).wait(60) == "persisted"
    assert tags(tmp_path) == ["global_step4", "global_step3"]


def test_a_failed_write_in_the_writer_is_told_and_the_next_tag_is_due(tmp_path: Path) -> None:
    with begun(tmp_path, 1e9):
        save(1).wait(60)
        checkpoint = nm.Checkpoint("global_step2", is_best=True)
        folder = tmp_path / checkpoint._saving.attempt.folder_name  # type: ignore[union-attr]
        folder.mkdir()
        (folder / "model.safetensors").touch()  # somebody else's
        checkpoint.save("model", state_of(2))
        checkpoint.commit()
        with pytest.raises(CheckpointError, match="File exists"):
            checkpoint.wait(60)
        assert save(3).wait(60) == "persisted"
    assert service_is_gone()


def service_is_gone() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetseq.nebula.api._script.make", None)
        with pytest.raises(Exception, match="init"):
            service()
    return True


def test_a_writer_that_cannot_live_fails_the_tag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with begun(tmp_path):
        owner = service()
        broken = {**owner._courier._writer._setting, "keep": None, "root": None}
        owner._courier._writer._setting = broken  # every further process dies at once
        os.kill(owner.writer_pid, 9)
        with pytest.raises(CheckpointError, match="3 writer processes died"):
            save(1).wait(60)
    assert caplog.records[-1].levelno >= logging.WARNING
    assert errno.ENOENT
