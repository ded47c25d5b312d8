"""A flood of strangers at a head that waits for its second node: idle connections by the thousand, and junk."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from hetseq.cluster.rendezvous.channel import connect
from hetseq.cluster.rendezvous.secret import derive_key, load_secret
from tests.end_to_end.test_strangers import ELSEWHERE, LOOPBACK, Run, ports
from tests.support.nodes import Nodes
from tests.support.places import PLACES
from tests.support.strangers import hello, sockets
from tests.support.trials import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

IDLE, JUNK_BYTES = 3000, 300 << 20
CHUNK = bytes(1 << 20)
JOIN_S, MEMORY_BYTES = 10.0, 64_000_000


@contextmanager
def many_files(count: int) -> Iterator[None]:
    """Let this process have so many files open, or skip the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"this user may open {hard} files, the test needs {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Junk:
    """Sends junk to all ports in turn, behind nothing or behind a true hello, until it is stopped."""

    def __init__(self, places: Sequence[int]) -> None:
        self._places, self._is_over = places, threading.Event()
        self.sent_bytes = self.connections = 0
        self._thread = threading.Thread(target=self._send, name="junk")

    def __enter__(self) -> Junk:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _send(self) -> None:
        while not self._is_over.is_set():
            port = self._places[self.connections % len(self._places)]
            with suppress(OSError), socket.create_connection((LOOPBACK, port), 1.0, (ELSEWHERE, 0)) as stranger:
                self.connections += 1
                if self.connections % 3 == 0:
                    stranger.sendall(hello())
                while not self._is_over.is_set():  # until it is sent away
                    self.sent_bytes += stranger.send(CHUNK)


def come_and_stay(stack: ExitStack, places: Sequence[int], count: int) -> int:
    """So many connections that say nothing; gives how many came about."""
    for number in range(count):
        stranger = stack.enter_context(socket.socket())
        stranger.settimeout(1.0)
        with suppress(OSError):
            stranger.bind((ELSEWHERE, 0))
            stranger.connect((LOOPBACK, places[number % len(places)]))
    return count


def memory_bytes(pid: int, name: str) -> int:
    """VmRSS or VmHWM, the most there was since `forget_the_most`, of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def forget_the_most(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.alone
@pytest.mark.figure("flood")
def test_an_honest_node_joins_through_a_flood_that_costs_the_head_no_memory(
    nodes: Nodes, record_property: Callable[[str, object], None]
) -> None:
    run = Run(nodes, PLACES["tcp"](nodes.folder), "--no-save")
    head = run.start(2)
    nodes.wait_until_said(head, "waiting")
    doors = ports(sockets(run.pids()))
    key = derive_key(load_secret(nodes.secret, create=False), "control")
    control = int(run.place.url.rpartition(":")[2])
    assert control in doors
    forget_the_most(head.pid)
    before = memory_bytes(head.pid, "VmRSS")
    joins = []
    with many_files(IDLE + 1000), ExitStack() as idle, Junk(doors) as junk:
        come_and_stay(idle, doors, IDLE)
        until(lambda: junk.sent_bytes >= JUNK_BYTES, "300 MiB of junk")
        for _ in range(5):
            began_s = time.monotonic()
            connect(LOOPBACK, control, key, deadline=began_s + 60, secret_file=nodes.secret).close()
            joins.append(time.monotonic() - began_s)
        run.start(1)
        run.wait_at_the_gate()
    grown = memory_bytes(head.pid, "VmHWM") - before
    record_property("flood", f"join {max(joins):.2f} s, {grown / 1e6:+.1f} MB ({junk.connections} with junk)")
    print(joins, grown, junk.connections, junk.sent_bytes)
    assert max(joins) <= JOIN_S
    assert grown <= MEMORY_BYTES
    run.open_the_gate()
    assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()
