"""Walls before listening sockets: who is not admitted gets no answer, and whoever is in already does not notice."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from hetseq.comm import socket_filter as wall

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no socket filters")

IMPATIENT_S = 0.1
FAR = [f"10.{high}.{low}.1" for high in range(10) for low in range(60)]
KINDS = {4: ("127.0.0.1", "127.0.0.2", FAR), 6: ("::1", "::2", ["fe80::1", "2001:db8::1", "::1:0:0:1"])}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def listener(kind: int) -> Iterator[socket.socket]:
    try:
        opened = socket.create_server((KINDS[kind][0], 0), family=socket.AF_INET if kind == 4 else socket.AF_INET6)
    except OSError:
        pytest.skip(f"no IPv{kind} here")
    with opened:
        yield opened


def connects(listener: socket.socket, source: str = "") -> bool:
    with contextlib.closing(socket.socket(listener.family)) as knocking:
        knocking.settimeout(IMPATIENT_S)
        if source:
            knocking.bind((source, 0))
        try:
            knocking.connect(listener.getsockname())
        except TimeoutError:
            return False
        listener.accept()[0].close()
        return True


def test_a_listener_without_a_wall_lets_everybody_in(listener: socket.socket) -> None:
    assert connects(listener)


def test_behind_a_wall_for_all_nobody_connects(listener: socket.socket) -> None:
    assert wall.admit(listener.fileno(), ())
    assert not connects(listener)


def test_those_who_are_admitted_connect_however_long_the_list(listener: socket.socket, kind: int) -> None:
    here, _, others = KINDS[kind]
    assert wall.admit(listener.fileno(), others)
    assert not connects(listener)
    assert wall.admit(listener.fileno(), [*others, here])
    assert connects(listener)


def test_of_two_addresses_on_one_machine_the_right_one_is_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wall.admit(listener.fileno(), ["127.0.0.2"])
        assert connects(listener, "127.0.0.2")
        assert not connects(listener, "127.0.0.3")


def test_a_list_that_no_filter_holds_is_said_to_be_no_wall(listener: socket.socket, kind: int) -> None:
    many = [str(number) if kind == 6 else f"10.0.{number // 256}.{number % 256}" for number in range(2100)]
    assert not wall.admit(listener.fileno(), many if kind == 4 else [f"::{number:x}" for number in range(2100)])
    assert connects(listener)


def test_who_is_in_does_not_notice_the_wall(listener: socket.socket, kind: int) -> None:
    assert wall.admit(listener.fileno(), KINDS[kind][:1])
    with socket.create_connection(listener.getsockname()[:2]) as client, listener.accept()[0] as inside:
        wall.admit(listener.fileno(), ())
        wall.free_connections(listener.getsockname()[1])
        client.sendall(b"x" * 100_000)
        inside.settimeout(10)
        received = 0
        while received < 100_000:
            received += len(inside.recv(100_000))
        assert not connects(listener)
        with pytest.raises(OSError, match="No such file"):
            inside.setsockopt(socket.SOL_SOCKET, wall._SO_DETACH_FILTER, 0)  # it has no filter any more


def test_what_listens_is_found_and_what_is_connected_is_not(listener: socket.socket, kind: int) -> None:
    with socket.create_connection(listener.getsockname()[:2]), listener.accept()[0], socket.socket():
        assert wall.listening() == {listener.fileno(): (KINDS[kind][0], listener.getsockname()[1])}
    before = set(os.listdir("/proc/self/fd"))
    wall.listening()
    assert set(os.listdir("/proc/self/fd")) == before
