"""What the disk refused, in words: which file, and what a full file system lacks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.system.files import creating, describe_os_error, reading, sync_directory, write_new

BYTES_FREE = 123_000_000


def statvfs_of(*, bytes_free: int, inodes: int, inodes_free: int) -> Any:
    return lambda path: SimpleNamespace(f_bavail=bytes_free, f_frsize=1, f_files=inodes, f_favail=inodes_free)


@pytest.mark.parametrize(
    ("facts", "hint"),
    [
        (
            {"bytes_free": BYTES_FREE, "inodes": 1000, "inodes_free": 0},
            "; no inode is free there (df -i), though 123000000 bytes are: delete files",
        ),
        (
            {"bytes_free": BYTES_FREE, "inodes": 1000, "inodes_free": 9},
            "; 123000000 bytes are free there: look at inodes (df -i) and quotas",
        ),
        (  # Btrfs counts no inodes
            {"bytes_free": BYTES_FREE, "inodes": 0, "inodes_free": 0},
            "; 123000000 bytes are free there: look at inodes (df -i) and quotas",
        ),
        ({"bytes_free": 4096, "inodes": 1000, "inodes_free": 9}, ""),
    ],
)
def test_a_full_file_system_with_free_bytes_may_lack_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, int], hint: str
) -> None:
    monkeypatch.setattr(os, "statvfs", statvfs_of(**facts))
    folder = tmp_path / "not" / "there"
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    assert describe_os_error(error) == f"No space left on device (ENOSPC): there{hint}"


def test_only_a_full_file_system_is_said_to_lack_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", statvfs_of(bytes_free=BYTES_FREE, inodes=1000, inodes_free=0))
    number, path = errno.ENOSPC, str(tmp_path)
    assert describe_os_error(OSError(number, "9 bytes are free", "/a/disk")) == "9 bytes are free (ENOSPC): disk"
    assert describe_os_error(OSError(number, os.strerror(number))) == "No space left on device (ENOSPC)"
    assert describe_os_error(OSError(errno.EIO, "bad", path)) == f"bad (EIO): {tmp_path.name}"
    assert describe_os_error(OSError("no number")) == "no number (OSError)"


def refuse(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_call_that_knows_only_a_descriptor_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_new(tmp_path / "state.json", b"x")
    assert describe_os_error(caught.value) == "Input/output error (EIO): state.json"


def test_a_folder_and_a_file_that_is_read_are_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").touch()
    with pytest.raises(OSError, match="source"), creating(tmp_path / "target"), reading(tmp_path / "source"):
        refuse()  # the inner one
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=str(tmp_path)):
        sync_directory(tmp_path)


def test_a_symbolic_link_in_place_of_a_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    link, circle = tmp_path / "link", tmp_path / "circle"
    link.symlink_to("file")
    with pytest.raises(OSError, match="it is a symbolic link, which HetSeq does not follow") as caught, reading(link):
        pass
    assert caught.value.filename == str(link)
    circle.symlink_to("circle")  # a folder of the path is none of ours
    with pytest.raises(OSError, match="Too many levels of symbolic links"), reading(circle / "file"):
        pass
