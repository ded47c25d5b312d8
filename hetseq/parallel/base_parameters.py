"""The base of a model: frozen parameters outside its `state_dict()`, which each rank builds from files of its own.

A task takes the weights that it never changes, such as a published model under adapters, out of `state_dict()`. They
are then neither saved nor sent, and keep the type in which `build_model` made them: 16 bits a weight may be all that a
card has room for. The one idea: weights that no rank sends must be known to be equal, so a digest of all bits names
the base. Ranks compare it before the first step, and a checkpoint holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hetseq.errors import CheckpointMismatch, TaskError
from hetseq.parallel.checksums import checksums

#: the remedy for another base
SAME_BASE = (
    "name the files that the run began with, such as --model DIR, and with --lora-rank the same rank, alpha and targets"
)
_DIGITS = 16


def base_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that `state_dict()` leaves out, by name, in registration order."""
    saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in saved}


def check_base(model: torch.nn.Module) -> None:
    """Raise TaskError for a parameter that is trained but in no checkpoint."""
    for name, parameter in base_parameters(model).items():
        if parameter.requires_grad:
            raise TaskError(
                f"{name} is trained, but state_dict() of the model leaves it out, so no checkpoint would have it: keep"
                " it there, or freeze it with requires_grad = False"
            )


def move_(model: torch.nn.Module, device: torch.device, storage: torch.dtype) -> None:
    """Move the model to `device`, and its floating-point tensors to the type `storage`, except those of the base."""
    base = base_parameters(model)
    if not base:
        model.to(device, storage)
        return
    model.to(device)
    kept = {id(parameter) for parameter in base.values()}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and id(tensor) not in kept:
            tensor.data = tensor.data.to(storage)


def base_digest(model: torch.nn.Module, numbers: Iterable[torch.Tensor] | None = None) -> str | None:
    """Hexadecimal digits that name the base by its names, types, shapes and bits; None if there is none.

    `numbers`: its values one after the other, if its parameters have no memory.
    """
    base = base_parameters(model)
    if not base:
        return None
    sums = checksums(base.values() if numbers is None else numbers)
    entries = [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {number}" for (name, tensor), number in zip(base.items(), sums)
    ]
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:_DIGITS]


def check_same_base(found: str | None, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch unless `found` is the digest of the base that the checkpoint with this state names."""
    wanted = saved.get("base")
    if wanted != found:
        raise CheckpointMismatch(
            f"the checkpoint was trained on the frozen weights {wanted or 'of no base'}, the model here has"
            f" {found or 'none'}: {SAME_BASE}"
        )
