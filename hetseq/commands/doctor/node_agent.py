"""Agent of one node in the common examination: it handles the head's requests, each with one record as answer.

Listens for streams of other nodes, sends streams to theirs, writes marks in the shared directory, and runs this node's
`all_reduce_client`. It decides nothing: the head (`coordinator`) sends every request.

The one idea: both ends of a stream prove that they know the key for this pair and this rendezvous. Then bytes flow as
in a ring of ranks: every node sends to one node and receives from one at the same time.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.cluster.rendezvous.channel import ChannelError
from hetseq.cluster.rendezvous.sockets import (
    DeadlinePassed,
    ForeignBytes,
    UnreachableError,
    bind,
    dial,
    fill,
    send_all,
    shut,
)
from hetseq.commands.doctor.all_reduce_client import Participant

STREAM_S, STREAM_BYTES = 0.5, 256 << 20
DIAL_S, MARK_S = 8.0, 15.0
_PROOF_BYTES, _CHUNK = 32, bytes(1 << 20)
_HELLO = struct.Struct("!I32s")  # the number of the connecting node, and its proof
_RECEIVED = struct.Struct("!Qd")  # bytes, seconds
_TURN_MS, _HELLO_S, _STREAM_END_S, _POLL_S = 200, 2.0, 20.0, 0.01
_TRIPS = 5
_PONG = b"."


@dataclass(frozen=True)
class Stream:
    """The measurement of one stream: the speed at the receiver, and half the round-trip time."""

    bytes_per_s: float
    latency_s: float


class Door:
    """A listener at `address`, in a thread, until `close`; takes one stream after the other."""

    def __init__(self, address: str, key: bytes) -> None:
        self._socket = bind(address, 0)
        self.address, self.port = (str(self._socket.getsockname()[0]), int(self._socket.getsockname()[1]))
        self._key, self._session, self._number = key, "", -1
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    def expect(self, session: str, number: int) -> None:
        """Accept streams to node `number` of this session from now on."""
        self._session, self._number = session, number

    def close(self) -> None:
        """Stop listening; may be called twice."""
        self._is_open = False
        self._thread.join(_HELLO_S)
        self._socket.close()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while self._is_open:
            if poll.poll(_TURN_MS):
                with contextlib.suppress(OSError, DeadlinePassed, ForeignBytes):
                    connection, _ = self._socket.accept()
                    with connection:
                        connection.setblocking(False)
                        self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _HELLO_S
        inbox = bytearray()
        fill(connection, inbox, _HELLO.size, deadline)
        other, shown = _HELLO.unpack(inbox)
        if not hmac.compare_digest(shown, proof(self._key, self._session, other, self._number, "comes")):
            return
        deadline = time.monotonic() + _STREAM_END_S
        send_all(connection, proof(self._key, self._session, other, self._number, "let in"), deadline)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TRIPS):
            inbox.clear()
            fill(connection, inbox, 1, deadline)
            send_all(connection, _PONG, deadline)
        received, begin = 0, time.monotonic()
        with contextlib.suppress(ConnectionResetError):  # the end of the stream
            while True:
                inbox.clear()
                fill(connection, inbox, 1, deadline)
                inbox.clear()
                received += 1
                received += _drain(connection)
        send_all(connection, _RECEIVED.pack(received, time.monotonic() - begin), deadline)


def _drain(connection: socket.socket) -> int:
    """Read and count the bytes that have arrived."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while chunk := connection.recv(len(_CHUNK)):
            count += len(chunk)
    return count


def proof(key: bytes, session: str, source: int, target: int, role: str) -> bytes:
    """A proof that only a node of this session can give, for this direction of this pair."""
    return hmac.digest(key, f"doctor {session} {source} {target} {role}".encode(), "sha256")


def stream_to(address: str, port: int, key: bytes, session: str, source: int, target: int) -> Stream:
    """Send bytes to a `Door` for half a second. Raises UnreachableError, OSError, DeadlinePassed, or ForeignBytes."""
    deadline = time.monotonic() + DIAL_S
    with dial(address, port, deadline) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_all(connection, _HELLO.pack(source, proof(key, session, source, target, "comes")), deadline)
        inbox = bytearray()
        fill(connection, inbox, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(bytes(inbox), proof(key, session, source, target, "let in")):
            raise ForeignBytes("another program listens there")
        trips = [_round_trip(connection, deadline) for _ in range(_TRIPS)]
        sent, end, deadline = 0, time.monotonic() + STREAM_S, time.monotonic() + _STREAM_END_S
        while sent < STREAM_BYTES and time.monotonic() < end:
            send_all(connection, _CHUNK, deadline)
            sent += len(_CHUNK)
        shut(connection, socket.SHUT_WR)
        inbox.clear()
        fill(connection, inbox, _RECEIVED.size, deadline)
        received, seconds = _RECEIVED.unpack(inbox)
        if received != sent:
            raise ForeignBytes(f"{received} of {sent} bytes arrived")
        return Stream(received / max(seconds, 1e-9), statistics.median(trips) / 2)


def _round_trip(connection: socket.socket, deadline: float) -> float:
    inbox, begin = bytearray(), time.monotonic()
    send_all(connection, _PONG, deadline)
    fill(connection, inbox, 1, deadline)
    return time.monotonic() - begin


class Helper:
    """Answers the head's requests on this node. `device` holds the tensors of the all-reduce: cpu, cuda:0."""

    def __init__(self, address: str, key: bytes, directory: Path | None, device: str = "cpu") -> None:
        self.door = Door(address, key)
        self._key, self._directory, self._device = key, directory, device
        self._session, self._number = "", -1
        self._participant: Participant | None = None

    def take(self, request: Mapping[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        """Handle a request; `say` gets the answer and earlier messages, possibly from another thread."""
        if request.get("kind") in ("value", "gone"):
            if self._participant is not None:
                self._participant.pass_on(dict(request))
        elif request.get("kind") == "all-reduce":
            threading.Thread(target=self._all_reduce, args=(request, say), name="all-reduce", daemon=True).start()
        else:
            say(self.answer(request))

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; `trouble` says what went wrong."""
        try:
            return _ANSWERS[str(request["kind"])](self, request)
        except UnreachableError as error:
            return {"trouble": _CAUSES.get(error.reason, str(error))}
        except DeadlinePassed:
            return {"trouble": "it accepts the connection but does not answer"}
        except ForeignBytes as error:
            return {"trouble": str(error)}
        except OSError as error:
            return {"trouble": error.strerror or str(error)}

    def close(self) -> None:
        """Stop listening, and end the participant."""
        self.door.close()
        if self._participant is not None:
            self._participant.close()

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._participant = Participant()
        return self._participant.await_ready()

    def _all_reduce(self, request: Mapping[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        """The answer of this node's participant; the main thread notices a lost head."""
        if self._participant is None:
            answer: dict[str, Any] = {
                "measured": {},
                "trouble": "no all-reduce was prepared here",
                "is_secondary": False,
            }
        else:
            part = {name: request[name] for name in ("name", "rank", "world_size", "sources")}
            part |= {"key": self._key.hex(), "host": self.door.address, "device": self._device}
            answer = self._participant.take_part(part, say)
            self._participant.close()
        with contextlib.suppress(ChannelError):
            say(answer)

    def _begin(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._session, self._number = str(request["session"]), int(request["number"])
        self.door.expect(self._session, self._number)
        return {}

    def _stream(self, request: Mapping[str, Any]) -> dict[str, Any]:
        way = (str(request["address"]), int(request["port"]))
        found = stream_to(*way, self._key, self._session, self._number, int(request["target"]))
        return {"bytes_per_s": found.bytes_per_s, "latency_s": found.latency_s}

    def _leave_mark(self, request: Mapping[str, Any]) -> dict[str, Any]:
        descriptor = os.open(self._mark(request), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as out:
            out.write(str(request["content"]))
            out.flush()
            os.fsync(descriptor)
        return {}

    def _find_mark(self, request: Mapping[str, Any]) -> dict[str, Any]:
        mark, end = self._mark(request), time.monotonic() + MARK_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if mark.read_text() == request["content"]:
                    return {"is_seen": True}
            time.sleep(_POLL_S)
        return {"is_seen": False}

    def _remove_mark(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._mark(request).unlink(missing_ok=True)
        return {}

    def _mark(self, request: Mapping[str, Any]) -> Path:
        """The file of a mark; only its number comes from the head."""
        if self._directory is None:
            raise OSError("no --dir was given here")
        return self._directory / f".hetseq-doctor-{self._session}-{int(request['mark'])}"


_ANSWERS = {
    "begin": Helper._begin,
    "stream": Helper._stream,
    "leave mark": Helper._leave_mark,
    "find mark": Helper._find_mark,
    "remove mark": Helper._remove_mark,
    "prepare all-reduce": Helper._prepare,
}
_CAUSES = {
    "refused": "connection refused, although it listens there",
    "timeout": "no answer, packets are dropped on the way",
    "route": "no route to it, or a firewall refuses",
}
