"""--unit-size: with dropout, too, the curve is that of one process, whatever the ranks and shares.

A unit has the same samples and the same random numbers everywhere; without units a rank draws for whatever micro-batch
its share and its memory give it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.comm import AnyGroup
from tests.support import bert
from tests.support.ranks import run_ranks
from tests.support.training import Facts, prepared, train

SPREADS = {1: ["equal"], 3: ["equal", "5,2,1", "1,0,7"]}
#: 45 is no multiple of the unit, and neither task's epoch one of 45
WORDS = (
    "--dropout 0.1 --global-batch-size 45 --max-update 20 --precision fp64 --optimizer sgd --lr 0.1 --seed 5"
    " --lr-scheduler constant --no-save --disable-validation"
)


def curves(group: AnyGroup, save_dir: str, task: list[str], unit: list[str]) -> list[Facts]:
    return [
        train(group, save_dir, [*task, *WORDS.split(), *unit, "--balance", balance])
        for balance in SPREADS[group.world_size]
    ]


def largest_difference(task: list[str], unit: list[str], path: Path) -> float:
    """Of all losses and of the last parameters, from those of one process."""
    ((alone,),) = run_ranks(curves, 1, prepared(path / "one"), task, unit)
    together = run_ranks(curves, 3, prepared(path / "three"), task, unit)[0]
    assert alone.losses[0] is not None
    assert len(alone.losses) == 20
    worst = max((facts.parameters - alone.parameters).abs().max().item() for facts in together)
    return max(worst, *(abs(mine - right) for facts in together for mine, right in zip(facts.losses, alone.losses)))


@pytest.fixture(params=["mnist", "bert"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    if request.param == "mnist":
        return ["--task", "mnist"]
    return ["--task", "bert", "--data", str(bert.write_folder(tmp_path / "data", 200))]


def test_with_units_dropout_is_the_same_on_any_ranks(task: list[str], tmp_path: Path) -> None:
    assert largest_difference(task, ["--unit-size", "4", "--max-sentences", "7"], tmp_path) <= 1e-12


def test_without_units_it_is_not(task: list[str], tmp_path: Path) -> None:
    """The twin."""
    assert largest_difference(task, ["--max-sentences", "7"], tmp_path) > 1e-3
