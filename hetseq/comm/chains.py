"""One large slice passes from rank to rank in pieces: what a rank of a chain (`balance.chains`) does.

Each rank passes on what it has, with its own term added if it is a sum, while the next piece arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from hetseq.balance.chains import Link

_PIECE_BYTES = 1 << 20
_AT_ONCE = 2  # pieces of a sum that are here at a time


class Chain:
    """Passes pieces on, for one rank and one transfer. `wait` awaits a message."""

    def __init__(self, group: dist.ProcessGroup, link: Link, tag: int, wait: Callable[[dist.Work], None]) -> None:
        self._group, self._link, self._tag, self._wait = group, link, tag, wait

    def sum(self, term: torch.Tensor | None, total: torch.Tensor | None) -> Callable[[], None]:
        """Begin to add `term`, the values of a giver, and to pass the sum on; on the owner `total` gets it.

        `term` is None on an owner that gives nothing. The result takes part until the sum has passed this rank.
        """
        if total is not None:
            return self._arrive(term, total)
        assert term is not None, "a rank that gives"
        pieces = list(_pieces(term))
        if self._link.before is None:
            if term.is_cuda:
                return lambda: self._await([self._send(piece.cpu()) for piece in pieces])
            sent = [self._send(piece) for piece in pieces]
            return lambda: self._await(sent)
        memory = [torch.empty(len(piece), dtype=piece.dtype) for piece in pieces[:_AT_ONCE]]
        arriving = deque((into, self._receive(into)) for into in memory)

        def pass_on() -> None:
            leaving: deque[tuple[torch.Tensor, dist.Work]] = deque()
            for number, piece in enumerate(pieces):
                into, work = arriving.popleft()
                self._wait(work)
                into.add_(piece.cpu())
                leaving.append((into, self._send(into)))
                if number + _AT_ONCE < len(pieces):
                    into, work = leaving.popleft()
                    self._wait(work)
                    into = into[: len(pieces[number + _AT_ONCE])]
                    arriving.append((into, self._receive(into)))
            self._await([work for _, work in leaving])

        return pass_on

    def _arrive(self, term: torch.Tensor | None, total: torch.Tensor) -> Callable[[], None]:
        into = torch.empty(total.shape, dtype=total.dtype, pin_memory=True) if total.is_cuda else total
        arriving = [self._receive(piece) for piece in _pieces(into)]

        def finish() -> None:
            self._await(arriving)
            if into is not total:
                total.copy_(into)
            if term is not None:
                total.add_(term.to(total.device))

        return finish

    def spread(self, slice_: torch.Tensor) -> Callable[[], None]:
        """Begin to pass the owner's slice on, from and to `slice_`. The result takes part until it has passed."""
        on_host = slice_
        if slice_.is_cuda:
            on_host = torch.empty(slice_.shape, dtype=slice_.dtype, pin_memory=True)
        pieces = list(_pieces(on_host))
        if self._link.before is None:
            if slice_.is_cuda:
                return lambda: self._await([self._send(piece.cpu()) for piece in _pieces(slice_)])
            sent = [self._send(piece) for piece in pieces]
            return lambda: self._await(sent)
        arriving = [self._receive(piece) for piece in pieces]

        def pass_on() -> None:
            sent = []
            for piece, work in zip(pieces, arriving):
                self._wait(work)
                if self._link.after is not None:
                    sent.append(self._send(piece))
            self._await(sent)
            if on_host is not slice_:
                slice_.copy_(on_host, non_blocking=True)

        return pass_on

    def _send(self, piece: torch.Tensor) -> dist.Work:
        assert self._link.after is not None
        return self._group.send([piece], self._link.after, self._tag)

    def _receive(self, piece: torch.Tensor) -> dist.Work:
        assert self._link.before is not None
        return self._group.recv([piece], self._link.before, self._tag)

    def _await(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            self._wait(work)


def _pieces(slice_: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from slice_.split(max(1, _PIECE_BYTES // slice_.element_size()))
