"""The cost of checkpoints: the stall of a save, its memory, the steps beside it, a whole run, and a start.

    python bench/checkpoint.py [--only stall throughput ...] [--rounds N] [--directory FOLDER]

stall        how long a save blocks the training loop: `begin`, and the wait before the next optimizer update
copy         the same without training to hide the copy, against one flat copy of as many bytes
memory       of all processes of a loop that saves, over one that does not; and the growth at later saves
steps        steps while a save is being written, on a core of their own, against the steps before it
throughput   bytes from memory to a commit, against writing and flushing the same bytes; at normal priority
run          a run with a state as large as GPT-2's and four saves, against one with none
every        steps that each leave their state in memory, against steps that do not; and how many of them did
restart      after a kill -9, a load from memory against one from a cold disk, each in a fresh process

HetSeq saves in the background as its trainer does. torch.save (flushed) and DCP's async save with its best stager save
the same state in the same loop, in the same process, in turn: ratios are taken within a round. Every figure has a bar,
and the table says whether it is met. The files of each save are removed before the next one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint_restart
import costs
import figures
import torch
from checkpoint_restart import Start
from costs import RUN_SAVES, Beside, Block, Taken
from figures import Spread
from saving import SAVERS, SHAPES, Loop, file_system

#: counted rounds of each part, and the state that it saves
PARTS = {
    "stall": (11, "small"),
    "copy": (11, "small"),
    "memory": (3, "small"),
    "steps": (11, "small"),
    "throughput": (7, "gpt2"),
    "run": (3, "gpt2"),
    "every": (11, "small"),
    "restart": (7, "gpt2"),
}
RUN_STEPS = 40


@dataclass(frozen=True)
class Figure:
    """One line of the table; `value` must stay below `bar`, or above it if `is_floor`."""

    part: str
    what: str
    value: Spread
    form: str  # of the value; as a percentage if it ends in %
    bar: float | None = None
    is_floor: bool = False
    beside: str = ""

    @property
    def verdict(self) -> str:
        """Whether the median holds the bar."""
        if self.bar is None:
            return ""
        return "yes" if (self.value.median >= self.bar if self.is_floor else self.value.median <= self.bar) else "NO"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    parser.add_argument("--rounds", type=int, help="counted rounds (default: by the part)")
    parser.add_argument("--shape", choices=SHAPES, help="of the model (default: by the part)")
    parser.add_argument("--rows", type=int, default=1, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=RUN_STEPS, help="of the part `run`")
    parser.add_argument("--directory", type=Path, help="where to save, on a disk (default: runs/ of this repository)")
    parser.add_argument("--inner", choices=["none", *SAVERS], help=argparse.SUPPRESS)  # the loop that `memory` watches
    arguments = parser.parse_args(words)
    if min(arguments.rounds or 1, arguments.rows, arguments.tokens) < 1 or arguments.steps < RUN_SAVES + 1:
        parser.error(f"--rounds, --rows, --tokens: expected at least 1; --steps: at least {RUN_SAVES + 1}")
    names = [arguments.shape] if arguments.shape else [PARTS[part][1] for part in arguments.only]
    if (longest := min(SHAPES[name].positions for name in names)) < arguments.tokens:
        parser.error(f"--tokens {arguments.tokens}: this shape has {longest} positions")
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse()
    torch.set_num_threads(1)
    with folder_of(arguments.directory) as folder:
        if arguments.inner:
            return costs.inner(arguments, folder)
        kind = file_system(folder)
        print(f"one process, one thread, torch {torch.__version__}; files on {kind}")
        if kind in ("tmpfs", "ramfs"):
            print("(that is memory, not a disk: give --directory)")
        found: list[Figure] = []
        for part in arguments.only:
            rounds, shape = arguments.rounds or PARTS[part][0], arguments.shape or PARTS[part][1]
            part_folder = folder / part
            part_folder.mkdir()
            new = measure(part, arguments, shape, rounds, part_folder)
            print(f"{part}: {shape}, {len(new)} figures", file=sys.stderr, flush=True)
            found += new
    report(found, {**vars(arguments), "file_system": kind})


@contextmanager
def folder_of(directory: Path | None) -> Iterator[Path]:
    """A new folder for the saves, removed at the end, as is runs/ if it did not exist before."""
    home = directory or Path(__file__).resolve().parents[1] / "runs"
    is_new = not home.exists()
    home.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=home) as name:
            yield Path(name)
    finally:
        if is_new and not any(home.iterdir()):
            home.rmdir()


def measure(part: str, arguments: argparse.Namespace, shape: str, rounds: int, folder: Path) -> list[Figure]:
    """The figures of one part."""
    if part == "memory":
        return memory_figures(costs.watch_memory(arguments, shape, rounds, folder), costs.state_bytes(shape))
    if part == "restart":
        return restart_figures(checkpoint_restart.measure(SHAPES[shape], rounds, folder))
    loop = Loop(SHAPES[shape], rows=arguments.rows, length=arguments.tokens)
    if part == "every":
        return every_figures(costs.measure_every(loop, rounds, folder), loop.bytes())
    if part == "stall":
        return stall_figures(costs.measure_stall(loop, rounds, folder), loop.bytes())
    if part == "copy":
        return copy_figures(costs.measure_copy(loop, rounds, folder))
    if part == "steps":
        return steps_figures(costs.measure_steps(loop, rounds, folder))
    if part == "throughput":
        return throughput_figures(costs.measure_throughput(loop, rounds, folder), loop.bytes())
    return run_figures(costs.measure_run(loop, arguments.steps, rounds, folder))


def stall_figures(seen: Sequence[Mapping[str, float]], size_bytes: int) -> list[Figure]:
    """HetSeq's stall as a share of the others'."""
    stalls = {name: [stall[name] for stall in seen] for name in seen[0]}
    ours, plain, dcp = (stalls[name] for name in ("HetSeq", "torch.save", "DCP async"))
    milliseconds = ", ".join(f"{name} {statistics.median(times) * 1e3:.1f}" for name, times in stalls.items())
    state = f"state {size_bytes / 1e9:.2f} GB; ms: {milliseconds}"
    return [
        Figure("stall", "of torch.save, flushed", spread_of(ours, plain), ".2%", 0.01, beside=state),
        Figure("stall", "of DCP's async save", spread_of(ours, dcp), ".3f", 1 / 3),
        Figure("stall", "DCP's, of torch.save", spread_of(dcp, plain), ".2%"),
    ]


def copy_figures(seen: Sequence[Mapping[str, float]]) -> list[Figure]:
    """The copy over a flat one."""
    ours, flat = ([taken[name] for taken in seen] for name in ("HetSeq", "flat"))
    both = f"ms: {statistics.median(ours) * 1e3:.1f} for {statistics.median(flat) * 1e3:.1f}"
    return [Figure("copy", "of one flat copy", spread_of(ours, flat), ".3f", 1.15, beside=both)]


def memory_figures(seen: Sequence[Mapping[str, Any]], size_bytes: int) -> list[Figure]:
    """Memory added by saving, in states."""

    def added(name: str) -> Spread:
        return figures.spread([(taken[name][0] - taken["none"][0]) / size_bytes for taken in seen])

    def grown(name: str) -> Spread:
        return figures.spread([growth / size_bytes for taken in seen for growth in taken[name][1]])

    return [
        Figure(
            "memory", "added, of the state", added("HetSeq"), ".3f", 1.05,
            beside=f"state {size_bytes / 1e9:.2f} GB; DCP {added('DCP async').shown('.2f')}",
        ),
        Figure(
            "memory", "growth at a later save, of the state", grown("HetSeq"), ".2%", 0.01,
            beside=f"DCP {grown('DCP async').shown('.2%')}",
        ),
    ]  # fmt: skip


def steps_figures(seen: Sequence[Mapping[str, Beside]]) -> list[Figure]:
    """Steps during a save over those before it, and HetSeq's over DCP's."""
    ours, dcp = ([taken[name] for taken in seen] for name in ("HetSeq", "DCP async"))
    calm = [step for taken in seen for beside in taken.values() for step in beside.calm]
    about = f"step {costs.median(calm, 'wall_s') * 1e3:.0f} ms, wall / CPU {costs.stretch(calm):.2f}"
    count = f"steps of a save: {costs.mean_steps(ours):.1f}, DCP {costs.mean_steps(dcp):.1f}"

    def over(kind: str) -> tuple[Spread, str]:
        one, other = ([getattr(beside, kind) for beside in besides] for besides in (ours, dcp))
        return figures.spread(one), f"DCP {figures.spread(other).shown('.3f')}"

    thread, cpu, wall, extra = over("thread"), over("cpu"), over("wall"), over("extra_s")
    against = spread_of([beside.wall for beside in ours], [beside.wall for beside in dcp])
    return [
        Figure("steps", "CPU time of the training thread", thread[0], ".3f", 1.03, beside=f"{thread[1]}; {about}"),
        Figure("steps", "CPU time of the process, copy included", cpu[0], ".3f", beside=cpu[1]),
        Figure("steps", "wall time, stall included", wall[0], ".3f", beside=f"{wall[1]}; {count}"),
        Figure("steps", "wall time, of DCP's", against, ".3f", 1.0),
        Figure("steps", "seconds that a save adds", extra[0], ".3f", beside=extra[1]),
    ]


def throughput_figures(seen: Sequence[Mapping[str, float]], size_bytes: int) -> list[Figure]:
    """HetSeq's over the plain one's."""
    ours, plain = ([taken[name] for taken in seen] for name in ("HetSeq", "plain"))
    speeds = ", ".join(f"{size_bytes / 1e9 / statistics.median(times):.2f}" for times in (ours, plain))
    both = f"{size_bytes / 1e9:.2f} GB; GB/s: {speeds}"
    return [Figure("throughput", "of a plain write", spread_of(plain, ours), ".3f", 0.9, is_floor=True, beside=both)]


def run_figures(seen: Sequence[Mapping[str, Taken]]) -> list[Figure]:
    """Runs with saves over runs without."""
    walls = {name: [taken[name].wall_s for taken in seen] for name in seen[0]}
    bare = [taken["none"] for taken in seen]
    plain = spread_of(walls["torch.save"], walls["none"]).shown(".3f")
    cpus = {name: [taken[name].cpu_s for taken in seen] for name in seen[0]}
    plain_cpu = spread_of(cpus["torch.save"], cpus["none"]).shown(".3f")
    about = f"run {costs.median(bare, 'wall_s'):.0f} s, wall / CPU {costs.stretch(bare):.2f}"
    return [
        Figure(
            "run", f"with {RUN_SAVES} saves, of none", spread_of(walls["HetSeq"], walls["none"]), ".3f", 1.02,
            beside=f"torch.save {plain}; {about}",
        ),
        Figure(
            "run", "the same, CPU time of the process", spread_of(cpus["HetSeq"], cpus["none"]), ".3f",
            beside=f"torch.save {plain_cpu}",
        ),
    ]  # fmt: skip


def every_figures(seen: Sequence[Mapping[str, Block]], size_bytes: int) -> list[Figure]:
    """Steps that keep their states over steps that do not; meaningful only if all states were kept."""
    ours, bare = ([taken[name] for taken in seen] for name in ("in memory", "none"))
    kept, steps = sum(block.kept for block in ours), sum(block.steps for block in ours)
    step_s = statistics.median(block.taken.wall_s / block.steps for block in bare)
    waited_s = sum(block.waited_s for block in ours) / steps
    stretch = costs.stretch([block.taken for block in bare])
    about = f"state {size_bytes / 1e9:.2f} GB; step {step_s * 1e3:.0f} ms, wall / CPU {stretch:.2f}"

    def over(kind: str) -> Spread:
        return spread_of(*([getattr(block.taken, kind) for block in blocks] for blocks in (ours, bare)))

    return [
        Figure("every", "state in memory after each step, of none", over("wall_s"), ".3f", 1.05, beside=about),
        Figure(
            "every", "the same, CPU time of the process", over("cpu_s"), ".3f",
            beside=f"wait before an update: {waited_s * 1e3:.1f} ms",
        ),
        Figure(
            "every", "states kept, of the steps", figures.spread([kept / steps]), ".1%", 1.0, is_floor=True,
            beside=f"{kept} of {steps}",
        ),
    ]  # fmt: skip


def restart_figures(seen: Sequence[Mapping[str, Start]]) -> list[Figure]:
    """Loads from memory over loads from the disk."""

    def over(kind: str) -> tuple[Spread, str]:
        memory, disk = ([taken[name + kind] for taken in seen] for name in ("memory", "disk"))
        walls, cpus = (
            ", ".join(f"{statistics.median(getattr(start, time) for start in starts):.2f}" for starts in (memory, disk))
            for time in ("wall_s", "cpu_s")
        )
        found = statistics.median(start.recover_s for start in memory)
        ratio = spread_of([start.wall_s for start in memory], [start.wall_s for start in disk])
        return ratio, f"s: {walls}; CPU {cpus}; to find it {found * 1e3:.0f} ms"

    (lent, about), (new, about_new) = over(""), over(", new")
    size_bytes = seen[0]["memory"].state_bytes
    return [
        Figure("restart", "of a cold disk", lent, ".3f", 0.25, beside=f"state {size_bytes / 1e9:.2f} GB; {about}"),
        Figure("restart", "the same, into new memory", new, ".3f", beside=about_new),
    ]


# Output.


def report(found: Sequence[Figure], settings: Mapping[str, Any]) -> None:
    """A table, and the same as one line of JSON."""
    heads = ["part", "HetSeq", "median (quartiles)", "bar", "holds", "beside", "n"]
    cells = [
        [
            figure.part, figure.what, figure.value.shown(figure.form),
            "" if figure.bar is None else f"{'>=' if figure.is_floor else '<='} {figure.bar:{figure.form}}",
            figure.verdict, figure.beside, str(figure.value.n),
        ]
        for figure in found
    ]  # fmt: skip
    print(figures.table(heads, cells))
    rows = [{**vars(figure), "holds": figure.verdict} for figure in found]
    print(figures.json_line("checkpoint", settings, rows))


def spread_of(ones: Sequence[float], others: Sequence[float]) -> Spread:
    """The spread of one / other of each round."""
    return figures.spread(figures.paired(ones, others))


if __name__ == "__main__":
    main()
