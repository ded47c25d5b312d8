"""The control channel: who lacks the key says nothing that is heard, and costs an honest peer next to nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.rendezvous import channel as channel_module
from hetseq.cluster.rendezvous import sockets
from hetseq.cluster.rendezvous.channel import (
    HEAD,
    MAC_BYTES,
    MAGIC,
    RECORD_BYTES,
    VERDICT,
    VERSION,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    Listener,
    SecretMismatch,
    StrangerError,
    VersionMismatch,
    connect,
)
from hetseq.cluster.rendezvous.sockets import AddressError, UnreachableError
from hetseq.comm import socket_filter as wall
from hetseq.errors import RendezvousError
from tests.support.places import free_port

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
FILE, OTHER_FILE = Path("/srv/head/secret"), Path("/srv/node/secret")
PATIENCE_S = 10.0
AT_ONCE_S = 5.0  # a machine that stands still for a second is no fault; what waits in vain waits for PATIENCE_S

CLIENT = """
import sys, time
from pathlib import Path
from hetseq.cluster.rendezvous.channel import connect
deadline = time.monotonic() + 10
channel = connect("127.0.0.1", int(sys.argv[1]), bytes(range(32)), deadline=deadline, secret_file=Path("s"))
channel.send({"hello": 1})
sys.stdin.read()
"""


def soon(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def until(condition: Callable[[], bool]) -> None:
    deadline = soon()
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.002)


def until_closed(send: Callable[[], None]) -> None:
    """The kernel takes a first record for a peer that is gone, and learns then."""
    deadline = soon()
    while time.monotonic() < deadline:
        try:
            send()
        except ChannelClosed:
            return
    pytest.fail("records went on being taken")


def dial(listener: Listener, key: bytes = KEY, *, seconds: float = PATIENCE_S, file: Path = OTHER_FILE) -> Channel:
    return connect(listener.host, listener.port, key, deadline=soon(seconds), secret_file=file)


class Door:
    """A listener with the thread that stays in `accept`, as the head has it."""

    def __init__(self, **words: Any) -> None:
        self.listener = Listener("127.0.0.1", key=KEY, secret_file=FILE, **words)
        self.admitted: list[Channel] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._stay, name="door")
        self._thread.start()

    def _stay(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                with contextlib.suppress(ChannelTimeout):
                    peer = self.listener.accept(PATIENCE_S)
                    with self._changed:
                        self.admitted.append(peer)
                        self._changed.notify_all()

    def peer(self, number: int = 0) -> Channel:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.admitted) > number, PATIENCE_S)
        return self.admitted[number]

    def raw(self) -> socket.socket:
        """A connection that says nothing by itself."""
        return socket.create_connection((self.listener.host, self.listener.port), timeout=PATIENCE_S)

    def refusals(self, reason: str, *, at_least: int = 1) -> int:
        """How many were sent away for `reason`, once they are enough."""
        until(lambda: self.listener.refused[reason] >= at_least)
        return self.listener.refused[reason]

    def close(self) -> None:
        self.listener.close()
        self._thread.join()
        for peer in self.admitted:
            peer.close()


@pytest.fixture
def door() -> Iterator[Door]:
    opened = Door()
    yield opened
    opened.close()


@pytest.fixture
def pair(door: Door) -> Iterator[tuple[Channel, Channel]]:
    """The client's end and the listener's."""
    with dial(door.listener) as client:
        yield client, door.peer()


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


class Middle:
    """A man in the middle: two channels of one session, and between them whatever the test lets through."""

    def __init__(self, session: bytes = KEY) -> None:
        self._sockets: list[socket.socket] = []
        self.client = Channel(self._end("from_client"), session=session, is_client=True)
        self.listener = Channel(self._end("from_listener"), session=session, is_client=False)

    def _end(self, name: str) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        far.settimeout(PATIENCE_S)
        setattr(self, name, far)
        self._sockets += [near, far]
        return near

    from_client: socket.socket
    from_listener: socket.socket

    def frame(self, record: dict[str, Any]) -> bytes:
        """What the client puts on the wire for `record`."""
        self.client.send(record)
        (size,) = struct.unpack("!I", head := exactly(self.from_client, 4))
        return head + exactly(self.from_client, size + MAC_BYTES)

    def close(self) -> None:
        ends: list[socket.socket | Channel] = [self.client, self.listener, *self._sockets]
        for end in ends:
            end.close()


def exactly(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        chunk = connection.recv(size - len(content))
        assert chunk
        content += chunk
    return content


@pytest.fixture
def middle() -> Iterator[Middle]:
    made = Middle()
    yield made
    made.close()


@contextlib.contextmanager
def foreign_service(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Another program on a port: takes connections one by one and treats each with `answer`."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    answer(connection)

    thread = threading.Thread(target=serve, name="foreign")
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


# Records.


def test_records_arrive_both_ways_and_in_order(pair: tuple[Channel, Channel]) -> None:
    client, head = pair
    records = [{"n": n, "text": "ä\n\0", "list": [1, 0.1, None, {"deep": True}]} for n in range(50)]
    for record in records:
        client.send(record)
    head.send({"answer": -1})
    assert [head.receive(PATIENCE_S) for _ in records] == records
    assert client.receive(PATIENCE_S) == {"answer": -1}
    client.send({})
    assert head.receive(PATIENCE_S) == {}


def test_each_end_knows_both_addresses(pair: tuple[Channel, Channel], door: Door) -> None:
    client, head = pair
    assert client.peer == door.listener.place == f"127.0.0.1:{door.listener.port}"
    assert (client.host, client.peer_host, head.host, head.peer_host) == ("127.0.0.1",) * 4
    assert head.peer != client.peer


def test_a_record_of_ten_megabytes_arrives_whole(
    pair: tuple[Channel, Channel], in_thread: Callable[..., Future[Any]]
) -> None:
    client, head = pair
    text = "".join(random.Random(7).choices("abcdefgh", k=1000)) * 10_000
    sent = in_thread(client.send, {"text": text})
    assert head.receive(PATIENCE_S) == {"text": text}
    sent.result(PATIENCE_S)


def test_a_record_over_the_limit_is_not_sent_and_the_channel_stays(pair: tuple[Channel, Channel]) -> None:
    client, head = pair
    with pytest.raises(ValueError, match=f"{RECORD_BYTES}"):
        client.send({"text": "x" * RECORD_BYTES})
    with pytest.raises(TypeError):
        client.send({"bytes": b""})
    client.send({"n": 1})
    assert head.receive(PATIENCE_S) == {"n": 1}


def test_records_of_two_threads_stay_whole_and_each_thread_in_its_order(
    pair: tuple[Channel, Channel], in_thread: Callable[..., Future[Any]]
) -> None:
    client, head = pair

    def chatter(name: str) -> None:
        for number in range(100):
            client.send({"name": name, "number": number, "text": name * (number * 997 % 40_000)})

    talking = [in_thread(chatter, name) for name in "ab"]
    records = [head.receive(PATIENCE_S) for _ in range(200)]
    for thread in talking:
        thread.result(PATIENCE_S)
    for name in "ab":
        assert [record["number"] for record in records if record["name"] == name] == list(range(100))
    assert all(record["text"] == record["name"] * (record["number"] * 997 % 40_000) for record in records)


def test_a_channel_is_readable_when_and_only_when_there_is_something_to_receive(pair: tuple[Channel, Channel]) -> None:
    client, head = pair
    assert select.select([head], [], [], 0)[0] == []
    client.send({"n": 1})
    client.send({"n": 2})
    for number in (1, 2):
        assert select.select([head], [], [], PATIENCE_S)[0] == [head]
        assert head.receive(0.0) == {"n": number}
    assert select.select([head], [], [], 0)[0] == []


# Deadlines and ends.


def test_a_wait_for_a_record_ends_in_time_and_loses_nothing(middle: Middle) -> None:
    frame = middle.frame({"n": 1})
    for part in (b"", frame[:2], frame[2:9], frame[9:-1]):
        middle.from_listener.sendall(part)
        began = time.monotonic()
        with pytest.raises(ChannelTimeout, match=r"nothing from 127\.0\.0\.1:\d+ for 0\.0 s"):
            middle.listener.receive(0.02)
        assert time.monotonic() - began < AT_ONCE_S
    middle.from_listener.sendall(frame[-1:])
    assert middle.listener.receive(PATIENCE_S) == {"n": 1}


def test_a_peer_that_reads_nothing_does_not_hold_the_sender(middle: Middle) -> None:
    began = time.monotonic()
    with pytest.raises(ChannelTimeout, match="has read nothing"):
        middle.client.send({"text": "x" * (15 * 2**20)}, timeout_s=0.05)
    assert time.monotonic() - began < AT_ONCE_S
    with pytest.raises(ChannelClosed):
        middle.client.send({"n": 1})  # half a record is out: nothing may follow it


def test_a_thread_that_waits_for_another_has_a_deadline_too(
    middle: Middle, in_thread: Callable[..., Future[Any]]
) -> None:
    waiting = in_thread(middle.listener.receive, PATIENCE_S)
    until(middle.listener._receiving.locked)
    with pytest.raises(ChannelTimeout, match="another thread"):
        middle.listener.receive(0.01)
    middle.from_listener.sendall(middle.frame({"n": 1}))
    assert waiting.result(PATIENCE_S) == {"n": 1}


def test_the_death_of_a_peer_is_seen_at_once(door: Door) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(door.listener.port)],
        stdin=subprocess.PIPE,
        cwd=Path(channel_module.__file__).parents[3],
    )
    try:
        peer = door.peer()
        assert peer.receive(PATIENCE_S) == {"hello": 1}
        with pytest.raises(ChannelTimeout):
            peer.receive(0.0)  # the twin: while it lives, silence is silence
    finally:
        process.kill()
        began = time.monotonic()
        process.communicate()
    with pytest.raises(ChannelClosed, match="is gone"):
        peer.receive(PATIENCE_S)
    assert time.monotonic() - began < AT_ONCE_S
    until_closed(lambda: peer.send({"n": 1}))


def cut(channel: Channel) -> None:
    """From now on nothing reaches this end, not even what the kernels say to each other."""
    assert wall.admit(channel.fileno(), ())


def test_a_network_that_loses_everything_ends_a_channel_that_something_was_said_to(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other one: while ranks train nobody speaks, and their own deadline may be longer."""
    monkeypatch.setattr(sockets, "_UNACKNOWLEDGED_S", 0.2)
    with dial(door.listener) as spoken, dial(door.listener) as quiet:
        for end in (quiet, spoken):
            cut(end)
        spoken.send({"has": "lost a peer"})
        with pytest.raises(ChannelClosed, match="timed out"):
            spoken.receive(PATIENCE_S)
        with pytest.raises(ChannelTimeout):
            quiet.receive(0.0)


@pytest.mark.slow  # the kernel counts whole seconds
def test_who_asks_an_idle_peer_learns_that_its_machine_is_silent(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_UNACKNOWLEDGED_S", 2.0), ("_IDLE_S", 1), ("_AGAIN_S", 1)):
        monkeypatch.setattr(sockets, name, seconds)
    with dial(door.listener) as asking, dial(door.listener) as heard:
        for end in (asking, heard):
            sockets.ask_when_idle(end.fileno())
        cut(asking)
        with pytest.raises(ChannelClosed, match="timed out"):
            asking.receive(PATIENCE_S)
        with pytest.raises(ChannelTimeout):
            heard.receive(0.0)


def test_what_a_peer_said_last_is_heard_although_sending_to_it_fails(middle: Middle) -> None:
    frame = middle.frame({"refused": "learning rate"})
    middle.from_listener.sendall(frame)
    middle.from_listener.close()
    until_closed(lambda: middle.listener.send({"heartbeat": 1}))
    assert middle.listener.receive(PATIENCE_S) == {"refused": "learning rate"}
    with pytest.raises(ChannelClosed):
        middle.listener.receive(PATIENCE_S)


def test_last_words_arrive_although_the_speaker_has_not_read_everything(
    pair: tuple[Channel, Channel], in_thread: Callable[..., Future[Any]]
) -> None:
    client, head = pair
    for _ in range(100):
        client.send({"heartbeat": "x" * 1000})
    head.send({"refused": "learning rate"})
    closing = in_thread(head.close, linger_s=PATIENCE_S)
    assert client.receive(PATIENCE_S) == {"refused": "learning rate"}
    with pytest.raises(ChannelClosed):
        client.receive(PATIENCE_S)
    client.close()
    closing.result(AT_ONCE_S)  # and not PATIENCE_S: the end of the peer ends it


def test_lingering_for_a_peer_that_stays_has_an_end(pair: tuple[Channel, Channel]) -> None:
    began = time.monotonic()
    pair[1].close(linger_s=0.05)
    assert 0.04 < time.monotonic() - began < AT_ONCE_S


def test_closing_wakes_who_waits(pair: tuple[Channel, Channel], in_thread: Callable[..., Future[Any]]) -> None:
    client, _ = pair
    waiting = in_thread(client.receive, PATIENCE_S)
    until(client._receiving.locked)
    client.close()
    with pytest.raises(ChannelClosed, match="this end is closed"):
        waiting.result(AT_ONCE_S)
    for call in (lambda: client.send({}), lambda: client.receive(0.0)):
        with pytest.raises(ChannelClosed, match="this end is closed"):
            call()
    client.close()


def test_closing_a_listener_wakes_accept_and_leaves_channels_alone(door: Door) -> None:
    with dial(door.listener) as client:
        peer = door.peer()
        door.listener.close()
        with pytest.raises(ChannelClosed, match="the listener at"):
            door.listener.accept(PATIENCE_S)
        client.send({"n": 1})
        assert peer.receive(PATIENCE_S) == {"n": 1}
        with pytest.raises(UnreachableError):
            dial(door.listener)


def test_accept_has_a_deadline() -> None:
    with Listener("127.0.0.1", key=KEY, secret_file=FILE) as listener:
        for seconds in (0.0, 0.03):
            began = time.monotonic()
            with pytest.raises(ChannelTimeout, match=r"no peer came to 127\.0\.0\.1:\d+"):
                listener.accept(seconds)
            assert seconds <= time.monotonic() - began < AT_ONCE_S


def test_two_peers_that_come_at_once_are_given_out_one_by_one(in_thread: Callable[..., Future[Any]]) -> None:
    with Listener("127.0.0.1", key=KEY, secret_file=FILE) as listener:
        dialing = [in_thread(dial, listener) for _ in range(5)]
        heads = [listener.accept(PATIENCE_S) for _ in dialing]
        clients = [future.result(PATIENCE_S) for future in dialing]
        assert len({head.peer for head in heads}) == 5
        for end in (*heads, *clients):
            end.close()


# Forged records.


@pytest.mark.parametrize("at", [3, 4, 9, -33, -32, -1])
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_is_seen_wherever_it_is(middle: Middle, at: int, bit: int) -> None:
    frame = bytearray(middle.frame({"n": 1, "text": "x" * 300}))
    frame[at] ^= bit
    middle.from_listener.sendall(frame + bytes(300))  # enough for a length that grew
    with pytest.raises(StrangerError, match="was not sent by it in this place"):
        middle.listener.receive(PATIENCE_S)
    for call in (lambda: middle.listener.receive(0.0), lambda: middle.listener.send({})):
        with pytest.raises(ChannelClosed):  # for good: what follows cannot be told apart
            call()


def test_a_replayed_record_is_refused(middle: Middle) -> None:
    frame = middle.frame({"n": 1})
    middle.from_listener.sendall(frame + frame)
    assert middle.listener.receive(PATIENCE_S) == {"n": 1}
    with pytest.raises(StrangerError):
        middle.listener.receive(PATIENCE_S)


def test_a_reordered_record_is_refused(middle: Middle) -> None:
    first, second = middle.frame({"n": 1}), middle.frame({"n": 2})
    middle.from_listener.sendall(second + first)
    with pytest.raises(StrangerError):
        middle.listener.receive(PATIENCE_S)


def test_a_missing_record_is_noticed(middle: Middle) -> None:
    middle.frame({"n": 1})
    middle.from_listener.sendall(middle.frame({"n": 2}))
    with pytest.raises(StrangerError):
        middle.listener.receive(PATIENCE_S)


def test_a_reflected_record_is_refused(middle: Middle) -> None:
    middle.from_client.sendall(middle.frame({"n": 1}))
    with pytest.raises(StrangerError):
        middle.client.receive(PATIENCE_S)


def test_a_record_of_another_session_is_refused(middle: Middle) -> None:
    older = Middle(session=OTHER_KEY)
    middle.from_listener.sendall(older.frame({"n": 1}))
    older.close()
    with pytest.raises(StrangerError):
        middle.listener.receive(PATIENCE_S)


def test_records_in_their_order_pass_the_same_middle(middle: Middle) -> None:
    """The twin of the five above."""
    for number in range(3):
        middle.from_listener.sendall(middle.frame({"n": number}))
        assert middle.listener.receive(PATIENCE_S) == {"n": number}


def test_a_truncated_record_is_an_end_and_no_record(middle: Middle) -> None:
    middle.from_listener.sendall(middle.frame({"n": 1})[:-1])
    middle.from_listener.close()
    with pytest.raises(ChannelClosed):
        middle.listener.receive(PATIENCE_S)


@pytest.mark.parametrize("size", [RECORD_BYTES + 1, 2**31, 2**32 - 1])
def test_an_oversized_record_is_refused_by_its_length(middle: Middle, size: int) -> None:
    middle.from_listener.sendall(struct.pack("!I", size))
    with pytest.raises(StrangerError, match=f"announced a record of {size} bytes"):
        middle.listener.receive(PATIENCE_S)


@pytest.mark.parametrize("payload", [b"[1]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_a_peer_with_the_key_that_sends_no_object_is_refused(middle: Middle, payload: bytes) -> None:
    length = struct.pack("!I", len(payload))
    mac = channel_module._record_mac(middle.client._send_key, 0, length, payload)
    middle.from_listener.sendall(length + payload + mac)
    with pytest.raises(StrangerError, match=r"is not (JSON|a JSON object)"):
        middle.listener.receive(PATIENCE_S)


# Handshakes.


def test_an_honest_peer_is_admitted(door: Door) -> None:
    with dial(door.listener) as client:
        client.send({"n": 1})
        assert door.peer().receive(PATIENCE_S) == {"n": 1}
    assert door.listener.refused == {}


def test_a_client_with_another_secret_learns_both_addresses_and_the_line_to_type(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(SecretMismatch) as caught:
        dial(door.listener, OTHER_KEY)
    assert door.refusals("secret") == 1
    assert time.monotonic() - began < AT_ONCE_S
    assert door.admitted == []
    said, place = str(caught.value), door.listener.place
    assert said.startswith("127.0.0.1:")
    assert f" and {place} hold different secrets (here: {OTHER_FILE})" in said
    assert f"scp 127.0.0.1:{OTHER_FILE} {OTHER_FILE}" in said
    assert caught.value.exit_code == 78
    # the head says it too, in its own words
    (line,) = caplog.messages
    client_place = said.split()[0]
    assert line.startswith(f"{client_place} was sent away from {place}: the two have different secrets (here: {FILE})")
    assert f"scp 127.0.0.1:{FILE} {FILE}" in line
    for key in (KEY, OTHER_KEY):
        assert key.hex() not in said + line


def test_a_client_that_does_not_mind_the_listeners_proof_is_refused_by_its_own(door: Door) -> None:
    with door.raw() as stranger:
        stranger.sendall(HEAD.pack(MAGIC, VERSION, bytes(32)))
        answer = exactly(stranger, HEAD.size + MAC_BYTES)
        transcript = HEAD.pack(MAGIC, VERSION, bytes(32)) + answer[: HEAD.size]
        stranger.sendall(VERDICT.pack(1, channel_module._proof(OTHER_KEY, b"client", transcript)))
        assert exactly(stranger, VERDICT.size)[0] == 0
        assert stranger.recv(1) == b""
    assert door.refusals("secret") == 1
    assert door.admitted == []


def test_a_listener_with_another_secret_is_refused_by_the_client() -> None:
    """It cannot prove itself, and gets no proof of the client to show elsewhere."""
    heard = bytearray()

    def pretend(connection: socket.socket) -> None:
        hello = exactly(connection, HEAD.size)
        answer = HEAD.pack(MAGIC, VERSION, bytes(32))
        connection.sendall(answer + channel_module._proof(OTHER_KEY, b"listener", hello + answer))
        heard.extend(exactly(connection, VERDICT.size))

    with foreign_service(pretend) as port, pytest.raises(SecretMismatch):
        connect("127.0.0.1", port, KEY, deadline=soon(), secret_file=FILE)
    assert heard == VERDICT.pack(0, bytes(MAC_BYTES))


def test_a_listener_that_reflects_the_client_is_refused() -> None:
    def reflect(connection: socket.socket) -> None:
        hello = exactly(connection, HEAD.size)
        connection.sendall(hello + channel_module._proof(OTHER_KEY, b"client", hello + hello))
        exactly(connection, VERDICT.size)

    with foreign_service(reflect) as port, pytest.raises(SecretMismatch):
        connect("127.0.0.1", port, KEY, deadline=soon(), secret_file=FILE)


def handshake(key: bytes) -> tuple[list[bytes], list[bytes]]:
    """What both ends of an honest handshake said, seen by a relay in between: (client's, listener's)."""
    opened = Door()
    said: tuple[list[bytes], list[bytes]] = ([], [])

    def relay(connection: socket.socket) -> None:
        with opened.raw() as onward:
            for size, whose in ((HEAD.size, 0), (HEAD.size + MAC_BYTES, 1), (VERDICT.size, 0), (VERDICT.size, 1)):
                source, target = ((connection, onward), (onward, connection))[whose]
                said[whose].append(exactly(source, size))
                target.sendall(said[whose][-1])

    with foreign_service(relay) as port:
        connect("127.0.0.1", port, key, deadline=soon(), secret_file=FILE).close()
        opened.peer()
    opened.close()
    return said


def test_a_replayed_handshake_admits_nobody(door: Door) -> None:
    (hello, proof), _ = handshake(KEY)
    with door.raw() as stranger:
        stranger.sendall(hello)
        exactly(stranger, HEAD.size + MAC_BYTES)
        stranger.sendall(proof)
        assert exactly(stranger, VERDICT.size)[0] == 0
    assert door.refusals("secret") == 1
    assert door.admitted == []


def test_a_replayed_listener_convinces_no_client() -> None:
    _, (answer, welcome) = handshake(KEY)

    def replay(connection: socket.socket) -> None:
        exactly(connection, HEAD.size)
        connection.sendall(answer + welcome)
        exactly(connection, VERDICT.size)

    with foreign_service(replay) as port, pytest.raises(SecretMismatch):
        connect("127.0.0.1", port, KEY, deadline=soon(), secret_file=FILE)


def test_another_version_is_named_on_both_sides(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), door.raw() as stranger:
        stranger.sendall(HEAD.pack(MAGIC, VERSION + 1, bytes(32)))
        _, version, _ = HEAD.unpack(exactly(stranger, HEAD.size))
        assert version == VERSION
        assert door.refusals("version") == 1
    assert f"speaks version {VERSION + 1} of HetSeq's control protocol and this end version {VERSION}" in caplog.text

    def newer(connection: socket.socket) -> None:
        connection.sendall(HEAD.pack(MAGIC, VERSION + 1, bytes(32)))
        exactly(connection, HEAD.size)

    with (
        foreign_service(newer) as port,
        pytest.raises(VersionMismatch, match=f"version {VERSION + 1} .*{VERSION}: inst"),
    ):
        connect("127.0.0.1", port, KEY, deadline=soon(), secret_file=FILE)


# Other programs on the port.


def complaint(port: int, kind: type[RendezvousError], *, seconds: float = PATIENCE_S) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        connect("127.0.0.1", port, KEY, deadline=soon(seconds), secret_file=FILE)
    assert time.monotonic() - began < seconds + 0.5
    return str(caught.value)


def test_a_web_server_on_the_port_is_recognised_by_its_answer() -> None:
    def web(connection: socket.socket) -> None:
        if b"\n" in connection.recv(1000):
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    with foreign_service(web) as port:
        said = complaint(port, StrangerError)
    assert f"127.0.0.1:{port} answers 'HTTP/1.1 400 Bad Request\\r\\n" in said
    assert "another program uses this port" in said


def test_a_real_web_server_on_the_port_is_recognised(tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert "another program uses this port" in complaint(server.server_port, StrangerError)
        finally:
            server.shutdown()
            thread.join()


def test_random_bytes_on_the_port_are_quoted_and_harmless() -> None:
    with foreign_service(lambda connection: connection.sendall(b"\x1b]0;\xff\0" + os.urandom(1000))) as port:
        said = complaint(port, StrangerError)
    assert r"\x1b]0;\xff\x00" in said  # in quotes of either kind
    assert said.isprintable()


def test_a_silent_program_on_the_port_costs_the_deadline_and_no_more() -> None:
    with foreign_service(lambda connection: connection.recv(1000) and connection.recv(1000)) as port:
        said = complaint(port, ChannelTimeout, seconds=0.1)
    assert f"127.0.0.1:{port} took the connection from 127.0.0.1:" in said
    assert "was silent for 0.1 s" in said


def test_a_silent_program_is_not_given_longer_than_a_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.1)
    with foreign_service(lambda connection: connection.recv(1000) and connection.recv(1000)) as port:
        complaint(port, ChannelTimeout, seconds=1800.0)


def test_a_program_that_begins_like_hetseq_and_dawdles_costs_the_deadline(door: Door) -> None:
    def dawdle(connection: socket.socket) -> None:
        connection.sendall(MAGIC[:3])
        connection.recv(1000)
        connection.recv(1000)

    with foreign_service(dawdle) as port:
        complaint(port, ChannelTimeout, seconds=0.1)


def test_a_program_that_closes_at_once_is_named_in_the_end() -> None:
    with foreign_service(lambda connection: None) as port:
        said = complaint(port, StrangerError, seconds=0.3)
    assert f"127.0.0.1:{port} takes connections and closes them at once" in said


def test_a_client_that_was_dropped_in_a_crowd_comes_again(door: Door) -> None:
    dropped = iter([True, True, False])

    def crowded(connection: socket.socket) -> None:
        if next(dropped):
            return
        with door.raw() as onward:
            for size, to_head in ((HEAD.size, True), (HEAD.size + MAC_BYTES, False), (VERDICT.size, True), (33, False)):
                source, target = (connection, onward) if to_head else (onward, connection)
                target.sendall(exactly(source, size))

    with foreign_service(crowded) as port:
        connect("127.0.0.1", port, KEY, deadline=soon(), secret_file=FILE).close()
    door.peer()


# Nobody there.


def unreachable(host: str, port: int, *, seconds: float = 1.0) -> UnreachableError:
    with pytest.raises(UnreachableError) as caught:
        connect(host, port, KEY, deadline=soon(seconds), secret_file=FILE)
    return caught.value


def test_a_port_where_nobody_listens_is_told_at_once() -> None:
    port = free_port()
    began = time.monotonic()
    error = unreachable("127.0.0.1", port, seconds=PATIENCE_S)
    assert time.monotonic() - began < AT_ONCE_S
    assert error.reason == "refused"
    assert f"{socket.gethostname()} cannot reach 127.0.0.1:{port}: connection refused" in str(error)


def test_a_name_that_nobody_knows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = unreachable("labA", 29400)
    assert error.reason == "name"
    assert f"labA is not known on {socket.gethostname()} (Name or service not known): use its IP address" in str(error)


def test_a_name_server_that_hangs_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(host: str, *_: object, flags: int = 0, **__: object) -> list[Any]:
        if not flags & socket.AI_NUMERICHOST:
            released.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_NONAME, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        error = unreachable("labA", 29400, seconds=0.05)
    finally:
        released.set()
    assert error.reason == "name"
    assert "the name server does not answer" in str(error)


@pytest.mark.parametrize(
    ("trouble", "reason", "words"),
    [
        (TimeoutError("timed out"), "timeout", "a firewall drops"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "route", "No route to host"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "route", "Network is unreachable"),
    ],
)
def test_a_firewall_and_a_missing_route_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, trouble: OSError, reason: str, words: str
) -> None:
    class Blocked(socket.socket):
        def connect(self, address: Any) -> None:
            raise trouble

    monkeypatch.setattr(socket, "socket", Blocked)
    error = unreachable("192.0.2.1", 29400)
    assert error.reason == reason
    assert words in str(error)
    assert "192.0.2.1:29400" in str(error)


def test_a_port_that_connects_to_itself_counts_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mirror(socket.socket):
        def connect(self, address: Any) -> None:
            self.bind(address)
            super().connect(address)

    port = free_port()
    monkeypatch.setattr(socket, "socket", Mirror)
    assert unreachable("127.0.0.1", port).reason == "refused"


# Listening.


def listening_sockets() -> set[str]:
    """The listening TCP sockets of this process, as the kernel has them."""
    ours = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            ours.add(os.readlink(link))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if Path(f"/proc/net/{table}").exists()
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux tells")
def test_only_the_chosen_interface_listens() -> None:
    before = listening_sockets()
    with Listener("127.0.0.2", key=KEY, secret_file=FILE) as listener:
        assert listening_sockets() - before == {f"0200007F:{listener.port:04X}"}
        for host in ("127.0.0.1", "127.0.0.3"):
            assert unreachable(host, listener.port).reason == "refused"
        socket.create_connection((listener.host, listener.port)).close()  # the twin
    assert listening_sockets() == before


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_every_interface_is_refused(host: str) -> None:
    with pytest.raises(AddressError, match="means every interface"):
        Listener(host, key=KEY, secret_file=FILE)


def test_ipv6_is_listened_at_alone_and_written_in_brackets(in_thread: Callable[..., Future[Any]]) -> None:
    try:
        listener = Listener("::1", key=KEY, secret_file=FILE)
    except AddressError:
        pytest.skip("no IPv6 here")
    with listener:
        accepting = in_thread(listener.accept, PATIENCE_S)
        with dial(listener) as client, accepting.result(PATIENCE_S) as peer:
            assert client.peer == listener.place == f"[::1]:{listener.port}"
            peer.send({"n": 1})
            assert client.receive(PATIENCE_S) == {"n": 1}


def test_a_port_that_is_taken_is_told_with_who_has_it(door: Door) -> None:
    with pytest.raises(AddressError) as caught:
        Listener("127.0.0.1", door.listener.port, key=KEY, secret_file=FILE)
    assert f"cannot listen at 127.0.0.1:{door.listener.port}: pid {os.getpid()} (" in str(caught.value)
    assert "choose another port" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(AddressError, match=r"192\.0\.2\.1:29400: it is not an address of"):
        Listener("192.0.2.1", 29400, key=KEY, secret_file=FILE)


def test_a_port_can_be_listened_at_again_at_once(door: Door) -> None:
    with dial(door.listener):
        door.peer().send({"n": 1})
    port = door.listener.port
    door.close()
    Listener("127.0.0.1", port, key=KEY, secret_file=FILE).close()


# Strangers.


def test_idle_strangers_are_bounded_in_number_and_the_oldest_goes_first() -> None:
    door = Door(most=8)
    with contextlib.ExitStack() as stack:
        stack.callback(door.close)
        idle = [stack.enter_context(door.raw()) for _ in range(20)]
        assert door.refusals("crowd", at_least=12) == 12
        assert len(door.listener._strangers) == 8
        for stranger in idle[:12]:
            assert stranger.recv(1) == b""
        for stranger in idle[12:]:
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
        stack.enter_context(dial(door.listener))
        door.peer()


def test_a_crowd_from_one_address_displaces_none_from_another() -> None:
    door = Door(most=4)
    with contextlib.ExitStack() as stack:
        stack.callback(door.close)
        place = (door.listener.host, door.listener.port)
        slow = stack.enter_context(socket.create_connection(place, PATIENCE_S, source_address=("127.0.0.9", 0)))
        for _ in range(20):
            stack.enter_context(door.raw())
        assert door.refusals("crowd", at_least=17) == 17
        slow.sendall(HEAD.pack(MAGIC, VERSION, bytes(32)))
        assert exactly(slow, HEAD.size + MAC_BYTES).startswith(MAGIC)


def test_an_idle_stranger_is_sent_away_in_time_and_one_that_dribbles_too() -> None:
    door = Door(patience_s=0.1)
    with contextlib.ExitStack() as stack:
        stack.callback(door.close)
        idle, dribbling, halfway = (stack.enter_context(door.raw()) for _ in range(3))
        halfway.sendall(HEAD.pack(MAGIC, VERSION, bytes(32)))
        exactly(halfway, HEAD.size + MAC_BYTES)
        hello, sent, began = HEAD.pack(MAGIC, VERSION, bytes(32)), 0, time.monotonic()
        with contextlib.suppress(OSError):
            while not select.select([dribbling], [], [], 0.01)[0] and sent < len(hello) - 1:
                sent += dribbling.send(hello[sent : sent + 1])
        for stranger in (idle, dribbling, halfway):
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert time.monotonic() - began < AT_ONCE_S
        assert door.refusals("silent", at_least=3) == 3


def test_a_stranger_is_heard_no_further_than_the_first_wrong_byte(door: Door) -> None:
    with door.raw() as stranger:
        stranger.sendall(b"HETSEQ\n")  # a byte is missing before the newline
        assert door.refusals("foreign") == 1


def test_a_flood_of_strangers_is_none_of_log_lines(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            with door.raw() as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert door.refusals("foreign", at_least=50) == 50
    assert len(caplog.messages) == 1
    assert "speaks another protocol" in caplog.text


def test_out_of_descriptors_the_listener_goes_on_when_there_are_some(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = iter([True] * 3)
    accept = socket.socket.accept

    def scarce(self: socket.socket) -> Any:
        if next(refused, False):
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with dial(door.listener):
        door.peer()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Whatever reaches json.loads."""
    seen: list[bytes] = []
    loads = json.loads

    def watched(text: bytes, **words: Any) -> Any:
        seen.append(bytes(text))
        return loads(text, **words)

    monkeypatch.setattr(json, "loads", watched)
    return seen


def test_a_thousand_strangers_admit_nobody_and_an_honest_peer_hardly_waits(
    door: Door, parsed: list[bytes], in_thread: Callable[..., Future[Any]]
) -> None:
    (old_hello, old_proof), _ = handshake(KEY)
    hello = HEAD.pack(MAGIC, VERSION, bytes(32))
    poison = json.dumps({"poison": 1}).encode()
    record = struct.pack("!I", len(poison)) + poison + bytes(MAC_BYTES)

    def no_secret(stranger: socket.socket) -> None:
        stranger.sendall(record)

    def wrong_secret(stranger: socket.socket) -> None:
        stranger.sendall(hello)
        answer = exactly(stranger, HEAD.size + MAC_BYTES)
        transcript = hello + answer[: HEAD.size]
        stranger.sendall(VERDICT.pack(1, channel_module._proof(OTHER_KEY, b"client", transcript)) + record)

    def replayed(stranger: socket.socket) -> None:
        stranger.sendall(old_hello + old_proof + record)

    def noise(stranger: socket.socket) -> None:
        stranger.sendall(os.urandom(4096))

    def huge_length(stranger: socket.socket) -> None:
        stranger.sendall(MAGIC + b"\xff" * 4096)

    def idle(stranger: socket.socket) -> None:
        stranger.sendall(hello[: random.Random(id(stranger)).randrange(HEAD.size)])

    kinds = [no_secret, wrong_secret, replayed, noise, huge_length, idle]
    with contextlib.ExitStack() as held:

        def attack(first: int) -> None:
            for number in range(first, 1000, 4):
                with contextlib.suppress(OSError, AssertionError):  # sent away in the middle of it
                    stranger = door.raw()
                    held.callback(stranger.close)
                    kinds[number % len(kinds)](stranger)

        attacking = [in_thread(attack, first) for first in range(4)]
        waits = []
        for number in range(5):
            began = time.monotonic()
            with dial(door.listener, seconds=5.0) as client:
                waits.append(time.monotonic() - began)
                client.send({"honest": number})
                assert door.peer(number).receive(PATIENCE_S) == {"honest": number}
        for thread in attacking:
            thread.result(PATIENCE_S)
        began = time.monotonic()
        with dial(door.listener, seconds=5.0):  # among all the idle ones
            waits.append(time.monotonic() - began)
        assert max(waits) <= 2.0
        door.peer(5)
        assert len(door.listener._strangers) <= 256
    assert len(door.admitted) == 6
    assert sum(door.listener.refused.values()) >= 700
    assert parsed == [json.dumps({"honest": number}, separators=(",", ":")).encode() for number in range(5)]


def test_a_strangers_json_is_not_parsed_even_after_an_honest_handshake(middle: Middle, parsed: list[bytes]) -> None:
    payload = b'{"n":1}'
    middle.from_listener.sendall(struct.pack("!I", len(payload)) + payload + bytes(MAC_BYTES))
    with pytest.raises(StrangerError):
        middle.listener.receive(PATIENCE_S)
    assert parsed == []
