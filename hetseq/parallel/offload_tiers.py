"""Places for activations outside the memory of the device: host memory, or a file of this node.

Responsible for the bytes of one tensor on their way out and back, with the tensor's strides. Decides neither which
tensors leave nor when they come back (`activation_offload`). The one idea: a transfer is begun in one call and ended
in another, and what lies between them is computed meanwhile.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hetseq.errors import HetSeqError

Wait = Callable[[], Tensor]


class Tier(Protocol):
    """A place for tensors that are dense: each element of their memory belongs to them, in any order."""

    def put(self, tensor: Tensor) -> Parcel:
        """Begin to copy a tensor, which must not change before the parcel `has_left`."""
        ...

    def close(self) -> None:
        """Release everything. No parcel is used after that."""
        ...


class Parcel(Protocol):
    """One tensor in a tier, until `free` is called."""

    def has_left(self) -> None:
        """Return when the copy is complete, or what follows on the device is ordered after it: the tensor may go.

        Raises HetSeqError if it could not be written.
        """
        ...

    def fetch(self) -> Wait:
        """Begin to bring a copy back. The result waits for it: same values, shape, strides, type and device."""
        ...

    def free(self) -> None:
        """Give the place back. From any thread, once."""
        ...


@dataclass(frozen=True)
class _Form:
    """What makes a tensor of the bytes in its memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def tensor(self, memory: Tensor) -> Tensor:
        """The tensor in this memory, which has uint8 elements."""
        return memory.view(self.dtype).as_strided(self.shape, self.strides)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor. Shape (bytes,), uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class HostTier:
    """Page-locked host memory beside a GPU. Copies run on two streams, and the thread that computes never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def put(self, tensor: Tensor) -> Parcel:
        # torch gives the memory of an earlier slab again once the copies from and to it have ended
        slab = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            slab.copy_(_bytes_of(tensor), non_blocking=True)
            copied = self._out.record_event()
        return _OnHost(self, slab, copied, _Form.of(tensor))

    def close(self) -> None:
        torch.cuda.synchronize(self._device)

    def bring(self, slab: Tensor, form: _Form) -> Wait:
        """Begin to copy a slab to the device."""
        compute = torch.cuda.current_stream(self._device)
        memory = torch.empty(slab.numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(compute)  # what has used this memory before
        self._back.wait_stream(self._out)
        with torch.cuda.stream(self._back):
            memory.copy_(slab, non_blocking=True)
            arrived = self._back.record_event()
        memory.record_stream(self._back)  # it may be dropped unused

        def wait() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(arrived)
            return form.tensor(memory)

        return wait

    def order_after(self, copied: torch.cuda.Event) -> None:
        """Have what computes from now on run after a copy, before it uses the memory of the tensor."""
        torch.cuda.current_stream(self._device).wait_event(copied)


class _OnHost:
    def __init__(self, tier: HostTier, slab: Tensor, copied: torch.cuda.Event, form: _Form) -> None:
        self._tier, self._slab, self._copied, self._form = tier, slab, copied, form

    def has_left(self) -> None:
        self._tier.order_after(self._copied)

    def fetch(self) -> Wait:
        return self._tier.bring(self._slab, self._form)

    def free(self) -> None:
        del self._slab


class _Places:
    """Which bytes of a file are taken. It is as long as the most that were at a time, and the gaps between them."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # begin and end of each gap, in order, none beside another
        self._end = 0
        self._given_back: deque[tuple[int, int]] = deque()  # from any thread, also in the midst of `take`

    def take(self, size: int) -> int:
        """The place of so many free bytes, which are taken from now on. One thread calls it."""
        while self._given_back:
            self._insert(*self._given_back.popleft())
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        begin, self._end = self._end, self._end + size
        return begin

    def give_back(self, begin: int, size: int) -> None:
        self._given_back.append((begin, begin + size))

    def _insert(self, begin: int, end: int) -> None:
        index = bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            _, end = self._free.pop(index)
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin, _ = self._free.pop(index)
        if end == self._end:
            self._end = begin
        else:
            self._free.insert(index, (begin, end))


class DiskTier:
    """A file without a name in a folder of this node. One thread writes, another one reads."""

    def __init__(self, folder: str, device: torch.device) -> None:
        self._folder, self._device = folder, device
        try:
            self._file: Any = tempfile.TemporaryFile(dir=folder, prefix="hetseq-activations-")  # noqa: SIM115
        except OSError as error:
            raise HetSeqError(
                f"--offload-dir {folder}: no file can be made there ({error.strerror}): name a folder on a local disk"
            ) from None
        weakref.finalize(self, self._file.close)
        self._writer = ThreadPoolExecutor(1, "write activations")
        self._reader = ThreadPoolExecutor(1, "read activations")
        self._places = _Places()

    def put(self, tensor: Tensor) -> Parcel:
        place = self._places.take(tensor.nbytes)
        content = _bytes_of(tensor.detach())
        ready = None if tensor.device.type == "cpu" else torch.cuda.current_stream(tensor.device).record_event()
        return _InFile(self, place, _Form.of(tensor), self._writer.submit(self._write, content, place, ready))

    def close(self) -> None:
        for pool in (self._writer, self._reader):
            pool.shutdown(cancel_futures=True)
        self._file.close()

    def bring(self, place: int, form: _Form, size: int, written: Future[None]) -> Wait:
        """Begin to read a tensor once it is written."""
        read = self._reader.submit(self._read, place, size, written)
        return lambda: form.tensor(read.result().to(self._device))

    def give_back(self, place: int, size: int) -> None:
        self._places.give_back(place, size)

    def _write(self, content: Tensor, place: int, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()
        rest = memoryview(content.cpu().numpy().data)
        try:
            while rest:
                done = os.pwrite(self._file.fileno(), rest, place)
                rest, place = rest[done:], place + done
        except OSError as error:
            raise HetSeqError(
                f"--offload-dir {self._folder}: activations cannot be written there ({error.strerror}): name a folder"
                " with more room, or take smaller micro-batches (--batch-size)"
            ) from None

    def _read(self, place: int, size: int, written: Future[None]) -> Tensor:
        written.result()
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        rest = memoryview(memory.numpy().data)
        try:
            while rest:
                if not (done := os.preadv(self._file.fileno(), [rest], place)):
                    raise OSError(None, "the file is shorter than the tensor written to it")
                rest, place = rest[done:], place + done
        except OSError as error:
            raise HetSeqError(
                f"--offload-dir {self._folder}: activations cannot be read back ({error.strerror}): name another folder"
            ) from None
        return memory


class _InFile:
    def __init__(self, tier: DiskTier, place: int, form: _Form, written: Future[None]) -> None:
        self._tier, self._place, self._form, self._written = tier, place, form, written
        self._size = form.shape.numel() * form.dtype.itemsize

    def has_left(self) -> None:
        self._written.result()

    def fetch(self) -> Wait:
        return self._tier.bring(self._place, self._form, self._size, self._written)

    def free(self) -> None:
        self._tier.give_back(self._place, self._size)
