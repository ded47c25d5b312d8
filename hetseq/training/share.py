"""Forward and backward over this rank's share of a step: micro-batch by micro-batch, timed, within its memory.

A sample moves to the device just before its forward, so the device holds one micro-batch at a time. Memory can run out
at any moment. If no bucket of this rank has been sent yet, the rank repeats its share in micro-batches half as large,
and the other ranks do not notice. If one has been sent, a repetition would count its gradients twice: the rank sends
the rest as it is and asks all ranks to redo the whole step. Sizes that have passed come last in a step, so that is
rare.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hetseq.balance.noise_scale import UNMEASURED, PartialGradient
from hetseq.data.fetch import seed_everything
from hetseq.data.loader import MicroBatch, StepData, place_on
from hetseq.data.plan import MicroBatchCap, derive_seed
from hetseq.errors import DeviceMemoryError, TaskError
from hetseq.parallel.activation_offload import ActivationOffload
from hetseq.parallel.replica import Replica
from hetseq.system import device_memory as memory
from hetseq.task import Task, check_sums, weights_of
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.precision import Precision
from hetseq.training.stopwatch import MicroBatchClock
from hetseq.training.throttle import Throttle

logger = logging.getLogger(__name__)

SumByTerm = Mapping[int, torch.Tensor]  # number of a term -> its sum, without dimensions


@dataclass(frozen=True)
class Part:
    """A rank's contribution to a step: its sum of each term, and work and seconds of its micro-batches."""

    sums: tuple[float, ...]
    work: tuple[int, ...]  # of each micro-batch, in the units in which a step is divided
    seconds: tuple[float, ...]  # of each micro-batch
    partial: PartialGradient = UNMEASURED  # of the first micro-batch, in steps that measure it
    is_whole: bool = True  # False: memory ran out under way, and the step must be done again
    waited_s: float = 0.0  # for other ranks, while a device had nothing to do; not in `seconds`


@dataclass(frozen=True)
class ComputeDevice:
    """The device on which a rank computes, the precision, and the rank's name in messages.

    `offload`: where the tensors go that forward keeps for backward; None: they stay on the device.
    """

    device: torch.device
    precision: Precision
    name: str
    offload: ActivationOffload | None = None


class ShareComputer:
    """Adds one rank's part of the gradient into the buckets of its replica."""

    def __init__(
        self,
        task: Task,
        replica: Replica,
        *,
        terms: tuple[str, ...],
        on: ComputeDevice,
        sizes: MicroBatchSizes,
        seed: int,
        throttle: Throttle | None = None,
        noise_scale_every: int = 0,
    ) -> None:
        self.task, self.replica, self.sizes = task, replica, sizes
        self.terms, self.weights, self.precision = terms, weights_of(task, terms), on.precision
        self.loss_scale = 1.0  # the factor in every gradient from here on; the code that uses a gradient divides
        self.device, self.name, self.seed = on.device, on.name, seed
        self.place, self.clock = place_on(on.device, on.precision.storage), MicroBatchClock(on.device)
        self.throttle, self._noise_scale_every = throttle or Throttle(), noise_scale_every
        self._offload, self._has_told_of_offload = on.offload, False
        #: whether the ranks that divide this model have yet to compare their gradients
        self._is_uncompared = replica.divided is not None and replica.divided.ranks.size > 1

    def compute(
        self, data: StepData, counts: tuple[float, ...], fetch_again: Callable[[StepData, MicroBatchCap], StepData]
    ) -> Part:
        """Forward and backward of the whole share, in micro-batches as small as memory requires.

        Raises DeviceMemoryError if not even one sample fits.
        """
        if self.sizes.is_learning:  # by the sizes of the previous step: by now the optimizer has allocated its memory
            self.sizes.foresee(memory.free_bytes(self.device))
        is_other_cut = self._cut_in_rounds(data)
        while True:
            if is_other_cut or not all(self.sizes.holds(batch.size, batch.work) for batch in data.micro_batches):
                data, is_other_cut = fetch_again(data, self.sizes.cap), False
            part, refused = self.attempt(data, counts)
            if part is not None:
                return part
            assert refused is not None
            memory.release(self.device)  # only here, where no exception holds the frames and their tensors any more
            if self.replica.divided is not None and self.replica.divided.ranks.size > 1:
                what = f"a micro-batch of {refused.size} samples, which ranks that divide a model compute together"
                remedy = "give a smaller --batch-size" if refused.size > 1 else "make samples or model smaller"
                raise DeviceMemoryError(f"{self.name}: {memory.complaint(self.device, what, remedy)}")
            if not self.sizes.refuse(refused.size, refused.work):
                raise DeviceMemoryError(self._complaint(refused.size))
            logger.warning(
                "the memory of %s did not hold a micro-batch of %d samples: this rank takes smaller ones from now on,"
                " and repeats this share, with the same result [batch-halved]", self.device, refused.size,
            )  # fmt: skip
            if self.replica.reducer.has_sent:
                return Part((0.0,) * len(self.terms), (), (), is_whole=False)
            self.replica.buffers.restore_()

    def _cut_in_rounds(self, data: StepData) -> bool:
        """Agree with the other ranks on how many micro-batches a share has, where they compute them together.

        Whether the share has to be cut in another way for that: how it is cut depends on this step alone, whatever the
        shares of steps before it were, so that a run that is resumed here computes the same.
        """
        needed = self.sizes.needed(data.samples, len(data.micro_batches))
        rounds = self.replica.reducer.rounds(needed)
        return rounds > 0 and self.sizes.spread(data.samples, rounds, cut=[one.size for one in data.micro_batches])

    def attempt(self, data: StepData, counts: tuple[float, ...]) -> tuple[Part | None, MicroBatch | None]:
        """Try the share as it is cut: returns the part, or the micro-batch that did not fit in memory."""
        totals: dict[int, torch.Tensor] = {}  # by term, float64, on the device
        uncounted: dict[int, torch.Tensor] = {}  # the same for micro-batches without a count of the term
        partial, measures = UNMEASURED, self._measures(data)
        self.replica.reducer.begin()
        self.clock.start()
        for number, batch in enumerate(data.micro_batches):
            # kept back: gradients of a throttled rank until its sleep is over, and gradients that are looked at
            is_kept = self.throttle.is_on or ((measures or self._is_uncompared) and number == 0)
            if number == len(data.micro_batches) - 1 and not is_kept:
                self.replica.reducer.expect_last()
            seed_everything(derive_seed(self.seed, data.plan.step, batch.start))
            is_measured = measures and number == 0
            with self.throttle.slowed(self.clock.paused_s), self._watching_memory() as peak:
                if not self._try(batch, counts, totals, uncounted, measures=is_measured):
                    return None, batch
            if peak is not None:
                self.sizes.see(batch.size, peak.bytes)
            self.clock.mark()
            if self._is_uncompared:
                self._is_uncompared = False
                self.replica.check_whole_gradients()
            if is_measured:
                norm = self.replica.reducer.norm_so_far() / self.loss_scale
                partial = PartialGradient(batch.size, norm**2)
        self._tell_of_offload()
        sums = self._read_sums(totals, uncounted)
        work = tuple(batch.work for batch in data.micro_batches)
        return Part(sums, work, tuple(self.clock.laps()), partial, waited_s=self.clock.waited_s()), None

    def _tell_of_offload(self) -> None:
        """Log once how much of a micro-batch leaves the device."""
        if self._offload is None or self._has_told_of_offload or not self._offload.facts.tensors:
            return
        self._has_told_of_offload, facts = True, self._offload.facts
        logger.info(
            "forward of a micro-batch keeps %d tensors of together %.1f MiB; %d of %.1f MiB leave %s and come back for"
            " backward, for which %.3f s were waited", facts.tensors, facts.bytes / 2**20, facts.moved,
            facts.moved_bytes / 2**20, self.device, facts.waited_s,
        )  # fmt: skip

    def _measures(self, data: StepData) -> bool:
        """Whether to measure the gradient of the first micro-batch: in some steps that have more than this one."""
        every, plan = self._noise_scale_every, data.plan
        is_due = every > 0 and plan.step % every == 0 and bool(data.micro_batches)
        return is_due and data.micro_batches[0].size < plan.size

    def _watching_memory(self) -> AbstractContextManager[memory.Peak | None]:
        """Records the memory that a micro-batch needed, while sizes still grow."""
        return memory.peak_of(self.device) if self.sizes.is_learning else nullcontext()

    def _read_sums(self, totals: SumByTerm, uncounted: SumByTerm) -> tuple[float, ...]:
        """The sum of each term. Raises TaskError for a sum of a term whose count is 0.

        Such a sum has no divisor and no gradient, so it would be lost. A sum that is not finite may be 0/0 and is
        ignored.
        """
        found = [*totals.values(), *uncounted.values()]
        values = torch.stack(found).tolist() if found else []  # sync, the only one of a share
        for index, value in zip(uncounted, values[len(totals) :]):
            if value != 0 and math.isfinite(value):
                raise TaskError(
                    f"{type(self.task).__name__}: a batch has count 0 of {self.terms[index]!r}, but its loss gives"
                    f" {value:.6g}: expected 0. count is asked about a step before update_step is called for the one"
                    " before it, so count and loss must depend on the batch alone: put deciding facts, such as a phase,"
                    " into the batch"
                )
        read = dict(zip(totals, values))
        return tuple(read.get(index, 0.0) for index in range(len(self.terms)))

    def _try(
        self, batch: MicroBatch, counts: tuple[float, ...], totals: dict[int, torch.Tensor],
        uncounted: dict[int, torch.Tensor], *, measures: bool,
    ) -> bool:  # fmt: skip
        """Forward and backward of one micro-batch; adds to `totals` and `uncounted`. False if memory ran out."""
        try:
            with self.replica.reducer.round(self.clock.paused, measures=measures):
                for index, total in self._micro_batch(batch, counts).items():
                    kind = totals if batch.counts[index] else uncounted
                    kind[index] = kind[index] + total if index in kind else total
        except (RuntimeError, MemoryError) as error:
            if not memory.is_exhausted(error):
                raise
            return False
        return True

    def _micro_batch(self, batch: MicroBatch, counts: tuple[float, ...]) -> dict[int, torch.Tensor]:
        """Its sum of each term; those without a count have no gradient."""
        own, sample = dict(zip(self.terms, batch.counts)), self.place(batch.sample)
        keeping = nullcontext() if self._offload is None else self._offload.forward()
        with self.precision.computing(self.device), keeping:
            sums = check_sums(self.task, self.task.micro_step(self.replica.model, sample, own), self.terms)
        # A term without any count on any rank, contributes nothing: its sum may well be 0/0.
        live = [index for index in range(len(self.terms)) if batch.counts[index] and counts[index]]
        # The one division: by the count over all ranks and micro-batches. Gradients are then summed. A sum that does
        # not depend on the parameters, such as a constant, has a gradient of zero.
        scaled = [sums[self.terms[index]] * (self.weights[index] / counts[index]) for index in live]
        with_gradient = [term for term in scaled if term.requires_grad]
        if with_gradient:
            self.replica.reducer.backward(torch.stack(with_gradient).sum() * self.loss_scale, self.clock.paused)
        dead = [index for index, count in enumerate(batch.counts) if not count]
        # of one device, so that one copy brings all of them
        return {index: sums[self.terms[index]].detach().to(self.device, torch.float64) for index in (*live, *dead)}

    def _complaint(self, samples: int) -> str:
        what, remedy = "even one sample", "make samples or model smaller"
        if self.sizes.is_fixed:
            what, remedy = f"a unit of {samples} samples", "give a smaller --unit-size"
        return f"{self.name}: {memory.complaint(self.device, what, remedy)}"
