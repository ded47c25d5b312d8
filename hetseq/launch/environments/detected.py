"""What a process is told by whatever started it, as one value; the words and numbers it is read from.

Responsible for the value that all environments give, and for reading numbers and host names. It refuses to know any
scheduler, to read the process's own environment and to open files: both are handed in. The one idea: an environment is
a pure function from a `Look` to a `Seen`, so a recorded environment is a test.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetseq.errors import ConfigError

#: of the meeting place; below 32768, from where Linux takes the ports of outgoing connections
LOWEST_PORT, HIGHEST_PORT = 15000, 32767


class UnreadableError(ConfigError):
    """An environment that is there, but does not say what it has to."""


class NowhereError(ConfigError):
    """One of several processes on several nodes, which nothing tells where they meet. Alone, each would train anew."""


@dataclass(frozen=True)
class Look:
    """All that an environment may look at: variables, files by path (None: not there), this host, standard input."""

    environment: Mapping[str, str]
    read: Callable[[str], str | None]
    host: str
    is_terminal: bool = False  # standard input is one: somebody sits there

    def get(self, *names: str) -> str | None:
        """The first of these variables that is set and not empty."""
        return next((self.environment[name] for name in names if self.environment.get(name)), None)

    def number(self, *names: str) -> int | None:
        """The first of these variables that is set, as a number of 0 or more. Raises UnreadableError for other text."""
        for name in names:
            if text := self.environment.get(name):
                if not (text.isascii() and text.isdigit()):
                    raise UnreadableError(f"{name}={text}: expected a number of 0 or more")
                return int(text)
        return None

    def file_of(self, name: str) -> str:
        """The text of the file that a variable names. Raises UnreadableError if there is none."""
        path = self.environment.get(name, "")
        text = self.read(path)
        if text is None:
            raise UnreadableError(f"{name}={path}: this file cannot be read here (is it mounted in the container?)")
        return text


@dataclass(frozen=True)
class Seen:
    """One started process among others.

    Without a `rank` the processes are given ranks where they meet; with one, all of them know theirs, and rank zero
    runs on the first host.
    """

    system: str  # as `--env` calls it
    id: str  # no other job that runs at the same time on these hosts has it
    hosts: tuple[str, ...]  # rank zero's or the first one first; () where the environment does not tell
    why: str  # the facts that told, for people
    slots: tuple[int, ...] = ()  # of each host, as the scheduler counts them; () where it does not tell
    index: int | None = None  # of this host among `hosts`
    nodes: int = 1
    processes: int = 1  # of all nodes together
    rank: int | None = None
    local_rank: int | None = None  # among the processes of this node
    local_size: int | None = None  # processes of this node
    restarts: int = 0  # how often the scheduler has started this job again
    end_time: int | None = None  # when the scheduler ends the job, in seconds since 1970
    interface: str | None = None  # the network interface that the environment names
    group: str | None = None  # of equal machines, to which this one belongs
    is_script: bool = False  # the body of a batch script, which the scheduler starts once, on the first of `hosts`

    @property
    def is_alone(self) -> bool:
        """Whether nobody else was started: there is nothing to meet."""
        return self.processes == 1

    @property
    def is_per_device(self) -> bool:
        """Whether this is one process of several on a node, each with a device of its own."""
        return self.local_size is not None and self.processes > self.nodes

    @property
    def port(self) -> int:
        """Where the processes of this job meet: 15000 + CRC-32 of "SYSTEM ID RESTARTS" modulo 17768."""
        name = f"{self.system} {self.id} {self.restarts}"
        return LOWEST_PORT + zlib.crc32(name.encode()) % (HIGHEST_PORT - LOWEST_PORT + 1)


@dataclass(frozen=True)
class Environment:
    """One way to be started: its name for `--env`, what it is recognised by, and the function that does."""

    name: str
    needs: str
    see: Callable[[Look], Seen | None]


def same_host(one: str, other: str) -> bool:
    """Whether two names mean one host: `lab1` and `lab1.example.org` do, two different full names do not."""
    if "." in one and "." in other:
        return one.lower() == other.lower()
    return one.partition(".")[0].lower() == other.partition(".")[0].lower()


def index_of(host: str, hosts: Sequence[str]) -> int | None:
    """The place of a host in the list; None where it is not in it."""
    return next((index for index, name in enumerate(hosts) if same_host(name, host)), None)


def counted(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names in the order in which they first came, and how often each came."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return tuple(counts), tuple(counts.values())


def added(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts in the order in which they first came, and the sum of the slots of each."""
    sums: dict[str, int] = {}
    for name, count in pairs:
        sums[name] = sums.get(name, 0) + count
    return tuple(sums), tuple(sums.values())
