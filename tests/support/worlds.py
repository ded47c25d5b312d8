"""One run on many worlds: a task with dropout that pauses where the test kills it, and the comparison of its result.

`--data DIR/plan.json` says where: {"holds": {"13": "forward"}} stops the first rank that begins a forward after 13
updates, for ever and only once in the life of the run; "update" stops it after that update, before anything is saved or
reported. It leaves the file `held-13` in DIR, so a test finds its victim without guessing. The other ranks
continue as far as they can without it. {"spoil": "dropout"} draws one extra random number before each forward, and
"sample" moves the data by one sample, like a resume with wrong random numbers or at a wrong sample.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hetseq.checkpoint import attempts, is_committed, step_of
from tests.support import toys
from tests.support.trials import curve, last_state, validations

TASK = f"{Path(__file__)}:Held"
TOLERANCE = 1e-12
SAMPLES = 107  # no multiple of a unit of 2 nor of a step of 16: 7 steps an epoch, the last one of 11 samples
STEPS_OF_EPOCH, EPOCHS, SAVE_EVERY = 7, 12, 4


class Held(toys.TwoTerms):
    """Two terms with their own denominators, behind dropout; one of the terms has count 0 in stretches of the data."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.folder, self.updates = Path(str(self.config.data.data)), -1
        self.plan = json.loads((self.folder / "plan.json").read_text())

    def load_dataset(self, split: str) -> toys.Rows:
        generator = np.random.default_rng(1 if split == "train" else 2)
        mask = (generator.random((SAMPLES, 4)) < 0.6) & ((np.arange(SAMPLES) // 6) % 2 == 1)[:, None]
        columns = {
            "x": torch.from_numpy(generator.normal(size=(SAMPLES, 6))),
            "y": torch.from_numpy(generator.integers(0, 3, SAMPLES)),
            "z": torch.from_numpy(generator.normal(size=(SAMPLES, 4))),
            "mask": torch.from_numpy(mask).double(),
        }
        first = int(self.plan.get("spoil") == "sample")
        return toys.Rows({name: column.roll(-first, dims=0) for name, column in columns.items()})

    def build_model(self) -> nn.Module:
        body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(self.config.task.dropout or 0.0))
        return nn.ModuleDict({"body": body, "cls": nn.Linear(8, 3), "reg": nn.Linear(8, 4)})

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> Any:
        return None  # the optimizer named by --optimizer

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        if model.training:
            self._hold("forward")
            if self.plan.get("spoil") == "dropout":
                torch.rand(())
        return super().loss(model, sample)

    def update_step(self, num_updates: int) -> None:
        self.updates = num_updates
        self._hold("update")

    def _hold(self, place: str) -> None:
        if self.plan["holds"].get(str(self.updates)) != place:
            return
        try:
            os.close(os.open(self.folder / f"held-{self.updates}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # a rank has been held here
        while True:
            signal.pause()


@dataclass(frozen=True)
class Death:
    """Everything is killed after `updates` updates, in a "forward" or after an "update"; `save` is the newest then."""

    save: int
    updates: int
    place: str

    @property
    def is_at_border(self) -> bool:
        """Whether the checkpoint to resume from is at an epoch's end."""
        return self.save % STEPS_OF_EPOCH == 0


def draw_deaths(draw: random.Random, number: int) -> list[Death]:
    """Deaths by chance, in the order of a run: at least one in mid-epoch, and one at a border.

    Each lies one update or more behind a save and before the end of the next one, so that the newest
    checkpoint does not depend on the speed of the writer.
    """
    total = STEPS_OF_EPOCH * EPOCHS
    saves = sorted({*range(SAVE_EVERY, total, SAVE_EVERY), *range(STEPS_OF_EPOCH, total + 1, STEPS_OF_EPOCH)})
    following = {save: after for save, after in itertools.pairwise(saves) if after - save > 1}
    borders = [save for save in following if save % STEPS_OF_EPOCH == 0]
    chosen = {draw.choice(borders), draw.choice([save for save in following if save not in borders])}
    chosen |= set(draw.sample([save for save in following if save not in chosen], number - len(chosen)))
    deaths = []
    for save in sorted(chosen):
        place = draw.choice(["forward", "update"])
        deaths.append(Death(save, draw.randint(save + 1, following[save] - (place == "forward")), place))
    return deaths


def draw_weights(draw: random.Random, ranks: int) -> str:
    """Weights for --balance of which one is twice another or more; a rank may have nothing."""
    weights = [1]
    while max(weights) == 0 or max(weights) < 2 * min(weights):
        weights = [draw.randint(0, 4) for _ in range(ranks)]
    return ",".join(map(str, weights))


def can_go_on_from(run: Path, step: int) -> bool:
    """Whether a checkpoint of this step is committed, or lacks nothing but the commit, which the next start adds."""
    folders = [folder for folder in attempts(run / "checkpoints") if step_of(folder) == step]
    return any(is_committed(folder) or _is_whole(folder) for folder in folders)


def _is_whole(folder: Path) -> bool:
    """Whether the state and the manifests of all parts are there to their last byte."""
    try:
        state = json.loads((folder / "state.json").read_text())
        manifests = [json.loads(path.read_text()) for path in folder.glob("part-*.json")]
    except (OSError, ValueError):
        return False  # being written
    return bool(len(manifests) == state["checkpoint"]["number_of_parts"])


@dataclass(frozen=True)
class Result:
    """All that a run has computed: its rows and validations by step, its last state."""

    curve: Mapping[int, Mapping[str, Any]]
    valid: Mapping[int, float]
    best: Sequence[int]  # steps whose validation was better than ever
    state: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def result_of(run: Path) -> Result:
    last = last_state(run)
    state = {name: last.state[name] for name in ("step", "epoch", "consumed", "updates")}
    rows = validations(run)
    valid = {step: float(row["valid_loss"]) for step, row in rows.items()}
    return Result(curve(run), valid, [step for step, row in rows.items() if row["best"]], state, last.tensors)


def assert_same_result(found: Result, expected: Result) -> float:
    """The largest relative error; AssertionError that says where it is, if it is above TOLERANCE.

    Counts must be equal. A tensor is judged by its largest element, every other number by itself.
    """
    assert found.curve.keys() == expected.curve.keys(), "other steps"
    assert found.valid.keys() == expected.valid.keys(), "other validations"
    assert found.best == expected.best, "other validations are the best ones"
    assert found.state == expected.state, "another place in the data"
    assert found.tensors.keys() == expected.tensors.keys(), "other tensors"
    errors: dict[str, float] = {}
    for step, right in expected.curve.items():
        row = found.curve[step]
        for name in ("epoch", "samples", "counts", "lr"):
            assert row[name] == right[name], f"step {step}: {name} {row[name]}, expected {right[name]}"
        assert row["terms"].keys() == right["terms"].keys(), f"step {step}: other terms"
        for name in ("loss", "grad_norm"):
            errors[f"{name} of step {step}"] = _error(row[name], right[name])
        for name in right["terms"]:
            errors[f"{name} of step {step}"] = _error(row["terms"][name], right["terms"][name])
    for step, loss in expected.valid.items():
        errors[f"validation after step {step}"] = _error(found.valid[step], loss)
    for name, tensor in expected.tensors.items():
        errors[name] = _error(found.tensors[name], tensor)
    wrong = {where: f"{error:.1e}" for where, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, f"relative errors above {TOLERANCE}: {wrong}"
    return max(errors.values())


def _error(found: Any, expected: Any) -> float:
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    assert one.shape == other.shape
    largest, difference = other.abs().max().item(), (one - other).abs().max().item()
    return difference / largest if largest else difference
