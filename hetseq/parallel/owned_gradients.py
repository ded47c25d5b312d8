"""Gradients that are summed to their owners: each rank keeps the sums, and later the state, of its part only.

Every rank has all parameters, but of the elements that other ranks own only a copy, which is brought up to date at the
start of a step. Parameters lie one after the other in units, laid out in a fixed order that follows backward; each unit
is one piece of memory, cut among the ranks (`balance.ownership`). A unit's gradients are collected in memory of the
same layout, which exists from its first gradient until all owners have their sums. So state of the optimizer takes
room in proportion to what a rank owns, and gradients only as long as they travel.

Every rank names the transfers of a step in the same order, whether it has samples or not: first the parameters, unit
by unit as forward needs them, then the gradients, unit by unit as backward completes them. Sums are added in rank
order by the owner, so a repeated step has the same bits.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.hooks import RemovableHandle

from hetseq.balance.ownership import Ownership, UnitSizes, cut
from hetseq.comm.group import Group
from hetseq.comm.slices import SliceExchange, Transfer
from hetseq.errors import HetSeqError
from hetseq.parallel.gradient_memory import lending
from hetseq.parallel.gradient_sync import Pause, are_finite, buckets_of, norm_of, take_in_
from hetseq.system.processes import return_freed_memory

_AT_ONCE = 2  # of the largest unit: elements whose gradients travel while those of the next unit are computed
_ALIKE = 0.8  # of the elements of a unit: another one of so many uses the same memory for its gradients


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that this rank owns, as the optimizer sees it."""

    parameter: torch.nn.Parameter  # of the model
    begin: int  # of its elements in row-major order
    end: int
    #: shares the parameter's memory; (end - begin,), or of the parameter's shape if it may or can not be cut
    owned: torch.nn.Parameter


@dataclass
class _Unit:
    """Parameters in one memory, and their gradients of the step under way."""

    indices: list[int]
    starts: list[int]  # of each parameter in the memory, in elements
    flat: torch.Tensor  # (elements,): all parameters, of other owners as copies
    bounds: tuple[int, ...] = ()
    total: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (own elements,): sums of gradients
    fragments: list[tuple[Fragment, slice]] = field(default_factory=list)  # with its place in `total`
    room: int = 0  # elements of the memory for its gradients, which units of about its size use in turn
    gradients: torch.Tensor | None = None  # (room,), from the first gradient until they are sent
    missing: int = 0  # parameters whose gradient of the last micro-batch has not arrived yet
    is_sent: bool = False
    sending: Transfer | None = None
    leaving: torch.Tensor | None = None  # gradients that are being sent


class OwnedGradients:
    """As `GradientSync`, with owners. `.grad` of the `fragments` is the gradient of the step; the model's have none."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        *,
        fractions: Sequence[float],
        bucket_bytes: int,
        cuts_tensors: bool = True,
        dtype: torch.dtype | None = None,
        moved: Callable[[torch.nn.Parameter], None] = lambda _: None,
    ) -> None:
        """Move the parameters into memory of their units. Collective.

        `fractions` has one number for each rank, on all ranks the same. Without `cuts_tensors` each parameter has one
        owner. Sums have the type `dtype` (default: the parameters' own). `moved` is called for each parameter
        once it lies in its unit, so that nothing keeps its earlier memory.
        """
        self.parameters, self.rank, self._group, self._dtype = list(parameters), group.rank, group, dtype
        self.exchange: SliceExchange = group.slices(self.parameters[0].device)
        self.used: npt.NDArray[np.bool_] = np.zeros(len(self.parameters), np.bool_)
        self._units = [
            self._make_unit([index for index, _ in members], moved) for members in buckets_of(parameters, bucket_bytes)
        ]
        for unit, room in zip(self._units, _rooms([unit.flat.numel() for unit in self._units])):
            unit.room = room
        self._home = {index: (unit, place) for unit in self._units for place, index in enumerate(unit.indices)}
        self.fractions = tuple(fractions)
        self.ownership = ownership_of(
            self.parameters, self.fractions, bucket_bytes=bucket_bytes, cuts_tensors=cuts_tensors
        )
        for unit, bounds in zip(self._units, self.ownership.bounds, strict=True):
            self._divide(unit, bounds, cuts_tensors)
        # the parameters have left the memory in which they were made, and a rank that owns little never fills it again
        return_freed_memory()
        #: what this rank owns, by the place of the parameter in the model
        places = {parameter: index for index, parameter in enumerate(self.parameters)}
        self.own_fragments = {places[fragment.parameter]: fragment for fragment in self.fragments}
        self._is_last, self._is_silent, self._is_finite_alone = False, False, True
        self._sent = 0
        self._arrived = np.zeros(len(self.parameters), np.bool_)  # its gradient of the last micro-batch
        self._lent = np.zeros(len(self.parameters), np.bool_)
        self._lenders = {id(p): functools.partial(self._lend, index) for index, p in enumerate(self.parameters)}
        self._active: Sequence[int] = ()  # the ranks that compute samples in this step
        self._whole: set[int] = set()  # the ranks whose copies are up to date
        self._gathers: list[Transfer] = []
        self._pause: Pause = nullcontext
        self._window = _AT_ONCE * max((unit.flat.numel() for unit in self._units), default=0)
        self._travelling: deque[_Unit] = deque()  # whose gradients have been sent, and may not have arrived
        self._counted = (0, 0)  # bytes sent and received at the last call of `traffic`
        self._hooks = [
            _hooked(parameter, functools.partial(self._gradient_arrived, index))
            for index, parameter in enumerate(self.parameters)
        ]

    @property
    def fragments(self) -> list[Fragment]:
        """What this rank owns, in the order of the memory."""
        return [fragment for unit in self._units for fragment, _ in unit.fragments]

    @property
    def unit_members(self) -> list[list[int]]:
        """The parameters of each unit, by their places in the model."""
        return [unit.indices for unit in self._units]

    def extent(self, index: int, rank: int) -> tuple[int, int]:
        """The first element of a parameter that a rank owns, and the end; the end is not above the first if none is."""
        unit, place = self._home[index]
        start, elements = unit.starts[place], self.parameters[index].numel()
        return max(0, unit.bounds[rank] - start), min(elements, unit.bounds[rank + 1] - start)

    @property
    def layout_digest(self) -> int:
        return self.ownership.digest()

    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank has sent to others and received since the last call."""
        now = self.exchange.sent_bytes, self.exchange.received_bytes
        before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1]

    # parameters

    def gather(self, shares: Sequence[int] | None = None) -> None:
        takers: Sequence[int] = range(self._group.world_size)
        if shares is not None:
            takers = self._active = tuple(rank for rank, samples in enumerate(shares) if samples)
        lacking = [rank for rank in takers if rank not in self._whole]
        if not lacking:
            return
        for unit in reversed(self._units):  # as forward needs them
            self._gathers.append(self.exchange.gather(unit.flat, bounds=unit.bounds, takers=lacking))
        if self._group.rank in lacking:
            self._await_gathers()
        self._whole.update(lacking)

    def changed(self) -> None:
        self._whole.clear()

    def _await_gathers(self) -> None:
        for transfer in self._gathers:
            transfer.wait()
        self._gathers.clear()

    # a step

    def begin(self) -> None:
        self.used[:] = False
        self._lent[:] = False
        self._is_last, self._sent, self._is_finite_alone = False, 0, True
        for parameter in self.parameters:
            parameter.grad = None
        for unit in self._units:
            unit.is_sent = False
            if unit.gradients is not None:
                self.exchange.release(unit.gradients)
                unit.gradients = None
            for fragment, _ in unit.fragments:
                fragment.owned.grad = None

    def expect_last(self) -> None:
        self._is_last = True
        self._arrived[:] = False
        for unit in self._units:
            unit.missing = len(unit.indices)

    def backward(self, loss: torch.Tensor, pause: Pause = nullcontext) -> None:
        self._pause = pause
        with lending(self._lenders):
            loss.backward()

    @property
    def has_sent(self) -> bool:
        return self._sent > 0 and not self._is_silent

    def finish(self) -> None:
        """Send what has not been sent and wait until this rank has the sums of all that it owns. Collective.

        Raises PeerLostError, after which the sums are invalid.
        """
        self._pause = nullcontext
        while self._sent < len(self._units):
            self._send_next()
        if self._is_silent:
            self._show_own()
            return
        self._collect(at_most=-1)  # none, not even an empty one
        self._await_gathers()  # an owner may change its slice only after all others have read it
        for unit in self._units:
            for fragment, place in unit.fragments:
                own = unit.total[place]
                own = own if own.dtype == fragment.owned.dtype else own.to(fragment.owned.dtype)
                fragment.owned.grad = own.as_strided(fragment.owned.shape, fragment.owned.stride())

    def _show_own(self) -> None:
        """Set `.grad` of the model's parameters to this rank's own gradients, which no other rank gets."""
        for index in np.flatnonzero(self.used).tolist():
            parameter, view = self.parameters[index], self._view(index)
            parameter.grad = view if view is None or view.dtype == parameter.dtype else view.to(parameter.dtype)

    @contextmanager
    def without_sending(self) -> Iterator[None]:
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def norm(self) -> float:
        own = self._held()
        norm = norm_of(own)
        # squares overflow long before their elements do
        return norm if math.isfinite(norm) else norm_of(own, torch.float64)

    def norm_so_far(self) -> float:
        assert self._sent == 0, "gradients that were sent are gone"
        views = (self._view(index) for index in np.flatnonzero(self.used).tolist())
        return norm_of([view for view in views if view is not None])

    def is_finite(self) -> bool:
        """As in `GradientSync`; of this rank's own part of the sums. Without sending: of its own gradients."""
        return self._is_finite_alone if self._is_silent else are_finite(self._held())

    def scale_(self, factor: float) -> None:
        if held := self._held():
            torch._foreach_mul_(held, factor)

    def drop_unused_(self, used: npt.NDArray[np.bool_]) -> None:
        unused = {id(self.parameters[index]) for index in np.flatnonzero(~used)}
        for fragment in self.fragments:
            if id(fragment.parameter) in unused:
                fragment.owned.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._lenders.clear()  # they refer to this reducer and would keep it alive
        self.exchange.close()

    # how they are made

    def _make_unit(self, indices: list[int], moved: Callable[[torch.nn.Parameter], None]) -> _Unit:
        members = [self.parameters[index] for index in indices]
        starts = list(np.cumsum([0, *(parameter.numel() for parameter in members)]).tolist())
        flat = self.exchange.memory(starts[-1], members[0].dtype, members[0].device)
        for start, parameter in zip(starts, members):
            view = flat.as_strided(parameter.shape, parameter.stride(), start)
            view.copy_(parameter.detach())
            parameter.data = view
            moved(parameter)
        return _Unit(indices, starts, flat)

    def _divide(self, unit: _Unit, bounds: tuple[int, ...], cuts_tensors: bool) -> None:
        """Find what this rank owns of a unit."""
        unit.bounds = bounds
        first, last = bounds[self._group.rank], bounds[self._group.rank + 1]
        unit.total = torch.zeros(last - first, dtype=self._dtype or unit.flat.dtype, device=unit.flat.device)
        for start, index in zip(unit.starts, unit.indices):
            parameter = self.parameters[index]
            begin, end = max(start, first), min(start + parameter.numel(), last)
            if begin >= end:
                continue
            # without dimensions: its state has none either, and would not fit one of shape (1,)
            is_whole = not (cuts_tensors and parameter.is_contiguous() and parameter.dim())
            view = parameter.detach() if is_whole else unit.flat[begin:end]
            owned = torch.nn.Parameter(view)
            fragment = Fragment(parameter, begin - start, end - start, owned)
            unit.fragments.append((fragment, slice(begin - first, end - first)))

    # gradients

    def _gradient_arrived(self, index: int, parameter: torch.Tensor) -> None:
        unit, _ = self._home[index]
        if unit.is_sent:
            raise HetSeqError(
                "a gradient arrived after its bucket was sent: backward ran twice in one micro-batch; return the sums"
                " of the loss, and let HetSeq call backward"
            )
        self._take_in(index, parameter)
        self.used[index] = True
        if not self._is_last or self._arrived[index]:
            return
        self._arrived[index] = True
        unit.missing -= 1
        while self._sent < len(self._units) and self._units[self._sent].missing == 0:
            self._send_next()

    def _take_in(self, index: int, parameter: torch.Tensor) -> None:
        """Move or add the gradient that has arrived into the memory of its unit."""
        gradient, view = parameter.grad, self._room(index)
        assert gradient is not None
        if gradient.is_sparse or gradient.data_ptr() != view.data_ptr():  # else it was computed there
            take_in_(view, gradient, is_first=not self.used[index])
        parameter.grad = view if view.dtype == parameter.dtype else None

    def _room(self, index: int) -> torch.Tensor:
        unit, place = self._home[index]
        if unit.gradients is None:
            unit.gradients = self.exchange.memory(unit.room, self._dtype or unit.flat.dtype, unit.flat.device)
        parameter = self.parameters[index]
        return unit.gradients.as_strided(parameter.shape, parameter.stride(), unit.starts[place])

    def _view(self, index: int) -> torch.Tensor | None:
        return None if self._home[index][0].gradients is None else self._room(index)

    def _lend(self, index: int) -> torch.Tensor | None:
        """Memory for the first gradient of the step, as a separate tensor, which autograd takes without a copy."""
        unit, _ = self._home[index]
        if self._lent[index] or self.used[index] or unit.is_sent or self._dtype not in (None, unit.flat.dtype):
            return None
        self._lent[index] = True
        return self._room(index)

    def _send_next(self) -> None:
        unit = self._units[self._sent]
        is_giver = self._group.rank in self._active
        for index in () if self._is_silent else unit.indices:
            self.parameters[index].grad = None
        if self._is_silent:
            views = [self._view(index) for index in unit.indices if self.used[index]]
            self._is_finite_alone &= are_finite([view for view in views if view is not None])
        else:
            self._collect(at_most=self._window - unit.flat.numel())
            for index in unit.indices if is_giver else ():
                if not self.used[index]:
                    self._room(index).zero_()
            flat = unit.gradients if is_giver else None
            unit.sending = self.exchange.sum_to_owners(
                flat, unit.total, bounds=unit.bounds, givers=self._active
            )  # fmt: skip
            unit.leaving, unit.gradients = unit.gradients, None
            self._travelling.append(unit)
        unit.is_sent = True
        self._sent += 1  # only now: if memory ran out above, nothing was sent

    def _collect(self, *, at_most: int) -> None:
        """Use the memory of units again whose owners have their sums; wait until at most so many elements are left."""
        while self._travelling:
            unit = self._travelling[0]
            assert unit.sending is not None
            is_over = unit.sending.is_over()
            if not is_over and sum(one.flat.numel() for one in self._travelling) <= at_most:
                return
            with nullcontext() if is_over else self._pause():
                unit.sending.wait()
            unit.sending = None
            if unit.leaving is not None:
                self.exchange.release(unit.leaving)
                unit.leaving = None
            self._travelling.popleft()

    def _held(self) -> list[torch.Tensor]:
        return [one.owned.grad for one in self.fragments if one.owned.grad is not None]


def _hooked(parameter: torch.nn.Parameter, arrived: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have `arrived` called after each gradient, also of a parameter that is frozen now and trained again later."""
    is_trained = parameter.requires_grad
    try:
        hook: RemovableHandle = parameter.requires_grad_().register_post_accumulate_grad_hook(arrived)
        return hook
    finally:
        parameter.requires_grad_(is_trained)


def ownership_of(
    parameters: Sequence[torch.Tensor], fractions: Sequence[float], *, bucket_bytes: int, cuts_tensors: bool
) -> Ownership:
    """Who owns what with these arguments of `OwnedGradients`; nothing moves. Any rank, alone."""
    units = [[one for _, one in members] for members in buckets_of(parameters, bucket_bytes)]
    sizes = [
        UnitSizes(
            tuple(one.numel() for one in unit), tuple(cuts_tensors and one.is_contiguous() for one in unit)
        )
        for unit in units
    ]  # fmt: skip
    return cut(sizes, fractions)


def _rooms(elements: Sequence[int]) -> list[int]:
    """For each unit the elements of the largest one of about its size."""
    rooms: dict[int, int] = {}
    largest = 0
    for size in sorted(set(elements), reverse=True):
        largest = largest if size >= _ALIKE * largest > 0 else size
        rooms[size] = largest
    return [rooms[size] for size in elements]
