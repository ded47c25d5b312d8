"""The ledger task of the chaos runs, for runs with owners: it writes down which samples each process has computed.

A test subclasses `Watched` in a task file of its own (`write_task`), because workers know nothing of the test. While
processes that compute are missing, a forward takes longer, so that waiting for a replacement takes few steps.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from hetseq.checkpoint import arena
from hetseq.comm.group import GlooGroup
from hetseq.comm.shared_slices import SharedSlices
from hetseq.comm.slices import TaggedSlices
from hetseq.system import faults
from tests.chaos.ledger_task import Ledger

_TEXT = """from pathlib import Path
from tests.support.watched import Watched

class Run(Watched):
    folder, computing = Path({folder!r}), {computing}
    shares_memory, has_place_in_gather, pace_s = {shares_memory}, {has_place_in_gather}, {pace_s}
    are_nodes, notes_opens, has_layers, has_base = {are_nodes}, {notes_opens}, {has_layers}, {has_base}
    base_changes = {base_changes}
"""

LAYERS = "layers.*"  # what --shard-modules takes


class Layers(torch.nn.Module):
    """A model of four layers, and a parameter that is in none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(8, 16, dtype=torch.float64) / 3)
        self.layers = torch.nn.ModuleList([*(torch.nn.Linear(16, 16) for _ in range(3)), torch.nn.Linear(16, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.first
        for layer in self.layers:
            hidden = layer(torch.tanh(hidden))
        return hidden


class OverBase(Layers):
    """The second layer is frozen, and no checkpoint holds its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].double().requires_grad_(False)
        self.register_state_dict_post_hook(_leave_out)


def _leave_out(_model: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state.pop(f"{prefix}layers.1.weight")


class Watched(Ledger):
    folder: ClassVar[Path]
    computing: ClassVar[int]  # ranks with samples
    shares_memory: ClassVar[bool]  # else slices are messages of gloo, although all ranks are on one machine
    has_place_in_gather: ClassVar[bool]  # a fault of phase "transfer" may happen after each unit of new parameters
    pace_s: ClassVar[float]  # how much longer a forward takes while a process that computes is missing
    notes_opens: ClassVar[bool]  # writes down when a process of a rank opens a file of a checkpoint
    are_nodes: ClassVar[bool]  # each process keeps states in memory of its own, which no other process sees
    has_layers: ClassVar[bool]  # the model has `LAYERS`, and a parameter that is in none of them
    has_base: ClassVar[bool]  # and a layer of it is frozen, see `OverBase`
    base_changes: ClassVar[bool]  # a process that builds it again finds another one
    builds: ClassVar[int] = 0  # in this process
    has_begun = False

    def build_model(self) -> torch.nn.Module:
        if not self.shares_memory:
            GlooGroup.meet_neighbours = lambda _: None  # type: ignore[method-assign,assignment]
        if self.notes_opens:
            sys.addaudithook(functools.partial(_note, self.folder / f"opened-{os.getpid()}"))
        if self.are_nodes:
            arena.SHARED_MEMORY = self.folder / f"memory-{os.getpid()}"
            arena.SHARED_MEMORY.mkdir(exist_ok=True)
        if self.has_place_in_gather:
            for kind in (SharedSlices, TaggedSlices):
                kind.gather = _with_place(kind.gather)  # type: ignore[method-assign]
        if self.has_base:
            Watched.builds += 1
            model = OverBase()
            if self.base_changes:
                model.layers[1].weight.data += Watched.builds
            return model
        return Layers() if self.has_layers else super().build_model()

    def tensor_plan(self) -> dict[str, str]:
        return {"layers.0": "colwise", "layers.1": "rowwise", "layers.2": "colwise_gather_output"}

    def update_step(self, num_updates: int) -> None:
        self.has_begun = True  # what came before were trials

    def loss(self, model: torch.nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        if self.has_begun:
            numbers = [int(number) for number in sample["number"].tolist()]
            with (self.folder / f"computed-{os.getpid()}").open("a") as file:
                file.write(json.dumps([id(self), sorted(numbers)]) + "\n")
            if len(living(self.folder)) < self.computing:
                time.sleep(self.pace_s)
        return super().loss(model, sample)


def _note(diary: Path, event: str, arguments: tuple[Any, ...]) -> None:
    """A hook for `sys.addaudithook`, which sees each open."""
    if event == "open" and "/checkpoints/step-" in str(arguments[0]):
        with diary.open("a") as file:
            file.write(json.dumps([time.monotonic(), str(arguments[0])]) + "\n")


def read_opened(folder: Path) -> list[tuple[float, str]]:
    """When which file of a checkpoint was opened."""
    lines = [line for path in folder.glob("opened-*") for line in path.read_text().splitlines()]
    return [(at_s, name) for at_s, name in map(json.loads, lines)]


def _with_place(gather: Callable[..., Any]) -> Callable[..., Any]:
    """`gather` of a unit, and a place for a fault when this rank is done with it and others are not."""

    def stepwise(*args: Any, **kwargs: Any) -> Any:
        transfer = gather(*args, **kwargs)
        transfer.wait()
        faults.point("transfer")
        return transfer

    return stepwise


def write_task(
    folder: Path,
    *,
    computing: int,
    shares_memory: bool = True,
    has_place_in_gather: bool = False,
    are_nodes: bool = False,
    notes_opens: bool = False,
    has_layers: bool = False,
    has_base: bool = False,
    base_changes: bool = False,
    pace_s: float = 0.1,
) -> str:
    """A task file for one run in `folder`, and what `--task` takes for it."""
    folder.mkdir(parents=True)
    text = _TEXT.format(
        folder=str(folder), computing=computing, shares_memory=shares_memory,
        has_place_in_gather=has_place_in_gather, are_nodes=are_nodes, notes_opens=notes_opens,
        has_layers=has_layers, has_base=has_base, base_changes=base_changes, pace_s=pace_s,
    )  # fmt: skip
    (folder / "task.py").write_text(text)
    return f"{folder / 'task.py'}:Run"


def living(folder: Path) -> list[int]:
    """The processes that have computed samples and live."""
    return [pid for pid in _computed(folder) if _is_alive(pid)]


def _computed(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("computed-*"))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class Computed:
    """The forwards of one process: lives (from the start or the newest state on), and the samples of each forward."""

    pid: int
    lives: list[list[list[int]]]

    def steps(self, samples_of: list[set[int]], *, back: int = 0) -> list[list[int]]:
        """By life: the step, from 1, of each forward; `samples_of` are the samples of the steps.

        An epoch has every sample once, so a forward belongs to the first step that has its samples, from the one before
        on, or from `back` steps before that.
        """
        found = []
        for forwards in self.lives:
            steps, at = [], 0
            for numbers in forwards:
                at = next(
                    step for step in range(max(0, at - back), len(samples_of)) if samples_of[step] >= set(numbers)
                )
                steps.append(at + 1)
            found.append(steps)
        return found


def read_computed(folder: Path) -> list[Computed]:
    """What all processes of a run have computed."""
    found = []
    for pid in _computed(folder):
        lives: dict[int, list[list[int]]] = {}
        for line in (folder / f"computed-{pid}").read_text().splitlines():
            life, numbers = json.loads(line)
            lives.setdefault(life, []).append(numbers)
        found.append(Computed(pid, list(lives.values())))
    return found
