"""Folders that one program at a time writes into: a lock, and names that are on the disk for good.

Responsible for what every maker of data needs, whatever its files are called. The one idea: the lock is of the folder
itself, so no file of ours is left in it, and the kernel gives it back however the program ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from hetseq import DataError


@contextlib.contextmanager
def locked(folder: Path, in_use: str) -> Iterator[None]:
    """No other process is in such a block of `folder` meanwhile, where its file system locks folders at all.

    Raises DataError with what `in_use` says if one is, and OSError if there is no such folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: {in_use}; wait for its end") from None
        except OSError:
            pass  # some network file systems lock no folders
        yield
    finally:
        os.close(handle)


def flush(path: Path) -> None:
    """A file's content, or the names in a folder, are on the disk. Raises OSError where they find no room."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
