"""Gradient reduction in buckets: the gradients of a step are summed over the ranks, overlapping with backward.

A rank that trains alone leaves its gradients where autograd put them. With several ranks, all gradients are views into
a few flat buckets, laid out in a fixed order that follows backward (last parameter first). The first gradient of a
step is copied into its bucket, unless it was computed there (`gradient_memory`), and later ones are added. During the
last micro-batch a hook counts the parameters down, and a full bucket starts its all-reduce at once. Every rank sends
its buckets in the same order, whatever order they fill in, so a rank without samples needs no dummy forward: it sends
zeros. Nothing here divides by the world size or anything else: losses were divided by their global counts before
backward, and ranks exchange sums only. Sums use the dtype of the parameters, or double precision, in which the order
of additions almost never matters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hetseq.comm.group import LocalGroup, Pending, TensorTransport
from hetseq.errors import HetSeqError
from hetseq.parallel.gradient_memory import lending

Parameter = TypeVar("Parameter", bound=torch.Tensor)

_FIRST_BUCKET_BYTES = 1 << 20
_PIECE_ELEMENTS = 1 << 16  # converted at once: half a megabyte in double precision

#: makes the context of a wait for other ranks, which is no work of this one
Pause: TypeAlias = Callable[[], AbstractContextManager[object]]


class GradientSync(Protocol):
    """The interface through which a training step turns one rank's gradients into those of the whole step.

    Per step: `begin()`; for each micro-batch a `round()` with forward and `backward`, with `expect_last()` before the
    last one; `finish()`. Afterwards `.grad` of every parameter is the gradient of the whole step. A rank without
    micro-batches calls only `begin` and `finish`. Gradients are summed, never divided: losses were divided by their
    global counts.
    """

    @property
    def used(self) -> npt.NDArray[np.bool_]:
        """(parameters,): after `finish`, whether a gradient arrived on this rank in this step."""
        ...

    @property
    def layout_digest(self) -> int:
        """64 bits that name the cuts of the parameters among their owners; 0 if every rank owns all."""
        ...

    def gather(self, shares: Sequence[int] | None = None) -> None:
        """Bring the parameters up to date: on the ranks with samples in a step that has these `shares`, or on all.

        Before each attempt of a step, with the samples of each rank, and before work between two steps that needs whole
        parameters. Collective. Raises PeerLostError.
        """
        ...

    def changed(self) -> None:
        """Take note that an update has changed the parameters of which this rank is the owner. Every rank calls it."""
        ...

    def rounds(self, needed: int) -> int:
        """How many micro-batches each rank's share should have, if this rank's memory needs `needed` of them.

        0 where the ranks do not compute micro-batch by micro-batch together. Collective.
        """
        ...

    def round(self, pause: Pause = nullcontext, *, measures: bool = False) -> AbstractContextManager[None]:
        """Context of a micro-batch, in which the parameters are here; waits for others happen in `pause()`.

        With `measures` the norm of its gradient can be asked for afterwards (`norm_so_far`). Raises PeerLostError.
        """
        ...

    def serve(self) -> None:
        """Take part in the rounds of other ranks, until no rank has one. Collective. Raises PeerLostError."""
        ...

    def without_gradients(self) -> AbstractContextManager[None]:
        """Context in which rounds are forwards only, on all ranks; the model may run several times in one of them."""
        ...

    def begin(self) -> None:
        """Discard all gradients, for a new or a repeated step. Local to each rank."""
        ...

    def expect_last(self) -> None:
        """Announce this rank's last backward of the step, during which gradients may be sent."""
        ...

    def backward(self, loss: torch.Tensor, pause: Pause = nullcontext) -> None:
        """Add the gradients of a micro-batch's loss, a scalar. May start collectives; waits for some only to bound the
        memory of gradients that travel, in `pause()`.

        Raises PeerLostError, HetSeqError if a second backward follows the last one, and torch's error if memory runs
        out.
        """
        ...

    @property
    def has_sent(self) -> bool:
        """Whether a bucket of this step has been sent and can no longer be recalled."""
        ...

    def finish(self) -> None:
        """Wait until the gradient is complete. Collective. The gradient is invalid after a PeerLostError."""
        ...

    def without_sending(self) -> AbstractContextManager[None]:
        """Context in which backward computes this rank's own part and sends nothing. Local to each rank."""
        ...

    def norm(self) -> float:
        """L2 norm of this rank's part of the gradient after `finish`; not finite if any of its elements is not (sync).

        Each rank's part is a disjoint set of whole parameters, with about equally many elements per rank. Devices round
        differently, so all ranks combine the same norms of all parts (`step_commit`) and clip by identical values.
        """
        ...

    def norm_so_far(self) -> float:
        """L2 norm of the gradients of this rank alone so far, before any bucket is sent (sync)."""
        ...

    def is_finite(self) -> bool:
        """Whether every element is finite; exact even where a norm may overflow (sync)."""
        ...

    def scale_(self, factor: float) -> None:
        """Multiply the whole gradient by `factor`. Every rank calls it with the same factor."""
        ...

    def drop_unused_(self, used: npt.NDArray[np.bool_]) -> None:
        """Set `grad = None` for parameters without a gradient on any rank: zeros would let an optimizer decay them.

        `used`, (parameters,), is True for each parameter that has a gradient on some rank.
        """
        ...

    def close(self) -> None:
        """Release the parameters and any memory shared between ranks. Local to each rank."""
        ...


class Rounds(Protocol):
    """The verbs of `GradientSync` within which forwards run."""

    def round(self) -> AbstractContextManager[None]: ...

    def serve(self) -> None: ...

    def without_gradients(self) -> AbstractContextManager[None]: ...


class WithoutRounds:
    """The verbs of `GradientSync` for ranks that have whole parameters: no rank waits for another in a micro-batch."""

    def rounds(self, needed: int) -> int:
        return 0

    def round(self, pause: Pause = nullcontext, *, measures: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def serve(self) -> None:
        pass

    def without_gradients(self) -> AbstractContextManager[None]:
        return nullcontext()


NO_ROUNDS = WithoutRounds()


class Gradients(WithoutRounds):
    """The gradients of `parameters` on a rank that trains alone; `.grad` is None for a parameter without one."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._own = self._parameters  # this rank computes their norm
        self.used: npt.NDArray[np.bool_] = np.zeros(len(self._parameters), np.bool_)

    @property
    def layout_digest(self) -> int:
        return 0

    def gather(self, shares: Sequence[int] | None = None) -> None:
        pass

    def changed(self) -> None:
        pass

    def begin(self) -> None:
        self.used[:] = False
        for parameter in self._parameters:
            parameter.grad = None  # zeroing instead would cost a write and a read for nothing

    def expect_last(self) -> None:
        pass

    def backward(self, loss: torch.Tensor, pause: Pause = nullcontext) -> None:
        loss.backward()

    @property
    def has_sent(self) -> bool:
        return False

    def finish(self) -> None:
        self._lay_out()
        self.used[:] = [parameter.grad is not None for parameter in self._parameters]

    @contextmanager
    def without_sending(self) -> Iterator[None]:
        yield

    def norm(self) -> float:
        own = [parameter.grad for parameter in self._own if parameter.grad is not None]
        norm = norm_of(own)
        # squares overflow long before their elements do
        return norm if math.isfinite(norm) else norm_of(own, torch.float64)

    def norm_so_far(self) -> float:
        self._lay_out()
        return norm_of(self._held())

    def is_finite(self) -> bool:
        return are_finite(self._held())

    def scale_(self, factor: float) -> None:
        if held := self._held():
            torch._foreach_mul_(held, factor)

    def drop_unused_(self, used: npt.NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(~used):
            self._parameters[index].grad = None

    def close(self) -> None:
        pass

    def _lay_out(self) -> None:
        """Give every gradient its parameter's layout, dense with equal strides: fused optimizers rely on it."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and (gradient.is_sparse or gradient.stride() != parameter.stride()):
                parameter.grad = torch.zeros_like(parameter).add_(gradient)

    def _held(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def gradients_of(
    parameters: Sequence[torch.nn.Parameter], group: TensorTransport, *, bucket_bytes: int, is_wide: bool = False
) -> GradientSync:
    """A reducer that sums the gradients of `parameters` over `group`, in double precision if `is_wide`. Collective."""
    if is_wide:
        return WideReducer(parameters, group, bucket_bytes=bucket_bytes)
    if group.world_size == 1:
        return Gradients(parameters)
    return GradientReducer(parameters, group, bucket_bytes=bucket_bytes)


class Bucket:
    """A flat piece of gradient memory and the parameters that live in it."""

    def __init__(
        self, members: Sequence[tuple[int, torch.nn.Parameter]], group: TensorTransport, dtype: torch.dtype | None
    ) -> None:
        first = members[0][1]
        self.members = [index for index, _ in members]
        self.flat = group.zeros(sum(p.numel() for _, p in members), dtype or first.dtype, first.device)
        self.views: list[torch.Tensor] = []
        offset = 0
        for _, parameter in members:
            # the strides of the parameter: fused optimizers walk both as flat memory
            self.views.append(self.flat.as_strided(parameter.shape, parameter.stride(), offset))
            offset += parameter.numel()
        self.missing = 0  # parameters whose gradient of the last micro-batch has not arrived yet
        self.pending: Pending | None = None


class GradientReducer(Gradients):
    """Owns the gradient memory of `parameters` and sums it over `group`.

    After `finish`, `.grad` of every parameter is the sum over all ranks, bitwise equal on every rank, and zero if no
    rank had a gradient.
    """

    _dtype: torch.dtype | None = None  # of the buckets; None for the dtype of their parameters

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: TensorTransport, *, bucket_bytes: int) -> None:
        super().__init__(parameters)
        self._group: TensorTransport = group
        self._own = _part(self._parameters, group.rank, group.world_size)
        # collective: the ranks may share the memory
        self._buckets = [Bucket(members, group, self._dtype) for members in buckets_of(self._parameters, bucket_bytes)]
        self._home: dict[int, tuple[Bucket, torch.Tensor]] = {
            index: (bucket, view) for bucket in self._buckets for index, view in zip(bucket.members, bucket.views)
        }
        self._is_last = False
        self._is_silent = False
        self._sent = 0
        self._arrived = np.zeros(len(self._parameters), np.bool_)  # its gradient of the last micro-batch
        self._lent = np.zeros(len(self._parameters), np.bool_)  # its memory, in this step
        self._lenders = {id(p): functools.partial(self._lend, index) for index, p in enumerate(self._parameters)}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_Hook(self, index, self._home[index][1]))
            for index, parameter in enumerate(self._parameters)
        ]

    def begin(self) -> None:
        super().begin()
        self._is_last, self._sent = False, 0
        self._lent[:] = False
        for bucket in self._buckets:
            bucket.pending = None

    def expect_last(self) -> None:
        self._is_last = True
        self._arrived[:] = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def backward(self, loss: torch.Tensor, pause: Pause = nullcontext) -> None:
        with lending(self._lenders):
            loss.backward()

    @property
    def has_sent(self) -> bool:
        return self._sent > 0 and not self._is_silent

    def finish(self) -> None:
        """Send the remaining buckets (all of them on a rank without samples) and wait until every one is complete.

        Raises PeerLostError, after which the buckets are invalid.
        """
        while self._sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()

    @contextmanager
    def without_sending(self) -> Iterator[None]:
        group, self._group, self._is_silent = self._group, LocalGroup(), True
        try:
            yield
        finally:
            self._group, self._is_silent = group, False

    def norm_so_far(self) -> float:
        assert self._sent == 0, "a bucket that was sent holds other ranks' gradients"
        return super().norm_so_far()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._lenders.clear()  # they refer to this reducer and would keep it alive
        for bucket in self._buckets:
            self._group.release(bucket.flat)

    def _gradient_arrived(self, index: int, parameter: torch.Tensor) -> None:
        bucket, view = self._home[index]
        self._take_in(index, parameter, view)
        self.used[index] = True
        if not self._is_last:
            return
        if bucket.pending is not None:
            raise HetSeqError(
                "a gradient arrived after its bucket was sent: backward ran twice in one micro-batch; return the sums"
                " of all terms from one micro_step, and use non-reentrant activation checkpointing"
            )
        if self._arrived[index]:
            return
        self._arrived[index] = True
        bucket.missing -= 1
        while self._sent < len(self._buckets) and self._buckets[self._sent].missing == 0:
            self._send_next()

    def _take_in(self, index: int, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Move or add the gradient that has arrived into its bucket."""
        assert parameter.grad is not None
        # outside the bucket: the first of the step, or forward replaced .grad; otherwise autograd wrote it there
        if parameter.grad.is_sparse or parameter.grad.data_ptr() != view.data_ptr():
            take_in_(view, parameter.grad, is_first=not self.used[index])
        parameter.grad = view

    def _lend(self, index: int) -> torch.Tensor | None:
        """Memory for the first gradient of the step, as a separate tensor, which autograd takes without a copy."""
        bucket, view = self._home[index]
        if self._lent[index] or self.used[index] or bucket.pending is not None:
            return None
        self._lent[index] = True
        return view.as_strided(view.shape, view.stride())

    def _send_next(self) -> None:
        bucket = self._buckets[self._sent]
        for index, view in zip(bucket.members, bucket.views):
            if not self.used[index]:  # it still holds values of an earlier step
                view.zero_()
                self._keep(index, view)
        bucket.pending = self._group.all_reduce_sum(bucket.flat)
        self._sent += 1  # only now: if memory ran out above, nothing was sent

    def _keep(self, index: int, view: torch.Tensor) -> None:
        self._parameters[index].grad = view


class WideReducer(GradientReducer):
    """Sums in double precision, on any number of ranks, and rounds once: `.grad` has the parameter's dtype.

    In double precision the sum of n single-precision numbers is exact, hence equal in any order, if no nonzero one is
    smaller than 2^-29 n times the largest. Otherwise two orders differ in the last of 53 bits, which rounding to 24
    bits hides except in about one case in 2^28.
    """

    _dtype = torch.float64

    def finish(self) -> None:
        super().finish()
        for index, (_, view) in self._home.items():
            parameter = self._parameters[index]
            parameter.grad = torch.empty_like(parameter).copy_(view)

    def norm_so_far(self) -> float:
        assert self._sent == 0, "a bucket that was sent holds other ranks' gradients"
        return norm_of([view for index, (_, view) in self._home.items() if self.used[index]])

    def _take_in(self, index: int, parameter: torch.Tensor, view: torch.Tensor) -> None:
        assert parameter.grad is not None
        take_in_(view, parameter.grad, is_first=not self.used[index])
        parameter.grad = None  # so that autograd does not add the next one to it

    def _keep(self, index: int, view: torch.Tensor) -> None:
        """Do not set `.grad` before the sum is complete."""

    def _lend(self, index: int) -> None:
        """Lend nothing: the sums have another dtype than the gradients."""


class _Hook:
    """Autograd calls this in every micro-batch after accumulating a parameter's gradient, mostly into the `view` in its
    bucket; before the last micro-batch there is then nothing left to do."""

    def __init__(self, reducer: GradientReducer, index: int, view: torch.Tensor) -> None:
        self._reducer, self._index, self._view = reducer, index, view

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._reducer._is_last or parameter.grad is not self._view:
            self._reducer._gradient_arrived(self._index, parameter)


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element is finite (sync)."""
    return all(
        math.isfinite(value)
        for tensor in tensors
        if tensor.numel()
        for value in map(torch.Tensor.item, tensor.aminmax())
    )


def take_in_(total: torch.Tensor, gradient: torch.Tensor, *, is_first: bool) -> None:
    """Write the first gradient of a step over what `total` holds, or add a later one; either may be sparse."""
    if not is_first:
        add_converted_(total, gradient)
    elif gradient.is_sparse:
        total.zero_().add_(gradient)
    else:
        total.copy_(gradient)


def add_converted_(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient of another dtype, piecewise on a CPU, since torch converts a copy of the whole operand."""
    if total.device.type != "cpu" or gradient.is_sparse or total.numel() <= _PIECE_ELEMENTS:
        total.add_(gradient)
        return
    rows = max(1, _PIECE_ELEMENTS * len(total) // total.numel())
    for part, added in zip(total.split(rows), gradient.split(rows)):
        part.add_(added)


def _part(parameters: Sequence[torch.nn.Parameter], rank: int, world_size: int) -> list[torch.nn.Parameter]:
    """The parameters whose middle element lies in this rank's part when all elements are cut into equal parts."""
    sizes = np.array([parameter.numel() for parameter in parameters], np.int64)
    middles = sizes.cumsum() - sizes / 2
    owners = middles * world_size // max(1, sizes.sum())
    return [parameter for parameter, owner in zip(parameters, owners) if owner == rank]


def norm_of(gradients: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> float:
    """L2 norm of all gradients, each summed in its own dtype or in `dtype` (one sync per device and dtype)."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms = [torch.stack(list(torch._foreach_norm(alike, 2, dtype))) for alike in kinds.values()]
    return math.hypot(*(value for some in norms for value in some.tolist()))


def buckets_of(parameters: Sequence[Parameter], bucket_bytes: int) -> list[list[tuple[int, Parameter]]]:
    """Parameters, last first, cut into buckets of one dtype and device and at most `bucket_bytes`, except for larger
    parameters; the first bucket is small, so that communication starts early."""
    buckets: list[list[tuple[int, Parameter]]] = []
    size, kind = 0, None
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        bytes_ = parameter.numel() * parameter.element_size()
        most = min(bucket_bytes, _FIRST_BUCKET_BYTES) if len(buckets) == 1 else bucket_bytes
        if kind != (parameter.dtype, parameter.device) or size + bytes_ > most:
            buckets.append([])
            size, kind = 0, (parameter.dtype, parameter.device)
        buckets[-1].append((index, parameter))
        size += bytes_
    return buckets
