"""Sockets: connect to an address, listen at one, send and receive bytes, each with a deadline.

Errors say in words why an address could not be reached or listened at. The module does not interpret the bytes. The
one idea: sockets never block and nothing is read ahead, so a caller that has the bytes it asked for may hand the socket
to another, and a caller that waits for it in poll(2) misses nothing.
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

#: How long the kernel retransmits unacknowledged data before it ends the connection (its default is a quarter of an
#: hour). While ranks train, launchers and coordinator exchange nothing. The first message after a network cut says that
#: a rank has lost a peer, and is sent when the deadline of its step has passed. So a cut is noticed this long after the
#: deadline, and a cut that is shorter than the deadline ends nothing, whatever the deadline is. It is long enough for a
#: roaming laptop, a switch port that learns its neighbours, and four or five retransmissions.
_UNACKNOWLEDGED_S = 20.0
#: keepalive: idle time before the first probe, and between probes; a lost peer is noticed after _UNACKNOWLEDGED_S too
_IDLE_S, _AGAIN_S = 10, 5

#: an entry of socket.getaddrinfo: family, kind, protocol, canonical name, address
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


class UnreachableError(RendezvousError):
    """No connection could be made; `reason` is `refused`, `route`, `timeout` or `name`, for callers that retry."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class AddressError(RendezvousError):
    """An address to listen at that is in use, belongs to another machine, or means every interface."""

    exit_code = EXIT_USAGE


class DeadlinePassed(Exception):
    """The deadline of a wait passed. Not an OSError, because an OSError means that the connection failed."""


class ForeignBytes(Exception):
    """The received bytes do not begin with HetSeq's magic; the text quotes them."""


def dial(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address of `host` that accepts one by `deadline`. Raises UnreachableError."""
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
                raise ConnectionRefusedError  # TCP self-connect: the local port answered, no process listens
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
            f"{here} cannot reach {place}: connection refused. No process listens there: start the head, or correct"
            " the address",
            reason="refused",
        ) from trouble
    if isinstance(trouble, TimeoutError):
        raise UnreachableError(
            f"{here} cannot reach {place}: no answer in time. The machine is off, or a firewall drops packets to port"
            f" {port}",
            reason="timeout",
        ) from trouble
    raise UnreachableError(
        f"{here} cannot reach {place}: {trouble.strerror or trouble}. No route leads there, or a firewall refuses",
        reason="route",
    ) from trouble


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on one address of this machine. Raises AddressError; UnreachableError for an unknown name."""
    here, place = socket.gethostname(), f"{host_text(host)}:{port}"
    family, kind, protocol, _, address = _resolve(host, port, time.monotonic() + _RESOLVE_S)[0]
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
        raise AddressError(f"{place} means every interface of {here}, and HetSeq listens on one: give its address")
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections must not block the port
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
    """The process that listens at `port`, as `pid 4242 (jupyter)`, if the kernel shows it (Linux, own processes)."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                    sockets.add(f"socket:[{words[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):  # it belongs to another user, or has just ended
            if os.readlink(link) in sockets:
                process = link.parents[1]
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return f"another program (ss -ltnp 'sport = :{port}' may name it)"


def _resolve(host: str, port: int, deadline: float) -> list[_Address]:
    """The addresses of `host`; a name server that does not answer by `deadline` is abandoned in its own thread."""
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
    """The host as written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def address_text(address: Any) -> str:
    """`host:port` of a socket address."""
    return f"{host_text(str(address[0]))}:{address[1]}"


def take(connection: socket.socket, inbox: bytearray, size: int, *, begins_with: bytes = b"") -> bool:
    """Read available bytes until `inbox` has exactly `size`; returns whether it has them. Never waits.

    Raises ConnectionResetError at the end of the stream, ForeignBytes if the bytes do not start with `begins_with`.
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
    """Like `take`, but wait for all bytes; on DeadlinePassed `inbox` keeps the bytes received so far."""
    while not take(connection, inbox, size, begins_with=begins_with):
        _wait(connection, select.POLLIN, deadline)


def say(connection: socket.socket, text: bytes) -> None:
    """Send to a peer that has not proven itself, without waiting for it."""
    if connection.send(text) != len(text):
        raise ConnectionResetError("it does not read")


def send_all(connection: socket.socket, content: bytes, deadline: float) -> None:
    """Hand all of `content` to the kernel; on DeadlinePassed only part of it may have been sent."""
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
    poll = select.poll()  # supports descriptors above 1023, unlike select()
    poll.register(connection, event)
    poll.poll(math.ceil(min(left_s, _LONGEST_POLL_S) * 1000))


def make_ready(connection: socket.socket) -> None:
    """Set up a connection for records: non-blocking, no delay, and ETIMEDOUT if they are not acknowledged for 20 s.

    The remote machine acknowledges them, not the process, so a stopped process loses nothing.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKNOWLEDGED_S * 1000))


def ask_when_idle(descriptor: int) -> None:
    """Enable keepalive, so that the connection also ends if an idle remote machine is silent for 20 s.

    Only for a launcher that waits and has no ranks in training. During a step, a probe could end a connection that the
    deadline of the step allows: with TCP_USER_TIMEOUT set the kernel does not count probes, so one lost probe ends a
    connection that has been idle for longer than that.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            questions = round((_UNACKNOWLEDGED_S - _IDLE_S) / _AGAIN_S)
            options = {"TCP_KEEPIDLE": _IDLE_S, "TCP_KEEPINTVL": _AGAIN_S, "TCP_KEEPCNT": questions}
            for name, value in options.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(connection: socket.socket, how: int) -> None:
    """`shutdown(2)`, ignoring a connection that has already ended."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)
