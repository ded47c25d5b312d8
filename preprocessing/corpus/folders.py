"""Output folders: an exclusive lock on a folder, and fsync of files and folders.

Responsible for what every script that writes data needs, whatever its files are called. The one idea: the lock is on
the folder itself, so no lock file remains, and the kernel releases it however the program ends.
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
    """Hold an exclusive lock on `folder` inside the block, if its file system can lock folders.

    Raises DataError with the text `in_use` if another process holds it, and OSError if the folder does not exist.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: {in_use}; wait until it ends") from None
        except OSError:
            pass  # some network file systems cannot lock folders
        yield
    finally:
        os.close(handle)


def flush(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk. Raises OSError if the disk is full."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
