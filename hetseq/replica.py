"""One rank's copy of what is trained: model, optimizer, and the reducer that keeps the copies equal.

The controller asks it for micro-batches, a reduced gradient and an update; checkpoints ask it for named tensors. Names
are `model.<fqn>` and `optim.<fqn>.<state>`, so a checkpoint never depends on the order of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetseq.errors import CheckpointMismatch
from hetseq.reduction import GradientReducer


class Replica:
    """Model and optimizer of one rank."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, reducer: GradientReducer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.reducer = reducer
        self._names = {parameter: name for name, parameter in trained_parameters(model)}

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_bytes(self) -> int:
        """About what a checkpoint holds: parameters and two tensors of optimizer state for each."""
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in self._names)

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, live; a tensor tied to several names appears under the first."""
        tensors, seen = {}, set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name}: extra state of type {type(value).__name__} cannot be saved, only tensors")
            key = (value.data_ptr(), value.shape, value.stride()) if value.numel() else id(value)
            if key not in seen:
                seen.add(key)
                tensors[f"model.{name}"] = value.detach()
        return tensors

    def optimizer_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The optimizer's state: tensors by name, live, and the numbers in it that are no tensors."""
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for parameter, name in self._names.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optim.{name}.{key}"] = value.detach()
                else:
                    numbers[f"optim.{name}.{key}"] = value
        return tensors, numbers

    def load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy saved parameters and buffers into the model; raises CheckpointMismatch where they do not fit."""
        live = self.model_tensors()
        saved = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        missing, foreign = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
        if missing or foreign:
            raise CheckpointMismatch(
                f"the checkpoint is of another model: it lacks {_few(missing)} and has {_few(foreign)} besides;"
                " go on with the model it was made from, or choose another --save-dir"
            )
        for name, tensor in live.items():
            if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
                raise CheckpointMismatch(
                    f"the checkpoint is of another model: {name} is {_kind(saved[name])} there, {_kind(tensor)} here;"
                    " go on with the model it was made from, or choose another --save-dir"
                )
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(saved[name])

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Give the optimizer its saved state."""
        by_name = {name: parameter for parameter, name in self._names.items()}
        for full_name, value in [*tensors.items(), *numbers.items()]:
            if not full_name.startswith("optim."):
                continue
            name, _, key = full_name.removeprefix("optim.").rpartition(".")
            if name not in by_name:
                raise CheckpointMismatch(
                    f"the checkpoint has optimizer state of {name}, which the model does not train"
                )
            parameter = by_name[name]
            if isinstance(value, torch.Tensor):
                # the counter of a step may live on the CPU, whatever the device of its parameter
                device = parameter.device if value.dim() or self.optimizer.defaults.get("fused") else value.device
                value = value.to(device, copy=True)
            self.optimizer.state[parameter][key] = value


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that get gradients, by name, in registration order."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _few(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
