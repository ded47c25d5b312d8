"""Snapshot: a copy of the state after one step, made while the next step computes.

Responsible for: the layout of an arena's image, and the copy of live tensors into it. Does not know why a state is
saved. The one idea: forward and backward never write to an optimizer's parameters or state, so these are
copied in the background until the next `optimizer.step`, which waits for the copy; everything else (buffers,
untrained tensors) is copied before `begin` returns.

The image is laid out once, for tensors of given names, types and shapes: the part's header, then its pieces. CUDA
tensors are copied on a stream of their own into the arena's memory, which is registered with the driver so that
the copies are asynchronous; the next update waits for them on its own stream, not on the host.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hetseq.checkpoint.arena import Arena
from hetseq.checkpoint.layout import Piece
from hetseq.checkpoint.part_format import header_bytes, in_file_order
from hetseq.checkpoint.part_io import dtype_of
from hetseq.checkpoint.tensor_slices import Held, elements_of

logger = logging.getLogger(__name__)


def image_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of the file of a part with these pieces."""
    return len(header_bytes(in_file_order(pieces))) + sum(piece.bytes for piece in pieces)


class Snapshot:
    """The image of `pieces` in an arena; copied repeatedly, always from tensors of the same kind."""

    def __init__(self, arena: Arena, pieces: Sequence[Piece]) -> None:
        self.pieces, self.arena = in_file_order(pieces), arena
        header = header_bytes(self.pieces)
        image = arena.image
        image[: len(header)] = header
        self.image_bytes, self._targets = len(header), []
        for piece in self.pieces:
            self._targets.append(_view(image, self.image_bytes, piece))
            self.image_bytes += piece.bytes
        self._copying: _Copying | None = None
        self._registered: int | None = None
        self._device = torch.device("cpu")  # the GPU whose driver was asked to register the memory, once one was
        # one thread for all copies: starting a thread means waiting for it, and it would share a pinned trainer's core
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="snapshot", daemon=True)
        self._thread.start()

    def begin(self, tensors: Mapping[str, Held], *, at_once: Collection[str], when_whole: Callable[[], None]) -> None:
        """Copy the tensors named in `at_once`, and start copying the others, which must not change until `settle`.

        `when_whole` is called once, by another thread, when the image is complete; not if the copy failed. `settle`
        does not wait for it, `finish` does.
        """
        self.finish()
        now: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        for piece, target in zip(self.pieces, self._targets):
            source = elements_of(tensors[piece.spec.name], piece)
            (now if piece.spec.name in at_once else later).append((target, source))
        _copy(now)
        on_gpu = [source.device for _, source in later if source.is_cuda]
        if on_gpu and self._registered is None:
            self._device = on_gpu[0]
            self._registered = _register(self.arena, self._device)
        self._copying = (_CudaCopying if on_gpu else _Copying)(later, when_whole)
        self._tasks.put(self._copying.run)

    def settle(self) -> None:
        """Wait until the tensors may change again. Raises the error of the copy, if it failed."""
        if self._copying is None:
            return
        try:
            self._copying.settle()
        except BaseException:
            self._copying = None  # raised once
            raise

    def finish(self) -> None:
        """Wait until the copy has ended and `when_whole` has returned. Raises the error of either."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.join()

    def close(self) -> None:
        """End the copy, whatever its result, and release the arena."""
        copying, self._copying = self._copying, None
        self._tasks.put(None)
        self._thread.join()
        if self._registered is not None:
            _unregister(self._registered, self._device)
        self._targets.clear()
        if copying is not None:
            copying.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class _Copying:
    """One copy of tensors in the host's memory, by a thread: torch releases the interpreter lock throughout."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], when_whole: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._pairs, self._when_whole = pairs, when_whole
        self._is_copied, self._is_over = threading.Event(), threading.Event()
        self._prepare()

    def settle(self) -> None:
        """Wait until the tensors are copied; raises the error that ended the copy early."""
        self._wait(self._is_copied)

    def join(self) -> None:
        """Wait for the end of the copy and of `when_whole`; raises the error that ended it early."""
        self._wait(self._is_over)

    def _wait(self, event: threading.Event) -> None:
        event.wait()
        if self._error is not None:
            raise self._error

    def _prepare(self) -> None:
        pass

    def _work(self) -> None:
        _copy(self._pairs)

    def run(self) -> None:
        """The whole copy, in another thread."""
        try:
            self._work()
            self._pairs = []
            self._is_copied.set()
            self._when_whole()
        except BaseException as error:  # raised by the thread that waits for the copy
            self._error = error
        finally:
            self._pairs = []
            self._is_copied.set()
            self._is_over.set()


class _CudaCopying(_Copying):
    """One copy from a GPU's memory; only the GPU's next update waits for it, never the host."""

    def _prepare(self) -> None:
        device = next(source.device for _, source in self._pairs if source.is_cuda)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for target, source in self._pairs:
                target.copy_(source, non_blocking=True)
            self._done = self._stream.record_event()

    def settle(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._done)

    def _work(self) -> None:
        self._done.synchronize()


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _view(image: memoryview, offset: int, piece: Piece) -> Tensor:
    dtype = dtype_of(piece.spec.dtype)
    if not piece.bytes:
        return torch.empty(piece.stored_shape, dtype=dtype)
    flat = torch.frombuffer(image, dtype=dtype, count=piece.end - piece.begin, offset=offset)
    return flat.view(piece.stored_shape)


def _register(arena: Arena, device: torch.device) -> int:
    """Register the arena with the CUDA driver, so that copies into it need no second buffer; 0 if it refuses."""
    whole: Any = (ctypes.c_char * len(arena.image)).from_buffer(arena.image)
    address = ctypes.addressof(whole)
    code = torch.cuda.cudart().cudaHostRegister(address, len(arena.image), 0)
    if int(code) != 0:
        _forget_error(device)
        logger.warning("the CUDA driver refused to register the snapshot's memory (%s): copies to it are slower", code)
        return 0
    return address


def _unregister(address: int, device: torch.device) -> None:
    if address and int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """Clear the error that a refused call of the CUDA runtime left behind in this thread.

    torch does not expose cudaGetLastError. The next kernel's launch check would read the error, fail without a cause
    of its own, and clear it: this is that kernel.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
