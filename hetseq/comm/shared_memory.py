"""Sums over ranks of one machine through shared memory: no copy crosses a network, not even the loopback.

Responsible for finding out that all ranks of a group are processes of one machine and one user, for memory that they
share, and for sums in it. Knows nothing of gradients or steps.

The one idea: a rank writes only its own memory, and reads the others'. Each rank sums one slice of every tensor, in
rank order, over all ranks; when all slices are done, each rank copies the others' slices. So all get the same
bits, and a rank that dies or stops midway corrupts only its own memory. The memory has no name (memfd): its
descriptor is passed over a socket, and it vanishes with its last process, however that ends.

Ranks exchange messages over local sockets, one packet each. They wake the waiting rank, carry small rows as well,
and close when a process ends, so that a death is noticed at once.
"""

from __future__ import annotations

import hmac
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

LONGEST_ROW = 32768  # bytes of a message; longer ones use another transport
_PIECE = 1 << 16  # elements added at once if there are more than two terms: they stay in the cache
_ALIGNED = 16  # elements; slices begin at multiples of it
_PROOF_BYTES = 32
_CREDENTIALS = struct.Struct("3i")  # process, user, group
NO_NAME = bytes(16)

# Types of messages, in the first byte
_READY, _SUMMED, _DONE, _ROW, _MEMORY, _OFFER, _READ = range(7)


class NeighbourError(RuntimeError):
    """Another rank of this machine has ended, or has stopped responding."""


def machine() -> bytes:
    """16 bytes that are equal only for processes that can share memory (boot, network namespace, user); else random.

    Only Linux has memory without a name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        network = os.readlink("/proc/self/ns/net").encode()
    except OSError:
        return os.urandom(16)
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return os.urandom(16)
    return hmac.digest(boot, network + str(os.getuid()).encode(), "sha256")[:16]


def open_door() -> MemoryDoor | None:
    """A listening socket, or None if there can be none."""
    try:
        return MemoryDoor()
    except OSError:
        return None


class MemoryDoor:
    """Where the other ranks of this machine connect: a socket without a file, whose `name` must be sent to them."""

    def __init__(self) -> None:
        self.name = os.urandom(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_path(self.name))
        self._socket.listen(1024)

    def close(self) -> None:
        self._socket.close()

    def meet(self, *, rank: int, names: Sequence[bytes], key: bytes, timeout_s: float) -> SharedMemoryRanks:
        """Connect each pair of ranks, whose doors have these names; only they know `key`.

        Raises OSError if a rank does not connect, or lacks the key.
        """
        deadline = time.monotonic() + timeout_s
        peers: dict[int, socket.socket] = {}
        try:
            for other in range(rank):
                peers[other] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                connection.connect(_path(names[other]))
                connection.send(rank.to_bytes(4, "big") + _proof(key, names, rank, other))
                if connection.recv(_PROOF_BYTES) != _proof(key, names, other, rank):
                    raise ConnectionRefusedError(f"the process that answers as rank {other} lacks the key of this run")
            while len(peers) < len(names) - 1:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = self._socket.accept()
                newcomer = _let_in(connection, rank, names, key, max(0.001, deadline - time.monotonic()))
                if newcomer is not None:
                    peers[newcomer] = connection
        except BaseException:
            for connection in peers.values():
                connection.close()
            raise
        return SharedMemoryRanks(rank, peers)


class SharedMemoryRanks:
    """The other ranks of a group, all of them on this machine. Every rank makes the same calls in the same order.

    Every wait raises NeighbourError if a rank it waits for has ended or does not respond in time.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank, self.world_size = rank, len(peers) + 1
        self._peers = dict(sorted(peers.items()))
        self._by_descriptor = {connection.fileno(): other for other, connection in peers.items()}
        self._poll = select.poll()
        for connection in self._peers.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        self._said = {other: [0] * (_DONE + 1) for other in peers}  # messages received, by type
        self._rows: dict[int, deque[bytes]] = {other: deque() for other in peers}
        self._descriptors: dict[int, deque[int]] = {other: deque() for other in peers}
        self._lent: dict[tuple[int, int], mmap.mmap] = {}  # memory that another rank has offered, by its number
        #: by rank, numbered from 0: the memory of each of its offers, until it has been read
        self.offers: dict[int, dict[int, int]] = {other: {} for other in peers}
        self._offers_seen = dict.fromkeys(peers, 0)
        self._offers_made, self._offers_expected = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
        self._memory_made = 0
        #: by rank: the numbers of this rank's offers that it has read, and that have not been taken note of
        self.reads: dict[int, set[int]] = {other: set() for other in peers}
        self._gone: dict[int, str] = {}  # the reasons; messages received before still count
        self._shared: dict[int, _Shared] = {}  # by the address of this rank's memory
        self._begun = self._ended = 0  # sums

    def zeros(
        self, elements: int, dtype: torch.dtype, *, is_wanted: bool = True, timeout_s: float
    ) -> torch.Tensor | None:
        """Memory that `all_reduce_sum` can sum: shape (elements,), at least one. Collective.

        None if a rank does not want it, or cannot allocate it.
        """
        own = _new_memory(elements * dtype.itemsize) if is_wanted else None
        try:
            if not all(map(any, self.all_gather(bytes([own is not None]), timeout_s=timeout_s))):
                return None
            assert own is not None
            self._tell(_MEMORY, timeout_s=timeout_s, descriptors=[own])
            self._await(lambda other: len(self._descriptors[other]) > 0, timeout_s)
            parts = []
            for other in range(self.world_size):
                descriptor = os.dup(own) if other == self.rank else self._descriptors[other].popleft()
                try:
                    pages = mmap.mmap(descriptor, elements * dtype.itemsize)
                finally:
                    os.close(descriptor)
                parts.append(torch.frombuffer(pages, dtype=dtype))
        finally:
            if own is not None:
                os.close(own)
        mine = parts[self.rank].zero_()  # allocated now, not in the first step
        self._shared[mine.data_ptr()] = _Shared(parts, self.rank)
        return mine

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is memory from `zeros`, and the whole of it."""
        shared = self._shared.get(tensor.data_ptr())
        return shared is not None and tensor.numel() == shared.parts[self.rank].numel() and tensor.is_contiguous()

    def release(self, tensor: torch.Tensor) -> None:
        """Forget memory from `zeros`, which lives on as long as this tensor; each rank for itself."""
        self._shared.pop(tensor.data_ptr(), None)

    def all_reduce_sum(self, tensor: torch.Tensor, *, timeout_s: float) -> Sum:
        """Announce that a tensor that `holds` is ready; the caller that waits sums its slice. Returns at once."""
        number, self._begun = self._begun, self._begun + 1
        self._tell(_READY, timeout_s=timeout_s)
        return Sum(self, self._shared[tensor.data_ptr()], number, timeout_s)

    def all_gather(self, row: bytes, *, timeout_s: float) -> list[bytes]:
        """The rows of all ranks in rank order, each of at most LONGEST_ROW bytes. Blocks."""
        self._tell(_ROW, row, timeout_s=timeout_s)
        self._await(lambda other: len(self._rows[other]) > 0, timeout_s)
        return [row if other == self.rank else self._rows[other].popleft() for other in range(self.world_size)]

    def offered_memory(self, size: int) -> OfferedMemory:
        """New memory of `size` bytes that can be offered. Any rank, alone. Raises MemoryError."""
        descriptor = _new_memory(size)
        if descriptor is None:
            raise MemoryError(f"this machine gives no {size:,} bytes of shared memory")
        self._memory_made += 1
        return OfferedMemory(self._memory_made, mmap.mmap(descriptor, size), descriptor)

    def expect(self, other: int) -> int:
        """The number of the next offer of another rank that this one will read."""
        self._offers_expected[other] += 1
        return self._offers_expected[other] - 1

    def offer(self, other: int, memory: OfferedMemory, *, timeout_s: float) -> int:
        """Let another rank read this memory; the number of this offer among this rank's offers to it."""
        is_new = other not in memory.known_to
        memory.known_to.add(other)
        number = memory.number.to_bytes(4, "big")
        descriptors = [memory.descriptor] if is_new else ()
        self._tell(_OFFER, number, timeout_s=timeout_s, descriptors=descriptors, to=[other])
        self._offers_made[other] += 1
        return self._offers_made[other] - 1

    def offered(self, other: int, number: int) -> mmap.mmap:
        """The memory of this number that another rank has offered."""
        return self._lent[other, number]

    def tell_read(self, other: int, offer: int, *, timeout_s: float) -> None:
        """Tell another rank that this one has read the offer, counted from its first one."""
        self._tell(_READ, offer.to_bytes(8, "big"), timeout_s=timeout_s, to=[other])

    def hear(self) -> None:
        """Receive the messages that have arrived, without waiting for any."""
        self._listen(0.0)

    def until(self, late: Callable[[], Collection[int]], timeout_s: float) -> None:
        """Receive messages until `late` names no rank any more."""
        self._await(lambda other: other not in late(), timeout_s)

    def sever(self) -> None:
        """Cut all connections to the other ranks, in both directions. From any thread."""
        for connection in self._peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect from the other ranks, who notice at once; the memory stays as long as tensors use it."""
        for connection in self._peers.values():
            connection.close()
        for descriptors in self._descriptors.values():
            while descriptors:
                os.close(descriptors.popleft())
        self._shared.clear()
        self._lent.clear()

    def add_up(self, shared: _Shared, number: int, timeout_s: float) -> None:
        """Take part in a sum until it is complete here."""
        assert number == self._ended, "wait for sums in the order in which they began"
        self._await_all(_READY, timeout_s)
        shared.add_own_slice()
        self._tell(_SUMMED, timeout_s=timeout_s)
        self._await_all(_SUMMED, timeout_s)
        shared.copy_other_slices()
        self._tell(_DONE, timeout_s=timeout_s)
        self._await_all(_DONE, timeout_s)  # from now on each rank may write to its own memory again
        self._ended += 1

    def _await_all(self, what: int, timeout_s: float) -> None:
        self._await(lambda other: self._said[other][what] > self._ended, timeout_s)

    def _await(self, has_come: Callable[[int], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while late := [other for other in self._peers if not has_come(other)]:
            for other in late:
                if other in self._gone:
                    raise NeighbourError(f"rank {other} of this machine is gone: {self._gone[other]}")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NeighbourError(
                    f"rank {', '.join(map(str, late))} of this machine sent nothing for {timeout_s:g} s"
                )
            self._listen(left_s)

    def _listen(self, timeout_s: float) -> None:
        """Receive the messages that have arrived; waits for at least one."""
        for descriptor, _ in self._poll.poll(1000 * min(timeout_s, 3600.0)):
            self._take(self._by_descriptor[descriptor])

    def _take(self, other: int) -> None:
        while other not in self._gone:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._peers[other], LONGEST_ROW + 1, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # it did not read all messages; the ones it sent may still be read
                continue
            self._descriptors[other].extend(descriptors)
            if not message:
                self._gone[other] = "it has ended"
                self._poll.unregister(self._peers[other])
            elif message[0] == _OFFER:
                self._take_offer(other, int.from_bytes(message[1:], "big"))
            elif message[0] == _READ:
                self.reads[other].add(int.from_bytes(message[1:], "big"))
            elif message[0] == _ROW:
                self._rows[other].append(message[1:])
            elif message[0] != _MEMORY:
                self._said[other][message[0]] += 1

    def _take_offer(self, other: int, number: int) -> None:
        if self._descriptors[other]:  # its first offer of this memory
            descriptor = self._descriptors[other].popleft()
            try:
                self._lent[other, number] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(descriptor)
        self.offers[other][self._offers_seen[other]] = number
        self._offers_seen[other] += 1

    def _tell(
        self, what: int, row: bytes = b"", *, timeout_s: float, descriptors: Sequence[int] = (),
        to: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """Send a message to the ranks `to` (default: each other one); while a socket is full, listen, since that rank
        may be sending too."""
        message, deadline = bytes([what]) + row, time.monotonic() + timeout_s
        for other, connection in self._peers.items():
            if to is not None and other not in to:
                continue
            while True:
                try:
                    socket.send_fds(connection, [message], descriptors)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise NeighbourError(f"rank {other} of this machine read nothing for {timeout_s:g} s") from None
                    self._listen(0.001)
                except OSError as error:
                    raise NeighbourError(f"rank {other} of this machine is gone: {error.strerror}") from None


@dataclass
class OfferedMemory:
    """Memory of this rank that others may read once it is offered to them."""

    number: int  # by which they know it
    pages: mmap.mmap
    descriptor: int
    known_to: set[int] = field(default_factory=set)

    def __del__(self) -> None:
        os.close(self.descriptor)  # the pages live as long as tensors use them


class Sum:
    """A pending sum; `wait` returns when it is complete here."""

    def __init__(self, neighbours: SharedMemoryRanks, shared: _Shared, number: int, timeout_s: float) -> None:
        self._neighbours, self._shared, self._number, self._timeout_s = neighbours, shared, number, timeout_s

    def wait(self) -> None:
        """Take part in it. Raises NeighbourError."""
        self._neighbours.add_up(self._shared, self._number, self._timeout_s)


class _Shared:
    """The memory of all ranks for one tensor, in rank order."""

    def __init__(self, parts: list[torch.Tensor], rank: int) -> None:
        self.parts, self._rank = parts, rank
        elements, count = parts[0].numel(), len(parts)
        bounds = [min(elements, -(-elements * slot // count // _ALIGNED) * _ALIGNED) for slot in range(count)]
        self._slices = [slice(start, stop) for start, stop in zip(bounds, [*bounds[1:], elements])]
        self._scratch = torch.empty(_PIECE if count > 2 else 0, dtype=parts[0].dtype)

    def add_own_slice(self) -> None:
        """Write the sum over all ranks to this rank's slice of its own memory; no other rank reads it before."""
        terms = [part[self._slices[self._rank]] for part in self.parts]
        if len(terms) == 2:
            torch.add(terms[0], terms[1], out=terms[self._rank])
            return
        for pieces in zip(*(term.split(_PIECE) for term in terms)):
            total = torch.add(pieces[0], pieces[1], out=self._scratch[: pieces[0].numel()])
            for piece in pieces[2:]:
                total.add_(piece)
            pieces[self._rank].copy_(total)

    def copy_other_slices(self) -> None:
        """Copy the slices that the other ranks have summed."""
        own = self.parts[self._rank]
        for other, part in enumerate(self.parts):
            if other != self._rank:
                own[self._slices[other]].copy_(part[self._slices[other]])


def _path(name: bytes) -> str:
    return "\0hetseq-" + name.hex()


def _let_in(connection: socket.socket, rank: int, names: Sequence[bytes], key: bytes, timeout_s: float) -> int | None:
    """The rank that has connected; None for a stranger, which is disconnected: names of doors are no secret."""
    other = None
    try:
        connection.settimeout(timeout_s)
        if _user_of(connection) == os.getuid():  # other users are never expected
            said = connection.recv(4 + _PROOF_BYTES)
            claimed = int.from_bytes(said[:4], "big")
            if rank < claimed < len(names) and hmac.compare_digest(said[4:], _proof(key, names, claimed, rank)):
                connection.send(_proof(key, names, rank, claimed))
                other = claimed
    finally:
        if other is None:
            connection.close()
    return other


def _user_of(connection: socket.socket) -> int:
    """The user id of the other end, from the kernel."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _proof(key: bytes, names: Sequence[bytes], source: int, target: int) -> bytes:
    return hmac.digest(key, b"neighbours %d %d " % (source, target) + b"".join(names), "sha256")


def _new_memory(size: int) -> int | None:
    """A descriptor of this many bytes of unnamed memory; None if it cannot be had."""
    try:
        descriptor = os.memfd_create("hetseq")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
