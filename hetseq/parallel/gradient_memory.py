"""Gradients computed in place: backward writes a whole parameter's gradient straight into the reducer's memory.

Autograd allocates each gradient separately, and with several ranks the reducer then copies it into a bucket. An
autograd function that writes all of a large gradient itself can write it there directly. This module connects the
two, which do not know each other; the lender owns the memory and decides when it may be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

#: for the current backward, by the id of the parameter: its memory, or None while that is in use
_lenders: dict[int, Callable[[], torch.Tensor | None]] = {}


def empty_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for the gradient of `weight`, with the same shape, strides, dtype and device.

    For the backward of a `torch.autograd.Function` that computes the gradient of a whole parameter, or of a view of a
    whole parameter, writes every element and returns it. With several ranks this is the memory that the rank sends,
    once per step; otherwise it is new memory. Pass the `weight` that forward received: a tensor from
    `ctx.saved_tensors` no longer knows which tensor it is a view of. Local to each rank.
    """
    parameter = weight if weight._base is None else weight._base
    lend = _lenders.get(id(parameter))
    is_whole = weight.shape == parameter.shape and weight.stride() == parameter.stride()
    memory = lend() if lend is not None and is_whole else None
    return torch.empty_like(weight) if memory is None else memory


@contextmanager
def lending(lenders: Mapping[int, Callable[[], torch.Tensor | None]]) -> Iterator[None]:
    """Context of one backward, inside which `empty_gradient` asks these lenders."""
    _lenders.update(lenders)
    try:
        yield
    finally:
        for parameter in lenders:
            _lenders.pop(parameter, None)
