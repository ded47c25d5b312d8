"""Whether a loop is exact, found in the first step that a process sees, before that step counts.

The body of an inner loop can be repeated, so the first micro-batch of the step is computed four times without being
sent: whole, the same again, whole with other random numbers, and in halves. If the gradients of the halves do not add
up to the gradient of the whole, the loop is not exact. `hetseq run --check` cuts it in more ways. The micro-batch
stands for the whole step, and no other rank takes part, since a rank that joins is alone in its first step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch

from hetseq.data.loader import MicroBatch
from hetseq.errors import TaskError
from hetseq.loop.script_task import ScriptTask
from hetseq.training.step_engine import Compute

logger = logging.getLogger(__name__)

_OTHER_SEED = 1
_SINGLY = 64  # samples that are also computed one by one
_EPS = float(torch.finfo(torch.float32).eps)
#: by how much two ways of adding up the same gradient may differ, as a share of its norm: in fp64, fp32, coarser ones
_FINE, _SINGLE, _ROUGH = 1e-9, 1e-4, 5e-2


class Pass(Protocol):
    """What the check reads of a pass."""

    def sums(self) -> tuple[float, ...]: ...


class Check:
    """The passes of one process over its first micro-batch."""

    def __init__(self, question: Compute, script: ScriptTask, *, has_late_count: bool, level: int) -> None:
        self._question, self._script, self._has_late_count, self._level = question, script, has_late_count, level
        self._replica = question.computer.replica
        self._names = {id(parameter): name for name, parameter in self._replica.model.named_parameters()}
        self._found: list[tuple[tuple[float, ...], dict[str, torch.Tensor]]] = []
        self._closing = ExitStack()
        self._is_stray = True
        self._batches_draw = False  # the collater draws random numbers
        self._size, self._cuts = 0, list[int]()  # samples, and the number of pieces in each further pass

    def stray(self, is_stray: bool) -> None:
        """Say whether a gradient that arrives now is one of the script's own backward."""
        self._is_stray = is_stray

    def passes(self, *, is_thorough: bool) -> Iterator[tuple[list[MicroBatch], int]]:
        """The micro-batches of each pass, and a number that is added to their seed."""
        sizes = self._question.computer.sizes
        self._size = max((batch.size for batch in self._question.data.micro_batches), default=0)
        if self._size < 2 or sizes.is_fixed:
            return
        whole = self._cut(self._size, collate_seed=1)[0]
        self._batches_draw = not _is_equal(whole.sample, self._cut(self._size, collate_seed=2)[0].sample)
        if self._batches_draw:
            return
        pieces = (2, 3, *([self._size] if self._size <= _SINGLY else [])) if is_thorough else (2,)
        cuts = {}
        for number in pieces:
            cut = [one for one in self._cut(-(-self._size // number)) if one.start < whole.start + whole.size]
            if sum(one.size for one in cut) == whole.size:
                cuts[len(cut)] = cut
        self._cuts = list(cuts)
        closing, reducer = self._closing, self._replica.reducer
        with closing:
            closing.enter_context(reducer.without_sending())
            computer = self._question.computer
            closing.callback(setattr, computer, "loss_scale", computer.loss_scale)
            computer.loss_scale = 1.0  # that of fp16 may still be too large
            for module in self._script.owned.modules:  # dropout off, and no batch norm learns from these passes
                for part in module.modules():
                    closing.callback(setattr, part, "training", part.training)
                module.eval()
            for parameter in self._replica.model.parameters():
                if parameter.requires_grad:
                    closing.callback(parameter.register_post_accumulate_grad_hook(self._arrived).remove)
            yield [whole], 0
            yield [whole], 0
            yield [whole], _OTHER_SEED
            for cut in cuts.values():
                yield cut, 0
        self._replica.buffers.restore_()

    def see(self, one: Pass) -> None:
        """Keep the sums and gradients of the pass that has ended."""
        self._replica.reducer.finish()
        gradients = {
            self._names[id(parameter)]: parameter.grad.detach().to("cpu", torch.float64, copy=True)
            for parameter in self._replica.model.parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        self._found.append((one.sums(), gradients))

    def judge(self) -> str:
        """The finding. Raises TaskError if the loop is not exact; warns if that cannot be known."""
        if self._batches_draw:
            return self._not_checked(
                "the collater draws random numbers for a micro-batch, so the loop is not checked, and its course"
                " depends on how a step is cut: let the data set draw them, which is seeded for each sample"
            )
        if not self._found:
            return "the loop is not checked: its first micro-batch cannot be cut"
        (sums, whole), (_, again), (_, redrawn), *cut = self._found
        if not all(bool(gradient.isfinite().all()) for _, found in self._found for gradient in found.values()):
            return self._not_checked(
                "the loop is not checked, since the gradient of its first micro-batch is not finite"
            )
        precision = self._question.computer.precision
        limit = _FINE if precision.storage == torch.float64 else _SINGLE if precision.eps <= _EPS else _ROUGH
        apart, name = _farthest(whole, again)
        if apart > limit:
            raise TaskError(
                f"the first micro-batch, computed twice with the same random numbers: the gradients of {name} differ by"
                f" {apart:.1e} of the norm: the loop keeps something from one micro-batch to the next, draws from a"
                " random generator of its own, or has a module whose forward changes it in evaluation too"
            )
        if _farthest(whole, redrawn)[0] > limit:
            return self._not_checked(
                "the loop draws random numbers for a micro-batch, beside dropout, so it is not checked, and its course"
                " depends on how a step is cut: let the data set draw them, which is seeded for each sample"
            )
        worst = 0.0
        for pieces, (counted, gradients) in zip(self._cuts, cut, strict=True):
            apart, name = _farthest(whole, gradients)
            worst = max(worst, apart)
            if apart > limit:
                raise TaskError(_complaint(pieces, name, apart, _ratio(whole, gradients)))
            if sums[1] != counted[1] and self._has_late_count:
                raise TaskError(
                    f"the first micro-batch counts {sums[1]:g} as a whole and {counted[1]:g} in {pieces} pieces: count"
                    " must be that of the batch at hand"
                )
        ways = ", ".join(map(str, self._cuts))
        return (
            f"the gradient of {self._size} samples is the same in {ways} pieces: the largest difference is"
            f" {worst:.1e} of its norm"
        )

    def _not_checked(self, why: str) -> str:
        logger.log(self._level, why)
        return why

    def _cut(self, size: int, *, collate_seed: int | None = None) -> list[MicroBatch]:
        """The share in micro-batches of this size; what the collater draws follows from its seed."""
        question, self._script.collate_seed = self._question, collate_seed
        try:
            cap = replace(question.computer.sizes.cap, samples=size, is_ramp=False)
            return question.fetch_again(question.data, cap).micro_batches
        finally:
            self._script.collate_seed = None

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._is_stray:
            raise TaskError("loss.backward() was called: a loop calls step.backward(loss, count=...) in its place")


def _complaint(pieces: int, name: str, apart: float, ratio: float) -> str:
    what = (
        f"the first micro-batch, computed whole and in {pieces} pieces: the gradient of {name or 'a term'} from the"
        f" pieces is {ratio:.4g} times that from the whole"
    )
    if abs(ratio / pieces - 1) < 0.1:
        return f"{what}: step.backward got a mean; give it the sum, as of reduction='sum', and its count"
    return (
        f"{what} (they differ by {apart:.1e} of its norm): the loss depends on how a step is cut. It compares the"
        " samples of a micro-batch, for which there is step.whole, or the loop keeps something from one micro-batch"
        " to the next"
    )


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two batches hold the same; what is neither a tensor nor a collection of them is not looked at."""
    if isinstance(one, torch.Tensor):
        is_alike = isinstance(other, torch.Tensor) and one.shape == other.shape
        return is_alike and bool(((one == other) | (one != one)).all())
    if isinstance(one, Mapping):
        return all(key in other and _is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return True


def _farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of two gradients of a parameter, as a share of the norm of all; and its name."""
    norm = sum(float(gradient.square().sum()) for gradient in one.values()) ** 0.5
    none = torch.zeros((), dtype=torch.float64)
    found = {name: float((one.get(name, none) - other.get(name, none)).norm()) for name in {**one, **other}}
    name = max(found, key=lambda key: found[key], default="")
    if not name or not norm:
        return (float(bool(name) and found[name] > 0), name)
    return found[name] / norm, name


def _ratio(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """By which factor the second gradient is longer, measured along the first."""
    along = sum(float((gradient * other[name]).sum()) for name, gradient in one.items() if name in other)
    return along / (sum(float(gradient.square().sum()) for gradient in one.values()) or float("nan"))
