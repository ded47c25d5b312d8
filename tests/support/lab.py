"""Two hosts that share one directory over mounts with caches and local locks, and commands that run there.

`shared_lab(folder)` joins `hosts.two_hosts` and `cached_mount`: labA and labB see `Lab.shared` each through its own
mount, with names and attributes that may be `CACHE_S` old and locks that the other does not see. The test reads the
real content in `Lab.backing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.cached_mount import CachedMount, cached_mount
from tests.support.commands import TRAIN
from tests.support.hosts import Host, two_hosts
from tests.support.nodes import Node, Nodes, Process, Stock

CACHE_S = 3.0
_ANY_INTERFACE = {"GLOO_SOCKET_IFNAME": None}  # the hosts have a cable


@dataclass
class Lab:
    """The hosts, their mounts, where these are, and a warm process in each host."""

    hosts: tuple[Host, Host]
    mounts: tuple[CachedMount, CachedMount]
    shared: Path  # as the hosts see it
    backing: Path  # the same, as it is
    stock: Stock
    warm: tuple[Process, Process]

    def start(self, nodes: Nodes, at: int, *words: object, faults: str = "") -> Node:
        """`hetseq train WORDS` on a host, in its warm process."""
        return nodes.start(*words, process=self.warm[at], environment={"HETSEQ_FAULTS": faults} if faults else {})

    def start_cold(self, nodes: Nodes, at: int, *words: object) -> Node:
        """The same as a command line of its own, which a test may kill."""
        program = (*self.hosts[at].enter, *TRAIN)
        return nodes.start(*words, cold=True, program=program, environment=_ANY_INTERFACE)


@contextmanager
def shared_lab(folder: Path) -> Iterator[Lab]:
    """The lab, as long as the block lasts; skipped where namespaces or FUSE may not be used."""
    backing, shared = folder / "backing", folder / "shared"
    for path in (backing, shared):
        path.mkdir(mode=0o700)
    with ExitStack() as closing:
        hosts = closing.enter_context(two_hosts(folder))
        one, other = (
            closing.enter_context(cached_mount(backing, shared, enter=host.enter, cache_s=CACHE_S)) for host in hosts
        )
        stock = Stock(0)
        closing.callback(stock.close)
        warm = []
        for host in hosts:
            warm.append(stock.start(_ANY_INTERFACE, prefix=host.enter))
            closing.callback(warm[-1].close)
        yield Lab(hosts, (one, other), shared, backing, stock, (warm[0], warm[1]))
