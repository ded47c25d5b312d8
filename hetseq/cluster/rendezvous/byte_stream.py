"""Byte streams: one-way connections for much data, between two processes that prove to each other that they hold a key.

Responsible for the proof, and for frames: a JSON header and bytes. Does not interpret the bytes. The receiver listens
(`StreamDoor`), senders dial (`open_stream`). The one idea: what a sender has given to its kernel arrives even if the
sender is killed, so a receiver reads until the end of the stream before it believes that a sender has said all.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hetseq.cluster.rendezvous.sockets import DeadlinePassed, ForeignBytes, bind, dial, fill, say, send_all, take
from hetseq.comm import socket_filter
from hetseq.errors import RendezvousError

Header = dict[str, Any]

_MAGIC = b"hetseq-stream-1"
_NONCE_BYTES, _MAC_BYTES = 32, 32
_HELLO = struct.Struct(f"!{len(_MAGIC)}s{_NONCE_BYTES}sI")  # with the sender's number
_ANSWER = struct.Struct(f"!{_NONCE_BYTES}s{_MAC_BYTES}s")
_FRAME = struct.Struct("!IQ")  # bytes of the header, and of what follows it
_MOST_HEADER_BYTES = 64 << 20
_PROOF_S = 5.0  # for a peer that has connected to prove itself
_LOOK_S = 0.2  # between two looks whether a sender is still to send


class StreamError(RendezvousError):
    """A stream could not be opened, or what came from it is no frame."""


def _proof(key: bytes, role: str, name: str, number: int, nonces: bytes) -> bytes:
    return hmac.digest(key, f"{_MAGIC.decode()} {role} {name} {number} ".encode() + nonces, "sha256")


class Guest:
    """A process that has connected, and has 5 s to prove that it holds the key."""

    def __init__(self, connection: socket.socket, name: str, key: bytes) -> None:
        self.connection = connection
        self._name, self._key, self._until_s = name, key, time.monotonic() + _PROOF_S
        self._inbox, self._number, self._nonces = bytearray(), 0, b""

    def advance(self) -> int | None:
        """Its number as a sender, once it has proven itself; None before. Never waits. Raises StreamError."""
        try:
            if not self._nonces and take(self.connection, self._inbox, _HELLO.size, begins_with=_MAGIC):
                _, theirs, self._number = _HELLO.unpack(self._inbox)
                nonce = secrets.token_bytes(_NONCE_BYTES)
                self._nonces = theirs + nonce
                say(self.connection, _ANSWER.pack(nonce, self._proof("door")))
                self._inbox.clear()
            if self._nonces and take(self.connection, self._inbox, _MAC_BYTES):
                if hmac.compare_digest(self._inbox, self._proof("sender")):
                    return self._number
                raise StreamError("it does not hold the key of this run")
        except (OSError, ForeignBytes) as error:
            raise StreamError(f"it is no sender of this run ({error})") from None
        if time.monotonic() > self._until_s:
            raise StreamError(f"it has not proven itself within {_PROOF_S:.0f} s")
        return None

    def close(self) -> None:
        self.connection.close()

    def _proof(self, role: str) -> bytes:
        return _proof(self._key, role, self._name, self._number, self._nonces)


class StreamDoor:
    """The listening end: `accept` gives each process that has connected, for a proof that it is a sender.

    Only the given addresses can connect, if the kernel has filters. Both ends know the stream by `name`, used once.
    """

    def __init__(self, host: str, name: str, key: bytes, *, sources: Collection[str] = ()) -> None:
        self._listener, self._name, self._key = bind(host, 0), name, key
        self.port: int = self._listener.getsockname()[1]
        if sources:
            socket_filter.admit(self._listener.fileno(), {host, *sources})

    def fileno(self) -> int:
        """The descriptor to wait on: readable when a sender has connected."""
        return self._listener.fileno()

    def accept(self) -> Guest | None:
        """The next process that has connected; None if there is none."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        connection.setblocking(False)
        socket_filter.free_connections(self.port)
        return Guest(connection, self._name, self._key)

    def close(self) -> None:
        """Stop listening; open connections stay."""
        self._listener.close()


def open_stream(host: str, port: int, name: str, number: int, key: bytes, *, timeout_s: float) -> socket.socket:
    """A connection to a `StreamDoor`, as sender `number`. Raises UnreachableError or StreamError."""
    deadline = time.monotonic() + timeout_s
    connection, inbox = dial(host, port, deadline), bytearray()
    try:
        own = secrets.token_bytes(_NONCE_BYTES)
        send_all(connection, _HELLO.pack(_MAGIC, own, number), deadline)
        fill(connection, inbox, _ANSWER.size, deadline)
        nonce, proof = _ANSWER.unpack(inbox)
        nonces = own + nonce
        if not hmac.compare_digest(proof, _proof(key, "door", name, number, nonces)):
            raise StreamError(f"the process at {host}:{port} does not hold the key of this run: nothing was sent to it")
        send_all(connection, _proof(key, "sender", name, number, nonces), deadline)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except (OSError, DeadlinePassed) as error:
        connection.close()
        why = str(error) or f"not within {timeout_s:g} s"
        raise StreamError(f"{host}:{port} did not answer as a shadow of this run ({why})") from None
    except BaseException:
        connection.close()
        raise


def send_frame(
    connection: socket.socket, header: Header, content: Sequence[memoryview] = (), *, is_wanted: Callable[[], bool]
) -> int:
    """Give a whole frame to the kernel, however long the receiver takes; returns its bytes.

    Raises OSError if the connection has ended, and StreamError once `is_wanted`, called now and then, gives false.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    pieces = [memoryview(piece).cast("B") for piece in content if piece.nbytes]
    size = sum(piece.nbytes for piece in pieces)
    head = _FRAME.pack(len(text), size) + text
    for piece in [memoryview(head), *pieces]:
        rest = piece
        while rest:
            try:
                rest = rest[connection.send(rest[: 1 << 20]) :]
            except BlockingIOError:
                if not is_wanted():
                    raise StreamError("the rest is no longer wanted") from None
                poll = select.poll()
                poll.register(connection, select.POLLOUT)
                poll.poll(1000 * _LOOK_S)
    return len(head) + size


class FrameReader:
    """Reads frames from a connection without waiting: `read` until `header` is there and `is_whole`, then `clear`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.header: Header | None = None
        self.content = memoryview(b"")
        self.has_ended = False
        self.frame_bytes = 0  # of the present frame, as a whole
        self._inbox, self._filled, self._text_bytes, self._sizes = bytearray(), 0, 0, (0, 0)
        self._memory = bytearray()

    @property
    def is_whole(self) -> bool:
        """Whether a frame has arrived as a whole."""
        return self.header is not None and self._filled == len(self.content)

    def read(self) -> None:
        """Read what has arrived of the present frame; sets `has_ended` at the end of the stream."""
        try:
            while not (self.is_whole or self.has_ended):
                self._read_some()
        except BlockingIOError:
            return
        except (OSError, StreamError, ValueError):
            self.has_ended = True

    def clear(self) -> None:
        """Forget the frame, and begin with the next one. Its content changes from now on."""
        self.header, self.content, self._filled = None, memoryview(b""), 0

    def close(self) -> None:
        self.connection.close()

    def _read_some(self) -> None:
        if self.header is None:
            wanted = _FRAME.size if not self._sizes[0] else sum((_FRAME.size, self._sizes[0]))
            chunk = self.connection.recv(wanted - len(self._inbox))
            self.has_ended = not chunk
            self._inbox += chunk
            if len(self._inbox) == _FRAME.size and not self._sizes[0]:
                self._sizes = _FRAME.unpack(self._inbox)
                if not 0 < self._sizes[0] <= _MOST_HEADER_BYTES:
                    raise StreamError(f"a header of {self._sizes[0]} bytes")
            elif self._sizes[0] and len(self._inbox) == wanted:
                self._begin(json.loads(self._inbox[_FRAME.size :]), self._sizes[1])
            return
        count = self.connection.recv_into(self.content[self._filled :], min(len(self.content) - self._filled, 1 << 20))
        self.has_ended = not count
        self._filled += count

    def _begin(self, header: Header, size: int) -> None:
        if len(self._memory) < size:
            self._memory = bytearray(size)
        self.header, self.content, self._filled = header, memoryview(self._memory)[:size], 0
        self.frame_bytes = len(self._inbox) + size
        self._inbox, self._sizes = bytearray(), (0, 0)
