"""One step of a script's loop: its micro-batches, and the gradients that the script adds for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from hetseq.data.fetch import seed_everything
from hetseq.data.loader import MicroBatch
from hetseq.data.plan import derive_seed
from hetseq.errors import PeerLostError, TaskError
from hetseq.loop.check import Check
from hetseq.loop.script_task import LATE_TERMS
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Phase
from hetseq.training.share import Part
from hetseq.training.step_engine import Compute, PeerLost, Settled, StepResult

Loss = torch.Tensor | Mapping[str, torch.Tensor]


class Driver(Protocol):
    """What a step asks the run that it belongs to."""

    def answer(self, answer: Part | PeerLost) -> Compute | Settled:
        """Answer the question at hand; returns the next one. Raises SystemExit if the run ends here for this rank."""
        ...

    def check_of(self, question: Compute) -> Check | None:
        """The check of the loop, in the first step that this process sees."""
        ...


class Step:
    """One step of the global batch. `for batch in step` gives this rank's micro-batches; then the step is applied.

    `number` counts from 1, `size` is in samples, `shares` are the samples of each rank, `tries` says how often the body
    was asked for this step. After the inner loop: `loss`, in nats, is the sum over all terms of sum / count
    over the global batch, before the update; `terms` are its parts by name; `grad_norm` is the L2 norm before clipping.
    `applied` is False, and these are None, if the gradient was not finite and the step was skipped.
    """

    def __init__(self, driver: Driver, question: Compute, terms: tuple[str, ...]) -> None:
        plan = question.data.plan
        self.number, self.epoch, self.size = plan.step, plan.epoch, plan.size
        self.shares, self.ends_epoch, self.tries = plan.shares, plan.ends_epoch, 1
        self.loss: float | None = None
        self.terms: dict[str, float] | None = None
        self.grad_norm: float | None = None
        self.applied = False
        self.is_settled = False
        self._driver, self._question, self._names = driver, question, terms
        self._share: MicroBatches | None = None
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            raise TaskError(f"step {self.number} was looped over twice: what is done once stands behind its loop")
        self._has_begun = True
        if (check := self._driver.check_of(self._question)) is not None:
            for batches, seed in check.passes():
                self._share = MicroBatches(self._question, self._names, batches, seed=seed, stray=check.stray)
                yield from self._share.give()
                check.see(self._share)
            check.judge()
        while True:
            self._share = MicroBatches(self._question, self._names, self._question.data.micro_batches)
            yield from self._share.give()
            share, self._share = self._share, None
            question = self._driver.answer(share.part())
            if isinstance(question, Settled):
                self._settle(question.result)
                return
            self._question = question
            self.tries += 1

    def backward(self, loss: Loss, count: float | torch.Tensor | None = None) -> None:
        """Add the gradient of one micro-batch; once for each.

        `loss` is the SUM over its samples, tokens or pixels, a scalar tensor, and `count` how many these were; default:
        the samples. The gradient of a step is that of the sum over all ranks, divided by the count over all ranks. With
        `count=` of `run.steps`, `loss` is a dict of a sum for each term. Raises TaskError.
        """
        if self._share is None:
            raise TaskError(f"step.backward was called outside of `for batch in step`, in step {self.number}")
        self._share.backward(loss, count)

    def _settle(self, result: StepResult) -> None:
        self.is_settled, self.applied = True, result.loss is not None
        if result.loss is None:
            return
        names = self._names[:1] if self._names == LATE_TERMS else self._names
        counted = zip(names, result.outcome.sums, result.counts)
        self.loss, self.terms = result.loss, {name: total / count for name, total, count in counted if count}
        self.grad_norm = result.grad_norm


class MicroBatches:
    """One pass of the script over some micro-batches, and the gradient that it adds up."""

    def __init__(
        self, question: Compute, names: tuple[str, ...], batches: list[MicroBatch], *, seed: int = 0,
        stray: Callable[[bool], None] | None = None,
    ) -> None:  # fmt: skip
        self.batches = batches
        self._question, self._names, self._seed, self._stray = question, names, seed, stray
        self._computer = question.computer
        self._reducer = self._computer.replica.reducer
        self._sums: list[torch.Tensor | float] = [0.0] * len(names)
        self._lost: str | None = None
        self._batch: MicroBatch | None = None
        self._is_added = False

    @property
    def has_late_count(self) -> bool:
        """Whether the script counts a micro-batch when it has its loss."""
        return self._names == LATE_TERMS

    def give(self) -> Iterator[Any]:
        """The samples of each micro-batch, on this rank's device."""
        computer, plan = self._computer, self._question.data.plan
        whereabouts.enter(Phase.FORWARD_BACKWARD)
        self._reducer.begin()
        computer.clock.start()
        for number, batch in enumerate(self.batches):
            if number == len(self.batches) - 1 and not computer.throttle.is_on:
                self._reducer.expect_last()
            self._batch, self._is_added = batch, False
            seed_everything(derive_seed(computer.seed, plan.step, batch.start, *([self._seed] if self._seed else ())))
            with computer.throttle.slowed(), computer.precision.computing(computer.device):
                yield computer.place(batch.sample)
            computer.clock.mark()
            if self._lost is not None:
                return
        self._batch = None

    def backward(self, loss: Loss, count: float | torch.Tensor | None) -> None:
        """As `Step.backward`. A lost peer is remembered: the script's frames are none of its business."""
        if self._lost is not None or self._batch is None:
            return
        if self._is_added:
            raise TaskError("step.backward was called twice for one micro-batch: add the terms up, or give a dict")
        self._is_added = True
        total = self._scaled(loss, count)
        if not total.requires_grad:
            raise TaskError(
                "the loss of step.backward has no gradient: it was detached, computed under no_grad, or depends on no"
                " trained parameter"
            )
        try:
            if self._stray is not None:
                self._stray(False)
            self._reducer.backward(total * self._computer.loss_scale)
        except PeerLostError as error:
            self._lost = str(error)
        finally:
            if self._stray is not None:
                self._stray(True)

    def _scaled(self, loss: Loss, count: float | torch.Tensor | None) -> torch.Tensor:
        """The loss divided by its count, as far as that is known; adds to the sums."""
        plan, batch = self._question.data.plan, self._batch
        assert batch is not None
        if self.has_late_count:
            if isinstance(loss, Mapping):
                example = ", ".join(f'"{term}": ...' for term in loss)
                raise TaskError(
                    f"step.backward got the terms {', '.join(loss)}: several denominators must be known before the"
                    f" first gradient, so give run.steps(..., count=lambda batch: {{{example}}})"
                )
            _check_scalar(loss, "the sum")
            self._sums[0] = self._sums[0] + loss.detach().double()
            self._sums[1] = self._sums[1] + (count.detach().double() if isinstance(count, torch.Tensor) else float(
                batch.size if count is None else count))  # fmt: skip
            return loss / plan.size
        if count is not None:
            raise TaskError("step.backward got a count, which count= of run.steps has given already: leave it out")
        if not isinstance(loss, Mapping):
            if len(self._names) > 1:
                raise TaskError(f"step.backward got one loss: expected a dict with the terms {', '.join(self._names)}")
            loss = {self._names[0]: loss}
        if set(loss) != set(self._names):
            raise TaskError(f"step.backward got the terms {sorted(loss)}: expected {sorted(self._names)}, as in count")
        counts, weights, live = self._question.counts, self._computer.weights, []
        for index, term in enumerate(self._names):
            _check_scalar(loss[term], term)
            if batch.counts[index] and counts[index]:  # else its sum may well be 0/0
                live.append(loss[term] * (weights[index] / counts[index]))
                self._sums[index] = self._sums[index] + loss[term].detach().double()
        return torch.stack(live).sum() if live else sum(loss.values()) * 0.0  # type: ignore[return-value]

    def sums(self) -> tuple[float, ...]:
        """The sum of each term so far; one wait for the device."""
        device = self._computer.device
        totals = [torch.as_tensor(total, dtype=torch.float64, device=device) for total in self._sums]
        return tuple(torch.stack(totals).tolist())

    def part(self) -> Part | PeerLost:
        """The answer to the question."""
        if self._lost is not None:
            return PeerLost(self._lost)
        return Part(self.sums(), tuple(batch.work for batch in self.batches), tuple(self._computer.clock.laps()))


def _check_scalar(loss: Any, term: str) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise TaskError(f"step.backward got {got} for {term}: expected a sum, which is a tensor without dimensions")
