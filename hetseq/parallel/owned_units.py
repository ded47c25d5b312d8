"""Units: parameters in common pieces of memory, each cut among the ranks that own its elements.

Responsible for where parameters, their gradients and the sums of these lie, and for what a rank owns of them. Refuses
to decide when anything travels: that is the difference between `owned_gradients`, in which all ranks have all
parameters, and `owned_parameters`, in which parameters come and go.

The one idea: parameters of a unit lie one after the other in one memory, so that what an owner has of them is one slice
of it (`balance.ownership`), whatever the tensors are. Their gradients are collected in memory of the same layout.
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
from hetseq.parallel.gradient_sync import Pause, are_finite, norm_of, take_in_
from hetseq.parallel.group_sums import GroupSum, sum_across_groups
from hetseq.system.processes import return_freed_memory

_AT_ONCE = 2  # of the largest unit: elements whose gradients travel while the next unit is computed
_GROUP_BITS = 16
_ALIKE = 0.8  # of the elements of a unit: another one of so many uses the same memory for its gradients


@dataclass(frozen=True)
class TensorPlaces:
    """Who holds which parts of a model that ranks divide (`divided_model`).

    `of_ranks` are the places whose parts each rank holds, (ranks,); `of_parameters` the place of each parameter,
    (parameters,), None where every rank has it whole. Of the ranks that compute the same rows, the one in `leaders`
    gives the gradients of what all of them have whole.
    """

    of_ranks: tuple[tuple[int, ...], ...]
    of_parameters: tuple[int | None, ...]
    leaders: frozenset[int]

    def holders(self, place: int | None) -> list[int]:
        """The ranks that hold the parts at a place."""
        return [rank for rank, places in enumerate(self.of_ranks) if place is None or place in places]

    def are_whole(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks hold all parts together."""
        every = {place for places in self.of_ranks for place in places}
        return {place for rank in ranks for place in self.of_ranks[rank]} == every

    def givers(self, place: int | None) -> frozenset[int]:
        """The ranks whose gradients of parameters at a place are added up."""
        return self.leaders if place is None else frozenset(self.holders(place))


@dataclass(frozen=True)
class Division:
    """How ranks divide what has owners, and where this rank keeps its part.

    `fractions` has one number for each rank, on all ranks the same. Without `cuts_tensors` each parameter has one
    owner. Of this rank's own elements at most `device_elements` are on its device and the others, in whole units, in
    host memory; None: all are on the device. Each of the `groups` of ranks holds everything once, and each rank is in
    one of them; none: all ranks are one group. `hosts` has a number for the host of each rank; none: all are on one.
    `tensors` says who holds which parts of a model that ranks divide.
    """

    fractions: tuple[float, ...]
    cuts_tensors: bool = True
    device_elements: int | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    hosts: tuple[int, ...] = ()
    tensors: TensorPlaces | None = None

    @property
    def of_groups(self) -> tuple[tuple[float, ...], ...]:
        """The fractions by group, (groups, ranks): 0 for the ranks of other groups."""
        return tuple(
            tuple(one if rank in group else 0.0 for rank, one in enumerate(self.fractions))
            for group in self.groups or (range(len(self.fractions)),)
        )

    def place_of(self, index: int) -> int | None:
        """The place of a parameter among the parts of a divided model; None if all ranks have it whole."""
        return None if self.tensors is None else self.tensors.of_parameters[index]

    def number_of(self, rank: int) -> int:
        """The number of the group that a rank is in."""
        return next((number for number, group in enumerate(self.groups) if rank in group), 0)


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that this rank owns, as the optimizer sees it."""

    parameter: torch.nn.Parameter  # of the model
    begin: int  # of its elements in row-major order
    end: int
    #: in the memory of what this rank owns; (end - begin,), or of the parameter's shape if it may or can not be cut
    owned: torch.nn.Parameter


@dataclass
class Unit:
    """Parameters in one memory, and their gradients of the step under way."""

    indices: list[int]
    starts: list[int]  # of each parameter in the memory, in elements
    flat: torch.Tensor  # (elements,): all parameters, of other owners as copies
    is_frozen: bool = False  # there are no gradients of it
    is_base: bool = False  # frozen, and built by each rank from files of its own
    place: int | None = None  # of its parameters among the parts of a divided model
    bounds: tuple[int, ...] = ()  # of this rank's group
    cuts: tuple[tuple[int, ...], ...] = ()  # the bounds of all groups
    own: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (own elements,): what this rank owns
    total: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (own elements,): sums of gradients
    fragments: list[tuple[Fragment, slice]] = field(default_factory=list)  # with its place in `total`
    is_on_host: bool = False  # what this rank owns of it, also where the parameters are on a GPU
    room: int = 0  # elements of the memory for its gradients, which units of about its size use in turn
    gradients: torch.Tensor | None = None  # (room,), from the first gradient until they are sent
    missing: int = 0  # parameters whose gradient of the micro-batch has not arrived yet
    is_sent: bool = False
    sending: Transfer | None = None
    leaving: torch.Tensor | None = None  # gradients that are being sent

    def take_memory(self) -> None:
        """Give the parameters memory again, if they have none."""
        storage = self.flat.untyped_storage()
        if not storage.size():
            storage.resize_(self.flat.numel() * self.flat.element_size())

    def give_memory_back(self) -> None:
        """Leave the parameters without memory."""
        self.flat.untyped_storage().resize_(0)


class OwnedUnits:
    """What `OwnedGradients` and `OwnedParameters` have in common.

    `.grad` of the `fragments` is the gradient of a step; the model's parameters have none. `groups` are the parameters
    of each unit, by their places. Sums have the type `dtype` (default: the parameters' own). The first `trained`
    parameters get gradients (default: all), the others are frozen.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        groups: Sequence[Sequence[int]],
        group: Group,
        division: Division,
        *,
        dtype: torch.dtype | None,
        trained: int | None = None,
    ) -> None:
        """Move the parameters into memory of their units. Collective."""
        self.parameters, self.rank, self._group, self._dtype = list(parameters), group.rank, group, dtype
        #: the device that this rank computes on
        self.device = next(one.device for one in self.parameters if not one.is_meta)
        self.exchange: SliceExchange = group.slices(self.device)
        self.trained = len(self.parameters) if trained is None else trained
        #: (trained parameters,): whether a gradient arrived on this rank in this step
        self.used: npt.NDArray[np.bool_] = np.zeros(self.trained, np.bool_)
        self.division = division
        self.number = division.number_of(self.rank)  # of the group
        self._near = frozenset(division.groups[self.number] if division.groups else range(group.world_size))
        #: who owns what, by group
        self.ownerships = ownerships_of(self.parameters, groups, division)
        self.ownership = self.ownerships[self.number]
        self._units: list[Unit] = []
        own = [bounds[self.rank + 1] - bounds[self.rank] for bounds in self.ownership.bounds]
        stay = that_stay(own, division.device_elements)
        for place, (indices, bounds, stays) in enumerate(zip(groups, self.ownership.bounds, stay, strict=True)):
            unit = self._make_unit(list(indices))
            unit.is_on_host, unit.cuts = not stays, tuple(one.bounds[place] for one in self.ownerships)
            unit.place = division.place_of(indices[0])
            self._units.append(unit)
            self._divide(unit, bounds)
        summed = [unit for unit in self._units if not unit.is_frozen]
        for unit, room in zip(summed, _rooms([unit.flat.numel() for unit in summed])):
            unit.room = room
        self._home = {index: (unit, place) for unit in self._units for place, index in enumerate(unit.indices)}
        # the parameters have left the memory in which they were made, and a rank that owns little never fills it again
        return_freed_memory()
        #: what this rank owns, by the place of the parameter in the model
        places = {parameter: index for index, parameter in enumerate(self.parameters)}
        self.own_fragments = {places[fragment.parameter]: fragment for fragment in self.fragments}
        self._is_silent, self._is_finite_alone = False, True
        self._arrived = np.zeros(len(self.parameters), np.bool_)  # its gradient of the micro-batch
        self._lent = np.zeros(len(self.parameters), np.bool_)
        self._lenders = {
            id(p): functools.partial(self._lend, index) for index, p in enumerate(self.parameters[: self.trained])
        }
        self._active: Sequence[int] = ()  # the ranks that compute samples
        self._pause: Pause = nullcontext
        self._window = _AT_ONCE * max((unit.flat.numel() for unit in summed), default=0)
        self._travelling: deque[Unit] = deque()  # whose gradients have been sent, and may not have arrived
        self._counted = (0, 0)  # bytes sent and received at the last call of `traffic`
        self._hooks = [
            _hooked(
                parameter, functools.partial(self._gradient_arrived if index < self.trained else self._refuse, index)
            )
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
        bounds = unit.cuts[self.division.number_of(rank)]
        return max(0, bounds[rank] - start), min(elements, bounds[rank + 1] - start)

    @property
    def layout_digest(self) -> int:
        return Ownership(tuple(bounds for unit in self._units for bounds in unit.cuts)).digest()

    def owned_by(self, rank: int) -> int:
        """How many elements a rank owns."""
        return self.ownerships[self.division.number_of(rank)].owned_by(rank)

    def cut_in(self, generation: int) -> int:
        """A number for the parts that the ranks of this group hold by the cuts of a generation, not used twice."""
        return generation if len(self.division.groups) < 2 else ((generation + 1) << _GROUP_BITS) + self.number

    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank has sent to others and received since the last call."""
        now = self.exchange.sent_bytes, self.exchange.received_bytes
        before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1]

    def changed(self) -> None:
        """Take note that an update has changed what this rank owns. Every rank calls it."""
        raise NotImplementedError

    # a step

    def begin(self) -> None:
        self.used[:] = False
        self._lent[:] = False
        self._is_finite_alone = True
        for parameter in self.parameters:
            parameter.grad = None
        for unit in self._units:
            unit.is_sent = False
            if unit.gradients is not None:
                self.exchange.release(unit.gradients)
                unit.gradients = None
            for fragment, _ in unit.fragments:
                fragment.owned.grad = None

    @contextmanager
    def without_sending(self) -> Iterator[None]:
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def norm(self) -> float:
        if self.number:  # the first group has counted them
            return 0.0
        own = self._held()
        norm = norm_of(own)
        # squares overflow long before their elements do
        return norm if math.isfinite(norm) else norm_of(own, torch.float64)

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

    def _make_unit(self, indices: list[int]) -> Unit:
        """The memory of a unit, with its parameters in it."""
        raise NotImplementedError

    def _take_own(self, unit: Unit, first: int, last: int) -> torch.Tensor:
        """The memory of what this rank owns of a unit, its elements `first` to `last`. Shape (last - first,)."""
        raise NotImplementedError

    def _divide(self, unit: Unit, bounds: tuple[int, ...]) -> None:
        """Find what this rank owns of a unit."""
        unit.bounds = bounds
        first, last = bounds[self._group.rank], bounds[self._group.rank + 1]
        unit.own = self._take_own(unit, first, last)
        summed = 0 if unit.is_frozen else last - first
        unit.total = torch.zeros(summed, dtype=self._dtype or unit.flat.dtype, device=unit.own.device)
        for start, index in zip(unit.starts, unit.indices):
            parameter = self.parameters[index]
            begin, end = max(start, first), min(start + parameter.numel(), last)
            if begin >= end:
                continue
            # without dimensions: its state has none either, and would not fit one of shape (1,)
            is_whole = not (self.division.cuts_tensors and parameter.is_contiguous() and parameter.dim())
            own = unit.own[begin - first : end - first]
            if is_whole:
                own = own.as_strided(parameter.shape, parameter.stride())
            fragment = Fragment(parameter, begin - start, end - start, torch.nn.Parameter(own))
            unit.fragments.append((fragment, slice(begin - first, end - first)))

    def _take_from_rank_zero(self, unit: Unit, own: torch.Tensor) -> None:
        """Write to `own` what this rank owns of the values that rank zero has. Collective."""
        given = None
        if self.rank == 0:
            given = self.exchange.memory(unit.flat.numel(), unit.flat.dtype, unit.flat.device)
            given.copy_(unit.flat)
        for bounds in unit.cuts:
            mine = own if bounds == unit.bounds else own[:0]
            self.exchange.sum_to_owners(given, mine, bounds=bounds, givers=(0,)).wait()
        if given is not None:
            self.exchange.release(given)

    # gradients

    def _gradient_arrived(self, index: int, parameter: torch.Tensor) -> None:
        raise NotImplementedError

    def _refuse(self, index: int, _parameter: torch.Tensor) -> None:
        """Raise HetSeqError for the gradient of a frozen parameter."""
        raise NotImplementedError

    def _check_not_sent(self, unit: Unit) -> None:
        if unit.is_sent:
            raise HetSeqError(
                "a gradient arrived after its bucket was sent: backward ran twice in one micro-batch; return the sums"
                " of the loss, and let HetSeq call backward"
            )

    def _take_in(self, index: int, parameter: torch.Tensor) -> None:
        """Move or add the gradient that has arrived into the memory of its unit."""
        gradient, view = parameter.grad, self._room(index)
        assert gradient is not None
        if gradient.is_sparse or gradient.data_ptr() != view.data_ptr():  # else it was computed there
            take_in_(view, gradient, is_first=not self._has_gradient(index))
        parameter.grad = view if view.dtype == parameter.dtype else None

    def _has_gradient(self, index: int) -> bool:
        """Whether the memory of the unit holds a gradient of this parameter."""
        return bool(self.used[index])

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
        is_taken = self._lent[index] or self._has_gradient(index) or unit.is_sent
        if is_taken or self._dtype not in (None, unit.flat.dtype):
            return None
        self._lent[index] = True
        return self._room(index)

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
            self._summed(unit)

    def _summed(self, unit: Unit) -> None:
        """The sums of a unit have reached this rank."""

    def _holders(self, unit: Unit, ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks among these that are in the group of this one, and have a use for the parameters of a unit."""
        tensors = self.division.tensors
        kept = None if tensors is None else tensors.holders(unit.place)
        return tuple(rank for rank in ranks if rank in self._near and (kept is None or rank in kept))

    def _givers(self, unit: Unit, ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks among these that are in the group of this one, and whose gradients of a unit are added up."""
        tensors = self.division.tensors
        kept = None if tensors is None else tensors.givers(unit.place)
        return tuple(rank for rank in ranks if rank in self._near and (kept is None or rank in kept))

    def _sum_across_groups(self) -> None:
        """Add up the sums of all groups. Collective. Raises PeerLostError."""
        if len(self.division.groups) > 1:
            units = [unit for unit in self._units if not unit.is_frozen]
            sum_across_groups(
                [GroupSum(self.exchange, unit.total, unit.cuts, self.number, self.rank) for unit in units]
            )

    def _show_sums(self) -> None:
        """Set `.grad` of what this rank owns."""
        for unit in self._units:
            for fragment, place in () if unit.is_frozen else unit.fragments:
                own = unit.total[place]
                own = own if own.dtype == fragment.owned.dtype else own.to(fragment.owned.dtype)
                fragment.owned.grad = own.as_strided(fragment.owned.shape, fragment.owned.stride())

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


def ownerships_of(
    parameters: Sequence[torch.Tensor], groups: Sequence[Sequence[int]], division: Division
) -> list[Ownership]:
    """Who owns what, by group of ranks, with these arguments of `OwnedUnits`; nothing moves. Any rank, alone."""
    units = [[parameters[index] for index in indices] for indices in groups]
    sizes = [
        UnitSizes(
            tuple(one.numel() for one in unit), tuple(division.cuts_tensors and one.is_contiguous() for one in unit)
        )
        for unit in units
    ]  # fmt: skip
    if division.tensors is None:
        return [cut(sizes, fractions) for fractions in division.of_groups]
    places = [division.place_of(indices[0]) for indices in groups]
    ranks = division.groups or [range(len(division.fractions))]
    return [
        _cut_by_place(sizes, places, fractions, group, division.tensors)
        for fractions, group in zip(division.of_groups, ranks, strict=True)
    ]


def _cut_by_place(
    sizes: Sequence[UnitSizes],
    places: Sequence[int | None],
    fractions: Sequence[float],
    group: Sequence[int],
    tensors: TensorPlaces,
) -> Ownership:
    """The cuts of one group of ranks, in which a part of a divided model belongs to ranks that compute with it."""
    bounds: dict[int, tuple[int, ...]] = {}
    for place in dict.fromkeys(places):
        holders = [rank for rank in tensors.holders(place) if rank in group]
        weights = [one if rank in holders else 0.0 for rank, one in enumerate(fractions)]
        if not any(weights):  # they own as little as they can
            weights = [float(rank in holders) for rank in range(len(fractions))]
        those = [number for number, at in enumerate(places) if at == place]
        bounds.update(zip(those, cut([sizes[number] for number in those], weights).bounds))
    return Ownership(tuple(bounds[number] for number in range(len(sizes))))


def that_stay(elements: Sequence[int], most: int | None) -> list[bool]:
    """For each unit whether the own elements of it are on the device, which has room for `most`; None: for all. Pure.

    The first ones stay, and each later one that still fits.
    """
    stay = []
    left = sum(elements) if most is None else most
    for own in elements:
        stay.append(own <= left)
        left -= own if own <= left else 0
    return stay


def starts_of(parameters: Sequence[torch.Tensor]) -> list[int]:
    """The first element of each in the memory of a unit, and the end of the last one."""
    return list(np.cumsum([0, *(parameter.numel() for parameter in parameters)]).tolist())


def _rooms(elements: Sequence[int]) -> list[int]:
    """For each unit the elements of the largest one of about its size."""
    rooms: dict[int, int] = {}
    largest = 0
    for size in sorted(set(elements), reverse=True):
        largest = largest if size >= _ALIKE * largest > 0 else size
        rooms[size] = largest
    return [rooms[size] for size in elements]
