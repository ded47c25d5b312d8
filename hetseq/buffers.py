"""Buffers that forward changes, such as the running statistics of batch normalisation, kept equal on all ranks.

Forward changes them on each rank by that rank's own samples. At the end of a step the changes, not the values, are
added up, each weighted with the rank's part of the samples, so that all ranks hold the same buffers again and a
checkpoint is that of every rank. A step that is skipped leaves them as they were. What normalises over a micro-batch
still depends on how a step is cut, which no averaging mends; it is said at the start.
"""

from __future__ import annotations

import torch

from hetseq.comm import AnyGroup, Pending, sum_floats


class BufferKeeper:
    """The buffers of a model on one rank.

    Which of them forward changes is found by comparing (`find_changing`), since version counters miss some kernels.
    """

    def __init__(self, model: torch.nn.Module, group: AnyGroup) -> None:
        self._group = group
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel() and not buffer.is_complex()]
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        self._changing: list[int] = []
        self._has_looked = False
        self._flat: torch.Tensor | None = None
        self._pending: Pending | None = None

    def find_changing(self) -> None:
        """Compare all buffers with what they were; a change on any rank counts on all. Collective."""
        if not self._buffers:
            return
        with torch.no_grad():
            own = [float(not torch.equal(now, before)) for now, before in zip(self._buffers, self._before)]
        self._changing = [index for index, ranks in enumerate(sum_floats(self._group, own)) if ranks]

    def send(self, shares: tuple[int, ...]) -> None:
        """Start adding up the changes of this step; `shares` are the samples of all ranks. Collective."""
        if not self._has_looked:
            self.find_changing()
            self._has_looked = True
        if not self._changing or self._group.world_size == 1:
            return
        rank, leader = self._group.rank, shares.index(max(shares))
        pieces = []
        for index in self._changing:
            now, before = self._buffers[index], self._before[index]
            # counters such as num_batches_tracked have no mean: those of the rank with most samples are taken
            weight = shares[rank] / sum(shares) if now.is_floating_point() else float(rank == leader)
            change = (now.detach().double() - before.double()) * weight
            # 0 * inf would spoil the sum of a rank that has nothing to say
            pieces.append(change.flatten() if weight else torch.zeros_like(change).flatten())
        self._flat = torch.cat(pieces)
        self._pending = self._group.all_reduce_sum(self._flat)

    def finish(self) -> None:
        """Wait for the sum. Raises PeerLostError."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def keep_(self) -> None:
        """The step counts: take its changes, the same on every rank."""
        offset = 0
        for index in self._changing:
            now, before = self._buffers[index], self._before[index]
            if self._flat is not None:  # one rank alone has them already, to the bit
                now.copy_(before.double() + self._flat[offset : offset + now.numel()].view(now.shape))
            offset += now.numel()
            before.copy_(now)
        self._flat = None

    def restore_(self) -> None:
        """The step does not count: put the buffers back."""
        with torch.no_grad():
            for now, before in zip(self._buffers, self._before):
                now.copy_(before)
        self._flat = None

    def synchronise_(self, shares: tuple[int, ...]) -> None:
        """Make all buffers equal now, also those that began to change later; before a save. Collective."""
        if self._buffers:
            self.find_changing()
            self.send(shares)
            self.finish()
            self.keep_()

    def renew(self) -> None:
        """The buffers were loaded: what they are now is what they are compared with."""
        for now, before in zip(self._buffers, self._before):
            before.copy_(now)
