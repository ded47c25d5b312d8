"""Where the nodes of a test meet: a free port, or a directory, a name or an old file for `file://`.

A `Place` knows how it looked before the run, and so what a run has left there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where the nodes of a test meet, and how it is to look when the run has ended."""

    url: str
    path: Path | None = None
    before: bytes | None = None  # what the file of that name holds
    stays: bool = False  # a directory that was there before

    def leftovers(self) -> list[str]:
        """What is there that was not there before the run."""
        if self.path is None:
            return []
        if self.before is not None and self.path.read_bytes() != self.before:
            return [f"{self.path} was changed"]
        found = set(self.path.parent.glob(self.path.name + "*")) | set(self.path.glob("**/*"))
        if self.stays or self.before is not None:
            found -= {self.path}
        return sorted(map(str, found))


def tcp() -> Place:
    """A port of this machine that nobody listens at."""
    return Place(f"tcp://127.0.0.1:{free_port()}")


def directory(folder: Path) -> Place:
    """An empty directory."""
    path = folder / "meeting" / "directory"
    path.mkdir(parents=True)
    return Place(f"file://{path}", path, stays=True)


def fresh_name(folder: Path) -> Place:
    """A name that does not exist yet, as 2020 had it."""
    path = folder / "meeting" / "fresh"
    path.parent.mkdir(parents=True)
    return Place(f"file://{path}", path)


def old_file(folder: Path) -> Place:
    """A file that a run of 2020 has left."""
    path = folder / "meeting" / "communicate.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"left from 2020")
    return Place(f"file://{path}", path, path.read_bytes())


PLACES: dict[str, Callable[[Path], Place]] = {
    "tcp": lambda folder: tcp(),
    "directory": directory,
    "fresh name": fresh_name,
    "old file": old_file,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
