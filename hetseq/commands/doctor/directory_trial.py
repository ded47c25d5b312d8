"""Tests of a shared directory: does its file system keep the promises that rendezvous and checkpoints need?

Writes its own files in a new folder, removes them afterwards, and returns facts. It judges nothing, and touches no
other file. The caller handles a mount that hangs: everything here may block.

The one idea: a promise of a file system is tested by trying to break it (create an existing file, read during a
rename).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hetseq.cluster.membership.run_directory_discovery import file_system_kind, lies_on_local_disk
from hetseq.commands.doctor.facts import Directory

_BLOCK = bytes(1 << 20)
_SYNCS, _RENAMES = 5, 100
_READ_S = 5.0


def examine(path: Path) -> Directory:
    """Run all tests in `path`; a failure becomes `trouble`, beside the facts found before it."""
    found = Directory(str(path))
    if not path.is_dir():
        return replace(found, trouble="is not a directory" if path.exists() else "does not exist")
    found = replace(found, kind=file_system_kind(path), is_local=lies_on_local_disk(path))
    try:
        about = os.stat(path)
        space = os.statvfs(path)
        found = replace(
            found,
            mode=stat.S_IMODE(about.st_mode),
            is_own=about.st_uid == os.geteuid(),
            free_bytes=space.f_bavail * space.f_frsize,
            free_files=space.f_favail if space.f_files else None,
        )
        with _own_folder(path) as folder:
            for trial in (_try_create, _try_links, _try_renames, _try_sync):
                found = trial(folder, found)
    except OSError as error:
        return replace(found, trouble=f"cannot be used ({error.strerror or error})")
    return found


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    folder = path / f".hetseq-doctor-{secrets.token_hex(6)}"
    os.mkdir(folder, 0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(descriptor)


def _is_refused(work: Callable[[], None]) -> bool:
    try:
        work()
    except FileExistsError:
        return True
    return False


def _try_create(folder: Path, found: Directory) -> Directory:
    """An exclusive create succeeds once; the file is listed at once; its mode is kept; its time follows our clock."""
    file = folder / "created"
    before_s = time.time()
    _write(file, b"one")
    after_s = time.time()
    about = os.stat(file)
    # if the two clocks agree, the time of the file is between two readings of our clock
    ahead_s = max(0.0, about.st_mtime - after_s) or min(0.0, about.st_mtime - before_s)
    return replace(
        found,
        has_one_creator=_is_refused(lambda: _write(file, b"two")) and file.read_bytes() == b"one",
        sees_at_once=file.name in os.listdir(folder),
        keeps_modes=stat.S_IMODE(about.st_mode) == 0o600,
        ahead_s=ahead_s,
    )


def _try_links(folder: Path, found: Directory) -> Directory:
    """A hard link gets a new name, and fails if the name is taken."""
    draft, name = folder / "draft", folder / "linked"
    _write(draft, b"one")
    try:
        os.link(draft, name)
    except OSError:  # FAT, SMB, some FUSE
        return replace(found, has_links=False)
    return replace(found, has_links=_is_refused(lambda: os.link(draft, name)) and os.stat(draft).st_nlink == 2)


def _try_renames(folder: Path, found: Directory) -> Directory:
    """A reader sees the old content or the new one, while other files are renamed to the name."""
    name, contents = folder / "renamed", (b"a" * 4096, b"b" * 4096)
    _write(name, contents[0])
    is_over, faults = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            try:
                if name.read_bytes() not in contents:
                    faults.append("half")
            except OSError:
                faults.append("absent")

    reader = threading.Thread(target=read, name="reader", daemon=True)
    reader.start()
    try:
        for number in range(_RENAMES):
            draft = folder / f"draft-{number}"
            draft.write_bytes(contents[number % 2])
            os.replace(draft, name)
    finally:
        is_over.set()
        reader.join(_READ_S)
    return replace(found, has_whole_renames=not faults)


def _try_sync(folder: Path, found: Directory) -> Directory:
    """The median time to write 1 MiB to the disk."""
    times = []
    for number in range(_SYNCS):
        begin = time.perf_counter()
        _write(folder / f"synced-{number}", _BLOCK)
        times.append(time.perf_counter() - begin)
    return replace(found, fsync_s=statistics.median(times))
