"""Synchronised buffers: those that forward changes, such as batch-norm running statistics, kept equal on all ranks.

On each rank, forward changes them according to that rank's own samples. At the end of a step the changes, not the
values, are summed, each weighted by the rank's fraction of the samples. All ranks then hold equal buffers again, and
one checkpoint fits every rank. A skipped step restores them. A layer that normalises over a micro-batch still depends
on how a step is cut, which averaging cannot fix; the run warns at the start. Non-persistent buffers are not in a
checkpoint; they count as caches and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetseq.comm.group import Group, Pending, sum_floats
from hetseq.errors import TaskError


class BufferKeeper:
    """The persistent buffers of a model on one rank.

    Comparing values shows which of them forward changes (`find_changing`): version counters miss some kernels.
    """

    def __init__(self, model: torch.nn.Module, group: Group) -> None:
        self._group = group
        #: module and name of each, since `self.mean = 0.9 * self.mean + ...` replaces the tensor of a buffer
        self._places = _places_of(model)
        self._before = [buffer.clone() for buffer in self._now()]
        self._changing: list[int] = []  # once changing, always changing
        self._has_looked = False
        self._flat: torch.Tensor | None = None
        self._pending: Pending | None = None

    @torch.no_grad()
    def find_changing(self) -> None:
        """Compare all buffers with their earlier values; a change on any rank counts on all. Collective."""
        if not self._places:
            return
        own = [float(not torch.equal(now, before)) for now, before in zip(self._now(), self._before)]
        found = {index for index, ranks in enumerate(sum_floats(self._group, own)) if ranks}
        self._changing = sorted(found.union(self._changing))

    def changing(self) -> list[tuple[torch.nn.Module, str]]:
        """Module and name of the buffers that forward has been seen to change, on any rank."""
        return [self._places[index][:2] for index in self._changing]

    def places(self) -> list[tuple[torch.nn.Module, str]]:
        """Module and name of all persistent buffers."""
        return [place[:2] for place in self._places]

    @torch.no_grad()
    def send(self, shares: tuple[int, ...]) -> None:
        """Start summing the changes of this step; `shares` are the samples of all ranks. Collective."""
        if not self._has_looked:
            self.find_changing()
            self._has_looked = True
        if not self._changing or self._group.world_size == 1:
            return
        rank, leader = self._group.rank, shares.index(max(shares))
        buffers, pieces = self._now(), []
        for index in self._changing:
            now = buffers[index]
            # counters such as num_batches_tracked have no mean: the rank with the most samples provides them
            weight = shares[rank] / sum(shares) if now.is_floating_point() else float(rank == leader)
            change = (now.double() - _finite(self._before[index])) * weight
            # zeros for a rank with weight 0: 0 * inf is NaN and would spoil the sum
            pieces.append(change.flatten() if weight else torch.zeros_like(change).flatten())
        self._flat = torch.cat(pieces)
        self._pending = self._group.all_reduce_sum(self._flat)

    def finish(self) -> None:
        """Wait for the sum. Raises PeerLostError."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    @torch.no_grad()
    def keep_(self) -> None:
        """Apply the changes of a step that counts, identically on every rank."""
        buffers, offset = self._now(), 0
        for index in self._changing:
            now, before = buffers[index], self._before[index]
            if self._flat is not None:  # a single rank already has them, bit for bit
                now.copy_(_finite(before) + self._flat[offset : offset + now.numel()].view(now.shape))
            offset += now.numel()
            before.copy_(now)
        self._flat = None

    @torch.no_grad()
    def restore_(self) -> None:
        """Restore the buffers after a step that does not count."""
        for now, before in zip(self._now(), self._before):
            now.copy_(before)
        self._flat = None

    def synchronise_(self, shares: tuple[int, ...]) -> None:
        """Make all buffers equal now, before a save, including those that began to change later. Collective."""
        if self._places:
            self.find_changing()
            self.send(shares)
            self.finish()
            self.keep_()

    @torch.no_grad()
    def renew(self) -> None:
        """Compare with the present values from now on, since the buffers have been loaded."""
        for now, before in zip(self._now(), self._before):
            before.copy_(now)

    @contextmanager
    def changing_alike(self) -> Iterator[None]:
        """Context for changes that are identical on all ranks, such as a task's running averages of the parameters.

        They are not part of a forward, so they are neither averaged nor undone when a step is skipped.
        """
        earlier = [(id(buffer), buffer._version) for buffer in self._live()]
        try:
            yield
        finally:  # a lost peer does not undo them
            for before, was, buffer in zip(self._before, earlier, self._live()):
                if was != (id(buffer), buffer._version):
                    before.copy_(buffer.detach())

    def _now(self) -> list[torch.Tensor]:
        """The buffers with their present values. Raises TaskError for one that a checkpoint cannot be loaded into."""
        return [buffer.detach() for buffer in self._live()]

    def _live(self) -> Iterator[torch.Tensor]:
        for module, name, shape, dtype in self._places:
            buffer = module._buffers[name]
            if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
                became = "None" if buffer is None else f"{tuple(buffer.shape)} {buffer.dtype}"
                raise TaskError(
                    f"buffer {name} of {type(module).__name__} changed from {tuple(shape)} {dtype} to {became}, which"
                    " a checkpoint cannot hold: keep its shape and dtype, or register it with persistent=False"
                )
            yield buffer


def _places_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Size, torch.dtype]]:
    """Module, name, shape and dtype of each buffer in a checkpoint; a buffer with two names is listed once."""
    places, seen = [], set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.numel() or name in module._non_persistent_buffers_set:
                continue
            if id(buffer) not in seen:
                seen.add(id(buffer))
                places.append((module, name, buffer.shape, buffer.dtype))
    return places


def _finite(before: torch.Tensor) -> torch.Tensor:
    """In float64, with infinity replaced by 0: no finite change could move a running maximum away from -inf."""
    return before.double().nan_to_num(0.0, 0.0, 0.0)


def is_same_table(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether both hold the same values as far as both reach, or nothing that can be compared."""
    if any(tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized for tensor in (before, now)):
        return True
    if before.dim() != now.dim() or before.dtype != now.dtype:
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(before.shape, now.shape))
    first, second = before[common], now.detach().to(before.device)[common]
    if before.is_floating_point():
        first, second = first.double().nan_to_num(), second.double().nan_to_num()
    return bool(torch.equal(first, second))
