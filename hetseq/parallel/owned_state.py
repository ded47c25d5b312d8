"""What one rank owns of the optimizer's state: an optimizer that was made for whole parameters updates fragments.

The optimizer is built with the parameters of the model, so its builder sees their shapes and names. Then each of its
groups gets the fragments that this rank owns in their place (`OwnedState`), and keeps the state of the fragments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from hetseq.checkpoint import Held as HeldTensor
from hetseq.checkpoint import TensorSlice
from hetseq.comm.group import Group
from hetseq.errors import ConfigError, TaskError
from hetseq.parallel.owned_gradients import Fragment, OwnedGradients
from hetseq.parallel.state_move import Held, move

# Elements of the tensor with which an optimizer is tried, and where it is cut: both fill whole vectors. Fused kernels
# compute the rest of a tensor by other instructions (measured: AdamW on a CPU, 1 unit in the last place apart).
_TRIED = 4096
_CUT_AT = 1536
_DEEPEST = 3


class OwnedState:
    """Connects an optimizer with the fragments of one rank.

    `optimizer` has the parameters of the model in its groups, all of which `reducer` knows.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> None:
        self.optimizer, self.names = optimizer, dict(names)
        #: the parameters of each group, as the builder gave them
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._by_name = {name: parameter for parameter, name in names.items()}
        self._places = {parameter: index for index, parameter in enumerate(names)}
        self.fragments: dict[str, Fragment] = {}  # by name of the parameter
        #: what this rank held by earlier cuts, until the state has moved
        self.earlier: dict[int, Held] = {}
        self.planned_bytes = 0  # the memory that this rank is expected to use; 0: not known
        self.fraction = 0.0  # of the state, in relation to other ranks
        self.cut = 0  # the generation that cut the state as it is held
        self.part = (0, sum(parameter.numel() for parameter in names))  # elements owned, and all elements
        _refuse_hidden_parameters(optimizer, self.names)
        self._counted = (0, 0)  # parameters whose state has begun, and what `bytes` found then
        #: whether parameters may be cut anywhere
        self.is_elementwise = is_elementwise(optimizer)

    def group_of(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The optimizer's group of each parameter of the model, also where this rank owns nothing of it."""
        groups = self.optimizer.param_groups
        return {parameter: group for group, members in zip(groups, self._members) for parameter in members}

    def held(self) -> dict[int, Held]:
        """What this rank holds of each parameter, by its place in the model."""
        return {
            self._places[one.parameter]: Held(
                one.begin, one.end, one.owned.detach(), dict(self.optimizer.state.get(one.owned, {}))
            )
            for one in self.fragments.values()
        }

    def bytes(self) -> int:
        """Bytes of what this rank owns: parameters, sums of gradients, and the optimizer's state."""
        begun = len(self.optimizer.state)
        if self._counted[0] != begun or not begun:  # the first update has begun it since
            moments = sum(
                value.nbytes
                for one in self.fragments.values()
                for value in self.optimizer.state.get(one.owned, {}).values()
                if isinstance(value, torch.Tensor)
            )
            self._counted = begun, moments + sum(2 * one.owned.nbytes for one in self.fragments.values())
        return self._counted[1]

    def slices(self) -> tuple[dict[str, HeldTensor], dict[str, Any]]:
        """What this rank owns, by the names of a checkpoint: live slices of parameters and moments, and the numbers.

        State without a dimension, such as a counter of updates, is held by each rank that owns a part.
        """
        tensors: dict[str, HeldTensor] = {}
        numbers: dict[str, Any] = {}
        for name, one in self.fragments.items():
            tensors[f"model.{name}"] = _slice_of(one.owned.detach(), one)
            for key, value in self.optimizer.state.get(one.owned, {}).items():
                if not isinstance(value, torch.Tensor):
                    numbers[f"optim.{name}.{key}"] = value
                elif value.dim() and value.shape == one.owned.shape:
                    tensors[f"optim.{name}.{key}"] = _slice_of(value.detach(), one)
                else:
                    tensors[f"optim.{name}.{key}"] = value.detach()
        return tensors, numbers

    def wanted(self, outline: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[int, int]]]:
        """The elements of each tensor that this rank owns, by the shapes of a checkpoint; others it reads whole."""
        found: dict[str, list[tuple[int, int]]] = {}
        for full_name, like in outline.items():
            kind, _, rest = full_name.partition(".")
            name = rest if kind == "model" else rest.rpartition(".")[0] if kind == "optim" else ""
            if name not in self._by_name or not self._by_name[name].numel():
                continue
            one, is_divided = self.fragments.get(name), like.dim() > 0 and like.shape == self._by_name[name].shape
            if one is None:
                found[full_name] = []
            elif is_divided:
                found[full_name] = [(one.begin, one.end)]
        return found

    def load_parameter_(self, name: str, value: torch.Tensor | Sequence[TensorSlice]) -> None:
        """Take what this rank owns of a parameter, from a whole tensor or from exactly its slice."""
        fragment = self.fragments[name]
        fragment.owned.data.copy_(_part_of(value, fragment))

    def load_(self, full_name: str, value: Any) -> None:
        """Take what this rank owns of the state that `optim.<fqn>.<key>` names, of a tensor or a number."""
        name, _, key = full_name.removeprefix("optim.").rpartition(".")
        fragment = self.fragments.get(name)
        if fragment is None:
            return
        is_slices = not isinstance(value, torch.Tensor) and isinstance(value, (list, tuple))
        if is_slices or (isinstance(value, torch.Tensor) and value.dim() and value.shape == fragment.parameter.shape):
            value = _part_of(value, fragment)
            value = torch.empty_like(fragment.owned, dtype=value.dtype).copy_(value)
        elif isinstance(value, torch.Tensor):
            is_fused = bool(self.group_of()[fragment.parameter].get("fused"))
            value = value.to(fragment.owned.device) if value.dim() or is_fused else value
        self.optimizer.state[fragment.owned][key] = value

    def adopt_(self, reducer: OwnedGradients, *, cut: int) -> None:
        """Put the fragments of this rank into the optimizer's groups; state that exists is cut accordingly.

        `cut` is the generation that cut the state like this.
        """
        whole = {index: dict(self.optimizer.state.get(one, {})) for one, index in self._places.items()}
        state = {
            index: {key: _cut_out(value, fragment) for key, value in whole[index].items()}
            for index, fragment in reducer.own_fragments.items()
        }
        self._put_in(reducer, state, cut)

    def take_over_(self, reducer: OwnedGradients, group: Group, *, cut: int) -> tuple[int, ...]:
        """Move the state to the owners by the cuts of `reducer`, on all ranks of a generation; a rank that joins holds
        nothing yet. Returns the bytes of the optimizer's state that each rank got, (world_size,). Collective.

        Nothing is given up unless all ranks have what they own. Raises PeerLostError.
        """
        state, received_bytes = move(self.earlier, reducer, group)
        moved = group.all_gather_rows(np.array([received_bytes], np.int64))  # all ranks have what they own
        self._put_in(reducer, state, cut)
        return tuple(moved[:, 0].tolist())

    def _put_in(self, reducer: OwnedGradients, state: Mapping[int, Mapping[str, Any]], cut: int) -> None:
        groups, own = self.optimizer.param_groups, reducer.own_fragments
        for group, members in zip(groups, self._members):
            places = (self._places[one] for one in members)
            group["params"][:] = [own[place].owned for place in places if place in own]
        for parameter in list(self.optimizer.state):
            del self.optimizer.state[parameter]
        group_of = self.group_of()
        for index, fragment in own.items():
            if not state[index]:
                continue
            is_fused = bool(group_of[fragment.parameter].get("fused"))
            self.optimizer.state[fragment.owned] = {
                key: value.to(fragment.owned.device) if is_fused and isinstance(value, torch.Tensor) else value
                for key, value in state[index].items()
            }
        self.fragments = {self.names[fragment.parameter]: fragment for fragment in own.values()}
        self._counted = (0, 0)
        self.cut, self.earlier, self.fraction = cut, {}, reducer.fractions[reducer.rank]
        self.part = sum(one.end - one.begin for one in own.values()), reducer.ownership.total


def _slice_of(value: torch.Tensor, fragment: Fragment) -> HeldTensor:
    """The values of a fragment as a slice, or as a whole tensor if its parameter has one owner."""
    if value.shape == fragment.parameter.shape:
        return value
    whole = tuple(fragment.parameter.shape)
    if fragment.end - fragment.begin == fragment.parameter.numel():
        return value.view(whole)
    return [TensorSlice(value, fragment.begin, fragment.end, whole)]


def _part_of(value: torch.Tensor | Sequence[TensorSlice], fragment: Fragment) -> torch.Tensor:
    """The elements of a fragment, in its shape, from a whole tensor or from its own slice of one."""
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1)[fragment.begin : fragment.end]
    else:
        (one,) = value
        assert (one.begin, one.end) == (fragment.begin, fragment.end)
        flat = one.tensor
    return flat.view(fragment.owned.shape)


def _cut_out(value: Any, fragment: Fragment) -> Any:
    """A value of a whole parameter's state as a fragment's: tensors of its shape are cut, others are kept."""
    if not isinstance(value, torch.Tensor) or value.shape != fragment.parameter.shape or not value.dim():
        return value
    if value.shape == fragment.owned.shape:
        return value
    return value.reshape(-1)[fragment.begin : fragment.end].clone()


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer updates each element by itself, so that a parameter may be cut anywhere.

    It is asked, not looked up: two updates of one tensor, and of the same numbers in two pieces, give equal bits only
    if no element depends on another one. An optimizer that refuses such a tensor is not elementwise. Asked of a copy,
    with the settings of each of its groups. Any rank, alone; all give the same answer.
    """
    return all(_is_elementwise(optimizer, place) for place in range(len(optimizer.param_groups)))


def _is_elementwise(optimizer: torch.optim.Optimizer, place: int) -> bool:
    like = optimizer.param_groups[place]["params"][0]
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(_TRIED, generator=generator).to(like.device, like.dtype) for _ in range(3))
    results = []
    for cuts in ([_TRIED], [_CUT_AT, _TRIED - _CUT_AT]):
        parts = [torch.nn.Parameter(piece.clone()) for piece in start.split(cuts)]
        trial = _trial_of(optimizer, place, parts)
        try:
            for gradient in gradients:
                for part, piece in zip(parts, gradient.split(cuts)):
                    part.grad = piece.clone()
                trial.step()
        except (RuntimeError, ValueError, TypeError, LookupError, AssertionError):
            return False
        results.append(torch.cat([part.detach() for part in parts]))
    return torch.equal(*results)


def _trial_of(optimizer: torch.optim.Optimizer, place: int, parts: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A copy of the optimizer that trains `parts` in the group of this place, and nothing else."""
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = optimizer.param_groups[place]["params"][0]
    trial: torch.optim.Optimizer = object.__new__(type(optimizer))  # by its own copy it would lose attributes
    vars(trial).update(copy.deepcopy(vars(optimizer), {id(parameter): parameter for parameter in members}))
    trial._optimizer_step_pre_hooks.clear()
    trial._optimizer_step_post_hooks.clear()
    begun = dict(trial.state.get(like, {}))  # of optimizers that begin it before their first step
    for parameter in list(trial.state):
        del trial.state[parameter]
    for number, group in enumerate(trial.param_groups):
        group["params"][:] = parts if number == place else []
    for part in parts if begun else ():
        trial.state[part] = {
            key: value.flatten()[:1].expand(part.shape).clone()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == like.shape
            else copy.copy(value)
            for key, value in begun.items()
        }
    return trial


def _refuse_hidden_parameters(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise ConfigError for an optimizer that keeps parameters of the model besides those in its groups.

    It would read or write copies that are out of date.
    """
    known = {id(parameter): name for parameter, name in names.items()}
    groups = {id(group["params"]) for group in optimizer.param_groups}

    def look(value: Any, depth: int) -> Iterator[str]:
        if id(value) in known:
            yield known[id(value)]
        elif depth and isinstance(value, Mapping):
            for item in value.values():
                yield from look(item, depth - 1)
        elif depth and isinstance(value, (list, tuple, set)) and id(value) not in groups:
            for item in value:
                yield from look(item, depth - 1)

    for attribute, value in vars(optimizer).items():
        if attribute not in ("param_groups", "state") and (found := next(look(value, _DEEPEST), None)):
            raise ConfigError(
                f"--shard-model state: {type(optimizer).__name__} keeps {found} in its attribute {attribute}, besides"
                " its groups; a rank updates only what it owns, so the optimizer must use the parameters of its groups:"
                " change it, or use --shard-model none"
            )


class RefusingParameters(TorchFunctionMode):
    """Context in which the use of a trained parameter raises TaskError: it may be out of date on this rank."""

    def __init__(self, names: Mapping[torch.nn.Parameter, str], where: str) -> None:
        super().__init__()
        self._names, self._where = {id(parameter): name for parameter, name in names.items()}, where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if id(one) in self._names:
                    raise TaskError(
                        f"{self._where} uses {self._names[id(one)]}, but with --shard-model state a rank gets the new"
                        " parameters at the start of the next step: use after_step, which sees whole parameters, or"
                        " --shard-model none"
                    )
        return func(*args, **(kwargs or {}))
