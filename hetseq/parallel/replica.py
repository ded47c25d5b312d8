"""A replica: one rank's model and optimizer, and the reducer that keeps the replicas equal.

The controller asks it for micro-batches, a reduced gradient and an update; checkpoints ask it for named tensors. Names
are `model.<fqn>` and `optim.<fqn>.<state>`, so a checkpoint never depends on the order of parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hetseq.checkpoint import Held
from hetseq.cluster.membership.step_commit import OwnedBytes
from hetseq.comm.directory_groups import gather_texts, send_tensor
from hetseq.comm.group import Group, RowTransport
from hetseq.errors import CheckpointMismatch, TaskError, few
from hetseq.parallel.base_parameters import base_parameters
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.divided_model import DividedModel, check_alike
from hetseq.parallel.gradient_sync import GradientSync
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.owned_names import is_dense
from hetseq.parallel.owned_parameters import Fill, OwnedParameters
from hetseq.parallel.owned_state import OwnedState, RefusingParameters
from hetseq.parallel.owned_units import OwnedUnits
from hetseq.parallel.state_move import place_of_state
from hetseq.parallel.task_state import TaskState
from hetseq.parallel.whole_tensors import assembled
from hetseq.system import device_memory as memory


class Replica:
    """Model and optimizer of one rank, and the state of its task."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        reducer: GradientSync,
        buffers: BufferKeeper,
        task_state: TaskState,
        owned: OwnedState | None = None,
        divided: DividedModel | None = None,
    ) -> None:
        """`owned` is what this rank owns of the optimizer's state; None: it has all of it. `divided`: the parts of a
        model that several ranks hold together; None: this rank has the model alone."""
        self.model = model
        self.optimizer = optimizer
        self.reducer = reducer
        self.buffers = buffers
        self.task_state = task_state
        self.owned = owned
        self.divided = divided
        self._is_first_update = True
        self._groups: list[dict[str, Any]] = []  # of the optimizer, by parameter
        trained = {one: name for name, one in trained_parameters(model)} if owned is None else owned.trained
        self._by_name = {name: one for one, name in trained.items()}
        self._names = {parameter: name for name, parameter in self._by_name.items()}

    @property
    def trained_names(self) -> list[str]:
        """The names of the parameters whose gradients are summed, in the order of `GradientSync.used`."""
        return list(self._by_name)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters of `trained_names`."""
        return list(self._names)

    @property
    def has_parameters(self) -> bool:
        """Whether this rank has whole parameters between two steps; otherwise what it owns is all that lasts."""
        return not isinstance(self.reducer, OwnedParameters)

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def rate_of(self, used: npt.NDArray[np.bool_]) -> float:
        """The learning rate of the first parameter that has a gradient; `used` as for `GradientSync`."""
        if not self._groups:
            groups = {of: group for group in self.optimizer.param_groups for of in group["params"]}
            groups = groups if self.owned is None else self.owned.group_of()
            self._groups = [groups[parameter] for parameter in self._by_name.values()]
        return float(self._groups[int(np.argmax(used))]["lr"])

    def refusing_absent(self, where: str) -> AbstractContextManager[object]:
        """Context in which a use of parameters that are not here is a TaskError; `where` names the code inside it."""
        if self.has_parameters or self.owned is None:
            return nullcontext()
        return RefusingParameters(
            self.owned.names, where, "with --shard-model all no rank has whole parameters between two steps: use"
            " --shard-model state",
        )  # fmt: skip

    def refusing_parameters(self, where: str) -> AbstractContextManager[object]:
        """Context in which a use of parameters that other ranks own is a TaskError: they may be out of date.

        `where` names the code inside it, for the message.
        """
        if self.owned is None or not self.has_parameters:
            return self.refusing_absent(where)
        return RefusingParameters(
            self.owned.names, where, "with --shard-model state a rank gets the new parameters at the start of the next"
            " step: use after_step, which sees whole parameters, or --shard-model none",
        )  # fmt: skip

    def update(self) -> None:
        """One step of the optimizer. The first one creates the optimizer's state, so cached memory is released first.

        Running out of memory here cannot be undone: some parameters may have changed already.
        """
        if self._is_first_update:
            memory.release(next(one.device for one in self._names if not one.is_meta))
            self._is_first_update = False
        if self.owned is None:
            self.optimizer.step()
            return
        name = f"{type(self.optimizer).__name__}.step"
        kind = "state" if self.has_parameters else "all"
        reason = (
            f"with --shard-model {kind} an optimizer may use the parameters in its groups only: use --shard-model none"
        )
        with RefusingParameters(self.owned.names, name, reason):
            self.optimizer.step()

    def state_bytes(self) -> int:
        """Approximate bytes of a checkpoint: each parameter and two optimizer tensors of its size."""
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in self._names)

    def optimizer_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The optimizer's state by name: live tensors, and the numbers that are not tensors."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for parameter, name in self._names.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optim.{name}.{key}"] = value.detach()
                else:
                    numbers[f"optim.{name}.{key}"] = value
        return tensors, numbers

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """`model_tensors` of this replica's model."""
        return model_tensors(self.model)

    def held_tensors(self, group: Group) -> tuple[dict[str, Held], dict[str, Any]]:
        """What this rank gives to a checkpoint: live tensors of model and optimizer by name, and the numbers.

        Of what has an owner, only the slices that this rank owns. Collective where ranks divide the model.
        """
        if self.owned is None:
            tensors, numbers = self.optimizer_tensors()
            return {**self.model_tensors(), **tensors}, numbers
        slices, numbers = self.owned.slices()
        if self.divided is not None:
            assert isinstance(self.reducer, OwnedUnits)
            slices |= assembled(self.owned, self.reducer, group)
        return {**self.common_model_tensors(), **slices}, numbers

    def all_numbers(self, numbers: dict[str, Any], group: RowTransport) -> dict[str, Any]:
        """The optimizer's numbers that are not tensors, of all owners. Collective where ranks own parts."""
        if self.owned is None:
            return numbers
        found: dict[str, Any] = {}
        for text in gather_texts(group, json.dumps(numbers)):
            found |= json.loads(text)
        return found

    def common_model_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the model that are not divided among owners: all of them unless ranks own parts."""
        live = self.model_tensors()
        if self.owned is None:
            return live
        owned = self._owned_keys()
        return {name: tensor for name, tensor in live.items() if name not in owned}

    def _owned_keys(self) -> set[str]:
        """The names in `model_tensors` of what has owners, and has any element."""
        owned = self._names if self.owned is None else self.owned.names
        return {f"model.{name}" for name, one in self.model.named_parameters() if one in owned and one.numel()}

    def outline(self) -> dict[str, torch.Tensor]:
        """Tensors with the names, shapes and types of `model_tensors`, of the whole model where ranks divide it."""
        live = self.model_tensors()
        if self.divided is None:
            return live
        whole = {f"model.{name}": like for name, like in self.divided.whole.items()}
        return {**self.common_model_tensors(), **self.undivided_tensors(), **whole}

    def undivided_tensors(self) -> dict[str, torch.Tensor]:
        """The trained parameters that every rank has whole, by the names of `model_tensors`, live."""
        parts = {} if self.divided is None else self.divided.parts
        return {f"model.{name}": one.detach() for one, name in self._names.items() if name not in parts}

    def common_optimizer_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The optimizer's state, as `optimizer_tensors`, that is not divided among owners."""
        return ({}, {}) if self.owned is not None else self.optimizer_tensors()

    def load_common(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Take what another rank has sent of the tensors that are not divided among owners."""
        if self.owned is None:
            self.load_model(tensors)
            self.load_optimizer(tensors, numbers)
            return
        with torch.no_grad():
            for name, live in self.common_model_tensors().items():
                if not _is_same_memory(live, tensors[name]):
                    live.copy_(tensors[name])
        self.buffers.renew()

    def owned_bytes(self) -> OwnedBytes | None:
        """What this rank owns, and has sent and received since the last call; None for a replica."""
        if self.owned is None:
            return None
        assert isinstance(self.reducer, OwnedUnits)
        sent, received = self.reducer.traffic()
        return OwnedBytes(self.owned.bytes(), sent, received, self.owned.planned_bytes)

    def is_divided(self, key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
        """Whether a value of the optimizer's state has an element for each of what this rank holds of a parameter."""
        if self.owned is not None:
            return self.owned.is_divided(key, value, parameter)
        return value.dim() > 0 and value.shape == parameter.shape

    def take_base(self, build: Callable[[], Fill]) -> None:
        """Take what this rank owns of the base again, from what `build` builds. Local to each rank."""
        if self.owned is not None and self.owned.base & self.owned.fragments.keys():
            assert isinstance(self.reducer, OwnedParameters)
            self.reducer.take_base(build())

    def check_whole_gradients(self) -> None:
        """`divided_model.check_alike` of the gradients so far. Collective among the ranks that divide the model."""
        assert self.divided is not None
        assert isinstance(self.reducer, OwnedGradients)
        names = self.trained_names
        check_alike({names[index]: one for index, one in self.reducer.whole_gradients().items()}, self.divided.ranks)

    def is_owner(self, rank: int) -> bool:
        """Whether a rank owns a part of the state that no other rank has."""
        reducer = self.reducer
        return isinstance(reducer, OwnedUnits) and len(reducer.ownerships) < 2 and reducer.owned_by(rank) > 0

    def take_over_parts(self, group: Group) -> tuple[int, ...]:
        """Move the parts of the state to the owners of a new generation. Collective.

        The bytes of the optimizer's state that each rank got, (world_size,); empty for replicas. Raises PeerLostError.
        """
        if self.owned is None:
            return ()
        assert isinstance(self.reducer, OwnedUnits)
        return self.owned.take_over_(self.reducer, group, cut=group.generation)

    def changed_by_forward(self) -> set[str]:
        """The names in `model_tensors` that forward may change: buffers, and untrained parameters without owners."""
        return self.model_tensors().keys() - self._owned_keys()

    def frozen_tensors(self) -> dict[str, torch.Tensor]:
        """The parameters that are not trained and have no owners, by the names of `model_tensors`, live."""
        untrained, buffers = self.changed_by_forward(), self.buffer_tensors()
        return {name: one for name, one in self.model_tensors().items() if name in untrained and name not in buffers}

    def buffer_tensors(self, *, only_changing: bool = False) -> dict[str, torch.Tensor]:
        """The persistent buffers by the names of `model_tensors`, live; or those that forward is known to change."""
        places = self.buffers.changing() if only_changing else self.buffers.places()
        if not places:
            return {}
        prefixes = {id(module): f"model.{name}." if name else "model." for name, module in self.model.named_modules()}
        found = {f"{prefixes[id(module)]}{name}": module._buffers[name] for module, name in places}
        return {name: buffer.detach() for name, buffer in found.items() if buffer is not None}

    def outlines(self, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Shapes and types of what was loaded; slices were read only of a checkpoint that fits (`wanted`)."""
        live = self.outline() if self.owned is not None else {}
        return {
            name: held if isinstance(held, torch.Tensor) else live.get(name, torch.empty(0, device="meta"))
            for name, held in tensors.items()
        }

    def wanted(self, outline: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[int, int]]] | None:
        """The elements that this rank needs of each tensor of a checkpoint with these shapes; None: all of all."""
        return None if self.owned is None else self.owned.wanted(outline)

    def check(self, tensors: Mapping[str, torch.Tensor], optimizer_names: Iterable[str]) -> None:
        """Raise CheckpointMismatch where `load_model` or `load_optimizer` would; only shapes and dtypes are read."""
        check_fit(self.outline(), tensors)
        for name in optimizer_names:
            self._place_of(name)

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load saved parameters and buffers into the model with `load_model_`."""
        if self.owned is None:
            load_model_(self.model, tensors)
        else:
            self._load_parts(tensors)
        self.reducer.changed()
        self.buffers.renew()

    def _load_parts(self, tensors: Mapping[str, Any]) -> None:
        """Load what this rank owns of the parameters, and whatever has no owner."""
        assert self.owned is not None
        common = self.common_model_tensors()
        with torch.no_grad():
            for name, live in common.items():
                if not _is_same_memory(live, tensors[name]):
                    live.copy_(tensors[name])
            for name in self.owned.fragments.keys() - self.owned.base:
                self.owned.load_parameter_(name, tensors[f"model.{self.owned.described.saved_name(name)}"])

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Give the optimizer its saved state. It takes over the tensors, which are copied only where necessary."""
        group_of = {one: group for group in self.optimizer.param_groups for one in group["params"]}
        for full_name, value in [*tensors.items(), *numbers.items()]:
            if not full_name.startswith("optim."):
                continue
            if self.owned is not None:
                self.owned.load_(full_name, value)
                continue
            parameter, key = self._place_of(full_name)
            if isinstance(value, torch.Tensor):
                if value.dim() > 0 and value.shape == parameter.shape:
                    value = _laid_out_like(parameter, value)
                value = place_of_state(key, value, parameter, group_of[parameter])
            self.optimizer.state[parameter][key] = value

    def _place_of(self, full_name: str) -> tuple[torch.nn.Parameter, str]:
        """The parameter and the state key that `optim.<fqn>.<state>` names. Raises CheckpointMismatch."""
        name, _, key = full_name.removeprefix("optim.").rpartition(".")
        name = name if self.divided is None else self.divided.first_names.get(name, name)
        if name not in self._by_name:
            raise CheckpointMismatch(f"the checkpoint has optimizer state of {name}, which the model does not train")
        return self._by_name[name], key


def _laid_out_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value in the parameter's memory layout, which a file does not keep and fused optimizers rely on."""
    wanted = torch.empty_like(parameter, device="meta").stride()
    if value.device == parameter.device and value.stride() == wanted:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Live parameters and buffers by name; a tensor tied to several names appears under the first."""
    tied = tied_names(model)
    state = model.state_dict(keep_vars=True)
    with torch._C.DisableTorchFunctionSubclass():  # of parameters that are not here, nothing is read
        return {f"model.{name}": value.detach() for name, value in state.items() if name not in tied}


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Further names of tied tensors in `state_dict()` -> the first name, which `model_tensors` uses."""
    names: dict[object, str] = {}
    tied = {}
    for name, value in model.state_dict(keep_vars=True).items():
        first = names.setdefault(_key_of(value), name)
        if first != name:
            tied[name] = first
    return tied


def _key_of(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors that share their memory."""
    # not by the address: parameters that come and go have none
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)


def load_model_(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy saved parameters and buffers into the model, except those that were read straight into its memory.

    Raises CheckpointMismatch if they do not fit.
    """
    live = model_tensors(model)
    check_fit(live, tensors)
    with torch.no_grad():
        for name, tensor in live.items():
            if not _is_same_memory(tensor, tensors[name]):
                tensor.copy_(tensors[name])


def check_fit(live: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointMismatch if saved parameters and buffers differ from the model's in name, shape or dtype."""
    saved = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    missing, foreign = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
    if missing or foreign:
        raise CheckpointMismatch(
            f"the checkpoint is of another model: it lacks {few(missing)} and also has {few(foreign)};"
            " resume with the model that wrote it, or choose another --save-dir"
        )
    for name, tensor in live.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise CheckpointMismatch(
                f"the checkpoint is of another model: {name} is {_kind(saved[name])} there, {_kind(tensor)} here;"
                " resume with the model that wrote it, or choose another --save-dir"
            )


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of equal shape and dtype are the same memory."""
    return (one.device, one.data_ptr(), one.stride()) == (other.device, other.data_ptr(), other.stride())


def begin_alike_(replica: Replica, group: Group) -> None:
    """Give all ranks the parameters and buffers of rank zero: other CPUs draw and round them slightly differently.

    But not the base, which is known to be equal, nor parameters of which the owners have rank zero's already.
    """
    if group.world_size == 1:
        return
    model = replica.model
    kept = {id(parameter) for parameter in base_parameters(model).values()}
    if not replica.has_parameters:
        assert replica.owned is not None
        kept |= {id(parameter) for parameter in replica.owned.names}
    if replica.divided is not None:
        kept |= _begin_parts_alike_(replica.divided, replica.reducer, group)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) in kept:
                continue
            carrier = tensor.detach().cpu().contiguous()
            send_tensor(group, carrier, source=0)
            tensor.copy_(carrier)


@torch.no_grad()
def _begin_parts_alike_(divided: DividedModel, reducer: GradientSync, group: Group) -> set[int]:
    """Give all ranks that hold a part the numbers of the first one; the `id` of the parts that this rank holds."""
    assert isinstance(reducer, OwnedUnits)
    assert reducer.division.tensors is not None
    for name, part in divided.parts.items():
        parameter = divided.named[name]
        carrier = torch.empty(parameter.shape, dtype=parameter.dtype)
        if not parameter.is_meta:
            carrier.copy_(parameter)
        send_tensor(group, carrier, source=reducer.division.tensors.holders(part.place)[0])
        if not parameter.is_meta:
            parameter.copy_(carrier)
    return {id(divided.named[name]) for name in divided.parts}


def batch_norms(model: torch.nn.Module) -> set[str]:
    """The names of the batch-norm classes in the model, which need micro-batches of more than one sample."""
    return {type(module).__name__ for module in model.modules() if isinstance(module, _BatchNorm)}


def check_model(model: torch.nn.Module) -> None:
    """Raise TaskError for a model that would train for a while but could not be saved or correctly updated."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(value):
            raise TaskError(
                f"{name} has no shape yet because its module is lazy: give the module its sizes, or run a sample"
                " through the model in build_model"
            )
        if value.is_complex():
            raise TaskError(f"{name} is complex: HetSeq trains real numbers only; use two real tensors instead")
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise TaskError(
                f"{name or 'the model'} ({type(module).__name__}) keeps extra state, which a checkpoint without pickle"
                " cannot hold: register it as a buffer"
            )
    # state_dict leaves out non-persistent buffers, which nothing is copied into
    for name, value in model.state_dict(keep_vars=True).items():
        if not is_dense(value):
            raise TaskError(
                f"{name} of shape {tuple(value.shape)} has strides {value.stride()}: its elements share memory or leave"
                " gaps; make it dense with .contiguous()"
            )


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that get gradients, by name, in registration order."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
