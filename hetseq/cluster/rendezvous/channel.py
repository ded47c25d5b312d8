"""Authenticated channel: JSON records over one TCP connection, which no stranger can write, repeat or reorder.

Both ends prove to each other that they have the key. Records arrive whole, once and in order, or not at all. A crowd of
strangers costs a bounded number of sockets and a few hundred bytes each. The channel does not interpret records and
knows no ranks or runs. Nothing is encrypted.

The one idea: until the key is proven, all data have a fixed size and are compared, never parsed. Each end sends 32
fresh random bytes and answers with an HMAC over both, so a replayed answer proves nothing. From then on each record
carries an HMAC over (session and direction, number, length, payload), and JSON is parsed only after a valid one.

    client                                      listener
    MAGIC version nonce               ->
                                      <-        MAGIC version nonce proof
    verdict proof                     ->                                       verdict 0: your proof is wrong
                                      <-        verdict proof                  1: welcome
    length payload mac               <->        length payload mac
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetseq.cluster.rendezvous.secret import copy_command
from hetseq.cluster.rendezvous.sockets import (
    DeadlinePassed,
    ForeignBytes,
    address_text,
    bind,
    dial,
    fill,
    make_ready,
    say,
    send_all,
    shut,
    take,
)
from hetseq.errors import EXIT_DISAGREE, RendezvousError

logger = logging.getLogger(__name__)

# a complete line: a server that reads lines (HTTP, SMTP) answers at once, and its answer identifies it
MAGIC = b"HETSEQ\r\n"
VERSION = 1
NONCE_BYTES = 32
MAC_BYTES = 32
#: the longest payload of a record
RECORD_BYTES = 16 * 2**20
#: how long either end waits for the other to prove itself
HANDSHAKE_S = 10.0
#: how long `send` waits for a peer that does not read
SEND_S = 30.0

HEAD = struct.Struct(f"!{len(MAGIC)}sH{NONCE_BYTES}s")  # magic, version, nonce
VERDICT = struct.Struct(f"!B{MAC_BYTES}s")  # 1 or 0, proof
_NO = VERDICT.pack(0, bytes(MAC_BYTES))
_LENGTH, _NUMBER = struct.Struct("!I"), struct.Struct("!Q")
_CHUNK_BYTES = 2**18
_TELL_EVERY_S = 10.0


class ChannelError(RendezvousError):
    """A channel ended, or could not be made."""


class ChannelClosed(ChannelError):
    """The peer ended or closed its end, or this end was closed."""


class ChannelTimeout(ChannelError):
    """A deadline passed."""


class StrangerError(ChannelError):
    """The other end is not a peer: another program, or bytes that were not sent with the key."""


class SecretMismatch(StrangerError):
    """The other end is a HetSeq with another secret."""

    exit_code = EXIT_DISAGREE


class VersionMismatch(StrangerError):
    """The other end is a HetSeq with another version of this protocol."""

    exit_code = EXIT_DISAGREE


class Channel:
    """One end of an authenticated connection, from `connect` or `Listener.accept`.

    Several threads may call `send`, and another `receive`. `host` and `peer_host` are the numeric addresses of this end
    and the other; `peer` is the other address with its port, for messages. `fileno` is readable when `receive` has
    bytes to read: nothing is read ahead.
    """

    def __init__(self, connection: socket.socket, *, session: bytes, is_client: bool) -> None:
        make_ready(connection)
        self._connection = connection
        self.host, self.peer_host = (str(end()[0]) for end in (connection.getsockname, connection.getpeername))
        self.peer = address_text(connection.getpeername())
        directions = [hmac.digest(session, label, "sha256") for label in (b"from client", b"from listener")]
        self._send_key, self._receive_key = directions if is_client else reversed(directions)
        self._sent, self._received, self._inbox = 0, 0, bytearray()
        # why no more can be sent or received; the two directions of a connection end separately
        self._no_send: str | None = None
        self._no_receive: str | None = None
        self._is_closed = False
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send(self, record: Mapping[str, Any], *, timeout_s: float = SEND_S) -> None:
        """Hand a whole JSON object to the kernel, after all earlier ones. Does not confirm that it arrives.

        Raises ChannelClosed, or ChannelTimeout if the peer does not read in time; nothing more can be sent then. Raises
        TypeError or ValueError if the record is not JSON or is longer than RECORD_BYTES; the channel stays usable.
        """
        payload = json.dumps(record, separators=(",", ":")).encode()
        if len(payload) > RECORD_BYTES:
            raise ValueError(f"a record of {len(payload)} bytes; a channel takes {RECORD_BYTES}")
        deadline = time.monotonic() + timeout_s
        with self._held(self._sending, timeout_s):
            if self._no_send is not None:
                raise ChannelClosed(self._no_send)
            length = _LENGTH.pack(len(payload))
            mac = _record_mac(self._send_key, self._sent, length, payload)
            self._sent += 1
            try:
                send_all(self._connection, length + payload + mac, deadline)
            except DeadlinePassed:
                self._no_send = f"{self.peer} has read nothing for {timeout_s:.1f} s"
                # half a record may have been sent: the end of the stream tells the peer
                shut(self._connection, socket.SHUT_WR)
                raise ChannelTimeout(self._no_send) from None
            except OSError as error:
                self._no_send = self._ending(error)
                raise ChannelClosed(self._no_send) from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next record. Raises ChannelTimeout (the channel stays usable), ChannelClosed or StrangerError."""
        deadline = time.monotonic() + timeout_s
        with self._held(self._receiving, timeout_s):
            if self._no_receive is not None:
                raise ChannelClosed(self._no_receive)
            try:
                record = self._receive(deadline)
            except DeadlinePassed:
                raise ChannelTimeout(f"nothing from {self.peer} for {timeout_s:.1f} s") from None
            except OSError as error:
                self._no_receive = self._ending(error)
                raise ChannelClosed(self._no_receive) from error
            except StrangerError as error:
                self._no_send = self._no_receive = str(error)
                shut(self._connection, socket.SHUT_RDWR)
                raise
            self._received += 1
            self._inbox.clear()
            return record

    def _receive(self, deadline: float) -> dict[str, Any]:
        fill(self._connection, self._inbox, _LENGTH.size, deadline)
        (size,) = _LENGTH.unpack_from(self._inbox)
        if size > RECORD_BYTES:
            raise StrangerError(f"{self.peer} announced a record of {size} bytes; {RECORD_BYTES} is the most")
        fill(self._connection, self._inbox, _LENGTH.size + size + MAC_BYTES, deadline)
        length, payload = bytes(self._inbox[: _LENGTH.size]), bytes(self._inbox[_LENGTH.size : -MAC_BYTES])
        mac = _record_mac(self._receive_key, self._received, length, payload)
        if not hmac.compare_digest(self._inbox[-MAC_BYTES:], mac):
            raise StrangerError(
                f"record {self._received} from {self.peer} was not sent by it in this place: an intruder or a broken"
                " device writes into the connection; it is closed"
            )
        try:
            record = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise StrangerError(f"record {self._received} from {self.peer} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise StrangerError(f"record {self._received} from {self.peer} is not a JSON object")
        return record

    def fileno(self) -> int:
        """The descriptor to wait on, for `select` and `multiprocessing.connection.wait`."""
        return self._connection.fileno()

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close this end; a thread in `send` or `receive` gets ChannelClosed. May be called twice.

        With `linger_s` the peer has that long to read all records and close its end. Otherwise, unread bytes from the
        peer make the kernel discard the bytes that this end has sent.
        """
        self._is_closed = True
        self._no_send = "this end is closed"
        if linger_s > 0:
            shut(self._connection, socket.SHUT_WR)
            with contextlib.suppress(OSError, DeadlinePassed, ChannelError), self._held(self._receiving, linger_s):
                deadline = time.monotonic() + linger_s
                while self._no_receive is None:
                    fill(self._connection, bytearray(), _CHUNK_BYTES, deadline)
        self._no_receive = self._no_receive or "this end is closed"
        shut(self._connection, socket.SHUT_RDWR)
        # waiting threads are awake now; a descriptor closed under one of them could be reused before it looks
        with self._sending, self._receiving:
            self._connection.close()

    def _ending(self, error: OSError) -> str:
        return "this end is closed" if self._is_closed else f"{self.peer} is gone: {error.strerror or error}"

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _held(self, lock: threading.Lock, timeout_s: float) -> Iterator[None]:
        if not lock.acquire(timeout=max(0.0, timeout_s)):
            raise ChannelTimeout(f"another thread has used the channel to {self.peer} for {timeout_s:.1f} s")
        try:
            yield
        finally:
            lock.release()


class _Dropped(Exception):
    """The other end closed the connection without sending anything wrong."""


def connect(host: str, port: int, key: bytes, *, deadline: float, secret_file: Path) -> Channel:
    """A channel to the listener at `host:port`, after both ends have proven that they have `key`.

    `deadline` is a time of `time.monotonic()`. Makes one attempt: on UnreachableError the caller may retry. Raises
    SecretMismatch (which names `secret_file`), VersionMismatch, StrangerError for another program, and ChannelTimeout
    for a silent one. Only a listener that drops this end because of too many strangers is tried again.
    """
    place, patience = address_text((host, port)), min(deadline, time.monotonic() + HANDSHAKE_S)
    while True:
        connection = dial(host, port, patience)
        try:
            session = _introduce(connection, place, host, key, secret_file, patience)
            return Channel(connection, session=session, is_client=True)
        except _Dropped:
            connection.close()
            pause_s = secrets.SystemRandom().uniform(0.02, 0.1)  # random, so that dropped clients do not retry together
            if time.monotonic() + pause_s > patience:
                raise StrangerError(
                    f"{place} takes connections and closes them at once: another program uses this port, or too many"
                    " strangers crowd the listener. Try again, or choose another port [port-taken]"
                ) from None
            time.sleep(pause_s)
        except BaseException:
            connection.close()
            raise


def _introduce(
    connection: socket.socket, place: str, host: str, key: bytes, secret_file: Path, deadline: float
) -> bytes:
    """The client's half of the handshake; returns the session key."""
    here, began, inbox = address_text(connection.getsockname()), time.monotonic(), bytearray()
    hello = HEAD.pack(MAGIC, VERSION, secrets.token_bytes(NONCE_BYTES))
    try:
        send_all(connection, hello, deadline)
        fill(connection, inbox, HEAD.size, deadline, begins_with=MAGIC)
        _, version, _ = HEAD.unpack(inbox)
        if version != VERSION:
            raise VersionMismatch(
                f"{place} speaks version {version} of HetSeq's control protocol and {here} version {VERSION}: install"
                " the same HetSeq on both [versions-differ]"
            )
        transcript = hello + bytes(inbox)
        inbox.clear()
        fill(connection, inbox, MAC_BYTES, deadline)
        if not hmac.compare_digest(inbox, _proof(key, b"listener", transcript)):
            with contextlib.suppress(OSError):
                send_all(connection, _NO, deadline)
            raise SecretMismatch(
                f"{here} and {place} hold different secrets (here: {secret_file}). Copy the head's secret: "
                f"{copy_command(host, secret_file)} (or choose another port, if that is not your head) [secret-differs]"
            )
        send_all(connection, VERDICT.pack(1, _proof(key, b"client", transcript)), deadline)
        inbox.clear()
        fill(connection, inbox, VERDICT.size, deadline)
        verdict, welcome = VERDICT.unpack(inbox)
        if verdict != 1 or not hmac.compare_digest(welcome, _proof(key, b"welcome", transcript)):
            raise StrangerError(f"{place} refused the proof of {here} although both have the same secret: try again")
        return _proof(key, b"session", transcript)
    except ForeignBytes as error:
        raise StrangerError(
            f"{place} answers {error}, which is not HetSeq: another program uses this port. Correct the address, or"
            " choose another port [port-taken]"
        ) from None
    except DeadlinePassed:
        raise ChannelTimeout(
            f"{place} took the connection from {here} but was silent for {time.monotonic() - began:.1f} s: another"
            " program uses this port, or the head hangs (is it stopped?) [port-taken]"
        ) from None
    except OSError:
        raise _Dropped from None


class Listener:
    """The one listening socket of a run, on one address: `accept` returns a channel to each peer that has the key.

    Peers dial `host` and `port`. Handshakes proceed only while a thread is in `accept`, so one thread of the head stays
    there. At most `most` strangers may be connected at a time, each for `patience_s`; one more drops the oldest from
    the address with the most strangers. `refused` counts rejected connections by reason.

    Raises AddressError if the address is not this machine's, is in use, or means every interface.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        key: bytes,
        secret_file: Path,
        patience_s: float = HANDSHAKE_S,
        most: int = 256,
    ) -> None:
        self._key, self._secret_file = key, secret_file
        self._patience_s, self._most = patience_s, most
        self._socket = bind(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self.refused: Counter[str] = Counter()
        #: addresses of admitted peers; added before the peer learns that it is admitted
        self.admitted_from: set[str] = set()
        self._strangers: dict[socket.socket, _Stranger] = {}  # oldest first
        self._admitted: deque[Channel] = deque()
        self._told: dict[str, float] = {}
        self._is_open, self._accepting = True, threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_rope = socket.socketpair()
        for connection in (self._socket, self._bell):
            self._selector.register(connection, selectors.EVENT_READ)

    def accept(self, timeout_s: float) -> Channel:
        """A channel to the next peer. Raises ChannelTimeout (call again to continue), ChannelClosed after `close`."""
        deadline, is_over = time.monotonic() + timeout_s, False
        with self._accepting:
            while self._is_open:
                if self._admitted:
                    return self._admitted.popleft()
                if is_over:
                    raise ChannelTimeout(f"no peer came to {self.place} for {timeout_s:.1f} s")
                is_over = time.monotonic() >= deadline  # one more turn, so that 0 s polls once
                self._turn(deadline)
        raise ChannelClosed(f"the listener at {self.place} is closed")

    @property
    def place(self) -> str:
        """`host:port`, for messages."""
        return address_text((self.host, self.port))

    def close(self) -> None:
        """Stop listening; a thread in `accept` gets ChannelClosed. Returned channels stay open."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._bell_rope.send(b"!")
        with self._accepting:
            ends: list[socket.socket | Channel] = [*self._strangers, *self._admitted, self._socket, self._bell]
            for end in (*ends, self._bell_rope):
                end.close()
            self._strangers.clear()
            self._admitted.clear()
            self._selector.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(self, deadline: float) -> None:
        """Handle all ready connections, waiting for one until `deadline`."""
        until = min([deadline, *(stranger.deadline for stranger in self._strangers.values())])
        ready = {key.fd for key, _ in self._selector.select(max(0.0, until - time.monotonic()))}
        # existing connections first, then new ones
        for stranger in list(self._strangers.values()):
            if stranger.connection.fileno() in ready:
                self._advance(stranger)
            if stranger.connection in self._strangers and time.monotonic() >= stranger.deadline:
                self._refuse(stranger, "silent", "it did not prove itself in time")
        if self._socket.fileno() in ready:
            self._let_in()

    def _let_in(self) -> None:
        for _ in range(self._most):
            try:
                connection, address = self._socket.accept()
                connection.setblocking(False)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room(0)
                    time.sleep(0.02)  # the socket stays readable, so this would be a busy loop
                return
            self._make_room(self._most)
            due = time.monotonic() + self._patience_s
            stranger = _Stranger(connection, str(address[0]), address_text(address), due)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ)
            self._advance(stranger)

    def _make_room(self, most: int) -> None:
        if self._strangers and len(self._strangers) >= most:
            crowds = Counter(stranger.host for stranger in self._strangers.values())
            crowded = max(crowds, key=lambda host: crowds[host])
            eldest = next(one for one in self._strangers.values() if one.host == crowded)
            self._refuse(eldest, "crowd", "too many strangers at a time")

    def _advance(self, stranger: _Stranger) -> None:
        """The listener's half of the handshake, as far as bytes have arrived."""
        connection, inbox = stranger.connection, stranger.inbox
        try:
            if not stranger.transcript:
                if not take(connection, inbox, HEAD.size, begins_with=MAGIC):
                    return
                _, version, _ = HEAD.unpack(inbox)
                answer = HEAD.pack(MAGIC, VERSION, secrets.token_bytes(NONCE_BYTES))
                stranger.transcript = bytes(inbox) + answer
                inbox.clear()
                say(connection, answer + _proof(self._key, b"listener", stranger.transcript))
                if version != VERSION:
                    text = f"it speaks version {version} of HetSeq's control protocol and this end version {VERSION}"
                    self._refuse(stranger, "version", f"{text}: install the same HetSeq on both")
                return
            if not take(connection, inbox, VERDICT.size):
                return
            verdict, theirs = VERDICT.unpack(inbox)
            if verdict != 1 or not hmac.compare_digest(theirs, _proof(self._key, b"client", stranger.transcript)):
                with contextlib.suppress(OSError):
                    say(connection, _NO)
                command = copy_command(self.host, self._secret_file)
                text = f"the two have different secrets (here: {self._secret_file})"
                self._refuse(stranger, "secret", f"{text}. If it is a node of this run, type there: {command}")
                return
            self.admitted_from.add(stranger.host)
            say(connection, VERDICT.pack(1, _proof(self._key, b"welcome", stranger.transcript)))
            session = _proof(self._key, b"session", stranger.transcript)
            channel = Channel(connection, session=session, is_client=False)
        except ForeignBytes:
            self._refuse(stranger, "foreign", "it speaks another protocol")
        except OSError:
            self._refuse(stranger, "closed", "it left")
        else:
            self._forget(stranger)
            self._admitted.append(channel)

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]

    def _refuse(self, stranger: _Stranger, reason: str, text: str) -> None:
        self._forget(stranger)
        stranger.connection.close()
        self.refused[reason] += 1
        now = time.monotonic()
        if now - self._told.get(reason, -math.inf) >= _TELL_EVERY_S:  # many strangers must not flood the log
            self._told[reason] = now
            level = logging.WARNING if reason in ("secret", "version") else logging.INFO
            logger.log(level, "%s was sent away from %s: %s", stranger.name, self.place, text)


@dataclass
class _Stranger:
    """A connection that has not proven the key yet."""

    connection: socket.socket
    host: str
    name: str
    deadline: float
    inbox: bytearray = field(default_factory=bytearray)
    transcript: bytes = b""


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + transcript, "sha256")


def _record_mac(key: bytes, number: int, length: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + length + payload, "sha256")
