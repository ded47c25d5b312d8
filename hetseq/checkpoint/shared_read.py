"""Reading a checkpoint together: each rank reads what it wants, and all ranks together verify every byte.

Responsible for: agreeing on the chunks that each rank reads, and filling tensors and slices from them. Does not choose
the checkpoint, and does not know why something is wanted. The one idea: a chunk is read into private memory, compared
with its checksum there, and only then copied to where it is wanted. Nothing is kept of a chunk that is not wanted.

The header of a part says where its tensors are, and a rank may not read the chunks that contain it. So the ranks
compare the headers that they have seen, and a rank that reads such a chunk compares its bytes with the header.
"""

from __future__ import annotations

import bisect
import errno
import json
import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from hetseq.checkpoint.part_format import PartHeader, other_checksum
from hetseq.checkpoint.part_io import fill_views, view_bytes
from hetseq.checkpoint.rank_messages import RowGroup, exchange_texts
from hetseq.checkpoint.read_plan import Chunks, divide_unwanted, from_ranges, to_ranges
from hetseq.checkpoint.records import CHUNK_BYTES, DamagedError, sha256
from hetseq.checkpoint.tensor_slices import Held
from hetseq.system.files import reading

_THREADS = 3  # that read and verify


class PartTargets:
    """The places in `targets` that the bytes of one part go to, and the chunks that contain these bytes.

    `targets` are the tensors and slices that this rank wants, by name: contiguous, on the CPU. `source` is the part's
    name in errors, `sums` are the checksums of its chunks.
    """

    def __init__(
        self, source: Path, header: PartHeader, size: int, sums: Sequence[int], targets: Mapping[str, Held]
    ) -> None:
        self.source, self.header, self.size, self.sums = source, header, size, sums
        if len(sums) != self.count:
            raise DamagedError(f"{source.name}: its size differs from that in its record")
        self._views: list[memoryview] = []
        self._begins: list[int] = []  # the first byte of each view in the part, increasing
        byte = len(header.raw)
        for piece in header.pieces:
            for begin, flat in _wanted_of(targets[piece.spec.name], piece.begin, piece.end):
                self._begins.append(byte + (begin - piece.begin) * piece.spec.itemsize)
                self._views.append(view_bytes(flat))
            byte += piece.bytes
        self.wanted: set[int] = set()
        for first, view in zip(self._begins, self._views):
            self.wanted.update(range(first // CHUNK_BYTES, (first + len(view) - 1) // CHUNK_BYTES + 1))

    @property
    def count(self) -> int:
        """The number of chunks."""
        return -(-self.size // CHUNK_BYTES)

    def length(self, index: int) -> int:
        """Bytes of a chunk."""
        return min(CHUNK_BYTES, self.size - index * CHUNK_BYTES)

    def take(self, index: int, chunk: memoryview, sum_of: Callable[[memoryview], int]) -> None:
        """Verify one chunk and copy the wanted parts of it; DamagedError if it is not as it was written."""
        begin = index * CHUNK_BYTES
        if sum_of(chunk) != self.sums[index]:
            raise other_checksum(self.source, begin, len(chunk))
        raw = self.header.raw[begin : begin + len(chunk)]
        if chunk[: len(raw)] != raw:
            raise DamagedError(f"{self.source.name}: its header changed while it was read")
        if index not in self.wanted:
            return
        for place in range(max(0, bisect.bisect_right(self._begins, begin) - 1), len(self._views)):
            first, view = self._begins[place] - begin, self._views[place]  # from the start of the chunk
            if first >= len(chunk):
                break
            if source := chunk[max(first, 0) : max(first + len(view), 0)]:
                target = view[max(-first, 0) :][: len(source)]
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _wanted_of(held: Held, begin: int, end: int) -> Iterable[tuple[int, Tensor]]:
    """The elements `begin` to `end` of a tensor, as far as they are wanted: the first element, and where they go to."""
    if isinstance(held, Tensor):
        found = [(begin, held.detach().view(-1)[begin:end])]
    else:
        found = []
        for one in held:
            first, last = max(begin, one.begin), min(end, one.end)
            if first < last:
                found.append((first, one.tensor.detach()[first - one.begin : last - one.begin]))
    return [(first, flat) for first, flat in found if flat.numel()]


@dataclass(frozen=True)
class SharedRead:
    """The chunks that each rank wants of each part, and those that it reads only to verify; equal on all ranks."""

    wanted: list[Chunks]  # of each rank
    verified: list[Chunks]

    def chunks(self, rank: int, part: int) -> set[int]:
        """What a rank reads of a part."""
        return self.wanted[rank][part] | self.verified[rank][part]


def agree(
    group: RowGroup,
    open_parts: Callable[[], Sequence[PartTargets]],
    *,
    holders: Sequence[Collection[int]] | None = None,
) -> tuple[Sequence[PartTargets], SharedRead]:
    """The opened parts, and which rank reads what; every rank calls it.

    `holders` are the ranks that can read each part; all, if it is None. An error of `open_parts` is raised after the
    other ranks were told: these raise OSError (ECANCELED). DamagedError, on all ranks, if these saw different headers.
    """
    try:
        parts = open_parts()
        headers = sha256(b"".join(part.header.raw for part in parts))
        text = json.dumps([headers, [to_ranges(part.wanted) for part in parts]])
    except Exception:
        exchange_texts(group, "null")
        raise
    answers = [json.loads(answer) for answer in exchange_texts(group, text)]
    if None in answers:
        raise OSError(errno.ECANCELED, "another rank could not open this checkpoint")
    if any(answer[0] != headers for answer in answers):
        raise DamagedError("the ranks do not see the same headers of its parts")
    wanted = [[from_ranges(ranges) for ranges in answer[1]] for answer in answers]
    able = holders if holders is not None else [range(group.world_size)] * len(parts)
    return parts, SharedRead(wanted, divide_unwanted(wanted, [part.count for part in parts], able))


def read_chunks(path: Path, part: PartTargets, chunks: Collection[int]) -> None:
    """Read these chunks of a part's file; DamagedError for one that differs, OSError or EOFError if the disk fails."""
    if not chunks:
        return
    with reading(path) as (descriptor, _):

        def read(index: int, buffer: memoryview) -> memoryview:
            chunk = buffer[: part.length(index)]
            fill_views(descriptor, [chunk], index * CHUNK_BYTES)
            return chunk

        _take_all(part, chunks, read, zlib.crc32, buffer_bytes=CHUNK_BYTES)


def copy_chunks(
    image: memoryview, part: PartTargets, chunks: Collection[int], sum_of: Callable[[memoryview], int]
) -> None:
    """Take these chunks of a part that is in memory; DamagedError for one that differs."""

    def read(index: int, buffer: memoryview) -> memoryview:
        return image[index * CHUNK_BYTES :][: part.length(index)]

    _take_all(part, chunks, read, sum_of, buffer_bytes=0)


def _take_all(
    part: PartTargets,
    chunks: Collection[int],
    read: Callable[[int, memoryview], memoryview],
    sum_of: Callable[[memoryview], int],
    *,
    buffer_bytes: int,
) -> None:
    """Take chunks with a few threads, each with a buffer of its own; no further ones after an error."""
    untaken = iter(sorted(chunks))  # the threads share it, under the interpreter's lock
    has_failed = threading.Event()

    def work() -> None:
        buffer = memoryview(bytearray(buffer_bytes))
        try:
            for index in untaken:
                if has_failed.is_set():
                    return
                part.take(index, read(index, buffer), sum_of)
        except BaseException:
            has_failed.set()
            raise

    threads = min(_THREADS, len(os.sched_getaffinity(0)), len(chunks))
    if not threads:
        return
    with ThreadPoolExecutor(threads, "checkpoint-reader") as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
