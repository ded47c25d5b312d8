"""A start that HetSeq rejects, and the expected form of the error; used by the tests of bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from hetseq.errors import RendezvousError
from tests.support.commands import Finished, WarmLauncher

PROMISE_S = 10.0
# Of a command that must import everything first: 4 s alone, 8 s beside one other job, 17 s at a load of 7 on two cores.
COLD_S = 30.0
TWO = ("--distributed-world-size", "2")
BASE = ("--cpu", "--batch-size", "4", "--max-update", "3", "--lr", "0.001", "--lr-scheduler", "constant")
SQUARES = '((model(sample["x"]).squeeze(1) - sample["y"]) ** 2)'


def on_one_and_some_on(world: tuple[str, ...], cases: Iterable[object], *often: object) -> list[Any]:
    """(case, words) as parameters: each case on one rank, and on the larger world if in `often`, else nightly."""
    found: list[Any] = []
    for case in cases:
        found += [(case, ()), pytest.param(case, world, marks=[] if case in often else [pytest.mark.nightly])]
    return found


def train(warm: WarmLauncher, tmp_path: Path, *args: object, base: tuple[str, ...] = BASE) -> Finished:
    """One training command with the run directory `run`."""
    return warm.run(["train", *base, "--save-dir", str(tmp_path / "run"), *map(str, args)])


def check_refusal(finished: Finished, *words: str, code: int = 2, within_s: float = PROMISE_S) -> str:
    """The one message of a refusal, after checking that it is one: said once, in words, soon, with its exit code."""
    everything = finished.out + finished.err
    heads = re.findall(r"\bhetseq(?: [a-z]+)?: ", finished.err)
    assert len(heads) == 1, f"no message, or several: {everything}"
    message = finished.err.partition(heads[0])[2]
    assert finished.code == code, everything
    assert "Traceback" not in everything
    first_line = message.splitlines()[0]
    assert everything.count(first_line) == 1, f"said more than once: {everything}"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert finished.seconds < within_s
    return message


def rows(save_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (save_dir / "metrics.jsonl").read_text().splitlines()]


def contents(save_dir: Path) -> dict[str, bytes]:
    """Every file that a refused start must not touch; logs grow with every start."""
    files = [path for path in save_dir.rglob("*") if path.is_file() and path.parent.name != "log"]
    return {str(path.relative_to(save_dir)): path.read_bytes() for path in files if path.name != ".lock"}


_BODIES = {
    "load_dataset": "return [sample(index) for index in range(36)]",
    "build_model": "return torch.nn.Linear(3, 1)",
    "loss": 'return {"loss": ((model(sample["x"]).squeeze(1) - sample["y"]) ** 2).sum()}',
    "count": "return None",
}
_HEADS = {
    "load_dataset": "def load_dataset(self, split):",
    "build_model": "def build_model(self):",
    "loss": "def loss(self, model, sample):",
    "count": "def count(self, sample):",
    "predictions": "def predictions(self, model, sample):",
    "train_step": "def train_step(self, sample, model, optimizer):",
}
_TOP = """import torch
from hetseq import Task

def sample(index):
    return {"x": torch.full((3,), index / 36), "y": torch.tensor(index / 36), "index": torch.tensor(index)}

class Toy(Task):
"""


def write_task(folder: Path, *, name: str = "task", **bodies: str) -> Path:
    """A file with a good task of 36 samples, or one whose named methods have other bodies."""
    parts = [f"    {_HEADS[method]}\n        {body}\n" for method, body in {**_BODIES, **bodies}.items()]
    path = folder / f"{name}.py"
    path.write_text(_TOP + "\n".join(parts))
    return path


def refusal(action: Callable[[], object], *expected: str) -> None:
    """`action` raises RendezvousError with a message that contains the expected words."""
    with pytest.raises(RendezvousError) as caught:
        action()
    for words in expected:
        assert words in str(caught.value)
