"""A state of which each rank holds slices, for tests: every element is a number of its own, and tells the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetseq.checkpoint import CheckpointManager, Identity, Loaded, TensorSlice
from tests.support.checkpoints import LINEAGE, manager, seal

ELEMENTS = 90
CUT = ("model.w", "optim.w.exp_avg")  # the other tensors are whole


def state_of(step: int, elements: int = ELEMENTS) -> dict[str, Tensor]:
    """All tensors of a step."""
    return {
        "model.w": (torch.arange(float(elements)) + step).reshape(-1, 3),
        "model.running_mean": torch.full((7,), step, dtype=torch.int64),
        "optim.w.exp_avg": (torch.arange(float(elements)) * 2 + step).reshape(-1, 3),
        "optim.w.step": torch.tensor(float(step)),
    }


def extents(weights: Sequence[int], elements: int = ELEMENTS) -> list[tuple[int, int]]:
    """The elements of each rank."""
    ends = [elements * total // sum(weights) for total in itertools.accumulate(weights, initial=0)]
    return list(itertools.pairwise(ends))


def wanting(rank: int, weights: Sequence[int], elements: int = ELEMENTS) -> Callable[[Loaded], Any]:
    """What one rank wants of a state: its slices, and all other tensors whole."""
    begin, end = extents(weights, elements)[rank]

    def wanted(outline: Loaded) -> Any:
        assert {name: (tensor.shape, tensor.is_meta) for name, tensor in outline.tensors.items()} == {
            name: (tensor.shape, True) for name, tensor in state_of(0, elements).items()
        }
        return {name: [(begin, end)] if begin < end else [] for name in CUT}

    return wanted


def slice_of(tensor: Tensor, begin: int, end: int) -> TensorSlice:
    """A slice in memory of its own."""
    return TensorSlice(tensor.reshape(-1)[begin:end].clone(), begin, end, tuple(tensor.shape))


def held_by(rank: int, weights: Sequence[int], step: int, elements: int = ELEMENTS) -> dict[str, Any]:
    """What one rank holds: a rank without elements lacks the optimizer's state."""
    begin, end = extents(weights, elements)[rank]
    held: dict[str, Any] = state_of(step, elements)
    for name in CUT:
        held[name] = [slice_of(held[name], begin, end)]
    if begin == end:
        del held["optim.w.exp_avg"], held["optim.w.step"]
    return held


def about(step: int) -> dict[str, Any]:
    """The arguments of a save besides the tensors."""
    return {"identity": Identity(step, 0, LINEAGE), "nonce": step * 16 + 8}


def save_held(run: Path, group: Any, held: Mapping[str, Any], step: int, own: CheckpointManager | None = None) -> Any:
    """Save what this rank holds while it waits."""
    own = own or manager(run, group)
    return own.save(held, {"step": step}, kinds=["epoch"], **about(step))


def save_held_in_background(own: CheckpointManager, held: Mapping[str, Any], step: int) -> Any:
    """The result of a save that this rank only waits for at its end."""
    at_once = ["model.running_mean"]
    result = own.begin(held, {"step": step}, kinds=["epoch"], at_once=at_once, **about(step))
    return result or own.finish()


def keep_held(own: CheckpointManager, held: Mapping[str, Any], step: int) -> bool:
    """Keep what this rank holds in memory; sealed when this returns."""
    is_kept = own.keep(held, {"step": step}, at_once=["model.running_mean"], **about(step))
    own.settle()
    seal(own)
    return is_kept


def is_state(tensors: Mapping[str, Any], step: int, elements: int = ELEMENTS) -> bool:
    """Whether these are all tensors of a step, bit for bit; of slices, whether each has the elements it claims."""
    expected = state_of(step, elements)
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name])
        if isinstance(tensor, Tensor)
        else all(
            one.shape == expected[name].shape
            and torch.equal(one.tensor, expected[name].reshape(-1)[one.begin : one.end])
            for one in tensor
        )
        for name, tensor in tensors.items()
    )


def extents_in(loaded: Loaded) -> dict[str, list[tuple[int, int]]]:
    """The elements of each tensor of which there are slices."""
    return {
        name: [(one.begin, one.end) for one in held]
        for name, held in loaded.tensors.items()
        if not isinstance(held, Tensor)
    }
