"""One step of a script's loop: its micro-batches, and the gradients that the script adds for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hetseq.comm.group import Group
from hetseq.data.loader import MicroBatch
from hetseq.errors import TaskError
from hetseq.loop.check import Check
from hetseq.loop.passes import Count, Each, Loss, MicroBatches, Pass, Setting
from hetseq.loop.script_task import Terms
from hetseq.loop.whole import Rows, Whole
from hetseq.training.share import Part
from hetseq.training.step_engine import Compute, PeerLost, Settled, StepResult


class Driver(Protocol):
    """What a step asks the run that it belongs to."""

    @property
    def group(self) -> Group:
        """The ranks of the step."""
        ...

    @property
    def only_checks(self) -> bool:
        """Whether the run ends before its first update, by what the check has found."""
        ...

    def tell(self, found: str, *, is_last: bool) -> None:
        """Print what the check has found. Raises SystemExit after the last phase."""
        ...

    def answer(self, answer: Part | PeerLost) -> Compute | Settled:
        """Answer the question at hand; returns the next one. Raises SystemExit if the run ends here for this rank."""
        ...

    def go_on(self) -> Compute:
        """The question of the next phase. Raises SystemExit if the run ends here for this rank."""
        ...

    def check_of(self, question: Compute, phase: int) -> Check | None:
        """The check of the loop, in the first step that this process sees."""
        ...

    def only(self, optimizers: Sequence[torch.optim.Optimizer]) -> AbstractContextManager[None]:
        """Context in which only the parameters of these optimizers get gradients; of all if none is named."""
        ...


class Step:
    """One step of the global batch. `for batch in step` gives this rank's micro-batches; then the step is applied.

    `number` counts from 1, `size` is in samples, `shares` are the samples of each rank, `tries` says how often the body
    was asked for this step. After the inner loop: `loss`, in nats, is the sum over all terms of sum / count
    over the global batch, before the update; `terms` are its parts by name; `metrics` what `add` has added, by name;
    `grad_norm` is the L2 norm before clipping. `applied` is False, and these are None, if the gradient was not finite
    and the step was skipped. With `phases` of `run.steps`, they belong to the last phase; None if it was over before
    this process came.
    """

    def __init__(self, driver: Driver, question: Compute, terms: Terms, *, phases: int, samples: int) -> None:
        plan = question.data.plan
        self.number, self._phase = (plan.step - 1) // phases + 1, (plan.step - 1) % phases
        self.epoch, self.size, self.ends_epoch = plan.epoch, plan.size, plan.stop == samples
        self.shares, self.tries = plan.shares, 1
        self.loss: float | None = None
        self.terms: dict[str, float] | None = None
        self.metrics: dict[str, float] | None = None
        self.grad_norm: float | None = None
        self.applied = False
        self._driver, self._terms, self._phases = driver, terms, phases
        self._question: Compute | None = question  # of the next phase, if it is known
        self._pass: Pass | None = None
        self._begun = 0  # inner loops

    @property
    def is_settled(self) -> bool:
        """Whether all its phases are over."""
        return self._phase == self._phases

    def __iter__(self) -> Iterator[Any]:
        return self._update(MicroBatches)

    def of(self, *optimizers: torch.optim.Optimizer) -> Iterator[Any]:
        """`for batch in step.of(optimizer)`: only the parameters of these optimizers get a gradient, and an update.

        With `phases=2` of `run.steps`, a step has two such loops over the same samples, one after the other, such as
        for the two models of a GAN. A loop whose update was made before this process came gives nothing.
        """
        return self._update(MicroBatches, optimizers)

    def whole(self, encode: Callable[[Any], Rows], *optimizers: torch.optim.Optimizer) -> Iterator[Any]:
        """`for rows in step.whole(encode)`: what `encode` gives of ALL samples of the step, on every rank.

        `encode(batch)` gives a tensor, or a tuple of them, with a row for each sample of a micro-batch; it is called
        twice. The loop is given (step.size, ...) in the order of the samples, once, and calls
        `step.backward(loss)` with the loss itself, which may compare all rows.
        """
        return self._update(lambda setting: Whole(setting, encode, self._driver.group), optimizers, is_joint=True)

    def each(self, body: Callable[[Any], None], *optimizers: torch.optim.Optimizer) -> None:
        """`for batch in step: body(batch)`, which survives that memory runs out in `body`: it takes smaller pieces.

        Raises DeviceMemoryError if not even one sample fits.
        """
        for _ in self._update(lambda setting: Each(setting, body), optimizers):
            pass

    def backward(self, loss: Loss, count: Count = None) -> None:
        """Add the gradient of one micro-batch; once for each.

        `loss` is the SUM over its samples, tokens or pixels, a scalar tensor, and `count` how many these were; default:
        the samples. The gradient of a step is that of the sum over all ranks, divided by the count over all ranks. With
        `count=` of `run.steps`, `loss` is a dict of a sum for each term. Raises TaskError.
        """
        self._now("backward").backward(loss, count)

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor = 1) -> None:
        """Add to a metric that `metrics` of `run.steps` names: `step.metrics[name]` is sum / count over all ranks.

        In the inner loop; what a repeated body has added before is forgotten. Raises TaskError.
        """
        self._now("add").add(name, total, count)

    def _now(self, call: str) -> Pass:
        if self._pass is None:
            raise TaskError(f"step.{call} was called outside of `for batch in step`, in step {self.number}")
        return self._pass

    def _update(
        self, made: Callable[[Setting], Pass], optimizers: Sequence[torch.optim.Optimizer] = (), *,
        is_joint: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """One transaction: all that the script is given until all ranks have made the update."""
        mine, self._begun = self._begun, self._begun + 1
        if mine >= self._phases:
            raise TaskError(self._too_often())
        if mine < self._phase:
            return  # made before this process came
        question = self._question or self._driver.go_on()
        self._question = None
        if (check := self._driver.check_of(question, mine)) is not None:
            for batches, seed in check.passes(is_thorough=self._driver.only_checks, is_joint=is_joint):
                checked = made(Setting(question, self._terms, batches, seed, check.stray, is_alone=True))
                yield from self._give(checked, optimizers)
                check.see(checked)
            found = check.judge()
            if self._driver.only_checks:  # the other phases follow, with the same parameters
                self._phase, self._question = self._phase + 1, question
                self._driver.tell(found, is_last=self.is_settled)
                return
        while True:
            share = made(Setting(question, self._terms, _fitting(question)))
            yield from self._give(share, optimizers)
            answer = self._driver.answer(share.part())
            if isinstance(answer, Settled):
                self._settle(answer.result)
                return
            question = answer
            self.tries += 1

    def _give(self, one: Pass, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
        self._pass = one
        try:
            with self._driver.only(optimizers):
                yield from one.give()
        finally:
            self._pass = None

    def _too_often(self) -> str:
        if self._phases == 1:
            return (
                f"step {self.number} was looped over twice: what is done once stands behind its loop; for several"
                " updates in a step, as of a GAN, give run.steps(..., phases=2)"
            )
        return f"step {self.number} was looped over {self._begun} times, and run.steps was given phases={self._phases}"

    def _settle(self, result: StepResult) -> None:
        self._phase += 1
        self.loss, self.grad_norm, self.applied = result.loss, None, result.loss is not None
        self.terms = self.metrics = None
        if not self.applied:
            return
        counted = zip(self._terms.names, result.outcome.sums, result.counts)
        means = {name: total / count for name, total, count in counted if count}
        self.terms = {name: mean for name, mean in means.items() if name in self._terms.losses}
        self.metrics = {name: mean for name, mean in means.items() if name in self._terms.metrics}
        self.grad_norm = result.grad_norm


def _fitting(question: Compute) -> list[MicroBatch]:
    """The micro-batches of this rank, cut again if their sizes were refused since they were fetched."""
    sizes, batches = question.computer.sizes, question.data.micro_batches
    if all(sizes.holds(batch.size, batch.work) for batch in batches):
        return batches
    return question.fetch_again(question.data, sizes.cap).micro_batches
