"""Local copies of record files on a disk of this node: one process copies each file once, and all then read the copy.

Responsible for checking which copies exist, for copying missing files, and for the choice of the copying process. It
knows a file only by the size and SHA-256 in its index; the content is checked when the copy is opened, as with any file
of records. It never writes to the source folder, and never removes a copy.

The one idea: a copy is in a folder named after its checksum, and gets its final name only after that checksum was
verified. So a file of that name is complete, a changed corpus has other names, and runs share a folder without knowing
of each other. The lock is on the unfinished file, and the kernel releases it however its holder ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hetseq import DataError
from hetseq.tasks.rows.mapped_files import refusal
from hetseq.tasks.rows.record_index import AGAIN, INDEX, File

logger = logging.getLogger(__name__)

_FOLDER = "hetseq-records"  # the subfolder of the user's folder that HetSeq writes to
_DIGITS = 16  # of a checksum, in the name of a folder
_PIECE_BYTES = 1 << 20
_PATIENCE_S = 1200.0  # for all splits; a start of several nodes gives loading 1,800
_TELL_EVERY_S = 10.0
_LOOK_S = 0.25  # between two checks of another process's copy
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = "make room, give another folder, or leave the option out"

Tell = Callable[[int], None]  # bytes of a file copied so far


class LocalCopy:
    """The copies in a folder, `--local-copy`; one object for all splits of a run, with a common deadline."""

    def __init__(
        self, folder: Path, *, now: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.folder, self._root = folder, folder / _FOLDER
        self._now, self._pause = now, pause
        self._until_s = now() + _PATIENCE_S
        self._awaited: Path | None = None  # the file that another process is copying

    def of(self, files: Sequence[File]) -> list[File]:
        """The copies of the files, in their order; missing ones are copied, or waited for.

        Every process of a node calls this: one copies a file, the others wait, and one of them takes over if it dies.
        Files that are not copied within 20 minutes of the first call are returned unchanged, so that the run still
        starts. Raises DataError for a folder that is unusable or full, and for a file that differs from its index.
        """
        try:
            self._prepare()
            copies = [self._copy_of(file) for file in files]
            if missing := [(file, copy) for file, copy in zip(files, copies) if not _is_there(copy)]:
                self._check_room([copy for _, copy in missing])
                self._fetch(missing)
            there = [_is_there(copy) for copy in copies]
        except OSError as error:
            raise self._unusable(error) from error
        if late := [file for file, is_there in zip(files, there) if not is_there]:
            awaited = f" (another process was copying {self._awaited.name})" if self._awaited is not None else ""
            logger.warning(
                "%s of %s are not in %s after %.0f minutes%s and are read from %s in this run; the next start resumes"
                " copying",
                _amount(late), _amount(files), self._root, _PATIENCE_S / 60, awaited,
                late[0].path.parent,
            )  # fmt: skip
        else:
            logger.info("%s are read from %s", _amount(files), self._root)
        return [copy if is_there else file for file, copy, is_there in zip(files, copies, there)]

    def _prepare(self) -> None:
        """Create HetSeq's folder in the user's. Raises DataError, and OSError if it cannot be created."""
        if not self.folder.is_dir():
            found = "is not a folder" if self.folder.exists() else "does not exist"
            raise DataError(
                f"--local-copy {self.folder} {found}: expected a folder on a disk of this node; create it, or leave the"
                " option out"
            )
        self._root.mkdir(mode=0o700, exist_ok=True)
        found_root = self._root.stat()
        if found_root.st_uid != os.geteuid() or found_root.st_mode & 0o022:
            raise DataError(
                f"{self._root} belongs to user id {found_root.st_uid} and has mode {found_root.st_mode & 0o777:04o}:"
                " expected a folder that only you may write to, since its files are trained on; give another"
                " --local-copy, or remove that folder"
            )

    def _copy_of(self, file: File) -> File:
        """The existing or future copy of a file, with the same file name, since nodes with and without copies compare
        names."""
        return dataclasses.replace(file, path=self._root / file.sha256[:_DIGITS] / file.path.name, copy_of=file.path)

    def _check_room(self, missing: Sequence[File]) -> None:
        """Raise DataError unless there is room for the missing bytes; other processes may be copying meanwhile."""
        free = shutil.disk_usage(self._root).free  # first, so that bytes written meanwhile are not counted as missing
        needed = 0
        for copy in missing:
            begun = _size(_unfinished(copy))
            needed += 0 if _is_there(copy) else max(0, copy.size - begun)
        if needed > free:
            raise DataError(
                f"--local-copy {self.folder} has no room: the copies need {needed:,} more bytes, and {free:,} are free;"
                f" {_REMEDY}"
            )

    def _fetch(self, missing: Sequence[tuple[File, File]]) -> None:
        """Copy these files, each by this process or another one, until the deadline."""
        total, done = sum(file.size for file, _ in missing), 0
        logger.info(
            "copying %s from %s to %s, once for all runs of this node", _amount([file for file, _ in missing]),
            missing[0][0].path.parent, self._root,
        )  # fmt: skip
        progress = _Progress(total, self._root, self._now)
        for file, copy in missing:
            copy.path.parent.mkdir(mode=0o700, exist_ok=True)
            while not _is_there(copy):
                if self._is_late():
                    return
                self._try(file, copy, functools.partial(progress.show, done))
            done += file.size

    def _try(self, file: File, copy: File, tell: Tell) -> None:
        """Copy a file, or pause briefly if another process is copying it."""
        unfinished = _unfinished(copy)
        with _locked(unfinished) as handle:
            self._awaited = file.path if handle is None else None
            if handle is None:
                tell(_size(unfinished))
                self._pause(_LOOK_S)
                return
            try:
                # the previous holder of the lock may just have finished
                if not _is_there(copy) and self._fill(handle, file, tell):
                    os.rename(unfinished, copy.path)
                else:
                    os.unlink(unfinished)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):  # the folder is being removed
                    os.unlink(unfinished)
                raise

    def _fill(self, handle: int, file: File, tell: Tell) -> bool:
        """Copy the content of a file and verify its checksum; False if the deadline has passed.

        Raises DataError for a file that differs from its index, OSError for a failed write.
        """
        os.truncate(handle, 0)  # remove what a dead process left
        digest, size = hashlib.sha256(), 0
        for piece in _pieces(file.path):
            if self._is_late():
                return False
            digest.update(piece)
            _write(handle, piece)
            size += len(piece)
            tell(size)
        if size != file.size:
            found = f"has {size:,} bytes, expected {file.size:,}"
        elif digest.hexdigest() != file.sha256:
            found = f"has the sha256 {digest.hexdigest()}, expected {file.sha256}"
        else:
            return True
        raise DataError(f"{file.path} {found} as in {INDEX}; the file is damaged: {AGAIN}")

    def _is_late(self) -> bool:
        return self._now() >= self._until_s

    def _unusable(self, error: OSError) -> DataError:
        why = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _FULL:
            return DataError(f"--local-copy {self.folder} is full ({why}): {_REMEDY}")
        return DataError(
            f"--local-copy {self.folder} cannot be used ({why}): expected a folder on a disk of this node that you may"
            " write to; give another one, or leave the option out"
        )


class _Progress:
    """Logs the progress every 10 s: bytes copied, and the estimated time left."""

    def __init__(self, total: int, root: Path, now: Callable[[], float]) -> None:
        self._total, self._root, self._now = total, root, now
        self._began_s = now()
        self._next_s = self._began_s + _TELL_EVERY_S

    def show(self, before: int, size: int) -> None:
        """Log if it is time: `size` bytes of this file and `before` bytes of earlier files are copied."""
        now_s, done = self._now(), before + size
        if now_s < self._next_s:
            return
        self._next_s = now_s + _TELL_EVERY_S
        left = ""
        if done:
            left_s = (self._total - done) * (now_s - self._began_s) / done
            left = f"; about {left_s:.0f} s left" if left_s < 100 else f"; about {left_s / 60:.0f} min left"
        logger.info("%s of %s are in %s%s", _bytes(done), _bytes(self._total), self._root, left)


def _is_there(copy: File) -> bool:
    """Whether a file of its name and size exists: only complete copies get the name."""
    return copy.path.is_file() and _size(copy.path) == copy.size


def _unfinished(copy: File) -> Path:
    """The path of a copy until it is complete, specific to this node in case several share the folder."""
    return copy.path.parent / f".unfinished.{socket.gethostname()}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """A descriptor of the file, locked and created if necessary; None if another process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield handle if _is_taken(handle, path) else None
    finally:
        os.close(handle)


def _is_taken(handle: int, path: Path) -> bool:
    """Try to lock the file; False if it is locked, or if its previous holder has renamed it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a file, piece by piece. Raises DataError if it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise DataError(f"{path} {refusal(error)}") from error


def _write(handle: int, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _amount(files: Sequence[File]) -> str:
    return f"{_bytes(sum(file.size for file in files))} in {len(files)} file{'s' * (len(files) != 1)}"


def _bytes(count: int) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,} bytes"
