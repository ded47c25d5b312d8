"""One run directory, four worlds: 4 ranks, then 3, then 5, then 1, each of them killed but the last, with dropout on.

The judge is a calm run on one process, and the tolerance 1e-12 in float64, relative, for every number that the run has
computed. Going on on one process bit for bit is the subject of test_resume.py.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetseq.monitor.metrics import read_rows
from tests.support import forked
from tests.support.commands import HETSEQ
from tests.support.nightly import nightly
from tests.support.trials import curve, events, start_trial, until, validations
from tests.support.worlds import (
    EPOCHS,
    SAVE_EVERY,
    STEPS_OF_EPOCH,
    TASK,
    Death,
    Result,
    assert_same_result,
    can_go_on_from,
    draw_deaths,
    draw_weights,
    result_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WORLDS = (4, 3, 5, 1)
WORDS = shlex.split(
    f"train --cpu --task {TASK} --precision fp64 --dropout 0.3 --unit-size 2 --global-batch-size 16 --seed 11"
    " --optimizer adam --lr 0.05,0.03 --weight-decay 0.01 --clip-norm 0.5 --warmup-updates 5 --total-num-update 120"
    f" --max-epoch {EPOCHS} --save-interval-updates {SAVE_EVERY}"
)


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """Most commands here begin after their imports."""
    forked.warm_up()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run on one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("calm")
    write_plan(folder)
    start_to_end(folder, is_cold=True)
    result = result_of(folder / "run")
    assert max(result.curve) == STEPS_OF_EPOCH * EPOCHS
    assert not events(folder / "run", "resume")
    return result


def start_to_end(folder: Path, *, is_cold: bool = False) -> None:
    """A start on one process that nobody kills."""
    with start_trial([*WORDS, "--data", folder], folder / "run", program=HETSEQ, is_cold=is_cold) as trial:
        finished = trial.finish()
    assert finished.code == 0, finished.err


def start_to_death(folder: Path, death: Death, *words: object, resumes: int, is_cold: bool = False) -> None:
    """A start that ends as `death` says: kill -9 of all its processes, one of which stands there.

    `resumes`: so many starts of this run have gone on, this one included.
    """
    run, held = folder / "run", folder / f"held-{death.updates}"
    with start_trial([*WORDS, "--data", folder, *words], run, program=HETSEQ, is_cold=is_cold) as trial:

        def is_held() -> bool:
            assert trial.command.poll() is None, f"ended early: {trial.command.said()}"
            return held.exists() and can_go_on_from(run, death.save) and is_told()

        def is_told() -> bool:
            # rows and events are written behind the steps, and what is not written dies with its writer
            rows = {} if not (run / "metrics.jsonl").exists() else (validations if death.is_at_border else curve)(run)
            return death.save in rows and len(events(run, "resume")) == resumes

        until(is_held, f"{death}")
        trial.kill_everything()


def write_plan(folder: Path, deaths: Sequence[Death] = (), *, spoil: str | None = None) -> None:
    holds = {death.updates: death.place for death in deaths}
    (folder / "plan.json").write_text(json.dumps({"holds": holds, "spoil": spoil}))


def run_on_all_worlds(folder: Path, seed: int, *, spoil: str | None = None) -> list[Death]:
    """4 ranks -> 3 -> 5 -> 1 by chance; with `spoil` the five ranks do that wrong."""
    draw = random.Random(seed)
    deaths = draw_deaths(draw, len(WORLDS) - 1)
    for number, (world, death) in enumerate(zip(WORLDS, deaths)):
        write_plan(folder, deaths, spoil=spoil if world == 5 else None)
        shares = ["--distributed-world-size", world, "--balance", draw_weights(draw, world)]
        shares += ["--memory-interval-updates", 0]  # what is gone on from is a save
        start_to_death(folder, death, *shares, resumes=number, is_cold=number == 0 and seed == 3)
    write_plan(folder, deaths)
    start_to_end(folder)
    return deaths


@pytest.mark.parametrize("seed", [1, *nightly(2, 3)])
def test_a_run_killed_on_4_then_3_then_5_ranks_ends_on_1_as_if_it_had_never_left_it(
    tmp_path: Path, calm: Result, seed: int
) -> None:
    deaths, run = run_on_all_worlds(tmp_path, seed), tmp_path / "run"
    resumed_from = [event["step"] for event in events(run, "resume")]
    assert resumed_from == [death.save for death in deaths]
    is_border = [calm.curve[step]["epoch"] != calm.curve[step + 1]["epoch"] for step in resumed_from]
    assert is_border == [death.is_at_border for death in deaths]
    assert {*is_border} == {True, False}, "some go on in the middle of an epoch, some at a border"

    rows = [row for row in read_rows(run / "metrics.jsonl") if "loss" in row]
    assert [*dict.fromkeys(row["world_size"] for row in rows)] == [*WORLDS]
    assert all(len({*row["shares"]}) > 1 for row in rows if row["world_size"] > 1), "no step was divided equally"
    worst = assert_same_result(result_of(run), calm)
    print(f"seed {seed}: {deaths}; largest relative error {worst:.1e}")


@pytest.mark.parametrize("every", nightly(1, 0))
def test_so_does_one_that_is_killed_at_any_instants(tmp_path: Path, calm: Result, every: int) -> None:
    """Also in the middle of a save or of a sum of the ranks; from the disk, or from memory after each step."""
    draw, run, deaths = random.Random(), tmp_path / "run", list[int]()
    write_plan(tmp_path)
    for world, (first, last) in zip(WORLDS, ((10, 20), (30, 45), (55, 70))):
        shares = ["--distributed-world-size", world, "--balance", draw_weights(draw, world)]
        slowly = ["--throttle", ",".join(f"{rank}:20" for rank in range(world))]  # to be caught in the middle
        memory = ["--memory-interval-updates", every]
        if every:
            memory += ["--save-interval-updates", 1000, "--no-epoch-checkpoints"]  # there is nothing on the disk
        with start_trial([*WORDS, "--data", tmp_path, *shares, *slowly, *memory], run, program=HETSEQ) as trial:
            trial.wait_for_step(draw.randint(first, last))
            trial.kill_everything()
        deaths.append(max(curve(run)))
    start_to_end(tmp_path)
    resumes = events(run, "resume")
    resumed_from = [event["step"] for event in resumes]
    worst = assert_same_result(result_of(run), calm)
    print(f"killed after steps {deaths}, went on from {resumed_from}; largest relative error {worst:.1e}")
    if every:
        # a step whose predecessor is not sealed yet is passed over, so how many are lost is up to the processors
        assert [event["path"] for event in resumes] == [None] * 3
        assert all(before < step <= death for before, step, death in zip([0, *deaths], resumed_from, deaths))
    else:
        assert len(resumed_from) >= 2  # of 3: before the first save a run begins anew


@pytest.mark.parametrize("spoil", ["dropout", *nightly("sample")])
def test_one_link_with_other_dropout_or_at_another_sample_would_be_seen(
    tmp_path: Path, calm: Result, spoil: str
) -> None:
    """The twin: steps before the wrong link are right, those from it on are not."""
    deaths = run_on_all_worlds(tmp_path, 1, spoil=spoil)
    result = result_of(tmp_path / "run")
    with pytest.raises(AssertionError, match=rf"step {deaths[1].save + 1}\b"):
        assert_same_result(result, calm)
    right = [step for step in calm.curve if result.curve[step]["loss"] == pytest.approx(calm.curve[step]["loss"])]
    assert right == [*range(1, deaths[1].save + 1)]


def test_the_comparison_sees_one_number_that_is_off_by_a_billionth(calm: Result) -> None:
    """The twin of the comparison itself."""
    assert assert_same_result(calm, calm) == 0
    for key in ("loss", "grad_norm"):
        rows = {step: dict(row) for step, row in calm.curve.items()}
        rows[17][key] *= 1 + 1e-9
        with pytest.raises(AssertionError, match=rf"{{'{key} of step 17': '1\.0e-09'}}"):
            assert_same_result(dataclasses.replace(calm, curve=rows), calm)
    for name, tensor in calm.tensors.items():
        changed = tensor.clone()
        if name.endswith(".step"):  # the optimizer's count, in float32
            changed += 1
        else:
            changed.view(-1)[changed.abs().argmax()] *= 1 + 1e-9
        with pytest.raises(AssertionError, match=rf"{{'{name}': '1\.\de-0[29]'}}"):
            assert_same_result(dataclasses.replace(calm, tensors={**calm.tensors, name: changed}), calm)
    valid = {step: loss * (1 + 1e-9) for step, loss in calm.valid.items()}
    with pytest.raises(AssertionError, match="validation after step 84"):
        assert_same_result(dataclasses.replace(calm, valid=valid), calm)
    with pytest.raises(AssertionError, match="another place in the data"):
        assert_same_result(dataclasses.replace(calm, state={**calm.state, "consumed": 1}), calm)
