"""The layout of a save, on which all ranks agree, whatever each of them holds.

Responsible for: describing what this rank holds to the others where ranks hold different things, and computing the same
layout on all ranks. The one idea: the row that opens a save contains a key of what its rank holds. Replicas have equal
keys, and nothing else is exchanged for them. If the keys differ, the ranks exchange descriptions (name, type, shape,
begin, end) and begin again. From then on each layout is preceded by one row with each rank's key, and descriptions are
exchanged again only if a key has changed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hetseq.checkpoint.context import CheckpointContext
from hetseq.checkpoint.layout import Piece, TensorSpec, divide, divide_among
from hetseq.checkpoint.part_io import spec_of
from hetseq.checkpoint.rank_messages import Row, exchange, exchange_texts, failure_row
from hetseq.checkpoint.records import sha256
from hetseq.checkpoint.tensor_slices import Held
from hetseq.errors import DisagreementError

_NO_KEY = 0  # of a rank whose tensors cannot be saved


@dataclass(frozen=True)
class Layout:
    """Where each byte of tensors of given names, types and shapes goes: the common base of the plans of many saves.

    `keys` has a key for the tensors of each rank; it is empty if all ranks hold the same whole tensors.
    """

    signature: list[tuple[Any, ...]]  # the weights, then name and kind of each tensor of this rank
    parts: list[list[Piece]]
    bytes: int
    digest: str
    keys: tuple[int, ...] = ()
    holdings: tuple[tuple[Piece, ...], ...] = ()  # of each rank, with `keys`

    @property
    def is_equal(self) -> bool:
        """Whether all ranks hold the same whole tensors; the same on all ranks."""
        return not self.keys

    @property
    def key(self) -> int:
        """The key in the row that opens a save: equal on all ranks that agree on the layout."""
        return _key(self.digest)


class HoldingsDifferError(DisagreementError):
    """The ranks opened a save with different layouts. Each of them catches it, calls `describe`, and begins again.

    If they still differ then, the same tensors were divided in different ways.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        different = [rank for rank, row in enumerate(rows) if row.nonce != rows[0].nonce]
        super().__init__(f"checkpoint: ranks {different} were given other weights than rank 0: all must be equal")
        self.rows = rows


def check_holdings(rows: Sequence[Row]) -> None:
    """HoldingsDifferError, on all ranks, if the rows that open a save have different keys (in `nonce`)."""
    if any(row.nonce != rows[0].nonce for row in rows):
        raise HoldingsDifferError(rows)


def lay_out(setting: CheckpointContext, tensors: Mapping[str, Held], known: Layout | None = None) -> Layout:
    """The layout for these tensors: `known`, the one before, if it still fits; every rank calls it.

    Exchanges nothing while this rank holds whole tensors and `known` has no slices; the next row then shows whether
    that is so on all ranks (`check_holdings`). TypeError or ValueError names a tensor that cannot be saved, and
    DisagreementError, on all ranks, one that differs between ranks or has a gap.
    """
    signature: list[tuple[Any, ...]] = [setting.weights, *((name, *_kind(held)) for name, held in tensors.items())]
    if (known is None or known.is_equal) and all(isinstance(held, Tensor) for held in tensors.values()):
        if known is not None and known.signature == signature:
            return known
        return _of_replicas(setting, [spec_of(name, held) for name, held in tensors.items()], signature)  # type: ignore[arg-type]
    pieces: Sequence[Piece] = ()
    error = None
    if known is not None and known.keys and known.signature[1:] == signature[1:]:
        pieces = known.holdings[setting.group.rank]
        row = Row(nonce=known.keys[setting.group.rank])
    else:
        try:
            pieces = pieces_of(tensors)
            row = Row(nonce=_key(sha256(_text(pieces).encode())))
        except Exception as caught:  # raised only after the other ranks have been told
            row, error = replace(failure_row(caught), nonce=_NO_KEY), caught
    rows = exchange(setting.group, row)
    if error is not None:
        raise error
    if known is not None and known.keys == tuple(row.nonce for row in rows):
        return known if known.signature == signature else _of_holdings(setting, known.holdings, known.keys, signature)
    return _described(setting, pieces, rows, signature)


def pieces_of(tensors: Mapping[str, Held]) -> list[Piece]:
    """What this rank holds, in order; TypeError or ValueError names a tensor that cannot be saved."""
    if not all(tensors):
        raise ValueError("a tensor has an empty name")
    pieces = []
    for name, held in tensors.items():
        if isinstance(held, Tensor):
            spec = spec_of(name, held)
            pieces.append(Piece(spec, 0, spec.elements))
            continue
        own = [
            Piece(replace(spec_of(name, one.tensor), shape=tuple(one.shape)), one.begin, one.end)
            for one in sorted(held, key=lambda one: (one.begin, one.end))
        ]
        for before, after in itertools.pairwise(own):
            if after.spec != before.spec or after.begin < before.end:
                raise ValueError(f"the slices of tensor {name} on this rank overlap, or differ in shape or type")
        pieces += own
    return pieces


def key_of(tensors: Mapping[str, Held]) -> int:
    """The key of what this rank holds, for a row of its own. Raises the errors of `pieces_of`."""
    return _key(sha256(_text(pieces_of(tensors)).encode()))


def describe(setting: CheckpointContext, tensors: Mapping[str, Held], rows: Sequence[Row]) -> Layout:
    """The layout for these tensors, after rows have shown that the ranks hold different things; every rank calls it.

    Raises the errors of `lay_out`.
    """
    signature = [setting.weights, *((name, *_kind(held)) for name, held in tensors.items())]
    return _described(setting, pieces_of(tensors), rows, signature)


def _described(
    setting: CheckpointContext, pieces: Sequence[Piece], rows: Sequence[Row], signature: list[tuple[Any, ...]]
) -> Layout:
    refused = next((rank for rank, row in enumerate(rows) if row.failed and row.nonce == _NO_KEY), None)
    if refused is not None:
        raise DisagreementError(f"rank {refused} cannot save its tensors: {rows[refused].text}")
    texts = exchange_texts(setting.group, _text(pieces))
    keys = tuple(_key(sha256(text.encode())) for text in texts)
    return _of_holdings(setting, [_parse(text) for text in texts], keys, signature)


def _of_replicas(setting: CheckpointContext, specs: Sequence[TensorSpec], signature: list[tuple[Any, ...]]) -> Layout:
    if not all(spec.name for spec in specs):
        raise ValueError("a tensor has an empty name")
    facts = [setting.weights, [(spec.name, spec.dtype, spec.shape) for spec in specs]]
    parts = divide(specs, setting.weights)
    return Layout(signature, parts, sum(spec.bytes for spec in specs), sha256(json.dumps(facts).encode()))


def _of_holdings(
    setting: CheckpointContext,
    holdings: Sequence[Sequence[Piece]],
    keys: tuple[int, ...],
    signature: list[tuple[Any, ...]],
) -> Layout:
    first = holdings[0]
    if all(pieces == first for pieces in holdings) and not any(piece.is_slice for piece in first):
        return _of_replicas(setting, [piece.spec for piece in first], signature)
    try:
        parts = divide_among(holdings, setting.weights)
    except ValueError as error:
        raise DisagreementError(f"the ranks hold a state that cannot be saved: {error}") from None
    size = sum(piece.bytes for part in parts for piece in part)
    digest = sha256(json.dumps([setting.weights, [_text(pieces) for pieces in holdings]]).encode())
    return Layout(signature, parts, size, digest, keys, tuple(map(tuple, holdings)))


def _key(digest: str) -> int:
    """64 bits of a sha256, never `_NO_KEY`."""
    return int(digest[:16], 16) or 1


def _text(pieces: Sequence[Piece]) -> str:
    """The description of what one rank holds."""
    return json.dumps(
        [
            [piece.spec.name, piece.spec.dtype, piece.spec.shape, piece.spec.itemsize, piece.begin, piece.end]
            for piece in pieces
        ]
    )


def _parse(text: str) -> tuple[Piece, ...]:
    return tuple(
        Piece(TensorSpec(name, dtype, tuple(shape), itemsize), begin, end)
        for name, dtype, shape, itemsize, begin, end in json.loads(text)
    )


def _kind(held: Held) -> tuple[Any, ...]:
    if isinstance(held, Tensor):
        return held.dtype, held.shape, held.layout, held.is_meta
    return tuple((one.begin, one.end, one.shape, *_kind(one.tensor)) for one in held)
