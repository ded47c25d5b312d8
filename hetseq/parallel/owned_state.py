"""What one rank owns of the optimizer's state: an optimizer that was made for whole parameters updates fragments.

The optimizer is built with the parameters of the model, so its builder sees their shapes and names. Then each of its
groups gets the fragments that this rank owns in their place (`OwnedState`), and keeps the state of the fragments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from hetseq.checkpoint import Held as HeldTensor
from hetseq.checkpoint import TensorSlice
from hetseq.comm.group import Group
from hetseq.errors import ConfigError, TaskError
from hetseq.parallel.divided_model import TensorPart
from hetseq.parallel.optimizer_trial import inner_optimizers, try_out, walk
from hetseq.parallel.owned_names import OwnedNames
from hetseq.parallel.owned_units import Fragment, OwnedUnits
from hetseq.parallel.state_move import Held, move, place_of_state

_NO_CUT = -1  # of a whole state: no generation has cut it


class OwnedState:
    """Connects an optimizer with the fragments of one rank.

    `optimizer` has the parameters of the model in its groups, all of which `reducer` knows. Frozen ones
    have an owner, but no state, and need not be in a group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: OwnedNames | Mapping[torch.nn.Parameter, str]) -> None:
        self.described = names if isinstance(names, OwnedNames) else OwnedNames(names)
        names = self.described.by_parameter
        self.optimizer, self.names = optimizer, dict(names)
        #: the parameters of each group, as the builder gave them
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._by_name = {name: parameter for parameter, name in names.items()}
        self._by_saved: dict[str, list[str]] = {}  # the names of what a checkpoint has under one name
        for name in self._by_name:
            self._by_saved.setdefault(self.described.saved_name(name), []).append(name)
        self._places = {parameter: index for index, parameter in enumerate(names)}
        self.fragments: dict[str, Fragment] = {}  # by name of the parameter
        #: what this rank held by earlier cuts, until the state has moved
        self.earlier: dict[int, Held] = {}
        self.is_copy = False  # another group of ranks holds the same, and saves it
        self.has_layers = False  # the parameters come and go
        self.planned_bytes = 0  # the memory that this rank is expected to use; 0: not known
        self.fraction = 0.0  # of the state, in relation to other ranks
        self.rule: str | None = None  # of the groups of ranks, where HetSeq has chosen it
        self.cut = 0  # the generation that cut the state as it is held
        self.part = (0, sum(parameter.numel() for parameter in names))  # elements owned, and all elements
        _refuse_foreign_parameters(optimizer, self.names)
        self._counted = (0, 0)  # parameters whose state has begun, and what `bytes` found then
        manner = try_out(optimizer)
        #: whether parameters may be cut anywhere
        self.is_elementwise = manner.is_elementwise
        self._common_keys = manner.common_keys

    @classmethod
    def of_whole(cls, optimizer: torch.optim.Optimizer, names: OwnedNames) -> OwnedState:
        """What a rank holds that has all of the state, before a generation whose ranks own parts of it."""
        owned = cls(optimizer, names)
        owned.fragments = {name: Fragment(one, 0, one.numel(), one) for one, name in owned.names.items() if one.numel()}
        owned.part, owned.cut = (owned.part[1], owned.part[1]), _NO_CUT
        return owned

    @property
    def trained(self) -> dict[torch.nn.Parameter, str]:
        """The parameters that get gradients."""
        return self.described.trained

    @property
    def base(self) -> frozenset[str]:
        """The names of what no checkpoint holds."""
        return self.described.base

    def group_of(self) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The optimizer's group of each parameter of the model, also where this rank owns nothing of it."""
        groups = self.optimizer.param_groups
        return {parameter: group for group, members in zip(groups, self._members) for parameter in members}

    def follow_(self, parameter: torch.nn.Parameter) -> None:
        """Let what this rank owns of a parameter share the memory to which the parameter has moved."""
        if (one := self.fragments.get(self.names[parameter])) is not None:
            moved = parameter.detach()
            one.owned.data = moved if one.owned.shape == moved.shape else moved.view(-1)[one.begin : one.end]

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
            frozen = self.described.frozen
            self._counted = (
                begun,
                moments + sum((1 if name in frozen else 2) * one.owned.nbytes for name, one in self.fragments.items()),
            )
        return self._counted[1]

    def bytes_on(self, device: torch.device) -> int:
        """Bytes of what this rank owns in the memory of a device, without sums of gradients, which are in none."""
        there = [one.owned for one in self.fragments.values() if one.owned.device == device]
        moments = sum(
            value.nbytes
            for owned in there
            for value in self.optimizer.state.get(owned, {}).values()
            if isinstance(value, torch.Tensor)
        )
        return moments + sum(owned.nbytes for owned in there)

    def slices(self) -> tuple[dict[str, HeldTensor], dict[str, Any]]:
        """What this rank owns, by the names of a checkpoint: live slices of parameters and moments, and the numbers.
        Not the base, which no checkpoint holds, nor parts that are no slices of whole tensors (`whole_tensors`).

        State without a dimension, such as a counter of updates, is held by each rank that owns a part.
        """
        tensors: dict[str, HeldTensor] = {}
        numbers: dict[str, Any] = {}
        for name, one in self.fragments.items():
            if name in self.base or self.is_copy:
                continue
            part, saved = self.described.parts.get(name), self.described.saved_name(name)
            self._add(tensors, f"model.{saved}", one.owned.detach(), one, part)
            for key, value in self.optimizer.state.get(one.owned, {}).items():
                if not isinstance(value, torch.Tensor):
                    numbers[f"optim.{saved}.{key}"] = value
                elif self.is_divided(key, value, one.owned):
                    self._add(tensors, f"optim.{saved}.{key}", value.detach(), one, part)
                else:
                    tensors[f"optim.{saved}.{key}"] = value.detach()
        return tensors, numbers

    def _add(
        self, tensors: dict[str, HeldTensor], name: str, value: torch.Tensor, one: Fragment, part: TensorPart | None
    ) -> None:
        """Add the values of a fragment, as a slice of the tensor that a checkpoint has under a name."""
        if part is None:
            tensors[name] = _slice_of(value, one)
        elif part.offset is not None:
            begin, end = part.offset + one.begin, part.offset + one.end
            earlier = tensors.get(name, [])
            assert not isinstance(earlier, torch.Tensor)
            tensors[name] = [*earlier, TensorSlice(value.reshape(-1), begin, end, part.shape)]

    def wanted(self, outline: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[int, int]]]:
        """The elements of each tensor that this rank owns, by the shapes of a checkpoint; others it reads whole."""
        found: dict[str, list[tuple[int, int]]] = {}
        for full_name, like in outline.items():
            kind, _, rest = full_name.partition(".")
            name = rest if kind == "model" else rest.rpartition(".")[0] if kind == "optim" else ""
            names = [one for one in self._by_saved.get(name, ()) if self._by_name[one].numel()]
            if not names:
                continue
            parts = [self.described.parts.get(one) for one in names]
            own = [(self.fragments[one], part) for one, part in zip(names, parts) if one in self.fragments]
            key = full_name.rpartition(".")[2] if kind == "optim" else ""
            whole = self._by_name[names[0]] if parts[0] is None else torch.empty(parts[0].shape, device="meta")
            if not own:
                found[full_name] = []
            elif self.is_divided(key, like, whole) and all(part is None or part.offset is not None for part in parts):
                starts = [0 if part is None or part.offset is None else part.offset for _, part in own]
                found[full_name] = [(start + one.begin, start + one.end) for start, (one, _) in zip(starts, own)]
        return found

    def load_parameter_(self, name: str, value: torch.Tensor | Sequence[TensorSlice]) -> None:
        """Take what this rank owns of a parameter, from a whole tensor or from exactly its slice."""
        fragment = self.fragments[name]
        values = _part_of(value, fragment, self.described.parts.get(name))
        fragment.owned.data.copy_(values)

    def load_(self, full_name: str, value: Any) -> None:
        """Take what this rank owns of the state that `optim.<fqn>.<key>` names, of a tensor or a number."""
        saved, _, key = full_name.removeprefix("optim.").rpartition(".")
        for name in self._by_saved.get(saved, ()):
            if name in self.fragments:
                self._load_own(self.fragments[name], self.described.parts.get(name), key, value)

    def _load_own(self, fragment: Fragment, part: TensorPart | None, key: str, value: Any) -> None:
        is_slices = not isinstance(value, torch.Tensor) and isinstance(value, (list, tuple))
        whole = fragment.parameter if part is None else torch.empty(part.shape, device="meta")
        if is_slices or self.is_divided(key, value, whole):
            value = _part_of(value, fragment, part)
            value = torch.empty_like(fragment.owned, dtype=value.dtype).copy_(value)
        elif isinstance(value, torch.Tensor):
            value = place_of_state(key, value, fragment.owned, self.group_of()[fragment.parameter])
            value = value if part is None else value.clone()  # each part counts for itself
        self.optimizer.state[fragment.owned][key] = value

    def is_divided(self, key: str, value: Any, like: torch.Tensor) -> bool:
        """Whether a value of the state has an element for each of the parameter's, of which `like` is all or a part."""
        is_alike = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == like.shape
        return is_alike and key not in self._common_keys

    def adopt_(self, reducer: OwnedUnits, *, cut: int) -> None:
        """Put the fragments of this rank into the optimizer's groups; state that exists is cut accordingly.

        `cut` is the generation that cut the state like this.
        """
        whole = {index: dict(self.optimizer.state.get(one, {})) for one, index in self._places.items()}
        state = {
            index: {
                key: _cut_out(value, fragment) if self.is_divided(key, value, fragment.parameter) else value
                for key, value in whole[index].items()
            }
            for index, fragment in reducer.own_fragments.items()
        }
        self._put_in(reducer, state, cut)

    def take_over_(self, reducer: OwnedUnits, group: Group, *, cut: int) -> tuple[int, ...]:
        """Move the state to the owners by the cuts of `reducer`, on all ranks of a generation; a rank that joins holds
        nothing yet. Returns the bytes of the optimizer's state that each rank got, (world_size,). Collective.

        Nothing is given up unless all ranks have what they own. Raises PeerLostError.
        """
        state, received_bytes = move(self.earlier, reducer, group)
        moved = group.all_gather_rows(np.array([received_bytes], np.int64))  # all ranks have what they own
        self._put_in(reducer, state, cut)
        return tuple(moved[:, 0].tolist())

    def _put_in(self, reducer: OwnedUnits, state: Mapping[int, Mapping[str, Any]], cut: int) -> None:
        groups, own = self.optimizer.param_groups, reducer.own_fragments
        for group, members in zip(groups, self._members):
            places = [self._places.get(one) for one in members]  # None: it was frozen before, and stays in its group
            group["params"][:] = [
                one if place is None else own[place].owned
                for one, place in zip(members, places)
                if place is None or place in own
            ]
        for parameter in list(self.optimizer.state):
            del self.optimizer.state[parameter]
        group_of = self.group_of()
        for index, fragment in own.items():
            if not state[index]:
                continue
            group = group_of[fragment.parameter]
            self.optimizer.state[fragment.owned] = {
                key: place_of_state(key, value, fragment.owned, group) if isinstance(value, torch.Tensor) else value
                for key, value in state[index].items()
            }
        self.fragments = {self.names[fragment.parameter]: fragment for fragment in own.values()}
        self._counted = (0, 0)
        self.cut, self.earlier, self.fraction = reducer.cut_in(cut), {}, reducer.division.fractions[reducer.rank]
        self.is_copy = reducer.number > 0
        self.part = sum(one.end - one.begin for one in own.values()), reducer.ownership.total


def _slice_of(value: torch.Tensor, fragment: Fragment) -> HeldTensor:
    """The values of a fragment as a slice, or as a whole tensor if its parameter has one owner."""
    if value.shape == fragment.parameter.shape:
        return value
    whole = tuple(fragment.parameter.shape)
    if fragment.end - fragment.begin == fragment.parameter.numel():
        return value.view(whole)
    return [TensorSlice(value, fragment.begin, fragment.end, whole)]


def _part_of(value: torch.Tensor | Sequence[TensorSlice], fragment: Fragment, part: TensorPart | None) -> torch.Tensor:
    """The elements of a fragment, in its shape, from a whole tensor or from its own slice of one."""
    if isinstance(value, torch.Tensor):
        flat = (value if part is None else part.of(value)).reshape(-1)[fragment.begin : fragment.end]
    else:
        start = 0 if part is None or part.offset is None else part.offset
        (one,) = (one for one in value if one.begin == start + fragment.begin)
        assert one.end == start + fragment.end
        flat = one.tensor
    return flat.view(fragment.owned.shape)


def _cut_out(value: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    """The elements of a fragment, from a tensor with an element for each of the whole parameter's."""
    if value.shape == fragment.owned.shape:
        return value
    return value.reshape(-1)[fragment.begin : fragment.end].clone()


def _refuse_foreign_parameters(optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise ConfigError for an optimizer that has other trained parameters than the model, or keeps the model's besides
    those in its groups: it would read or write copies that are out of date."""
    known = {id(parameter): name for parameter, name in names.items()}
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"--shard-model: {name} has a parameter of shape {tuple(parameter.shape)} that is not in the"
                    " model: register it there, or use --shard-model none"
                )
    lists = {id(group["params"]) for group in optimizer.param_groups}
    for one in (optimizer, *inner_optimizers(optimizer)):
        for attribute, kept in vars(one).items():
            if attribute == "state":
                continue
            if attribute == "param_groups":
                kept = [{k: v for k, v in group.items() if k != "params" or id(v) not in lists} for group in kept]
            for value in walk(kept):
                parameters = value.parameters() if isinstance(value, torch.nn.Module) else (value,)
                if found := next((known[id(parameter)] for parameter in parameters if id(parameter) in known), None):
                    raise ConfigError(
                        f"--shard-model: {name} keeps {found} in {type(one).__name__}.{attribute}, besides its"
                        " groups; a rank updates only what it owns, so the optimizer must use the parameters of its"
                        " groups: change it, or use --shard-model none"
                    )


def refuse_shared_memory(model: torch.nn.Module, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raise ConfigError if a trained parameter shares memory with another parameter or a buffer.

    It moves into the memory of its unit, and the other one would stay. The same parameter under two names is no such.
    """
    trained, spans = {id(one) for one in names}, []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel() and tensor.untyped_storage().size():  # else its values are not here, nor any other
            elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + elements * tensor.itemsize, name, id(tensor) in trained))
    spans.sort()
    for place, (device, _, end, name, is_trained) in enumerate(spans):
        for other_device, other_begin, _, other, is_other_trained in spans[place + 1 :]:
            if other_device != device or other_begin >= end:
                break
            if is_trained or is_other_trained:
                raise ConfigError(
                    f"--shard-model: {name} and {other} are two tensors in the same memory: use one parameter"
                    " under both names, as in b.weight = a.weight, or --shard-model none"
                )


class RefusingParameters(TorchFunctionMode):
    """Context in which the use of a trained parameter raises TaskError: it may be out of date on this rank.

    `reason` ends the message, which begins with the name of the parameter.
    """

    def __init__(self, names: Mapping[torch.nn.Parameter, str], where: str, reason: str) -> None:
        super().__init__()
        self._names, self._where, self._reason = {id(one): name for one, name in names.items()}, where, reason

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if id(one) in self._names:
                    raise TaskError(f"{self._where} uses {self._names[id(one)]}, but {self._reason}")
        return func(*args, **(kwargs or {}))
