"""What `run.own` is given: trained modules, their optimizer, and whatever else must be saved and handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetseq.errors import TaskError, few
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

    def model(self) -> torch.nn.Module:
        """The trained module, or a dict of all if there are several. Raises TaskError if there is none."""
        trained = self._trained()
        if not trained:
            raise TaskError("run.steps comes before run.own(model, optimizer): nothing would be trained or saved")
        return next(iter(trained.values())) if len(trained) == 1 else torch.nn.ModuleDict(trained)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which trains every parameter that requires a gradient. Raises TaskError."""
        if len(self._optimizers) != 1:
            found = f"{len(self._optimizers)} optimizers" if self._optimizers else "no optimizer"
            raise TaskError(
                f"run.own got {found}: expected one; parameter groups give parts of a model settings of their own"
            )
        (optimizer,) = self._optimizers.values()
        named = dict(self.model().named_parameters())
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if missing := [name for name, value in named.items() if value.requires_grad and id(value) not in held]:
            raise TaskError(
                f"{few(missing)} of the model require a gradient and are in no optimizer: give them to it, or set"
                " requires_grad = False"
            )
        if held - {id(value) for value in named.values()}:
            raise TaskError(
                "the optimizer has parameters of no module that run.own was given: give run.own all trained modules"
            )
        return optimizer

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
        """Have calls of the optimizer by the script itself refused, by what `refuse` raises."""
        optimizer = self.optimizer()
        zero_grad = optimizer.zero_grad

        def guarded(set_to_none: bool = True) -> None:
            refuse("optimizer.zero_grad()")
            zero_grad(set_to_none)

        optimizer.register_step_pre_hook(lambda *_: refuse("optimizer.step()"))
        optimizer.zero_grad = guarded  # type: ignore[method-assign]

    def _trained(self) -> dict[str, torch.nn.Module]:
        return {name: module for name, module in self._modules.items() if _is_trained(module)}

    def _untrained(self) -> dict[str, torch.nn.Module]:
        return {name: module for name, module in self._modules.items() if not _is_trained(module)}


def _is_trained(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers of its parameter groups, such as learning rates, which schedulers change."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
