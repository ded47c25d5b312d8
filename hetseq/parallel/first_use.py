"""Parameters that arrive while forward computes: the first use of each of them waits for it.

Responsible for noticing a use before it happens. How a parameter arrives is the reducer's affair.

The one idea: a forward touches its parameters one layer after the other, so layers may compute while later ones are
still on their way. All functions of torch are seen (`TorchFunctionMode`), and a module that is called waits for its
own parameters, since an extension may read their memory without such a function. Where uses cannot be seen one by
one, inside transforms (torch.func) and for subclasses of tensors, the first one waits for everything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

_DEEPEST = 3  # lists in lists of arguments
_TENSORS = (torch.Tensor, torch.nn.Parameter)
#: about a tensor, not about its values
_FACTS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "grad", "is_cuda", "is_leaf", "layout", "ndim", "requires_grad", "shape")
) | {torch.Tensor.dim, torch.Tensor.is_floating_point, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.stride}


class FirstUse(TorchFunctionMode):
    """Context of a forward in which `wait` is called with the `id` of a parameter of `late` before its use.

    `wait` takes it out of `late`; called with None it waits for all of them.
    """

    def __init__(self, late: dict[int, Any], wait: Callable[[int | None], None]) -> None:
        super().__init__()
        self._late, self._wait = late, wait
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> FirstUse:
        self._hook = register_module_forward_pre_hook(self._module_called)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        assert self._hook is not None
        self._hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._late and func not in _FACTS:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                self._wait(None)
            else:
                for tensor in _tensors((args, kwargs or {}), _DEEPEST):
                    if id(tensor) in self._late:
                        self._wait(id(tensor))
                    elif type(tensor) not in _TENSORS:
                        self._wait(None)
        return func(*args, **(kwargs or {}))

    def _module_called(self, module: torch.nn.Module, _: Any) -> None:
        for parameter in module._parameters.values():
            if id(parameter) in self._late:
                self._wait(id(parameter))


def are_uses_hidden(model: torch.nn.Module) -> bool:
    """Whether compiled code may use parameters of the model where no function of torch is called."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:  # functions are compiled one by one
        return True
    return any(
        isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
