"""Finds state that forward carries from one batch to the next, such as the hidden state that an LSTM module keeps.

Looks at the tensors that modules and the task hold besides parameters, around the forwards that the trial of the loss
makes anyway. A tensor carries state if a forward wrote it, and the next forward read the written values and wrote other
ones. A table that is filled once, or that grows with the sequence, keeps its values. An output that a module stores for
other code, such as attention weights, is not read by the next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hetseq.parallel.buffers import is_same_table

_MOST_ENTRIES, _DEEPEST = 64, 3  # of a list or dict in an attribute: larger ones are data, not state
_REGISTRIES = {"_parameters", "_buffers", "_modules"}
_OVERWRITES = {"copy_", "zero_", "fill_", "__setitem__"}  # of their first argument, whose old values do not matter
_ONLY_SHAPES = {"__get__", "__set__", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
                "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}  # fmt: skip
_VALUES = {"item", "tolist", "numpy", "equal", "allclose", "__bool__", "__float__", "__int__", "__array__"}


@dataclass(frozen=True)
class _TensorPlace:
    """An entry of an attribute of a module, or of the task."""

    holder: str
    attribute: str
    entry: str = ""


@dataclass(frozen=True)
class _HeldTensor:
    """A tensor in its place; `version` counts the writes into it."""

    tensor: torch.Tensor
    version: int | None

    def is_as_in(self, before: _HeldTensor | None) -> bool:
        return before is not None and self.tensor is before.tensor and self.version == before.version


class CarriedState:
    """Watches forwards, one after another; `found` names the tensors that carry state between them."""

    def __init__(self, task: object, model: torch.nn.Module) -> None:
        self._holders = _holders(task, model)
        self._constant = {_storage(parameter) for parameter in model.parameters()}
        self._written: dict[_TensorPlace, tuple[_HeldTensor, torch.Tensor]] = {}  # by the last forward, with the values
        self.found: list[str] = []

    @contextmanager
    def during(self, batch: Any) -> Iterator[None]:
        """Watch the forward of this batch, which runs inside."""
        before = self._look()
        # two batches may be parts of one tensor, which modules may keep
        own = self._constant | {_storage(tensor) for _, tensor in _tensors(batch)}
        reads = _Reads({_storage(held.tensor) for held, _ in self._written.values()} - own)
        with reads if self._written else nullcontext():  # most models write nothing
            yield
        after = self._look()
        written = {place: held for place, held in after.items() if not held.is_as_in(before.get(place))}
        for place, (held, values) in self._written.items():
            is_read = _storage(held.tensor) in reads.seen
            if is_read and place in written and not is_same_table(values, written[place].tensor):
                name = f"{place.attribute} of {place.holder}"
                self.found += [name] * (name not in self.found)
        self._written = {
            place: (held, held.tensor.detach().clone())
            for place, held in written.items()
            if _storage(held.tensor) not in self._constant
        }

    def _look(self) -> dict[_TensorPlace, _HeldTensor]:
        return {
            _TensorPlace(holder, attribute, entry): _HeldTensor(tensor, _version(tensor))
            for holder, attributes in self._holders
            for attribute, value in attributes().items()
            for entry, tensor in _tensors(value)
        }


class _Reads(TorchFunctionMode):
    """Within it `seen` collects the storages whose values entered a computation."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._stale, self.seen = storages, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not torch.compiler.is_compiling():  # code that the user has compiled stays one graph
            self._note(getattr(func, "__name__", ""), args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        target = args[:1] if name in _OVERWRITES else kwargs.get("out")
        self._stale -= {_storage(tensor) for _, tensor in _tensors(target)}
        given = self._stale & {_storage(tensor) for _, tensor in _tensors([args, kwargs])}
        if not given or name in _ONLY_SHAPES:
            return
        # a view does not use the values yet
        is_computed = any(_storage(tensor) not in given for _, tensor in _tensors(result))
        if is_computed or name in _VALUES:
            self.seen |= given


def _holders(task: object, model: torch.nn.Module) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """The modules of the model, other modules of the task, and the task: a name and a source of attributes each."""
    own = getattr(task, "__dict__", {})
    roots = {"": model, **{name: value for name, value in own.items() if isinstance(value, torch.nn.Module)}}
    modules: dict[torch.nn.Module, str] = {}
    for root, part in roots.items():
        for name, module in part.named_modules(prefix=root):
            modules.setdefault(module, f"{name or 'the model'} ({type(module).__name__})")
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = [(f"the task ({type(task).__name__})", lambda: own)]
    for module, name in modules.items():
        found.append((name, lambda module=module: _attributes(module)))  # type: ignore[misc]
    return found


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """All attributes except parameters and modules."""
    plain = {name: value for name, value in vars(module).items() if name not in _REGISTRIES}
    return {**plain, **dict(module._buffers.items())}


def _tensors(value: Any, entry: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value and their places in it."""
    if isinstance(value, torch.Tensor):
        yield entry, value
    elif isinstance(value, (list, tuple, Mapping)) and len(value) <= _MOST_ENTRIES and depth < _DEEPEST:
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(part, f"{entry}[{key!r}]", depth + 1)


def _storage(tensor: torch.Tensor) -> int:
    """Equal for tensors in the same memory; tensors without memory have numbers of their own."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse tensors, and others without storage
        return id(tensor)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
