"""Predictions of `hetseq plan` against real runs: actual command lines, several ranks of this machine.

    python bench/plan.py [--rounds 1] [--batch 64] [--steps 30]

Three cases, each with a measured run, a question about it, and a run that answers the question:

* 1:3 with measured shares: what does rank 0 do without rank 1?
* 1:1 with measured shares: what if a third rank came that is half as fast as they are?
* 1:3 with equal shares: what would the best shares give? They then serve as weights of a run.

Every rank is slowed down at least 16 times, so that five of them hardly meet on the cores of a small machine. The
measured run continues during the other one, and the question is about its steps in that time: machines are sometimes
a tenth faster or slower for minutes, which no plan can predict. The step time of a run is the median of its last
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import random_images

ROOT = Path(__file__).resolve().parents[1]
SLOWED = 16.0  # the throttle of a rank of speed 1, which sleeps fifteen sixteenths of its time
LAST_STEPS = 20
FIRST_STEPS = 15  # of the measured run, before the first question
MOST_STEPS = 1_000_000  # it is ended by a signal
MOST_LOAD = 1.0  # running programs per core over the last minute: above it, others affected the times
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Case:
    """A run, the words of a question to `hetseq plan`, and the run that answers it; runs as slow-downs by rank."""

    name: str
    measured: tuple[float, ...]
    balance: str
    question: tuple[str, ...]
    answered: tuple[float, ...]
    with_predicted_weights: bool = False


CASES = (
    Case("1:3, without the slow one", (1, 3), "auto", ("--without", "1"), (1,)),
    Case("1:1, and one half as fast", (1, 1), "auto", ("--add", "third:0.5"), (1, 1, 2)),
    Case("1:3 in equal shares, the best ones", (1, 3), "equal", (), (1, 3), with_predicted_weights=True),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for case in CASES:
            with tempfile.TemporaryDirectory(prefix="hetseq-plan-") as folder:
                rows.append({"round": number + 1, **compare(case, Path(folder), arguments.batch, arguments.steps)})
            mark = "" if rows[-1]["load"] <= MOST_LOAD else f" (load {rows[-1]['load']:.1f} per core: this says little)"
            print(f"round {number + 1}, {case.name}: {rows[-1]['ratio']:.3f}{mark}", flush=True)
    print()
    heads = ("case", "measured step", "predicted", "then made", "predicted / made")
    print(figures.table(heads, [cells(case.name, rows) for case in CASES]))
    print(figures.json_line("plan", vars(arguments), rows))


def cells(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of the table: medians over the rounds."""
    own = [row for row in rows if row["case"] == name]
    seconds = [statistics.median(row[key] for row in own) for key in ("measured_s", "predicted_s", "made_s")]
    ratios = figures.spread([row["ratio"] for row in own])
    return [name, *(f"{value * 1e3:.0f} ms" for value in seconds), ratios.shown(".3f")]


def compare(case: Case, folder: Path, batch: int, steps: int) -> dict[str, Any]:
    """One case once."""
    with going_on(folder / "measured", training(folder / "measured", case.measured, case.balance, batch, MOST_STEPS)):
        weights = ",".join(map(str, ask(folder / "measured", case)["shares"]))
        balance = weights if case.with_predicted_weights else "auto"
        hetseq(*training(folder / "made", case.answered, balance, batch, steps))
    asked, made_s = ask(folder / "measured", case), step_s(folder / "made")
    return {
        "case": case.name, "measured_s": step_s(folder / "measured"), "predicted_s": asked["step_s"],
        "made_s": made_s, "ratio": asked["step_s"] / made_s, "predicted_shares": asked["shares"],
        "load": os.getloadavg()[0] / len(os.sched_getaffinity(0)),
        "made_shares": rows_of(folder / "made")[-1]["shares"],
    }  # fmt: skip


def ask(run: Path, case: Case) -> dict[str, Any]:
    """`hetseq plan`'s answer to a case's question; without a question: the result of the best shares."""
    scenario: dict[str, Any] = json.loads(hetseq("plan", str(run), *case.question, "--json"))["scenarios"][-1]
    return scenario


def training(folder: Path, factors: Sequence[float], balance: str, batch: int, steps: int) -> list[str]:
    """The words of a run of as many ranks as there are factors, each with its own slow-down."""
    throttle = ",".join(f"{rank}:{SLOWED * factor:g}" for rank, factor in enumerate(factors))
    return [
        "train", "--task", f"{random_images.__file__}:RandomImageTask", "--cpu", "--global-batch-size", str(batch),
        "--max-sentences", str(max(1, 3 * batch // 8)),  # half a step is cut unevenly: that tells the costs apart
        "--max-update", str(steps), "--distributed-world-size", str(len(factors)), "--throttle", throttle,
        "--balance", balance, "--optimizer", "sgd", "--lr", "0.01", "--disable-validation", "--no-save",
        "--log-format", "none", "--save-dir", str(folder),
    ]  # fmt: skip


def hetseq(*words: str) -> str:
    """The output of a command; if it fails, ends the script with the error."""
    ended = subprocess.run(
        [sys.executable, "-m", "hetseq", *words],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if ended.returncode:
        sys.exit(f"hetseq {' '.join(words)}\nended with {ended.returncode}: {ended.stderr}")
    return ended.stdout


@contextmanager
def going_on(run: Path, words: Sequence[str]) -> Iterator[None]:
    """A run that has made its first steps, ended afterwards as by Ctrl-C."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "hetseq", *words], cwd=ROOT, env=environment(), stdout=said, stderr=said
        )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while len(rows_of(run)) < FIRST_STEPS:
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    sys.exit(f"hetseq {' '.join(words)}\nhas not made {FIRST_STEPS} steps: {said.read()}")
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()  # nothing, if it has ended


def environment() -> dict[str, str]:
    """Of every command."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def step_s(folder: Path) -> float:
    """Seconds of the median of the last steps of a run."""
    return statistics.median(float(row["seconds"]) for row in rows_of(folder)[-LAST_STEPS:])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of the steps of a run, as far as they are written; none before it has begun."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    main()
