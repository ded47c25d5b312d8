"""Whether a loop is exact, found in the first step that a process sees, before that step counts.

The body of an inner loop can be repeated, so the first micro-batch of the step is computed some times more without
being sent: whole, the same again, whole with other random numbers, and in halves. If the gradients of the halves do not
add up to the gradient of the whole, the loop is not exact. `hetseq run --check` cuts it in more ways. The micro-batch
stands for the whole step, and no other rank takes part, since a rank that joins is alone in its first step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.nn.modules.dropout import _DropoutNd

from hetseq.data.loader import MicroBatch
from hetseq.errors import TaskError
from hetseq.loop.script_task import ScriptTask
from hetseq.training.step_engine import Compute

logger = logging.getLogger(__name__)

Gradient = dict[str, torch.Tensor]  # by parameter, in double precision on the host

_OTHER_SEED = 1
_SINGLY = 64  # samples that are also computed one by one
_EPS = float(torch.finfo(torch.float32).eps)
#: by how much two ways of adding up the same gradient may differ, as a share of its norm: in fp64, fp32, coarser ones
_FINE, _SINGLE, _ROUGH = 1e-9, 1e-4, 5e-2
_ROUNDINGS = 16  # the same, in roundings of the pieces: near a minimum they cancel, and little but rounding is left


class Pass(Protocol):
    """What the check reads of a pass."""

    def sums(self) -> tuple[float, ...]: ...


class Check:
    """The passes of one process over its first micro-batch."""

    def __init__(self, question: Compute, script: ScriptTask, *, has_late_count: bool, level: int) -> None:
        self._question, self._script, self._has_late_count, self._level = question, script, has_late_count, level
        self._replica = question.computer.replica
        self._names = {id(parameter): name for name, parameter in self._replica.model.named_parameters()}
        self._found: list[tuple[tuple[float, ...], Gradient]] = []  # sums and gradient of each pass
        self._is_stray = True
        self._batches_draw = False  # the collater draws random numbers
        self._size = max((batch.size for batch in question.data.micro_batches), default=0)
        self._cuts: list[tuple[int, int]] = []  # after the first three passes: pieces, and passes that they took

    def stray(self, is_stray: bool) -> None:
        """Say whether a gradient that arrives now is one of the script's own backward."""
        self._is_stray = is_stray

    def passes(self, *, is_thorough: bool, is_joint: bool) -> Iterator[tuple[list[MicroBatch], int]]:
        """The micro-batches of each pass, and a number that is added to their seed.

        With `is_joint` the pieces of a cut belong to one pass, as for a loss that compares them.
        """
        if self._size < 2:
            return
        whole = self._cut(self._size, collate_seed=1)[0]
        self._size = whole.size
        self._batches_draw = not _is_equal(whole.sample, self._cut(self._size, collate_seed=2)[0].sample)
        if self._batches_draw:
            return
        pieces = (2, 3, *([self._size] if self._size <= _SINGLY else [])) if is_thorough else (2,)
        with self._still():
            yield [whole], 0
            yield [whole], 0
            yield [whole], _OTHER_SEED
            for number in pieces:
                cut = self._cut(-(-self._size // number))
                if sum(one.size for one in cut) != whole.size or len(cut) in dict(self._cuts):
                    continue
                passes = [cut] if is_joint else [[one] for one in cut]
                self._cuts.append((len(cut), len(passes)))
                for batches in passes:
                    yield batches, 0
        self._replica.buffers.restore_()

    def see(self, one: Pass) -> None:
        """Keep the sums and gradients of the pass that has ended."""
        self._replica.reducer.finish()
        gradient = {
            self._names[id(parameter)]: parameter.grad.detach().to("cpu", torch.float64, copy=True)
            for parameter in self._replica.model.parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        self._found.append((one.sums(), gradient))

    def judge(self) -> str:
        """The finding. Raises TaskError if the loop is not exact; warns if that cannot be known."""
        if self._batches_draw:
            return self._not_checked(
                "the collater draws random numbers for a micro-batch, so the loop is not checked, and its course"
                " depends on how a step is cut: let the data set draw them, which is seeded for each sample"
            )
        if not self._cuts:
            why = "the loop is not checked, since its first micro-batch cannot be cut: it has one sample"
            return self._not_checked(why) if self._size else why
        (sums, whole), (_, again), (_, redrawn), *rest = self._found
        if not all(bool(gradient.isfinite().all()) for _, found in self._found for gradient in found.values()):
            return self._not_checked(
                "the loop is not checked, since the gradient of its first micro-batch is not finite"
            )
        limit, name = self._limit(whole, [gradient for _, gradient in rest]), ""
        apart, name = _farthest(whole, again)
        if apart > limit:
            raise TaskError(
                f"the first micro-batch, computed twice with the same random numbers: the gradients of {name} differ by"
                f" {apart / (_norm(whole) or 1):.1e} of the norm: the loop keeps something from one micro-batch to the"
                " next, draws from a random generator of its own, or has a module whose forward changes it"
            )
        if _farthest(whole, redrawn)[0] > limit:
            return self._not_checked(
                "the loop draws random numbers for a micro-batch, beside dropout, so it is not checked, and its course"
                " depends on how a step is cut: let the data set draw them, which is seeded for each sample"
            )
        worst = 0.0
        for pieces, passes in self._cuts:
            of_cut, rest = rest[:passes], rest[passes:]
            worst = max(worst, self._compare(sums, whole, of_cut, pieces, limit))
        if self._question.computer.sizes.is_fixed and worst > limit:
            return self._not_checked(
                "the loop is not checked: its loss compares the samples of a micro-batch, which --unit-size keeps whole"
            )
        ways = ", ".join(str(pieces) for pieces, _ in self._cuts)
        return (
            f"the gradient of {self._size} samples is the same in {ways} pieces: the largest difference is"
            f" {worst / (_norm(whole) or 1):.1e} of its norm"
        )

    def _compare(
        self, sums: tuple[float, ...], whole: Gradient, of_cut: Sequence[tuple[tuple[float, ...], Gradient]],
        pieces: int, limit: float,
    ) -> float:  # fmt: skip
        """The distance between the gradients of a cut and of the whole. Raises TaskError if it is too large."""
        added: Gradient = {}
        for _, gradient in of_cut:
            for name, value in gradient.items():
                added[name] = added[name] + value if name in added else value
        apart, name = _farthest(whole, added)
        ratio = _ratio(whole, added)
        is_mean = abs(ratio / pieces - 1) < 0.1
        if apart > limit and (is_mean or not self._question.computer.sizes.is_fixed):
            raise TaskError(_complaint(pieces, name, apart / (_norm(whole) or 1), ratio, is_mean=is_mean))
        counted = sum(found[1] for found, _ in of_cut) if self._has_late_count else 0.0
        if self._has_late_count and sums[1] != counted and apart <= limit:
            raise TaskError(
                f"the first micro-batch counts {sums[1]:g} as a whole and {counted:g} in {pieces} pieces: count must"
                " follow from the batch at hand alone"
            )
        return apart

    def _limit(self, whole: Gradient, pieces: Sequence[Gradient]) -> float:
        """The largest difference that rounding explains."""
        precision = self._question.computer.precision
        share = _FINE if precision.storage == torch.float64 else _SINGLE if precision.eps <= _EPS else _ROUGH
        scale = sum(_norm(piece) ** 2 for piece in pieces) ** 0.5
        return float(max(share * _norm(whole), _ROUNDINGS * precision.eps * scale))

    def _not_checked(self, why: str) -> str:
        logger.log(self._level, why)
        return why

    def _cut(self, size: int, *, collate_seed: int | None = None) -> list[MicroBatch]:
        """The first samples of the share, as many as the micro-batch has, in pieces of this size; what the collater
        draws follows from its seed."""
        question, self._script.collate_seed = self._question, collate_seed
        data, first = question.data, question.data.micro_batches[0].start
        plan = data.plan
        group = next(at for at, share in enumerate(plan.shares) if share and plan.range_of(at)[0] == first)
        shares = (*plan.shares[:group], self._size, *plan.shares[group + 1 :])
        try:
            cap = replace(question.computer.sizes.cap, samples=size, multiple=1, is_ramp=False)
            return question.fetch_again(replace(data, plan=replace(plan, shares=shares)), cap).micro_batches
        finally:
            self._script.collate_seed = None

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Context without dropout, in which modules with buffers, such as batch norm, neither learn nor mix samples.

        Other modules stay in training mode: in evaluation some give something else, and cuDNN has no backward of a
        recurrent one.
        """
        computer = self._question.computer
        with ExitStack() as closing:
            closing.enter_context(self._replica.reducer.without_sending())
            closing.callback(setattr, computer, "loss_scale", computer.loss_scale)
            computer.loss_scale = 1.0  # the scale of fp16 may still be too large
            for module in self._script.owned.modules:
                for part in module.modules():
                    _quieten(part, closing)
            for parameter in self._replica.model.parameters():
                if parameter.requires_grad:
                    closing.callback(parameter.register_post_accumulate_grad_hook(self._arrived).remove)
            yield

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._is_stray:
            raise TaskError("loss.backward() was called: a loop calls step.backward(loss, count=...) in its place")


def _quieten(part: torch.nn.Module, closing: ExitStack) -> None:
    """Take dropout from one module, and have it keep its buffers, until `closing` ends."""
    rates = [name for name, value in vars(part).items() if "drop" in name and type(value) is float]
    for name in [*rates, *(["p"] if isinstance(part, _DropoutNd) else [])]:
        closing.callback(setattr, part, name, getattr(part, name))
        setattr(part, name, 0.0)
    if any(buffer is not None and buffer.is_floating_point() for buffer in part._buffers.values()):
        closing.callback(setattr, part, "training", part.training)
        closing.callback(part.__dict__.pop, "train", None)
        part.training = False
        part.__dict__["train"] = lambda mode=True: part  # a body may call model.train()


def _complaint(pieces: int, name: str, share: float, ratio: float, *, is_mean: bool) -> str:
    what = (
        f"the first micro-batch, computed whole and in {pieces} pieces: the gradient of {name or 'a term'} from the"
        f" pieces is {ratio:.4g} times that from the whole"
    )
    if is_mean:
        return f"{what}: step.backward got a mean; give it the sum, as of reduction='sum', and its count"
    return (
        f"{what} (they differ by {share:.1e} of its norm): the loss depends on how a step is cut. It compares the"
        " samples of a micro-batch, for which there is step.whole, or the loop keeps something from one micro-batch"
        " to the next"
    )


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors; other values are not compared."""
    if isinstance(one, torch.Tensor):
        is_alike = isinstance(other, torch.Tensor) and one.shape == other.shape
        return is_alike and bool(((one == other) | (one != one)).all())
    if isinstance(one, Mapping):
        return all(key in other and _is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return True


def _norm(gradient: Gradient) -> float:
    return float(sum(float(value.square().sum()) for value in gradient.values()) ** 0.5)


def _farthest(one: Gradient, other: Gradient) -> tuple[float, str]:
    """The largest difference of two gradients of a parameter, and its name."""
    none = torch.zeros((), dtype=torch.float64)
    found = {name: float((one.get(name, none) - other.get(name, none)).norm()) for name in {**one, **other}}
    name = max(found, key=lambda key: found[key], default="")
    return found.get(name, 0.0), name


def _ratio(one: Gradient, other: Gradient) -> float:
    """By which factor the second gradient is longer, measured along the first."""
    along = sum(float((gradient * other[name]).sum()) for name, gradient in one.items() if name in other)
    return along / (sum(float(gradient.square().sum()) for gradient in one.values()) or float("nan"))
