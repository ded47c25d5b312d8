"""Buffers that forward changes, such as the running statistics of batch normalisation, kept equal on all ranks.

Forward changes them on each rank by that rank's own samples. At the end of a step the changes, not the values, are
added up, each weighted with the rank's part of the samples, so that all ranks hold the same buffers again and a
checkpoint is that of every rank. A step that is skipped leaves them as they were. What normalises over a micro-batch
still depends on how a step is cut, which no averaging mends; it is said at the start. Buffers that are not persistent
are no part of a checkpoint, so they are caches, and left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetseq.comm.group import Group, Pending, sum_floats
from hetseq.errors import TaskError


class BufferKeeper:
    """The persistent buffers of a model on one rank.

    Which of them forward changes is found by comparing (`find_changing`), since version counters miss some kernels.
    """

    def __init__(self, model: torch.nn.Module, group: Group) -> None:
        self._group = group
        #: where they are, since `self.mean = 0.9 * self.mean + ...` puts another tensor in the place of a buffer
        self._places = _places_of(model)
        self._before = [buffer.clone() for buffer in self._now()]
        self._changing: list[int] = []  # once changing, always changing
        self._has_looked = False
        self._flat: torch.Tensor | None = None
        self._pending: Pending | None = None

    @torch.no_grad()
    def find_changing(self) -> None:
        """Compare all buffers with what they were; a change on any rank counts on all. Collective."""
        if not self._places:
            return
        own = [float(not torch.equal(now, before)) for now, before in zip(self._now(), self._before)]
        found = {index for index, ranks in enumerate(sum_floats(self._group, own)) if ranks}
        self._changing = sorted(found.union(self._changing))

    @torch.no_grad()
    def send(self, shares: tuple[int, ...]) -> None:
        """Start adding up the changes of this step; `shares` are the samples of all ranks. Collective."""
        if not self._has_looked:
            self.find_changing()
            self._has_looked = True
        if not self._changing or self._group.world_size == 1:
            return
        rank, leader = self._group.rank, shares.index(max(shares))
        buffers, pieces = self._now(), []
        for index in self._changing:
            now = buffers[index]
            # counters such as num_batches_tracked have no mean: those of the rank with most samples are taken
            weight = shares[rank] / sum(shares) if now.is_floating_point() else float(rank == leader)
            change = (now.double() - _finite(self._before[index])) * weight
            # 0 * inf would spoil the sum of a rank that has nothing to say
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
        """The step counts: take its changes, the same on every rank."""
        buffers, offset = self._now(), 0
        for index in self._changing:
            now, before = buffers[index], self._before[index]
            if self._flat is not None:  # one rank alone has them already, to the bit
                now.copy_(_finite(before) + self._flat[offset : offset + now.numel()].view(now.shape))
            offset += now.numel()
            before.copy_(now)
        self._flat = None

    @torch.no_grad()
    def restore_(self) -> None:
        """The step does not count: put the buffers back."""
        for now, before in zip(self._now(), self._before):
            now.copy_(before)
        self._flat = None

    def synchronise_(self, shares: tuple[int, ...]) -> None:
        """Make all buffers equal now, also those that began to change later; before a save. Collective."""
        if self._places:
            self.find_changing()
            self.send(shares)
            self.finish()
            self.keep_()

    @torch.no_grad()
    def renew(self) -> None:
        """The buffers were loaded: what they are now is what they are compared with."""
        for now, before in zip(self._now(), self._before):
            before.copy_(now)

    @contextmanager
    def changing_alike(self) -> Iterator[None]:
        """What changes inside changes alike on all ranks, such as averages of the parameters that a task keeps.

        It is part of no forward, so it is neither averaged nor taken back with a step that is skipped.
        """
        earlier = [(id(buffer), buffer._version) for buffer in self._live()]
        yield
        for before, was, buffer in zip(self._before, earlier, self._live()):
            if was != (id(buffer), buffer._version):
                before.copy_(buffer.detach())

    def _now(self) -> list[torch.Tensor]:
        """The buffers as they are. Raises TaskError for one that a checkpoint could not be loaded into."""
        return [buffer.detach() for buffer in self._live()]

    def _live(self) -> Iterator[torch.Tensor]:
        for module, name, shape, dtype in self._places:
            buffer = module._buffers[name]
            if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
                became = "None" if buffer is None else f"{tuple(buffer.shape)} {buffer.dtype}"
                raise TaskError(
                    f"buffer {name} of {type(module).__name__} was {tuple(shape)} {dtype} and became {became}, for"
                    " which a checkpoint has no place: keep its shape, or register it with persistent=False"
                )
            yield buffer


def _places_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Size, torch.dtype]]:
    """Module, name, shape and type of each buffer that a checkpoint holds; a buffer with two names once."""
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
    """In float64, 0 in place of infinity: a running maximum may begin at -inf, from where no change leads away."""
    return before.double().nan_to_num(0.0, 0.0, 0.0)
