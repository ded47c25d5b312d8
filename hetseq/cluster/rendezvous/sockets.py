"""Sockets that reach one address or listen at one, and bytes through them, each wait with a deadline.

Responsible for saying in words why nobody was reached, or why an address cannot be listened at. It knows nothing of
what the bytes mean. The one idea: sockets never block and nothing is read ahead, so a caller that has what it asked
for may hand the socket to another, and one that waits in poll(2) for the socket to be readable misses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from hetseq.errors import EXIT_USAGE, RendezvousError

_CHUNK_BYTES = 2**18
_BACKLOG = 1024
_RESOLVE_S = 10.0
_LONGEST_POLL_S = 3600.0

#: How long the kernel repeats what the other end does not acknowledge, until it ends the connection: its own figure is
#: a quarter of an hour. While ranks train nothing passes between launchers and hub, whatever the network does. The
#: first word after a cut is that somebody has lost a peer, and by then the deadline of the step has passed; so a cut
#: is known this long after the deadline, and one that is shorter than the deadline ends nothing, whatever that is.
#: Long enough for a roaming laptop, a port of a switch that learns its neighbours, and four or five repetitions.
_UNACKNOWLEDGED_S = 20.0
#: until an idle peer is asked, and between two questions; with them it is missed after _UNACKNOWLEDGED_S as well
_IDLE_S, _AGAIN_S = 10, 5

#: what socket.getaddrinfo gives: family, kind, protocol, canonical name, address
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


class UnreachableError(RendezvousError):
    """No connection at all; `reason` is `refused`, `route`, `timeout` or `name`, for callers that try again."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class AddressError(RendezvousError):
    """An address to listen at that is taken, another machine's, or every interface's."""

    exit_code = EXIT_USAGE


class DeadlinePassed(Exception):
    """A wait that ended without what was awaited. No OSError: those tell of the connection."""


class ForeignBytes(Exception):
    """What came does not begin as HetSeq does; the text quotes it."""


def dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of `host` that takes one by `deadline`; raises UnreachableError."""
    here, place = socket.gethostname(), f"{host_text(host)}:{port}"
    addresses = _resolve(host, port, deadline)
    trouble: OSError = TimeoutError()
    for position, (family, kind, protocol, _, address) in enumerate(addresses):
        left_s = (deadline - time.monotonic()) / (len(addresses) - position)
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(left_s, 0.001))
            connection.connect(address)
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError  # TCP lets a port of one's own answer where nobody listens
            connection.setblocking(False)
            return connection
        except OSError as error:
            connection.close()
            trouble = error
        except BaseException:
            connection.close()
            raise
    if isinstance(trouble, ConnectionRefusedError):
        raise UnreachableError(
            f"{here} cannot reach {place}: connection refused. Nobody listens there: start the head, or correct the"
            " address",
            reason="refused",
        ) from trouble
    if isinstance(trouble, TimeoutError):
        raise UnreachableError(
            f"{here} cannot reach {place}: no answer in time. The machine is off, or a firewall drops what is sent to"
            f" port {port}",
            reason="timeout",
        ) from trouble
    raise UnreachableError(
        f"{here} cannot reach {place}: {trouble.strerror or trouble}. No route leads there, or a firewall refuses",
        reason="route",
    ) from trouble


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on one address of this machine; raises AddressError, or UnreachableError for its name."""
    here, place = socket.gethostname(), f"{host_text(host)}:{port}"
    family, kind, protocol, _, address = _resolve(host, port, time.monotonic() + _RESOLVE_S)[0]
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
        raise AddressError(f"{place} means every interface of {here}, and HetSeq listens on one: give its address")
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections do not hold the port
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        return listening
    except OSError as error:
        listening.close()
        remedy = {
            errno.EADDRINUSE: f"{_holder(port)} uses it: choose another port [port-taken]",
            errno.EADDRNOTAVAIL: f"it is not an address of {here} (ip -br address lists them)",
            errno.EACCES: "ports below 1024 are for root: choose a higher one",
        }.get(error.errno or 0, error.strerror)
        raise AddressError(f"{here} cannot listen at {place}: {remedy}") from error


def _holder(port: int) -> str:
    """`pid 4242 (jupyter)` if the kernel says who listens at `port` (Linux, processes one may look into)."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                    sockets.add(f"socket:[{words[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):  # another user's, or just gone
            if os.readlink(link) in sockets:
                process = link.parents[1]
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return f"another program (ss -ltnp 'sport = :{port}' may name it)"


def _resolve(host: str, port: int, deadline: float) -> list[_Address]:
    """The addresses of `host`; a name server that does not answer is left behind in a thread of its own."""
    found: list[_Address] = []
    troubles: list[OSError] = []

    def ask(flags: int = 0) -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
        except OSError as error:
            troubles.append(error)

    ask(socket.AI_NUMERICHOST)
    if not found:
        troubles.clear()
        thread = threading.Thread(target=ask, name="resolve", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
    if found:
        return found
    why = troubles[0].strerror if troubles else "the name server does not answer"
    raise UnreachableError(
        f"{host_text(host)} is not known on {socket.gethostname()} ({why}): use its IP address [head-unknown]",
        reason="name",
    )


def host_text(host: str) -> str:
    """The host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def address_text(address: Any) -> str:
    """`host:port` of what a socket calls an address."""
    return f"{host_text(str(address[0]))}:{address[1]}"


def take(connection: socket.socket, inbox: bytearray, size: int, *, begins_with: bytes = b"") -> bool:
    """Read what is there until `inbox` has `size` bytes, and none beyond; whether it has them. Never waits.

    Raises ConnectionResetError at the end of the stream, ForeignBytes for what does not begin as it should.
    """
    while len(inbox) < size:
        try:
            chunk = connection.recv(min(size - len(inbox), _CHUNK_BYTES))
        except BlockingIOError:
            return False
        if not chunk:
            raise ConnectionResetError("it closed the connection")
        inbox += chunk
        if not inbox.startswith(begins_with[: len(inbox)]):
            raise ForeignBytes(ascii(inbox[:40].decode("latin-1")))
    return True


def fill(connection: socket.socket, inbox: bytearray, size: int, deadline: float, *, begins_with: bytes = b"") -> None:
    """As `take`, and wait; DeadlinePassed leaves what has come in `inbox`."""
    while not take(connection, inbox, size, begins_with=begins_with):
        _wait(connection, select.POLLIN, deadline)


def say(connection: socket.socket, text: bytes) -> None:
    """Send to somebody who has no right to be waited for."""
    if connection.send(text) != len(text):
        raise ConnectionResetError("it reads nothing")


def send_all(connection: socket.socket, content: bytes, deadline: float) -> None:
    """Hand all of `content` to the kernel; DeadlinePassed may leave half of it out."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            _wait(connection, select.POLLOUT, deadline)


def _wait(connection: socket.socket, event: int, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise DeadlinePassed
    poll = select.poll()  # knows descriptors above 1023, unlike select()
    poll.register(connection, event)
    poll.poll(math.ceil(min(left_s, _LONGEST_POLL_S) * 1000))


def make_ready(connection: socket.socket) -> None:
    """For records: it never blocks, sends at once, and ends, ETIMEDOUT here, when they have not arrived for 20 s.

    The machine at the other end has to acknowledge them, not its process: one that is stopped loses nothing.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1000))


def ask_when_idle(descriptor: int) -> None:
    """From now on this connection also ends when the other machine is silent for 20 s with nothing to acknowledge.

    For whoever waits and has no ranks in training. With some, a question in the midst of a step would end what the
    deadline of the step lets live: beside the limit on silence the kernel does not count its questions, and a single
    one that is lost ends a connection that has been idle for longer than that.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            questions = round((_UNACKNOWLEDGED_S - _IDLE_S) / _AGAIN_S)
            options = {"TCP_KEEPIDLE": _IDLE_S, "TCP_KEEPINTVL": _AGAIN_S, "TCP_KEEPCNT": questions}
            for name, value in options.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(connection: socket.socket, how: int) -> None:
    """`shutdown(2)`, where there is still something to shut."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)
