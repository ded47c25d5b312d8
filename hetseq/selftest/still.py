"""Randomness held still, and samples compared: what keeps dropout from being taken for a fault.

Within `held_still` every draw of torch gives the same number for each element, whatever the shape: dropout keeps all, a
normal variable lies half a deviation above its mean. What is random per sample is then the same for a sample in any
micro-batch, and a loss with noise can be compared as one without. Draws of NumPy and of Python are only seeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: where in the range of a uniform variable, and how many deviations above the mean of a normal one
_PLACE = 0.5


@contextmanager
def held_still() -> Iterator[None]:
    """Within it draws of torch are constants."""
    with _Still():  # type: ignore[no-untyped-call]
        yield


class _Still(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name == "native_dropout":  # (input, p, train) to (output, mask)
            return _all_kept(drawn, *args[:2])
        constant = _CONSTANTS.get(name.removesuffix("_"))
        # what is drawn in place has the tensor as its first argument
        return drawn if constant is None else constant(drawn, args[1:] if name.endswith("_") else args)


def _all_kept(drawn: Any, given: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    return given / (1 - rate) if rate < 1 else drawn[0], torch.ones_like(drawn[1])


def _uniform(drawn: torch.Tensor, args: Any) -> torch.Tensor:
    given = [float(value) for value in args[:2]]
    low, high = [*given, *[0.0, 1.0][len(given) :]]
    return drawn.fill_(low + _PLACE * (high - low))


def _normal(drawn: torch.Tensor, args: Any) -> torch.Tensor:
    """torch.normal(mean, std), of numbers or tensors, and tensor.normal_(mean, std)."""
    given = [value for value in args[:2] if isinstance(value, (int, float, torch.Tensor))]
    mean = given[0] if given else 0.0
    deviation = given[1] if len(given) > 1 else 1.0
    return drawn.copy_(torch.as_tensor(mean + _PLACE * deviation))


def _fill(value: float) -> Any:
    return lambda drawn, args: drawn.fill_(value)


_CONSTANTS: dict[str, Any] = {
    "rand": _fill(_PLACE),
    "rand_like": _fill(_PLACE),
    "uniform": _uniform,
    "randn": _fill(_PLACE),
    "randn_like": _fill(_PLACE),
    "normal": _normal,
    "bernoulli": _fill(1),
    "exponential": _fill(1.0),
    "random": _fill(0),
    "multinomial": _fill(0),
}


def difference(first: Any, second: Any, path: str = "") -> str | None:
    """Where two samples or batches differ, as in `['input_ids']` or `[0]`; None if they are the same."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        is_same = first.shape == second.shape and first.dtype == second.dtype and _equal(first, second)
        return None if is_same else path or "the sample"
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if list(first) != list(second):
            return path or "the sample"
        return next((at for key in first if (at := difference(first[key], second[key], f"{path}[{key!r}]"))), None)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return path or "the sample"
        pairs = enumerate(zip(first, second))
        return next((at for place, (a, b) in pairs if (at := difference(a, b, f"{path}[{place}]"))), None)
    if type(first) is not type(second):
        return path or "the sample"
    if isinstance(first, (int, float, str, bytes, bool)):
        return None if first == second or (first != first and second != second) else path or "the sample"
    return _difference_of_others(first, second, path)


def _difference_of_others(first: Any, second: Any, path: str) -> str | None:
    """NumPy arrays by their numbers; objects by what they hold; what holds nothing is taken for the same."""
    if hasattr(first, "__array__"):
        return difference(torch.as_tensor(first), torch.as_tensor(second), path)
    held = getattr(first, "__dict__", None)
    return difference(held, vars(second), path) if held else None


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_floating_point():
        return bool(torch.equal(first.nan_to_num(), second.nan_to_num()))
    return bool(torch.equal(first, second))


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)


def widths(batch: Any) -> tuple[int, ...]:
    """The sizes of all dimensions but the first of the tensors of a batch: what padding changes."""
    return tuple(size for tensor in tensors_of(batch) for size in tensor.shape[1:])
