"""Tasks with faults during a step: they crash, hang or wait where `--data DIR/plan.json` says so.

A plan maps samples to actions when the loss sees them: {"20": "raise"}; the key "load" acts in `load_dataset`. With
`--curriculum` the samples of a step, and so the rank that sees one, are known. A hanging task first leaves a file
`reached-KEY-PID` in DIR, so that a test need not guess; a waiting one continues once there is a file `open`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetseq import Task
from hetseq.comm.shared_memory import SharedMemoryRanks
from tests.support import cuda_errors

SAMPLES = 96
ELEMENTS = 1 << 21  # of Ballast's only parameter: 8 MiB in a checkpoint


class Indices(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is its own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Hazard(Task):
    """A line through the indices, and the plan."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.folder = Path(str(self.config.data.data))
        self.plan = json.loads((self.folder / "plan.json").read_text())

    def load_dataset(self, split: str) -> Indices | None:
        if split != "train":
            return None
        self._act("load")
        return Indices()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1))

    def loss(self, model: nn.Module, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        for index in sample.tolist():
            self._act(str(int(index)))
        output = model(sample.unsqueeze(1) / SAMPLES).squeeze(1)
        return {"loss": ((output - sample / SAMPLES) ** 2).sum()}

    def _act(self, key: str) -> None:
        what = self.plan.get(key)
        if what is None:
            return
        mark = self.folder / f"reached-{key}-{os.getpid()}"
        is_again = mark.exists()  # the same process does its share once more
        mark.touch()
        if what == "raise":
            raise ValueError(f"sample {key} is poisoned")
        is_first = len(list(self.folder.glob(f"reached-{key}-*"))) == 1
        if what == "lose the device" or (what == "lose the device once" and is_first):
            pinned = PinnedMemory()  # held by this frame
            raise cuda_errors.accelerator_error(cuda_errors.ILLEGAL_ACCESS)
        if what == "lose the device in the exchange" and is_first:
            fail_in_exchange(cuda_errors.accelerator_error(cuda_errors.ILLEGAL_ACCESS))
        if what == "run out of memory in the exchange" and is_first and not is_again:
            fail_in_exchange(cuda_errors.out_of_memory())
        if what == "fail on the device":
            pinned = PinnedMemory()  # noqa: F841 - held by this frame
            raise cuda_errors.accelerator_error(cuda_errors.DEVICE_ASSERT)
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "exit":
            os._exit(3)
        if what == "hold the interpreter":
            ctypes.PyDLL(None).sleep(60)  # in C and without releasing it: no other thread runs
        while what == "wait" and not (self.folder / "open").exists():
            time.sleep(0.005)


class PinnedMemory:
    """A page-locked tensor of a device that has failed: torch ends the process with SIGABRT when it is released."""

    def __del__(self) -> None:
        os.abort()


def fail_in_exchange(error: Exception) -> None:
    """The next sum that this process starts fails, as one of a CUDA tensor may: it copies, and pins host memory."""

    def fail(*_: Any, **__: Any) -> Any:
        SharedMemoryRanks.all_reduce_sum = start  # type: ignore[method-assign]
        pinned = PinnedMemory() if isinstance(error, torch.AcceleratorError) else None  # noqa: F841 - held by the frame
        raise error

    start, SharedMemoryRanks.all_reduce_sum = SharedMemoryRanks.all_reduce_sum, fail  # type: ignore[method-assign]


class Lengths(Indices):
    """Samples of 1 to 9 tokens."""

    lengths = [1 + 5 * index % 9 for index in range(SAMPLES)]


class Tokens(Hazard):
    """The same with lengths, for --max-tokens."""

    def __init__(self, args: Any) -> None:
        Task.__init__(self, args)
        self.plan = {}

    def load_dataset(self, split: str) -> Lengths | None:
        return Lengths() if split == "train" else None


class Filled(nn.Module):
    """One large parameter, all of whose numbers are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * sample.sum() * 0 + self.weight.sum() * len(sample)


class Ballast(Task):
    """Every gradient is 1: with --optimizer sgd --lr 1 --lr-scheduler constant --clip-norm 0 each number of the state
    is minus the step it belongs to, so a state made of two steps cannot hide."""

    def load_dataset(self, split: str) -> Indices | None:
        return Indices() if split == "train" else None

    def build_model(self) -> nn.Module:
        return Filled()

    def loss(self, model: nn.Module, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": model(sample)}
