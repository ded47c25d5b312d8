"""Activation offload: what forward keeps for backward leaves the device, and comes back before it is needed.

Responsible for which tensors leave, in which order they return, and for their exact values. Where they go is a
`Tier`. The one idea: backward needs the tensors in about the reverse order in which forward kept them. So the last
ones stay, and whenever backward takes one, the transfer of those before it begins: as many as the *horizon* says. With
a horizon of h at most h + 2 of n equal tensors are on the device: h on their way, one leaving or being used, and the
newest.

The tensors are those that go through autograd's hooks for saved tensors. With activation checkpointing these are the
inputs of the modules.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hetseq.parallel.offload_tiers import Parcel, Tier, Wait

LEAST_BYTES = 1 << 20  # a smaller tensor costs more than it hides


@dataclass
class OffloadFacts:
    """What the offload of one micro-batch did: tensors and bytes that backward needs, and those of them that left."""

    tensors: int = 0
    bytes: int = 0
    moved: int = 0
    moved_bytes: int = 0
    most_live_bytes: int = 0  # on the device at a time
    waited_s: float = 0.0  # of the thread that computes


class ActivationOffload:
    """Offloads the activations of one micro-batch after the other. For one thread.

    `gathered`: parameters whose memory changes while forward runs, asked for at each tensor; their numbers stay.
    """

    def __init__(
        self, model: torch.nn.Module, tier: Tier, *, horizon: int, least_bytes: int | None = None,
        gathered: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:  # fmt: skip
        self._model, self._tier, self._horizon, self._gathered = model, tier, horizon, gathered
        self._least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
        self.facts = OffloadFacts()  # of the newest micro-batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of a micro-batch; its backward comes later, before the next `forward`.

        Raises RuntimeError in forward or backward if a kept tensor was changed in place, as autograd does, and
        HetSeqError if the tier fails.
        """
        # by the storage itself: a parameter that comes and goes has no address yet
        stay = {one.untyped_storage()._cdata for one in (*self._model.parameters(), *self._model.buffers())}
        device = next(self._model.parameters()).device
        self.facts = OffloadFacts()

        def may_leave(tensor: Tensor) -> bool:
            # a copy of another kind of tensor could be another one to a kernel
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != device:
                return False
            if tensor.is_conj() or tensor.is_neg():  # which the memory does not show
                return False
            storage = tensor.untyped_storage()
            is_large = tensor.nbytes >= self._least_bytes
            # of a part of a larger tensor the whole would stay, and its copy could have other strides
            is_whole = storage.nbytes() == tensor.nbytes and _is_dense(tensor)
            if not (is_large and is_whole) or storage._cdata in stay:
                return False
            return all(one.untyped_storage()._cdata != storage._cdata for one in self._gathered())

        one = _MicroBatch(self._tier, self._horizon, may_leave, self.facts)
        with saved_tensors_hooks(one.pack, one.unpack):
            yield

    def close(self) -> None:
        """Release the tier."""
        self._tier.close()


class _Stayed:
    """A tensor that autograd keeps where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # with its graph a result would hold itself; a parameter has none, and its memory may change
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version = tensor._version

    def checked(self) -> Tensor:
        """The tensor. Raises RuntimeError if it was changed since forward kept it: with hooks autograd does not ask."""
        _refuse_change(self._tensor, self._version)
        return self._tensor


def _refuse_change(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"one of the tensors needed for gradient computation, of shape {tuple(tensor.shape)}, has been modified by"
            " an inplace operation after forward had kept it"
        )


class _Kept:
    """A tensor that autograd keeps: on the device, in the tier, or on its way between them."""

    def __init__(self, tensor: Tensor, count: Callable[[int], None]) -> None:
        self.index = 0  # the newest in the order of forward
        self.bytes, self.version = tensor.nbytes, tensor._version
        self.tensor: Tensor | None = tensor.detach()  # with the graph it would hold itself
        self.memory = weakref.ref(tensor.untyped_storage())  # dies with the storage, not with this object of it
        self.parcel: Parcel | None = None
        self.arriving: Wait | None = None
        self._count = count

    def __del__(self) -> None:
        if self.tensor is not None or self.arriving is not None:
            self._count(-self.bytes)
        if self.parcel is not None:
            self.parcel.free()

    def check(self) -> None:
        """Raise RuntimeError if the tensor was changed since forward kept it."""
        if self.tensor is not None:
            _refuse_change(self.tensor, self.version)


class _MicroBatch:
    """The kept tensors of one forward, until backward has used them."""

    def __init__(self, tier: Tier, horizon: int, may_leave: Callable[[Tensor], bool], facts: OffloadFacts) -> None:
        self._tier, self._horizon, self._may_leave, self._facts = tier, horizon, may_leave, facts
        self._order: list[weakref.ref[_Kept]] = []  # of forward; autograd holds them
        self._by_memory: dict[tuple[Any, ...], weakref.ref[_Kept]] = {}
        self._hot: deque[weakref.ref[_Kept]] = deque()  # on the device and not leaving yet, the oldest first
        self._leaving: weakref.ref[_Kept] | None = None
        self._live = 0

    def pack(self, tensor: Tensor) -> _Stayed | _Kept:
        """What autograd keeps in the place of a tensor."""
        if not self._may_leave(tensor):
            return _Stayed(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        one = self._by_memory.get(key)
        kept = None if one is None else one()
        if one is None or kept is None or kept.memory() is None:
            kept = _Kept(tensor, self._count)
            one = self._by_memory[key] = weakref.ref(kept)
            self._facts.tensors += 1
            self._facts.bytes += kept.bytes
            self._count(kept.bytes)
        elif kept.tensor is None:  # it has left, and its memory is still there: something else holds it
            kept.tensor = tensor.detach()
            self._count(kept.bytes)
        kept.index = len(self._order)
        self._order.append(one)
        if kept.parcel is None:
            if one in self._hot:
                self._hot.remove(one)
            self._hot.append(one)
        while len(self._hot) > self._horizon:
            self._push_out(self._hot.popleft()())
        return kept

    def unpack(self, kept: _Stayed | _Kept) -> Tensor:
        """The tensor that backward takes; those that it takes next begin to come back."""
        if isinstance(kept, _Stayed):
            return kept.checked()
        tensor = kept.tensor  # of one that is still leaving too
        if tensor is None:
            arriving, kept.arriving = kept.arriving or self._fetch(kept), None
            tensor = self._waiting(arriving)
            weakref.finalize(tensor, self._count, -kept.bytes).atexit = False
        else:
            kept.check()
        for index in range(kept.index - 1, max(-1, kept.index - 1 - self._horizon), -1):
            later = self._order[index]()
            if later is not None and later.tensor is None and later.arriving is None:
                later.arriving = self._fetch(later)
        return tensor

    def _push_out(self, kept: _Kept | None) -> None:
        if kept is None:
            return
        self._finish_leaving()  # one at a time: else forward would be ahead of the tier by any number of tensors
        kept.check()
        assert kept.tensor is not None
        kept.parcel = self._tier.put(kept.tensor)
        self._leaving = weakref.ref(kept)
        self._facts.moved += 1
        self._facts.moved_bytes += kept.bytes

    def _finish_leaving(self) -> None:
        kept = None if self._leaving is None else self._leaving()
        self._leaving = None
        if kept is None or kept.parcel is None:
            return
        self._waiting(kept.parcel.has_left)
        kept.check()
        kept.tensor = None
        self._count(-kept.bytes)

    def _fetch(self, kept: _Kept) -> Wait:
        assert kept.parcel is not None
        self._count(kept.bytes)
        return kept.parcel.fetch()

    def _waiting(self, wait: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        try:
            return wait()
        finally:
            self._facts.waited_s += time.perf_counter() - began_s

    def _count(self, change: int) -> None:
        self._live += change
        self._facts.most_live_bytes = max(self._facts.most_live_bytes, self._live)


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element of the memory between its first and its last one is an element of the tensor, once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
