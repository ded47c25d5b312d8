"""Slices between ranks of one machine: a rank reads those that it needs out of the others' memory.

Responsible for `SliceExchange` over shared memory: no message carries data, and no slice is copied twice.

The one idea: a rank offers memory to those that need a slice of it, and may change it once all of them have read. The
reading, and the adding of what owners read, is done by the thread that waits or asks whether a transfer is over. A rank
that waits for one transfer reads in all that it has begun: others may wait for one that it needs later, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from hetseq.comm.peer_errors import PeerErrors
from hetseq.comm.shared_memory import OfferedMemory, SharedMemoryRanks
from hetseq.comm.slices import Transfer, add_in_order, own_slice

_PIECE = 1 << 16  # elements added at once if there are more than two terms: they stay in the cache


class SharedSlices:
    """As `SliceExchange`, for tensors in the memory of the CPU."""

    def __init__(self, ranks: SharedMemoryRanks, *, deadline_s: Callable[[], float]) -> None:
        self.ranks, self.deadline_s = ranks, deadline_s
        self.sent_bytes = self.received_bytes = 0
        self._memory: dict[int, OfferedMemory] = {}  # by its address
        self._free: list[torch.Tensor] = []
        self._unread: list[_Reading] = []  # transfers in which this rank has yet to read, in their order
        self._others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "cpu"
        fitting = [one for one in self._free if (one.dtype, one.numel()) == (dtype, elements)]
        if fitting:
            self._free = [one for one in self._free if one is not fitting[0]]
            return fitting[0]
        made = self.ranks.offered_memory(max(1, elements) * dtype.itemsize)
        tensor = torch.frombuffer(made.pages, dtype=dtype, count=max(1, elements))[:elements]
        self._memory[tensor.data_ptr()] = made
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        self._free.append(tensor)

    def sum_to_owners(
        self, flat: torch.Tensor | None, total: torch.Tensor, *, bounds: Sequence[int], givers: Sequence[int]
    ) -> Transfer:
        own = slice(bounds[self.ranks.rank], bounds[self.ranks.rank + 1])

        def add_up(others: dict[int, torch.Tensor]) -> None:
            parts = {**others, self.ranks.rank: flat}
            terms = [part[own] for giver in givers if (part := parts[giver]) is not None]
            if len(terms) < 3:
                add_in_order(terms, total)
                return
            for *pieces, sum_ in zip(*(term.split(_PIECE) for term in terms), total.split(_PIECE)):
                add_in_order(pieces, sum_)

        owners = [rank for rank in self._others if bounds[rank] < bounds[rank + 1]]
        needed = [giver for giver in givers if giver != self.ranks.rank] if total.numel() else []
        sent = {owner: (bounds[owner + 1] - bounds[owner]) * total.itemsize for owner in owners}
        self.received_bytes += len(needed) * total.nbytes
        outgoing = dict.fromkeys(owners, flat) if flat is not None else {}
        self.sent_bytes += sum(sent.values()) if outgoing else 0
        return self._begin("gradients", outgoing, needed, add_up if total.numel() else None, total.dtype)

    def gather(
        self,
        flat: torch.Tensor | None,
        *,
        bounds: Sequence[int],
        takers: Sequence[int],
        own: torch.Tensor | None = None,
    ) -> Transfer:
        slice_ = own_slice(flat, bounds, self.ranks.rank, own, takers)

        def copy(others: dict[int, torch.Tensor]) -> None:
            assert flat is not None
            for owner, part in others.items():
                begin, end = bounds[owner], bounds[owner + 1]
                flat[begin:end].copy_(part[begin:end] if own is None else part[: end - begin])

        offered = flat if own is None else own
        outgoing = {taker: offered for taker in takers if taker != self.ranks.rank and slice_.numel()}
        self.sent_bytes += len(outgoing) * slice_.nbytes
        is_taker = flat is not None and self.ranks.rank in takers
        needed = [rank for rank in self._others if is_taker and bounds[rank] < bounds[rank + 1]]
        self.received_bytes += sum(bounds[owner + 1] - bounds[owner] for owner in needed) * slice_.itemsize
        return self._begin("parameters", outgoing, needed, copy if needed else None, slice_.dtype)

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Transfer:
        def copy(others: dict[int, torch.Tensor]) -> None:
            for giver, part in others.items():
                incoming[giver].copy_(part[: incoming[giver].numel()])

        self.sent_bytes += sum(tensor.nbytes for tensor in outgoing.values())
        self.received_bytes += sum(tensor.nbytes for tensor in incoming.values())
        return self._begin("the state", dict(outgoing), list(incoming), copy if incoming else None, torch.uint8)

    def close(self) -> None:
        self._free.clear()
        self._memory.clear()
        self._unread.clear()

    def read_what_is_offered(self) -> None:
        """Read in all transfers whose memory has been offered by now."""
        self._unread = [one for one in self._unread if not one.read()]

    def _begin(
        self,
        what: str,
        outgoing: Mapping[int, torch.Tensor | None],
        needed: Sequence[int],
        read: Callable[[dict[int, torch.Tensor]], None] | None,
        dtype: torch.dtype,
    ) -> Transfer:
        unread = {}
        with PeerErrors(what, self.deadline_s()):
            for taker, tensor in outgoing.items():
                assert tensor is not None
                memory = self._memory[tensor.data_ptr()]
                unread[taker] = self.ranks.offer(taker, memory, timeout_s=self.deadline_s())
        offers = {giver: self.ranks.expect(giver) for giver in needed}
        transfer = _Reading(self, what, offers, unread, read, dtype)
        if read is not None:
            self._unread.append(transfer)
        return transfer


class _Reading:
    """A transfer: offers of others that this rank reads together, and own offers that others read."""

    def __init__(
        self,
        exchange: SharedSlices,
        what: str,
        offers: dict[int, int],
        unread: dict[int, int],
        read: Callable[[dict[int, torch.Tensor]], None] | None,
        dtype: torch.dtype,
    ) -> None:
        self._exchange, self._what, self._dtype = exchange, what, dtype
        self._offers, self._unread, self._read = offers, unread, read

    def is_over(self) -> bool:
        self._exchange.ranks.hear()
        with PeerErrors(self._what, self._exchange.deadline_s()):
            return not self._late()

    def wait(self) -> None:
        timeout_s = self._exchange.deadline_s()
        with PeerErrors(self._what, timeout_s):
            self._exchange.ranks.until(self._late, timeout_s)
            self._late()

    def read(self) -> bool:
        """Read what others have offered, once it is there from all; whether nothing is left to read."""
        ranks = self._exchange.ranks
        if self._read is not None and all(offer in ranks.offers[giver] for giver, offer in self._offers.items()):
            others = {}
            for giver, offer in self._offers.items():
                pages = ranks.offered(giver, ranks.offers[giver][offer])
                others[giver] = torch.frombuffer(pages, dtype=self._dtype)
            self._read(others)
            self._read = None
            for giver, offer in self._offers.items():
                del ranks.offers[giver][offer]
                ranks.tell_read(giver, offer, timeout_s=self._exchange.deadline_s())
            self._offers = {}
        return self._read is None

    def _late(self) -> Collection[int]:
        """The ranks that have yet to offer or to read."""
        ranks = self._exchange.ranks
        self._exchange.read_what_is_offered()
        late = {giver for giver, offer in self._offers.items() if offer not in ranks.offers[giver]}
        for taker, offer in list(self._unread.items()):
            if offer in ranks.reads[taker]:
                ranks.reads[taker].remove(offer)
                del self._unread[taker]
        return late | self._unread.keys()
