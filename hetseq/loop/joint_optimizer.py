"""Several optimizers of a script as the one that a replica has: for models that take turns, and for mixtures.

Each parameter belongs to one of them. An update is made by those that have a gradient, so a phase that trains one model
leaves the optimizer of the other as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch

State = MutableMapping[torch.Tensor, dict[str, Any]]


class JointOptimizer(torch.optim.Optimizer):
    """The optimizers `parts`, whose parameters differ: their groups and their state, one after the other."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        parameters = [parameter for part in parts for parameter in parameters_of(part)]
        super().__init__(parameters, {key: value for part in reversed(parts) for key, value in part.defaults.items()})
        self._parts = list(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]  # the same objects
        self.state = _States(parts)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each part that has a gradient."""
        assert closure is None, "a step of HetSeq has its gradient already"
        for part in self._parts:
            if any(parameter.grad is not None for parameter in parameters_of(part)):
                part.step()


def joined(parts: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer of all parts, called by the names of their classes: `Adam+RMSprop`."""
    if len(parts) == 1:
        return parts[0]
    name = "+".join(type(part).__name__ for part in parts)
    made: torch.optim.Optimizer = type(name, (JointOptimizer,), {"__module__": __name__})(parts)
    return made


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All parameters that an optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class _States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The state of each parameter, where its optimizer has it."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def _state_of(self, parameter: torch.Tensor) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The state of the optimizer that has the parameter; what a group holds may change (`parallel.owned_state`)."""
        for part in self._parts:
            if any(parameter is one for one in parameters_of(part)):
                return part.state
        raise KeyError("no optimizer has this parameter")

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._state_of(parameter)[parameter]

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """The state, which an optimizer begins at its first step: asking does not begin it."""
        return next((part.state[parameter] for part in self._parts if parameter in part.state), default)

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self._state_of(parameter)[parameter] = state

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del next(part.state for part in self._parts if parameter in part.state)[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for part in self._parts for parameter in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)
