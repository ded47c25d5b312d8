"""Groups of ranks that each hold all of the state (`--shard-groups`): a group that is killed costs one step.

Three ranks in groups of two and one, without images and without a save: only the other group has what is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetseq.testing import Faults
from tests.chaos.owned_runs import IN_STEPS, Calm, Run, one_after_the_other
from tests.chaos.runs import Chaos
from tests.chaos.test_layer_kills import SOME_LAYERS, in_turn, task
from tests.chaos.test_owned_kills import SAVING, check_each_costs_one_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

shared_or_not = pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])


@pytest.mark.fault("FT-1", "FT-2")
@shared_or_not
@pytest.mark.parametrize("victim", [1, 2])
def test_a_group_whose_rank_is_killed_gets_its_state_from_the_other_one(
    victim: int, shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    """One of two ranks of a group, and all of the other group; in each phase of a step."""
    kinds = {"shares_memory": shares_memory}
    faults = one_after_the_other(victim, nth=2)
    run = Run(chaos, tmp_path, faults, own="2,1,1", shard_groups="2+1", task=kinds, **SAVING)
    check_each_costs_one_step(run, undisturbed, moves=victim == 1)


@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize("victim", [1, 2])
def test_so_it_is_where_parameters_come_and_go(
    victim: int, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults = in_turn(victim, SOME_LAYERS)
    run = Run(chaos, tmp_path, faults, own="2,1,1", shard_groups="2+1", task=task(False), **SAVING)
    check_each_costs_one_step(run, undisturbed_layers, moves=victim == 1)
