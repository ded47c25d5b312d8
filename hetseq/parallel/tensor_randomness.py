"""Random numbers under tensor parallelism: other ones on each rank where activations are divided, equal ones elsewhere.

All ranks of a tensor-parallel model begin a micro-batch with the same seed. What they compute alike must drop the same
elements. Between a module with divided outputs and the next one with divided inputs each rank has other elements, so
each rank gets random numbers of its own there, derived from (seed, a number drawn from the common ones, its place).
They work alike on CPUs and GPUs, and when activation checkpointing runs a forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetseq.data.plan import derive_seed


def separate_randomness_(
    model: nn.Module, place: int, *, seed: int, opening: Sequence[str], closing: Sequence[str]
) -> None:
    """Give this rank random numbers of its own from each module of `opening` to the next of `closing`, in training.

    `place` is its number among the ranks that divide the model, `opening` are the names of modules with divided
    outputs, `closing` of those with divided inputs. Call it before activation checkpointing.
    """
    region = _Region(derive_seed(seed, place))
    modules = dict(model.named_modules())
    for name in opening:
        modules[name].register_forward_hook(region.enter)
    for name in closing:
        modules[name].register_forward_pre_hook(region.leave)
    around = {_smallest_around(name, closing) for name in opening}
    for name in around:
        _leave_at_the_end_(modules[name], region)


class _Region:
    """The switch between the common random numbers and this rank's own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._common: list[torch.Tensor] | None = None  # states of the generators outside; None: we are outside

    def enter(self, module: nn.Module, *_: Any) -> None:
        if self._common is not None or not module.training:
            return
        drawn = int(torch.randint(1 << 62, ()))
        generators = self._generators()
        self._common = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(derive_seed(self._seed, drawn))

    def leave(self, *_: Any) -> None:
        if self._common is not None:
            for generator, state in zip(self._generators(), self._common, strict=True):
                generator.set_state(state)
            self._common = None

    def _generators(self) -> list[torch.Generator]:
        here = [torch.cuda.default_generators[torch.cuda.current_device()]] if torch.cuda.is_initialized() else []
        return [torch.default_generator, *here]


def _smallest_around(name: str, closing: Sequence[str]) -> str:
    """The name of the smallest module that contains module `name` and one with divided inputs."""
    parts = name.split(".")
    for depth in reversed(range(len(parts))):
        around = ".".join(parts[:depth])
        if any(other.startswith(f"{around}." if around else "") for other in closing):
            return around
    return ""


def _leave_at_the_end_(module: nn.Module, region: _Region) -> None:
    """Let a forward that fails in the middle, such as for lack of memory, leave the region too."""
    forward = module.forward

    def and_leave(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        finally:
            region.leave()

    module.forward = and_leave
