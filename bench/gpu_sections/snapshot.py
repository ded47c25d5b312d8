"""A state saved during training is the state of its step, bit for bit; and the cost of the save.

AdamW changes every tensor in each step meanwhile. `CheckpointManager` saves as the trainer does: `begin` after an
update, `settle` before the next one. What it wrote is read back and compared with a copy made at `begin`. On a GPU a
second round refuses to pin the memory that tensors are copied to, which must cost speed alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpu_sections import faults
from gpu_sections.section import Check, Place, figure_of, holds
from hetseq import CheckpointManager
from hetseq.checkpoint import Identity, Retention

SAVES = 3


class OneRank:
    """A group of one rank, as `CheckpointManager` asks for one."""

    rank, world_size = 0, 1

    def all_gather_rows(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        return row[np.newaxis].copy()

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        pass


class Training:
    """Parameters of some MB and AdamW over them; a step writes every tensor of the state."""

    def __init__(self, device: torch.device, megabytes: int) -> None:
        torch.manual_seed(0)
        width = 1024 if megabytes > 100 else 128
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * width)))
        self.device = device
        self.model = nn.Sequential(*[nn.Linear(width, width, bias=number % 2 == 0) for number in range(layers)]).to(
            device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.step()

    def step(self) -> None:
        """Gradients that need no network, and an update."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state by name, live."""
        found = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found.update((f"optim.{name}.{key}", value) for key, value in self.optimizer.state[parameter].items())
        return found


def checks(place: Place) -> Iterator[Check]:
    """Small states on a CPU; 1.3 GB on a GPU, with pinned memory and without."""
    device = torch.device(place.device)
    torch.set_num_threads(1)
    if place.is_gpu:
        torch.cuda.set_device(device)
    megabytes = 1300 if place.is_gpu else 30
    yield from saved(place, device, megabytes, "pinned" if place.is_gpu else "on the CPU")
    if place.is_gpu:
        answers = faults.refuse_pinning()
        yield from saved(place, device, megabytes, "not pinned")
        yield holds("not pinned: the driver refused", bool(answers) and all(answers), seen=f"codes {answers}",
                    expected="codes above 0")  # fmt: skip


def saved(place: Place, device: torch.device, megabytes: int, name: str) -> Iterator[Check]:
    """Some saves in a row; each is compared with the state at its `begin`."""
    place.begin(f"saves of {megabytes} MB, {name}")
    training, folder = Training(device, megabytes), place.folder / name.replace(" ", "-")
    manager = CheckpointManager(folder, run_id=f"gpu-check-{os.getpid()}", group=OneRank(), retention=Retention())
    refusal = manager.prepare(training.tensors())
    if refusal is not None:
        yield holds(f"{name}: memory", False, seen=refusal, expected="memory for a save in the background")
        return
    right, begins, stalls, size = 0, [], [], 0
    try:
        for number in range(1, SAVES + 1):
            kept = {key: value.clone() for key, value in training.tensors().items()}
            size = sum(value.numel() * value.element_size() for value in kept.values())
            synchronize(device)
            began_s = time.perf_counter()
            manager.begin(
                training.tensors(), {"step": number}, identity=Identity(number, 0, "0" * 16), nonce=number,
                kinds=["time"], at_once=[],
            )  # fmt: skip
            begins.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            manager.settle()
            training.step()
            synchronize(device)
            stalls.append(time.perf_counter() - began_s)
            for _ in range(5):
                training.step()
            result = manager.finish()
            right += int(result is not None and result.ok and is_state(manager, kept))
    finally:
        manager.close()
    yield holds(f"{name}: saved states", right == SAVES, seen=f"{right} of {SAVES} match their step",
                expected="all of them")  # fmt: skip
    yield Check(
        f"{name}: begin, first and last of {size / 1e9:.2f} GB", f"{figure_of(begins[0])}, {figure_of(begins[-1])}"
    )
    yield Check(f"{name}: rest of the copy and an update", f"{figure_of(stalls[-1])}")


def is_state(manager: CheckpointManager, kept: dict[str, Tensor]) -> bool:
    """Whether the newest checkpoint holds exactly these tensors."""
    loaded = manager.load()
    return (
        loaded is not None
        and loaded.tensors.keys() == kept.keys()
        and all(torch.equal(loaded.tensors[key], value.cpu()) for key, value in kept.items())
    )


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
