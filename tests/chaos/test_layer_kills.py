"""Ranks that are killed where parameters come and go (`--shard-model all`): in any layer, and in every phase of a step.

Three ranks, each of which keeps states in memory that no other process sees, so that a kill is the loss of a node.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint.images import free_images
from hetseq.errors import EXIT_FAILED
from hetseq.run_directory import RunDirectory
from hetseq.testing import Faults
from tests.chaos.owned_runs import IN_LAYERS, RECOVERIES, Calm, Run
from tests.chaos.runs import Chaos
from tests.chaos.test_image_kills import IN_MEMORY, check_each_goes_back_in_place, check_no_checkpoint_is_opened
from tests.chaos.test_owned_kills import SAVING, check_each_costs_one_step, check_each_goes_back
from tests.support.nightly import nightly
from tests.support.watched import LAYERS as WATCHED_LAYERS
from tests.support.watched import write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: how often a rank passes each phase in a step, with four layers and a root
PASSES = {"round": 1, "layer_forward": 4, "layer_backward": 3, "layer_sum": 5}
IN_STEPS = ["count", "forward_backward", "clip", "boundary", "reduce", "commit", "optimizer"]
STEPS = 3  # that each process makes before it is killed
LAYERS = [(phase, number) for phase, passes in PASSES.items() for number in range(passes)]
SOME_LAYERS = [("round", 0), ("layer_forward", 0), ("layer_forward", 2), ("layer_backward", 1), ("layer_sum", 0),
               ("layer_sum", 4)]  # fmt: skip
shared_or_not = pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])


def in_turn(victim: int, places: list[tuple[str, int]]) -> Faults:
    """Each process in that slot is killed at another place: a phase, and which of its passes in a step."""
    faults = Faults()
    for incarnation, (phase, number) in enumerate(places):
        nth = STEPS * PASSES.get(phase, 1) + number + 1
        faults = faults.kill(rank=victim).at(phase=phase, nth=nth, incarnation=incarnation)
    return faults


def task(shares_memory: bool, **more: Any) -> dict[str, Any]:
    return {"shares_memory": shares_memory, "has_layers": True, **more}


@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize(
    ("own", "victim", "shares_memory"),
    [
        ("1,1,1", 1, True),
        *nightly(
            ("2,0,1", 2, False),
            ("1,1,1", 1, False),
            ("2,0,1", 2, True),
            ("2,0,1", 0, True),
            ("1,2,3", 0, False),
            is_many=True,
        ),
    ],
)
def test_the_others_go_back_to_an_image_wherever_an_owner_is_killed(
    own: str, victim: int, shares_memory: bool, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults = in_turn(victim, [*SOME_LAYERS, *((phase, 0) for phase in IN_STEPS[-3:])])
    run = Run(chaos, tmp_path, faults, own=own, task=task(shares_memory, are_nodes=True), **IN_MEMORY)
    check_each_goes_back_in_place(run, undisturbed_layers)


@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize("shares_memory", [False, *nightly(True)])
@pytest.mark.parametrize("own", ["2,0,1"])
def test_a_rank_that_owns_nothing_costs_one_step_wherever_it_is_killed(
    own: str, shares_memory: bool, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults = in_turn(1, SOME_LAYERS)
    run = Run(chaos, tmp_path, faults, own=own, task=task(shares_memory), **SAVING)
    check_each_costs_one_step(run, undisturbed_layers)


@pytest.mark.fault("FT-1", "FT-2")
def test_an_owner_of_frozen_weights_that_no_checkpoint_holds_is_killed(
    chaos: Chaos, undisturbed_base: Calm, tmp_path: Path
) -> None:
    faults = in_turn(1, [("layer_forward", 2), ("layer_backward", 1), ("commit", 0)])
    run = Run(chaos, tmp_path, faults, own="1,1,1", task=task(True, are_nodes=True, has_base=True), **IN_MEMORY)
    check_each_goes_back_in_place(run, undisturbed_base)
    assert run.said.count("are built again, for what a lost rank owned of them") >= len(run.kills)


@pytest.mark.fault("FT-1")
def test_so_it_is_where_no_image_is_made(chaos: Chaos, undisturbed_base: Calm, tmp_path: Path) -> None:
    faults = in_turn(2, [("layer_sum", 0), ("commit", 0)])
    run = Run(chaos, tmp_path, faults, own="2,0,1", task=task(False, has_base=True), **SAVING)
    check_each_goes_back(run, undisturbed_base)


@pytest.mark.fault("FT-1")
@pytest.mark.usefixtures("undisturbed_base")  # its processes are warm
def test_a_run_ends_in_words_if_the_frozen_weights_cannot_be_built_again(chaos: Chaos, tmp_path: Path) -> None:
    kinds = task(True, has_base=True, base_changes=True)
    name = write_task(tmp_path / "watched", computing=3, **kinds)
    found = chaos.run(
        faults=Faults().kill(rank=1).at(step=19, phase="layer_backward").text(), task=name, ranks=3, steps=100,
        balance="5,4,3", own="1,1,1", shard_model="all", shard_modules=WATCHED_LAYERS, step_deadline=60, **IN_MEMORY,
    )  # fmt: skip
    free_images(RunDirectory(chaos.newest).run_id, chaos.newest)  # which stay for the next start
    assert found.code == EXIT_FAILED
    assert "a rank is lost that owned a part of the frozen weights" in found.said
    assert "in their place now: bring back the files of the start" in found.said


@pytest.mark.fault("FT-1")
def test_a_rank_without_frozen_weights_of_its_own_is_killed(
    chaos: Chaos, undisturbed_base: Calm, tmp_path: Path
) -> None:
    faults = in_turn(1, [("layer_forward", 2), ("commit", 0)])
    run = Run(chaos, tmp_path, faults, own="2,0,1", task=task(True, has_base=True), **SAVING)
    check_each_costs_one_step(run, undisturbed_base)
    assert "are built again" not in run.said


@pytest.mark.nightly
@pytest.mark.fault("FT-1", "FT-2")
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_kills_over_layers_and_phases(
    seed: int, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    own, victim = chance.choice([("1,1,1", 0), ("1,1,1", 2), ("2,0,1", 0), ("2,0,1", 2), ("3,2,1", 1)])
    places = [LAYERS[(10 * seed + number) % len(LAYERS)] for number in range(8)]
    places += [(phase, 0) for phase in chance.sample(IN_STEPS, 2)]
    chance.shuffle(places)
    kinds = task(shares_memory=bool(seed % 2), are_nodes=True)
    run = Run(chaos, tmp_path, in_turn(victim, places), own=own, task=kinds, **IN_MEMORY)
    check_each_goes_back_in_place(run, undisturbed_layers)


@pytest.mark.fault("FT-1")
def test_no_checkpoint_is_opened_on_the_way_back_to_an_image(
    chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults = Faults().kill(rank=2).at(step=19, phase="layer_backward", nth=2)
    faults = faults.kill(rank=0).at(step=54, phase="layer_forward", nth=3)
    saving = {**IN_MEMORY, "save_interval_updates": 7, "no_epoch_checkpoints": True, "memory_interval_updates": 1}
    del saving["no_save"]
    run = Run(chaos, tmp_path, faults, own="2,0,1", task=task(True, are_nodes=True, notes_opens=True), **saving)
    check_no_checkpoint_is_opened(run, undisturbed_layers, tmp_path / "watched")


@pytest.mark.nightly
@pytest.mark.fault("FT-1")
@shared_or_not
def test_an_owner_sends_all_back_to_the_newest_checkpoint_where_no_image_is_made(
    shares_memory: bool, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    run = Run(chaos, tmp_path, in_turn(2, SOME_LAYERS), own="2,0,1", task=task(shares_memory), **SAVING)
    check_each_goes_back(run, undisturbed_layers)


@pytest.mark.nightly
@pytest.mark.fault("FT-21")
@shared_or_not
@pytest.mark.parametrize("name", RECOVERIES)
def test_kills_while_the_others_recover(
    name: str, shares_memory: bool, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults, has_owner = RECOVERIES[name]
    run = Run(chaos, tmp_path, faults, own="2,0,1", task=task(shares_memory, are_nodes=True), **IN_MEMORY)
    run.check_losses(undisturbed_layers)
    are_both_lost = name == "both owners in the same instant"
    assert any(event.get("image") for event in run.found.events) == (has_owner and not are_both_lost)


@pytest.mark.fault("FT-3")
@pytest.mark.parametrize("phase", ["layer_backward", *nightly(*(one for one in IN_LAYERS if one != "layer_backward"))])
def test_a_rank_that_is_stopped_amid_a_micro_batch_is_given_up_at_the_deadline(
    phase: str, chaos: Chaos, undisturbed_layers: Calm, tmp_path: Path
) -> None:
    faults = Faults().stop(rank=2, seconds=float("inf")).at(step=19, phase=phase)
    options = {**IN_MEMORY, "step_deadline": 3}
    run = Run(chaos, tmp_path, faults, own="2,0,1", task=task(True, are_nodes=True), **options)
    run.check_losses(undisturbed_layers)
    (loss,) = [event for event in run.found.events if event.get("image")]
    before = [row for row in run.written if row.get("generation") == loss["generation"] - 1]
    known = [row["image"] for row in before if row["step"] < 19 and "image" in row]
    assert max(known, default=0) <= loss["step"] < 19, run.said  # the newest one that was known to be safe, or newer
    assert loss["step"] > 0
