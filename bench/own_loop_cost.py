"""The cost of a step in a script's own loop over the same step in `hetseq train`: CPU time, whole runs in turn.

    python bench/own_loop_cost.py [--batch 256] [--steps 40] [--rounds 7]

Both train the net of `random_images` on one CPU rank, with the same data, optimizer, seed and options, so their losses
have to be equal. A worker's CPU time is read after each step. A run counts as the median of its steps after the first
ten, in which a task tries sizes of micro-batches and a script's loop is checked. A round is one run of each, in
changing order; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import figures
import torch
import workloads
from random_images import RandomImageTask

from hetseq import TrainedStep

ROOT, HERE = Path(__file__).resolve().parents[1], Path(__file__).resolve().parent
FILE = "HETSEQ_BENCH_STEPS"  # where `Timed` writes
WARM_UP = 10


class Timed(RandomImageTask):
    """The task of `random_images`, which writes the CPU time and the wall time after each step, and the loss."""

    def after_step(self, step: TrainedStep) -> None:
        with open(os.environ[FILE], "a") as lines:
            lines.write(f"{time.process_time()} {time.perf_counter()} {step.loss!r}\n")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=256, help="samples of a step")
    parser.add_argument("--steps", type=int, default=40, help=f"counted steps of a run, after {WARM_UP} others")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each")
    arguments = parser.parse_args(words)
    if min(arguments.batch, arguments.steps, arguments.rounds) < 1:
        parser.error("--batch, --steps and --rounds: expected numbers of at least 1")
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse()
    runs: dict[str, list[dict[str, float]]] = {"hetseq train": [], "own loop": []}
    gaps = []
    with tempfile.TemporaryDirectory(prefix="hetseq-own-loop-") as name:
        for number in range(arguments.rounds):
            curves = []
            for kind in sorted(runs, reverse=bool(number % 2)):
                taken, losses = one_run(kind, Path(name) / f"{number}-{kind.replace(' ', '-')}", arguments)
                runs[kind].append(taken)
                curves.append(losses)
            gaps.append(figures.largest_gap(curves))
    report(evaluate(runs, max(gaps)), arguments)


def one_run(kind: str, folder: Path, arguments: argparse.Namespace) -> tuple[dict[str, float], list[float]]:
    """Medians over the counted steps of one run: seconds of CPU, seconds; and its losses."""
    folder.mkdir()
    file, steps = folder / "steps", arguments.steps + WARM_UP
    words = ["--cpu", "--ranks", "1", "--save-dir", str(folder / "run"), "--no-save", "--noise-scale-every", "0"]
    words += ["--persistent-time-interval", "0", "--log-format", "none"]
    if kind == "own loop":
        command = ["run", *words, str(HERE / "own_loop.py"), str(steps), str(arguments.batch), str(file)]
    else:
        command = [
            "train", *words, "--task", f"{HERE / 'own_loop_cost.py'}:Timed", "--seed", "1", "--max-update", str(steps),
            "--global-batch-size", str(arguments.batch), "--optimizer", "adamw", "--lr", str(workloads.LEARNING_RATE),
            "--lr-scheduler", "constant", "--clip-norm", str(workloads.CLIP_NORM), "--disable-validation",
        ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", FILE: str(file)}
    ended = subprocess.run(
        [sys.executable, "-m", "hetseq", *command], env=environment, cwd=folder, capture_output=True, text=True
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{kind} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    rows = [[float(number) for number in line.split()] for line in file.read_text().splitlines()]
    assert len(rows) == steps, f"{kind}: {len(rows)} steps"
    cpu_s, wall_s = ([later[at] - row[at] for row, later in pairwise(rows)][WARM_UP - 1 :] for at in (0, 1))
    return {"cpu_s": statistics.median(cpu_s), "wall_s": statistics.median(wall_s)}, [row[2] for row in rows]


def evaluate(runs: dict[str, list[dict[str, float]]], gap: float) -> dict[str, Any]:
    """The figures of both; ratios above 1 where the own loop takes longer."""
    row: dict[str, Any] = {"what": "own loop", "loss_gap": gap}
    for key in ("cpu_s", "wall_s"):
        own, task = ([run[key] for run in runs[kind]] for kind in ("own loop", "hetseq train"))
        row |= {f"own {key}": figures.spread(own), f"train {key}": figures.spread(task)}
        row[f"own over train, {key}"] = figures.spread(figures.paired(own, task))
    every = [run for kind in runs.values() for run in kind]
    row["wall_to_cpu"] = figures.stretch(sum(run["wall_s"] for run in every), sum(run["cpu_s"] for run in every))
    return row


def report(row: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print a table, caveats, and the same as one line of JSON."""
    print(f"one rank, one thread, the MNIST net, {arguments.batch} samples a step, AdamW, torch {torch.__version__}")
    cells = [
        [kind, row[f"{key} cpu_s"].shown(".2f", 1e3), row[f"{key} wall_s"].shown(".2f", 1e3), str(row["own cpu_s"].n)]
        for kind, key in (("hetseq train", "train"), ("own loop", "own"))
    ]
    print(figures.table(["", "step, CPU ms", "step, wall ms", "runs"], cells))
    print(
        f"own loop over hetseq train: {row['own over train, cpu_s'].shown('.3f')} x its CPU time,"
        f" {row['own over train, wall_s'].shown('.3f')} x its wall time; losses differ by {row['loss_gap']:.1g} nats"
    )
    if mark := figures.busy_mark(row["wall_to_cpu"]):
        print(f"({mark}; CPU time suffers less)")
    print(figures.json_line("own_loop_cost", vars(arguments), [row]))


if __name__ == "__main__":
    main()
