"""Measurements of the costs of saves: durations round by round, as plain numbers.

Responsible for: the order of events. Knows no ratios. The one idea: all savers take turns in one process, the order
changes from round to round, and no saver leaves files or dirty pages for the next. Only memory is measured
from outside, over loops in separate processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import resident
import torch
from saving import SAVERS, SHAPES, Dcp, HetSeq, InMemory, Loop, Saver, TorchSave, write_plain

RUN_SAVES = 4
CALM_STEPS = 4
EVERY_STEPS = 8  # of a block
MEMORY_STEPS, MEMORY_SAVES = 12, (2, 5, 8)
GROWTHS = 3  # later saves of a loop whose growth is measured
SAMPLED_S = 0.03
SCRIPT = Path(__file__).with_name("checkpoint.py")


@dataclass(frozen=True)
class Taken:
    """The time of a piece of work: wall, CPU of all threads of this process, and CPU of the training thread."""

    wall_s: float
    cpu_s: float
    thread_s: float


@dataclass(frozen=True)
class Beside:
    """Steps before a save, and steps that began during it, of which the first waits for the copy."""

    calm: list[Taken]
    busy: list[Taken]

    @property
    def wall(self) -> float:
        """How much longer a step takes during a save, stall included."""
        return mean(self.busy, "wall_s") / mean(self.calm, "wall_s")

    @property
    def cpu(self) -> float:
        """How much more CPU time the process takes for a step during a save, copy included."""
        return mean(self.busy, "cpu_s") / mean(self.calm, "cpu_s")

    @property
    def thread(self) -> float:
        """How much more CPU time the training thread takes for a step while the save is being written."""
        later = self.busy[1:] or self.busy
        return median(later, "thread_s") / median(self.calm, "thread_s")

    @property
    def extra_s(self) -> float:
        """The total time that the save added to training."""
        return len(self.busy) * (mean(self.busy, "wall_s") - mean(self.calm, "wall_s"))


@dataclass(frozen=True)
class Block:
    """Successive steps: their time, how many there were, and how many left a state in memory."""

    taken: Taken
    steps: int
    kept: int
    waited_s: float  # of the wall time, before updates


def turns(names: Sequence[str], number: int) -> list[str]:
    """The names, rotated each round."""
    begin = number % len(names)
    return [*names[begin:], *names[:begin]]


def build(kinds: Sequence[Callable[..., Saver]], loop: Loop, folder: Path) -> dict[str, Saver]:
    """Savers by name, each in a folder of its own, after an uncounted save of each."""
    savers = {}
    for number, kind in enumerate(kinds):
        saver = kind(loop, folder / str(number))
        savers[saver.name] = saver
        for _ in range(2):  # the second one finds memory and processes of the first
            save_in_loop(loop, saver)
    return savers


def save_in_loop(loop: Loop, saver: Saver) -> float:
    """One save, and steps until it is over; the seconds for which it blocked the loop."""
    before_s = loop.waited_s
    loop.before_update = saver.settle
    began = time.perf_counter()
    saver.begin()
    stall_s = time.perf_counter() - began
    while True:
        loop.step()
        saver.poll()
        if not saver.is_underway:
            break
    loop.before_update = lambda: None
    saver.clear()
    return stall_s + loop.waited_s - before_s


# Stall.


def measure_stall(loop: Loop, rounds: int, folder: Path) -> list[dict[str, float]]:
    """Seconds for which each saver blocked the loop, round by round."""
    savers = build([HetSeq, TorchSave, Dcp], loop, folder)
    seen = []
    for number in range(rounds):
        stalls = {}
        for name in turns(list(savers), number):
            os.sync()
            loop.step()
            stalls[name] = save_in_loop(loop, savers[name])
        seen.append(stalls)
    for saver in savers.values():
        saver.close()
    return seen


# A copy that no training hides.


def measure_copy(loop: Loop, rounds: int, folder: Path) -> list[dict[str, float]]:
    """Seconds of a save until the state may change, and of one flat copy of as many bytes into warm memory."""
    (saver,) = build([HetSeq], loop, folder).values()
    source, target = (torch.zeros(loop.bytes(), dtype=torch.uint8).fill_(1) for _ in range(2))
    seen = []
    for number in range(2 * rounds):
        taken = {}
        for name in turns(["HetSeq", "flat"], number):
            began = time.perf_counter()
            if name == "flat":
                target.copy_(source)
            else:
                saver.begin()
                saver.settle()
            taken[name] = time.perf_counter() - began
            if name == "HetSeq":
                saver.finish()
                saver.clear()
        seen.append(taken)
    saver.close()
    return seen


# Memory.


def inner(arguments: argparse.Namespace, folder: Path) -> None:
    """The loop that `memory` measures: reports its begin, its end, and its growth at later saves."""
    loop = Loop(SHAPES[arguments.shape], rows=arguments.rows, length=arguments.tokens)
    saver = None if arguments.inner == "none" else SAVERS[arguments.inner](loop, folder / "saver")
    print("begun", flush=True)
    for step in range(MEMORY_STEPS):
        if saver is not None and step in MEMORY_SAVES:
            saver.finish()
            loop.before_update = saver.settle
            saver.begin()
        loop.step()
        if saver is not None:
            saver.poll()
    if saver is not None:
        saver.finish()
    print("over", flush=True)
    grown = [resident.growth_bytes(lambda: _save_alone(saver)) for _ in range(GROWTHS)] if saver is not None else []
    print(json.dumps(grown), flush=True)
    if saver is not None:
        saver.close()


def _save_alone(saver: Saver | None) -> None:
    assert saver is not None
    saver.begin()
    saver.finish()


def watch_memory(arguments: argparse.Namespace, shape: str, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Of loops in processes of their own, by saver: the highest sum of PSS, and the growths of later saves; bytes."""
    seen = []
    for number in range(rounds):
        taken: dict[str, Any] = {}
        for name in turns(["none", "HetSeq", "DCP async"], number):
            words = [sys.executable, str(SCRIPT), "--inner", name, "--directory", str(folder), "--shape", shape]
            words += ["--rows", str(arguments.rows), "--tokens", str(arguments.tokens)]
            said = folder / "said"
            with open(said, "wb") as file, subprocess.Popen(words, stdout=file) as child:
                taken[name] = _watch(child, said)
        seen.append(taken)
    return seen


def _watch(child: subprocess.Popen[bytes], said: Path) -> tuple[int, list[int]]:
    peak = 0
    while child.poll() is None:
        words = said.read_text().split()
        if "begun" in words and "over" not in words:
            peak = max(peak, resident.pss_bytes(child.pid))
        time.sleep(SAMPLED_S)
    if child.returncode:
        raise SystemExit(f"the measured loop ended with {child.returncode}")
    return peak, json.loads(said.read_text().splitlines()[-1])


def state_bytes(shape: str) -> int:
    """Of the state of a loop of this shape."""
    return Loop(SHAPES[shape], rows=1, length=8).bytes()


# Steps beside a save.


def measure_steps(loop: Loop, rounds: int, folder: Path) -> list[dict[str, Beside]]:
    """Steps of the training thread on one core, the others free, before and during a save."""
    savers = build([HetSeq, Dcp], loop, folder)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # this thread; those that save began before
    seen = []
    for number in range(rounds):
        taken = {}
        for name in turns(list(savers), number):
            os.sync()
            taken[name] = _steps_beside(loop, savers[name])
        seen.append(taken)
    os.sched_setaffinity(0, cores)
    for saver in savers.values():
        saver.close()
    return seen


def _steps_beside(loop: Loop, saver: Saver) -> Beside:
    def polled() -> None:
        loop.step()
        saver.poll()

    def begun() -> None:
        saver.begin()
        polled()

    polled()
    calm = [time_of(polled) for _ in range(CALM_STEPS)]
    loop.before_update = saver.settle
    busy = [time_of(begun)]
    while saver.is_underway:
        busy.append(time_of(polled))
    loop.before_update = lambda: None
    saver.clear()
    return Beside(calm, busy)


def time_of(action: Callable[[], object]) -> Taken:
    """The time of one call."""
    wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
    action()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - thread)


# Throughput.


def measure_throughput(loop: Loop, rounds: int, folder: Path) -> list[dict[str, float]]:
    """Seconds from `begin` to the commit, and of writing as many bytes from memory into a file and flushing it."""
    (saver,) = build([lambda *where: HetSeq(*where, is_polite=False)], loop, folder).values()
    data = memoryview(bytearray(os.urandom(1 << 20) * -(-loop.bytes() // (1 << 20))))[: loop.bytes()]
    path = folder / "plain"

    def plain() -> None:
        write_plain(path, data)

    seen = []
    for number in range(rounds):
        taken = {}
        for name in turns(["HetSeq", "plain"], number):
            if name == "plain":
                # once before, uncounted: a virtual machine takes back what its page cache left, and giving it again
                # made this first one up to four times slower. HetSeq needs too little of that memory to notice
                plain()
                path.unlink()
            os.sync()
            taken[name] = time_of(plain if name == "plain" else lambda: _save_alone(saver)).wall_s
            path.unlink() if name == "plain" else saver.clear()
        seen.append(taken)
    saver.close()
    return seen


# A run.


def measure_run(loop: Loop, steps: int, rounds: int, folder: Path) -> list[dict[str, Taken]]:
    """Times of runs of `steps` steps, with four saves or with none."""
    savers = build([HetSeq, TorchSave], loop, folder)
    seen = []
    for number in range(rounds):
        taken = {}
        for name in turns(["none", *savers], number):
            os.sync()
            taken[name] = time_of(partial(run, loop, steps, savers.get(name)))
            for saver in savers.values():
                saver.clear()
        seen.append(taken)
    for saver in savers.values():
        saver.close()
    return seen


def run(loop: Loop, steps: int, saver: Saver | None) -> None:
    """That many steps, with four saves spread over them, all finished at the end."""
    due = {steps * number // (RUN_SAVES + 1) for number in range(1, RUN_SAVES + 1)} if saver is not None else set()
    for step in range(steps):
        if saver is not None and step in due:
            saver.finish()
            loop.before_update = saver.settle
            saver.begin()
        loop.step()
        if saver is not None:
            saver.poll()
    if saver is not None:
        saver.finish()
    loop.before_update = lambda: None


# A state in memory after every step.


def measure_every(loop: Loop, rounds: int, folder: Path) -> list[dict[str, Block]]:
    """Blocks of steps that keep their states in memory, and blocks that do not, round by round."""
    saver = InMemory(loop, folder / "memory")
    try:
        run_block(loop, 1, saver)  # the first copies into each slot
        return [
            {
                name: run_block(loop, EVERY_STEPS, saver if name == saver.name else None)
                for name in turns(["none", saver.name], number)
            }
            for number in range(rounds)
        ]
    finally:
        saver.close()


def run_block(loop: Loop, steps: int, saver: InMemory | None) -> Block:
    """That many steps, each including the copy and seal of the step before."""

    def take(number: int) -> None:
        for _ in range(number):
            loop.step()
            if saver is not None:
                saver.begin()

    if saver is not None:
        loop.before_update = saver.settle
    take(1)  # not counted: a copy is under way now, as after the last step that is
    kept, waited_s = saver.saves if saver is not None else 0, loop.waited_s
    taken = time_of(lambda: take(steps))
    block = Block(taken, steps, saver.saves - kept if saver is not None else 0, loop.waited_s - waited_s)
    if saver is not None:
        saver.finish()
    loop.before_update = lambda: None
    return block


def mean(taken: Sequence[Taken], kind: str) -> float:
    """Of one of the three times."""
    return statistics.fmean(getattr(one, kind) for one in taken)


def median(taken: Sequence[Taken], kind: str) -> float:
    """Of one of the three times."""
    return float(statistics.median(getattr(one, kind) for one in taken))


def stretch(taken: Sequence[Taken]) -> float:
    """Wall time over CPU time: above 1.1 another process used the core."""
    return mean(taken, "wall_s") / mean(taken, "cpu_s")


def mean_steps(besides: Sequence[Beside]) -> float:
    """Steps that began while a save was under way."""
    return statistics.fmean(len(beside.busy) for beside in besides)
