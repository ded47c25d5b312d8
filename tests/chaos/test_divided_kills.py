"""Ranks that hold one model together (--tensor-parallel-degree) are killed: another model keeps the same curve.

Two ranks divide a model, and a third one has it whole. Without images only that third rank has the lost state.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.testing import Faults
from tests.chaos.owned_runs import IN_STEPS, Calm, Run, one_after_the_other
from tests.chaos.runs import Chaos
from tests.chaos.test_image_kills import IN_MEMORY
from tests.chaos.test_layer_kills import task
from tests.chaos.test_owned_kills import SAVING
from tests.support.nightly import nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DIVIDED = {"shard_model": "none", "shard_modules": "auto", "balance": "2,2,1"}


@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize("victim", [1, *nightly(2)])
def test_a_model_whose_rank_is_killed_is_idle_until_it_is_whole_again(
    victim: int, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults = one_after_the_other(victim, nth=2)
    options = {**SAVING, **DIVIDED, "tensor_parallel_degree": "2+1"}
    run = Run(chaos, tmp_path, faults, task=task(False), **options)
    run.check_curve(undisturbed_layers)
    assert len(run.kills) == len(IN_STEPS)
    assert not any("lost" in loss for loss in run.losses), "the other model had all of the state"
    counts = [row["step"] for row in run.written]
    assert max(map(counts.count, counts)) <= 2


@pytest.mark.fault("FT-1", "FT-2")
def test_a_model_alone_waits_for_its_lost_rank_and_goes_on_from_an_image(
    chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    """The third rank has a part of a model that is never whole: it is idle, and keeps copies of what others hold."""
    faults = Faults()
    for incarnation, step in enumerate((8, 30)):
        faults = faults.kill(rank=1).at(step=step, phase="reduce", incarnation=incarnation)
    options = {**IN_MEMORY, **DIVIDED, "tensor_parallel_degree": "2"}
    run = Run(chaos, tmp_path, faults, task=task(False, are_nodes=True), **options)
    run.check_losses(undisturbed_layers)
    assert "no model is whole" not in run.said
