"""Strangers at the ports of a run: the listening ports, a thousand attempts to get in, and the reply to each.

A stranger has no secret. It sends nothing, or noise, or the words of HTTP, TLS, HetSeq, gloo, torch's TCPStore or
multiprocessing; it leaves in the middle, lies about lengths, and replays the words of an honest node.
`knock` sends 200 of them at a time to a port.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hetseq.cluster.rendezvous.channel import (
    HEAD,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    VERDICT,
    VERSION,
    Listener,
    _proof,
    connect,
)

AT_ONCE = 200
PATIENCE_S = 0.25
QUIET_S = 0.02
_STATES = {"0A": "listening", "01": "established"}


@dataclass(frozen=True, order=True)
class Socket:
    """One TCP socket of a process; `remote` is ("0.0.0.0", 0) of one that listens."""

    pid: int
    state: str
    address: str
    port: int
    remote: tuple[str, int]


def sockets(pids: Iterable[int], state: str = "listening") -> list[Socket]:
    """The TCP sockets of these processes that are `listening` or `established`, IPv4 and IPv6."""
    owners = {inode: pid for pid in pids for inode in _inodes(pid)}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if _STATES.get(words[3]) == state and words[9] in owners:
                found.append(Socket(owners[words[9]], state, *_address(words[1]), _address(words[2])))
    return sorted(found)


def unix_listeners(pids: Iterable[int]) -> list[str]:
    """Names of the UNIX sockets at which these processes listen; abstract ones begin with @."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] if len(row) > 7 else "" for row in rows if row[6] in inodes and int(row[3], 16) & 0x10000]


def _inodes(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # the process, or one of its files, has just gone
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _address(text: str) -> tuple[str, int]:
    digits, port = text.split(":")
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)


@dataclass
class Attempt:
    """One stranger's script: its first words, its answer to the port's, and whether it leaves right away."""

    kind: str
    first: bytes = b""
    answer: Callable[[bytes], bytes] | None = None
    leaves: bool = False
    heard: bytearray = field(default_factory=bytearray)
    is_in: bool = False  # the kernel has connected it
    is_out: bool = False  # the port has closed the connection


def knock(address: str, port: int, attempts: Sequence[Attempt], *, source: str = "") -> None:
    """Make the attempts, AT_ONCE at a time; each stays until all of its crowd were answered or PATIENCE_S is over."""
    for begin in range(0, len(attempts), AT_ONCE):
        _crowd((address, port), attempts[begin : begin + AT_ONCE], source)


def _crowd(place: tuple[str, int], attempts: Sequence[Attempt], source: str) -> None:
    with selectors.DefaultSelector() as selector:
        for attempt in attempts:
            stranger = socket.socket()
            stranger.setblocking(False)
            if source:
                stranger.bind((source, 0))
            if stranger.connect_ex(place) not in (0, errno.EINPROGRESS):
                stranger.close()
                continue
            selector.register(stranger, selectors.EVENT_WRITE, attempt)
        deadline = time.monotonic() + PATIENCE_S
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(QUIET_S):
                assert isinstance(key.fileobj, socket.socket)
                _act(selector, key.fileobj, key.data)
        for number, key in enumerate(list(selector.get_map().values())):
            assert isinstance(key.fileobj, socket.socket)
            if number % 2:  # every other one leaves with a reset
                key.fileobj.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            key.fileobj.close()


def _act(selector: selectors.BaseSelector, stranger: socket.socket, attempt: Attempt) -> None:
    try:
        if not attempt.is_in:
            if stranger.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise ConnectionRefusedError
            attempt.is_in = True
            if attempt.first:
                stranger.send(attempt.first)
            selector.modify(stranger, selectors.EVENT_READ, attempt)
            if attempt.leaves:
                raise ConnectionAbortedError
            return
        chunk = stranger.recv(65536)
        attempt.heard += chunk
        if not chunk:
            raise ConnectionResetError
        if attempt.answer is not None and len(attempt.heard) >= HEAD.size + MAC_BYTES:
            stranger.send(attempt.answer(bytes(attempt.heard)))
            attempt.answer = None
    except BlockingIOError:
        pass
    except OSError:
        attempt.is_out = True
        selector.unregister(stranger)
        stranger.close()


# ------------------------------------------------------------------------------------------------------ what they say


def hello() -> bytes:
    """The first words of HetSeq's handshake."""
    return bytes(HEAD.pack(MAGIC, VERSION, secrets.token_bytes(NONCE_BYTES)))


def forged(first: bytes, role: bytes, key: bytes) -> Callable[[bytes], bytes]:
    """A verdict that says yes, with a proof by that key and with a record right behind it."""

    def answer(heard: bytes) -> bytes:
        proof = _proof(key, role, first + heard[: HEAD.size])
        record = b'{"kind":"claim"}'
        return bytes(VERDICT.pack(1, proof)) + struct.pack("!I", len(record)) + record + bytes(MAC_BYTES)

    return answer


def _reflected(heard: bytes) -> bytes:
    return bytes(VERDICT.pack(1, heard[HEAD.size : HEAD.size + MAC_BYTES]))


def poison(marker: Path) -> bytes:
    """A pickle that makes a folder when it is loaded."""
    name = str(marker).encode()
    return b"cos\nmkdir\n(S'" + name + b"'\ntR."


def gloo_words(number: int, chance: random.Random) -> bytes:
    """What a rank would say to gloo: the number of a pair, in use or not, then an operation with a false size."""
    pair = chance.choice([number % 4, number % 8, chance.randrange(1 << 40)])
    lengths = [0, 48, 56, 1 << 31, 1 << 40, (1 << 63) - 1]
    size, operation, slot = chance.choice(lengths), chance.randrange(6), chance.randrange(4)
    return struct.pack("=Q6Q", pair, size, operation, slot, 0, size, chance.choice(lengths)) + bytes(64)


def store_words(number: int, chance: random.Random) -> bytes:
    """What a client of torch's TCPStore would say: the magic number, then one query about a key."""
    key = struct.pack("=Q", 6) + b"rank/0"
    value = struct.pack("=Q", 4) + b"evil"
    queries = [b"\x01" + key + value, b"\x03" + key, b"\x05" + struct.pack("=Q", 1) + key, b"\x08" + key, b"\x07"]
    return b"\x00" + struct.pack("=I", 0x3C85F7CE) + queries[number % len(queries)] + struct.pack("=Q", 1 << 62)


def attempts(count: int, overheard: tuple[bytes, bytes], marker: Path, *, seed: int = 0) -> list[Attempt]:
    """A mixture of `count`; `overheard` are the two messages of an honest node (`overhear`)."""
    chance, payload = random.Random(seed), poison(marker)
    cut = hello()[: chance.randrange(1, HEAD.size)]
    found = []
    for number in range(count):
        first, wrong = hello(), secrets.token_bytes(32)
        found.append(
            [
                Attempt("silence"),
                Attempt("noise", chance.randbytes(chance.randrange(1, 3000))),
                Attempt("HTTP", b"GET / HTTP/1.1\r\nHost: head\r\n\r\n"),
                Attempt("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)),
                Attempt("wrong secret", first, forged(first, b"client", wrong)),
                Attempt("empty secret", first, forged(first, b"client", b"")),
                Attempt("reflection", first, _reflected),
                Attempt("replay", overheard[0], lambda heard: overheard[1]),
                Attempt("replay in one go", overheard[0] + overheard[1]),
                Attempt("cut", cut, leaves=True),
                Attempt("cut after the answer", first, lambda heard: bytes(VERDICT.pack(1, bytes(32)))[:9]),
                Attempt("half open", cut),
                Attempt("lies", first + struct.pack("!I", 1 << 31) + bytes(1000)),
                Attempt("version", bytes(HEAD.pack(MAGIC, 999, bytes(NONCE_BYTES)))),
                Attempt("gloo", gloo_words(number, chance)),
                Attempt("gloo, cut", gloo_words(number, chance)[: chance.randrange(1, 40)], leaves=True),
                Attempt("TCPStore", store_words(number, chance)),
                Attempt("pickle", payload),
                Attempt("pickle of multiprocessing", struct.pack("!i", len(payload)) + payload),
                Attempt("pickle behind a hello", first, lambda heard: payload),
            ][number % 20]
        )
    return found


def overhear(key: bytes, secret_file: Path) -> tuple[bytes, bytes]:
    """What an honest node with the control key says to a head: its hello, and its proof."""
    said: list[bytes] = []
    with Listener("127.0.0.1", key=key, secret_file=secret_file) as head, socket.create_server(("127.0.0.1", 0)) as tap:

        def pass_on() -> None:
            inner, outer = tap.accept()[0], socket.create_connection((head.host, head.port))
            with inner, outer:
                for size, back in ((HEAD.size, HEAD.size + MAC_BYTES), (VERDICT.size, VERDICT.size)):
                    said.append(inner.recv(size, socket.MSG_WAITALL))
                    outer.sendall(said[-1])
                    inner.sendall(outer.recv(back, socket.MSG_WAITALL))

        threads = [threading.Thread(target=pass_on), threading.Thread(target=lambda: head.accept(10).close())]
        for thread in threads:
            thread.start()
        place = tap.getsockname()
        connect(place[0], place[1], key, deadline=time.monotonic() + 10, secret_file=secret_file).close()
        for thread in threads:
            thread.join()
    return said[0], said[1]


NO = bytes(VERDICT.pack(0, bytes(MAC_BYTES)))


def denied(attempts: Iterable[Attempt]) -> set[str]:
    """Kinds of strangers that were explicitly rejected: their proof was checked."""
    return {attempt.kind for attempt in attempts if attempt.heard.endswith(NO)}


def admitted(attempts: Iterable[Attempt]) -> list[str]:
    """Strangers that heard more than allowed: HetSeq's hello with its proof, then a rejection or nothing."""
    found = []
    for attempt in attempts:
        answer, rest = bytes(attempt.heard[: HEAD.size + MAC_BYTES]), bytes(attempt.heard[HEAD.size + MAC_BYTES :])
        if rest not in (b"", NO) or not answer.startswith(MAGIC[: len(answer)]):
            found.append(f"{attempt.kind}: {bytes(attempt.heard)!r}")
    return found
