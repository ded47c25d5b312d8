"""Activation checkpointing for any model: modules that keep only their inputs for backward, which runs them again.

Responsible for finding such modules by their names and for their second forward. A model's parameters, names and
classes stay as they are. The one idea (Chen et al. 2016, arXiv 1604.06174): what lies between the input and the output
of a module can be computed again, just before its gradient is.

The second forward has the random numbers and the autocast of the first, so that losses and gradients are bitwise
equal. What a forward changes besides its result would change twice, so modules that do so are refused.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetseq.errors import ConfigError, TaskError
from hetseq.parallel.replica import batch_norms

AUTO = "auto"
_MOST_NAMES = 8  # in a message


def checkpoint_activations(model: nn.Module, modules: str | Sequence[str] = AUTO) -> tuple[str, ...]:
    """Make modules of the model keep only their inputs for backward, while it trains. Returns their names.

    `modules` are patterns of names as in `model.named_modules()`, such as `encoder.layer.*`; of modules inside each
    other the outer one counts. "auto" takes the layers: the modules of each `ModuleList` or `Sequential` that has
    several of one class with parts of their own. May be called again with the same patterns. Any rank, alone.

    Raises ConfigError if nothing fits, if a module has batch norm layers, since a second forward would count a batch
    twice, and if a model of transformers does the same by itself.
    """
    patterns = [modules] if isinstance(modules, str) else list(modules)
    by_name = {name: module for name, module in model.named_modules() if name}
    found = list(dict.fromkeys(name for one in patterns for name in _fitting(one, by_name, model)))
    # the second is how older versions of transformers call it
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    if next((getattr(model, name) for name in names if hasattr(model, name)), False):
        raise ConfigError(
            f"--checkpoint-modules {','.join(patterns)}: {type(model).__name__} runs layers again in backward already,"
            " by its own gradient checkpointing: leave this or --activation-checkpointing out"
        )
    outer = tuple(name for name in found if not any(name.startswith(f"{other}.") for other in found))
    for name in outer:
        if norms := batch_norms(by_name[name]):
            raise ConfigError(
                f"--checkpoint-modules {','.join(patterns)}: {name} has {', '.join(sorted(norms))}, whose averages"
                " would count each batch twice if its forward ran again in backward: name modules without it"
            )
        module = by_name[name]
        if not is_checkpointed(module):
            module.forward = _ForwardAgain(name, module)
    return outer


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `checkpoint_activations` has taken this module."""
    return isinstance(module.forward, _ForwardAgain)


class _ForwardAgain:
    """The forward of a module that keeps only its inputs for backward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module, self._forward = name, module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        before = [buffer._version for buffer in self._module.buffers()]
        result = checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        if before != [buffer._version for buffer in self._module.buffers()]:
            raise TaskError(
                f"{self._name} ({type(self._module).__name__}) changes one of its buffers in forward, and with"
                " --checkpoint-modules it would do so once more in backward: leave this module out"
            )
        return result


def _fitting(pattern: str, by_name: dict[str, nn.Module], model: nn.Module) -> list[str]:
    if pattern == AUTO:
        found = [name for name, module in by_name.items() for name in _layers(name, module)]
        if isinstance(model, nn.Sequential):
            found = [*_layers("", model), *found]
        reason = "found no layers, several modules of one class in a ModuleList or Sequential"
    else:
        found = [name for name in by_name if fnmatch.fnmatchcase(name, pattern)]
        reason = "fits no module"
    if not found:
        names = [name for name in by_name if name.count(".") < 2][:_MOST_NAMES]
        raise ConfigError(
            f"--checkpoint-modules {pattern} {reason} of {type(model).__name__}: expected patterns of names, as in"
            f" 'encoder.layer.*'; it has {', '.join(names)}{', ...' if len(names) == _MOST_NAMES else ''}"
        )
    return found


def _layers(name: str, module: nn.Module) -> list[str]:
    """The names of the modules in a list of layers; none if it is something else."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    classes = [type(child) for child in module.children() if any(True for _ in child.children())]
    repeated = {one for one in classes if classes.count(one) > 1}
    begin = f"{name}." if name else ""
    return [f"{begin}{child}" for child, one in module.named_children() if type(one) in repeated]
