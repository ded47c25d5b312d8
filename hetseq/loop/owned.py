"""What `run.own` is given: trained modules, their optimizers, and whatever else must be saved and handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hetseq.errors import TaskError, few
from hetseq.loop.joint_optimizer import joined, parameters_of
from hetseq.loop.refusals import refuse_module
from hetseq.parallel.replica import check_model

_OPTIMIZER = "optimizer"  # the key of its settings in the state of a script


class Owned:
    """The objects of one script by name, on the device of this rank."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._modules: dict[str, torch.nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._others: dict[str, Any] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        #: the parameters that each optimizer was made for; later its groups may hold only what this rank owns of them
        self._trained_by: list[tuple[torch.optim.Optimizer, list[torch.Tensor]]] = []
        self._trained: dict[str, torch.nn.Module] = {}

    def add(self, name: str | None, thing: Any) -> None:
        """Take one object; without a name it gets that of its class in lower case. Raises TaskError."""
        kind = type(thing).__name__
        given, name = name, name or kind.lower()
        if name in (*self._modules, *self._optimizers, *self._others):
            raise TaskError(f"run.own: two objects are called {name}: name them, as in run.own({name}_a=..., ...)")
        if given is not None and not given.isidentifier():
            raise TaskError(f"run.own: {given!r} is no name")
        if isinstance(thing, torch.nn.Module):
            refuse_module(thing)
            check_model(thing)
            thing.to(self._device, self._dtype)
            self._modules[name] = thing
        elif isinstance(thing, torch.optim.LBFGS):
            raise TaskError("run.own got LBFGS, which asks for the loss several times in a step: it has one gradient")
        elif isinstance(thing, torch.optim.Optimizer):
            self._optimizers[name] = thing
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self._others[name] = thing
        else:
            raise TaskError(
                f"run.own got a {kind}: expected a module, an optimizer, or an object with state_dict and"
                " load_state_dict"
            )

    @property
    def modules(self) -> list[torch.nn.Module]:
        """All modules, also those that are not trained."""
        return list(self._modules.values())

    def settle(self) -> None:
        """All objects are there: find the trained modules, and check that each parameter has one optimizer.

        Raises TaskError.
        """
        self._trained = {name: module for name, module in self._modules.items() if _is_trained(module)}
        if not self._trained:
            raise TaskError("run.steps comes before run.own(model, optimizer): nothing would be trained or saved")
        if not self._optimizers:
            raise TaskError("run.own got no optimizer: expected at least one, which trains the model")
        named: dict[torch.Tensor, str] = {value: name for name, value in self.model().named_parameters()}
        holder: dict[torch.Tensor, str] = {}
        for name, optimizer in self._optimizers.items():
            for parameter in parameters_of(optimizer):
                if parameter not in named:
                    raise TaskError(
                        f"{name} has parameters of no module that run.own was given: give run.own all trained modules"
                    )
                if (other := holder.setdefault(parameter, name)) != name:
                    raise TaskError(f"{named[parameter]} is in two optimizers, {other} and {name}: expected one")
        if missing := [name for value, name in named.items() if value.requires_grad and value not in holder]:
            raise TaskError(
                f"{few(missing)} of the model require a gradient and are in no optimizer: give them to it, or set"
                " requires_grad = False"
            )
        self._trained_by = [(optimizer, list(parameters_of(optimizer))) for optimizer in self._optimizers.values()]
        self._optimizer = joined(list(self._optimizers.values()))

    def model(self) -> torch.nn.Module:
        """The trained module, or a dict of all if there are several."""
        trained = self._trained
        return next(iter(trained.values())) if len(trained) == 1 else torch.nn.ModuleDict(trained)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or all of them as one."""
        assert self._optimizer is not None, "after settle"
        return self._optimizer

    @contextmanager
    def only(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Context in which only the parameters of these optimizers get gradients; of all if none is named.

        Raises TaskError for an optimizer that is not owned.
        """
        if any(all(optimizer is not own for own in self._optimizers.values()) for optimizer in optimizers):
            raise TaskError("step.of got an optimizer that run.own was not given: its parameters would not be reduced")
        frozen = [
            parameter
            for optimizer, parameters in (self._trained_by if optimizers else ())
            if not any(optimizer is one for one in optimizers)
            for parameter in parameters
            if parameter.requires_grad
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def state_dict(self) -> dict[str, Any]:
        """What neither the tensors of the trained modules nor the moments of the optimizer hold."""
        others = {name: thing.state_dict() for name, thing in (*self._untrained().items(), *self._others.items())}
        return {_OPTIMIZER: _settings(self.optimizer()), "own": others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave. Raises TaskError where the script owns other objects now."""
        saved, own = state["own"], {**self._untrained(), **self._others}
        if set(saved) != set(own):
            raise TaskError(
                f"the run was saved with {few(sorted(saved)) or 'nothing'} beside model and optimizer, and the script"
                f" gives run.own {few(sorted(own)) or 'nothing'}: give it the same objects by the same names"
            )
        for group, values in zip(self.optimizer().param_groups, state[_OPTIMIZER], strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
        for name, thing in own.items():
            thing.load_state_dict(saved[name])

    def guard(self, refuse: Callable[[str], None]) -> None:
        """Have calls of the optimizers by the script itself refused, by what `refuse` raises."""
        for optimizer in self._optimizers.values():
            _guard(optimizer, refuse)

    def _untrained(self) -> dict[str, torch.nn.Module]:
        return {name: module for name, module in self._modules.items() if name not in self._trained}


def _guard(optimizer: torch.optim.Optimizer, refuse: Callable[[str], None]) -> None:
    zero_grad = optimizer.zero_grad

    def guarded(set_to_none: bool = True) -> None:
        refuse("optimizer.zero_grad()")
        zero_grad(set_to_none)

    optimizer.register_step_pre_hook(lambda *_: refuse("optimizer.step()"))
    optimizer.zero_grad = guarded  # type: ignore[method-assign]


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers of its parameter groups, such as learning rates, which schedulers change."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
