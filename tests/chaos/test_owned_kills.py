"""Ranks that are killed in every phase of a step with owners: a rank that owned nothing costs one step.

No images are made, so an owner sends all back to the newest checkpoint.

Three ranks: rank 0 owns and computes, rank 1 computes and owns nothing, rank 2 owns and computes. Each replacement of
the victim is killed in the next phase, so that one run shows all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetseq.testing import Faults
from tests.chaos.owned_runs import (
    IN_LAYERS,
    NO_SAVE,
    OFTEN,
    PHASES,
    RECOVERIES,
    Calm,
    Run,
    check_survivors,
    one_after_the_other,
)
from tests.chaos.runs import Chaos
from tests.support.nightly import nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def check_each_costs_one_step(run: Run, undisturbed: Calm, *, moves: bool | None = False) -> None:
    """The others continued with the step under way, as the same processes.

    Whether state `moves` to other ranks then; None: only where a rank returns in the same moment.
    """
    run.check_curve(undisturbed)
    assert len(run.losses) == len(run.kills), run.said
    for kill, loss in zip(run.kills, run.losses, strict=True):
        assert loss["step"] - kill["step"] in {**PHASES, **IN_LAYERS}[kill["phase"]], (kill, loss)
    assert not any("lost" in loss for loss in run.losses)
    stays = [loss for loss in run.losses if moves is False or "is back" not in loss["story"]]
    assert all((loss["state_bytes"] > 0) == bool(moves) for loss in stays), stays
    begun = check_survivors(run.computed, run.kills, undisturbed.samples_of, ranks=run.ranks)
    assert max(begun.values()) <= 2
    assert {step for step, times in begun.items() if times > 1} <= {loss["step"] + 1 for loss in run.losses}


def check_each_goes_back(run: Run, undisturbed: Calm) -> None:
    """The others went back to the newest state each time, and said so."""
    run.check_curve(undisturbed)
    assert len(run.losses) == len(run.kills), run.said
    for kill, loss in zip(run.kills, run.losses, strict=True):
        assert loss["lost"].startswith(f"rank {kill['slot']} owned ")
        assert loss["lost"].endswith(" % of the state, and no other rank holds it")
        assert loss["step"] <= kill["step"]
    assert run.said.count("all ranks continue from the newest state in memory or on disk [state-lost]") == len(
        run.kills
    )
    newest, losses = 0, iter(run.losses)
    for event in run.found.events:
        if event["event"] == "save":
            newest = max(newest, event["step"])
        elif "lost" in event:
            loss = next(losses)
            assert loss is event
            assert newest <= loss["step"]
    assert newest > 0
    assert len(run.computed) == 3 + len(run.kills), "the others are the same processes"


SAVING = {"save_interval_updates": 5, "no_epoch_checkpoints": True, "memory_interval_updates": 0}
shared_or_not = pytest.mark.parametrize("shares_memory", [True, *nightly(False)], ids=["shared", "gloo"])


@pytest.mark.fault("FT-1", "FT-2")
@shared_or_not
@pytest.mark.parametrize(
    ("own", "victim"), [("2,0,1", 1), *nightly(("0,2,1", 0), is_many=True)], ids=lambda value: str(value)
)
def test_a_rank_that_owns_nothing_costs_one_step_wherever_it_is_killed(
    own: str, victim: int, shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    faults = one_after_the_other(victim, nth=2)
    run = Run(chaos, tmp_path, faults, own=own, task={"shares_memory": shares_memory}, **SAVING)
    check_each_costs_one_step(run, undisturbed)


@pytest.mark.fault("FT-1", "FT-2")
@shared_or_not
@pytest.mark.parametrize(("own", "victim"), [("2,0,1", 2), *nightly(("2,0,1", 0), is_many=True)])
def test_an_owner_sends_all_back_to_the_newest_state_wherever_it_is_killed(
    own: str, victim: int, shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    faults = one_after_the_other(victim, nth=6)
    run = Run(chaos, tmp_path, faults, own=own, task={"shares_memory": shares_memory}, **SAVING)
    check_each_goes_back(run, undisturbed)


@pytest.mark.fault("FT-1")
@shared_or_not
def test_a_kill_between_two_units_of_new_parameters_spoils_none(
    shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    kinds, place = {"shares_memory": shares_memory, "has_place_in_gather": True}, {"phase": "transfer", "nth": 2}
    faults = Faults().kill(rank=1).at(step=8, **place)
    check_each_costs_one_step(Run(chaos, tmp_path / "a", faults, own="2,0,1", task=kinds, **SAVING), undisturbed)
    faults = Faults().kill(rank=2).at(step=8, **place).kill(rank=0).at(step=30, **place)
    check_each_goes_back(Run(chaos, tmp_path / "b", faults, own="2,0,1", task=kinds, **SAVING), undisturbed)


@pytest.mark.fault("FT-21")
@pytest.mark.parametrize("shares_memory", [True, *nightly(False)])
@pytest.mark.parametrize("name", [*OFTEN, *nightly(*(name for name in RECOVERIES if name not in OFTEN))])
def test_kills_while_the_others_recover(
    name: str, shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    faults, has_owner = RECOVERIES[name]
    run = Run(chaos, tmp_path, faults, own="2,0,1", task={"shares_memory": shares_memory}, **SAVING)
    run.check_curve(undisturbed)
    assert any("lost" in event for event in run.found.events) == has_owner
    assert ("[state-lost]" in run.said) == has_owner


@pytest.mark.fault("FT-1")
def test_a_run_with_owners_that_saves_nothing_says_so_and_begins_again(
    chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    faults = Faults().kill(rank=2).at(step=20, phase="reduce")
    run = Run(chaos, tmp_path, faults, own="2,0,1", task={}, no_save=True, memory_interval_updates=0)
    run.check_losses(undisturbed)
    (loss,) = run.losses
    assert loss["step"] == 0
    # a third, as closely as the grains of a small model allow
    assert re.fullmatch(r"rank 2 owned [23]\d\.\d % of the state, and no other rank holds it", loss["lost"])
    assert NO_SAVE in run.said[: run.said.index("rank 2 owned ")], "at the start"
    assert "all ranks begin again where this start began, since --no-save keeps no state [state-lost]" in run.said
    replicas = chaos.run(ranks=2, steps=2, no_save=True)
    assert (replicas.code, NO_SAVE in replicas.said) == (0, False)
