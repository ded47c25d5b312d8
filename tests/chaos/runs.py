"""One run among faults, and its comparison with a run without any.

`Chaos` starts whole commands (launcher, coordinator, workers, writers) in warm processes, so that a run takes seconds.
A schedule is a pure function of its seed. `verdict` compares a run with the undisturbed one: losses, samples,
parameters, and leftovers.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetseq.checkpoint import CheckpointManager, Retention
from hetseq.checkpoint.leftover_memory import await_writers
from hetseq.comm.group import LocalGroup
from hetseq.monitor.metrics import read_events, read_rows
from hetseq.run_directory import RunDirectory
from tests.chaos.killers import Killer, OneByOne
from tests.chaos.ledger_task import Ledger
from tests.support.commands import _size, _text
from tests.support.nodes import Process, living_under

TASK = f"{Path(__file__).with_name('ledger_task.py')}:{Ledger.__name__}"
STEPS, BATCH = 120, 24
LOSS_BAR, PARAMETER_BAR = 1e-11, 1e-12
_DEADLINE_S = 120.0
_WRITERS_S = 65.0


def words(save_dir: Path, *, ranks: int, steps: int = STEPS, **more: Any) -> list[str]:
    """The options of a chaos run."""
    options: dict[str, Any] = {
        "task": TASK, "global_batch_size": BATCH, "max_update": steps, "lr": 0.003, "lr_scheduler": "constant",
        "optimizer": "adamw", "weight_decay": 0.01, "clip_norm": 1.0, "precision": "fp64", "num_workers": 0,
        "distributed_world_size": ranks, "max_restarts": 1000, "save_dir": save_dir, "log_interval": 1000,
        "optimizer_overrides": "{'eps': 1e-3}", **more,  # which a process that comes later must not forget
    }  # fmt: skip
    flags = ["--cpu", "--disable-validation"]
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def options_of(seed: int) -> dict[str, Any]:
    """How many ranks a run of this seed has, and how unequal their shares are."""
    chance = random.Random(seed)
    ranks = chance.choice([3, 4, 5])
    weights = ",".join(str(chance.randint(1, 4)) for _ in range(ranks))
    return {"ranks": ranks, "balance": weights if chance.random() < 0.7 else "auto"}


@dataclass
class Outcome:
    """The results of a run."""

    code: int
    said: str
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    seconds: float
    kills: int = 0
    left: list[int] = field(default_factory=list)  # processes

    @property
    def recoveries(self) -> list[float]:
        """Seconds of each recovery with survivors, from the loss until they trained again."""
        return [event["seconds"] for event in self.events if event["event"] == "generation" and event["seconds"]]


def stack_of(pid: int) -> str:
    """Where a process hangs, if py-spy is there to tell."""
    if (program := shutil.which("py-spy")) is None:
        return f"process {pid}: install py-spy to see where it hangs"
    told = subprocess.run([program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=30.0)
    return told.stdout + told.stderr


class Chaos:
    """Warm processes for whole runs, one after the other."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self._folder, self._count = folder, 0
        self._process = Process({"HOME": str(folder), **(environment or {})})

    def close(self) -> None:
        self._process.close()

    def run(self, killer: Killer | OneByOne | None = None, *, faults: str = "", **options: Any) -> Outcome:
        """One run to its end, with `killer` at work beside it, or with a schedule of faults."""
        self._count += 1
        save_dir, process = self.newest, self._process
        seen, before = (_size(process.out), _size(process.err)), living_under(process.pid)
        began = time.monotonic()
        environment = {"HETSEQ_FAULTS": faults} if faults else {}
        process.request(["train", *words(save_dir, **options)], cwd=self._folder, environment=environment)
        while (code := process.reply()) is None:
            if killer is not None:
                killer.act(save_dir)
            if time.monotonic() - began > _DEADLINE_S:
                living = sorted(living_under(process.pid) - before)
                stacks = "\n".join(map(stack_of, [process.pid, *living]))
                raise AssertionError(f"hangs: {self._said(seen)}\nprocesses {living}\n{stacks}")
            time.sleep(0.002)
        # a writer whose trainer was killed may have something to finish, for a minute at most
        await_writers(RunDirectory(save_dir).run_id, patience_s=_WRITERS_S)
        return Outcome(
            code, self._said(seen), _rows(save_dir), _events(save_dir), _tensors(save_dir),
            time.monotonic() - began, killer.kills if killer else 0, _left(process.pid, before),
        )  # fmt: skip

    @property
    def newest(self) -> Path:
        """The run directory of the newest run."""
        return self._folder / f"run-{self._count}"

    def _said(self, seen: tuple[int, int]) -> str:
        return _text(self._process.out, seen[0]) + _text(self._process.err, seen[1])


def _left(pid: int, before: frozenset[int]) -> list[int]:
    """Processes that a finished run has left behind, once they have had the time to go."""
    deadline = time.monotonic() + 5.0
    while (left := living_under(pid) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(left)


def _rows(save_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(save_dir / "metrics.jsonl") if "loss" in row]


def _events(save_dir: Path) -> list[dict[str, Any]]:
    return read_events(save_dir / "events.jsonl")


def _tensors(save_dir: Path) -> dict[str, torch.Tensor]:
    directory = RunDirectory(save_dir)
    loaded = CheckpointManager(
        directory.path, run_id=directory.run_id, group=LocalGroup(), retention=Retention()
    ).load()  # fmt: skip
    return {} if loaded is None else loaded.tensors


def verdict(found: Outcome, reference: Outcome) -> str:
    """The faults of a run; none if it equals the undisturbed one."""
    if found.code != reference.code:
        return f"exit code {found.code}: {found.said}"
    steps = [row["step"] for row in found.rows]
    if steps != [row["step"] for row in reference.rows]:
        return f"steps {steps}"
    for row, expected in zip(found.rows, reference.rows):
        if not abs(row["loss"] - expected["loss"]) <= LOSS_BAR * abs(expected["loss"]):
            return f"step {row['step']}: loss {row['loss']!r}, expected {expected['loss']!r}"
        if ledger(row) != ledger(expected):
            return f"step {row['step']} took other samples"
    distance = parameter_distance(found, reference)
    if not distance <= PARAMETER_BAR:
        return f"parameters are {distance:.1e} apart"
    return f"left processes {found.left}" if found.left else ""


def ledger(row: dict[str, Any]) -> tuple[float, float]:
    """The sum of the numbers of the samples that a step has taken, and how many they were."""
    return round(row["terms"]["ledger"] * row["counts"]["ledger"]), row["counts"]["loss"]


def parameter_distance(found: Outcome, reference: Outcome) -> float:
    """The norm of the difference of all parameters over the norm of them."""
    names = [name for name in reference.tensors if name.startswith("model.")]
    flat, expected = (
        torch.cat([run.tensors[name].flatten() for name in names]) if set(names) <= set(run.tensors) else None
        for run in (found, reference)
    )
    if flat is None or expected is None:
        return float("inf")
    return float((flat - expected).norm() / expected.norm())
