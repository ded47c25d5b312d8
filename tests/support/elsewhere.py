"""Checkpoints for tests of other readers: odd tensors in unequal parts, and the differences of two states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetseq.checkpoint import Commit, Identity
from hetseq.checkpoint.directory import read_commit
from tests.support.checkpoints import LINEAGE, folder, manager, together

UNEQUAL = [7, 3, 2]
TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64),
)


def odd_state(seed: int = 1) -> dict[str, Tensor]:
    """All common types, a tensor that no part of three holds whole, and the shapes that break careless code."""
    torch.manual_seed(seed)
    state = {
        f"model.of.{str(dtype)[6:]}": torch.randn(5, 3).mul(9).clamp(0).to(dtype)
        for dtype in TYPES
        if not dtype.is_complex
    }
    return state | {
        "model.complex": torch.randn(3, 2, dtype=torch.complex64),
        "model.scalar": torch.randn((), dtype=torch.float64),
        "model.flag": torch.tensor(False),
        "model.empty": torch.empty(0, 4),
        "model.empty.inside": torch.empty(3, 0, 2),
        "model.transposed": torch.randn(6, 8).t(),
        "model.deep": torch.randn(4, 3, 2, 5),
        "model.large": torch.randn(300, 7),
        "model.odd/name@1:2": torch.randint(1, 100, (3,), dtype=torch.int8),
        "optim.large.exp_avg": torch.randn(3, 7),
        "optim.large.step": torch.tensor(float(seed)),
    }


def save_state(run: Path, step: int, state: Mapping[str, Tensor], weights: Sequence[float]) -> Commit:
    """Save a state in as many parts as there are weights."""

    def live(group: Any) -> Any:
        return manager(run, group, weights=list(weights)).save(
            state,
            {"step": step, "task": "toy", "best": None, "rate": 0.125, "long": 2**70, "list": [1, {"deep": True}]},
            identity=Identity(step, 0, LINEAGE),
            nonce=step,
            kinds=("epoch",),
        )

    results = together(len(weights), live)
    assert all(result.ok for result in results), results
    return read_commit(folder(run, step))


def as_empty(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors shaped like a state's with every bit set, which none of its tensors has."""
    empty = {}
    for name, tensor in state.items():
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
        fresh.view(-1).view(torch.uint8).fill_(1 if tensor.dtype == torch.bool else 255)
        empty[name] = fresh
    return empty


def bits(tensor: Tensor) -> bytes:
    """The bytes of the elements in row-major order."""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The names at which two states differ in a bit, the type or the shape, or which one of them lacks."""
    names = [*expected, *(name for name in found if name not in expected)]
    return [name for name in names if not (name in found and name in expected and _alike(found[name], expected[name]))]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
