"""--unit-size: with dropout, too, the curve is that of one process, whatever the ranks and shares.

A unit has the same samples and the same random numbers everywhere; without units a rank draws for whatever micro-batch
its share and its memory give it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetseq.comm.group import Group
from tests.support import bert
from tests.support.ranks import run_ranks
from tests.support.training import Facts, prepared, train

SPREADS = ["equal", "5,2,1", "1,0,7"]
#: 45 is no multiple of the unit, and no task's epoch is one of 45
WORDS = (
    "--dropout 0.1 --global-batch-size 45 --precision fp64 --optimizer sgd --lr 0.1 --seed 5"
    " --lr-scheduler constant --no-save --disable-validation"
)


def curves(group: Group, save_dir: str, words: list[str], spreads: list[str]) -> list[Facts]:
    chosen = ["equal"] if group.world_size == 1 else spreads
    return [train(group, save_dir, [*words, "--balance", balance]) for balance in chosen]


def trained(words: list[str], steps: int, spreads: list[str], path: Path) -> tuple[Facts, list[Facts]]:
    """By one process, and by three for each of the spreads."""
    words = [*WORDS.split(), *words, "--batch-size", "7", "--max-update", str(steps)]
    ((alone,),) = run_ranks(curves, 1, prepared(path / "one"), words, spreads)
    together = run_ranks(curves, 3, prepared(path / "three"), words, spreads)[0]
    assert len(alone.losses) == steps
    return alone, together


def largest_difference(words: list[str], steps: int, spreads: list[str], path: Path) -> float:
    """Of all losses and of the last parameters, from those of one process."""
    alone, together = trained(words, steps, spreads, path)
    worst = max((facts.parameters - alone.parameters).abs().max().item() for facts in together)
    return max(worst, *(abs(mine - right) for facts in together for mine, right in zip(facts.losses, alone.losses)))


@pytest.fixture(params=["mnist", "bert"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    if request.param == "mnist":
        return ["--task", "mnist"]
    return ["--task", "bert", "--data", str(bert.write_folder(tmp_path / "data", 100))]


def test_with_units_dropout_is_the_same_on_unequal_ranks(task: list[str], tmp_path: Path) -> None:
    assert largest_difference([*task, "--unit-size", "4"], 4, ["5,2,1"], tmp_path) <= 1e-12


def test_without_units_it_is_not(task: list[str], tmp_path: Path) -> None:
    """The twin."""
    assert largest_difference(task, 2, ["5,2,1"], tmp_path) > 1e-5


def test_with_units_products_of_16_bits_are_rounded_alike(task: list[str], tmp_path: Path) -> None:
    """To single precision, in which their sums are; without units each is rounded to 8 bits where a share ends."""
    words = [*task, "--precision", "bf16", "--dropout", "0"]
    assert largest_difference([*words, "--unit-size", "4"], 2, ["5,2,1"], tmp_path) <= 1e-6
    assert largest_difference(words, 2, ["5,2,1"], tmp_path / "twin") > 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_units_and_wide_sums_all_bits_are_the_same(task: list[str], precision: str, tmp_path: Path) -> None:
    words = [*task, "--precision", precision, "--unit-size", "4", "--clip-norm", "1", "--optimizer", "adamw"]
    for more, is_equal in ((["--reduce-dtype", "fp64"], True), ([], False)):
        alone, together = trained([*words, *more], 6, SPREADS, tmp_path / str(is_equal))
        assert [torch.equal(facts.parameters, alone.parameters) for facts in together] == [is_equal] * len(SPREADS)


@pytest.mark.slow
def test_with_units_it_is_the_same_on_any_ranks(task: list[str], tmp_path: Path) -> None:
    assert largest_difference([*task, "--unit-size", "4"], 20, SPREADS, tmp_path) <= 1e-12
    assert largest_difference(task, 20, SPREADS, tmp_path / "twin") > 1e-3
