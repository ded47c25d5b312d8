"""Memory for the gradient of a whole parameter, where those who add it up over the ranks want it to lie.

Autograd makes a gradient in memory of its own, and a rank among several then moves it into what it sends. A function
that writes all of a large gradient by itself can write it there at once. Responsible for bringing the two together,
which do not know each other; whose memory it is, and when it may be written, is the lender's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

#: of the backward under way, by the id of the parameter: its memory, or None where that is in use
_lenders: dict[int, Callable[[], torch.Tensor | None]] = {}


def empty_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for the gradient of `weight`: shape, strides, type and device are those of `weight`.

    For the backward of a `torch.autograd.Function` that computes the gradient of a whole parameter, or of a view of the
    whole of one, writes every element and returns it. Among several ranks it is the memory that will be sent, once a
    step; otherwise new memory. `weight` is what forward was given: a tensor out of `ctx.saved_tensors` has forgotten
    whose view it is. Each rank for itself.
    """
    parameter = weight if weight._base is None else weight._base
    lend = _lenders.get(id(parameter))
    is_whole = weight.shape == parameter.shape and weight.stride() == parameter.stride()
    memory = lend() if lend is not None and is_whole else None
    return torch.empty_like(weight) if memory is None else memory


@contextmanager
def lending(lenders: Mapping[int, Callable[[], torch.Tensor | None]]) -> Iterator[None]:
    """Inside, a backward is under way, and `empty_gradient` asks these."""
    _lenders.update(lenders)
    try:
        yield
    finally:
        for parameter in lenders:
            _lenders.pop(parameter, None)
