"""Groups of ranks: the sums of tensors and gathers of small rows through which ranks communicate during a step.

A `Group` is one fixed membership; it sends rows of numbers (`RowTransport`) and tensors (`TensorTransport`).
`GlooGroup` is built over gloo on one chosen interface and has no other owner: no default process group, no
environment variables. If all its ranks are on one machine, sums and rows go through shared memory instead
(`shared_memory`). `LocalGroup` answers the same calls for a world of one. Every wait has a deadline. A failed
collective becomes one PeerLostError, and the launcher finds out which rank failed; but an error of this rank's own
device or memory stays as it is.
"""

from __future__ import annotations

import functools
import hmac
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions

from hetseq.comm import socket_filter as wall
from hetseq.comm.messages import Messages
from hetseq.comm.peer_errors import PeerErrors, Work
from hetseq.comm.right_of_way import RightOfWay
from hetseq.comm.shared_memory import LONGEST_ROW, NO_NAME, SharedMemoryRanks, machine, open_door
from hetseq.comm.shared_slices import SharedSlices
from hetseq.comm.slices import SliceExchange, TaggedSlices
from hetseq.errors import HetSeqError, PeerLostError, RendezvousError

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]

_LOOK_S = 0.005  # between two checks whether a group under construction is still wanted
_MOST_DOORS, _DOORS_BYTES = 4, 256
_MEET_S = 10.0  # for ranks of one machine to find each other once their group exists
_END_S = 2.0  # for the transport to end; usually milliseconds
_CUT_S = 0.3  # for pending work to end once its connections are cut; usually less than a millisecond


class Pending(Protocol):
    """A pending collective; `wait` returns when its result is complete here, or raises PeerLostError."""

    def wait(self) -> None: ...


class RowTransport(Protocol):
    """Gathers of small rows of numbers. They are in CPU memory, whatever device a rank computes on."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    #: seconds after which a collective that has not ended counts as a lost peer
    deadline_s: float

    def all_gather_rows(self, row: Rows) -> Rows:
        """Rows of all ranks in rank order: (n,) on each rank gives (world_size, n), with the same n. Blocks.

        Collective. Raises PeerLostError.
        """
        ...


class TensorTransport(Protocol):
    """Sums and copies of tensors of any size, on the devices of the ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for `all_reduce_sum`, if possible memory in which sums are faster. Shape (elements,).

        Collective. Raises PeerLostError.
        """
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Declare that memory from `zeros` will not be summed again: its tensor's end frees it. Any rank, alone."""
        ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        """Start adding `tensor` over all ranks, in place; returns at once. Wait for sums in the order of their start.

        Collective. Raises PeerLostError, and torch's own error if this rank's memory or device has failed, which
        ends the group. So does `wait`.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Copy the bytes of `tensor` from rank `source` to every rank, in place; shapes are equal. Blocks.

        Collective. Raises PeerLostError.
        """
        ...


class Group(RowTransport, TensorTransport, Protocol):
    """The ranks of one generation. Every rank makes the same collective calls in the same order."""

    @property
    def rank(self) -> int:
        """From 0 to `world_size` - 1."""
        ...

    @property
    def world_size(self) -> int: ...

    @property
    def generation(self) -> int:
        """The number of this membership of the run; later ones are greater."""
        ...

    @property
    def bytes_reduced(self) -> int:
        """Bytes that this rank has given to `all_reduce_sum` so far."""
        ...

    def slices(self, device: torch.device) -> SliceExchange:
        """Transfers of slices of memory on `device`, the device on which this rank computes. Collective.

        Raises PeerLostError.
        """
        ...

    def messages(self) -> Messages:
        """Messages between two ranks, over connections of their own. Collective.

        Blocks. Raises RendezvousError and PeerLostError.
        """
        ...

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """A group of some of these ranks, in the given order; called by those alone, a name always by the same ones.

        Its members are renumbered from 0. Blocks. Raises RendezvousError and PeerLostError.
        """
        ...

    def sever(self) -> None:
        """Cut all connections: the group ends for its peers too, and pending waits in it raise. From any thread."""
        ...

    def close(self) -> None:
        """Release everything. Any rank, alone; peers that still wait see this rank as lost."""
        ...


class GlooGroup:
    """A `Group` over gloo, on one interface, or through shared memory."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        rank: int,
        world_size: int,
        deadline_s: float,
        meeting: GroupMeeting,
        store: dist.Store,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = meeting.generation
        self.deadline_s = deadline_s
        self.bytes_reduced = 0
        self._process_group: dist.ProcessGroup | None = process_group
        self._meeting, self._store = meeting, store
        self._neighbours: SharedMemoryRanks | None = None
        self._ports: frozenset[tuple[str, int]] = frozenset()  # the listening addresses of all ranks
        self._is_severed, self._is_cut, self._is_stuck = False, False, False
        self._subgroups: list[GlooGroup] = []
        self._named, self._cut_s = Counter[str](), 0.0  # groups so far, by name; when the connections were cut
        self._right_of_way = RightOfWay()

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._neighbours is not None:
            with PeerErrors("shared memory", self.deadline_s):
                is_wanted, timeout_s = elements > 0 and device.type == "cpu", self.deadline_s
                shared = self._neighbours.zeros(elements, dtype, is_wanted=is_wanted, timeout_s=timeout_s)
            if shared is not None:
                return shared
        return torch.zeros(elements, dtype=dtype, device=device)

    def release(self, tensor: torch.Tensor) -> None:
        if self._neighbours is not None:
            self._neighbours.release(tensor)

    def all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        what, options = "a gradient bucket", AllreduceOptions()  # a sum by default
        options.timeout = timedelta(seconds=self.deadline_s)
        self.bytes_reduced += tensor.numel() * tensor.element_size()
        try:
            with PeerErrors(what, self.deadline_s):
                if self._neighbours is not None and self._neighbours.holds(tensor):
                    wait = self._neighbours.all_reduce_sum(tensor, timeout_s=self.deadline_s).wait
                else:
                    wait = functools.partial(self._await, self._transport().allreduce([tensor], options))
        except RuntimeError:  # of this rank alone; gloo has counted this sum, so peers would pair it with the next one
            self.sever()
            raise
        return Work(wait, what, self.deadline_s)

    def all_gather_rows(self, row: Rows) -> Rows:
        if self._neighbours is not None and row.nbytes <= LONGEST_ROW:
            with PeerErrors("a row of every rank", self.deadline_s):
                rows = self._neighbours.all_gather(row.tobytes(), timeout_s=self.deadline_s)
            return np.frombuffer(b"".join(rows), np.int64).reshape(self.world_size, -1)
        # fresh memory for each call: an abandoned gather may still write to its own
        mine = torch.from_numpy(row.copy())
        table = [torch.empty_like(mine) for _ in range(self.world_size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=self.deadline_s)
        with PeerErrors("a row of every rank", self.deadline_s):
            self._await(self._transport().allgather([table], [mine], options))
        return torch.stack(table).numpy()

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, timedelta(seconds=self.deadline_s)
        # by bytes, because gloo does not know every dtype
        flat = tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() else None
        carrier = tensor.contiguous().view(-1).view(torch.uint8) if flat is None else flat
        with PeerErrors(f"{carrier.numel():,} bytes from rank {source}", self.deadline_s):
            self._await(self._transport().broadcast([carrier], options))
        if flat is None:
            tensor.copy_(carrier.view(tensor.dtype).view(tensor.shape))

    def slices(self, device: torch.device) -> SliceExchange:
        are_on_cpu = self.all_gather_rows(np.array([device.type == "cpu"], np.int64)).all()
        if self._neighbours is not None and are_on_cpu:
            return SharedSlices(self._neighbours, deadline_s=lambda: self.deadline_s)
        return TaggedSlices(
            self._transport, rank=self.rank, world_size=self.world_size, deadline_s=lambda: self.deadline_s,
            is_cut=lambda: self._is_cut, end_s=self._end_s, right_of_way=self._right_of_way,
        )  # fmt: skip

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        """As in `Group`. For all ranks it returns the group itself, for one rank a LocalGroup."""
        if list(ranks) == list(range(self.world_size)):
            return self
        if len(ranks) == 1:
            return LocalGroup(generation=self.generation)
        return self._connect_apart(list(ranks).index(self.rank), len(ranks), name)

    def messages(self) -> Messages:
        group = self._connect_apart(self.rank, self.world_size, "messages", shares_memory=False)
        # a send that was under way when the connections were cut ends only at its deadline
        return Messages(
            group._transport, self._right_of_way, sever=group.sever, end_s=group._end_s,
            close=lambda: group.close(patience_s=min(_CUT_S, group._end_s())),
        )  # fmt: skip

    def _connect_apart(self, rank: int, world_size: int, name: str, **options: Any) -> GlooGroup:
        """A group of some or all of these ranks with connections of its own, which ends with this one."""
        self._named[name] += 1  # the ranks of a group may meet again
        meeting = replace(self._meeting, name=f"{self._meeting.name}/{name}-{self._named[name]}", **options)
        group = connect(rank=rank, world_size=world_size, meeting=meeting, timeout_s=self.deadline_s)
        self._subgroups.append(group)
        if self._is_severed:  # by another thread, meanwhile
            group.sever()
        return group

    def sever(self) -> None:
        """As in `Group`.

        Pending work in the transport ends with an error as well, so nothing is written to its memory any more,
        not even by a peer that was stopped for a while and then continues.
        """
        self._is_severed = True
        for group in self._subgroups:
            group.sever()
        if not self._is_cut:
            self._is_cut, self._cut_s = wall.cut(self._ports), time.monotonic()
        if self._neighbours is not None:
            self._neighbours.sever()

    def _end_s(self) -> float:
        """How long to wait for the end of what uses the connections: of all together 0.3 s after they were cut."""
        return max(0.0, self._cut_s + _CUT_S - time.monotonic()) if self._is_cut else _END_S

    def close(self, *, patience_s: float = _END_S) -> None:
        """As in `Group`; waits for the end of the transport for at most `patience_s`."""
        left = [self._process_group]
        self._process_group = None
        if self._neighbours is not None:
            self._neighbours.close()
        # the transport ends only after its own threads, without a deadline: this thread waits no longer than _END_S
        ending = threading.Thread(target=left.clear, name="transport's end", daemon=True)
        ending.start()
        ending.join(0.0 if self._is_stuck else patience_s)
        if ending.is_alive():
            logger.info("the transport of generation %d is left to end by itself", self.generation)

    def learn_ports(self, own: Collection[tuple[str, int]]) -> None:
        """Exchange the addresses at which the transport's connections came in, which identify them. Collective.

        `own` are the listening addresses of this rank, one for each of its interfaces.
        """
        doors = sorted(own)[:_MOST_DOORS]
        text = json.dumps(doors).encode().ljust(_DOORS_BYTES)
        rows = self.all_gather_rows(np.frombuffer(text, np.int64))
        self._ports = frozenset((str(host), int(port)) for row in rows for host, port in json.loads(row.tobytes()))

    def meet_neighbours(self) -> None:
        """Use shared memory from now on if all ranks are on one machine. Collective."""
        machines = self.all_gather_rows(np.frombuffer(machine(), np.int64))
        if (machines != machines[0]).any():
            return
        door, met = open_door(), None
        names = [
            name.tobytes() for name in self.all_gather_rows(np.frombuffer(door.name if door else NO_NAME, np.int64))
        ]
        if door is not None and NO_NAME not in names:
            try:
                met = door.meet(
                    rank=self.rank, names=names, key=self._meeting.key, timeout_s=min(_MEET_S, self.deadline_s)
                )
            except OSError as error:
                logger.info("ranks of this machine do not share memory: %s", error)
        if door is not None:
            door.close()
        if self.all_gather_rows(np.array([met is not None], np.int64)).all():
            self._neighbours = met
        elif met is not None:
            met.close()

    def _await(self, work: dist.Work) -> None:
        """Wait for pending work in the transport. Raises RuntimeError, also soon after the group was cut.

        gloo does not end a send whose connection was cut before gloo's own thread has noticed: it would last
        until its deadline, and keep its resources until then.
        """
        while True:
            was_cut = self._is_cut
            with suppress(RuntimeError):  # not finished, or the error that the last line raises
                work.wait(timedelta(seconds=_CUT_S))
            if work.is_completed():
                break
            if was_cut:
                self._is_stuck = True
                raise RuntimeError("its connections were cut")
        work.wait()

    def _transport(self) -> dist.ProcessGroup:
        assert self._process_group is not None, "the group is closed"
        return self._process_group


def has_process_group() -> bool:
    """Whether this process has a process group of torch.distributed, which HetSeq never makes."""
    return dist.is_available() and dist.is_initialized()


class LocalGroup:
    """A group of one: every sum is its own term."""

    def __init__(self, *, generation: int = 0) -> None:
        self.rank = 0
        self.world_size = 1
        self.generation = generation
        self.deadline_s = float("inf")
        self.bytes_reduced = 0

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(elements, dtype=dtype, device=device)

    def release(self, tensor: torch.Tensor) -> None:
        pass

    def all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        return _Done()

    def all_gather_rows(self, row: Rows) -> Rows:
        return row[np.newaxis].copy()

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        pass

    def slices(self, device: torch.device) -> SliceExchange:
        return TaggedSlices(None, rank=0, world_size=1, deadline_s=lambda: self.deadline_s)

    def messages(self) -> Messages:
        raise AssertionError("a world of one sends nothing")

    def subgroup(self, ranks: Sequence[int], name: str) -> Group:
        return self

    def sever(self) -> None:
        pass

    def close(self) -> None:
        pass


def gather_floats(group: RowTransport, values: list[float]) -> npt.NDArray[np.float64]:
    """Float64 rows of all ranks, bit for bit: n values on each rank give (world_size, n)."""
    return group.all_gather_rows(np.array(values, np.float64).view(np.int64)).view(np.float64)


def sum_floats(group: RowTransport, values: list[float]) -> list[float]:
    """Each value added over all ranks in rank order, so the same bits everywhere."""
    rows = gather_floats(group, values)  # (world_size, n)
    return [float(sum(column)) for column in rows.T.tolist()]


class Store(Protocol):
    """Small named values through which ranks find each other. Set once, never changed; kept by a launcher."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value, once some rank has set it. Raises RendezvousError if that takes too long."""
        ...

    def check(self) -> None:
        """Raise PeerLostError once these ranks can no longer become a group."""
        ...


@dataclass(frozen=True)
class GroupMeeting:
    """How the ranks of a run build a group: where they meet and how they authenticate each other."""

    store: Store
    name: str  # of the group, before its keys in the store; a name is used once
    key: bytes  # secret of the run's ranks
    host: str = "127.0.0.1"  # the address of this rank's interface
    sources: tuple[str, ...] = ()  # addresses from which the ranks of other nodes connect; empty: unknown
    generation: int = 0
    shares_memory: bool = False  # all ranks are on one machine, as far as is known: try to use shared memory


def has_gloo() -> bool:
    """Whether this torch was built with gloo."""
    return dist.is_available() and dist.is_gloo_available()


def connect(*, rank: int, world_size: int, meeting: GroupMeeting, timeout_s: float) -> GlooGroup:
    """Build the group; returns once this rank and each of the `world_size` others have proven to hold the key.

    Raises RendezvousError if peers do not arrive within `timeout_s`, or another process in a peer's place lacks the
    key; PeerLostError as soon as it is known that a peer will not arrive.
    """
    # In a thread of its own: the transport cannot be interrupted while it waits for a peer, so that thread is left.
    building = _Building(lambda: _connect(rank, world_size, meeting, timeout_s))
    while not building.is_over.wait(_LOOK_S):
        try:
            meeting.store.check()
        except PeerLostError:
            building.abandon()
            raise
    return building.result()


class _Building:
    """A group that is being built in another thread."""

    def __init__(self, build: Callable[[], GlooGroup]) -> None:
        self.is_over = threading.Event()
        self._found: GlooGroup | HetSeqError | None = None
        self._lock, self._is_wanted = threading.Lock(), True
        threading.Thread(target=self._run, args=(build,), name="connect", daemon=True).start()

    def result(self) -> GlooGroup:
        """The group, once `is_over` is set. Raises the error of the build."""
        assert self._found is not None
        if isinstance(self._found, GlooGroup):
            return self._found
        raise self._found

    def abandon(self) -> None:
        """Discard the group: its caller has stopped waiting for it."""
        with self._lock:
            self._is_wanted = False
            if isinstance(self._found, GlooGroup):
                self._found.sever()
                self._found.close()

    def _run(self, build: Callable[[], GlooGroup]) -> None:
        found: GlooGroup | HetSeqError
        try:
            found = build()
        except HetSeqError as error:
            found = error
        except Exception as error:
            found = RendezvousError(f"the ranks could not connect: {type(error).__name__}: {error}")
        if not isinstance(found, GlooGroup):
            found.__traceback__ = None  # its frames would hold sockets open
        with self._lock:
            self._found = found
            if not self._is_wanted and isinstance(found, GlooGroup):
                found.sever()
                found.close()
        self.is_over.set()


def _connect(rank: int, world_size: int, meeting: GroupMeeting, timeout_s: float) -> GlooGroup:
    timeout = timedelta(seconds=timeout_s)
    try:
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs leave its options out
        options = gloo._Options()
        options._timeout = timeout
        others = wall.listening()
        options._devices = [gloo.create_device(hostname=meeting.host)]
        # a group that ends meanwhile in another thread may free a descriptor number that the new listener then gets
        doors = {descriptor: at for descriptor, at in wall.listening().items() if others.get(descriptor) != at}
        if meeting.sources:
            _admit(doors, {meeting.host, *meeting.sources})
        store = _StoreForGloo(meeting, timeout_s)
        process_group = gloo(store, rank, world_size, options)
        _prove(process_group, rank, world_size, meeting, timeout)
        _admit(doors, ())
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} at {meeting.host} waited up to {timeout_s:g} s for {world_size} ranks: {error}"
        ) from None
    group = GlooGroup(
        process_group, rank=rank, world_size=world_size, deadline_s=timeout_s, meeting=meeting, store=store
    )
    group.learn_ports(doors.values())
    if meeting.shares_memory:
        group.meet_neighbours()
    return group


def _admit(doors: Mapping[int, tuple[str, int]], addresses: Collection[str]) -> None:
    """Allow only these addresses to connect to gloo's port, which it never closes; none once all have connected."""
    for descriptor, (_, port) in doors.items():
        if not wall.admit(descriptor, addresses):
            logger.info("port %d accepts connections from any host: no socket filters here", port)
        if not addresses:
            wall.free_connections(port)


def _prove(
    process_group: dist.ProcessGroup, rank: int, world_size: int, meeting: GroupMeeting, timeout: timedelta
) -> None:
    """Each pair of ranks exchanges proofs of the key, over the connection that their gradients will use.

    gloo accepts any process that speaks its protocol, and lets a rank continue while others still connect to it. After
    this, all ranks are connected and authenticated.
    """

    def proofs(pairs: list[tuple[int, int]]) -> torch.Tensor:
        text = b"".join(
            hmac.digest(meeting.key, f"{meeting.name} {source} {target}".encode(), "sha256") for source, target in pairs
        )
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    others = range(world_size)
    heard, expected = torch.zeros(32 * world_size, dtype=torch.uint8), proofs([(other, rank) for other in others])
    options = AllToAllOptions()
    options.timeout = timeout
    process_group.alltoall_base(heard, proofs([(rank, other) for other in others]), [], [], options).wait()
    wrong = [other for other in others if not torch.equal(heard.view(-1, 32)[other], expected.view(-1, 32)[other])]
    if wrong:
        raise RendezvousError(
            f"rank {rank} at {meeting.host}: the process that connected as rank {wrong[0]} does not hold the key of"
            " this run, so it is not that rank; nothing was sent to it. Start again, and use a network that you trust"
        )


class _StoreForGloo(dist.Store):
    """A store with the interface that gloo expects; torch keeps no reference to it, the group does."""

    def __init__(self, meeting: GroupMeeting, timeout_s: float) -> None:
        super().__init__()
        self._meeting, self._timeout_s = meeting, timeout_s

    def set(self, key: str, value: Any) -> None:  # bytes, despite torch's stubs
        self._meeting.store.set(f"{self._meeting.name}/{key}", value)

    def get(self, key: str) -> bytes:
        return self._meeting.store.get(f"{self._meeting.name}/{key}", self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Done:
    def wait(self) -> None:
        pass
