"""Reads and writes the tensors of a part in one pass that also computes its checksums.

Responsible for: how torch interprets the bytes of a part. Does not know which checkpoint it belongs to. The one idea:
one thread reads a part from front to back, straight into the tensors; others verify behind it, chunk by chunk, the
bytes now in place. So a checksum covers the very bytes that will be used, and no extra memory is needed.

Chosen by measurement (`bench/cold_read.py`, `bench/checkpoint_load.py`; docs/concepts/benchmarks.md has the figures).
From disk, no way of reading into tensors beats one thread with large calls by more than a twentieth, and eight threads
are slower. From the cache the checksums take longer than reading, so other threads compute them. Mapping the file is
no faster, and a disk error then kills the process (SIGBUS), where with `preadv` the part is refused.

Not done with the safetensors library because a part is created exclusively, flushed, and checksummed while
it is written, and is never held in memory a second time. The library opens every part (a test checks this). Inside
a part the tensors are ordered by decreasing element size, for the alignment that the library expects.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hetseq.checkpoint.layout import Piece, TensorSpec
from hetseq.checkpoint.memory_checksums import chunk_sum
from hetseq.checkpoint.part_format import ChunkSums, PartHeader, header_bytes, in_file_order, other_checksum
from hetseq.checkpoint.records import CHUNK_BYTES, DamagedError
from hetseq.checkpoint.tensor_slices import Held, elements_of
from hetseq.system.files import creating, reading, write_all

#: threads that verify what one reads: from a warm cache, a chunk's checksum takes longer than reading it
CHECKERS = 2
CHUNKS_AT_ONCE = 4  # read by one call
_COPIERS = 4  # threads that copy from memory and verify
_MOST_VIEWS = 1024  # in one preadv; IOV_MAX of Linux

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
    """How a tensor is described in a part; TypeError for one that cannot be saved."""
    spelling = _SPELLING.get(tensor.dtype)
    if spelling is None or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(
            f"tensor {name} is {tensor.dtype}, {tensor.layout}, on {tensor.device}: a checkpoint holds dense tensors of"
            f" {', '.join(str(dtype).removeprefix('torch.') for dtype in _SPELLING)}"
        )
    return TensorSpec(name, spelling, tuple(tensor.shape), tensor.dtype.itemsize)


def write_part(path: Path, pieces: Sequence[Piece], tensors: Mapping[str, Held]) -> tuple[int, tuple[int, ...]]:
    """Write a new part; returns its size in bytes and its checksums. OSError if the disk refuses."""
    pieces = in_file_order(pieces)
    sums, size = ChunkSums(), 0
    with creating(path) as descriptor:
        size += _write(descriptor, memoryview(header_bytes(pieces)), sums)
        for piece in pieces:
            size += _write(descriptor, _bytes_of(piece, tensors[piece.spec.name]), sums)
    return size, sums.all()


def read_part(path: Path, header: PartHeader, crc32: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` (contiguous, by name, on the CPU) from a part; DamagedError names its first chunk that differs.

    Takes no extra memory. Do not use the tensors before all parts have been read. OSError or EOFError if the disk
    fails. All threads have ended when this returns or raises.
    """
    raw = bytearray(len(header.raw))
    flats = (tensors[piece.spec.name].detach().view(-1)[piece.begin : piece.end] for piece in header.pieces)
    views = [memoryview(raw), *map(view_bytes, flats)]
    if len(crc32) != -(-sum(map(len, views)) // CHUNK_BYTES):
        raise DamagedError(f"{path.name}: its size differs from that in its manifest")
    with reading(path) as (descriptor, _):
        spare = len(os.sched_getaffinity(0)) - 1
        # even on a single core, where one thread verifies while the other waits for the disk
        _Pass(path, descriptor, views, crc32).run(checkers=max(1, min(CHECKERS, spare)))
    if raw != header.raw:
        raise DamagedError(f"{path.name}: its header changed while it was read")


def copy_part(
    source: Path, image: memoryview, header: PartHeader, sums: Sequence[int], tensors: Mapping[str, Tensor]
) -> None:
    """As `read_part`, from memory that holds the whole part. `sums` are its `memory_checksums`; errors name `source`.

    Each chunk is verified and then copied, while it is in the processor's cache.
    """
    raw = bytearray(len(header.raw))
    flats = (tensors[piece.spec.name].detach().view(-1)[piece.begin : piece.end] for piece in header.pieces)
    views = [memoryview(raw), *map(view_bytes, flats)]
    if sum(map(len, views)) != len(image) or len(sums) != -(-len(image) // CHUNK_BYTES):
        raise DamagedError(f"{source.name}: its size differs from that in its record")
    unread = iter(list(enumerate(_cut(views, CHUNK_BYTES))))  # the threads share it, under the interpreter's lock

    def work() -> None:
        for index, targets in unread:
            chunk = image[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            if chunk_sum(chunk) != sums[index]:
                raise other_checksum(source, index * CHUNK_BYTES, len(chunk))
            for target in targets:
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(chunk[: len(target)], np.uint8))
                chunk = chunk[len(target) :]

    threads = min(_COPIERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "checkpoint-copier") as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    if raw != header.raw:
        raise DamagedError(f"{source.name}: its header changed while it was read")


class _Pass:
    """One pass over a part: the caller's thread reads it from front to back, others verify behind it."""

    def __init__(self, path: Path, descriptor: int, views: Sequence[memoryview], crc32: Sequence[int]) -> None:
        self._path, self._descriptor, self._crc32 = path, descriptor, crc32
        self._chunks = list(_cut(views, CHUNK_BYTES))
        self._unchecked: SimpleQueue[int | None] = SimpleQueue()  # chunks in the order of the file; None: no more
        self._has_ended = False  # stops all reading and verifying
        self._failures: list[tuple[int, BaseException]] = []  # by chunk

    def run(self, *, checkers: int) -> None:
        """Read and verify all chunks, with this many extra threads; raise the error of the first bad chunk."""
        number = min(checkers, len(self._chunks) - 1)
        others = [threading.Thread(target=self._check_all, name="checkpoint-checker") for _ in range(number)]
        try:
            for other in others:
                other.start()
            self._read_all()
            self._unchecked.put(None)
            self._check_all()  # chunks that the others have not reached
        finally:
            self._has_ended = True  # everything is done, or has failed
            self._unchecked.put(None)
            for other in others:
                if other.is_alive():
                    other.join()
        if self._failures:
            # An error that is not the file's comes first, then the first bad chunk: all chunks before a bad one were
            # taken before it, so all of them have been verified.
            raise min(self._failures, key=lambda failure: (isinstance(failure[1], Exception), failure[0]))[1]

    def _read_all(self) -> None:
        for first in range(0, len(self._chunks), CHUNKS_AT_ONCE):
            if self._has_ended:
                return
            last = min(first + CHUNKS_AT_ONCE, len(self._chunks))
            views = [view for chunk in self._chunks[first:last] for view in chunk]
            fill_views(self._descriptor, views, first * CHUNK_BYTES)
            for index in range(first, last):
                self._unchecked.put(index)

    def _check_all(self) -> None:
        """Verify the chunks that were read until there are no more, or one is bad."""
        while not self._has_ended:
            index = self._unchecked.get()
            if index is None:
                self._unchecked.put(None)  # for the next thread
                return
            try:  # a chunk that was taken is verified even if a later one has failed meanwhile
                self._check(index)
            except BaseException as error:  # `run` raises it in its caller's thread
                self._failures.append((index, error))
                self._has_ended = True

    def _check(self, index: int) -> None:
        found = 0
        for view in self._chunks[index]:
            found = zlib.crc32(view, found)
        if found != self._crc32[index]:
            raise other_checksum(self._path, index * CHUNK_BYTES, sum(map(len, self._chunks[index])))


def _cut(views: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes in chunks, the last of which may be smaller."""
    chunk: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        while len(view):
            head, view = view[:room], view[room:]
            chunk.append(head)
            room -= len(head)
            if not room:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


def fill_views(descriptor: int, views: Sequence[memoryview], begin: int) -> None:
    """Fill the views in order with the bytes of a file from `begin` on; EOFError if the file ends too early."""
    first, rest = 0, list(views)
    while first < len(rest):
        count = os.preadv(descriptor, rest[first : first + _MOST_VIEWS], begin)
        if count == 0:
            raise EOFError("the file ends before its data")
        begin += count
        while first < len(rest) and count >= len(rest[first]):
            count -= len(rest[first])
            first += 1
        if count:
            rest[first] = rest[first][count:]


def allocate(specs: Iterable[TensorSpec], *, device: str = "cpu") -> dict[str, Tensor]:
    """Empty tensors by name; on the device "meta" they have only shapes and types."""
    return {spec.name: torch.empty(spec.shape, dtype=_DTYPE[spec.dtype], device=device) for spec in specs}


def can_be_filled(tensor: Tensor, like: Tensor) -> bool:
    """Whether bytes from a file or a socket can be read straight into a live tensor, in place of one like `like`.

    It must have the same shape and type, and be CPU memory in row-major order throughout.
    """
    # a subclass may have no memory, be spread over ranks, or have no shape yet
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _bytes_of(piece: Piece, held: Held) -> memoryview:
    return view_bytes(elements_of(held, piece).detach().reshape(-1).contiguous().cpu())


def view_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor of one dimension on the CPU."""
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))  # an array is a buffer, though its stubs do not say so


def _write(descriptor: int, data: memoryview, sums: ChunkSums) -> int:
    size = len(data)
    while len(data):
        chunk, data = data[: sums.room], data[sums.room :]
        sums.add(chunk)
        write_all(descriptor, chunk)
    return size
