"""Byte streams: only holders of the key get in, frames arrive whole and in order, and what was sent before an end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.cluster.rendezvous import byte_stream
from hetseq.cluster.rendezvous.byte_stream import FrameReader, StreamDoor, StreamError, open_stream, send_frame
from tests.support.trials import until

KEY, NAME = b"k" * 32, "run/1/shadow-2.0"


@pytest.fixture
def door() -> Iterator[StreamDoor]:
    with closing(StreamDoor("127.0.0.1", NAME, KEY, sources=["127.0.0.1"])) as door:
        yield door


def enter(door: StreamDoor, *, key: bytes = KEY, name: str = NAME, number: int = 3) -> list[Any]:
    """A sender that dials in a thread of its own: the guest and its number or error there; its connection or error."""
    found: list[Any] = []

    def dial() -> None:
        try:
            found.append(open_stream("127.0.0.1", door.port, name, number, key, timeout_s=5.0))
        except StreamError as error:
            found.append(error)

    thread = threading.Thread(target=dial)
    thread.start()
    guest, proven = until(door.accept, "a sender or a stranger"), list[object]()

    def has_answered() -> bool:
        try:
            proven.append(guest.advance())
        except StreamError as error:
            proven.append(error)
        return proven[-1] is not None

    until(has_answered, "a proof, or none")
    thread.join()
    return [(guest, proven[-1]), *found]


def pair(door: StreamDoor) -> tuple[socket.socket, FrameReader]:
    (guest, number), sender = enter(door)
    assert isinstance(sender, socket.socket)
    assert number == 3
    return sender, FrameReader(guest.connection)


@pytest.mark.parametrize(("key", "name"), [(b"x" * 32, NAME), (KEY, "run/2/shadow-2.0")], ids=["key", "name"])
def test_a_sender_with_another_key_or_for_another_stream_is_refused(door: StreamDoor, key: bytes, name: str) -> None:
    (guest, found), error = enter(door, key=key, name=name)
    guest.close()
    assert isinstance(found, StreamError)
    assert isinstance(error, StreamError)
    assert "does not hold the key" in str(error)


def test_a_stranger_that_is_silent_or_talks_something_else_holds_no_sender(
    door: StreamDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, other = (socket.create_connection(("127.0.0.1", door.port)) for _ in range(2))
    other.send(b"GET / HTTP/1.1\r\n\r\n")
    strangers = [until(door.accept, "a stranger") for _ in range(2)]
    sender, reader = pair(door)
    found: list[StreamError] = []

    def is_refused() -> bool:
        for guest in strangers:
            try:
                assert guest.advance() is None
            except StreamError as error:
                found.append(error)
        return bool(found)

    until(is_refused, "the one that talks is refused")
    assert "no sender of this run" in str(found[0])
    monkeypatch.setattr(byte_stream, "time", SimpleNamespace(monotonic=lambda: 1e12))
    with pytest.raises(StreamError, match="not proven itself within 5 s"):
        strangers[0].advance()
    for one in (silent, other, sender, reader, *strangers):
        one.close()


def test_a_listener_that_says_nothing_is_told_of_in_words() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StreamError, match=r"did not answer as a shadow of this run \(not within 0.1 s\)"):
            open_stream("127.0.0.1", port, NAME, 3, KEY, timeout_s=0.1)


def test_frames_arrive_whole_and_in_order_however_they_are_cut(door: StreamDoor) -> None:
    sender, reader = pair(door)
    contents = [b"", b"x", bytes(range(256)) * 40_000]  # the last one is longer than the kernel keeps
    sizes: list[int] = []

    def send() -> None:
        for number, content in enumerate(contents):
            pieces = [memoryview(content)[: len(content) // 3], memoryview(content)[len(content) // 3 :]]
            sizes.append(send_frame(sender, {"number": number}, pieces, is_wanted=lambda: True))
        sender.close()

    thread = threading.Thread(target=send)
    thread.start()
    for number, content in enumerate(contents):

        def is_whole() -> bool:
            reader.read()
            return reader.is_whole

        until(is_whole, f"frame {number}")
        assert reader.header == {"number": number}
        assert bytes(reader.content) == content
        reader.clear()
    thread.join()
    until(lambda: reader.read() or reader.has_ended, "the end")
    assert reader.header is None
    assert sizes[2] > len(contents[2])
    reader.close()


def test_what_a_sender_gave_to_its_kernel_before_it_died_still_arrives(door: StreamDoor) -> None:
    sender, reader = pair(door)
    send_frame(sender, {"number": 1}, [memoryview(b"whole")], is_wanted=lambda: True)
    sender.send(b"\0\0\0\x10half a fr")
    sender.close()
    reader.read()
    assert (reader.header, bytes(reader.content)) == ({"number": 1}, b"whole")
    reader.clear()
    reader.read()
    assert reader.has_ended
    assert not reader.is_whole
    reader.close()


def test_a_receiver_that_does_not_read_ends_no_thread_but_the_wish_to_send_does(door: StreamDoor) -> None:
    sender, reader = pair(door)
    wishes = iter([True, True, False])
    with pytest.raises(StreamError, match="no longer wanted"):
        send_frame(sender, {"number": 1}, [memoryview(bytes(64 << 20))], is_wanted=lambda: next(wishes))
    sender.close()
    reader.close()


def test_bytes_that_are_no_frame_end_the_stream(door: StreamDoor) -> None:
    sender, reader = pair(door)
    sender.send(b"\xff" * 64)
    until(lambda: reader.read() or reader.has_ended, "the end")
    sender.close()
    reader.close()
