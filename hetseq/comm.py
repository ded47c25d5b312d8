"""The only place where ranks talk to each other during a step: sums of tensors and gathers of small rows.

A `Group` is one fixed membership, built over gloo on one chosen interface and owned by nobody else: no default process
group, no environment variables. `LocalGroup` answers the same calls for a world of one. Every wait has a deadline, and
every failure of a collective becomes one PeerLostError; who is to blame is for the launcher to find out.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from hetseq.errors import PeerLostError, RendezvousError

Rows = npt.NDArray[np.int64]


class Pending(Protocol):
    """A collective under way; `wait` returns when its result is complete here, or raises PeerLostError."""

    def wait(self) -> None: ...


class Group:
    """The ranks of one generation. Every rank makes the same calls in the same order."""

    def __init__(self, process_group: dist.ProcessGroup, *, rank: int, world_size: int, deadline_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        #: seconds after which a collective that has not ended counts as a lost peer
        self.deadline_s = deadline_s
        self.bytes_reduced = 0
        self._process_group: dist.ProcessGroup | None = process_group

    def all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        """Start adding `tensor` over all ranks, in place; returns at once."""
        options = AllreduceOptions()  # a sum, unless told otherwise
        options.timeout = timedelta(seconds=self.deadline_s)
        self.bytes_reduced += tensor.numel() * tensor.element_size()
        with _peer_errors("a gradient bucket", self.deadline_s):
            work = self._transport().allreduce([tensor], options)
        return _Work(work, "a gradient bucket", self.deadline_s)

    def all_gather_rows(self, row: Rows) -> Rows:
        """Rows of all ranks in rank order: (n,) on each rank gives (world_size, n). Blocks."""
        # fresh memory for each call: an abandoned gather may still write into its own
        mine = torch.from_numpy(row.copy())
        table = [torch.empty_like(mine) for _ in range(self.world_size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=self.deadline_s)
        with _peer_errors("a row of every rank", self.deadline_s):
            self._transport().allgather([table], [mine], options).wait()
        return torch.stack(table).numpy()

    def close(self) -> None:
        """Give the sockets back; peers that still wait see this rank as gone."""
        self._process_group = None

    def _transport(self) -> dist.ProcessGroup:
        assert self._process_group is not None, "the group is closed"
        return self._process_group


class LocalGroup:
    """A group of one: every sum is its own term."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.generation = 0
        self.deadline_s = float("inf")
        self.bytes_reduced = 0

    def all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        return _Done()

    def all_gather_rows(self, row: Rows) -> Rows:
        return row[np.newaxis].copy()

    def close(self) -> None:
        pass


AnyGroup = Group | LocalGroup


def gather_floats(group: AnyGroup, values: list[float]) -> npt.NDArray[np.float64]:
    """Float64 rows of all ranks, bit for bit: n values on each rank give (world_size, n)."""
    return group.all_gather_rows(np.array(values, np.float64).view(np.int64)).view(np.float64)


def sum_floats(group: AnyGroup, values: list[float]) -> list[float]:
    """Each value added over all ranks in rank order, so the same bits everywhere."""
    rows = gather_floats(group, values)  # (world_size, n)
    return [float(sum(column)) for column in rows.T.tolist()]


class StoreServer:
    """The store over which a group finds itself, bound to one interface; hosted by a launcher, never by a rank."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0))
        self.host, self.port = host, self._listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            self.port,
            None,
            is_master=True,
            wait_for_workers=False,
            # torch would listen on every interface; it takes over this socket, which does not
            master_listen_fd=self._listener.detach(),
        )

    def close(self) -> None:
        del self._store


def host_store(host: str = "127.0.0.1") -> StoreServer:
    """Start a store on a free port of `host`."""
    return StoreServer(host)


def connect(
    *, rank: int, world_size: int, store_port: int, prefix: str, timeout_s: float, host: str = "127.0.0.1"
) -> Group:
    """Build the group; returns once all `world_size` ranks are connected.

    Raises RendezvousError naming the store where peers do not come within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        client = dist.TCPStore(host, store_port, None, is_master=False, timeout=timeout)
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs leave its options out
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=host)]
        store = dist.PrefixStore(prefix, client)
        process_group = gloo(store, rank, world_size, options)
        # gloo lets a rank go while others still connect to it: if it failed then, they would seem to be the cause
        if store.add("connected", 1) == world_size:
            store.set("complete", "yes")
        store.wait(["complete"], timeout)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} waited {timeout_s:.0f} s for {world_size} ranks at {host}:{store_port}: {error}"
        ) from None
    return Group(process_group, rank=rank, world_size=world_size, deadline_s=timeout_s)


class _Work:
    def __init__(self, work: dist.Work, what: str, deadline_s: float) -> None:
        self._work, self._what, self._deadline_s = work, what, deadline_s

    def wait(self) -> None:
        with _peer_errors(self._what, self._deadline_s):
            self._work.wait()


class _Done:
    def wait(self) -> None:
        pass


@contextmanager
def _peer_errors(what: str, deadline_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # the cause is cut off on purpose: its traceback would hold the group's sockets open, and peers would wait
        reason = str(error).splitlines()[0]
        raise PeerLostError(f"lost a peer while waiting up to {deadline_s:.0f} s for {what} ({reason})") from None
