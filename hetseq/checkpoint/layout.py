"""Which tensor, or which slice of one, goes into which part of a checkpoint.

Responsible for: dividing the bytes of a checkpoint among its writers, and checking that the pieces found in a set
of parts make up whole tensors again. Pure: no files, no torch. The one idea: all tensors are laid out in the
caller's order, the sequence is cut at byte positions in proportion to the weights, and a cut moves to the nearest
border between two tensors unless the tensor under it is larger than the part on either side. An element that one rank
alone holds goes into the part of that rank.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_SLICE = re.compile(r"(.+)@(\d{1,19}):(\d{1,19})", re.DOTALL)
_ESCAPED = re.compile(r"[%/@\x00-\x1f\x7f]|(?<=\.)\.")


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type (safetensors spelling, as in "F32"), shape, and bytes of one element of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Piece:
    """The elements `begin` to `end` of a tensor in row-major order; all of them unless the tensor was cut."""

    spec: TensorSpec
    begin: int
    end: int

    @property
    def is_slice(self) -> bool:
        return (self.begin, self.end) != (0, self.spec.elements)

    @property
    def bytes(self) -> int:
        return (self.end - self.begin) * self.spec.itemsize

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.end - self.begin,) if self.is_slice else self.spec.shape

    @property
    def stored_name(self) -> str:
        name = escape(self.spec.name)
        return f"{name}@{self.begin}:{self.end}" if self.is_slice else name


def escape(name: str) -> str:
    """A tensor's name as stored in a file: without `/`, `@`, `..` and control characters (`%2F` for `/`)."""
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", name)


def unescape(stored: str) -> str:
    """The inverse of `escape`; ValueError for a name that `escape` cannot produce."""
    name = re.sub(r"%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), stored)
    if not name or escape(name) != stored:
        raise ValueError(f"the tensor name {stored[:80]!r} is not one that HetSeq writes")
    return name


def split_name(stored: str) -> tuple[str, tuple[int, int] | None]:
    """Tensor name, and elements (begin, end) if it is a slice, from a name in a file; ValueError for a foreign name."""
    match = _SLICE.fullmatch(stored)
    if match is None:
        return unescape(stored), None
    begin, end = int(match[2]), int(match[3])
    if begin >= end or f"{begin}:{end}" != stored[len(match[1]) + 1 :]:
        raise ValueError(f"the slice {stored[:80]!r} has no extent")
    return unescape(match[1]), (begin, end)


def divide(specs: Sequence[TensorSpec], weights: Sequence[float]) -> list[list[Piece]]:
    """The pieces of each part, in order; one part per weight, bytes in proportion to the weights.

    A weight of zero gives an empty part. ValueError for negative or non-finite weights, or if none is above zero.
    """
    _check_weights(weights)
    starts = list(itertools.accumulate((spec.bytes for spec in specs), initial=0))  # (tensors + 1,)
    writers = [index for index, weight in enumerate(weights) if weight > 0]
    total = math.fsum(weights)
    ends = [int(starts[-1] * (math.fsum(weights[: index + 1]) / total)) for index in writers]
    ends[-1] = starts[-1]
    sizes = [end - begin for begin, end in zip([0, *ends], ends)]
    # cuts: (writers + 1,) of (tensor, element): everything before a cut belongs to the parts on its left
    cuts = [(0, 0)]
    for left, end in enumerate(ends[:-1]):
        cuts.append(_cut(specs, starts, end, smaller=min(sizes[left], sizes[left + 1])))
    cuts.append((len(specs), 0))
    parts: list[list[Piece]] = [[] for _ in weights]
    for writer, first, last in zip(writers, cuts, cuts[1:]):
        parts[writer] = list(_between(specs, first, last))
    return parts


def divide_among(holdings: Sequence[Sequence[Piece]], weights: Sequence[float]) -> list[list[Piece]]:
    """The pieces of each part, given the pieces that each rank holds; each lies within one that its rank holds.

    What one rank alone holds goes into its part. Whole tensors that the same ranks hold are divided among these by
    `divide`, with equal weights if theirs are all zero: the result equals `divide`'s if all ranks hold the same whole
    tensors. Of slices that overlap, the elements that several ranks hold go to the one with the fewest bytes so
    far, large overlaps first. ValueError names a tensor whose shape or type differs between ranks, or of which no rank
    holds some elements; or explains the weights.
    """
    _check_weights(weights)
    parts: list[list[Piece]] = [[] for _ in weights]
    shared: dict[tuple[int, ...], list[TensorSpec]] = {}
    overlaps: list[tuple[Piece, tuple[int, ...]]] = []
    places: dict[str, int] = {}
    for name, held in _by_name(holdings).items():
        places[name] = len(places)
        for piece, ranks in _intervals(held):
            if len(ranks) == 1:
                parts[ranks[0]].append(piece)
            elif piece.is_slice:
                overlaps.append((piece, ranks))
            else:
                shared.setdefault(ranks, []).append(piece.spec)
    for ranks, specs in shared.items():
        own = [weights[rank] for rank in ranks]
        for rank, pieces in zip(ranks, divide(specs, own if any(own) else [1.0] * len(ranks))):
            parts[rank] += pieces
    sizes = [sum(piece.bytes for piece in part) for part in parts]
    for piece, ranks in sorted(overlaps, key=lambda overlap: -overlap[0].bytes):
        rank = min(ranks, key=lambda rank: (sizes[rank], rank))
        parts[rank].append(piece)
        sizes[rank] += piece.bytes
    for part, held_here in zip(parts, holdings):
        part.sort(key=lambda piece: (places[piece.spec.name], piece.begin))
        part[:] = _joined(part, held_here)
    return parts


def _check_weights(weights: Sequence[float]) -> None:
    if not weights or not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError(f"weights {list(weights)}: expected finite numbers of 0 or more, at least one above 0")


def _by_name(holdings: Sequence[Sequence[Piece]]) -> dict[str, list[tuple[int, Piece]]]:
    """The pieces of each tensor with the ranks that hold them, in order of appearance; ValueError where they differ."""
    found: dict[str, list[tuple[int, Piece]]] = {}
    for rank, pieces in enumerate(holdings):
        for piece in pieces:
            held = found.setdefault(piece.spec.name, [])
            held.append((rank, piece))
            if piece.spec != held[0][1].spec:
                first, spec, other = held[0][0], held[0][1].spec, piece.spec
                raise ValueError(
                    f"tensor {spec.name} is {spec.dtype} of shape {spec.shape} on rank {first}, but"
                    f" {other.dtype} of shape {other.shape} on rank {rank}: all ranks must agree"
                )
    return found


def _intervals(held: Sequence[tuple[int, Piece]]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """One tensor, cut at each end of a held slice, and the ranks that hold each of these pieces."""
    spec = held[0][1].spec
    if not any(piece.is_slice for _, piece in held):
        yield Piece(spec, 0, spec.elements), tuple(sorted({rank for rank, _ in held}))
        return
    borders = {0, spec.elements}
    for _, piece in held:
        if piece.begin < piece.end:
            borders |= {piece.begin, piece.end}
    for begin, end in itertools.pairwise(sorted(borders)):
        ranks = {rank for rank, piece in held if piece.begin <= begin and end <= piece.end}
        if not ranks:
            raise ValueError(f"no rank holds the elements {begin} to {end} of tensor {spec.name}, of {spec.elements}")
        yield Piece(spec, begin, end), tuple(sorted(ranks))


def _joined(part: Sequence[Piece], held: Sequence[Piece]) -> list[Piece]:
    """The pieces of a part in order; neighbours within one held piece become one."""
    extents: dict[str, list[Piece]] = {}
    for piece in held:
        extents.setdefault(piece.spec.name, []).append(piece)
    joined: list[Piece] = []
    for piece in part:
        last = joined[-1] if joined else piece
        both = Piece(piece.spec, last.begin, piece.end)
        is_next = last.spec == piece.spec and last.end == piece.begin > last.begin
        if is_next and any(one.begin <= both.begin and both.end <= one.end for one in extents[piece.spec.name]):
            joined[-1] = both
        else:
            joined.append(piece)
    return joined


def _cut(specs: Sequence[TensorSpec], starts: Sequence[int], position: int, *, smaller: int) -> tuple[int, int]:
    """Where to cut near byte `position`, given the bytes of the smaller of the two parts beside it."""
    index = bisect.bisect_right(starts, position) - 1
    if index >= len(specs):
        return len(specs), 0
    spec, inside = specs[index], position - starts[index]
    if spec.bytes > smaller:
        element = round(inside / spec.itemsize)
    else:
        element = 0 if 2 * inside <= spec.bytes else spec.elements
    return (index + 1, 0) if element == spec.elements else (index, element)


def _between(specs: Sequence[TensorSpec], begin: tuple[int, int], end: tuple[int, int]) -> Iterable[Piece]:
    for index in range(begin[0], min(end[0] + 1, len(specs))):
        first = begin[1] if index == begin[0] else 0
        last = end[1] if index == end[0] else specs[index].elements
        if index < end[0] or last > first:
            yield Piece(specs[index], first, last)


def whole_tensors(pieces: Iterable[Piece]) -> list[TensorSpec]:
    """The tensors that the pieces of all parts make up, in order of appearance.

    ValueError for a tensor that occurs twice, has a gap or an overlap, or whose slices disagree. Since the
    slices cover it, no tensor is larger than the files it comes from.
    """
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.spec.name, []).append(piece)
    specs = []
    for name, group in found.items():
        spec, reached = group[0].spec, 0
        for piece in sorted(group, key=lambda piece: piece.begin):
            if piece.spec != spec:
                raise ValueError(f"the pieces of tensor {name} disagree about its shape or type")
            if piece.begin != reached or (len(group) > 1 and not piece.is_slice):
                raise ValueError(f"tensor {name} occurs twice, overlaps, or has a gap at element {reached}")
            reached = piece.end
        if reached != spec.elements:
            raise ValueError(f"tensor {name} ends at element {reached} of {spec.elements}")
        specs.append(spec)
    return specs
