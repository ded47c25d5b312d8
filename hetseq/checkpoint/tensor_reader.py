"""Reads any span of any tensor of one checkpoint, with every byte verified.

Responsible for: where the elements of a tensor are in the parts, and for using a chunk of a part only after its
checksum. Does not know which spans are wanted, or why. The one idea: a chunk (8 MiB) is read into private memory,
compared with its checksum there, and copied from there, so nothing can change between check and use. The
last chunk is kept, so spans requested in file order read each chunk once.
"""

from __future__ import annotations

import bisect
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetseq.checkpoint.directory import part_name
from hetseq.checkpoint.layout import TensorSpec
from hetseq.checkpoint.part_io import allocate
from hetseq.checkpoint.records import CHUNK_BYTES, Commit, DamagedError
from hetseq.checkpoint.selection import describe
from hetseq.checkpoint.verification import inspect
from hetseq.system.files import read_into, reading


@dataclass(frozen=True)
class _Place:
    """The elements `begin` to `end` of a tensor, and the byte of a part at which they begin."""

    begin: int
    end: int
    part: int
    byte: int


class Spans:
    """The tensors of one checkpoint, to be read in spans; one thread at a time. Takes 8 MiB of memory.

    Opening it checks all small files and the headers of the parts (up to 8 MiB of each part). A checksum that does not
    match raises DamagedError, which names the checkpoint and the file, here and in every method that reads.
    `advance` is called with the bytes of each chunk that was read.
    """

    def __init__(self, commit: Commit, advance: Callable[[int], None] = lambda count: None) -> None:
        self.commit, self._advance = commit, advance
        self._chunk, self._chunk_at = bytearray(CHUNK_BYTES), (-1, -1)  # the chunk read last: (part, chunk)
        try:
            inspected = inspect(commit)
        except (DamagedError, OSError) as error:
            raise DamagedError(describe(commit.path, error)) from None
        self.state = inspected.state
        self.specs = {spec.name: spec for spec in inspected.specs}
        self._manifests = inspected.manifests
        self._places: dict[str, list[_Place]] = {}
        for part, header in enumerate(inspected.headers):
            self._check_header(part, header.raw)
            byte = len(header.raw)
            for piece in header.pieces:
                places = self._places.setdefault(piece.spec.name, [])
                places.append(_Place(piece.begin, piece.end, part, byte))
                byte += piece.bytes
        for places in self._places.values():
            places.sort(key=lambda place: place.begin)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's elements."""
        return self._empty(self.specs[name], 0).dtype

    def position(self, name: str, element: int) -> tuple[int, int]:
        """The place of an element: part and byte; elements read in this order read each chunk once."""
        place = self._places[name][self._first(name, element)]
        return place.part, place.byte + (element - place.begin) * self.specs[name].itemsize

    def blocks(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes of the elements `begin` to `end` (row-major) in order; each block is valid until the next one."""
        itemsize = self.specs[name].itemsize
        for place in self._places[name][self._first(name, begin) :]:
            first, last = max(begin, place.begin), min(end, place.end)
            byte = place.byte + (first - place.begin) * itemsize
            yield from self._verified(place.part, byte, byte + (last - first) * itemsize)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """The elements `begin` to `end` (row-major) as a new tensor of one dimension on the CPU."""
        elements = self._empty(self.specs[name], end - begin)
        raw, filled = elements.view(torch.uint8), 0
        for block in self.blocks(name, begin, end):
            raw[filled : filled + len(block)] = torch.frombuffer(block, dtype=torch.uint8)
            filled += len(block)
        return elements

    def whole(self, name: str) -> Tensor:
        """A tensor, contiguous and on the CPU."""
        spec = self.specs[name]
        return self.read(name, 0, spec.elements).view(spec.shape)

    def _empty(self, spec: TensorSpec, elements: int) -> Tensor:
        return allocate([replace(spec, shape=(elements,))])[spec.name]

    def _first(self, name: str, element: int) -> int:
        """The index of the place that holds an element."""
        return bisect.bisect_right(self._places[name], element, key=lambda place: place.begin) - 1

    def _check_header(self, part: int, raw: bytes) -> None:
        at = 0
        for block in self._verified(part, 0, len(raw)):
            if block != raw[at : at + len(block)]:
                raise self._damaged(part, "its header changed while it was read")
            at += len(block)

    def _verified(self, part: int, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes `begin` to `end` of a part."""
        while begin < end:
            index, inside = divmod(begin, CHUNK_BYTES)
            self._hold(part, index)
            block = memoryview(self._chunk)[inside : min(CHUNK_BYTES, inside + end - begin)]
            yield block
            begin += len(block)

    def _hold(self, part: int, index: int) -> None:
        """Read and verify one chunk of a part, unless it was the last one read."""
        if self._chunk_at == (part, index):
            return
        self._chunk_at = (-1, -1)
        manifest = self._manifests[part]
        begin = index * CHUNK_BYTES
        chunk = memoryview(self._chunk)[: min(CHUNK_BYTES, manifest.size_bytes - begin)]
        try:
            with reading(self.commit.path / part_name(part)) as (descriptor, _):
                os.lseek(descriptor, begin, os.SEEK_SET)
                read_into(descriptor, chunk)
        except (OSError, EOFError) as error:
            raise self._damaged(part, error) from None
        if zlib.crc32(chunk) != manifest.crc32[index]:
            raise self._damaged(part, f"the {len(chunk)} bytes from byte {begin} on do not match their checksum")
        self._chunk_at = (part, index)
        self._advance(len(chunk))

    def _damaged(self, part: int, reason: object) -> DamagedError:
        return DamagedError(describe(self.commit.path, f"{part_name(part)}: {reason}"))
