"""Run directory discovery: which launchers share a run directory, found out before any worker starts.

Tells whether a path is the same directory for two launchers, and chooses one run id for all run directories. It moves
no files: the ranks send each other what a directory lacks (`comm.directory_groups`).

The one idea: equal paths prove nothing, and different mounts may be the same directory. So the owner leaves a file with
a random name and random content, and every launcher that can open it under the same absolute path shares the
directory. A network file system may show a new file late, so a launcher retries for some seconds, except when the path
is on a local file system, or when a folder of it that existed before this start is missing.
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

from hetseq.config.sections import Config
from hetseq.errors import ConfigError
from hetseq.run_directory import RunDirectory, open_private
from hetseq.system.files import write_all

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_MARK = re.compile(r"\.mark-[0-9a-f]{32}")
_COMMITTED = re.compile(r"step-(\d{9,19})\.[0-9a-f]{16}")
_MOUNTS = Path("/proc/self/mountinfo")
# File systems that are local to one node. Any other may be shared; if it is not, waiting for it costs some seconds.
_LOCAL = frozenset(
    (
        *("bcachefs", "btrfs", "ecryptfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs", "ntfs3"),
        *("overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "ubifs", "vfat", "xfs", "zfs"),
    )
)


@dataclass(frozen=True)
class Mark:
    """A file by which other launchers recognise a run directory; all fields are text, sent as JSON."""

    path: str  # of the run directory, absolute
    name: str
    content: str
    standing: str  # a folder of the path that existed before this start, so that no cache hides it


def leave_mark(directory: RunDirectory, *, is_owner: bool = True) -> Mark:
    """Write a mark into a run directory. Raises OSError.

    The owner, which holds the lock of the directory, first removes marks left by killed launchers.
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
    """Remove a mark written by `leave_mark`; it may be gone already."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(mark.path, mark.name))


def sees(
    mark: Mark, *, patience_s: float = 15.0, pause: Callable[[float], None], now: Callable[[], float] = time.monotonic
) -> bool:
    """Whether this node sees the directory of `mark` under the same path, and may write there.

    `pause` sleeps for the given seconds. A mark with an invalid path or name is not looked for.
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
    """Whether a directory that this node does not see yet may become visible within seconds."""
    if not os.path.isdir(mark.standing):
        return False
    return not lies_on_local_disk(Path(mark.path))


def lies_on_local_disk(path: Path) -> bool:
    """Whether an absolute path is on a file system local to this node; False if unknown."""
    return file_system_kind(path) in _LOCAL


def file_system_kind(path: Path) -> str:
    """The file system type of an absolute path, such as `ext4` or `nfs4`; empty if unknown."""
    existing = next(folder for folder in (path, *path.parents) if os.path.isdir(folder))
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""
    return kind_of(os.path.realpath(existing), mounts)


def is_local(path: str, mountinfo: str) -> bool:
    """Whether `path`, absolute and without links, is on a file system local to this node; pure.

    `mountinfo` is as for `kind_of`. An unknown file system type counts as shared.
    """
    return kind_of(path, mountinfo) in _LOCAL


def kind_of(path: str, mountinfo: str) -> str:
    """The file system type of `path`, absolute and without links; pure.

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
        if is_above and len(point) >= len(best):  # of two mounts at one point, the later one is visible
            best, kind = point, right.split(" ")[0]
    return kind


def newest_step(directory: RunDirectory) -> int | None:
    """The step of the newest commit, taken from its name without verification; None if there is no commit."""
    return next((step for step, path in reversed(_attempts(directory)) if _is_committed(path)), None)


def check_own_place(config: Config, path: str) -> None:
    """Raise ConfigError if this node's --save-dir is another directory with checkpoints, which would be ignored."""
    save_dir = config.checkpoint.save_dir
    own = RunDirectory(Path(os.path.abspath(save_dir)))
    newest = None if not config.has_own_save_dir or str(own.path) == path else newest_step(own)
    if newest is not None:
        raise ConfigError(
            f"--save-dir {save_dir} has checkpoints up to step {newest}, but the run directory is {path}, the"
            " --save-dir of the node with rank 0, which this node shares: give all nodes the same --save-dir"
        )


def has_commits(directory: RunDirectory) -> bool:
    """Whether a run directory holds a checkpoint; the newest folder is checked last.

    Looking into a folder can block if a writer hangs in it, as on a mount that does not respond.
    """
    return any(_is_committed(path) for _, path in _attempts(directory))


def _attempts(directory: RunDirectory) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoint attempts, oldest first."""
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
    """The content of a run directory, as found by the launcher that owns it."""

    host: str
    path: str
    run_id: str
    newest: int | None  # step of the newest commit


def choose_run_id(places: Sequence[FoundDirectories]) -> tuple[str, str | None]:
    """The common run id of all run directories, ordered by their lowest ranks, and None or an error message. Pure.

    A directory without a commit takes the id of the directories that have one. The message says which directories
    hold checkpoints of different runs.
    """
    committed = [place for place in places if place.newest is not None]
    first = next(iter(committed), places[0])
    others = [place for place in committed if place.run_id != first.run_id]
    if not others:
        return first.run_id, None
    held = "; ".join(f"{place.host} has {_describe(place)}" for place in (first, *others))
    other = others[0]
    return first.run_id, (
        f"the run directories of the nodes hold checkpoints of different runs, and only one of them can resume: {held}."
        f" To resume the run of {first.host}, give {other.host} another --save-dir, or move {other.path} away there"
        f" (it then gets a copy of the run); to resume the run of {other.host}, do the same with {first.path} on"
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
    """Whether a file can be created, by trying: only this reveals permissions, read-only mounts and mapped user ids."""
    name = folder / f".probe-{secrets.token_hex(8)}"
    try:
        os.close(open_private(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(name)
    except OSError as error:
        logger.warning("%s, the run directory of another node, is not writable here: %s", folder, error.strerror)
        return False
    return True
