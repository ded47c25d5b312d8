"""Gradients that are summed to their owners: each rank keeps the sums, and later the state, of its part only.

Every rank has all parameters, but of the elements that other ranks own only a copy, which is brought up to date at the
start of a step. A unit (`owned_units`) is about as large as a bucket, in a fixed order that follows backward. Memory
for its gradients exists from the first gradient until all owners have their sums. So state of the optimizer takes room
in proportion to what a rank owns, and gradients only as long as they travel.

Every rank names the transfers of a step in the same order, whether it has samples or not: first the parameters, unit
by unit as forward needs them, then the gradients, unit by unit as backward completes them. Sums are added in rank
order by the owner, so a repeated step has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from hetseq.comm.group import Group
from hetseq.comm.slices import Transfer
from hetseq.parallel.gradient_memory import lending
from hetseq.parallel.gradient_sync import Pause, WithoutRounds, are_finite, buckets_of, norm_of
from hetseq.parallel.owned_units import Division, OwnedUnits, TensorPlaces, Unit, starts_of


class OwnedGradients(WithoutRounds, OwnedUnits):
    """As `GradientSync`, with owners. `.grad` of the `fragments` is the gradient of the step; the model's have none."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        group: Group,
        division: Division,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        moved: Callable[[torch.nn.Parameter], None] = lambda _: None,
    ) -> None:
        """Move the parameters into memory of their units; see `OwnedUnits`. Collective.

        `moved` is called for each parameter once it lies in its unit, so that nothing keeps its earlier memory.
        """
        self._moved = moved
        units = units_of(parameters, bucket_bytes, division.tensors)
        super().__init__(parameters, units, group, division, dtype=dtype)
        self._is_last = False
        self._sent = 0
        self._whole: set[int] = set()  # the ranks whose copies are up to date
        self._gathers: list[Transfer] = []

    # parameters

    def gather(self, shares: Sequence[int] | None = None) -> None:
        takers: Sequence[int] = range(self._group.world_size)
        if shares is not None:
            takers = self._active = tuple(rank for rank, samples in enumerate(shares) if samples)
        lacking = [rank for rank in takers if rank not in self._whole]
        if not lacking:
            return
        for unit in reversed(self._units):  # as forward needs them
            takers = self._holders(unit, lacking)
            self._gathers.append(self.exchange.gather(unit.flat, bounds=unit.bounds, takers=takers))
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
        super().begin()
        self._is_last, self._sent = False, 0

    def expect_last(self) -> None:
        self._is_last = True
        self._arrived[:] = False
        for unit in self._units:
            unit.missing = 0 if unit.flat.is_meta else len(unit.indices)

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
        self._sum_across_groups()
        self._await_gathers()  # an owner may change its slice only after all others have read it
        self._show_sums()

    def _show_own(self) -> None:
        """Set `.grad` of the model's parameters to this rank's own gradients, which no other rank gets."""
        for index in np.flatnonzero(self.used).tolist():
            parameter, view = self.parameters[index], self._view(index)
            parameter.grad = view if view is None or view.dtype == parameter.dtype else view.to(parameter.dtype)

    def norm_so_far(self) -> float:
        assert self._sent == 0, "gradients that were sent are gone"
        views = (self._view(index) for index in np.flatnonzero(self.used).tolist())
        return norm_of([view for view in views if view is not None])

    def whole_gradients(self) -> dict[int, torch.Tensor]:
        """This rank's gradients so far of what all ranks that divide a model have whole, by their places."""
        assert self._sent == 0, "gradients that were sent are gone"
        places = [index for index in np.flatnonzero(self.used).tolist() if self.division.place_of(index) is None]
        return {index: view for index in places if (view := self._view(index)) is not None}

    # how they are made

    def _make_unit(self, indices: list[int]) -> Unit:
        members = [self.parameters[index] for index in indices]
        starts = starts_of(members)
        if members[0].is_meta:  # the parts of another place
            return Unit(indices, starts, torch.empty(starts[-1], dtype=members[0].dtype, device="meta"))
        flat = self.exchange.memory(starts[-1], members[0].dtype, members[0].device)
        for start, parameter in zip(starts, members):
            view = flat.as_strided(parameter.shape, parameter.stride(), start)
            view.copy_(parameter.detach())
            parameter.data = view
            self._moved(parameter)
        return Unit(indices, starts, flat)

    def _take_own(self, unit: Unit, first: int, last: int) -> torch.Tensor:
        return unit.flat.new_empty(0, device=self.device) if unit.flat.is_meta else unit.flat[first:last]

    # gradients

    def _gradient_arrived(self, index: int, parameter: torch.Tensor) -> None:
        unit, _ = self._home[index]
        self._check_not_sent(unit)
        self._take_in(index, parameter)
        self.used[index] = True
        if not self._is_last or self._arrived[index]:
            return
        self._arrived[index] = True
        unit.missing -= 1
        while self._sent < len(self._units) and self._units[self._sent].missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        unit = self._units[self._sent]
        givers = self._givers(unit, self._active)
        is_giver = self._group.rank in givers
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
            unit.sending = self.exchange.sum_to_owners(flat, unit.total, bounds=unit.bounds, givers=givers)
            unit.leaving, unit.gradients = unit.gradients, None
            self._travelling.append(unit)
        unit.is_sent = True
        self._sent += 1  # only now: if memory ran out above, nothing was sent


def units_of(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, tensors: TensorPlaces | None = None
) -> list[list[int]]:
    """The parameters of each unit, by their places: as many as a bucket holds, in the order of backward.

    The parameters of a unit are parts of a divided model at the same place, or no such parts.
    """
    if tensors is None:
        return [[index for index, _ in members] for members in buckets_of(parameters, bucket_bytes)]
    found: list[list[int]] = []
    for place in dict.fromkeys(tensors.of_parameters):
        those = [index for index, at in enumerate(tensors.of_parameters) if at == place]
        buckets = buckets_of([parameters[index] for index in those], bucket_bytes)
        found += [[those[number] for number, _ in members] for members in buckets]
    return sorted(found, key=max, reverse=True)
