"""Groups of ranks that each hold all of the state (`--shard-groups`): a group that is killed costs one step.

Most runs have three ranks in groups of two and one, without images: only the other group has the parts that are lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.testing import Faults
from tests.chaos.owned_runs import Calm, Run, check_survivors, one_after_the_other
from tests.chaos.runs import Chaos
from tests.chaos.test_image_kills import IN_MEMORY
from tests.chaos.test_layer_kills import SOME_LAYERS, in_turn, task
from tests.chaos.test_owned_kills import SAVING, check_each_costs_one_step
from tests.support.nightly import nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

shared_or_not = pytest.mark.parametrize("shares_memory", [True, *nightly(False)], ids=["shared", "gloo"])


@pytest.mark.fault("FT-1", "FT-2")
@shared_or_not
@pytest.mark.parametrize("victim", [1, *nightly(2)])
def test_a_group_whose_rank_is_killed_gets_its_state_from_the_other_one(
    victim: int, shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    """One of two ranks of a group, and all of the other group; in each phase of a step."""
    kinds = {"shares_memory": shares_memory}
    faults = one_after_the_other(victim, nth=2)
    run = Run(chaos, tmp_path, faults, own="2,1,1", shard_groups="2+1", task=kinds, **SAVING)
    check_each_costs_one_step(run, undisturbed, moves=victim == 1 or None)


@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize("victim", [1, *nightly(2)])
def test_so_it_is_where_parameters_come_and_go(
    victim: int, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults = in_turn(victim, SOME_LAYERS)
    run = Run(chaos, tmp_path, faults, own="2,1,1", shard_groups="2+1", task=task(False), **SAVING)
    check_each_costs_one_step(run, undisturbed_layers, moves=victim == 1 or None)


@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize(
    ("groups", "own", "victim", "has_layers"),
    [
        ("3+2", "1,2,1,2,1", 3, True),
        *nightly(("2+2", "2,1,1,2", 1, False), ("3+2", "1,2,1,2,1", 3, False), is_many=True),
    ],
)
def test_only_what_a_killed_rank_owned_travels_whatever_the_group_that_gives_it(
    groups: str,
    own: str,
    victim: int,
    has_layers: bool,
    chaos: Chaos,
    undisturbed: Calm,
    undisturbed_layers: Calm,
    tmp_path: Path,
) -> None:
    """To the other rank of its group, and back when it returns. By rank, as the events of the run tell."""
    ranks = sum(map(int, groups.split("+")))
    faults = one_after_the_other(victim, nth=3, phases=["reduce", "commit", "optimizer"])
    kinds = {"shares_memory": False, "has_layers": has_layers}
    more = {"own": own, "shard_groups": groups, "balance": ",".join("54343"[:ranks])}  # all compute in each step
    run = Run(chaos, tmp_path, faults, ranks=ranks, task=kinds, **more, **SAVING)
    check_each_costs_one_step(run, undisturbed_layers if has_layers else undisturbed, moves=True)
    changes = [event for event in run.found.events if event["event"] == "generation"]
    assert len(changes) >= len(faults.faults)
    for change in changes:
        sent = dict(zip(change["ranks"], change["state_bytes_by_rank"], strict=True))
        (taker,) = (slot for slot, size in sent.items() if size)  # no rank of another group
        assert taker == (victim if victim in sent else {1: 0, 3: 4}[victim])
        assert sent[taker] == change["state_bytes"] == changes[0]["state_bytes"]
    assert any(victim in event["ranks"] for event in changes), "it has returned"


@pytest.mark.nightly
@pytest.mark.fault("FT-21")
def test_kills_while_a_part_of_one_group_comes_from_another_one(
    chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    """Of the rank that takes it, then of a rank that has returned. No other rank is ever sent anything."""
    faults = Faults().kill(rank=1).at(step=8, phase="reduce").kill(rank=0).at(phase="transfer")
    faults = faults.kill(rank=3).at(step=40, phase="commit").kill(rank=2).at(step=60, phase="optimizer")
    faults = faults.kill(rank=2).at(phase="transfer", incarnation=1)
    more = {"own": "2,1,1,2", "shard_groups": "2+2", "balance": "5,4,3,4"}
    run = Run(chaos, tmp_path, faults, ranks=4, task=task(False), **more, **SAVING)
    run.check_curve(undisturbed_layers)
    changes = [event for event in run.found.events if event["event"] == "generation"]
    assert not any("lost" in change for change in changes)
    before = {0, 1, 2, 3}
    for change in changes:
        takers = {rank for rank, size in zip(change["ranks"], change["state_bytes_by_rank"], strict=True) if size}
        returned = {*change["ranks"]} - before  # ranks 0 and 1 may return together
        assert takers == returned or (not returned and len(takers) <= 1), change
        before = {*change["ranks"]}


@pytest.mark.nightly
@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize("victim", [1, 2])
def test_frozen_weights_that_no_checkpoint_holds_come_from_another_group(
    victim: int, chaos: Chaos, undisturbed_base: Calm, tmp_path: Path
) -> None:
    faults = one_after_the_other(victim, nth=3, phases=["reduce", "commit", "optimizer"])
    kinds = task(False, has_base=True)
    run = Run(chaos, tmp_path, faults, own="2,1,1", shard_groups="2+1", task=kinds, **SAVING)
    check_each_costs_one_step(run, undisturbed_base, moves=victim == 1 or None)


def check_a_group_at_once(chaos: Chaos, calm: Calm, folder: Path, **kinds: bool) -> None:
    """Both ranks of a group are killed in the same instant, three times."""
    faults = Faults()
    for incarnation, (step, phase) in enumerate([(8, "reduce"), (30, "commit"), (60, "optimizer")]):
        for rank in (0, 1):
            faults = faults.kill(rank=rank).at(step=step, phase=phase, incarnation=incarnation)
    run = Run(chaos, folder, faults, own="2,1,1", shard_groups="2+1", task=kinds, **SAVING)
    run.check_curve(calm)
    assert not any("lost" in loss for loss in run.losses)
    begun = check_survivors(run.computed, run.kills, calm.samples_of)
    assert max(begun.values()) <= 2


@pytest.mark.fault("FT-1", "FT-2")
@shared_or_not
def test_all_ranks_of_a_group_are_killed_in_the_same_instant(
    shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    check_a_group_at_once(chaos, undisturbed, tmp_path, shares_memory=shares_memory)


@pytest.mark.fault("FT-1", "FT-2")
def test_so_are_those_whose_parameters_come_and_go(chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path) -> None:
    check_a_group_at_once(chaos, undisturbed_layers, tmp_path, shares_memory=False, has_layers=True)


@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize("victim", [0, *nightly(1)])
def test_ranks_of_two_groups_that_are_killed_at_once_cost_the_steps_since_an_image(
    victim: int, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    """No group is whole then; the third node has the image of the victim, since it is of the same group."""
    faults = Faults().kill(rank=victim).at(step=19, phase="reduce").kill(rank=2).at(step=19, phase="reduce")
    kinds = {"shares_memory": True, "are_nodes": True}
    run = Run(chaos, tmp_path, faults, own="2,1,1", shard_groups="2+1", task=kinds, **IN_MEMORY)
    run.check_losses(undisturbed)
    (loss,) = [event for event in run.found.events if event.get("lost")]
    assert 0 < loss["step"] < 19
    assert loss["image"]
