"""With `--shard-model all`, memory that runs out in any layer: no rank hangs, and the losses stay as they are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.failing_layers import (
    BACKWARD,
    CALM,
    FORWARD,
    LAYERS,
    ROOT,
    Appetite,
    Fault,
    Layered,
    Poisoned,
    Skipping,
    check,
    dine,
    fail,
    rounds_of,
    words_for,
)
from tests.support.hungry import prepared, words_of
from tests.support.nightly import nightly
from tests.support.ranks import run_ranks

shared_or_not = pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])


@shared_or_not
@pytest.mark.parametrize("task", [Layered, Skipping])
@pytest.mark.parametrize(
    ("own", "balance"), [("1,2,1", "5,3,2"), *nightly(("3,1", "1,1"), ("1,0,2", "2,3,0"), is_many=True)]
)
def test_a_calm_run_has_one_attempt_of_each_step(
    own: str, balance: str, task: type[Layered], shares_memory: bool, tmp_path: Path
) -> None:
    told = words_of(10, balance=balance, max_sentences=3)
    (meals,) = dine(tmp_path, told, own, [[CALM] * (own.count(",") + 1)], shares_memory, task)
    assert check(meals, 10, task) == 0


PLACES = [(layer, phase) for layer in (*LAYERS, ROOT) for phase in (FORWARD, BACKWARD)]


@shared_or_not
@pytest.mark.parametrize("layers", [LAYERS[:1], [LAYERS[3], ROOT], *nightly([*LAYERS, ROOT])], ids=len)
def test_memory_that_runs_out_in_any_layer_costs_one_attempt(
    layers: list[str], shares_memory: bool, tmp_path: Path
) -> None:
    appetites = []
    for number, place in enumerate((layer, phase) for layer in layers for phase in (FORWARD, BACKWARD)):
        hungry = Appetite((Fault(2 + number % 2, *place),))  # the first six samples lack a term
        appetites.append([hungry, CALM] if number % 2 else [CALM, hungry])
    told = words_of(10, balance="1,1", max_sentences=3)
    for meals in dine(tmp_path, told, "3,1", appetites, shares_memory):
        assert check(meals, 10) == 1


@shared_or_not
def test_memory_that_runs_out_again_in_the_repeated_attempt_costs_another_one(
    shares_memory: bool, tmp_path: Path
) -> None:
    # of rank 0 micro-batches of 8, 4 and 2 samples fail, of rank 1 one of 8 at the same time as the first of these
    hungry = Appetite((Fault(0, LAYERS[2], BACKWARD), Fault(1, LAYERS[4]), Fault(4, ROOT, BACKWARD)))
    told = words_of(16, balance="1,1,0", max_sentences=8)
    (meals,) = dine(tmp_path, told, "1,1,2", [[hungry, Appetite((Fault(0, LAYERS[0]),)), CALM]], shares_memory)
    assert check(meals, 16) == 3
    assert [rounds_of(attempts) for attempts in zip(*(meal.steps[1] for meal in meals))] == [1, 2, 4, 8]


@shared_or_not
def test_memory_that_runs_out_in_validation_concerns_one_rank(shares_memory: bool, tmp_path: Path) -> None:
    told = words_of(15, balance="1,1,1", max_sentences=4, validate_interval=1)
    told.remove("--disable-validation")
    faults = [Appetite(validation=(Fault(0, layer),)) for layer in (ROOT, LAYERS[2], LAYERS[0])]
    alone = [[one if rank == number else CALM for rank in range(3)] for number, one in enumerate(faults)]
    calm, *hungry = dine(tmp_path, told, "1,2,1", [[CALM] * 3, *alone, faults], shares_memory)
    assert calm[0].valid
    for meals in (calm, *hungry):
        assert check(meals, 15) == 0
        assert all(meal.valid == pytest.approx(calm[0].valid, rel=1e-14) for meal in meals)
    for rank, meals in enumerate(hungry[:3]):
        assert [meal.failed_validations for meal in meals] == [int(number == rank) for number in range(3)]


@pytest.mark.parametrize("seed", [1, *nightly(*range(2, 8))])
@pytest.mark.parametrize("task", [Layered, Skipping])
@pytest.mark.parametrize("own", ["1,2,1", *nightly("3,1")])
def test_memory_that_runs_out_at_random_moments(own: str, task: type[Layered], seed: int, tmp_path: Path) -> None:
    chance, world_size = random.Random(seed), own.count(",") + 1
    balance = chance.choice({2: ["5,3", "1,1"], 3: ["5,3,1", "2,0,3", "1,1,1"]}[world_size])
    appetites = []
    for _ in range(4):
        appetites.append(
            [
                Appetite(tuple(Fault(number, *chance.choice(PLACES)) for number in sorted(chance.sample(range(12), 4))))
                for _ in range(world_size)
            ]
        )
    told = words_of(16, balance=balance, max_sentences=chance.choice([3, 8]))
    found = dine(tmp_path, told, own, appetites, shares_memory=bool(seed % 2), task=task)
    in_vain = [check(meals, 16, task) for meals in found]
    assert any(in_vain)


@shared_or_not
@pytest.mark.parametrize(("layer", "phase"), [(LAYERS[1], BACKWARD), *nightly(*PLACES, is_many=True)])
def test_a_bug_of_one_rank_is_heard_of_by_the_others_before_any_deadline(
    layer: str, phase: str, shares_memory: bool, tmp_path: Path
) -> None:
    told = words_for("1,2,1", words_of(15, balance="1,1,1", max_sentences=3))
    appetites = [CALM, Appetite((Fault(2, layer, phase),), is_bug=True), CALM]
    (place,) = prepared(tmp_path, 1)
    first, second, third = run_ranks(fail, 3, place, told, appetites, shares_memory, Layered, timeout_s=60)
    assert second[0] == "IndexError: a bug of a task"
    for error, _ in (first, third):
        assert error.startswith("PeerLostError: ")
        assert "sent nothing" not in error


@pytest.mark.parametrize("fault", [None, Fault(4, LAYERS[1]), Fault(4, LAYERS[1], BACKWARD)])
def test_a_step_that_is_not_finite_is_skipped_and_its_rank_named_though_memory_runs_out(
    fault: Fault | None, tmp_path: Path
) -> None:
    # forward 4 of rank 2 is the first one of the search
    told = words_for("1,2,1", words_of(15, balance="1,1,1", max_sentences=3))
    (place,) = prepared(tmp_path, 1)
    appetites = [CALM, CALM, Appetite(() if fault is None else (fault,))]
    found = run_ranks(fail, 3, place, told, appetites, True, Poisoned, timeout_s=60)
    assert any("[batch-halved]" in line for line in found[2][1]) == (fault is not None)
    for error, lines in found:
        assert error == ""
        named = [line for line in lines if "skipped" in line]
        assert all("not finite; rank 0 produced it (" in line and "rank 2" not in line for line in named), named
        assert named
