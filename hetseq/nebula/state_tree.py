"""The structure of a saved state: a tree of plain values, with tensors at its leaves.

Responsible for: taking a state apart into JSON and named tensors, and for putting it together again with the same
types. Knows nothing of files, and never guesses: a value that cannot be restored exactly is a TypeError that names its
path. The one idea: tensors that share memory are stored as one block of memory, and share
memory again when loaded, so tied weights stay tied.

A node of the tree is None, a bool, an int, a finite float or a str as in JSON, or a list that begins with its
kind: ["dict", [key, node], ...], ["list", node, ...], ["tensor", name, {...}] and so on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from hetseq.checkpoint.part_io import dtype_of, spec_of
from hetseq.checkpoint.records import DamagedError

_ALIGNMENT = 16  # bytes; the size of the largest element
_LARGEST_INT = 1 << 4096  # Python refuses to read longer numbers from text
_RESERVED = "__metadata__"  # safetensors' own
_SAVED = (
    "tensors, numbers, strings, None, lists, tuples, sets, dictionaries with str or int keys, or objects with"
    " state_dict()"
)


@dataclass
class Flat:
    """A state taken apart: the tree, and its tensors by the names that the tree uses."""

    tree: Any
    tensors: dict[str, Tensor]


def flatten(state: Any) -> Flat:
    """Take a state apart; TypeError names the path of a value that cannot be saved, as in state['model'][3]."""
    taking = _Taking()
    tree = taking.node(state, "state", ())
    return Flat(tree, taking.stored())


def rebuild(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a state together again; DamagedError for a tree that `flatten` cannot produce."""
    try:
        return _Putting(tensors).value(tree)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"its structure is not one that HetSeq writes ({str(error)[:120]})") from None


@dataclass
class _Leaf:
    """One tensor of the state, and the node that refers to it."""

    name: str
    tensor: Tensor
    node: list[Any]


@dataclass
class _Taking:
    """The state of one `flatten`."""

    leaves: list[_Leaf] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {_RESERVED})
    above: set[int] = field(default_factory=set)  # the containers around the current value

    def node(self, value: Any, path: str, keys: tuple[str, ...]) -> Any:
        """The tree of one value."""
        if isinstance(value, Tensor):
            return self._tensor(value, path, keys)
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if -_LARGEST_INT < value < _LARGEST_INT else ["int", hex(value)]
        if type(value) is float:
            return value if math.isfinite(value) else ["float", str(value)]
        if type(value) is torch.Size:
            return ["size", *value]
        if type(value) is torch.dtype:
            return ["dtype", str(value).removeprefix("torch.")]
        if type(value) in (dict, OrderedDict, list, tuple, set):
            return self._container(value, path, keys)
        if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            return self.node(value.state_dict(), f"{path}.state_dict()", keys)
        raise TypeError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a state holds only {_SAVED}")

    def _container(self, value: Any, path: str, keys: tuple[str, ...]) -> list[Any]:
        if id(value) in self.above:
            raise ValueError(f"{path} contains itself: a saved state must be finite")
        self.above.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dictionary(value, path, keys)
            if type(value) is set:
                return ["set", *(self._member(item, path) for item in sorted(value, key=repr))]
            nodes = (self.node(item, f"{path}[{index}]", (*keys, str(index))) for index, item in enumerate(value))
            return ["list" if type(value) is list else "tuple", *nodes]
        finally:
            self.above.discard(id(value))

    def _dictionary(self, value: dict[Any, Any], path: str, keys: tuple[str, ...]) -> list[Any]:
        pairs = []
        for key, item in value.items():
            if type(key) not in (str, int):
                raise TypeError(f"{path} has the key {key!r}: keys must be str or int")
            pairs.append([key, self.node(item, f"{path}[{key!r}]", (*keys, str(key)))])
        if type(value) is dict:
            return ["dict", *pairs]
        # a module's state_dict() has the versions of its layers as an attribute, which load_state_dict reads
        versions = getattr(value, "_metadata", None)
        about = self.node(versions, f"{path}._metadata", (*keys, "_metadata")) if versions is not None else None
        return ["ordered", about, *pairs]

    @staticmethod
    def _member(item: Any, path: str) -> Any:
        if item is not None and type(item) not in (bool, int, str):
            raise TypeError(f"{path} is a set with {item!r} in it: only numbers, strings and None may be there")
        return item

    def _tensor(self, tensor: Tensor, path: str, keys: tuple[str, ...]) -> list[Any]:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}: among tensors, only"
                " torch.Tensor and Parameter can be saved (a DTensor's own part is its to_local())"
            )
        try:
            spec_of(path, tensor)
        except TypeError as error:
            raise TypeError(str(error).removeprefix("tensor ")) from None
        node: list[Any] = ["tensor", "", {}]
        if type(tensor) is nn.Parameter:
            node[2]["parameter"] = tensor.requires_grad
        self.leaves.append(_Leaf(".".join(keys) or "state", tensor.detach(), node))
        return node

    def stored(self) -> dict[str, Tensor]:
        """The tensors to store, by name; the nodes of the leaves are updated to refer to them."""
        groups: dict[Any, list[_Leaf]] = {}
        for index, leaf in enumerate(self.leaves):
            memory = leaf.tensor.untyped_storage().data_ptr() if leaf.tensor.numel() else -index - 1
            groups.setdefault((leaf.tensor.device, memory), []).append(leaf)
        stored: dict[int, tuple[str, Tensor]] = {}
        for leaves in groups.values():
            for overlapping in _overlapping(leaves):
                first = overlapping[0]
                if all(_is_same(first.tensor, leaf.tensor) for leaf in overlapping):
                    whole = first.tensor
                else:
                    whole = _share(overlapping)
                name = self._unique(first.name)
                stored[id(first)] = (name, whole)
                for leaf in overlapping:
                    leaf.node[1] = name
        # in the order of the state, not of the memory
        return dict(stored[id(leaf)] for leaf in self.leaves if id(leaf) in stored)

    def _unique(self, wanted: str) -> str:
        plain = wanted.encode("utf-8", "backslashreplace").decode()
        name, count = plain, 1
        while name in self.names:
            count += 1
            name = f"{plain}~{count}"
        self.names.add(name)
        return name


def _span(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes in its storage that a non-empty tensor uses."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (int(reach) + 1) * size


def _overlapping(leaves: list[_Leaf]) -> Iterable[list[_Leaf]]:
    """Split the leaves of one storage into groups that share bytes."""
    if len(leaves) == 1:
        yield leaves
        return
    group: list[_Leaf] = []
    reached = 0
    for leaf in sorted(leaves, key=lambda leaf: _span(leaf.tensor)):
        begin, end = _span(leaf.tensor)
        if group and begin >= reached:
            yield group
            group = []
        group.append(leaf)
        reached = max(reached, end) if len(group) > 1 else end
    yield group


def _is_same(one: Tensor, other: Tensor) -> bool:
    def look(tensor: Tensor) -> tuple[Any, ...]:
        return (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    return look(one) == look(other)


def _share(leaves: list[_Leaf]) -> Tensor:
    """The bytes that these leaves use, as one tensor; their nodes record the view of each."""
    spans = [_span(leaf.tensor) for leaf in leaves]
    begin = min(span[0] for span in spans) // _ALIGNMENT * _ALIGNMENT
    end = max(span[1] for span in spans)
    for leaf in leaves:
        tensor = leaf.tensor
        if tensor.is_conj() or tensor.is_neg():
            raise TypeError(f"{leaf.name} is a conjugate or negative view of another tensor: save its resolve_conj()")
        leaf.node[2]["view"] = {
            "dtype": spec_of(leaf.name, tensor).dtype,
            "offset": (tensor.storage_offset() * tensor.element_size() - begin) // tensor.element_size(),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }
    raw = torch.empty(0, dtype=torch.uint8, device=leaves[0].tensor.device)
    return raw.set_(cast(Any, leaves[0].tensor.untyped_storage()), begin, (end - begin,), (1,))


class _Putting:
    """The state of one `unflatten`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._kinds: dict[str, Callable[..., Any]] = {
            "dict": self._dict,
            "ordered": self._ordered,
            "list": lambda *nodes: [self.value(node) for node in nodes],
            "tuple": lambda *nodes: tuple(self.value(node) for node in nodes),
            "set": lambda *nodes: {_plain(node) for node in nodes},
            "size": lambda *sizes: torch.Size(sizes),
            "dtype": _dtype,
            "int": lambda text: int(text, 16),
            "float": _special_float,
            "tensor": self._tensor,
        }

    def value(self, node: Any) -> Any:
        """The value of a node."""
        return self._kinds[node[0]](*node[1:]) if isinstance(node, list) else _plain(node)

    def _dict(self, *pairs: Any) -> dict[Any, Any]:
        found = {_key(key): self.value(node) for key, node in pairs}
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    def _ordered(self, about: Any, *pairs: Any) -> OrderedDict[Any, Any]:
        found = OrderedDict(self._dict(*pairs))
        if about is not None:
            found._metadata = self.value(about)  # type: ignore[attr-defined]
        return found

    def _tensor(self, name: str, options: Mapping[str, Any]) -> Tensor:
        tensor = self._tensors[name]
        view = options.get("view")
        if view is not None:
            tensor = _look_into(tensor, view)
        if "parameter" in options:
            return nn.Parameter(tensor, requires_grad=bool(options["parameter"]))
        return tensor


def _look_into(raw: Tensor, view: Mapping[str, Any]) -> Tensor:
    dtype, shape, stride, offset = dtype_of(view["dtype"]), view["shape"], view["stride"], view["offset"]
    if len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in (*shape, *stride, offset)):
        raise ValueError("a view has a negative extent")
    reach = offset + sum((extent - 1) * step for extent, step in zip(shape, stride)) + 1
    if raw.dtype != torch.uint8 or raw.storage_offset() or 0 in shape or reach * dtype.itemsize > raw.numel():
        raise ValueError("a view extends past the end of its memory")
    empty = torch.empty(0, dtype=dtype, device=raw.device)
    return empty.set_(cast(Any, raw.untyped_storage()), offset, shape, stride)


def _plain(node: Any) -> Any:
    if node is not None and not isinstance(node, (bool, int, float, str)):
        raise ValueError("a value is neither a number nor text")
    return node


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise ValueError("a key is neither text nor an integer")
    return key


def _special_float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError("a number is invalid")
    return float(text)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a type is invalid")
    return dtype
