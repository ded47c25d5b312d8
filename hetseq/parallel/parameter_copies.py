"""Copies of parameters: a rank that computes has all of them, and other ranks own most of what they hold.

Responsible for bringing copies up to date before they are used. What a rank owns, and what changes it, is known to
`owned_gradients`.

The one idea: parameters travel unit by unit in the order of forward, which uses them one layer after the other. So
layers compute while later ones are on their way, and the first use of a parameter waits for its unit (`first_use`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from hetseq.comm.slices import SliceExchange, Transfer
from hetseq.parallel.first_use import FirstUse, are_uses_hidden
from hetseq.parallel.gradient_sync import Pause


@dataclass(frozen=True)
class CopiedUnit:
    """Parameters in one memory, (elements,), of which rank r owns the elements `bounds[r]` to `bounds[r + 1]`."""

    parameters: tuple[torch.nn.Parameter, ...]
    flat: torch.Tensor
    bounds: tuple[int, ...]


class ParameterCopies:
    """The copies of one rank. All ranks make the same calls of `begin_gather` and `gather` in the same order."""

    def __init__(self, units: Sequence[CopiedUnit], exchange: SliceExchange, *, rank: int, world_size: int) -> None:
        """`units` in the order of forward."""
        self._units, self._exchange, self._rank, self._world_size = list(units), exchange, rank, world_size
        self._whole: set[int] = set()  # the ranks whose copies are up to date, or are about to be
        self._transfers: list[Transfer] = []  # that may not be over
        self._late: dict[int, tuple[CopiedUnit, Transfer]] = {}  # by the id of the parameter: may not have arrived
        self._has_computed = False  # a forward has run

    def begin_gather(self, takers: Sequence[int]) -> None:
        """Begin to send owners' slices to those of the ranks that lack them. Raises PeerLostError."""
        lacking = [rank for rank in takers if rank not in self._whole]
        if not lacking:
            return
        for unit in self._units:
            transfer = self._exchange.gather(unit.flat, bounds=unit.bounds, takers=lacking)
            self._transfers.append(transfer)
            if self._rank in lacking:
                self._late.update((id(parameter), (unit, transfer)) for parameter in unit.parameters)
        self._whole.update(lacking)

    def gather(self) -> None:
        """Bring the copies of all ranks up to date, and wait. Raises PeerLostError."""
        self.begin_gather(range(self._world_size))
        self.end()

    def changed(self) -> None:
        """Take note that owners have changed their slices; `end` comes before that."""
        self._whole.clear()

    def end(self) -> None:
        """Wait until all have read what this rank owns, and this rank has what it lacks. Raises PeerLostError."""
        self.await_all()
        for transfer in self._transfers:
            transfer.wait()
        self._transfers.clear()

    def await_all(self) -> None:
        """Wait for all that this rank lacks. Raises PeerLostError."""
        while self._late:
            self._await(next(iter(self._late)))

    def arriving(self, model: torch.nn.Module, pause: Pause) -> AbstractContextManager[object]:
        """As in `GradientSync`."""
        return self._arriving(model, pause) if self._late else nullcontext()

    @contextmanager
    def _arriving(self, model: torch.nn.Module, pause: Pause) -> Iterator[None]:
        def wait(late: int | None) -> None:
            with pause():
                if late is None:
                    self.await_all()
                else:
                    self._await(late)

        # the first forward shows whether anything of it is compiled
        waits_once = not self._exchange.moves_by_itself or not self._has_computed or are_uses_hidden(model)
        if waits_once:
            wait(None)
        with nullcontext() if waits_once else FirstUse(self._late, wait):
            yield
        self._has_computed = True
        wait(None)  # for what this forward has not used; backward may

    def _await(self, late: int) -> None:
        """Wait for the unit of a parameter. A graph that holds an earlier value cannot go backward any more."""
        unit, transfer = self._late[late]
        transfer.wait_for_arrival()
        increment_version(unit.parameters)
        for parameter in unit.parameters:
            del self._late[id(parameter)]
