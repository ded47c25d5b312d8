"""Whose run directory is used by whom: found out by launchers before any worker starts.

Responsible for telling whether two launchers mean the same directory by a path, and for the one run id of all run
directories. It refuses to move anything: what a directory lacks the ranks give each other (`comm.directory_groups`).

The one idea: equal paths prove nothing and different mounts may be one, so the owner of a directory leaves a file with
a random name and random content in it, and whoever can open that file under the same absolute path shares it. On a
network file system a new file may show late, so a launcher looks again for some seconds; not, though, where the path
lies on a file system of this node alone, or where a folder is missing that had been there before this start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq.config.sections import CheckpointConfig
from hetseq.errors import ConfigError
from hetseq.run_directory import RunDirectory, open_private
from hetseq.system.files import write_all

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_MARK = re.compile(r"\.mark-[0-9a-f]{32}")
_COMMITTED = re.compile(r"step-(\d{9,19})\.[0-9a-f]{16}")
_MOUNTS = Path("/proc/self/mountinfo")
# File systems that one node has for itself. What is not named here may be shared: then patience costs some seconds.
_LOCAL = frozenset(
    (
        *("bcachefs", "btrfs", "ecryptfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs", "ntfs3"),
        *("overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "ubifs", "vfat", "xfs", "zfs"),
    )
)


@dataclass(frozen=True)
class Mark:
    """A file by which other launchers recognise a run directory; every field is text, so that it travels as JSON."""

    path: str  # of the run directory, absolute
    name: str
    content: str
    standing: str  # a folder of the path that was there before this start, so that no cache can hide it


def leave_mark(directory: RunDirectory, *, is_owner: bool = True) -> Mark:
    """Write a mark into a run directory. Raises OSError.

    An owner, the launcher that holds the directory's lock, removes the marks that a killed one has left there.
    """
    with contextlib.suppress(OSError):
        for name in filter(_MARK.fullmatch, os.listdir(directory.path) if is_owner else ()):
            os.unlink(directory.path / name)
    mark = Mark(
        str(directory.path), f".mark-{secrets.token_hex(16)}", secrets.token_hex(16), str(directory.standing)
    )  # fmt: skip
    descriptor = open_private(directory.path / mark.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(descriptor, mark.content.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return mark


def remove_mark(mark: Mark) -> None:
    """Remove what `leave_mark` wrote; it may be gone already."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(mark.path, mark.name))


def sees(
    mark: Mark, *, patience_s: float = 15.0, pause: Callable[[float], None], now: Callable[[], float] = time.monotonic
) -> bool:
    """Whether this node sees the directory of `mark` under the same path, and may write there.

    `pause` waits some seconds. A mark that names no file of ours is not looked for.
    """
    folder = Path(mark.path)
    if not folder.is_absolute() or not _MARK.fullmatch(mark.name):
        return False
    deadline = now() + (patience_s if may_show_late(mark) else 0.0)
    while not _is_there(folder, mark):
        if now() >= deadline:
            return False
        pause(_POLL_S)
    return _may_write(folder)


def may_show_late(mark: Mark) -> bool:
    """Whether a directory that is not seen here may be seen in some seconds."""
    if not os.path.isdir(mark.standing):
        return False
    return not lies_on_local_disk(Path(mark.path))


def lies_on_local_disk(path: Path) -> bool:
    """Whether an absolute path lies on a file system of this node alone; False where that cannot be told."""
    return file_system_kind(path) in _LOCAL


def file_system_kind(path: Path) -> str:
    """The kind of file system that an absolute path lies on, as `ext4` or `nfs4`; empty where that cannot be told."""
    existing = next(folder for folder in (path, *path.parents) if os.path.isdir(folder))
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""
    return kind_of(os.path.realpath(existing), mounts)


def is_local(path: str, mountinfo: str) -> bool:
    """Whether `path`, absolute and without links, lies on a file system of this node alone; pure.

    `mountinfo` is as for `kind_of`. A file system of an unknown kind counts as shared.
    """
    return kind_of(path, mountinfo) in _LOCAL


def kind_of(path: str, mountinfo: str) -> str:
    """The kind of file system under `path`, absolute and without links; pure.

    `mountinfo` is the text of /proc/self/mountinfo.
    """
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        is_above = point == "/" or path == point or path.startswith(f"{point}/")
        if is_above and len(point) >= len(best):  # of two mounts on one point the later one is seen
            best, kind = point, right.split(" ")[0]
    return kind


def newest_step(directory: RunDirectory) -> int | None:
    """The step of the newest commit by its name, believed but not verified; None where there is none."""
    return next((step for step, path in reversed(_attempts(directory)) if _is_committed(path)), None)


def check_own_place(config: CheckpointConfig, path: str) -> None:
    """Raise ConfigError where this node was told of another directory, and checkpoints there would be forgotten."""
    own = RunDirectory(Path(os.path.abspath(config.save_dir)))
    newest = None if config.save_dir == type(config).save_dir or str(own.path) == path else newest_step(own)
    if newest is not None:
        raise ConfigError(
            f"--save-dir {config.save_dir} holds checkpoints up to step {newest}, but the run directory is {path}, the"
            " --save-dir of the node with rank 0, which this node shares: give all nodes the same --save-dir"
        )


def has_commits(directory: RunDirectory) -> bool:
    """Whether a run directory holds a checkpoint; the newest folder is looked into last.

    A folder in which a writer hangs, as on a mount that does not answer, holds whoever looks into it.
    """
    return any(_is_committed(path) for _, path in _attempts(directory))


def _attempts(directory: RunDirectory) -> list[tuple[int, Path]]:
    """Steps and folders of all attempts to save, oldest first."""
    try:
        names = os.listdir(directory.checkpoints)
    except OSError:
        return []
    found = [(int(match[1]), directory.checkpoints / name) for name in names if (match := _COMMITTED.fullmatch(name))]
    return sorted(found)


def _is_committed(attempt: Path) -> bool:
    return os.path.lexists(attempt / "COMMIT.json")


@dataclass(frozen=True)
class FoundDirectories:
    """What a launcher found in the run directory that it owns."""

    host: str
    path: str
    run_id: str
    newest: int | None  # step of the newest commit


def choose_run_id(places: Sequence[FoundDirectories]) -> tuple[str, str | None]:
    """The run id of all run directories, given in the order of their lowest ranks; or why there is none. Pure.

    A directory without a commit takes the id of those that have one. The second value says in a sentence that two
    directories hold checkpoints of different runs; it is None where all is well.
    """
    committed = [place for place in places if place.newest is not None]
    first = next(iter(committed), places[0])
    others = [place for place in committed if place.run_id != first.run_id]
    if not others:
        return first.run_id, None
    held = "; ".join(f"{place.host} has {_describe(place)}" for place in (first, *others))
    other = others[0]
    return first.run_id, (
        f"the run directories of the nodes hold checkpoints of different runs, and only one of them can go on: {held}."
        f" To go on with that of {first.host}, give {other.host} another --save-dir, or move {other.path} away there"
        f" (it gets a copy of what it lacks); to go on with that of {other.host}, do the same with {first.path} on"
        f" {first.host}"
    )


def _describe(place: FoundDirectories) -> str:
    return f"{place.path} (run id {place.run_id}, up to step {place.newest})"


def _is_there(folder: Path, mark: Mark) -> bool:
    try:
        descriptor = open_private(folder / mark.name, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.read(descriptor, 256) == mark.content.encode()
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _may_write(folder: Path) -> bool:
    """Tried for real: permissions, a read-only mount and mapped user ids all show only then."""
    name = folder / f".probe-{secrets.token_hex(8)}"
    try:
        os.close(open_private(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(name)
    except OSError as error:
        logger.warning("%s is the run directory of another node and is seen here, but %s", folder, error.strerror)
        return False
    return True
