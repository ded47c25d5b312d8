"""Detected environment: the input and result types of all environments, and helpers to read numbers and host names.

It knows no scheduler, and does not read the process's own variables or files: they are passed in. The one idea: an
environment is a pure function from a `Look` to a `Seen`, so a recorded environment is a test.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetseq.errors import ConfigError

#: ports of the meeting place; Linux uses ports from 32768 for outgoing connections
LOWEST_PORT, HIGHEST_PORT = 15000, 32767


class UnreadableError(ConfigError):
    """An environment that is present but incomplete."""


class NowhereError(ConfigError):
    """One of several processes on several nodes that cannot tell where they meet; each would train on its own."""


@dataclass(frozen=True)
class Look:
    """All inputs of an environment: variables, files by path (None: missing), this host, standard input."""

    environment: Mapping[str, str]
    read: Callable[[str], str | None]
    host: str
    is_terminal: bool = False  # whether standard input is a terminal, with a user at it

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
    """One of several processes that were started together.

    Without a `rank`, ranks are assigned at the rendezvous. With one, all processes know their ranks, and rank zero runs
    on the first host.
    """

    system: str  # as `--env` calls it
    id: str  # unique among the jobs that run at the same time on these hosts
    hosts: tuple[str, ...]  # rank zero's or the first host first; () if unknown
    why: str  # the variables by which it was recognised, for the user
    slots: tuple[int, ...] = ()  # of each host, as the scheduler counts them; () if unknown
    index: int | None = None  # of this host in `hosts`
    nodes: int = 1
    processes: int = 1  # on all nodes together
    rank: int | None = None
    local_rank: int | None = None  # among the processes of this node
    local_size: int | None = None  # processes of this node
    restarts: int = 0  # how often the scheduler has started this job again
    end_time: int | None = None  # when the scheduler ends the job, in seconds since 1970
    interface: str | None = None  # the network interface named by the environment
    group: str | None = None  # of equal machines, including this one
    is_script: bool = False  # the body of a batch script, which the scheduler starts only once, on the first host

    @property
    def is_alone(self) -> bool:
        """Whether no other process was started, so there are no others to meet."""
        return self.processes == 1

    @property
    def is_per_device(self) -> bool:
        """Whether this is one of several processes on a node, each with its own device."""
        return self.local_size is not None and self.processes > self.nodes

    @property
    def port(self) -> int:
        """Port of this job's meeting place: 15000 + CRC-32 of "SYSTEM ID RESTARTS" modulo 17768."""
        name = f"{self.system} {self.id} {self.restarts}"
        return LOWEST_PORT + zlib.crc32(name.encode()) % (HIGHEST_PORT - LOWEST_PORT + 1)


@dataclass(frozen=True)
class Environment:
    """One environment: its name for `--env`, the variables it is recognised by, and the function that checks them."""

    name: str
    needs: str
    see: Callable[[Look], Seen | None]


def same_host(one: str, other: str) -> bool:
    """Whether two names mean the same host: `lab1` and `lab1.example.org` do, two different full names do not."""
    if "." in one and "." in other:
        return one.lower() == other.lower()
    return one.partition(".")[0].lower() == other.partition(".")[0].lower()


def index_of(host: str, hosts: Sequence[str]) -> int | None:
    """The index of a host in the list, or None."""
    return next((index for index, name in enumerate(hosts) if same_host(name, host)), None)


def counted(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names in order of first appearance, and how often each appears."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return tuple(counts), tuple(counts.values())


def added(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Hosts in order of first appearance, and the sum of the slots of each."""
    sums: dict[str, int] = {}
    for name, count in pairs:
        sums[name] = sums.get(name, 0) + count
    return tuple(sums), tuple(sums.values())
