"""Slices of flat memory, between the ranks that own them and the ranks that compute.

Responsible for two transfers of one memory that is cut in rank order: the sum of each slice goes to its owner, or each
owner's slice goes to the ranks that need the whole. Knows neither parameters nor gradients.

The one idea: slices differ in size and some ranks take no part, which no collective of gloo allows without padding; so
slices go from rank to rank, each of them once, or along a chain of ranks (`balance.chains`). Every rank names the same
transfers in the same order, and a message is matched by the number of its transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from hetseq.balance.chains import Link, link_of_gather, link_of_sum
from hetseq.comm.chains import Chain
from hetseq.comm.peer_errors import PeerErrors
from hetseq.comm.right_of_way import RightOfWay
from hetseq.comm.serial_thread import SerialThread

_TAGS = 1 << 30
_CUT_S = 0.3  # for a transfer to end once its connections are cut
_END_S = 2.0  # for the threads to end
_AT_ONCE = 2  # slices of a sum that an owner receives, so that their memory does not grow with the number of givers


class Transfer(Protocol):
    """A pending transfer. Its memory may be used again once it is over."""

    def is_over(self) -> bool:
        """Whether `wait` would return at once. Takes part in the transfer as far as that is possible now."""
        ...

    def wait(self) -> None:
        """Take part until the transfer is over on this rank. Raises PeerLostError."""
        ...


class SliceExchange(Protocol):
    """Transfers of slices among the ranks of a group. `bounds`, (world_size + 1,), are elements: rank r owns the
    elements `bounds[r]` to `bounds[r + 1]`. All ranks make the same calls in the same order."""

    sent_bytes: int  # so far, to other ranks
    received_bytes: int

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory whose slices can be sent. Shape (elements,). Any rank, alone."""
        ...

    def release(self, tensor: torch.Tensor) -> None:
        """Return memory that no transfer uses any more, for a later `memory`. Any rank, alone."""
        ...

    def sum_to_owners(
        self, flat: torch.Tensor | None, total: torch.Tensor, *, bounds: Sequence[int], givers: Sequence[int]
    ) -> Transfer:
        """Begin to write to `total`, (own elements,), the sum of the own slice over the ranks `givers`, added in rank
        order or in the order of a chain.

        `flat`, (elements or more,), is the memory of a giver, None on other ranks; it must not change before the
        transfer is over. Raises PeerLostError.
        """
        ...

    def gather(
        self,
        flat: torch.Tensor | None,
        *,
        bounds: Sequence[int],
        takers: Sequence[int],
        own: torch.Tensor | None = None,
    ) -> Transfer:
        """Begin to write the slices of all owners to `flat`, (elements,), of the ranks `takers`.

        On each rank `flat` holds the own slice. Or `own`, (own elements,), from `memory`, is that slice, on all ranks;
        then `flat` may be any memory, and None on ranks that take nothing. The own slice must not change before the
        transfer is over. Raises PeerLostError.
        """
        ...

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Transfer:
        """Begin to send whole tensors from `memory`, by rank, and to receive others; each pair agrees on the bytes.

        Raises PeerLostError.
        """
        ...

    def close(self) -> None:
        """End the thread, if there is one. Any rank, alone."""
        ...


class TaggedSlices:
    """Slices by the point-to-point messages of gloo, between any devices. A thread waits for them and adds them up.

    `transport` gives the process group; None for a world of one. `is_cut`: its connections were cut. A send that was
    under way then may end only at its deadline, so no rank waits for it any more. `end_s`: how long `close` waits for
    the end of a transfer. `right_of_way` counts the transfers.
    """

    def __init__(
        self,
        transport: Callable[[], dist.ProcessGroup] | None,
        *,
        rank: int,
        world_size: int,
        deadline_s: Callable[[], float],
        is_cut: Callable[[], bool] = lambda: False,
        end_s: Callable[[], float] = lambda: _END_S,
        right_of_way: RightOfWay | None = None,
    ) -> None:
        self._transport, self._rank, self._world_size, self._deadline_s = transport, rank, world_size, deadline_s
        self._is_cut, self._end_s, self._right_of_way = is_cut, end_s, right_of_way or RightOfWay()
        self.sent_bytes = self.received_bytes = 0
        self._free: list[torch.Tensor] = []
        self._tag = 0
        # messages of a GPU are posted by a thread of their own, once the GPU has computed them
        self._posting, self._waiting = SerialThread("post slices"), SerialThread("await slices")

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        fitting = [one for one in self._free if (one.dtype, one.device, one.numel()) == (dtype, device, elements)]
        if not fitting:
            return torch.empty(elements, dtype=dtype, device=device)
        self._free = [one for one in self._free if one is not fitting[0]]
        return fitting[0]

    def release(self, tensor: torch.Tensor) -> None:
        self._free.append(tensor)

    def sum_to_owners(
        self, flat: torch.Tensor | None, total: torch.Tensor, *, bounds: Sequence[int], givers: Sequence[int]
    ) -> Transfer:
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        outgoing = self._outgoing(flat, bounds) if flat is not None else {}
        link = link_of_sum(bounds, givers, self._rank)
        passed = None if link is None or flat is None else flat[bounds[link.owner] : bounds[link.owner + 1]]
        if link is not None:
            outgoing.pop(link.owner, None)
        is_end = link is not None and link.owner == self._rank
        elements = total.numel()
        sources = [giver for giver in givers if giver != self._rank and elements and not is_end]
        # slices differ in size: rounded up, the memory of one serves the next one
        memory = [self.memory(_rounded_up(elements), total.dtype, total.device) for _ in sources[:_AT_ONCE]]

        def post(tag: int) -> Callable[[], None]:
            def begin(source: int, into: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
                return into, self._receive({source: into[:elements]}, tag)

            # first: it needs memory, and nothing is posted yet if there is none
            pass_on = None if link is None else self._chain(link, tag).sum(passed, total if is_end else None)
            arriving = {source: begin(source, into) for source, into in zip(sources, memory)}
            later = deque(sources[_AT_ONCE:])

            def add_up() -> None:
                if elements and not givers:
                    total.zero_()
                for number, giver in enumerate(givers if elements and not is_end else ()):
                    if giver == self._rank:
                        assert flat is not None, "this rank gives"
                        term = into = flat[own].to(total.device)  # what a GPU rank owns may be in host memory
                    else:
                        into, await_it = arriving.pop(giver)
                        await_it()
                        term = into[:elements]
                    total.add_(term) if number else total.copy_(term)
                    if giver != self._rank and later:
                        source = later.popleft()
                        arriving[source] = begin(source, into)
                if pass_on is not None:
                    pass_on()

            return add_up

        def give_back() -> None:
            self._free += memory

        self.received_bytes += len(sources) * total.nbytes
        if link is not None:
            self._count_passed(link, total if passed is None else passed)
        return self._begin("gradients", outgoing, post, give_back)

    def gather(
        self,
        flat: torch.Tensor | None,
        *,
        bounds: Sequence[int],
        takers: Sequence[int],
        own: torch.Tensor | None = None,
    ) -> Transfer:
        own = own_slice(flat, bounds, self._rank, own, takers)
        outgoing = {taker: own for taker in takers if taker != self._rank and own.numel()}
        incoming = self._outgoing(flat, bounds) if flat is not None and self._rank in takers else {}
        link = link_of_gather(bounds, takers, self._rank)
        if link is None:
            return self._exchange("parameters", outgoing, incoming)
        if link.owner == self._rank:
            outgoing, passed = {}, own
        else:
            passed = incoming.pop(link.owner)
        self._count_passed(link, passed)
        return self._exchange("parameters", outgoing, incoming, lambda tag: self._chain(link, tag).spread(passed))

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Transfer:
        return self._exchange("the state", dict(outgoing), dict(incoming))

    def close(self) -> None:
        self._posting.end(patience_s=self._end_s())
        self._waiting.end(patience_s=self._end_s())

    def _outgoing(self, flat: torch.Tensor, bounds: Sequence[int]) -> dict[int, torch.Tensor]:
        """The slice of each other owner, beginning after this rank, so that not all ranks send to the same one."""
        turn = ((self._rank + step) % self._world_size for step in range(1, self._world_size))
        return {owner: flat[bounds[owner] : bounds[owner + 1]] for owner in turn if bounds[owner] < bounds[owner + 1]}

    def _exchange(
        self,
        what: str,
        outgoing: dict[int, torch.Tensor],
        incoming: dict[int, torch.Tensor],
        beside: Callable[[int], Callable[[], None]] | None = None,
    ) -> Transfer:
        """Send and receive slices; `beside` begins what else belongs to the transfer, and its result takes part."""
        self.received_bytes += sum(piece.nbytes for piece in incoming.values())

        def post(tag: int) -> Callable[[], None]:
            pass_on = None if beside is None else beside(tag)
            received = self._receive(incoming, tag)

            def finish() -> None:
                received()
                if pass_on is not None:
                    pass_on()

            return finish

        return self._begin(what, outgoing, post)

    def _chain(self, link: Link, tag: int) -> Chain:
        # with tags of its own: beside its slice for a rank, a rank may pass another one on to it
        return Chain(self._gloo(), link, _TAGS + tag, lambda work: self._await([work]))

    def _count_passed(self, link: Link, passed: torch.Tensor) -> None:
        self.received_bytes += passed.nbytes * (link.before is not None)
        self.sent_bytes += passed.nbytes * (link.after is not None)

    def _begin(
        self,
        what: str,
        outgoing: dict[int, torch.Tensor],
        receive: Callable[[int], Callable[[], None]],
        at_end: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Post the messages of a transfer; `receive` posts for its tag, and its result waits."""
        copies = {target: _on_host(piece) for target, piece in outgoing.items()}  # before anything is posted
        tag, self._tag = self._tag, (self._tag + 1) % _TAGS
        self.sent_bytes += sum(piece.nbytes for piece in outgoing.values())
        with PeerErrors(what, self._deadline_s()):
            received, sent = receive(tag), self._post(outgoing, copies, tag)

        self._right_of_way.begin()

        def finish() -> None:
            try:
                received()
                self._await(sent())
            finally:
                self._right_of_way.end()

        return _Awaited(self._waiting.put(finish), what, self._deadline_s, self._is_cut, at_end)

    def _receive(self, incoming: dict[int, torch.Tensor], tag: int) -> Callable[[], None]:
        """Post to receive slices; the result waits for them. From any thread."""
        received = {source: _on_host(piece) for source, piece in incoming.items()}
        works = [self._gloo().recv([piece], source, tag) for source, piece in received.items()]

        def finish() -> None:
            self._await(works)
            for source, piece in incoming.items():
                if piece.is_cuda:
                    piece.copy_(received[source], non_blocking=True)

        return finish

    def _await(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait(timedelta(seconds=self._deadline_s()))

    def _post(
        self, outgoing: dict[int, torch.Tensor], copies: dict[int, torch.Tensor], tag: int
    ) -> Callable[[], list[dist.Work]]:
        """Post the outgoing messages, from `copies` on the host; the result waits until they are posted.

        gloo sends from host memory only, so slices on a GPU are copied first, beside the thread that computes.
        """
        if not any(piece.is_cuda for piece in outgoing.values()):
            posted = [self._gloo().send([piece], target, tag) for target, piece in outgoing.items()]
            return lambda: posted
        device = next(piece.device for piece in outgoing.values())
        with torch.cuda.device(device):
            stream, computed = torch.cuda.Stream(device), torch.cuda.current_stream(device).record_event()
            with torch.cuda.stream(stream):
                stream.wait_event(computed)
                for target, piece in outgoing.items():
                    copies[target].copy_(piece, non_blocking=True)
                    piece.record_stream(stream)
                copied = stream.record_event()

        def post() -> list[dist.Work]:
            copied.synchronize()
            return [self._gloo().send([copy], target, tag) for target, copy in copies.items()]

        future = self._posting.put(post)
        return lambda: future.result()

    def _gloo(self) -> dist.ProcessGroup:
        assert self._transport is not None, "a world of one sends nothing"
        return self._transport()


def own_slice(
    flat: torch.Tensor | None, bounds: Sequence[int], rank: int, own: torch.Tensor | None, takers: Sequence[int]
) -> torch.Tensor:
    """The slice that a rank gives in a `gather`; a taker with a slice in memory of its own copies it to `flat`."""
    begin, end = bounds[rank], bounds[rank + 1]
    if own is None:
        assert flat is not None, "the own slice lies in it"
        return flat[begin:end]
    if flat is not None and rank in takers:
        flat[begin:end].copy_(own, non_blocking=True)
    return own


def _on_host(piece: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a slice: its own, or new memory that a GPU can copy from and to."""
    return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True) if piece.is_cuda else piece


def _rounded_up(elements: int) -> int:
    """At least so many, of four values in each octave."""
    step = 1 << max(0, (elements - 1).bit_length() - 3)
    return -(-elements // step) * step


def add_in_order(terms: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Write the sum of `terms`, added one after the other, to `total`, which is none of them; no term gives zeros."""
    if len(terms) < 2:
        total.copy_(terms[0]) if terms else total.zero_()
        return
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)


class _Awaited:
    """A transfer that a thread completes."""

    def __init__(
        self,
        future: Future[None],
        what: str,
        deadline_s: Callable[[], float],
        is_cut: Callable[[], bool],
        at_end: Callable[[], None],
    ) -> None:
        self._future, self._what, self._deadline_s, self._is_cut = future, what, deadline_s, is_cut
        self._at_end: Callable[[], None] | None = at_end

    def is_over(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        with PeerErrors(self._what, self._deadline_s()):
            self._await()
        if self._at_end is not None:
            self._at_end()
            self._at_end = None

    def _await(self) -> None:
        while True:
            was_cut = self._is_cut()
            try:
                self._future.result(timeout=_CUT_S)
                return
            except TimeoutError:
                if self._future.done():  # it is the transfer's own error
                    raise
                if was_cut:
                    raise RuntimeError("its connections were cut") from None
