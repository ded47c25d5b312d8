"""Portions of the state: what each rank sends to a process that follows the run, and how the pieces fit together there.

Responsible for the division of gradients, parameters and optimizer state among the ranks of a generation, and for their
places in messages. Sends nothing. The one idea: the portions of all ranks are disjoint and together everything. A rank
that owns a part of the state gives that part. Replicas, which all hold everything, each give an equal share, so that no
link carries all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from hetseq.comm.group import Group
from hetseq.parallel.owned_state import OwnedState
from hetseq.parallel.replica import Replica, trained_parameters

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ALIGNMENT = 16  # bytes: the largest element
MOST_BYTES = 64 << 20  # of a message with state, unless a tensor that is no part of another is larger


@dataclass(frozen=True)
class Portion:
    """Elements of one parameter that a rank gives: `begin` to `end`, in row-major order."""

    name: str
    begin: int
    end: int
    held: torch.nn.Parameter  # the whole parameter, or what this rank owns of it

    def elements(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor with an element for each of `held`. Shape (end - begin,)."""
        flat = tensor.detach().reshape(-1)
        return flat if flat.numel() == self.end - self.begin else flat[self.begin : self.end]


def portions_of(replica: Replica, group: Group) -> list[Portion]:
    """What this rank gives. The portions of all ranks together are everything that is trained."""
    if replica.owned is not None:
        return [one for one in _owned_portions(replica.owned) if one.name not in replica.owned.described.frozen]
    trained, start = trained_parameters(replica.model), 0
    total = sum(parameter.numel() for _, parameter in trained)
    first, last = (total * rank // group.world_size for rank in (group.rank, group.rank + 1))
    found = []
    for name, parameter in trained:
        begin, end = max(first - start, 0), min(last - start, parameter.numel())
        if begin < end:
            found.append(Portion(name, begin, end, parameter))
        start += parameter.numel()
    return found


def frozen_portions_of(replica: Replica) -> list[Portion]:
    """What this rank owns of frozen parameters that a checkpoint holds; nothing where they have no owners."""
    if replica.owned is None:
        return []
    described = replica.owned.described
    return [one for one in _owned_portions(replica.owned) if one.name in described.frozen - described.base]


def _owned_portions(owned: OwnedState) -> list[Portion]:
    held = {} if owned.is_copy else owned.fragments
    return [Portion(name, one.begin, one.end, one.owned) for name, one in held.items()]


@dataclass(frozen=True)
class Piece:
    """A tensor, or some of its elements, in a message; `kind`: param, optim (of the parameter `name`), model, task."""

    kind: str
    name: str
    key: str
    dtype: str
    begin: int
    end: int
    shape: tuple[int, ...] | None = None  # of a tensor that is sent whole; None: elements of one like the parameter

    @property
    def bytes(self) -> int:
        return (self.end - self.begin) * _DTYPES[self.dtype].itemsize

    def to_record(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_record(cls, record: Sequence[Any]) -> Piece:
        """The inverse of `to_record`, after JSON."""
        kind, name, key, dtype, begin, end, shape = record
        return cls(kind, name, key, dtype, begin, end, None if shape is None else tuple(shape))


def whole(kind: str, name: str, tensor: Tensor, key: str = "") -> Piece:
    """The piece of a tensor that is sent as it is."""
    return Piece(kind, name, key, str(tensor.dtype), 0, tensor.numel(), tuple(tensor.shape))


def gradient_pieces(portions: Sequence[Portion]) -> list[Piece]:
    """The gradients of these portions."""
    return [Piece("param", one.name, "", str(one.held.dtype), one.begin, one.end) for one in portions]


def state_pieces(replica: Replica, portions: Sequence[Portion]) -> tuple[list[tuple[Piece, Tensor]], dict[str, Any]]:
    """The parameters and the optimizer's state of these portions, live; and its numbers that are not tensors."""
    pieces: list[tuple[Piece, Tensor]] = []
    numbers: dict[str, Any] = {}
    for one in portions:
        dtype = str(one.held.dtype)
        pieces.append((Piece("param", one.name, "", dtype, one.begin, one.end), one.elements(one.held)))
        for key, value in replica.optimizer.state.get(one.held, {}).items():
            if not isinstance(value, Tensor):
                numbers[f"optim.{one.name}.{key}"] = value
            elif replica.is_divided(key, value, one.held):
                piece = Piece("optim", one.name, key, str(value.dtype), one.begin, one.end)
                pieces.append((piece, one.elements(value)))
            elif not one.begin or replica.owned is not None:
                pieces.append((whole("optim", one.name, value, key), value.detach()))
    return pieces, numbers


def in_messages(pieces: Sequence[tuple[Piece, Tensor]]) -> Iterator[list[tuple[Piece, Tensor]]]:
    """The pieces cut into messages of about `MOST_BYTES`; the last one may be empty."""
    message: list[tuple[Piece, Tensor]] = []
    size = 0
    for piece, source in pieces:
        step = max(1, MOST_BYTES // _DTYPES[piece.dtype].itemsize) if piece.shape is None else piece.end
        for begin in range(piece.begin, piece.end, step) if piece.end else (0,):
            end = min(begin + step, piece.end)
            cut = Piece(piece.kind, piece.name, piece.key, piece.dtype, begin, end, piece.shape)
            flat = source.reshape(-1)[begin - piece.begin : end - piece.begin]
            if message and size + cut.bytes > MOST_BYTES:
                yield message
                message, size = [], 0
            message.append((cut, flat))
            size += cut.bytes
    yield message


def offsets_of(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """The first byte of each piece in a message, and the bytes of the message."""
    offsets, size = [], 0
    for piece in pieces:
        offsets.append(size)
        size += -(-piece.bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def view_of(memory: Tensor, offset: int, piece: Piece) -> Tensor:
    """A piece in the memory of a message, which is of type uint8. Shape (elements,)."""
    return memory[offset : offset + piece.bytes].view(_DTYPES[piece.dtype])


def value_of(memory: Tensor, offset: int, piece: Piece) -> Tensor:
    """A copy of a tensor that was sent whole."""
    assert piece.shape is not None
    return view_of(memory, offset, piece).clone().view(piece.shape)


@torch.no_grad()
def put_(target: Tensor, piece: Piece, values: Tensor) -> None:
    """Write the elements of a piece into the whole tensor, whatever its layout in memory."""
    if target.is_contiguous():
        target.view(-1)[piece.begin : piece.end].copy_(values)
        return
    flat = target.reshape(-1)  # a copy in row-major order
    flat[piece.begin : piece.end].copy_(values)
    target.copy_(flat.view(target.shape))


def state_like(parameter: Tensor, dtype: str) -> Tensor:
    """Memory for a part of the optimizer's state that has an element for each of the parameter's."""
    return torch.zeros_like(parameter, dtype=_DTYPES[dtype]).detach()
