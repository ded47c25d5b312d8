"""`hetseq demo`: two workers, one of them three times slower, first with equal shares and then with shares of 3:1.

The same digits are trained twice. The curves agree to rounding, since shares never change what a step computes; the
second run is faster, since nobody waits. Both run directories stay, to be looked at.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from hetseq import options
from hetseq.errors import HetSeqError
from hetseq.launch import launch
from hetseq.metrics import read_rows

_SLOW_DOWN = 3
_EPOCHS, _STEPS_PER_EPOCH = 12, 12  # 1,437 digits in batches of 128
_OPTIONS = (
    "--task mnist --cpu --distributed-world-size 2 --global-batch-size 128 --precision fp64 --dropout 0 --seed 1"
    f" --max-epoch {_EPOCHS} --optimizer sgd --lr 0.1 --momentum 0.9 --warmup-updates 10"
    f" --total-num-update {_EPOCHS * _STEPS_PER_EPOCH} --throttle 1:{_SLOW_DOWN} --validate-interval 4"
    f" --persistent-time-interval 0 --no-epoch-checkpoints --log-interval {4 * _STEPS_PER_EPOCH} --no-progress-bar"
)
_FIRST_STEPS = 20  # connections, caches and thread pools warm up


def run_demo() -> int:
    """Train both ways and print what differs; gives the exit code."""
    folder = _new_folder()
    print(f"two workers, rank 1 slowed down {_SLOW_DOWN} times on purpose; everything goes to {folder}\n")
    runs = {}
    for name, balance in (("equal", "equal"), ("3-to-1", f"{_SLOW_DOWN},1")):
        print(f"-- shares {balance} --", flush=True)
        runs[name] = _train(folder / name, balance)
        print(flush=True)
    equal, unequal = (_speed(rows) for rows in runs.values())
    pairs = zip(_losses(runs["equal"]), _losses(runs["3-to-1"]), strict=True)
    difference = max(abs(one - other) for one, other in pairs)
    accuracy = [row["valid_accuracy"] for row in runs["3-to-1"] if "valid_accuracy" in row][-1]
    print(f"accuracy on unseen digits           {accuracy:.1%}")
    print(f"largest difference of the curves    {difference:.1e} nats over {len(_losses(runs['equal']))} steps")
    print(f"speed with equal shares             {equal:,.0f} samples/s")
    gain = f"{unequal / equal:.2f} times as fast"
    print(f"speed with shares of {_SLOW_DOWN}:1             {unequal:,.0f} samples/s ({gain})")
    print(f"run directories                     {folder / 'equal'}, {folder / '3-to-1'}")
    return 0


def _new_folder() -> Path:
    """A fresh folder in ./runs, or where this folder cannot be written, among the temporary files."""
    try:
        Path("runs").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="demo-", dir="runs"))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hetseq-demo-"))


def _train(save_dir: Path, balance: str) -> list[dict[str, Any]]:
    ending = launch(options.parse([*_OPTIONS.split(), "--balance", balance, "--save-dir", str(save_dir)]))
    if ending.code:
        raise HetSeqError(f"the demo's run in {save_dir} failed: {ending.message}")
    return read_rows(save_dir / "metrics.jsonl")


def _losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def _speed(rows: list[dict[str, Any]]) -> float:
    """Samples per second of the median step."""
    steps = [row for row in rows if "loss" in row][_FIRST_STEPS:]
    return float(statistics.median(row["samples"] / row["seconds"] for row in steps))
