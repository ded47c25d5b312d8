"""The layers of a model, as patterns of names give them, or found by themselves.

Responsible for choosing modules by name, and for the parameters of each. Changes nothing about a model.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hetseq.errors import ConfigError
from hetseq.parallel.base_parameters import base_parameters

AUTO = "auto"
_MOST_NAMES = 8  # in a message


def find_layers(model: nn.Module, patterns: Sequence[str], *, flag: str) -> dict[str, nn.Module]:
    """The modules of a model that fit `patterns`, by name, in their order, and for each one in the order of the model.

    A pattern is of names as in `model.named_modules()`, such as `encoder.layer.*`; of modules inside each other the
    outer one counts. "auto" takes the modules of each `ModuleList` or `Sequential` that has several of one class with
    parts of their own. Raises ConfigError if a pattern fits nothing, with the option `flag` in the message.
    """
    by_name = {name: module for name, module in model.named_modules() if name}
    found = dict.fromkeys(name for one in patterns for name in _fitting(one, by_name, model, flag))
    return {name: by_name[name] for name in found if not any(name.startswith(f"{other}.") for other in found)}


def _fitting(pattern: str, by_name: dict[str, nn.Module], model: nn.Module, flag: str) -> list[str]:
    if pattern == AUTO:
        found = [name for name, module in by_name.items() for name in _layers(name, module)]
        if isinstance(model, nn.Sequential):
            found = [*_layers("", model), *found]
        found = [name for name in by_name if name in set(found)]
        reason = "found no layers, several modules of one class in a ModuleList or Sequential"
    else:
        found = [name for name in by_name if fnmatch.fnmatchcase(name, pattern)]
        reason = "fits no module"
    if not found:
        names = [name for name in by_name if name.count(".") < 2][:_MOST_NAMES]
        has = f"{', '.join(names)}{', ...' if len(names) == _MOST_NAMES else ''}" if names else "no modules inside it"
        raise ConfigError(
            f"{flag} {pattern} {reason} of {type(model).__name__}: expected patterns of names, as in"
            f" 'encoder.layer.*'; it has {has}"
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


def groups_of(
    model: torch.nn.Module,
    layers: Mapping[str, torch.nn.Module],
    parameters: Sequence[torch.nn.Parameter],
    trained: int | None = None,
) -> list[list[list[int]]]:
    """The parameters of the root, then of each layer, by their places, in a list for each type. Pure.

    Only the first `trained` of them are trained (default: all). Frozen ones have lists of their own, and the base too.

    The root has everything that is in no layer or in several, such as an embedding that is tied to the head.
    """
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    homes: dict[int, set[int]] = {}
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                homes.setdefault(id(parameter), set()).add(-1)
    for number, layer in enumerate(layers.values()):
        for parameter in layer.parameters():
            homes.setdefault(id(parameter), set()).add(number)
    found: list[dict[tuple[torch.dtype, bool, bool], list[int]]] = [{} for _ in range(len(layers) + 1)]
    base = {id(parameter) for parameter in base_parameters(model).values()}
    for place, parameter in enumerate(parameters):
        (home,) = homes[id(parameter)] if len(homes[id(parameter)]) == 1 else (-1,)
        kind = parameter.dtype, trained is not None and place >= trained, id(parameter) in base
        found[home + 1].setdefault(kind, []).append(place)
    return [list(of_layer.values()) for of_layer in found]
