"""The ranks that hold one model together, and the sums through which its divided layers become whole again.

Responsible for sums and concatenations of activations, forward and backward. Refuses to know layers. The ranks last for
the life of a process, the group in which they communicate for one generation of the run.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A pending sum."""

    def wait(self) -> None: ...


class SumsInPlace(Protocol):
    """What ranks need of a group (`comm.group`), which scripts of others do not load."""

    #: seconds after which a sum that has not ended counts as a lost peer
    deadline_s: float

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce_sum(self, tensor: Tensor) -> Pending: ...


class TensorRanks:
    """`size` ranks that divide a model; this one has the parts at `place`. They compute the same rows in step."""

    def __init__(self, size: int, place: int) -> None:
        self.size, self.place = size, place
        #: the group of these ranks, and of all ranks; None on a rank whose peers are missing
        self._groups: tuple[SumsInPlace, SumsInPlace] | None = None

    def meet(self, group: SumsInPlace, all_ranks: SumsInPlace) -> None:
        """Communicate in `group` from now on, whose ranks are the places, with the deadlines of the group `all_ranks`.

        Any rank, alone.
        """
        assert (group.world_size, group.rank) == (self.size, self.place), "a group of these ranks, by place"
        self._groups = group, all_ranks

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks, with equal bits on all of them. Collective. Raises PeerLostError."""
        assert self._groups is not None, "a rank whose peers are missing computes nothing"
        group, all_ranks = self._groups
        total = part.clone(memory_format=torch.contiguous_format)
        group.deadline_s = all_ranks.deadline_s  # a step has another one than the start
        group.all_reduce_sum(total).wait()
        return total

    def gather(self, part: Tensor) -> Tensor:
        """The ranks' parts one after the other in the last dimension. Collective. Raises PeerLostError."""
        whole = part.new_zeros((*part.shape[:-1], part.shape[-1] * self.size))
        self.own(whole).copy_(part)
        return self.sum(whole)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the last dimension, a view."""
        width = whole.shape[-1] // self.size
        return whole.narrow(-1, self.place * width, width)


def sum_over_ranks(part: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of a tensor over the ranks; in backward each rank gets the gradient of the sum. Collective."""
    found: Tensor = _Sum.apply(part, ranks)  # type: ignore[no-untyped-call]
    return found


def summed_in_backward(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The tensor itself, equal on all ranks; in backward the ranks' gradients are added. Collective."""
    found: Tensor = _SummedInBackward.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


def gathered(part: Tensor, ranks: TensorRanks) -> Tensor:
    """All parts of the last dimension; in backward each rank gets the gradient of its own. Collective."""
    found: Tensor = _Gathered.apply(part, ranks)  # type: ignore[no-untyped-call]
    return found


def split(x: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of the last dimension; in backward the parts' gradients are gathered. Collective."""
    found: Tensor = _Split.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SummedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.own(gradient).contiguous(), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.own(x).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather(gradient), None
