"""Meeting places for the nodes of a test: a free port, or a directory, a name or an old file for `file://`.

A `Place` remembers its state before the run, and so finds a run's leftovers. A process that the test starts takes a
port some time after it was assigned: until then neither the kernel nor another test run may assign it again.
"""

from __future__ import annotations

import functools
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# below the ephemeral ports of Linux (32768 and more)
FIRST_PORT, PORTS_OF_A_RUN, RUNS = 20_000, 100, 120
_giving = threading.Lock()  # a test may start nodes from several threads


@dataclass(frozen=True)
class Place:
    """Where the nodes of a test meet, and its expected state after the run."""

    url: str
    path: Path | None = None
    before: bytes | None = None  # what the file of that name holds
    stays: bool = False  # a directory that was there before

    def leftovers(self) -> list[str]:
        """The run's leftovers."""
        if self.path is None:
            return []
        if self.before is not None and self.path.read_bytes() != self.before:
            return [f"{self.path} was changed"]
        found = set(self.path.parent.glob(self.path.name + "*")) | set(self.path.glob("**/*"))
        if self.stays or self.before is not None:
            found -= {self.path}
        return sorted(map(str, found))


def tcp() -> Place:
    """An unused port of this machine."""
    return Place(f"tcp://127.0.0.1:{free_port()}")


def directory(folder: Path) -> Place:
    """An empty directory."""
    path = folder / "meeting" / "directory"
    path.mkdir(parents=True)
    return Place(f"file://{path}", path, stays=True)


def fresh_name(folder: Path) -> Place:
    """A name that does not exist yet, as in 2020."""
    path = folder / "meeting" / "fresh"
    path.parent.mkdir(parents=True)
    return Place(f"file://{path}", path)


def old_file(folder: Path) -> Place:
    """A file left by a 2020 run."""
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
    """An unused port that this test run has not assigned for a long time, and that no other test run assigns."""
    with _giving:
        for port in itertools.islice(_ports(), PORTS_OF_A_RUN):
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
    raise OSError(f"none of the {PORTS_OF_A_RUN} ports of this test run is free")


@functools.lru_cache(maxsize=1)
def _ports() -> Iterator[int]:
    """The ports of this test run, again and again. They are its own as long as it lives."""
    first = FIRST_PORT + PORTS_OF_A_RUN * _claim()[0]
    return itertools.cycle(range(first, first + PORTS_OF_A_RUN))


@functools.lru_cache(maxsize=1)
def _claim() -> tuple[int, socket.socket]:
    """This test run's number among those of the machine, and the name that holds it until the process ends."""
    for number in range(RUNS):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0hetseq-test-ports-{number}")
        except OSError:
            name.close()
        else:
            return number, name
    raise OSError(f"{RUNS} test runs have all the ports")
