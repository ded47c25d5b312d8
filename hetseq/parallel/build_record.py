"""A model without memory for its numbers, and the record of which functions would have set them.

Responsible for what happens while `build_model` runs: each parameter moves to torch's device "meta" as soon as a module
registers it, so the memory in which it was made is never touched. Buffers stay as they are. Refuses to decide how a
parameter is drawn later (`delayed_init`).

The one idea: numbers on "meta" are lost, so each write to a parameter must come from a function that can run again
for one module alone: `reset_parameters()` of that module, `_init_weights(module)` of the model, or `initialise(module)`
of the task. Writes are seen below all of torch's Python functions, through views and `.data` too. A parameter that
other code has set last is `lost_at` that line.
"""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetseq.errors import TaskError

_RESETS = ("reset_parameters", "_reset_parameters")
_INIT_WEIGHTS, _INITIALISE = "_init_weights", "initialise"
#: operations after which nothing is left of the numbers before
_OVERWRITES = frozenset({
    "normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_", "eye",
})  # fmt: skip
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_HETSEQ = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INCLUDED_TASKS = os.path.join(_HETSEQ, "tasks") + os.sep


@dataclass(frozen=True)
class Setter:
    """A function that sets parameters of one module, and may run again: `name` of `owner`, for `module`."""

    name: str
    owner: Any
    module: torch.nn.Module

    def __call__(self) -> Any:
        function = getattr(self.owner, self.name)
        return function() if self.name in _RESETS else function(self.module)

    def reaches(self, storage: int) -> bool:
        """Whether a parameter in this storage belongs to the module, or to a module that it consists of."""
        return any(
            parameter is not None and storage_of(parameter) == storage
            for module in (self.module, *self.module.children())
            for parameter in module._parameters.values()
        )


@dataclass
class Story:
    """What has set the numbers in one storage so far."""

    setters: list[Setter] = field(default_factory=list)  # in order; the first has set all of them
    lost_at: str = ""  # the line that has set numbers and cannot run again
    kept: torch.Tensor | None = None  # in this storage, so that no other one gets the same address


@dataclass(frozen=True)
class Writes:
    """The storages in which a setter sets some numbers, and in which it sets all."""

    some: set[int] = field(default_factory=set)
    all: set[int] = field(default_factory=set)


class BuildRecord(TorchDispatchMode):
    """What has set the parameters of a model that `building` has built."""

    def __init__(self, task: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._task = task
        self._stories: dict[int, Story] = {}  # by storage, on "meta"
        self._blank: dict[int, torch.Tensor] = {}  # by storage, in memory, without numbers yet
        self._trial: Writes | None = None
        self._tried: dict[Setter, Writes] = {}
        self._order: dict[Setter, int] = {}
        self._ran = itertools.count()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context in which modules are built without memory for parameters. For one thread."""
        hook = modules.register_module_parameter_registration_hook(self._registered)
        try:
            with self, warnings.catch_warnings():
                # of torch, which does not know that such a copy is refused
                warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
                yield
        finally:
            hook.remove()
            self._blank.clear()

    def story(self, parameter: torch.Tensor) -> Story:
        """What has set a parameter on "meta"."""
        return self._stories.get(storage_of(parameter), Story())

    def place(self, setter: Setter) -> int:
        """The place of a setter in the order in which they ran last."""
        if setter not in self._order:
            self._order[setter] = next(self._ran)
        return self._order[setter]

    def try_out(self, setter: Setter) -> Writes:
        """What a setter writes to, by running it on "meta"; where it cannot run there, nothing."""
        if setter not in self._tried:
            try:
                self._tried[setter], _ = self.tried(setter)
            except TaskError:
                self._tried[setter] = Writes()
        return self._tried[setter]

    def tried(self, function: Callable[[], Any]) -> tuple[Writes, Any]:
        """Run a function on "meta": what it writes to, and what it returns."""
        self._trial = writes = Writes()
        try:
            with self, torch.no_grad():
                answer = function()
        finally:
            self._trial = None
        return writes, answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            results = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not any(leaf.is_meta for leaf in tensors_in((args, kwargs))):
                raise
            raise TaskError(
                f"--delayed-init: {_place()} needs numbers of parameters, which are drawn later ({func._schema.name}):"
                " do this in forward, or leave --delayed-init out, as for weights that are read from files"
            ) from error
        name = func._schema.name.partition("::")[2]
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in tensors_in(written):
                    self._written(tensor, name)
        if all(one.alias_info is None for one in func._schema.returns):
            for tensor in tensors_in(results):
                self._made(tensor, name, args)
        return results

    def _made(self, tensor: torch.Tensor, name: str, args: Sequence[Any]) -> None:
        """A storage has come into being."""
        storage = storage_of(tensor)
        if not tensor.is_meta:
            if "empty" in name:
                self._blank[storage] = tensor
            return
        story = Story(kept=tensor)
        if "empty" not in name:
            source = self._stories.get(storage_of(args[0])) if args and isinstance(args[0], torch.Tensor) else None
            if source is None or name not in ("clone", "_to_copy"):
                story.lost_at = _place()
            else:
                story.lost_at = source.lost_at
                # a copy of a module has setters of its own
                story.setters = list(source.setters) if name == "_to_copy" else []
        self._stories[storage] = story

    def _written(self, tensor: torch.Tensor, name: str) -> None:
        """Numbers have been set in place."""
        storage = storage_of(tensor)
        if not tensor.is_meta:
            self._blank.pop(storage, None)
            return
        is_all = name in _OVERWRITES and tensor.nbytes == tensor.untyped_storage().nbytes()
        if self._trial is not None:
            self._trial.some.add(storage)
            if is_all:
                self._trial.all.add(storage)
            return
        story = self._stories.setdefault(storage, Story(kept=tensor))
        setter = self._running(storage)
        if setter is None:
            story.lost_at, story.setters = _place(), []
            return
        self._order[setter] = next(self._ran)
        if is_all:
            story.lost_at, story.setters = "", [setter]
        elif setter not in story.setters:
            story.setters.append(setter)

    def _running(self, storage: int) -> Setter | None:
        """The innermost function on the stack that may run again for the parameter in a storage."""
        for frame in _frames():
            setter = self._setter_of(frame)
            if setter is not None:
                return setter if setter.reaches(storage) else None
        return None

    def _setter_of(self, frame: FrameType) -> Setter | None:
        code = frame.f_code
        if code.co_name not in (*_RESETS, _INIT_WEIGHTS, _INITIALISE) or not code.co_argcount:
            return None
        owner, *rest = (frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
        module = owner if code.co_name in _RESETS else rest[0] if rest else None
        if not isinstance(module, torch.nn.Module):
            return None
        is_right = owner is self._task if code.co_name == _INITIALISE else isinstance(owner, torch.nn.Module)
        return Setter(code.co_name, owner, module) if is_right else None

    def _registered(self, _module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> None:
        """Take the memory of a new parameter away."""
        if type(parameter) is not torch.nn.Parameter or parameter.is_meta:
            return
        is_blank = self._blank.pop(storage_of(parameter), None) is not None
        absent = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        put_(parameter, absent)
        if not is_blank:
            self._stories[storage_of(parameter)].lost_at = _place()


def put_(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """Give a parameter the memory of a tensor, on any device and of any type; returns the memory that it had."""
    if parameter.is_meta == tensor.is_meta:
        had = parameter.data
        parameter.data = tensor
        return had
    other = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    # the core of torch.utils.swap_tensors, which refuses tensors that an LSTM refers to weakly
    torch._C._swap_tensor_impl(parameter, other)
    return other.data


def storage_of(tensor: torch.Tensor) -> int:
    """Names the storage of a tensor, on "meta" too, where none has an address."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in collections within collections."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _frames() -> Iterator[FrameType]:
    """The frames of the stack outside this module, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def _place() -> str:
    """The line of the user that runs, as `task.py:12`; without one, the innermost line outside torch."""
    found = ""
    for frame in _frames():
        path = frame.f_code.co_filename
        is_foreign = "site-packages" in path or "dist-packages" in path or path.startswith(_PYTHON)
        text = f"{os.path.basename(path)}:{frame.f_lineno}"
        if not is_foreign and (not path.startswith(_HETSEQ) or path.startswith(_INCLUDED_TASKS)):
            return text
        found = found or ("" if f"{os.sep}torch{os.sep}" in path else text)
    return found or "build_model"
