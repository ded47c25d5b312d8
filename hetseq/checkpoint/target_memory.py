"""Memory for reading: lent by the caller where it is suitable, else new.

Responsible for: one place for each tensor, or for each wanted slice of it. Does not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from hetseq.checkpoint.layout import TensorSpec
from hetseq.checkpoint.part_io import allocate, can_be_filled
from hetseq.checkpoint.tensor_slices import Held, TensorSlice

#: elements (begin, end) that are wanted of some tensors; a tensor that is not named is wanted whole
Wanted = Mapping[str, Sequence[tuple[int, int]]]


def memory_for(specs: Sequence[TensorSpec], into: Mapping[str, Held], wanted: Wanted | None = None) -> dict[str, Any]:
    """Memory for each tensor, or a tuple of TensorSlice for one that `wanted` names; from `into` if it can be filled.

    ValueError for a wanted tensor that does not exist, and for extents that are not within it, in order and disjoint.
    """
    extents = _checked(specs, wanted or {})
    outlines = allocate(specs, device="meta")
    spans: dict[tuple[str, int], tuple[TensorSpec, Tensor | None]] = {}
    for spec in specs:
        held, like = into.get(spec.name, ()), outlines[spec.name]
        if spec.name not in extents:
            suits = isinstance(held, Tensor) and can_be_filled(held, like)
            spans[spec.name, -1] = spec, held if isinstance(held, Tensor) and suits else None
        for index, (begin, end) in enumerate(extents.get(spec.name, ())):
            spans[spec.name, index] = replace(spec, shape=(end - begin,)), _span_in(held, begin, end, like)
    filled = _without_overlaps({key: lent for key, (_, lent) in spans.items() if lent is not None})
    increment_version(list(filled.values()))  # as torch does whenever it writes to a tensor
    found = {key: filled[key] if key in filled else allocate([spec])[spec.name] for key, (spec, _) in spans.items()}
    return {
        spec.name: tuple(
            TensorSlice(found[spec.name, index], begin, end, spec.shape)
            for index, (begin, end) in enumerate(extents[spec.name])
        )
        if spec.name in extents
        else found[spec.name, -1]
        for spec in specs
    }


def _checked(specs: Sequence[TensorSpec], wanted: Wanted) -> dict[str, list[tuple[int, int]]]:
    elements = {spec.name: spec.elements for spec in specs}
    for name, extents in wanted.items():
        if name not in elements:
            raise ValueError(f"slices of tensor {name} are wanted, but the checkpoint has no such tensor")
        reached = 0
        for begin, end in extents:
            if not reached <= begin <= end <= elements[name]:
                raise ValueError(
                    f"the elements {begin} to {end} of tensor {name}, of {elements[name]}, are wanted: slices must be"
                    " within the tensor, in order and disjoint"
                )
            reached = end
    return {name: list(extents) for name, extents in wanted.items()}


def _span_in(held: Held, begin: int, end: int, like: Tensor) -> Tensor | None:
    """The lent memory of some elements of a tensor like `like`; None if there is none that can be filled."""
    if isinstance(held, Tensor):
        return held.detach().view(-1)[begin:end] if can_be_filled(held, like) else None
    for one in held:
        is_inside = one.begin <= begin and end <= one.end and tuple(one.shape) == tuple(like.shape)
        if is_inside and can_be_filled(one.tensor, like.new_empty(one.tensor.shape)):
            return one.tensor.detach()[begin - one.begin : end - one.begin]
    return None


def _without_overlaps(lent: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
    """Two threads must not fill the same bytes: of tensors that share memory, only the first is filled in place."""
    filled, reached = {}, 0
    for key, tensor in sorted(lent.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() >= reached:
            filled[key] = tensor
            reached = tensor.data_ptr() + tensor.nbytes
    return filled
