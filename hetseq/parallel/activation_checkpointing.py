"""Activation checkpointing for any model: modules that keep only their inputs for backward, which runs them again.

Responsible for the second forward of such modules (`model_layers` finds them). A model's parameters, names and
classes stay as they are. The one idea (Chen et al. 2016, arXiv 1604.06174): what lies between the input and the output
of a module can be computed again, just before its gradient is.

The second forward has the random numbers and the autocast of the first, so that losses and gradients are bitwise
equal. What a forward changes besides its result would change twice, so modules that do so are refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetseq.errors import ConfigError, TaskError
from hetseq.parallel.buffers import is_same_table
from hetseq.parallel.model_layers import AUTO, find_layers
from hetseq.parallel.replica import batch_norms


def checkpoint_activations(model: nn.Module, modules: str | Sequence[str] = AUTO) -> tuple[str, ...]:
    """Make modules of the model keep only their inputs for backward, while it trains. Returns their names.

    `modules` are patterns of names as in `model.named_modules()`, such as `encoder.layer.*`; of modules inside each
    other the outer one counts. "auto" takes the layers: the modules of each `ModuleList` or `Sequential` that has
    several of one class with parts of their own. May be called again with the same patterns. Any rank, alone.

    Raises ConfigError if nothing fits, if a module has batch norm layers, since a second forward would count a batch
    twice, and if a model of transformers does the same by itself.
    """
    patterns = [modules] if isinstance(modules, str) else list(modules)
    found = find_layers(model, patterns, flag="--checkpoint-modules")
    if checkpoints_itself(model):
        raise ConfigError(
            f"--checkpoint-modules {','.join(patterns)}: {type(model).__name__} runs layers again in backward already,"
            " by its own gradient checkpointing: leave this or --activation-checkpointing out"
        )
    for name, module in found.items():
        if norms := batch_norms(module):
            raise ConfigError(
                f"--checkpoint-modules {','.join(patterns)}: {name} has {', '.join(sorted(norms))}, whose averages"
                " would count each batch twice if its forward ran again in backward: name modules without it"
            )
        if not is_checkpointed(module):
            module.forward = _ForwardAgain(name, module)
    return tuple(found)


def checkpoints_itself(model: nn.Module) -> bool:
    """Whether a model of transformers runs layers again in backward by its own means."""
    # the second is how older versions of transformers call it
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(model, name)), False))


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `checkpoint_activations` has taken this module."""
    return isinstance(module.forward, _ForwardAgain)


class _ForwardAgain:
    """The forward of a module that keeps only its inputs for backward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module, self._forward = name, module, module.forward
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        # a change of `.data` has no version; a module that makes one does so from the first time on
        before = [_Buffer(*place, has_values=not self._has_run) for place in _places(self._module)]
        self._has_run = True
        result = self._checkpointed(args, kwargs)
        if any(buffer.has_changed() for buffer in before):
            raise TaskError(
                f"{self._name} ({type(self._module).__name__}) changes one of its buffers in forward, and with"
                " --checkpoint-modules it would do so once more in backward: leave this module out"
            )
        return result

    def _checkpointed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # by position, where `checkpoint` looks for tensors: it keeps the random numbers of their devices alone
        count, names = len(args), list(kwargs)
        parameter = next(self._module.parameters(), None)
        devices = [] if parameter is None or parameter.device.type == "cpu" else [parameter.new_empty(0)]
        python, numpy, is_again = random.getstate(), np.random.get_state(), False

        def forward(*given: Any) -> Any:
            nonlocal is_again
            named = dict(zip(names, given[count:]))
            if is_again:
                with _random_numbers_of(python, numpy):
                    return self._forward(*given[:count], **named)
            is_again = True
            return self._forward(*given[:count], **named)

        return checkpoint(forward, *args, *kwargs.values(), *devices, use_reentrant=False)


def _places(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (holder, name, buffer)
        for holder in module.modules()
        for name, buffer in holder._buffers.items()
        if buffer is not None
    ]


class _Buffer:
    """A buffer as it was before forward."""

    def __init__(self, holder: nn.Module, name: str, tensor: torch.Tensor, *, has_values: bool) -> None:
        self._holder, self._name, self._tensor, self._version = holder, name, tensor, tensor._version
        self._values = tensor.detach().clone() if has_values else tensor

    def has_changed(self) -> bool:
        """Whether forward has changed it. A table that has grown has not: the second forward finds it long enough."""
        now = self._holder._buffers.get(self._name)
        if now is None:
            return False
        return self._tensor._version != self._version or not (now is self._values or is_same_table(self._values, now))


@contextmanager
def _random_numbers_of(python: Any, numpy: Any) -> Iterator[None]:
    """Context in which Python and NumPy draw from these states on; `checkpoint` does so for torch."""
    before = random.getstate(), np.random.get_state()
    random.setstate(python)
    np.random.set_state(numpy)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
