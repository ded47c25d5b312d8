"""Which parameters of a model have owners: the trained ones, and with `--shard-model all` the frozen ones too.

Responsible for their names and their order. Knows neither cuts nor memory. A frozen parameter has an owner if it can
lie in the memory of a unit: numbers of floating point without gaps. Any other one stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hetseq.parallel.base_parameters import base_parameters
from hetseq.parallel.divided_model import DividedModel, TensorPart


@dataclass(frozen=True)
class OwnedNames:
    """The parameters that have owners. Found once for a model: a task may freeze or train others later."""

    by_parameter: Mapping[torch.nn.Parameter, str]  # the trained ones first
    frozen: frozenset[str] = field(default_factory=frozenset)
    base: frozenset[str] = field(default_factory=frozenset)  # of the frozen ones, what no checkpoint holds
    parts: Mapping[str, TensorPart] = field(default_factory=dict)  # of a model that ranks divide, by the same names

    @property
    def trained(self) -> dict[torch.nn.Parameter, str]:
        """Those that get gradients."""
        return {one: name for one, name in self.by_parameter.items() if name not in self.frozen}

    def saved_name(self, name: str) -> str:
        """The name of a parameter in a checkpoint, which has whole tensors."""
        return self.parts[name].name if name in self.parts else name


def owned_names(model: torch.nn.Module, *, with_frozen: bool, divided: DividedModel | None = None) -> OwnedNames:
    """The parameters of this model that have owners, as `build_model` has left them, or dividing it."""
    if divided is not None:
        return OwnedNames({one: name for name, one in divided.named.items()}, parts=divided.parts)
    named = [(name, one) for name, one in model.named_parameters()]
    trained = {one: name for name, one in named if one.requires_grad}
    if not with_frozen:
        return OwnedNames(trained)
    frozen = {one: name for name, one in named if not one.requires_grad and one.numel() and _has_place(one)}
    return OwnedNames(
        {**trained, **frozen}, frozenset(frozen.values()), frozenset(base_parameters(model)) & {*frozen.values()}
    )


def _has_place(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and is_dense(parameter)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element appears once and without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
