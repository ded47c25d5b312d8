"""Parameters that come and go: of what other ranks own, a rank holds one or two layers at a time.

Responsible for when parameters travel to the ranks that compute, when gradients travel to their owners, and when the
memory of either is free. The units (`owned_units`) are layers of the model, and a root: everything that is in no layer,
or in several. What a rank owns lies in memory of its own; a unit's memory is filled before a layer runs and emptied
after it, as in ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054), with parts of any size and ranks of any speed.

The one idea: a micro-batch of all ranks is a round, with one order of transfers that is the same on every rank. The
order alone decides about transfers, never the layers that a rank happens to hold, or whether it has samples. So a rank
without samples, or whose memory ran out amid a forward, carries the rest of the round out, and the others notice
nothing until they vote. Each round begins with a row of all ranks that says which have samples.
Frozen parameters have units of their own, without sums.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from hetseq.comm.group import Group
from hetseq.comm.slices import Transfer
from hetseq.errors import DisagreementError, HetSeqError, PeerLostError, TaskError
from hetseq.parallel.absent_parameters import are_within, hidden_from, mark
from hetseq.parallel.base_parameters import base_parameters
from hetseq.parallel.gradient_memory import lending
from hetseq.parallel.gradient_sync import Pause, are_finite, norm_of
from hetseq.parallel.model_layers import groups_of
from hetseq.parallel.owned_names import OwnedNames
from hetseq.parallel.owned_units import Division, OwnedUnits, Unit, starts_of
from hetseq.system import faults

Fill = Callable[[Sequence[torch.nn.Parameter]], None]  # draws parameters in the memory that they have


class _Kind(enum.Enum):
    FORWARD = "the parameters of a layer come, for its forward"
    BACKWARD = "they come again, for its backward"
    SUM = "its gradients go to their owners"


class _Stage(enum.IntEnum):
    """What this rank does."""

    IDLE, FORWARD, BACKWARD = range(3)


class _Op(NamedTuple):
    """One transfer of a round."""

    kind: _Kind
    unit: Unit


@dataclass(eq=False)
class _Layer:
    """A module whose parameters come and go together; the root has no place in the order of layers."""

    name: str
    number: int  # in that order; -1 for the root
    units: list[Unit] = field(default_factory=list)  # one for each type of its parameters
    is_whole: bool = False
    gathers: list[Transfer] = field(default_factory=list)  # of its parameters, under way


class OwnedParameters(OwnedUnits):
    """As `GradientSync`, with rounds. Every micro-batch runs within `round`, on ranks that have one.

    Modules outside of `layers` may use their parameters within a round only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Mapping[str, torch.nn.Module],
        parameters: OwnedNames | Sequence[torch.nn.Parameter],
        group: Group,
        division: Division,
        *,
        dtype: torch.dtype | None = None,
        begins: bool | Fill,
    ) -> None:
        """Move the parameters into memory of their units; see `OwnedUnits`. Collective.

        `layers` in the order in which forward runs them; a sequence of `parameters` is all trained. With `begins`
        each rank takes what it owns of the values that rank zero has, and of the base, which is equal on all ranks, of
        its own. With False it has no values before they are loaded. With a function the parameters have no memory yet:
        on every rank it draws the values of one unit after the other, and the rank takes what it owns.
        """
        self._begins, self._base = begins, {id(one) for one in base_parameters(model).values()}
        described = parameters if isinstance(parameters, OwnedNames) else OwnedNames(dict.fromkeys(parameters, ""))
        parameters, trained = list(described.by_parameter), len(described.trained)
        groups = groups_of(model, layers, parameters, trained)
        super().__init__(
            parameters, [group_ for of_layer in groups for group_ in of_layer], group, division, dtype=dtype,
            trained=trained,
        )  # fmt: skip
        self._root, *self._layers = (_Layer(name, number) for number, name in enumerate(("the model", *layers), -1))
        units = iter(self._units)
        for layer, of_layer in zip((self._root, *self._layers), groups):
            layer.units = [next(units) for _ in of_layer]
        self._layer_of = {id(unit): layer for layer in (self._root, *self._layers) for unit in layer.units}
        self._stage, self._is_forward_only = _Stage.IDLE, False
        self._last = -1  # the newest layer that has begun its forward
        self._passed = 0  # the newest one that has begun its backward
        self._ops: list[_Op] = []  # of the round
        self._at = 0  # how many of them have begun
        self._ends: dict[tuple[_Kind, int], int] = {}  # by kind and layer: the place behind its last one
        self._rounds = 0  # of the attempt, in which gradients were computed
        self._serving: list[Transfer] = []  # of parameters that only others need
        self._spare: list[torch.Tensor] = []  # for the sums of a round, until they are added
        self._partial: dict[int, torch.Tensor] = {}  # by unit: the sums of a later round than the first
        self._measures, self._squares = False, 0.0
        self._number_of = {  # of a parameter's layer, by the parameter's `id`; -1 for the root
            id(self.parameters[index]): layer.number
            for layer in (self._root, *self._layers)
            for unit in layer.units
            for index in unit.indices
        }
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names[id(parameter)] for parameter in self.parameters]
        # compiled code is for the class that its parameters have
        self._is_compiled = any(getattr(one, "_compiled_call_impl", None) is not None for one in model.modules())
        self._given: dict[int, int] = {}  # by `id`: versions of the tensors that a layer was given
        self._versions = [parameter._version for parameter in self.parameters]
        self._has_looked_for_ways = False
        self._outputs: dict[int, list[Node]] = {}  # of the layers, until that is done
        for number, module in enumerate(layers.values()):
            self._hooks += self._hooks_of(number, module)
        self._mark(self._units, is_here=False)

    # rounds

    def rounds(self, needed: int) -> int:
        """The most that a rank needs. Collective."""
        return int(self._group.all_gather_rows(np.array([needed], np.int64)).max())

    @contextmanager
    def round(self, pause: Pause = nullcontext, *, measures: bool = False) -> Iterator[None]:
        """Context of a micro-batch of this rank; the waits for others in it are in `pause()`.

        With `measures` its gradient can be asked for afterwards (`norm_so_far`). Collective, with `serve` or `finish`
        on ranks that have no micro-batch. Raises PeerLostError.
        """
        self._pause, self._measures, self._squares = pause, measures, 0.0
        self._begin_round(has_samples=True)
        try:
            try:
                yield
            finally:
                self._outputs = {}  # they would keep what forward did, though memory may have run out in it
            self._check_unchanged(self._root)
        except PeerLostError:
            raise
        except HetSeqError:
            with suppress(PeerLostError):
                self._end_round()  # so that the other ranks reach the place of this error, which may be theirs too
            raise
        # after an error of memory the next call does it, when the frames of this one and their memory are gone
        self._end_round()

    def serve(self) -> None:
        """Take part in the rounds of others, until no rank has a micro-batch. Collective. Raises PeerLostError."""
        while self._begin_round(has_samples=False):
            self._end_round()

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Context in which rounds are forwards only, on all ranks; a model may run several times in one of them."""
        self._is_forward_only = True
        try:
            yield
        finally:
            self._is_forward_only = False

    def _begin_round(self, *, has_samples: bool) -> bool:
        """Begin a round; False if no rank has samples for one."""
        self._end_round()
        with self._pause():
            rows = self._group.all_gather_rows(np.array([has_samples, self._is_forward_only], np.int64))
        if len(set(rows[:, 1].tolist())) > 1:
            raise DisagreementError("some ranks train while others evaluate: let all ranks take the same way")
        self._active = tuple(np.flatnonzero(rows[:, 0]).tolist())
        if not self._active:
            return False
        self._stage, self._last, self._at = _Stage.FORWARD, -1, 0
        self._passed, self._outputs = len(self._layers), {}
        self._ops = self._order()
        if not self._is_forward_only:
            self._rounds += 1
            self._arrived[:] = False
            self._lent[:] = False
            for unit in self._units:
                unit.is_sent, unit.missing = False, len(unit.indices)
        if has_samples:
            for layer in (self._root, *self._layers[:1]):  # some models look at the first layer before they run it
                self._issue_to(_Kind.FORWARD, layer.number)
                self._await(layer)
        if not self._is_forward_only:
            faults.point("round")
        return True

    def _order(self) -> list[_Op]:
        """The transfers of a round: parameters layer by layer, and again in backward; there, sums one layer later."""
        last, ops = len(self._layers) - 1, list[_Op]()

        def add(kind: _Kind, number: int) -> None:
            layer = self._layers[number] if number >= 0 else self._root
            ops.extend(_Op(kind, unit) for unit in layer.units if kind is not _Kind.SUM or not unit.is_frozen)
            self._ends[kind, number] = len(ops)

        for number in range(-1, last + 1):
            add(_Kind.FORWARD, number)
        if not self._is_forward_only:
            for number in range(last, -1, -1):
                if number:
                    add(_Kind.BACKWARD, number - 1)
                add(_Kind.SUM, number)
            add(_Kind.SUM, -1)
        return ops

    def _end_round(self) -> None:
        """Carry out the rest of the round, and give its memory back."""
        if self._stage is _Stage.IDLE:
            return
        while self._at < len(self._ops):
            self._free_all(self._layers)  # the rest may be all layers, where the lowest ones have nothing to train
            self._issue()
        for layer in (self._root, *self._layers):
            self._free(layer)
        with self._pause():
            for transfer in self._serving:
                transfer.wait()
        self._serving.clear()
        self._collect(at_most=-1)
        self._stage = _Stage.IDLE

    # transfers

    def _issue_to(self, kind: _Kind, number: int) -> None:
        """Begin all transfers as far as a layer's."""
        while self._at < self._ends[kind, number]:
            self._issue()

    def _issue(self) -> None:
        """Begin the next transfer of the order; if memory runs out, it is still the next one."""
        kind, unit = self._ops[self._at]
        if kind is _Kind.SUM:
            self._send(unit)
        else:
            self._gather(kind, unit, self._layer_of[id(unit)])
        self._at += 1

    def _gather(self, kind: _Kind, unit: Unit, layer: _Layer) -> None:
        is_taker = self._group.rank in self._active
        if is_taker:
            if unit is layer.units[0]:
                self._await(layer)  # an earlier transfer into the same memory
                # those that this micro-batch leaves out; the one before may be in use
                later, earlier = self._layers[layer.number + 2 :], self._layers[: max(0, layer.number - 1)]
                self._free_all(later if kind is _Kind.BACKWARD else earlier)
            layer.is_whole = False
            unit.take_memory()
        transfer = self.exchange.gather(
            unit.flat if is_taker else None, bounds=unit.bounds, takers=self._holders(unit, self._active), own=unit.own
        )
        (layer.gathers if is_taker else self._serving).append(transfer)

    def _await(self, layer: _Layer) -> None:
        """Wait until the parameters of a layer are here."""
        if not layer.gathers:
            return
        if all(transfer.is_over() for transfer in layer.gathers):
            for transfer in layer.gathers:
                transfer.wait()
        else:
            with self._pause():
                for transfer in layer.gathers:
                    transfer.wait()
        layer.gathers.clear()
        layer.is_whole = True
        self._mark(layer.units, is_here=True)

    def _free(self, layer: _Layer) -> None:
        """Give the memory of a layer's parameters back; not before all that is written to it has arrived."""
        self._await(layer)
        layer.is_whole = False
        self._mark(layer.units, is_here=False)
        for unit in layer.units:
            unit.give_memory_back()

    def _free_all(self, layers: Iterable[_Layer]) -> None:
        for layer in layers:
            if layer.is_whole or layer.gathers:
                self._free(layer)

    def _mark(self, units: Iterable[Unit], *, is_here: bool) -> None:
        """Have a use of parameters that are not here refused."""
        for index in (index for unit in units if not self._is_compiled for index in unit.indices):
            mark(self.parameters[index], None if is_here else self._names[index])

    def _send(self, unit: Unit) -> None:
        is_giver = self._group.rank in self._active
        views = [self._room(index) for index in unit.indices if self._arrived[index]] if is_giver else []
        if self._measures and views:
            self._squares += norm_of(views) ** 2
        if self._is_silent:
            self._is_finite_alone &= are_finite(views)
            if unit.gradients is not None:
                self.exchange.release(unit.gradients)
                unit.gradients = None
            unit.is_sent = True
            return
        self._collect(at_most=self._window - unit.flat.numel())
        if is_giver:
            for index in unit.indices:
                if not self._arrived[index]:
                    self._room(index).zero_()
        target = unit.total if self._rounds == 1 else self._spare_like(unit.total)
        unit.sending = self.exchange.sum_to_owners(
            unit.gradients if is_giver else None, target, bounds=unit.bounds, givers=self._givers(unit, self._active)
        )
        if target is not unit.total:
            self._partial[id(unit)] = target
        unit.leaving, unit.gradients, unit.is_sent = unit.gradients, None, True
        self._travelling.append(unit)
        faults.point("layer_sum")

    def _summed(self, unit: Unit) -> None:
        if (partial := self._partial.pop(id(unit), None)) is not None:
            unit.total.add_(partial)
            self._spare.append(partial)

    def _spare_like(self, total: torch.Tensor) -> torch.Tensor:
        for place, one in enumerate(self._spare):
            if (one.shape, one.dtype, one.device) == (total.shape, total.dtype, total.device):
                return self._spare.pop(place)
        return torch.empty_like(total)

    # what the layers do

    def _hooks_of(self, number: int, module: torch.nn.Module) -> list[Any]:
        def before(_module: Any, args: Any, kwargs: Any) -> None:
            self._before_forward(number)
            self._given = {id(one): one._version for one in _tensors(args, kwargs)} if torch.is_grad_enabled() else {}

        def after(_module: Any, _args: Any, output: Any) -> None:
            self._after_forward(number, output)

        # they are no part of what a compiled layer computes
        apart: Callable[[Any], Any] = torch.compiler.disable
        return [
            module.register_forward_pre_hook(apart(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(apart(after)),
        ]

    def _before_forward(self, number: int) -> None:
        layer = self._layers[number]
        if self._stage is _Stage.BACKWARD:  # it runs again, for activations that were not kept
            if number < self._passed or (layer.units and not layer.is_whole):
                raise HetSeqError(
                    f"--shard-model all: {layer.name} runs again in backward before its parameters are here: checkpoint"
                    " activations with use_reentrant=False, or by --checkpoint-modules"
                )
            return
        if self._stage is _Stage.IDLE:
            raise HetSeqError(
                f"--shard-model all: {layer.name} runs outside of loss and metrics, where its parameters are not here:"
                " use --shard-model state"
            )
        if number <= self._last:
            self._run_again(number)
        self._last = number
        self._free_all(self._layers[:number])  # what this forward leaves out
        self._issue_to(_Kind.FORWARD, number)
        if not self._is_forward_only:
            faults.point("layer_forward")
        self._await(layer)
        if number + 1 < len(self._layers):
            self._issue_to(_Kind.FORWARD, number + 1)  # travels while this layer computes

    def _run_again(self, number: int) -> None:
        """A forward has come back to an earlier layer."""
        if self._is_forward_only:
            self._begin_round(has_samples=True)
            return
        name, before = self._layers[number].name, self._layers[self._last].name
        what = "runs twice in one micro-batch" if number == self._last else f"runs after {before}, which is behind it"
        raise HetSeqError(
            f"--shard-model all: {name} {what}: each micro-batch may run each layer once, in their order: name them"
            " with --shard-modules in the order in which they run, or use --shard-model state"
        )

    def _after_forward(self, number: int, output: Any) -> None:
        if self._stage is not _Stage.FORWARD:
            return
        layer, tensors = self._layers[number], _tensors(output)
        self._check_unchanged(layer)
        if are_within(tensors, [unit.flat for unit in layer.units]):
            raise TaskError(
                f"--shard-model all: {layer.name} returns a part of its own parameters, whose memory is gone after its"
                " forward: return a copy (clone)"
            )
        if torch.is_grad_enabled():
            if not tensors:
                raise TaskError(
                    f"--shard-model all: {layer.name} returns {type(output).__name__}, in which no tensors can be seen:"
                    " return a tensor, or a tuple, list or dict of tensors"
                )
            # what it passes on as it was given is no output of its own: it may have left itself out
            own = [one for one in tensors if one.requires_grad and self._given.get(id(one)) != one._version]
            for tensor in own:
                tensor.register_hook(lambda _: self._before_backward(number))
            if not self._has_looked_for_ways:
                self._outputs[number] = [tensor.grad_fn for tensor in own if tensor.grad_fn is not None]
        torch.clear_autocast_cache()  # which keeps copies of 16 bits of all parameters until forward is over
        if self._is_forward_only or number + 1 < len(self._layers):  # the last one is needed again at once
            self._free(layer)

    def _before_backward(self, number: int) -> None:
        if self._stage is not _Stage.BACKWARD:
            raise HetSeqError(
                f"--shard-model all: gradients of {self._layers[number].name} are computed inside the loss, where"
                " parameters do not come again: use --shard-model state"
            )
        if number > self._passed:
            raise HetSeqError(
                f"--shard-model all: backward reaches {self._layers[number].name} after"
                f" {self._layers[self._passed].name}, which is before it in the model: name other modules with"
                " --shard-modules, or use --shard-model state"
            )
        self._passed = number
        self._free_all(self._layers[number + 1 :])  # gradients have passed them
        if number + 1 < len(self._layers):
            self._issue_to(_Kind.BACKWARD, number)
            faults.point("layer_backward")
            self._await(self._layers[number])
        if number:
            self._issue_to(_Kind.BACKWARD, number - 1)  # travels while this layer computes

    def _gradient_arrived(self, index: int, parameter: torch.Tensor) -> None:
        unit, _ = self._home[index]
        number = self._number_of[id(self.parameters[index])]
        if self._stage is _Stage.BACKWARD and 0 <= number < self._passed:
            self._refuse_hidden_way(number)
        if self._stage is not _Stage.BACKWARD:
            raise HetSeqError(
                "--shard-model all: a gradient arrived outside of a round: let HetSeq call backward, once for the sums"
                " that the loss returns"
            )
        self._check_not_sent(unit)
        self._take_in(index, parameter)
        parameter.grad = None
        self.used[index] = True
        if self._arrived[index]:
            return
        self._arrived[index] = True
        unit.missing -= 1
        while (
            self._at < len(self._ops) and self._ops[self._at].kind is _Kind.SUM and not self._ops[self._at].unit.missing
        ):
            self._issue()

    def _check_unchanged(self, layer: _Layer) -> None:
        """Raise TaskError if forward has changed a parameter: the change is gone with its memory."""
        for index in (index for unit in layer.units for index in unit.indices):
            if self.parameters[index]._version != self._versions[index]:
                raise TaskError(
                    f"--shard-model all: forward changes {self._names[index]} in place, and the change would be lost:"
                    " make it a buffer, or use --shard-model state"
                )

    def _refuse(self, index: int, _parameter: torch.Tensor) -> None:
        raise TaskError(
            f"--shard-model all: {self._names[index]} gets a gradient, but was frozen when the run began: leave"
            " requires_grad True in build_model, and freeze it afterwards"
        )

    def _refuse_hidden_way(self, number: int) -> None:
        raise TaskError(
            f"--shard-model all: gradients come to parameters of {self._layers[number].name} otherwise than through its"
            " output: let its forward return all tensors that the loss depends on, or use --shard-model state"
        )

    def _has_gradient(self, index: int) -> bool:
        return bool(self._arrived[index])

    # a step

    def gather(self, shares: Sequence[int] | None = None) -> None:
        """Nothing: parameters come within rounds."""

    def changed(self) -> None:
        """Nothing: what a rank owns is all that lasts."""

    def begin(self) -> None:
        super().begin()
        self._rounds = 0
        self._arrived[:] = False  # of a round that is not over, the gradients are gone

    def expect_last(self) -> None:
        """Nothing: the gradients of each micro-batch travel."""

    def backward(self, loss: torch.Tensor, pause: Pause = nullcontext) -> None:
        self._pause, self._stage = pause, _Stage.BACKWARD
        if self._layers:
            self._issue_to(_Kind.FORWARD, len(self._layers) - 1)
        if not self._has_looked_for_ways:
            homes = {key: number for key, number in self._number_of.items() if number >= 0}
            hidden = hidden_from(loss, self._outputs, homes)
            self._has_looked_for_ways, self._outputs = True, {}  # they would keep what backward frees
            if hidden is not None:
                self._refuse_hidden_way(hidden)
        with lending(self._lenders):
            loss.backward()

    @property
    def has_sent(self) -> bool:
        """Whether this attempt has had a round, which no rank can leave alone."""
        return self._rounds > 0 and not self._is_silent

    def finish(self) -> None:
        """Take part in all rounds that are left, and wait until this rank has the sums of all that it owns. Collective.

        Raises PeerLostError, after which the sums are invalid.
        """
        self._pause = nullcontext
        self.serve()
        if self._is_silent:
            return
        if not self._rounds:  # no rank has samples
            for unit in self._units:
                unit.total.zero_()
        self._sum_across_groups()
        self._show_sums()

    def norm_so_far(self) -> float:
        return float(self._squares**0.5)

    # the base

    def take_base(self, fill: Fill) -> None:
        """Take what this rank owns of the base again, from values that `fill` writes. Local to each rank."""
        self._mark(self._units, is_here=True)  # a function that draws some may look at others
        for unit in self._units:
            if not unit.is_base or not unit.own.numel():
                continue
            unit.take_memory()
            fill([self.parameters[index] for index in unit.indices])
            first = unit.bounds[self._group.rank]
            unit.own.copy_(unit.flat[first : first + unit.own.numel()])
            unit.give_memory_back()
        self._mark(self._units, is_here=False)
        self._versions = [parameter._version for parameter in self.parameters]

    def close(self) -> None:
        super().close()
        self._mark(self._units, is_here=True)

    # how they are made

    def _make_unit(self, indices: list[int]) -> Unit:
        members = [self.parameters[index] for index in indices]
        starts = starts_of(members)
        flat = torch.empty(starts[-1], dtype=members[0].dtype, device=members[0].device)
        for start, parameter in zip(starts, members):
            view = flat.as_strided(parameter.shape, parameter.stride(), start)
            if self._begins is True:
                view.copy_(parameter.detach())
            parameter.data = view
        # memory that another version counter watches: to fill it is no change in place of what autograd has kept
        is_frozen, is_base = indices[0] >= self.trained, id(members[0]) in self._base
        return Unit(indices, starts, flat.data, is_frozen, is_base)

    def _take_own(self, unit: Unit, first: int, last: int) -> torch.Tensor:
        device = torch.device("cpu") if unit.is_on_host else unit.flat.device
        own = self.exchange.memory(last - first, unit.flat.dtype, device)
        if callable(self._begins):
            self._begins([self.parameters[index] for index in unit.indices])
            own.copy_(unit.flat[first:last])
        elif self._begins and unit.is_base:
            own.copy_(unit.flat[first:last])
        elif self._begins:
            self._take_from_rank_zero(unit, own)
        unit.give_memory_back()
        return own


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]
