"""What a rank holds of each tensor: the whole tensor, or slices of its elements in row-major order.

Responsible for: the type `TensorSlice`, and finding the elements of a piece in what a rank holds. Does not know what
other ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hetseq.checkpoint.layout import Piece


@dataclass(frozen=True)
class TensorSlice:
    """The elements `begin` to `end`, in row-major order, of a tensor whose shape is `shape`.

    `tensor` holds them: (end - begin,), contiguous. ValueError if these do not fit together.
    """

    tensor: Tensor
    begin: int
    end: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        elements = math.prod(self.shape)
        if not 0 <= self.begin <= self.end <= elements:
            raise ValueError(
                f"slice {self.begin}:{self.end} of shape {self.shape}: expected 0 <= begin <= end <= {elements}"
            )
        if tuple(self.tensor.shape) != (self.end - self.begin,) or not self.tensor.is_contiguous():
            raise ValueError(
                f"slice {self.begin}:{self.end} of shape {self.shape}: its tensor has the shape"
                f" {tuple(self.tensor.shape)}; expected ({self.end - self.begin},), contiguous"
            )


#: what one rank holds of a tensor; no slices: nothing
Held = Tensor | Sequence[TensorSlice]


def elements_of(held: Held, piece: Piece) -> Tensor:
    """The elements of a piece, in the shape in which a part stores them; `held` must contain all of them."""
    if isinstance(held, Tensor):
        if held.is_conj() or held.is_neg():
            held = held.resolve_conj().resolve_neg()
        return held.reshape(-1)[piece.begin : piece.end] if piece.is_slice else held
    source = next(one for one in held if one.begin <= piece.begin and piece.end <= one.end)
    flat = source.tensor.resolve_conj().resolve_neg()[piece.begin - source.begin : piece.end - source.begin]
    return flat.view(piece.stored_shape)
