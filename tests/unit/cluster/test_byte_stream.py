"""Byte streams: only holders of the key get in, frames arrive whole and in order, and what was sent before an end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from hetseq.cluster.rendezvous.byte_stream import FrameReader, StreamDoor, StreamError, open_stream, send_frame
from tests.support.trials import until

KEY, NAME = b"k" * 32, "run/1/shadow-2.0"


@pytest.fixture
def door() -> Iterator[StreamDoor]:
    with closing(StreamDoor("127.0.0.1", NAME, KEY, sources=["127.0.0.1"])) as door:
        yield door


def enter(door: StreamDoor, *, key: bytes = KEY, name: str = NAME, number: int = 3) -> list[object]:
    """A sender that dials in a thread of its own: its connection, or its error, once `accept` has been called."""
    found: list[object] = []

    def dial() -> None:
        try:
            found.append(open_stream("127.0.0.1", door.port, name, number, key, timeout_s=5.0))
        except StreamError as error:
            found.append(error)

    thread = threading.Thread(target=dial)
    thread.start()
    accepted = until(door.accept, "a sender or a stranger") if key == KEY and name == NAME else _refused(door)
    thread.join()
    return [accepted, *found]


def _refused(door: StreamDoor) -> None:
    import select

    select.select([door], [], [], 5.0)
    assert door.accept() is None


def pair(door: StreamDoor) -> tuple[socket.socket, FrameReader]:
    accepted, sender = enter(door)
    assert isinstance(accepted, tuple)
    assert isinstance(sender, socket.socket)
    assert accepted[0] == 3
    return sender, FrameReader(accepted[1])


@pytest.mark.parametrize(("key", "name"), [(b"x" * 32, NAME), (KEY, "run/2/shadow-2.0")], ids=["key", "name"])
def test_a_sender_with_another_key_or_for_another_stream_is_refused(door: StreamDoor, key: bytes, name: str) -> None:
    _, error = enter(door, key=key, name=name)
    assert isinstance(error, StreamError)
    assert "does not hold the key" in str(error)


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
