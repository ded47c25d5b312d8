"""Tensors into and out of a part of a checkpoint, in one pass that also computes its checksums.

Responsible for: what the bytes of a part mean to torch. Refuses to know which checkpoint it belongs to. The one idea:
reading a part front to back fills the tensors directly and passes every byte through the checksum on the way.

Written here and not by the safetensors library because a part is created exclusively, flushed, and checksummed while
it is written, and is never held in memory a second time. The library opens every part (a test holds us to it). Inside
a part the tensors stand by falling element size, which is the alignment the library expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hetseq.checkpoint.files import creating, read_into, reading, write_all
from hetseq.checkpoint.layout import Piece, TensorSpec
from hetseq.checkpoint.part_format import ChunkSums, PartHeader, compare_sums, header_bytes, in_file_order
from hetseq.checkpoint.records import DamagedError

_DTYPE = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_SPELLING = {dtype: spelling for spelling, dtype in _DTYPE.items()}


def dtype_of(spelling: str) -> torch.dtype:
    """The element type that a part calls by this name."""
    return _DTYPE[spelling]


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """How a tensor stands in a part; TypeError for one that cannot."""
    spelling = _SPELLING.get(tensor.dtype)
    if spelling is None or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(
            f"tensor {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}: a checkpoint holds dense tensors of"
            f" {', '.join(str(dtype).removeprefix('torch.') for dtype in _SPELLING)}"
        )
    return TensorSpec(name, spelling, tuple(tensor.shape), tensor.dtype.itemsize)


def write_part(path: Path, pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> tuple[int, tuple[int, ...]]:
    """Write a new part; its size in bytes and its checksums. OSError is the disk's answer."""
    pieces = in_file_order(pieces)
    sums, size = ChunkSums(), 0
    with creating(path) as descriptor:
        size += _write(descriptor, memoryview(header_bytes(pieces)), sums)
        for piece in pieces:
            size += _write(descriptor, _bytes_of(piece, tensors[piece.spec.name]), sums)
    return size, sums.all()


def read_part(path: Path, header: PartHeader, crc32: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` (contiguous, by name, on the CPU) from a part; DamagedError where a checksum differs.

    What was filled is not to be used before all parts have been read.
    """
    sums, raw = ChunkSums(), bytearray(len(header.raw))
    with reading(path) as (descriptor, _):
        _read(descriptor, memoryview(raw), sums)
        if raw != header.raw:
            raise DamagedError(f"{path.name}: its header changed while it was read")
        for piece in header.pieces:
            flat = tensors[piece.spec.name].view(-1)[piece.begin : piece.end]
            _read(descriptor, _view(flat), sums)
    compare_sums(path, sums, crc32)


def allocate(specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """Empty tensors on the CPU, by name."""
    return {spec.name: torch.empty(spec.shape, dtype=_DTYPE[spec.dtype]) for spec in specs}


def _bytes_of(piece: Piece, tensor: Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)[piece.begin : piece.end]
    return _view(flat.contiguous().cpu())


def _view(flat: Tensor) -> memoryview:
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))  # an array is a buffer, whatever its stubs say


def _write(descriptor: int, data: memoryview, sums: ChunkSums) -> int:
    size = len(data)
    while len(data):
        chunk, data = data[: sums.room], data[sums.room :]
        sums.add(chunk)
        write_all(descriptor, chunk)
    return size


def _read(descriptor: int, view: memoryview, sums: ChunkSums) -> None:
    while len(view):
        chunk, view = view[: sums.room], view[sums.room :]
        read_into(descriptor, chunk)
        sums.add(chunk)
