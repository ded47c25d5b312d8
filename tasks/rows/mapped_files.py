"""Memory-mapped files: mapped on first use, by each process separately, with a limited number open at once.

Responsible for the needs of every reader of many mapped files, whatever the format: closing maps before too many are
open, state that must not survive a fork or pickle, grouping samples by file, and messages for system errors. The one
idea: a map closes when its last view is gone, so dropping the views is enough.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hetseq import DataError

Indices = npt.NDArray[np.int64]
Views = dict[str, npt.NDArray[Any]]  # arrays over the bytes of one file, by name
Made = TypeVar("Made")

# maximum open at once in a process: a map keeps a descriptor of its file. A process may have two splits open
_OPEN_MAPS = 1024  # a sample of 1,472 shards at the usual limit, so 128 maps: 74 us
_SHARE = 8  # at most one in 8 of the files that a process may open is a map


class NotMapped(DataError):
    """A file does not fit into the address space of this process; it may still be readable."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} cannot be mapped into memory ({why}): expected room for the whole file in the address space of"
            " this process, which takes no memory by itself; raise the limit with `ulimit -v unlimited`"
        )
        self.path, self.why = path, why


class Maps:
    """The views of the files that one process has mapped, by file number, the most recent last."""

    def __init__(self, files: Sequence[tuple[Path, int]], look: Callable[[int, mmap.mmap], Views]) -> None:
        """`files`: paths with their size at the start; `look` makes the views of a file from its map."""
        self._files, self._look = files, look
        self._views: OrderedDict[int, Views] = OrderedDict()
        self._most = most_open(_OPEN_MAPS)
        self._lock = threading.Lock()  # a step loader's thread and others may call

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[int]:
        return iter(self._views)

    def views(self, at: int) -> Views:
        """The views of file `at`. Raises NotMapped, and DataError for a file that is unreadable or was replaced."""
        with self._lock:
            if at in self._views:
                self._views.move_to_end(at)
            else:
                while len(self._views) >= self._most:
                    self._views.popitem(last=False)
                self._views[at] = self._look(at, _map(*self._files[at]))
            return self._views[at]


class PerProcess(Generic[Made]):
    """A value that each process makes for itself on first use.

    After a fork the parent's value is dropped, since two processes must not share open files; a pickle leaves it out.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self.held: Made | None = None
        self._pid = 0

    def get(self) -> Made:
        """The value of this process."""
        if self.held is None or self._pid != os.getpid():
            self.held = None
            self.held, self._pid = self._make(), os.getpid()
        return self.held

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "held": None, "_pid": 0}


def positive(indices: Sequence[int] | Indices, count: int) -> Indices:
    """Sample numbers (n,) below `count`; negative ones count from the end. Raises IndexError if out of range."""
    wanted = np.asarray(indices, np.int64)
    if wanted.size and not -count <= wanted.min() <= wanted.max() < count:
        raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {count}")
    return wanted % count


def by_file(ends: Sequence[int], wanted: Indices) -> Iterator[tuple[int, Indices, Indices]]:
    """Group samples (n,) by file: the file number, their places in `wanted`, their rows in the file, ascending.

    `ends`: number of samples up to the end of each file; no file is empty.
    """
    order = np.argsort(wanted, kind="stable")
    ascending = wanted[order]
    files = np.searchsorted(ends, ascending, side="right")  # (n,)
    cuts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
    for start, stop in itertools.pairwise(cuts) if len(files) else []:
        at = int(files[start])
        yield at, order[start:stop], ascending[start:stop] - (ends[at - 1] if at else 0)


def most_open(most: int) -> int:
    """How many files of a kind this process may have open: `most`, or a fraction of its limit on open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // _SHARE))


def refusal(error: OSError) -> str | None:
    """The message for a system error, to follow the name of a file; None for an error that is not the system's."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"cannot be opened: {os.strerror(error.errno)}; this process has used up its limit of {limit} open"
            " files: raise it with `ulimit -n`"
        )
    if error.errno == errno.ENFILE:
        return f"cannot be opened: {os.strerror(error.errno)}; use a machine with fewer processes on it"
    if error.errno is not None and error.strerror:
        return f"cannot be read: {error.strerror}; expected a file that you may read and no process is writing"
    return None


def check_size(path: Path, size: int) -> None:
    """Raise DataError if a file's size has changed since the start."""
    now = path.stat().st_size
    if now != size:
        raise DataError(f"{path} now has {now:,} bytes and had {size:,} at the start: start again when it is complete")


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            check_size(path, size)  # reading a map past the end of its file kills the process
            try:
                # private: some user-space file systems refuse shared maps
                return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                raise NotMapped(path, str(error.strerror)) from error
    except OSError as error:
        raise DataError(f"{path} {refusal(error)}") from error
