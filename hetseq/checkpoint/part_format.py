"""One part of a checkpoint: a safetensors file with a CRC-32 for every 8 MiB, as bytes on the disk.

Responsible for: the header of a part, and the checksums of its file. Knows nothing of tensors and torch, so that a
process without torch can write and verify parts. The one idea: the file is the header followed by the tensors without
gaps, so its bytes follow from the list of its pieces.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.checkpoint.layout import Piece, TensorSpec, split_name
from hetseq.checkpoint.records import CHUNK_BYTES, DamagedError, parse_json
from hetseq.system.files import read_into, reading

HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses longer headers
DIMENSIONS_LIMIT = 64

#: bytes of an element of each type, in the spelling of safetensors
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
}


class ChunkSums:
    """The CRC-32 of every full chunk of a stream, and of the rest at its end."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._current = 0
        self._filled = 0

    @property
    def room(self) -> int:
        """Bytes until the end of the current chunk."""
        return CHUNK_BYTES - self._filled

    def add(self, data: memoryview) -> None:
        """Add the next bytes, at most `room` of them."""
        self._current = zlib.crc32(data, self._current)
        self._filled += len(data)
        if self._filled == CHUNK_BYTES:
            self._finished.append(self._current)
            self._current = self._filled = 0

    @property
    def bytes(self) -> int:
        """The checksums of all bytes added."""
        return len(self._finished) * CHUNK_BYTES + self._filled

    def all(self) -> tuple[int, ...]:
        return (*self._finished, self._current) if self._filled else tuple(self._finished)


@dataclass(frozen=True)
class PartHeader:
    """The pieces of a part in the order of the file, and the first bytes of the file, which encode them."""

    pieces: tuple[Piece, ...]
    raw: bytes


def in_file_order(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces in the order of a part: by decreasing element size, for the alignment that readers expect."""
    return sorted(pieces, key=lambda piece: -piece.spec.itemsize)


def header_bytes(pieces: Sequence[Piece]) -> bytes:
    """The first bytes of a part that holds these pieces in this order; ValueError where there are too many."""
    metadata, record, offset = {"format": "pt"}, {}, 0
    for piece in pieces:
        spec, name = piece.spec, piece.stored_name
        record[name] = {
            "dtype": spec.dtype,
            "shape": list(piece.stored_shape),
            "data_offsets": [offset, offset + piece.bytes],
        }
        offset += piece.bytes
        if piece.is_slice:
            metadata[name] = json.dumps({"dtype": spec.dtype, "shape": list(spec.shape)})
    text = json.dumps({"__metadata__": metadata, **record}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"{len(pieces)} tensors need a header of {len(text)} bytes, at most {HEADER_LIMIT}")
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> PartHeader:
    """The content that a part claims, checked against its size; DamagedError names the fault. Allocates only that."""
    with reading(path) as (descriptor, size):
        start = bytearray(min(size, 8))
        read_into(descriptor, memoryview(start))
        raw = bytearray(_header_length(start, size, path))
        read_into(descriptor, memoryview(raw))
    return _header_of(bytes(start), bytes(raw), size, path)


def parse_header(content: memoryview, *, source: Path, size: int | None = None) -> PartHeader:
    """As `read_header`, for a part in memory; errors name it `source`.

    `content` may be only the header of a part of `size` bytes.
    """
    size = len(content) if size is None else size
    start = bytes(content[:8])
    raw = bytes(content[8 : 8 + _header_length(start, size, source)])
    return _header_of(start, raw, size, source)


def header_in(content: memoryview) -> memoryview:
    """The part of an image that its header claims to be; at most all of it."""
    length = int.from_bytes(content[:8], "little")
    return content[: 8 + min(length, HEADER_LIMIT)]


def _header_length(start: bytes | bytearray, size: int, source: Path) -> int:
    """The part's JSON, from its first bytes and its total size."""
    if len(start) < 8:
        raise DamagedError(f"{source.name}: {size} bytes are too few for a part")
    length = int.from_bytes(start, "little")
    if length > min(size - 8, HEADER_LIMIT):
        raise DamagedError(f"{source.name}: its header claims {length} bytes, of {size} in the file")
    return length


def _header_of(start: bytes, raw: bytes, size: int, source: Path) -> PartHeader:
    pieces = _parse(parse_json(raw, source=source), payload=size - 8 - len(raw), source=source)
    return PartHeader(pieces, start + raw)


def check_sums(path: Path, crc32: Sequence[int], advance: Callable[[int], None] = lambda count: None) -> None:
    """Read a part and compare its checksums; DamagedError names the first chunk that differs.

    `advance` is called with the bytes of each chunk.
    """
    sums, buffer = ChunkSums(), memoryview(bytearray(CHUNK_BYTES))
    with reading(path) as (descriptor, size):
        for begin in range(0, size, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, size - begin)]
            read_into(descriptor, chunk)
            sums.add(chunk)
            advance(len(chunk))
    compare_sums(path, sums, crc32)


def compare_sums(path: Path, sums: ChunkSums, crc32: Sequence[int]) -> None:
    """Raise DamagedError if a part's checksums differ from those in its manifest."""
    found = sums.all()
    for index, (is_, was) in enumerate(zip(found, crc32)):
        if is_ != was:
            begin = index * CHUNK_BYTES
            raise other_checksum(path, begin, min(CHUNK_BYTES, sums.bytes - begin))
    if len(found) != len(crc32):
        raise DamagedError(f"{path.name}: its size differs from that in its manifest")


def other_checksum(path: Path, begin: int, size: int) -> DamagedError:
    """The error for a chunk of a part whose checksum differs."""
    return DamagedError(f"{path.name}: the {size} bytes from byte {begin} on do not match their checksum")


def _parse(record: dict[str, Any], *, payload: int, source: Path) -> tuple[Piece, ...]:
    metadata = record.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise DamagedError(f"{source.name}: __metadata__ is not an object")
    pieces, reached = [], 0
    for stored, entry in record.items():
        try:
            piece, begin, end = _parse_entry(stored, entry, metadata.get(stored), source)
        except ValueError as error:
            raise DamagedError(f"{source.name}: {error}") from None
        if begin != reached or end - begin != piece.bytes:
            raise DamagedError(
                f"{source.name}: {stored[:80]} claims the bytes {begin} to {end}; {piece.bytes} bytes from {reached} on"
                " are expected"
            )
        pieces.append(piece)
        reached = end
    if reached != payload:
        raise DamagedError(f"{source.name}: its header describes {reached} bytes of tensors, the file holds {payload}")
    return tuple(pieces)


def _parse_entry(stored: str, entry: Any, full: Any, source: Path) -> tuple[Piece, int, int]:
    name, cut = split_name(stored)
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {stored[:80]} is not an object")
    shape, dtype = _parse_shape(entry, stored), entry["dtype"]
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise ValueError(f"{stored[:80]} has the offsets {str(offsets)[:80]}")
    whole = shape
    if cut is not None:
        if not isinstance(full, str):
            raise ValueError(f"the slice {stored[:80]} has no full shape in __metadata__")
        described = parse_json(full.encode("utf-8", "replace"), source=source)
        whole = _parse_shape(described, stored)
        if described["dtype"] != dtype:
            raise ValueError(f"{stored[:80]} has two types")
    spec = TensorSpec(name, dtype, whole, ITEM_BYTES[dtype])
    piece = Piece(spec, *(cut or (0, spec.elements)))
    if piece.end > spec.elements or piece.stored_name != stored or piece.stored_shape != shape:
        raise ValueError(f"{stored[:80]} of shape {shape} does not fit the full shape {whole}")
    return piece, offsets[0], offsets[1]


def _parse_shape(entry: Mapping[str, Any], stored: str) -> tuple[int, ...]:
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{stored[:80]} has the type {str(dtype)[:40]}, which this torch does not know")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_LIMIT or not all(_is_size(size) for size in shape):
        raise ValueError(f"{stored[:80]} has the shape {str(shape)[:80]}")
    extent = 1  # of the shape without its zeros: torch computes strides from it
    for size in shape:
        extent *= max(size, 1)
    if extent >= 2**63 // 8:
        raise ValueError(f"{stored[:80]} has the shape {str(shape)[:80]}, more than any memory")
    return tuple(shape)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
