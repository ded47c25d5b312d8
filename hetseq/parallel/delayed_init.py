"""Delayed initialisation: the numbers of a model are drawn part by part, the same ones on any layout of ranks.

Responsible for finding the functions that set each parameter (`build_record` has seen them run), and for running them
again for the parameters that are wanted, in memory that exists by then. Refuses to know ranks, units and owners.

The one idea: what a function draws depends on the seed of the run, the name of its module and its own name, and on
nothing that was drawn before. So one rank may draw the whole model at once, and another one layer by layer.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetseq.errors import TaskError
from hetseq.parallel.base_parameters import base_parameters
from hetseq.parallel.build_record import BuildRecord, Setter, put_, storage_of, tensors_in

_PIECE = 1 << 20  # elements that are looked at together


class DelayedInit:
    """Draws the parameters of a model that `BuildRecord.building` has built.

    `initialise`: the task's own function, bound; None: it has none. Raises TaskError for a parameter that no function
    sets, or whose numbers come from code that cannot run again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        record: BuildRecord,
        seed: int,
        *,
        initialise: Callable[[torch.nn.Module], bool] | None = None,
    ) -> None:
        self._record, self._seed = record, seed
        self._task = "the task" if initialise is None else type(getattr(initialise, "__self__", None)).__name__
        self._modules = dict(model.named_modules())
        self._named = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._types = {id(parameter): parameter.dtype for parameter in self._named.values()}
        self._module_names = {id(module): name for name, module in self._modules.items()}
        self._check_memory(model)
        self._by_storage = {storage_of(parameter): parameter for parameter in self._named.values()}
        self._owners: dict[int, list[torch.nn.Module]] = {}  # of each parameter, in the order of the modules
        for module in self._modules.values():
            for parameter in module._parameters.values():
                if parameter is not None and module not in self._owners.setdefault(id(parameter), []):
                    self._owners[id(parameter)].append(module)
        #: the functions that set a parameter, in order
        self._setters: dict[int, list[Setter]] = {}
        #: the parameters that a function sets
        self._written: dict[Setter, list[torch.nn.Parameter]] = {}
        with _kept_random_numbers():
            self._ask_task(initialise)
            for name, parameter in self._named.items():
                if id(parameter) not in self._setters:
                    self._setters[id(parameter)] = self._found(name, parameter)
            for setter in {setter for setters in self._setters.values() for setter in setters}:
                storages = record.try_out(setter).some
                self._written[setter] = [one for storage, one in self._by_storage.items() if storage in storages]

    # which functions set what

    def _check_memory(self, model: torch.nn.Module) -> None:
        homes: dict[int, str] = {}
        for name, parameter in self._named.items():
            if not parameter.is_meta:
                raise TaskError(
                    f"--delayed-init: {name} has numbers already: build_model put it into its module past"
                    " register_parameter, or it is no plain torch.nn.Parameter; assign it to an attribute of the"
                    " module, or leave --delayed-init out"
                )
            if (first := homes.setdefault(storage_of(parameter), name)) != name:
                raise TaskError(
                    f"--delayed-init: {first} and {name} are two parameters in the same memory: use one parameter under"
                    " both names, as in b.weight = a.weight, or leave --delayed-init out"
                )
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise TaskError(
                    f"--delayed-init: the buffer {name} was computed from parameters, which have no numbers yet:"
                    " compute it in forward, or leave --delayed-init out"
                )

    def _ask_task(self, initialise: Callable[[torch.nn.Module], bool] | None) -> None:
        """Find the modules that the task initialises itself."""
        if initialise is None:
            return
        for module in self._modules.values():
            writes, answer = self._record.tried(functools.partial(initialise, module))
            if not isinstance(answer, bool):
                raise TaskError(
                    f"{self._task}.initialise returned {type(answer).__name__}: expected True if it has set all"
                    " parameters of the module, else False"
                )
            setter = Setter("initialise", getattr(initialise, "__self__", None), module)
            for parameter in module.parameters(recurse=False) if answer else ():
                if self._owners[id(parameter)][0] is not module:
                    continue
                if storage_of(parameter) not in writes.some:
                    raise TaskError(
                        f"{self._task}.initialise returned True for {self._name_of(module)}, but leaves"
                        f" {self._names[id(parameter)]} as it is: set all parameters of the module, or return False"
                    )
                self._setters[id(parameter)] = [setter]

    def _found(self, name: str, parameter: torch.nn.Parameter) -> list[Setter]:
        """The functions that set a parameter. Raises TaskError if there are none, or others have set it since."""
        story, (owner, *others) = self._record.story(parameter), self._owners[id(parameter)]
        if story.lost_at:
            raise TaskError(
                f"--delayed-init: {name} gets its numbers at {story.lost_at}, when it has no memory, so they would be"
                f" lost: set them in initialise(module) of the task, or leave --delayed-init out, as for weights that"
                " are read from files"
            )
        # a parameter under several names has the numbers of the first one
        setters = [one for one in story.setters if not any(one.module is other for other in others)]
        setters = setters or self._chosen(parameter, owner)
        if not setters:
            raise TaskError(
                f"--delayed-init: no function sets {name}: {type(owner).__name__} has no reset_parameters(), and the"
                " model no _init_weights(module) for it; write initialise(module) of the task, or leave --delayed-init"
                " out"
            )
        return setters

    def _chosen(self, parameter: torch.nn.Parameter, owner: torch.nn.Module) -> list[Setter]:
        """The functions that would set a parameter, if none of them has run."""
        storage, chosen = storage_of(parameter), list[Setter]()
        above = self._above(owner)
        own = (owner, *above[-1:])
        model = None
        for module in (*above, owner):  # within a model of transformers, the part that is a model of its own
            if hasattr(module, "_init_weights") and (model is None or hasattr(model, "initialize_weights")):
                model = module
        candidates = [
            Setter(name, module, module) for module in own for name in ("reset_parameters", "_reset_parameters")
            if callable(getattr(module, name, None))
        ]  # fmt: skip
        candidates += [Setter("_init_weights", model, module) for module in own] if model is not None else []
        for setter in candidates:
            writes = self._record.try_out(setter)
            if storage in writes.all:
                chosen = [setter]
            elif storage in writes.some and chosen:
                chosen.append(setter)
        return chosen

    def _above(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules that a module is part of, the model first."""
        name = self._module_names[id(module)]
        parts = name.split(".") if name else []
        return [self._modules[".".join(parts[:depth])] for depth in range(len(parts))]

    def _name_of(self, module: torch.nn.Module) -> str:
        return self._module_names.get(id(module)) or "the model"

    # drawing

    @torch.no_grad()
    def fill(self, parameters: Sequence[torch.nn.Parameter], device: torch.device | None = None) -> None:
        """Draw the numbers of these parameters, on the CPU, in the types in which they were built.

        They go into the memory that the parameters have; into new memory on `device`, if they have none. All other
        parameters stay as they are. Raises TaskError.
        """
        setters = {setter for parameter in parameters for setter in self._setters[id(parameter)]}
        ordered = sorted(setters, key=self._record.place)
        last = {id(one): max(self._setters[id(one)], key=self._record.place) for one in parameters}
        drawn: dict[int, torch.Tensor] = {}  # what has been begun, until it is in its place
        left = {id(one): one for one in parameters}
        for parameter in parameters:
            if parameter.is_meta:
                put_(parameter, torch.empty_like(parameter, device=device or "cpu"))
        with _kept_random_numbers():
            for setter in ordered:
                with ExitStack() as restoring:
                    for one in self._written[setter]:
                        memory = self._memory(one, setter, left, drawn)
                        restoring.callback(put_, one, put_(one, memory))
                    self._run(setter)
                for key, parameter in list(left.items()):
                    if last[key] == setter:
                        self._finish(parameter, drawn.pop(key))
                        del left[key]

    def in_turn(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
        """The numbers of these parameters, one after the other; memory for them exists only in its turn."""
        for one in parameters:
            if not one.is_meta:
                yield one.data
                continue
            self.fill([one])
            yield one.data
            put_(one, torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"))

    def _memory(
        self, parameter: torch.nn.Parameter, setter: Setter, left: Mapping[int, object], drawn: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """The memory of a parameter for a function that writes to it: its own, or some that is thrown away after it."""
        key, built = id(parameter), self._types[id(parameter)]
        is_wanted, has_begun = key in left, key in drawn
        if is_wanted and setter in self._setters[key]:
            if not has_begun:
                drawn[key] = _blank(parameter.data if _is_at_home(parameter, built) else None, parameter, built)
            return drawn[key]
        if is_wanted and not has_begun and _is_at_home(parameter, built):
            return parameter.data  # it is overwritten later
        return torch.empty(parameter.shape, dtype=built)

    def _run(self, setter: Setter) -> None:
        name = self._name_of(setter.module)
        words = f"{self._seed}/init/{name}/{setter.name}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        setter()

    def _finish(self, parameter: torch.nn.Parameter, drawn: torch.Tensor) -> None:
        """Write the drawn numbers into the parameter, unless they were drawn there."""
        if any(piece.isnan().any() for piece in drawn.view(-1).split(_PIECE) if piece.sum().isnan()):
            raise TaskError(
                f"--delayed-init: {' and '.join(one.name for one in self._setters[id(parameter)])} left numbers of"
                f" {self._names[id(parameter)]} unset: set all of them in initialise(module) of the task"
            )
        if drawn.data_ptr() != parameter.data_ptr() or drawn.device != parameter.device:
            parameter.data.copy_(drawn)


def cast_(model: torch.nn.Module, storage: torch.dtype) -> None:
    """Give floating-point parameters without memory another type, but not to the base."""
    unchanged = {id(parameter) for parameter in base_parameters(model).values()}
    for parameter in model.parameters():
        if parameter.is_meta and parameter.is_floating_point() and id(parameter) not in unchanged:
            parameter.data = parameter.data.to(storage)


def make_absent_(parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
    """Parameters without memory as they are between two steps of `OwnedParameters`: on the device, without pages."""
    for parameter in parameters:
        memory = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
        memory.untyped_storage().resize_(0)
        put_(parameter, memory)


def make_present_(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Give parameters of `make_absent_` memory again, whose numbers are undefined."""
    for parameter in parameters:
        parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())


def is_absent(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements has no memory for them."""
    return tensor.numel() > 0 and not tensor.untyped_storage().size()


class RefusingNumbers(TorchDispatchMode):
    """Context in which code that reads or writes absent parameters raises TaskError; shapes and types may be read.

    Without it such code would end the process. `where` names the code.
    """

    def __init__(self, model: torch.nn.Module, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = model.named_parameters()
        self._names = {storage_of(parameter): name for name, parameter in named if is_absent(parameter)}
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        name = schema.name.partition("::")[2]
        aliases = [one.alias_info for one in (*schema.arguments, *schema.returns) if one.alias_info is not None]
        is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
        if not is_view and not name.endswith("_like") and not name.startswith("new_"):
            for tensor in tensors_in((args, kwargs)):
                if (parameter := self._names.get(storage_of(tensor))) is not None:
                    raise TaskError(
                        f"{self._where} uses the numbers of {parameter}, which have no memory yet with --delayed-init:"
                        " read shapes and types alone there, or leave --delayed-init out"
                    )
        return func(*args, **kwargs)


def _is_at_home(parameter: torch.Tensor, built: torch.dtype) -> bool:
    """Whether a parameter can be drawn where it is."""
    return parameter.device.type == "cpu" and parameter.dtype == built and parameter.is_contiguous()


def _blank(memory: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory in which a number that is never set shows."""
    memory = torch.empty(like.shape, dtype=dtype) if memory is None else memory
    return memory.fill_(torch.nan) if memory.is_floating_point() else memory


@contextmanager
def _kept_random_numbers() -> Iterator[None]:
    """Context after which the generators of torch's CPU, NumPy and Python are as they were."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
