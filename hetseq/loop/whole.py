"""A loss over the whole global batch, which compares its samples: CLIP, SimCLR, triplets, a rank correlation.

Every micro-batch is encoded twice, as in GradCache (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size
under Memory Limited Setup"). The first time without gradients: the rows of all ranks are put together, and every rank
computes the loss over all of them. The second time with the same random numbers, to send the gradient of its own rows
back. So micro-batches may have any size, and ranks any share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hetseq.comm.group import Group, LocalGroup
from hetseq.data.loader import MicroBatch
from hetseq.errors import PeerLostError, TaskError
from hetseq.loop.between import together
from hetseq.loop.passes import Count, Loss, Setting, Sums, check_gradient, check_scalar
from hetseq.run.task_hooks import Call
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Phase
from hetseq.training.share import Part
from hetseq.training.step_engine import PeerLost

#: a row for each sample: (samples, ...)
Rows = torch.Tensor | tuple[torch.Tensor, ...]

_LOSS = -2  # in the place of a position: the seed of the loss, which every rank computes


class Whole(Sums):
    """`step.whole(encode)`: the rows of all samples at once."""

    def __init__(self, setting: Setting, encode: Callable[[Any], Rows], group: Group) -> None:
        super().__init__(setting)
        self._encode, self._group = encode, LocalGroup() if setting.is_alone else group
        plan, batches = self._question.data.plan, setting.batches
        self._size = sum(batch.size for batch in batches) if setting.is_alone else plan.size
        self._first = batches[0].start if setting.is_alone else plan.start
        self._leaves: tuple[torch.Tensor, ...] = ()
        self._is_added = False
        self._laps: tuple[float, ...] = ()

    def give(self) -> Iterator[Any]:
        """The rows of the step in the order of its samples, (step.size, ...); a tuple of them if `encode` gives one."""
        computer, batches = self._computer, self._setting.batches
        if not self._terms.has_late_count:
            raise TaskError("step.whole has a loss of its own: leave count= of run.steps out")
        whereabouts.enter(Phase.FORWARD_BACKWARD)
        self._reducer.begin()
        computer.clock.start()
        try:
            with torch.no_grad():
                parts = [self._encoded(batch) for batch in batches]
            computer.replica.buffers.restore_()  # the second time changes them again
            self._leaves, is_single = self._gathered(parts)
        except PeerLostError as error:
            self._lost = str(error)
            return
        del parts
        self._seed(_LOSS, may_differ=False)  # it is computed whole, however a step is cut
        with computer.precision.computing(computer.device):
            yield self._leaves[0] if is_single else self._leaves
        if self._lost is not None:
            return
        if not self._is_added:
            raise TaskError("step.whole gave the rows of the step, and step.backward(loss) was not called")
        computer.clock.mark()
        self._send_back()

    def backward(self, loss: Loss, count: Count) -> None:
        if self._lost is not None:
            return
        if count is not None or not isinstance(loss, torch.Tensor):
            raise TaskError("step.backward of step.whole takes the loss itself, a tensor without dimensions, no count")
        if self._is_added:
            raise TaskError("step.backward was called twice in step.whole: add the losses up")
        check_scalar(loss, "step.whole", "a loss")
        check_gradient(loss)
        self._is_added = True
        scaled = loss / self._question.data.plan.size  # as a sum: what comes late is its count, which is 1
        if self._group.rank == 0:  # parameters in the loss itself, such as a temperature: every rank has computed all
            self._sums[:2] = [loss.detach().double(), 1.0]
            self._backward(scaled)
            return
        leaves = [leaf for leaf in self._leaves if leaf.requires_grad]
        if not leaves:
            return
        found = torch.autograd.grad(scaled * self._computer.loss_scale, leaves, allow_unused=True)
        for leaf, gradient in zip(leaves, found):
            leaf.grad = gradient

    def part(self) -> Part | PeerLost:
        part = super().part()
        if isinstance(part, PeerLost):
            return part
        # each micro-batch, then the loss, then each once more
        number = len(self._setting.batches)
        seconds = tuple(first + again for first, again in zip(part.seconds[:number], part.seconds[number + 1 :]))
        return replace(part, seconds=seconds)

    def _encoded(self, batch: MicroBatch) -> tuple[tuple[torch.Tensor, ...], bool]:
        """The rows of a micro-batch, and whether `encode` gave them without a tuple."""
        computer = self._computer
        self._seed(batch.start)
        with computer.throttle.slowed(), computer.precision.computing(computer.device):
            found = self._encode(computer.place(batch.sample))
        rows: tuple[Any, ...] = found if isinstance(found, tuple) else (found,)
        for row in rows:
            if not isinstance(row, torch.Tensor) or row.dim() < 1 or len(row) != batch.size:
                got = f"shape {tuple(row.shape)}" if isinstance(row, torch.Tensor) else f"a {type(row).__name__}"
                raise TaskError(
                    f"the function of step.whole gave {got} for {batch.size} samples: expected a tensor with a row for"
                    " each sample, or a tuple of such tensors"
                )
        computer.clock.mark()
        return rows, rows is not found

    def _gathered(self, parts: list[tuple[tuple[torch.Tensor, ...], bool]]) -> tuple[tuple[torch.Tensor, ...], bool]:
        """The rows of all ranks as leaves, and whether they are one tensor. Collective."""
        plan, group = self._question.data.plan, self._group
        own = [rows for rows, _ in parts]
        kinds = [[list(row.shape[1:]), str(row.dtype).removeprefix("torch.")] for row in own[0]] if own else None
        told: list[Any] = together(group, Call.WHOLE, plan.step, [kinds, all(is_single for _, is_single in parts)])
        kinds, is_single = next(one for one in told if one[0] is not None)
        if other := next((one for one in told if one[0] not in (None, kinds)), None):
            raise TaskError(
                f"the function of step.whole gave {_shown(kinds)} on one rank, {_shown(other[0])} on another: expected"
                " rows of the same shape"
            )
        wholes, waits = [], []
        for number, (shape, dtype) in enumerate(kinds):
            whole = torch.zeros((self._size, *shape), dtype=getattr(torch, dtype), device=self._computer.device)
            for batch, rows in zip(self._setting.batches, own):
                at = batch.start - self._first
                whole[at : at + batch.size] = rows[number]
            waits.append(group.all_reduce_sum(whole.view(-1)))
            wholes.append(whole)
        for wait in waits:
            wait.wait()
        return tuple(whole.requires_grad_(whole.is_floating_point()) for whole in wholes), is_single

    def _send_back(self) -> None:
        """Encode again, and add the gradient that the rows of this rank got."""
        computer, batches = self._computer, self._setting.batches
        for number, batch in enumerate(batches):
            if number == len(batches) - 1 and not computer.throttle.is_on:
                self._reducer.expect_last()
            at, (rows, _) = batch.start - self._first, self._encoded(batch)
            terms = [
                (row * leaf.grad[at : at + batch.size]).sum()
                for row, leaf in zip(rows, self._leaves)
                if row.requires_grad and leaf.grad is not None
            ]
            if terms:
                self._backward(torch.stack([term.double() for term in terms]).sum() / computer.loss_scale)
            if self._lost is not None:
                return


def _shown(kinds: list[list[Any]]) -> str:
    return ", ".join(f"({', '.join(['N', *map(str, shape)])}) {dtype}" for shape, dtype in kinds)
