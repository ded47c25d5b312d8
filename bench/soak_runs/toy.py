"""The model, the data, the optimizer and the records that all systems of the soak comparison share.

The parameter `uses` has an element for each sample. Its gradient is such that a step of the optimizer adds 1 to the
elements of the step's samples. So a saved state itself says how often each sample went into it: whatever was computed
and lost again is not there, and a sample that was used twice counts twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler, TensorDataset

BEGAN_NS = time.monotonic_ns()
SETTINGS = "HETSEQ_SOAK_SETTINGS"
SAMPLES, WIDTH = 3072, 8
RATE, MOMENTUM = 2.0**-7, 0.9
SEED = 1


@dataclass(frozen=True)
class Settings:
    """What a process is told, as JSON in an environment variable."""

    folder: str  # of the run's files
    steps_file: str
    ranks: int  # the shards of the data; a run on one device takes them all
    batch: int  # samples of a rank in a step
    sample_s: float
    mean_time_between_failures_s: float = 15.0
    last_step: int = 0  # 0: until it is told to stop

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.ranks * self.batch


def settings() -> Settings:
    """Of this process."""
    return Settings(**json.loads(os.environ[SETTINGS]))


class Toy(torch.nn.Module):
    """A small network, and the parameter that counts the uses of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.uses = torch.nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions, and the elements of `uses`; both (samples,)."""
        return self.layers(x).squeeze(1), self.uses[number]


def build() -> Toy:
    """The model, with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Toy().double()


def data() -> TensorDataset:
    """Inputs (WIDTH,), a target, and the number of the sample."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1), torch.arange(SAMPLES))


def computed(model: torch.nn.Module, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared errors of some samples and their elements of `uses`; takes the time that was set, and is recorded."""
    x, y, number = sample
    now = settings()
    time.sleep(now.sample_s * len(x))
    predicted, uses = model(x, number)
    _append(Path(now.folder, "computed"), f"{len(x)}\n")
    return (predicted - y) ** 2, uses


def losses(squares: torch.Tensor, uses: torch.Tensor, step_samples: int) -> torch.Tensor:
    """The losses of samples whose mean is taken over all `step_samples` of the step.

    The second term has the value 0 and the gradient that adds 1 to `uses`.
    """
    return squares - step_samples / RATE * (uses - uses.detach())


def optimizer_of(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, but without for `uses`. It appends a line to the file of the steps after each step."""
    both = list(parameters)
    uses = [parameter for parameter in both if parameter.shape == (SAMPLES,)]
    others = [parameter for parameter in both if parameter.shape != (SAMPLES,)]
    groups = [{"params": others, "momentum": MOMENTUM}, {"params": uses, "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=RATE)
    now = settings()

    def note(*_: Any) -> None:  # as `bench/recover.py` reads it, with the samples in the state for the step
        line = f"{round(uses[0].sum().item())} {os.getpid()} {time.monotonic_ns()} {BEGAN_NS} {BEGAN_NS}\n"
        _append(Path(now.steps_file), line)

    optimizer.register_step_post_hook(note)
    return optimizer


class Shard:
    """One of `ranks` shards of the data in the order of torch's DistributedSampler, by the number of a batch."""

    def __init__(self, number: int, ranks: int, batch: int) -> None:
        self._batch = batch
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            data(), num_replicas=ranks, rank=number, shuffle=True, seed=SEED, drop_last=True
        )  # fmt: skip
        self._epoch, self._order = -1, list[int]()

    def indices(self, position: int) -> list[int]:
        """The samples of a batch; `position` counts batches since the first epoch."""
        epoch, place = divmod(position, len(self._sampler) // self._batch)
        if epoch != self._epoch:
            self._sampler.set_epoch(epoch)
            self._epoch, self._order = epoch, list(self._sampler)
        return self._order[place * self._batch : (place + 1) * self._batch]


def uses_after(positions: Iterable[int], batch: int) -> torch.Tensor:
    """(SAMPLES,): how often each sample is used once, of each shard, so many batches are."""
    found, positions = torch.zeros(SAMPLES, dtype=torch.float64), list(positions)
    for number, position in enumerate(positions):
        shard = Shard(number, len(positions), batch)
        for place in range(position):
            found[shard.indices(place)] += 1
    return found


def write(path: Path, state: Any) -> None:
    """Save beside the file, then rename.

    Without fsync, which only a machine that loses power needs: it would make each save slower.
    """
    beside = path.with_suffix(f".{os.getpid()}")
    torch.save(state, beside)
    beside.rename(path)


def log_loss(step: int, loss: float) -> None:
    """A line for a step; of two lines for the same step the later counts."""
    _append(Path(settings().folder, "losses"), f"{step} {loss!r}\n")


def _append(path: Path, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode())
    os.close(file)
