"""One pass of a script over its micro-batches of a step, and the gradient that it adds up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from hetseq.data.fetch import seed_everything
from hetseq.data.loader import MicroBatch
from hetseq.data.plan import derive_seed
from hetseq.errors import DeviceMemoryError, PeerLostError, TaskError
from hetseq.loop.script_task import Terms
from hetseq.system import device_memory as memory
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Phase
from hetseq.training.share import Part
from hetseq.training.step_engine import Compute, PeerLost

logger = logging.getLogger(__name__)

Loss = torch.Tensor | Mapping[str, torch.Tensor]
Count = float | torch.Tensor | None


@dataclass(frozen=True)
class Setting:
    """What a pass computes: the question, the micro-batches that answer it, and how their sums are called."""

    question: Compute
    terms: Terms
    batches: list[MicroBatch]
    seed: int = 0  # added to the seed of the random numbers
    stray: Callable[[bool], None] | None = None  # told around each backward of the pass; others are the script's own
    is_alone: bool = False  # the micro-batches are the whole step, and no other rank takes part


class Pass(Protocol):
    """What a step asks of a pass."""

    def give(self) -> Iterator[Any]:
        """What the inner loop of the script is given, one by one."""
        ...

    def backward(self, loss: Loss, count: Count) -> None:
        """As `Step.backward`. A lost peer is remembered: the script's frames are none of its business."""
        ...

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor) -> None:
        """As `Step.add`."""
        ...

    def sums(self) -> tuple[float, ...]:
        """The sum of each term so far; one wait for the device."""
        ...

    def part(self) -> Part | PeerLost:
        """The answer to the question, when `give` has ended."""
        ...


class Sums:
    """Part of every pass: its sums by term, its lost peer, and how it computes."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._question, self._terms = setting, setting.question, setting.terms
        self._computer = setting.question.computer
        self._reducer = self._computer.replica.reducer
        self._sums: list[torch.Tensor | float] = []
        self._lost: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._sums = [0.0] * len(self._terms.names)

    def _seed(self, start: int, *, may_differ: bool = True) -> None:
        """Seed what draws for the samples from `start` on, the same on any rank and in a repetition."""
        more = (self._setting.seed,) if self._setting.seed and may_differ else ()
        seed_everything(derive_seed(self._computer.seed, self._question.data.plan.step, start, *more))

    def _backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss`, or remember that a peer was lost."""
        stray = self._setting.stray or (lambda _: None)
        stray(False)
        try:
            self._reducer.backward(loss * self._computer.loss_scale, self._computer.clock.paused)
        except PeerLostError as error:
            self._lost = str(error)
        finally:
            stray(True)

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor) -> None:
        place = self._terms.place_of(name)
        for at, value in ((place, total), (place + 1, count)):
            check_number(value, name)
            self._sums[at] = self._sums[at] + _number(value)

    def sums(self) -> tuple[float, ...]:
        device = self._computer.device
        totals = [torch.as_tensor(total, dtype=torch.float64, device=device) for total in self._sums]
        return tuple(torch.stack(totals).tolist())

    def part(self) -> Part | PeerLost:
        if self._lost is not None:
            return PeerLost(self._lost)
        work = tuple(batch.work for batch in self._setting.batches)
        clock = self._computer.clock
        return Part(self.sums(), work, tuple(clock.laps()), waited_s=clock.waited_s())


class MicroBatches(Sums):
    """`for batch in step`: one micro-batch after the other."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._batch: MicroBatch | None = None
        self._is_added = False

    def give(self) -> Iterator[Any]:
        """The samples of each micro-batch, on this rank's device."""
        computer, batches = self._computer, self._setting.batches
        whereabouts.enter(Phase.FORWARD_BACKWARD)
        self._reducer.begin()
        computer.clock.start()
        for number, batch in enumerate(batches):
            if number == len(batches) - 1 and not computer.throttle.is_on:
                self._reducer.expect_last()
            self._batch, self._is_added = batch, False
            self._seed(batch.start)
            with computer.throttle.slowed(), computer.precision.computing(computer.device):
                yield computer.place(batch.sample)
            computer.clock.mark()
            if self._lost is not None:
                return
        self._batch = None

    def backward(self, loss: Loss, count: Count) -> None:
        if self._lost is not None or self._batch is None:
            return
        if self._is_added:
            raise TaskError("step.backward was called twice for one micro-batch: add the terms up, or give a dict")
        self._is_added = True
        total = self._scaled(loss, count)
        check_gradient(total)
        self._backward(total)

    def _scaled(self, loss: Loss, count: Count) -> torch.Tensor:
        """The loss divided by its count, as far as that is known; adds to the sums."""
        plan, batch, terms = self._question.data.plan, self._batch, self._terms
        assert batch is not None
        if terms.has_late_count:
            if isinstance(loss, Mapping):
                example = ", ".join(f'"{term}": ...' for term in loss)
                raise TaskError(
                    f"step.backward got the terms {', '.join(loss)}: several denominators must be known before the"
                    f" first gradient, so give run.steps(..., count=lambda batch: {{{example}}})"
                )
            check_scalar(loss, "the sum")
            self._sums[0] = self._sums[0] + _number(loss)
            self._sums[1] = self._sums[1] + _number(batch.size if count is None else count)
            return loss / plan.size
        if count is not None:
            raise TaskError("step.backward got a count, which count= of run.steps has given already: leave it out")
        names = terms.losses
        if not isinstance(loss, Mapping):
            if len(names) > 1:
                raise TaskError(f"step.backward got one loss: expected a dict with the terms {', '.join(names)}")
            loss = {names[0]: loss}
        if set(loss) != set(names):
            raise TaskError(f"step.backward got the terms {sorted(loss)}: expected {sorted(names)}, as in count")
        counts, weights, live = self._question.counts, self._computer.weights, []
        for index, term in enumerate(names):
            check_scalar(loss[term], term)
            if batch.counts[index] and counts[index]:  # else its sum may well be 0/0
                live.append(loss[term] * (weights[index] / counts[index]))
                self._sums[index] = self._sums[index] + _number(loss[term])
        return torch.stack(live).sum() if live else sum(loss.values()) * 0.0  # type: ignore[return-value]


class Each(MicroBatches):
    """`step.each(body)`: it sees memory run out in the body, and repeats this rank's share in smaller pieces."""

    def __init__(self, setting: Setting, body: Callable[[Any], None]) -> None:
        super().__init__(setting)
        self._body, self._is_whole = body, True

    def give(self) -> Iterator[Any]:
        """Nothing: the body is called here."""
        computer = self._computer
        while (refused := self._attempt()) is not None:
            memory.release(computer.device)  # only here, where no exception holds the frames and their tensors any more
            if not computer.sizes.refuse(refused.size, refused.work):
                complaint = memory.complaint(computer.device, "even one sample", "make samples or model smaller")
                raise DeviceMemoryError(f"{computer.name}: {complaint}")
            logger.warning(
                "the memory of %s did not hold a micro-batch of %d samples: this rank takes smaller ones from now on,"
                " and repeats this share, with the same result [batch-halved]", computer.device, refused.size,
            )  # fmt: skip
            if self._reducer.has_sent:
                self._is_whole = False
                break
            computer.replica.buffers.restore_()
            data = self._question.fetch_again(self._question.data, computer.sizes.cap)
            self._setting = replace(self._setting, batches=data.micro_batches)
            self._forget()
        yield from ()

    def part(self) -> Part | PeerLost:
        if self._is_whole:
            return super().part()
        return Part((0.0,) * len(self._terms.names), (), (), is_whole=False)

    def _attempt(self) -> MicroBatch | None:
        """Try the share as it is cut; the micro-batch that did not fit in memory."""
        for number, sample in enumerate(super().give()):
            try:
                self._body(sample)
            except (RuntimeError, MemoryError) as error:
                if not memory.is_exhausted(error):
                    raise
                return self._setting.batches[number]
        return None


def check_scalar(loss: Any, term: str, what: str = "a sum") -> None:
    """Raise TaskError unless `loss` is a tensor without dimensions; `what` it should be."""
    if not isinstance(loss, torch.Tensor) or loss.dim():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise TaskError(f"step.backward got {got} for {term}: expected {what}, which is a tensor without dimensions")


def check_number(value: Any, name: str) -> None:
    """Raise TaskError unless `value` is a number, or a tensor of one."""
    is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
    if not is_number:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TaskError(f"step.add got {got} for {name!r}: expected numbers, or tensors without dimensions")


def check_gradient(loss: torch.Tensor) -> None:
    """Raise TaskError for a loss that trains nothing."""
    if not loss.requires_grad:
        raise TaskError(
            "the loss of step.backward has no gradient: it was detached, computed under no_grad, or depends on no"
            " trained parameter"
        )


def _number(value: float | torch.Tensor) -> float | torch.Tensor:
    """For sums: a tensor stays on its device, so that nothing waits for it."""
    return value.detach().double().reshape(()) if isinstance(value, torch.Tensor) else float(value)
