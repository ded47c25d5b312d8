"""Knocks between nodes before the start: who is not reached is named, with the host, the cause and a remedy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetseq.cluster.rendezvous import connectivity as reach
from hetseq.cluster.rendezvous.connectivity import Doorstep, Peer, probe
from hetseq.cluster.rendezvous.sockets import AddressError, UnreachableError

KEY, FILE = bytes(range(32)), Path("/srv/secret")
HERE = socket.gethostname()


@pytest.fixture
def door() -> Iterator[Doorstep]:
    with Doorstep("127.0.0.1", KEY, FILE) as door:
        yield door


def peer_of(door: Doorstep, host: str = HERE) -> Peer:
    return Peer(host, door.address, door.port)


def closed_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def test_a_peer_that_listens_is_reached_again_and_again(door: Doorstep) -> None:
    for _ in range(3):
        assert probe([peer_of(door)], KEY, secret_file=FILE) == []


def test_a_door_that_was_closed_is_named_with_both_hosts_and_the_others_are_not(door: Doorstep) -> None:
    gone = Peer("labB", "127.0.0.1", closed_port())
    sentences = probe([peer_of(door), gone, peer_of(door)], KEY, secret_file=FILE)
    assert len(sentences) == 1
    assert sentences[0].startswith(f"{HERE} cannot reach labB at 127.0.0.1:{gone.port} (connection refused, although")


def test_sentences_come_in_the_order_of_the_peers() -> None:
    peers = [Peer(f"lab{number}", "127.0.0.1", closed_port()) for number in range(9)]
    for peer, sentence in zip(peers, probe(peers, KEY, secret_file=FILE), strict=True):
        assert f"cannot reach {peer.host} at 127.0.0.1:{peer.port} " in sentence


def test_nobody_to_knock_at_is_nobody_unreached() -> None:
    assert probe([], KEY, secret_file=FILE) == []


def test_an_address_that_only_the_peer_itself_reaches_is_said_to_be_one() -> None:
    (sentence,) = probe([Peer("labB", "127.0.0.1", closed_port())], KEY, secret_file=FILE)
    assert "only labB itself reaches 127.0.0.1" in sentence
    (sentence,) = probe([Peer(HERE, "127.0.0.1", closed_port())], KEY, secret_file=FILE)
    assert "itself reaches" not in sentence
    assert "firewall" in sentence


@pytest.mark.parametrize(
    ("reason", "words"),
    [("timeout", "no answer, packets to it are dropped"), ("route", "no route leads there, or a firewall refuses")],
)
def test_a_firewall_is_suspected_and_the_ports_to_open_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, words: str
) -> None:
    def shut(*_: object, **__: object) -> None:
        raise UnreachableError("", reason=reason)

    monkeypatch.setattr(reach, "connect", shut)
    monkeypatch.setattr(reach, "_PORT_RANGE", tmp_path / "range")
    (sentence,) = probe([Peer("labB", "192.0.2.7", 40001)], KEY, secret_file=FILE)
    assert f"{HERE} cannot reach labB at 192.0.2.7:40001 ({words})" in sentence
    assert "open TCP between the nodes" in sentence  # a kernel that does not tell its range
    (tmp_path / "range").write_text("32768\t60999\n")
    (sentence,) = probe([Peer("labB", "192.0.2.7", 40001)], KEY, secret_file=FILE)
    assert "a firewall on labB or between the two" in sentence
    assert "open TCP ports 32768-60999 between the nodes" in sentence


def test_a_knock_with_another_key_is_no_peer_and_the_door_stays_open(door: Doorstep) -> None:
    (sentence,) = probe([peer_of(door, "labB")], bytes(32), secret_file=FILE)
    assert "cannot reach labB" in sentence
    assert "different secrets" in sentence
    assert probe([peer_of(door)], KEY, secret_file=FILE) == []


def test_a_door_knows_from_where_peers_came_as_soon_as_they_know_it_themselves(door: Doorstep) -> None:
    probe([peer_of(door)], bytes(32), secret_file=FILE)
    assert door.visitors == set()  # whoever has no key leaves no address
    assert probe([peer_of(door)], KEY, secret_file=FILE) == []
    assert door.visitors == {"127.0.0.1"}


def test_a_silent_program_on_the_port_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (sentence,) = probe([Peer("labB", "127.0.0.1", port)], KEY, secret_file=FILE, timeout_s=0.2)
    assert "was silent for 0." in sentence


def test_many_nodes_knock_at_one_door_at_once(door: Doorstep) -> None:
    found: list[str] = []
    crowd = [
        threading.Thread(target=lambda: found.extend(probe([peer_of(door)] * 8, KEY, secret_file=FILE)))
        for _ in range(4)
    ]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert found == []


def test_a_door_is_closed_twice_and_then_shut() -> None:
    door = Doorstep("127.0.0.1", KEY, FILE)
    door.close()
    door.close()
    with contextlib.closing(socket.socket()) as knocking, pytest.raises(ConnectionRefusedError):
        knocking.connect(("127.0.0.1", door.port))


def test_a_door_at_another_machines_address_is_refused() -> None:
    with pytest.raises(AddressError):
        Doorstep("198.51.100.7", KEY, FILE)
