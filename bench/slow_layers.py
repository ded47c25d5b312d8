"""A language model whose layers take a given time: the task of a node that plays a machine of a given speed.

`--throttle` sleeps after the whole forward and backward of a micro-batch, and the rank sends its gradients afterwards:
it hides no transfer. Here a rank sleeps after each half of a layer, so gradients travel while it "computes", as they do
on a slow machine. The speed, in rows per second, is in the environment variable `ROWS_PER_S`.

Of a row's time a third is for forward and two thirds are for backward, as of the multiplications of a matrix, in equal
pieces. A piece lasts as long whatever else the cores do: what it computes, and what it waits for a free core, is part
of it. A wait for other ranks is not. Gradients of a piece are there before its sleep, so they leave too early by about
a 32nd of a backward.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from random_tokens import RandomTokenTask
from torch import Tensor

from hetseq.tasks.gpt.model import GptForCausalLM

VARIABLE = "ROWS_PER_S"
_FORWARD, _BACKWARD = 1 / 3, 2 / 3
_PIECES = (".attention", ".mlp")  # names of modules end so; each ends a piece
_LATE = 0.1  # of a micro-batch: more is not made up for


class Pace:
    """Sleeps after each of `pieces` pieces of a micro-batch."""

    def __init__(self, row_s: float, pieces: int) -> None:
        self._row_s, self._pieces = row_s, pieces
        self._rows = 0
        self._late_s = 0.0  # how much too long the pieces so far have lasted; at most _LATE
        self._waits: int | None = None  # a file that says how long this thread has waited for a core
        self._busy_s = 0.0

    def begin(self, rows: int) -> None:
        """A micro-batch of so many rows begins."""
        self._rows, self._busy_s = rows, self._busy()

    def mark(self, part: float) -> None:
        """A piece is over, of this part of the micro-batch, and the next one begins."""
        piece_s = part * self._row_s * self._rows / self._pieces
        due_s = piece_s - (self._busy() - self._busy_s) - self._late_s
        began_s = time.perf_counter()
        if due_s > 0:
            time.sleep(due_s)
        self._late_s = min(time.perf_counter() - began_s - due_s, _LATE * self._row_s * self._rows)
        self._busy_s = self._busy()

    def _busy(self) -> float:
        """Seconds for which this thread has computed or waited for a core."""
        if self._waits is None:
            self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        return time.thread_time() + int(os.pread(self._waits, 64, 0).split()[1]) / 1e9


class _Mark(torch.autograd.Function):
    """The identity; a piece ends here in forward, and another one in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        pace.mark(_FORWARD)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.pace.mark(_BACKWARD)
        return gradients[0], None


class SlowTokens(RandomTokenTask):
    """As `RandomTokenTask`, of many narrow layers, on a machine that does `ROWS_PER_S` rows in a second."""

    words, length, width, layers = 512, 8, 128, 16  # 3.2 M parameters

    def build_model(self) -> GptForCausalLM:
        return paced(super().build_model())


def paced(model: GptForCausalLM) -> GptForCausalLM:
    """The model, on a machine of the speed that the environment says."""
    ends = [module for name, module in model.named_modules() if name.endswith(_PIECES)]
    pace = Pace(1 / float(os.environ[VARIABLE]), len(ends))

    def begin(_module: Any, inputs: tuple[Tensor, ...]) -> None:
        pace.begin(len(inputs[0]))

    def mark(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return _Mark.apply(output, pace)  # type: ignore[no-any-return, no-untyped-call]

    model.register_forward_pre_hook(begin)
    for module in ends:
        module.register_forward_hook(mark)
    return model
