"""Gradients of a step, and their sums over the ranks, on their way while backward still runs.

Alone, a rank leaves its gradients where autograd has put them. Among several, those of all parameters are views into a
few flat buckets, laid out in a fixed order that follows backward (last parameter first). The first gradient of a step
is moved into its bucket, unless it was made there (`gradient_memory`), and further ones are added there; during the
last micro-batch a hook counts the parameters down, and a full bucket starts its all-reduce at once. Buckets leave in
the same order on every rank, whatever order they fill in, so a rank without samples needs no dummy forward: it sends
zeros. Nothing here knows a world size or divides by anything: losses were divided by their global counts before
backward, and sums are all that travels. They are made in the type of the parameters, or in double precision, in which
it hardly ever matters who adds what.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetseq.comm.group import LocalGroup, Pending, TensorTransport
from hetseq.errors import HetSeqError
from hetseq.parallel.gradient_memory import lending

_FIRST_BUCKET_BYTES = 1 << 20
_PIECE_ELEMENTS = 1 << 16  # of what is converted at once: half a megabyte in double precision


class GradientSync(Protocol):
    """How the gradients of one rank become those of the step; what a training step sees of a replica's gradients.

    Per step: `begin()`; for each micro-batch its `backward`, announced by `expect_last()` before the last one;
    `finish()`. Afterwards `.grad` of every parameter is that of the whole step. A rank without micro-batches calls
    `begin` and `finish` alone. Sums travel, and nothing is divided: losses were divided by their global counts.
    """

    @property
    def used(self) -> npt.NDArray[np.bool_]:
        """(parameters,): after `finish`, a gradient arrived on this rank in this step."""
        ...

    def begin(self) -> None:
        """Forget all gradients, for a new step or for a step that is done again. Any rank, alone."""
        ...

    def expect_last(self) -> None:
        """The next backward is this rank's last one of the step, so its gradients may begin to travel."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's loss, a scalar. May start collectives, and waits for none.

        Raises PeerLostError, HetSeqError where a second backward follows the last one, and torch's error where memory
        has run out.
        """
        ...

    @property
    def has_sent(self) -> bool:
        """Something has begun to travel in this step, and can no longer be taken back."""
        ...

    def finish(self) -> None:
        """Wait until the gradient is complete. Collective. Raises PeerLostError; the gradient is then rubbish."""
        ...

    def without_sending(self) -> AbstractContextManager[None]:
        """Inside, a forward and backward compute this rank's own part, and nothing travels. Any rank, alone."""
        ...

    def norm(self) -> float:
        """L2 norm of this rank's part of the gradient after `finish`; not finite if any element of it is not (sync).

        The parts are whole parameters, of about as many elements on each rank, and each is of one rank. Devices round
        differently, so all ranks take the norm of the whole from all parts (`step_commit`), and clip by the same bits.
        """
        ...

    def norm_so_far(self) -> float:
        """L2 norm of what this rank alone has gathered in this step, before anything of it has travelled (sync)."""
        ...

    def is_finite(self) -> bool:
        """Every element is finite; exact where a norm may overflow (sync)."""
        ...

    def scale_(self, factor: float) -> None:
        """Multiply the whole gradient by `factor`. Every rank calls it with the same factor."""
        ...

    def drop_unused_(self, used: npt.NDArray[np.bool_]) -> None:
        """Give parameters without a gradient on any rank `grad = None`: zeros would let an optimizer decay them.

        `used`, (parameters,), has a flag for each parameter that some rank had a gradient of.
        """
        ...

    def close(self) -> None:
        """Let go of the parameters, and of memory that ranks share. Any rank, alone."""
        ...


class Gradients:
    """The gradients of `parameters` on a rank that trains alone: `.grad` is None where there is none."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._own = self._parameters  # whose norm is for this rank to compute
        self.used: npt.NDArray[np.bool_] = np.zeros(len(self._parameters), np.bool_)

    def begin(self) -> None:
        self.used[:] = False
        for parameter in self._parameters:
            parameter.grad = None  # zeros to add to would be written and read for nothing

    def expect_last(self) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
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
        norm = _norm(own)
        # squares overflow long before their elements do
        return norm if math.isfinite(norm) else _norm(own, torch.float64)

    def norm_so_far(self) -> float:
        self._lay_out()
        return _norm(self._held())

    def is_finite(self) -> bool:
        return all(
            math.isfinite(value)
            for gradient in self._held()
            if gradient.numel()
            for value in map(torch.Tensor.item, gradient.aminmax())
        )

    def scale_(self, factor: float) -> None:
        if held := self._held():
            torch._foreach_mul_(held, factor)

    def drop_unused_(self, used: npt.NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(~used):
            self._parameters[index].grad = None

    def close(self) -> None:
        pass

    def _lay_out(self) -> None:
        """Have every gradient lie as its parameter does, which fused optimizers rely upon: not sparse, not turned."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and (gradient.is_sparse or gradient.stride() != parameter.stride()):
                parameter.grad = torch.zeros_like(parameter).add_(gradient)

    def _held(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def gradients_of(
    parameters: Sequence[torch.nn.Parameter], group: TensorTransport, *, bucket_bytes: int, is_wide: bool = False
) -> GradientSync:
    """What sums up the gradients of `parameters` over `group`; in double precision if `is_wide`. Collective."""
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
        self.missing = 0  # parameters of the last micro-batch whose gradient has not come yet
        self.pending: Pending | None = None


class GradientReducer(Gradients):
    """Owns the gradient memory of `parameters` and sums it over `group`.

    After `finish` `.grad` of every parameter is the sum over all ranks, equal bits on every rank, and zero where no
    rank had any.
    """

    _dtype: torch.dtype | None = None  # of the buckets; None for that of their parameters

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: TensorTransport, *, bucket_bytes: int) -> None:
        super().__init__(parameters)
        self._group: TensorTransport = group
        self._own = _part(self._parameters, group.rank, group.world_size)
        # collective: the ranks may share the memory
        self._buckets = [Bucket(members, group, self._dtype) for members in _divide(self._parameters, bucket_bytes)]
        self._home: dict[int, tuple[Bucket, torch.Tensor]] = {
            index: (bucket, view) for bucket in self._buckets for index, view in zip(bucket.members, bucket.views)
        }
        self._is_last = False
        self._is_silent = False
        self._sent = 0
        self._arrived = np.zeros(len(self._parameters), np.bool_)  # a gradient, in the last micro-batch
        self._lent = np.zeros(len(self._parameters), np.bool_)  # the memory, in this step
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

    def backward(self, loss: torch.Tensor) -> None:
        with lending(self._lenders):
            loss.backward()

    @property
    def has_sent(self) -> bool:
        return self._sent > 0 and not self._is_silent

    def finish(self) -> None:
        """Send what is left (all of it on a rank without samples) and wait until every bucket is complete.

        Raises PeerLostError; the buckets are then rubbish.
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
        assert self._sent == 0, "a bucket that travels holds the gradients of others"
        return super().norm_so_far()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._lenders.clear()  # which refer to this, and would keep it
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
                "a gradient arrived after its bucket had left: backward ran twice in one micro-batch; return the sums"
                " of all terms from one micro_step, and use non-reentrant activation checkpointing"
            )
        if self._arrived[index]:
            return
        self._arrived[index] = True
        bucket.missing -= 1
        while self._sent < len(self._buckets) and self._buckets[self._sent].missing == 0:
            self._send_next()

    def _take_in(self, index: int, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Have the gradient that has come in the bucket."""
        assert parameter.grad is not None
        # the first of the step, or somebody has replaced .grad in forward; else it was made or added to there
        if parameter.grad.data_ptr() != view.data_ptr():
            if self.used[index]:
                view.add_(parameter.grad)
            else:
                view.copy_(parameter.grad)
        parameter.grad = view

    def _lend(self, index: int) -> torch.Tensor | None:
        """Where the first gradient of the step may be made; a tensor of its own, which autograd takes as it is."""
        bucket, view = self._home[index]
        if self._lent[index] or self.used[index] or bucket.pending is not None:
            return None
        self._lent[index] = True
        return view.as_strided(view.shape, view.stride())

    def _send_next(self) -> None:
        bucket = self._buckets[self._sent]
        for index, view in zip(bucket.members, bucket.views):
            if not self.used[index]:  # it holds what an earlier step has left
                view.zero_()
                self._keep(index, view)
        bucket.pending = self._group.all_reduce_sum(bucket.flat)
        self._sent += 1  # only now: where memory ran out, nothing has left

    def _keep(self, index: int, view: torch.Tensor) -> None:
        self._parameters[index].grad = view


class WideReducer(GradientReducer):
    """Adds up in double precision, on any number of ranks, and rounds once: `.grad` is of the parameter's type.

    In double precision the sum of n numbers of single precision is exact, and so the same in any order, if none but
    zeros is smaller than 2^-29 n times the largest. Where one is, two orders differ in the last of 53 bits, which the
    rounding to 24 hides but for one case in some 2^28.
    """

    _dtype = torch.float64

    def finish(self) -> None:
        super().finish()
        for index, (_, view) in self._home.items():
            parameter = self._parameters[index]
            parameter.grad = torch.empty_like(parameter).copy_(view)

    def norm_so_far(self) -> float:
        assert self._sent == 0, "a bucket that travels holds the gradients of others"
        return _norm([view for index, (_, view) in self._home.items() if self.used[index]])

    def _take_in(self, index: int, parameter: torch.Tensor, view: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self.used[index]:
            _add_converted_(view, parameter.grad)
        else:
            view.copy_(parameter.grad)
        parameter.grad = None  # the next one is not to be added to it

    def _keep(self, index: int, view: torch.Tensor) -> None:
        """Nothing is seen of a sum before it is complete."""

    def _lend(self, index: int) -> None:
        """A gradient cannot be made where sums are of another type."""


class _Hook:
    """What autograd calls when the gradient of one parameter has been added, in every micro-batch: mostly to the `view`
    in its bucket, where nobody waits for it yet."""

    def __init__(self, reducer: GradientReducer, index: int, view: torch.Tensor) -> None:
        self._reducer, self._index, self._view = reducer, index, view

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._reducer._is_last or parameter.grad is not self._view:
            self._reducer._gradient_arrived(self._index, parameter)


def _add_converted_(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient of another type: on a CPU by pieces, since torch makes a converted copy of all it is given."""
    if total.device.type != "cpu" or gradient.is_sparse or total.numel() <= _PIECE_ELEMENTS:
        total.add_(gradient)
        return
    rows = max(1, _PIECE_ELEMENTS * len(total) // total.numel())
    for part, added in zip(total.split(rows), gradient.split(rows)):
        part.add_(added)


def _part(parameters: Sequence[torch.nn.Parameter], rank: int, world_size: int) -> list[torch.nn.Parameter]:
    """The parameters whose middle lies in this rank's part, if all elements in their order are cut into equal parts."""
    sizes = np.array([parameter.numel() for parameter in parameters], np.int64)
    middles = sizes.cumsum() - sizes / 2
    owners = middles * world_size // max(1, sizes.sum())
    return [parameter for parameter, owner in zip(parameters, owners) if owner == rank]


def _norm(gradients: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> float:
    """L2 norm of them all, each added up in its own type, or in `dtype` (a sync for each kind)."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms = [torch.stack(list(torch._foreach_norm(alike, 2, dtype))) for alike in kinds.values()]
    return math.hypot(*(value for some in norms for value in some.tolist()))


def _divide(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[list[tuple[int, torch.nn.Parameter]]]:
    """Parameters, last first, cut into buckets of one type and device and of at most `bucket_bytes`, but for larger
    parameters; the first bucket is small, so that something is on its way early."""
    buckets: list[list[tuple[int, torch.nn.Parameter]]] = []
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
