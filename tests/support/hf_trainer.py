"""Trainings by Hugging Face's Trainer and by HetSeqTrainer, and what is compared of them.

With HETSEQ_TEST_TRANSFORMERS=FOLDER they use the transformers of that folder, made by `pip install --no-deps --target
FOLDER transformers==4.57.6 'huggingface_hub<1' 'tokenizers<=0.23.0'`. Continuous integration has the installed one.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from hetseq.monitor.metrics import read_rows
from tests.support.commands import HETSEQ, ROOT, Finished, run_command

SCRIPT = ROOT / "tests" / "support" / "loops" / "hf_script.py"
BATCHES = 8  # of an epoch: 75 samples by 10
Settings = dict[str, Any]
Event = tuple[str, int, float | None]


def train_alone(folder: Path, kind: str, settings: Settings) -> Finished:
    """`python script.py` with the Trainer of this name."""
    folder.mkdir(exist_ok=True)
    words = [str(SCRIPT), str(folder), kind, json.dumps(settings)]
    return run_command(words, program=(sys.executable,), timeout_s=120)


def train_ranks(folder: Path, settings: Settings, *options: object, event: str = "") -> Finished:
    """`hetseq run` of the script with HetSeqTrainer."""
    folder.mkdir(exist_ok=True)
    return run_command(
        ranks_words(folder, settings, *options, event=event), program=HETSEQ, timeout_s=180, is_cold=False
    )


def ranks_words(folder: Path, settings: Settings, *options: object, event: str = "") -> list[str]:
    """The command of `train_ranks`."""
    words = ["run", "--cpu", *options, "--save-dir", folder / "run", SCRIPT, folder, "HetSeqTrainer"]
    return [*map(str, words), json.dumps(settings), *([event] if event else [])]


def result(folder: Path, kind: str) -> dict[str, Any]:
    """What the first rank has written behind the training."""
    found: dict[str, Any] = json.loads((folder / f"{kind}.json").read_text())
    return found


def version(folder: Path) -> str:
    """Which transformers trained with HetSeqTrainer."""
    return f"transformers {result(folder, 'HetSeqTrainer')['version']}"


def losses_of_trainer(folder: Path, accumulation: int) -> list[float]:
    """The loss of each step, which the Trainer adds up over micro-batches."""
    parts = iter(result(folder, "Trainer")["losses"])
    found = []
    while True:
        for first in range(0, BATCHES, accumulation):
            step = list(islice(parts, min(accumulation, BATCHES - first)))
            if not step:
                return found
            found.append(sum(step))


def losses(run: Path) -> list[float]:
    """The loss of each step as the run directory has it."""
    return [row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row]


def farthest(one: list[float], other: list[float]) -> float:
    """The largest difference, as a share of the number."""
    return max(abs(x - y) / max(1.0, abs(x)) for x, y in zip(one, other, strict=True))


def courses(folder: Path) -> list[list[dict[str, Any]]]:
    """The events that the callbacks of each process have seen."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("course-*"))]


def events(course: list[dict[str, Any]]) -> list[Event]:
    """What happened, after which step and at which part of an epoch."""
    return [(row["event"], row["step"], row["epoch"]) for row in course]


def numbers(course: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """The learning rates and sums of weights of a course, by kind and step."""
    return {(kind, row["step"]): row[kind] for row in course if "lr" in row for kind in ("lr", "weights")}


def farthest_numbers(whole: list[dict[str, Any]], part: list[dict[str, Any]]) -> float:
    """The largest difference of two courses in what the second one has."""
    known, found = numbers(whole), numbers(part)
    return farthest([known[key] for key in found], list(found.values())) if found else 0.0


def plain_history(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log_history without times, and without the operations, which HetSeqTrainer does not count."""
    told = ("_runtime", "_per_second", "total_flos")
    return [{key: value for key, value in entry.items() if not key.endswith(told)} for entry in history]
