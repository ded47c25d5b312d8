"""Files of rows in memory: mapped when they are first needed, by each process for itself, and not too many at once.

Responsible for what every reader of many mapped files needs, whatever is in them: maps that are closed again before too
many are open, what a fork or a pickle must not take along, samples by file, and what the system refuses in words. It
knows no format. The one idea: a map is closed when its last view is gone, so to forget the views is enough.
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

# most open at once in a process: a map keeps a descriptor of its file. A process may have two splits open
_OPEN_MAPS = 1024  # a sample of 1,472 shards at the usual limit, so 128 maps: 74 us
_SHARE = 8  # of the files that a process may open, at most one in so many is a map


class NotMapped(DataError):
    """A file of which this process may not have so much in memory; it may be readable all the same."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} cannot be mapped into memory ({why}): expected room for the whole file among the addresses of this"
            " process, which take no memory by themselves; raise that with `ulimit -v unlimited`"
        )
        self.path, self.why = path, why


class Maps:
    """The views of files that one process has mapped, the latest last; by the number of the file."""

    def __init__(self, files: Sequence[tuple[Path, int]], look: Callable[[int, mmap.mmap], Views]) -> None:
        """`files` are the paths with their bytes at the start; `look` makes the views of a file from its map."""
        self._files, self._look = files, look
        self._views: OrderedDict[int, Views] = OrderedDict()
        self._most = most_open(_OPEN_MAPS)
        self._lock = threading.Lock()  # a step loader's thread and others may ask

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[int]:
        return iter(self._views)

    def views(self, at: int) -> Views:
        """Those of file `at`; raises NotMapped, and DataError for a file that cannot be read or is another one now."""
        with self._lock:
            if at in self._views:
                self._views.move_to_end(at)
            else:
                while len(self._views) >= self._most:
                    self._views.popitem(last=False)
                self._views[at] = self._look(at, _map(*self._files[at]))
            return self._views[at]


class PerProcess(Generic[Made]):
    """What each process makes for itself, when it is first asked for.

    After a fork that of the parent is dropped, since two processes must not share what they have open; a pickle leaves
    it behind.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self.held: Made | None = None
        self._pid = 0

    def get(self) -> Made:
        """That of this process."""
        if self.held is None or self._pid != os.getpid():
            self.held = None
            self.held, self._pid = self._make(), os.getpid()
        return self.held

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make, "held": None, "_pid": 0}


def positive(indices: Sequence[int] | Indices, count: int) -> Indices:
    """Numbers of samples (n,) of `count`, where those below 0 count from the end. Raises IndexError for others."""
    wanted = np.asarray(indices, np.int64)
    if wanted.size and not -count <= wanted.min() <= wanted.max() < count:
        raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {count}")
    return wanted % count


def by_file(ends: Sequence[int], wanted: Indices) -> Iterator[tuple[int, Indices, Indices]]:
    """Of samples (n,), file by file: the number of the file, their places in `wanted`, their rows there, ascending.

    `ends` are the samples up to the end of each file, of which none is empty.
    """
    order = np.argsort(wanted, kind="stable")
    ascending = wanted[order]
    files = np.searchsorted(ends, ascending, side="right")  # (n,)
    cuts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
    for start, stop in itertools.pairwise(cuts) if len(files) else []:
        at = int(files[start])
        yield at, order[start:stop], ascending[start:stop] - (ends[at - 1] if at else 0)


def most_open(most: int) -> int:
    """How many files of a kind this process has open at once: `most`, or its share of what it may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else max(1, min(most, limit // _SHARE))


def refusal(error: OSError) -> str | None:
    """What the system refuses, to be told after the name of a file; None for an error that is not the system's."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"cannot be opened: {os.strerror(error.errno)}; expected one to be left of the {limit} that this"
            " process may have open at once: raise that with `ulimit -n`"
        )
    if error.errno == errno.ENFILE:
        return f"cannot be opened: {os.strerror(error.errno)}; expected a machine with fewer processes on it"
    if error.errno is not None and error.strerror:
        return f"cannot be read: {error.strerror}; expected a file you may read and that nobody is writing"
    return None


def check_size(path: Path, size: int) -> None:
    """Raise DataError for a file that is another one than at the start, when this process opens it later."""
    now = path.stat().st_size
    if now != size:
        raise DataError(f"{path} has {now:,} bytes now and had {size:,} at the start: start again when it is whole")


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            check_size(path, size)  # who reads a map past the end of its file is killed
            try:
                # private, because some file systems in user space refuse to share
                return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                raise NotMapped(path, str(error.strerror)) from error
    except OSError as error:
        raise DataError(f"{path} {refusal(error)}") from error
