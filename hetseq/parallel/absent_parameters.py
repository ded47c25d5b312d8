"""Uses of parameters that come and go which their layers do not show: found before they read memory that is free.

Responsible for two checks: no code reads parameters while they are not here, and no gradient comes to parameters of a
layer but through its output. The second is made in the first micro-batch of a rank, since models do alike in all. Knows
nothing of when parameters are here. Without the checks such a use would end the process, or give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from hetseq.errors import TaskError

_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that give tensors of the same memory
_HARMLESS = {
    "__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_shared", "is_signed", "ndimension", "nelement",
    "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset",
    "stride", "untyped_storage",
}  # fmt: skip


class _Absent(torch.nn.Parameter):
    """A parameter that is not here. Whatever reads its memory raises TaskError; the rest works as before."""

    absent_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not _is_harmless(func):
            for value in (*args, *given.values()):
                for one in value if isinstance(value, (list, tuple)) else (value,):
                    if type(one) is _Absent:
                        raise TaskError(
                            f"--shard-model all: {one.absent_name} is used outside of the forward of its layer, where"
                            " it is not here: use --shard-model state"
                        )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)


def mark(parameter: torch.nn.Parameter, absent_name: str | None) -> None:
    """Have uses of a parameter of that name refused, or with None no longer.

    The object stays the same and gets another class, so a parameter that is here costs nothing to read. A parameter of
    a class of its own keeps it.
    """
    if absent_name is None and type(parameter) is _Absent:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]
    elif absent_name is not None and type(parameter) is torch.nn.Parameter:
        parameter.__class__ = _Absent
        parameter.absent_name = absent_name  # type: ignore[attr-defined]


def _is_harmless(func: Any) -> bool:
    """Whether a function of torch reads no memory of its arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VIEWS
    return name in _HARMLESS or name == "__set__"


def are_within(tensors: Sequence[torch.Tensor], memories: Sequence[torch.Tensor]) -> bool:
    """Whether one of the tensors is a part of one of these memories."""
    places = {one.untyped_storage()._cdata for one in memories}
    return any(one.layout is torch.strided and one.untyped_storage()._cdata in places for one in tensors)


def hidden_from(loss: torch.Tensor, outputs: Mapping[int, Sequence[Node]], layer_of: Mapping[int, int]) -> int | None:
    """The number of a layer whose parameters get gradients of `loss` otherwise than through its output; None if none.

    `outputs`: by layer, the nodes of autograd that gave its output; `layer_of`: the layer of a parameter, by its `id`.
    """
    ends = {node for nodes in outputs.values() for node in nodes}
    if loss.grad_fn is None:
        return None
    for number, begin in ((None, [loss.grad_fn]), *outputs.items()):
        for parameter in _reached(begin, ends):
            home = layer_of.get(id(parameter))
            if home is not None and home != number:
                return home
    return None


def _reached(begin: Sequence[Node], ends: set[Node]) -> Iterator[torch.Tensor]:
    """The leaves that gradients reach from these nodes without passing one of `ends` on their way."""
    seen, waiting = set[Node](), list(begin)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None or following in ends or following in seen:
                continue
            seen.add(following)
            if (leaf := getattr(following, "variable", None)) is not None:
                yield leaf
            waiting.append(following)
