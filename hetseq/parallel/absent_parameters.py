"""Uses of parameters that come and go which their layers do not show: found before they read memory that is free.

Responsible for two checks of a micro-batch, of which a rank makes the first one only, since models do alike in all: no
code reads parameters of a layer outside of its forward, and no gradient comes to them but through its output. Knows
nothing of when parameters are here. Without the checks such a use would end the process, or give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from hetseq.errors import TaskError

_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that give tensors of the same memory
_HARMLESS = {
    "__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "ndimension", "nelement", "numel", "register_hook", "requires_grad_", "size", "storage_offset",
    "stride", "untyped_storage",
}  # fmt: skip


class RefusingAbsent(TorchFunctionMode):
    """Context in which the use of a parameter that is not here raises TaskError.

    `name_of_absent` gives the name of such a parameter by its `id`, None for any other tensor.
    """

    def __init__(self, name_of_absent: Callable[[int], str | None]) -> None:
        super().__init__()
        self._name_of_absent = name_of_absent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not _is_harmless(func):
            for value in (*args, *given.values()):
                for one in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(one, torch.nn.Parameter) and (name := self._name_of_absent(id(one))) is not None:
                        raise TaskError(
                            f"--shard-model all: {name} is used outside of the forward of its layer, where it is not"
                            " here: use --shard-model state"
                        )
        return func(*args, **given)


def _is_harmless(func: Any) -> bool:
    """Whether a function of torch reads no memory of its arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VIEWS
    return name in _HARMLESS or name == "__set__"


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
