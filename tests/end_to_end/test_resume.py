"""Going on after any end, with real command lines: the same numbers as if nothing had happened.

On one process (and on the same ranks) that is bit for bit, with dropout on; across different numbers of ranks it is
1e-12 in float64. What is compared is the whole result: every step's row and all tensors of the last checkpoint, the
optimizer's included. Most commands are forked after their imports; what nothing happened to, and the first and the last
start of what is compared with it, are cold ones, so that the seed of Python's hashes differs too.
"""

from __future__ import annotations

import random
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch

from hetseq.checkpoint import read_history
from hetseq.checkpoint.arena import Arena
from hetseq.run_directory import RunDirectory
from tests.support import forked
from tests.support.nightly import nightly
from tests.support.trials import (
    checkpoints,
    curve,
    events,
    is_bit_equal,
    kept,
    largest_difference,
    last_state,
    run_trial,
    start_trial,
    until,
    validations,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HAZARDS = Path(__file__).parents[1] / "support" / "hazards.py"
TOLERANCE = 1e-12
# 15 steps in the first epoch, 5 in each later one
DIGITS = shlex.split(
    "--cpu --task mnist --batch-size 96 --update-freq 1,3 --max-epoch 3 --optimizer adam --lr 0.002"
    " --total-num-update 1000000"  # a run that is made longer has the curve of one that was so long from the start
)
SLOWLY = ["--throttle", "0:6"]  # so that a process can be killed in the middle; it changes no number
STEPS, EPOCH_ENDS = 25, (15, 20, 25)
BALLAST = (
    f"--cpu --task {HAZARDS}:Ballast --global-batch-size 8 --max-update 100000 --optimizer sgd --lr 1"
    " --lr-scheduler constant --clip-norm 0 --save-interval-updates 1 --keep-interval-updates 2"
    " --no-epoch-checkpoints"
).split()


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """Most commands here begin after their imports."""
    forked.warm_up()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to: one process, float32, dropout on."""
    path = tmp_path_factory.mktemp("runs") / "calm"
    finished = run_trial([*DIGITS, "--save-interval-updates", 3], path, is_cold=True)
    assert finished.code == 0, finished.err
    assert max(curve(path)) == STEPS
    return path


def assert_same_run(hurt: Path, calm: Path) -> None:
    assert curve(hurt) == curve(calm)
    assert is_bit_equal(last_state(hurt), last_state(calm))


def test_kill_9_of_everything_at_random_steps_changes_no_bit(tmp_path: Path, calm: Path) -> None:
    words, hurt = [*DIGITS, *SLOWLY, "--save-interval-updates", 3], tmp_path / "hurt"
    draw, deaths = random.Random(), list[int]()
    # twice in the first epoch, once on either side of the border to three micro-batches a step, once in the last epoch
    for first, last in ((2, 6), (8, 12), (14, 15), (16, 18), (20, 23)):
        with start_trial(words, hurt, is_cold=not deaths) as trial:
            trial.wait_for_step(draw.randint(first, last))
            trial.kill_everything()
            deaths.append(max(curve(hurt)))
    assert run_trial([*DIGITS, "--save-interval-updates", 3], hurt, is_cold=True).code == 0
    resumed_from = [event["step"] for event in events(hurt, "resume")]
    print(f"killed after steps {deaths}, went on from {resumed_from}")
    assert len(resumed_from) >= 4
    assert_same_run(hurt, calm)
    strip = {"time_utc"}
    for step, row in validations(calm).items():
        assert {k: v for k, v in validations(hurt)[step].items() if k not in strip} == row

    changed = tmp_path / "changed"
    assert run_trial([*DIGITS, "--seed", 2], changed).code == 0
    assert curve(changed) != curve(calm), "the comparison sees a difference"
    assert not is_bit_equal(last_state(changed), last_state(calm))


def test_a_run_that_was_killed_goes_on_from_the_memory_of_its_node(tmp_path: Path, calm: Path) -> None:
    """Nothing was ever written to the disk but the ends of epochs; still, a kill costs at most the newest two steps."""
    words, hurt = [*DIGITS, *SLOWLY, "--memory-interval-updates", 1], tmp_path / "hurt"
    for first, last in ((4, 8), (12, 14), (17, 19)):
        with start_trial(words, hurt) as trial:
            trial.wait_for_step(random.randint(first, last))
            trial.kill_everything()
            reached, on_disk = max(curve(hurt)), max(kept(hurt), default=0)
        with start_trial(words, hurt) as trial:
            trial.wait_for_step(reached)
            begun = events(hurt, "resume")[-1]
            trial.kill_everything()
        assert on_disk <= 15 < STEPS
        assert begun["path"] is None
        assert reached - 2 <= begun["step"] <= reached
        assert begun["step"] > on_disk
    assert run_trial([*DIGITS, "--save-interval-updates", 3], hurt, is_cold=True).code == 0
    assert_same_run(hurt, calm)
    assert not list(Path("/dev/shm").glob(f"{Arena.prefix(RunDirectory(hurt).run_id)}*"))


@pytest.mark.nightly  # test_resume_worlds has 4, 3, 5 and 1
def test_killed_runs_on_3_then_2_then_1_ranks_are_one_run(tmp_path: Path) -> None:
    common = [*DIGITS, "--precision", "fp64", "--dropout", 0, "--save-interval-updates", 2]
    alone, hurt = tmp_path / "alone", tmp_path / "hurt"
    assert run_trial(common, alone).code == 0
    at = common.index("--batch-size") + 1

    def words(sentences: int, *more: object) -> list[object]:
        return [*common[:at], sentences, *common[at + 1 :], *more]

    starts = [
        words(32, "--distributed-world-size", 3, "--balance", "5,2,1", "--throttle", "0:6"),
        words(32, "--distributed-world-size", 2, "--balance", "1,3", "--throttle", "1:6"),
        words(32, "--distributed-world-size", 2, "--balance", "7,1", "--throttle", "0:6"),
    ]
    for start, step in zip(starts, (4, 13, 19)):
        with start_trial(start, hurt, is_cold=step == 4) as trial:
            trial.wait_for_step(step)
            until(lambda: kept(hurt), "a commit, which comes some steps after its save")
            said = trial.command.said()
            trial.kill_everything()
        if step != 4:
            assert "the global batch stays 96 samples x 1,3, as in the checkpoint" in said
            assert "the options would give 64 samples x 1,3" in said
    finished = run_trial(words(10), hurt)
    assert finished.code == 0
    assert "the options would give 10 samples x 1,3" in finished.err
    expected, found = curve(alone), curve(hurt)
    assert found.keys() == expected.keys()
    worst = max(abs(found[step]["loss"] - expected[step]["loss"]) for step in expected)
    parameters = largest_difference(last_state(hurt), last_state(alone))
    print(f"largest difference of the losses {worst:.1e}, of parameters and optimizer {parameters:.1e}")
    assert worst <= TOLERANCE
    assert parameters <= TOLERANCE
    assert [found[step]["samples"] for step in found] == [expected[step]["samples"] for step in expected]


def test_batches_by_tokens_go_on_where_they_were(tmp_path: Path) -> None:
    words = f"--cpu --task {HAZARDS}:Tokens --max-tokens 40 --update-freq 1,2 --max-epoch 3 --optimizer sgd".split()
    words += ["--save-interval-updates", "1", "--num-workers", "2"]
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    assert run_trial(words, whole).code == 0
    steps = max(curve(whole))
    for step in (3, steps - 8):
        with start_trial([*words, "--throttle", "0:50"], hurt) as trial:
            trial.wait_for_step(step)
            trial.kill_everything()
    assert run_trial(words, hurt).code == 0
    assert len({row["samples"] for row in curve(whole).values()}) > 2, "the steps differ in size"
    assert_same_run(hurt, whole)


def test_a_finished_run_has_nothing_left_to_do_and_goes_on_with_more_epochs(tmp_path: Path, calm: Path) -> None:
    shorter, run = [*DIGITS, "--max-epoch", 1], tmp_path / "run"
    assert run_trial(shorter, run).code == 0
    rows = (run / "metrics.jsonl").read_bytes()
    again = run_trial(shorter, run)
    assert again.code == 0
    assert "nothing left to do" in again.err
    assert (run / "metrics.jsonl").read_bytes() == rows
    assert kept(run).keys() == {15}, "it ended exactly at the border of an epoch"
    assert run_trial(DIGITS, run).code == 0
    assert_same_run(run, calm)


def test_a_run_killed_in_its_first_step_begins_anew(tmp_path: Path, calm: Path) -> None:
    words, run = [*DIGITS, *SLOWLY], tmp_path / "run"
    with start_trial(words, run) as trial:
        trial.wait_for_step(1)
        trial.kill_everything()
    assert kept(run) == {}
    with start_trial([*words, "--max-update", 1], run) as trial:
        assert trial.finish().code == 0
    assert kept(run) == {1: {"final"}}
    assert run_trial([*DIGITS, "--save-interval-updates", 3], run).code == 0
    assert_same_run(run, calm)


def test_retention_keeps_the_last_of_each_kind_and_the_best(tmp_path: Path) -> None:
    words = [*DIGITS, "--max-epoch", 4, "--save-interval-updates", 2]
    words += ["--keep-last-epochs", 2, "--keep-interval-updates", 2, "--persistent-time-interval", 0]
    run = tmp_path / "run"
    # a rate at which the first epoch is the best one
    words += ["--lr", "0.002,1.0"]
    assert run_trial(words, run).code == 0
    best = min(validations(run).values(), key=lambda row: float(row["valid_loss"]))
    assert best["step"] == 15
    found = kept(run)
    assert found.keys() == {15, 25, 28, 30}
    assert "best" in found[15]
    assert "interval" in found[28]
    assert {"epoch", "interval", "final"} <= found[30]
    steps = [checkpoint.identity.step for checkpoint in checkpoints(run).list()]
    assert steps == sorted(steps, reverse=True)
    for commit in checkpoints(run).list():
        assert checkpoints(run).verify(commit) == []
    other = tmp_path / "from-the-best"
    finished = run_trial([*words[:-2], "--max-update", 16, "--resume", "best"], run)
    assert finished.code == 2, "going back within one directory would make `latest` ambiguous"
    assert "go back in another directory" in finished.err
    best_path = next(commit.path for commit in checkpoints(run).list() if "best" in commit.kinds)
    assert run_trial([*words[:-2], "--max-update", 16, "--resume", best_path], other).code == 0
    assert curve(other).keys() == {16}


def test_timed_checkpoints_are_the_only_ones_where_the_others_are_switched_off(tmp_path: Path, calm: Path) -> None:
    run = tmp_path / "run"
    words = [*DIGITS, *SLOWLY, "--persistent-time-interval", 0.2, "--no-epoch-checkpoints", "--no-last-checkpoints"]
    with start_trial(words, run) as trial:
        until(lambda: len(events(run, "save")) >= 3, "three timed checkpoints")
        trial.kill_everything()
    assert run_trial(words, run).code == 0
    assert curve(run) == curve(calm)
    kinds = [set(event["kinds"]) for event in events(run, "save")]
    assert all(found <= {"time", "best"} for found in kinds), kinds
    assert sum("time" in found for found in kinds) >= 3
    assert 1 <= sum("time" in found for found in kept(run).values()) <= 2, "of the timed ones the last two stay"


def test_what_is_not_to_be_saved_is_not(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert run_trial([*DIGITS, "--no-save"], nothing).code == 0
    assert kept(nothing) == {}
    with start_trial([*DIGITS, *SLOWLY, "--no-save"], tmp_path / "stopped") as trial:
        trial.wait_for_step(2)
        trial.signal(signal.SIGTERM, trial.launcher)
        finished = trial.finish()
    assert finished.code == 1, "there is nothing to go on from"
    assert "nothing was ever saved" in finished.err
    assert kept(tmp_path / "stopped") == {}

    bare = tmp_path / "bare"
    words = [*DIGITS, "--no-save-optimizer-state", "--disable-validation"]
    assert run_trial([*words, "--max-epoch", 1], bare).code == 0
    assert not any(name.startswith("optim.") for name in last_state(bare).tensors)
    finished = run_trial(words, bare)
    assert finished.code == 0
    assert finished.err.count("holds no optimizer state: the optimizer starts afresh") == 1


def test_another_run_is_a_beginning_and_resets_belong_to_the_beginning(tmp_path: Path, calm: Path) -> None:
    """A fine-tuning command that is killed and given again must not begin its data anew a second time."""
    checkpoint = next(commit.path for commit in checkpoints(calm).list() if commit.identity.step == 20)
    tuning = shlex.split(
        "--cpu --task mnist --global-batch-size 100 --optimizer sgd --lr 0.05 --max-update 20 --seed 5"
        f" --resume {checkpoint} --reset-optimizer --reset-dataloader --reset-lr-scheduler --reset-meters"
        " --save-interval-updates 2"
    )
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    assert run_trial(tuning, whole).code == 0
    assert curve(whole)[21]["epoch"] == 1
    assert curve(whole)[21]["lr"] == pytest.approx(0.05)
    assert max(curve(whole)) == 40, "20 updates of its own"
    with start_trial([*tuning, *SLOWLY], hurt) as trial:
        trial.wait_for_step(28)
        trial.kill_everything()
    finished = run_trial(tuning, hurt)
    assert finished.code == 0
    assert "was the beginning of this run, which has continued since" in finished.err
    assert_same_run(hurt, whole)


def test_the_command_line_wins_for_the_optimizer_and_is_refused_for_the_rest(tmp_path: Path) -> None:
    run, words = tmp_path / "run", [*DIGITS, "--disable-validation", "--seed", 1]
    assert run_trial([*words, "--max-epoch", 1], run).code == 0
    finished = run_trial([*words, "--seed", 3], run)
    assert finished.code == 2
    assert "trained with seed 1, this command says 3" in " ".join(finished.err.split())
    finished = run_trial([*words, "--max-epoch", 2, "--optimizer-overrides", "{'eps': 1e-6}", "--lr", 0.004], run)
    assert finished.code == 0, finished.err
    assert curve(run)[20]["lr"] == pytest.approx(0.004, rel=1e-3)
    assert run_trial([*words, "--resume", 20, "--max-update", 21], run).code == 0
    assert run_trial([*words, "--resume", 15], run).code == 2


@pytest.mark.fault("FT-11")
@pytest.mark.parametrize("world", nightly(2, 1))
def test_kill_9_during_a_save_6_times_by_command_line(tmp_path: Path, world: int) -> None:
    draw, run, torn_off = random.Random(), tmp_path / "run", 0
    last = 0
    for number in range(6):
        _kill_during_a_save(run, draw.uniform(0, 0.2), world=world, is_cold=number == 0)
        torn_off += _has_unfinished(run)
        last = _check_after_kill(run, at_least=last)
    print(f"world {world}: 6 kills, {torn_off} in the middle of a save, 0 torn, 0 lost; reached step {last}")


@pytest.mark.nightly
def test_kill_9_during_a_save_100_times(tmp_path: Path) -> None:
    """Launcher, server and workers of a command line that did not have to import anything, on one rank and on two."""
    draw, run = random.Random(), tmp_path / "run"
    in_the_middle = last = 0
    for number in range(100):
        _kill_during_a_save(run, draw.uniform(0, 0.1), world=1 + number % 2)
        in_the_middle += _has_unfinished(run)
        last = _check_after_kill(run, at_least=last)
    print(f"100 kills, {in_the_middle} in the middle of a save, 0 torn, 0 lost; reached step {last}")
    assert in_the_middle >= 20

    part = last_state(run).path / "part-00000.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(AssertionError, match=r"part-00000\.safetensors"):
        _check_after_kill(run, at_least=last)


def _kill_during_a_save(run: Path, after_s: float, *, world: int, is_cold: bool = False) -> None:
    """kill -9 of everything at an instant after the first save that a start acknowledges."""
    with start_trial([*BALLAST, "--distributed-world-size", world], run, is_cold=is_cold) as trial:
        begun = len(events(run, "save"))
        until(lambda: len(events(run, "save")) > begun, "a save")
        instant = time.monotonic() + after_s
        until(lambda: time.monotonic() >= instant, "the instant")
        trial.kill_everything()


def _has_unfinished(run: Path) -> bool:
    """Whether a save was under way when everything was killed."""
    folders = list((run / "checkpoints").glob("step-*"))
    return any(not (folder / "COMMIT.json").exists() for folder in folders)


def _check_after_kill(run: Path, *, at_least: int) -> int:
    """The newest step, after a look at every checkpoint: none is torn, and what was promised is there."""
    manager = checkpoints(run)
    promised = [event["step"] for event in events(run, "save")]
    promised += [int(row["step"]) for row in read_history(run / "checkpointHistories.csv") if row["result"] == "ok"]
    torn = {str(commit.path): manager.verify(commit) for commit in manager.list() if manager.verify(commit)}
    assert torn == {}
    state = last_state(run)
    assert state.identity.step >= max([at_least, *promised]), "acknowledged but lost"
    assert state.state["step"] == state.identity.step
    weight = state.tensors["model.weight"]
    assert torch.all(weight == -state.identity.step), "the state of another step, or of two"
    return state.identity.step
