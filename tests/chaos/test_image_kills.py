"""Owners that are killed in every phase, each with the memory of its node: the others go back to an image in place.

Three ranks, each of which keeps states in memory that no other process sees, so that a kill is the loss of a node. No
checkpoint is ever written: all that the others need is in their memory.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from hetseq.testing import Faults
from tests.chaos.owned_runs import (
    IN_STEPS,
    OFTEN,
    RECOVERIES,
    Calm,
    Run,
    check_survivors,
    one_after_the_other,
)
from tests.chaos.runs import Chaos
from tests.support.nightly import nightly
from tests.support.watched import read_opened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

EVERY = 3  # steps between two images
PHASES = [*IN_STEPS, "image"]
SLOWLY = {"throttle": "0:3,1:3,2:3"}  # so that an image is safe within a step, whatever else the machine does
IN_MEMORY = {"memory_interval_updates": EVERY, "no_save": True, **SLOWLY}


def check_each_goes_back_in_place(run: Run, undisturbed: Calm) -> None:
    """The same processes went on from the newest image that was known to be safe, or a newer one.

    That is at most so many steps old, unless the machine needs several of these short steps for an image.
    """
    run.check_losses(undisturbed)
    assert len(run.losses) == len(run.kills), run.said
    distances: list[int] = []
    for kill, loss in zip(run.kills, run.losses, strict=True):
        assert loss["lost"].startswith(f"rank {kill['slot']} owned ")
        assert loss["image"]
        known = [
            row["image"] for row in run.written
            if row.get("generation") == loss["generation"] - 1 and "image" in row and row["step"] < kill["step"]
        ]  # fmt: skip
        assert max(known, default=0) <= loss["step"] <= kill["step"], (kill, loss)
        distances.append(kill["step"] - loss["step"])
    assert statistics.median(distances) <= EVERY + 1
    assert run.said.count("[went-back]") == len(run.kills)
    assert "[state-lost]" not in run.said
    begun = check_survivors(run.computed, run.kills, undisturbed.samples_of, back=max(distances))
    assert sum(times - 1 for times in begun.values()) <= sum(distances)


shared_or_not = pytest.mark.parametrize("shares_memory", [False, *nightly(True)], ids=["gloo", "shared"])


@pytest.mark.fault("FT-1", "FT-2")
@shared_or_not
@pytest.mark.parametrize(
    ("own", "victim"),
    [("1,1,1", 1), *nightly(("2,0,1", 0), ("2,0,1", 2), ("1,2,3", 0), ("1,2,3", 2), is_many=True)],
    ids=lambda value: str(value),
)
def test_the_others_go_back_to_an_image_wherever_an_owner_is_killed(
    own: str, victim: int, shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    phases = [*PHASES, *(["image_answer"] if own != "2,0,1" else [])]  # a rank that keeps no image gives no answer
    faults = one_after_the_other(victim, nth=6, phases=phases)
    task: dict[str, Any] = {"shares_memory": shares_memory, "are_nodes": True}
    run = Run(chaos, tmp_path, faults, own=own, task=task, **IN_MEMORY)
    check_each_goes_back_in_place(run, undisturbed)


@pytest.mark.fault("FT-1")
@shared_or_not
def test_a_kill_between_two_units_of_new_parameters_spoils_no_image(
    shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    task = {"shares_memory": shares_memory, "has_place_in_gather": True, "are_nodes": True}
    place: dict[str, Any] = {"phase": "transfer", "nth": 2}
    faults = Faults().kill(rank=2).at(step=8, **place).kill(rank=0).at(step=30, **place)
    check_each_goes_back_in_place(Run(chaos, tmp_path, faults, own="2,0,1", task=task, **IN_MEMORY), undisturbed)


def check_no_checkpoint_is_opened(run: Run, undisturbed: Calm, watched: Path) -> None:
    """From each kill until the survivors compute again."""
    run.check_curve(undisturbed)
    assert all(loss["image"] for loss in run.losses)
    opened = read_opened(watched)
    assert opened, "saves open files"
    for kill, loss in zip(run.kills, run.losses, strict=True):
        began_s = kill["monotonic_s"]
        assert [name for at_s, name in opened if began_s <= at_s <= began_s + loss["seconds"]] == []


@pytest.mark.fault("FT-1")
def test_no_checkpoint_is_opened_on_the_way_back_to_an_image(chaos: Chaos, undisturbed: Calm, tmp_path: Path) -> None:
    faults = Faults().kill(rank=2).at(step=19, phase="reduce").kill(rank=0).at(step=54, phase="commit")
    # a save under way would be looked for
    saving = {"save_interval_updates": 7, "no_epoch_checkpoints": True, "memory_interval_updates": 1, **SLOWLY}
    task = {"are_nodes": True, "notes_opens": True}
    run = Run(chaos, tmp_path, faults, own="2,0,1", task=task, **saving)
    check_no_checkpoint_is_opened(run, undisturbed, tmp_path / "watched")


@pytest.mark.fault("FT-21")
@pytest.mark.parametrize("shares_memory", [True, *nightly(False)])
@pytest.mark.parametrize("name", [*OFTEN, *nightly(*(name for name in RECOVERIES if name not in OFTEN))])
def test_kills_while_the_others_recover(
    name: str, shares_memory: bool, chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    faults, has_owner = RECOVERIES[name]
    task: dict[str, Any] = {"shares_memory": shares_memory, "are_nodes": True}
    run = Run(chaos, tmp_path, faults, own="2,0,1", task=task, **IN_MEMORY)
    run.check_losses(undisturbed)
    went_back = [event for event in run.found.events if event.get("image")]
    # rank 2 has its second place at rank 0: with both the memory of both is lost, and the run begins again
    are_both_lost = name == "both owners in the same instant"
    assert bool(went_back) == (has_owner and not are_both_lost)
    assert not are_both_lost or "[state-lost]" in run.said


@pytest.mark.fault("FT-21")
def test_two_ranks_at_once_cost_no_more_if_neither_has_what_the_other_owns(
    chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    faults = Faults().kill(rank=1).at(step=20, phase="reduce").kill(rank=2).at(step=20, phase="reduce")
    run = Run(chaos, tmp_path, faults, own="2,0,1", task={"are_nodes": True}, **IN_MEMORY)
    run.check_losses(undisturbed)
    assert [event["step"] for event in run.found.events if event.get("image")] == [18], run.said
    assert "[state-lost]" not in run.said


@pytest.mark.fault("FT-21")
def test_two_owners_that_keep_the_images_of_each_other_send_all_back_to_the_newest_checkpoint(
    chaos: Chaos, undisturbed: Calm, tmp_path: Path
) -> None:
    faults = Faults().kill(rank=0).at(step=20, phase="reduce").kill(rank=2).at(step=20, phase="reduce")
    saving = {"save_interval_updates": 5, "no_epoch_checkpoints": True, "memory_interval_updates": EVERY, **SLOWLY}
    run = Run(chaos, tmp_path, faults, own="2,0,1", task={"are_nodes": True}, **saving)
    run.check_curve(undisturbed)
    (loss,) = [event for event in run.found.events if event.get("lost")]
    assert loss["lost"] == "ranks 0 and 2 owned 100 % of the state, and no other rank holds it"
    assert (loss["step"] in (10, 15), loss.get("image")) == (True, None)
    assert run.said.count("all ranks continue from the newest state in memory or on disk [state-lost]") == 1
