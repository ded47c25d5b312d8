"""With parameters that come and go, work between steps and steps that go wrong are as where ranks have them all.

The runs beside it have `--shard-model state`, the same samples, and the same micro-batches. Where each rank has one
micro-batch, sums are added in one order; so with one owner, whose optimizer sees the same tensors, all bits are equal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetseq.comm.group import GlooGroup, Group
from hetseq.task import make_task
from tests.support import toys
from tests.support.layered import WIDTH, Block, Layered
from tests.support.logs import KeepingLines
from tests.support.nightly import nightly
from tests.support.owned import session_of, whole_parameters
from tests.support.ranks import run_ranks
from tests.support.training import Recorder, prepared, toy_words

TOLERANCE = 1e-12
#: before a step of one sample, for which kernels of torch round by the address of the weights
FEW = "--max-update 2"


class Judged(Layered):
    """Its metric runs the model a second time."""

    def metrics(self, model: Any, sample: toys.Batch) -> dict[str, tuple[float, float]]:
        found = model["head"](self.hidden(model, sample["x"])).argmax(1)
        return {"accuracy": (float((found == sample["y"]).sum()), float(len(found)))}


class Dropping(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return F.dropout(super().forward(x), 0.3, self.training)


class Dropout(Layered):
    block = Dropping


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(super().forward(x))


class BatchNorms(Layered):
    block = Normed


class LeavingOut(Layered):
    """Takes each layer by chance; another choice for each micro-batch, and so on each rank."""

    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model["first"](x)
        for layer in model["layers"]:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return x


class Passing(Block):
    """Passes its input on by chance, as it is, beside a tensor of its own."""

    def forward(self, x: Any) -> Any:
        return x if torch.rand(()) < 0.5 else super().forward(x)


class PassingOn(Layered):
    block = Passing


class InPlace(Block):
    """Changes its input and returns it."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.add_(torch.tanh(self.linear(x.clone())) * self.scale)


class ChangingInput(Layered):
    block = InPlace


class AnotherOrder(Layered):
    def hidden(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model["first"](x)
        for number in (3, 0, 2, 1):
            x = model["layers"][number](x)
        return x


class Poisoned(Layered):
    """A sample whose loss is no number."""

    factor = math.nan

    def rows(self) -> toys.Batch:
        rows = super().rows()
        factor = torch.ones(len(rows["y"]), dtype=torch.float64)
        factor[21] = self.factor
        return {**rows, "factor": factor}

    def loss(self, model: Any, sample: toys.Batch) -> dict[str, torch.Tensor]:
        logits = model["head"](self.hidden(model, sample["x"]))
        return {"loss": (F.cross_entropy(logits, sample["y"], reduction="none") * sample["factor"]).sum()}


class Steep(Poisoned):
    """Its gradient, times the first loss scale, is no number of fp16."""

    factor = 900.0


@dataclass
class Life:
    """What one rank saw of a run."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    valid: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    best: float | None = None

    @property
    def losses(self) -> list[float | None]:
        return [row["loss"] for row in self.rows]


def live(
    group: Group, runs: list[tuple[str, list[str]]], task: type[Layered], shares_memory: bool
) -> list[Life]:  # fmt: skip
    """A rank's life: one run after the other."""
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    return [_live(group, save_dir, words, task) for save_dir, words in runs]


def _live(group: Group, save_dir: str, words: list[str], task: type[Layered]) -> Life:
    recorder, keeping = Recorder(), KeepingLines([])
    logging.getLogger("hetseq").addHandler(keeping)
    logging.getLogger("hetseq").setLevel(logging.INFO)
    session = session_of(group, save_dir, words, recorder, lambda config: make_task(task, config))
    try:
        session.train()
        replica = session.controller.replica
        buffers = {name: value.clone() for name, value in replica.model.named_buffers()}
        best = session.controller.state.best
        return Life(recorder.rows, recorder.validations, whole_parameters(replica), buffers, keeping.lines, best)
    finally:
        session.close()
        logging.getLogger("hetseq").removeHandler(keeping)


def run(
    path: Path, task: type[Layered], text: str, own: str, *, shares_memory: bool = True, more: Sequence[str] = ("",)
) -> tuple[list[Life], ...]:
    """The lives with `--shard-model state`, then those with `all` and each of `more`; the ranks of each are alike."""
    words = [
        *toy_words("TwoTerms", global_batch_size=12, max_update=7), "--precision", "fp64", "--optimizer", "adamw",
        "--own", own, *text.split(),
    ]  # fmt: skip
    kinds = ["--shard-model state", *(f"--shard-model all {one}" for one in more)]
    if "--validate" in text:
        words.remove("--disable-validation")
    runs = [(prepared(path / str(number)), [*words, *kind.split()]) for number, kind in enumerate(kinds)]
    ranks = run_ranks(live, own.count(",") + 1, runs, task, shares_memory, timeout_s=60)
    found = tuple(list(lives) for lives in zip(*ranks, strict=True))
    for lives in found:
        for life in lives:
            assert life.losses == lives[0].losses
            assert all(torch.equal(value, lives[0].parameters[name]) for name, value in life.parameters.items())
    return found


def compare(lives: list[Life], others: list[Life], rel: float = TOLERANCE) -> None:
    """All losses, and parameters and buffers at the end; to the bit with `rel=0`."""
    assert lives[0].losses == others[0].losses or rel
    for mine, right in zip(lives[0].losses, others[0].losses, strict=True):
        assert (mine is None) == (right is None)
        assert mine is None or right is None or abs(mine - right) <= rel * abs(right)
    for name, value in others[0].parameters.items():
        assert (lives[0].parameters[name] - value).norm() <= rel * value.norm(), name
    for life, other in zip(lives, others, strict=True):
        assert life.buffers.keys() == other.buffers.keys()
        for name, value in other.buffers.items():
            assert (life.buffers[name] - value).double().norm() <= rel * value.double().norm(), name


BOTH = pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])


@BOTH
def test_validation_gives_the_numbers_of_ranks_that_have_all_parameters(shares_memory: bool, tmp_path: Path) -> None:
    text = (
        "--balance 9,3,0 --batch-size 2 --validate-interval-updates 2"
        " --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric"
    ).replace("", "")
    calm, lives = run(tmp_path, Judged, text, "1,1,8", shares_memory=shares_memory)
    compare(lives, calm)
    assert len(calm[0].valid) >= 4
    assert calm[0].best is not None
    for life in lives:
        assert life.best == calm[0].best
        for mine, right in zip(life.valid, calm[0].valid, strict=True):
            assert 0 < mine["valid_accuracy"] == right["valid_accuracy"] < 1
            assert mine["valid_loss"] == pytest.approx(right["valid_loss"], rel=TOLERANCE)


@BOTH
@pytest.mark.parametrize("task", [Dropout, LeavingOut, PassingOn, ChangingInput], ids=lambda task: task.__name__)
def test_what_a_layer_does_by_chance_is_the_same(task: type[Layered], shares_memory: bool, tmp_path: Path) -> None:
    text = "--balance 1,1,1 --batch-size 2"
    again = "--checkpoint-modules auto"
    more = ["", again] if task is Dropout else [""]
    calm, lives, *checkpointed = run(tmp_path, task, text, "6,2,1", shares_memory=shares_memory, more=more)
    compare(lives, calm)
    for others in checkpointed:
        compare(others, lives, rel=0.0)
    assert len(set(lives[0].losses)) == 7


def test_batch_norm_has_the_averages_of_ranks_that_have_all_parameters(tmp_path: Path) -> None:
    calm, lives = run(tmp_path, BatchNorms, "--balance 1,1 --batch-size 3 --global-batch-size 10", "3,1")
    compare(lives, calm)
    assert any(name.endswith("running_mean") for name in lives[0].buffers)


@BOTH
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_micro_batch_of_each_rank_gives_the_same_bits_in_any_precision(
    precision: str, shares_memory: bool, tmp_path: Path
) -> None:
    text = f"--balance 9,3,0 --batch-size 9 --precision {precision} {FEW}"
    calm, lives = run(tmp_path, Layered, text, "0,0,1", shares_memory=shares_memory)
    compare(lives, calm, rel=0.0)


def test_sums_in_double_precision_are_the_same_bits_in_any_order(tmp_path: Path) -> None:
    text = f"--balance 1,1,1 --batch-size 2 --precision fp32 --optimizer sgd --reduce-dtype fp64 {FEW}"
    calm, lives = run(tmp_path, Layered, text, "0,0,1")
    compare(lives, calm, rel=0.0)
    _, single = run(tmp_path / "single", Layered, text.replace("--reduce-dtype fp64", ""), "0,0,1")
    assert any(not torch.equal(value, single[0].parameters[name]) for name, value in lives[0].parameters.items())


def test_a_loss_scale_that_is_too_large_is_halved_on_all_ranks(tmp_path: Path) -> None:
    text = "--balance 3,1 --batch-size 12 --precision fp16 --clip-norm 1"
    calm, lives = run(tmp_path, Steep, text, "1,3")
    scales = [[row["loss_scale"] for row in life.rows] for life in (*calm, *lives)]
    assert len(set(scales[0])) > 1, "some steps were too large"
    assert scales == [scales[0]] * 4
    compare(lives, calm, rel=1e-5)


@BOTH
def test_a_step_that_is_not_finite_is_skipped_and_its_rank_named(shares_memory: bool, tmp_path: Path) -> None:
    calm, lives = run(tmp_path, Poisoned, "--balance 1,1,0 --batch-size 2", "2,1,1", shares_memory=shares_memory)
    compare(lives, calm)
    assert any(loss is None for loss in lives[0].losses)
    for life, other in zip(lives, calm, strict=True):
        told = [line for line in life.lines if "skipped" in line]
        assert told == [line for line in other.lines if "skipped" in line]
        assert "its gradient is not finite; rank 1 produced it (loss term 'loss'; positions 18 to 23" in told[0]


def test_the_noise_scale_is_that_of_ranks_that_have_all_parameters(tmp_path: Path) -> None:
    calm, lives = run(tmp_path, Layered, "--balance 1,1 --batch-size 2 --noise-scale-every 1 --max-update 12", "0,1")
    compare(lives, calm)
    found = [[row.get("noise_scale") for row in life.rows] for life in (*lives, *calm)]
    assert any(found[0])
    assert found[0] == found[1]
    assert found[0] == [value if value is None else pytest.approx(value, rel=1e-9) for value in found[2]]


def test_layers_run_in_the_order_in_which_shard_modules_names_them(tmp_path: Path) -> None:
    order = "--shard-modules layers.3,layers.0,layers.2,layers.1"
    calm, lives = run(tmp_path, AnotherOrder, f"--balance 6,4,2 --batch-size 6 {FEW}", "0,1,0", more=[order])
    compare(lives, calm, rel=0.0)


@pytest.mark.parametrize("own", nightly("1,0", "0,1"))
def test_a_net_whose_root_has_no_parameters_of_its_own(own: str, tmp_path: Path) -> None:
    modules = "--shard-modules first,layers.*,head"
    calm, lives = run(tmp_path, Layered, f"--balance 3,1 --batch-size 12 {FEW}", own, more=[modules])
    compare(lives, calm, rel=0.0)


def micro_batches(group: Group, save_dir: str, words: list[str]) -> list[int]:
    """How many a rank computed in each step."""
    session = session_of(group, save_dir, words, Recorder())
    computer: Any = session.controller._computer
    attempt, found = computer.attempt, list[int]()

    def counted(data: Any, *args: Any) -> Any:
        found.append(len(data.micro_batches))
        return attempt(data, *args)

    computer.attempt = counted
    try:
        session.train()
        return found
    finally:
        session.close()


def test_all_ranks_cut_their_shares_into_as_many_micro_batches(tmp_path: Path) -> None:
    told = ["--global-batch-size", "12", "--batch-size", "3", "--balance", "3,1", "--max-update", "2"]
    words = [*toy_words("TwoTerms"), *told, "--shard-model", "all", "--shard-modules", "body,cls,reg", "--own", "1,1"]
    assert run_ranks(micro_batches, 2, prepared(tmp_path), words) == [[3, 3], [3, 3]]
