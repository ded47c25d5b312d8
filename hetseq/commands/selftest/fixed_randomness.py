"""Constant random numbers, and comparison of samples, so that dropout is not reported as a fault.

Within `held_still` every draw of torch gives the same number for each element, for any shape: dropout keeps all, a
normal variable is half a deviation above its mean. A draw per sample is then the same in any micro-batch, so a loss
with noise can be compared like one without. Draws of NumPy and Python are only seeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: the quantile of a uniform variable, and the number of deviations above the mean of a normal one
_PLACE = 0.5


@contextmanager
def held_still() -> Iterator[None]:
    """A context in which draws of torch are constants."""
    with _Still():  # type: ignore[no-untyped-call]
        yield


class _Still(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if name.startswith("_scaled_dot_product"):  # it draws its dropout inside
            args, kwargs = _without_dropout(func, args, kwargs)
        drawn = func(*args, **kwargs)
        if name == "native_dropout":  # (input, p, train) to (output, mask)
            return _all_kept(drawn, *args[:2])
        constant = _CONSTANTS.get(name.removesuffix("_"))
        return drawn if constant is None else constant(drawn, _named(func, args, kwargs))


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an operator by their names in its schema."""
    arguments = func._schema.arguments
    return {
        **{each.name: each.default_value for each in arguments},
        **{each.name: value for each, value in zip(arguments, args)},
        **kwargs,
    }


def _without_dropout(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    names = [each.name for each in func._schema.arguments]
    args = tuple(0.0 if name == "dropout_p" else value for name, value in zip(names, args))
    return args, {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}


def _all_kept(drawn: Any, given: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    return given / (1 - rate) if rate < 1 else drawn[0], torch.ones_like(drawn[1])


def _uniform(drawn: torch.Tensor, told: Mapping[str, Any]) -> torch.Tensor:
    low, high = told.get("from", 0.0), told.get("to", 1.0)
    return drawn.fill_(low + _PLACE * (high - low))


def _normal(drawn: torch.Tensor, told: Mapping[str, Any]) -> torch.Tensor:
    """torch.normal(mean, std), of numbers or tensors, and tensor.normal_(mean, std)."""
    return drawn.copy_(torch.as_tensor(told["mean"] + _PLACE * told["std"]))


def _integer(drawn: torch.Tensor, told: Mapping[str, Any]) -> torch.Tensor:
    """The middle of the range of torch.randint and tensor.random_; 0 if they draw random bits."""
    low, high = told.get("low", told.get("from")) or 0, told.get("high", told.get("to"))
    # bits may be viewed as several narrower numbers, which must be equal
    return drawn.fill_(0 if high is None else (low + high - 1) // 2)


def _order(drawn: torch.Tensor, told: Mapping[str, Any]) -> torch.Tensor:
    """Reversed order: the identity would hide that samples are mixed."""
    return drawn.copy_(torch.arange(len(drawn) - 1, -1, -1))


def _fill(value: float) -> Any:
    return lambda drawn, told: drawn.fill_(value)


_CONSTANTS: dict[str, Any] = {
    "rand": _fill(_PLACE),
    "rand_like": _fill(_PLACE),
    "uniform": _uniform,
    "randn": _fill(_PLACE),
    "randn_like": _fill(_PLACE),
    "normal": _normal,
    "log_normal": _fill(1.0),
    "cauchy": _fill(_PLACE),
    "bernoulli": _fill(1),
    "binomial": lambda drawn, told: drawn.copy_(told["count"] * told["prob"]).round_(),
    "geometric": _fill(1),
    "exponential": _fill(1.0),
    "poisson": lambda drawn, told: drawn.copy_(told["self"]).round_(),
    "_standard_gamma": lambda drawn, told: drawn.copy_(told["self"]),
    "_sample_dirichlet": lambda drawn, told: drawn.copy_(told["self"] / told["self"].sum(-1, keepdim=True)),
    "random": _integer,
    "randint": _integer,
    "randint_like": _integer,
    "randperm": _order,
    "multinomial": _fill(0),
}


class Narrowing(TorchDispatchMode):
    """A context that sets `is_seen` if an operator converts fp64 to a narrower floating-point type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        is_wide = any(tensor.dtype == torch.float64 for tensor in tensors_of(args))
        if is_wide and any(tensor.is_floating_point() and tensor.itemsize < 8 for tensor in tensors_of(done)):
            self.is_seen = True
        return done


def difference(first: Any, second: Any, path: str = "") -> str | None:
    """Where two samples or batches differ, such as `['input_ids']` or `[0]`; None if they are equal."""
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
    """Compares NumPy arrays by their numbers, and objects by their attributes; objects without any count as equal."""
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
    """The sizes of all dimensions but the first, of all tensors of a batch: padding changes them."""
    return tuple(size for tensor in tensors_of(batch) for size in tensor.shape[1:])
