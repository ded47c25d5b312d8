"""A disk on which the n-th call fails, for a process that a test cannot reach into: the writer of checkpoints.

`Shim` compiles `shim.c` and intercepts changes below one folder by the processes that are started inside `between()`.
Calls are counted over all of these processes, in the order in which they come. `arm` chooses which
of them fail and how, any number of times, without restarting a process.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_name("shim.c")
_ROOM = 4096
_FOREVER = 2**62
#: in the order of shim.c
CALLS = (
    "open",
    "write",
    "fsync",
    "fdatasync",
    "sync_file_range",
    "close",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "ftruncate",
)


class Action(enum.IntEnum):
    """What becomes of a call; shim.c says it in words."""

    NOTHING = 0
    REFUSE = 1
    REPORT = 2
    SHORTEN = 3
    TEAR = 4
    KILL = 5
    PRETEND = 6


class _Control(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("action", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("root", ctypes.c_char * _ROOM),
        ("calls", ctypes.c_uint8 * _ROOM),
    )


def compiler() -> str | None:
    """Where a C compiler is, if there is one."""
    return shutil.which("cc") or shutil.which("gcc")


def compiled(folder: Path, source: Path = _SOURCE) -> Path:
    """The library, made in `folder`."""
    library, program = folder / f"{source.stem}.so", compiler()
    assert program is not None, "no C compiler"
    subprocess.run([program, "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class Shim:
    """The disk below `root` as processes see it that are started inside `between`; `folder` is for its own file."""

    def __init__(self, library: Path, folder: Path, root: Path) -> None:
        self._library, self._path = library, folder / "control"
        self._path.write_bytes(bytes(ctypes.sizeof(_Control)))
        with self._path.open("r+b") as file:
            self._control = _Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self._control.root = os.fsencode(f"{root}/")

    @contextmanager
    def between(self) -> Iterator[Shim]:
        """Stand between the disk and every process that begins in this block."""
        names = {"LD_PRELOAD": str(self._library), "SHIM_CONTROL": str(self._path)}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield self
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def arm(self, first: int, action: Action, *, number: int = errno.EIO, is_for_good: bool = False) -> None:
        """Have the call number `first` go wrong (1 is the next one), and if it `is_for_good` all later ones too."""
        self._control.action = Action.NOTHING
        self._control.count = 0
        self._control.first, self._control.last = first, _FOREVER if is_for_good else first
        self._control.number = number
        self._control.action = action

    def disarm(self) -> list[str]:
        """Nothing goes wrong any more; the names of the calls since `arm`."""
        self._control.action = Action.NOTHING
        count = min(self._control.count, _ROOM)
        return [CALLS[call] for call in self._control.calls[:count]]

    @property
    def has_hit(self) -> bool:
        """Whether a call has gone wrong since `arm`."""
        return bool(self._control.action != Action.NOTHING and self._control.count >= self._control.first)
