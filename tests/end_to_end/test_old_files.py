"""The present commands resume and evaluate the runs of earlier versions in `tests/golden`.

The task `Exact` never rounds, so its resumed runs must end with the same bits as the undisturbed run. The other runs
are compared within a tolerance, because another processor or another torch rounds differently.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetseq.monitor.metrics import read_rows
from tests.support import forked
from tests.support.commands import HETSEQ, Finished, run_command
from tests.support.old_files import describe, digest, losses, planted, runs, told, unpack
from tests.support.trials import checkpoints, events

pytestmark = pytest.mark.slow

ONE = ["--devices", "cpu", "--balance", "equal"]
TWO = ["--devices", "cpu,cpu", "--balance", "3,1"]
LAST = 12  # of the steps of `Exact`
# Another processor adds in another order. Measured: 0 on the processor that wrote the files; at most 4.8e-7 there with
# the kernels of older processors (ATEN_CPU_CAPABILITY=avx2, ATEN_CPU_CAPABILITY=default).
TOLERANCE = 1e-5
# Of fp16, whose products keep 11 bits: two units in the last place of a loss of 2.5. Measured: 0 with all of them.
TOLERANCE_FP16 = 2e-3


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """All commands here are forked after their imports."""
    forked.warm_up()


def run(words: Sequence[object], folder: Path, *, code: int = 0) -> Finished:
    """`hetseq WORDS` in the folder of an unpacked archive."""
    finished = run_command([str(word) for word in words], cwd=folder, program=HETSEQ, is_cold=False)
    assert finished.code == code, finished.err
    return finished


def folder_of(run_directory: Path, step: int) -> Path:
    """The folder of the only checkpoint of a step, relative to the folder in which the commands run."""
    (found,) = (run_directory / "checkpoints").glob(f"step-{step:09d}.*")
    return found.relative_to(run_directory.parent)


def assert_ends_as_it_did(run_directory: Path, *, after: int) -> None:
    """The losses of all steps after `after` and the last tensors are bit-equal to those of the undisturbed run."""
    expected = runs()["exact"]
    found = losses(run_directory)
    assert {step: found.get(step) for step in expected["losses"] if int(step) > after} == {
        step: loss for step, loss in expected["losses"].items() if int(step) > after
    }
    (last,) = (entry for entry in expected["checkpoints"] if entry["step"] == LAST)
    loaded = checkpoints(run_directory).load("latest")
    assert loaded is not None
    assert loaded.identity.step == LAST
    assert {name: digest(tensor) for name, tensor in loaded.tensors.items()} == last["tensors"]


# the undisturbed run


@pytest.mark.parametrize("ranks", [ONE, TWO], ids=["1 rank", "2 ranks"])
@pytest.mark.parametrize("step", [4, 5])
def test_a_branch_from_the_middle_of_an_old_run_ends_with_the_same_bits(
    ranks: list[str], step: int, tmp_path: Path
) -> None:
    """The old command resumes from an interval checkpoint, the old config.yaml from an epoch checkpoint."""
    old = unpack("exact", tmp_path)
    begin = runs()["exact"]["command"] if step == 4 else ["train", "--config", "exact/config.yaml"]
    run([*begin, *ranks, "--resume", folder_of(old, step), "--save-dir", "branch"], tmp_path)
    branch = tmp_path / "branch"
    assert [event["step"] for event in events(branch, "resume")] == [step]
    assert sorted(map(int, losses(branch))) == list(range(step + 1, LAST + 1))
    assert_ends_as_it_did(branch, after=step)


def test_a_branch_with_another_rate_would_be_seen(tmp_path: Path) -> None:
    """The twin: this branch must end with other bits."""
    old = unpack("exact", tmp_path)
    words = [*runs()["exact"]["command"], *ONE, "--resume", folder_of(old, 8), "--save-dir", "branch"]
    run([*words, "--lr", "0.125"], tmp_path)
    with pytest.raises(AssertionError):
        assert_ends_as_it_did(tmp_path / "branch", after=8)


def test_evaluation_and_predictions_of_an_old_run_are_the_same_text(tmp_path: Path) -> None:
    unpack("exact", tmp_path)
    expected = (tmp_path / "exact_predictions.txt").read_bytes()
    assert run(["evaluate", "exact", "--json", *TWO], tmp_path).out == told()["exact"]["evaluated"]
    run(["predict", "exact", "--subset", "valid", "--output", "new.txt", *TWO], tmp_path)
    assert (tmp_path / "new.txt").read_bytes() == expected
    run(["predict", "exact", "--subset", "valid", "--output", "older.txt", "--resume", "8"], tmp_path)
    assert (tmp_path / "older.txt").read_bytes() != expected  # of another checkpoint


# the disturbed ones


def test_a_run_that_a_signal_stopped_resumes_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    old = unpack("stopped", tmp_path)
    reached = max(map(int, losses(old)))
    assert [entry["step"] for entry in describe(old) if "signal" in entry["kinds"]] == [reached]
    run(runs()["stopped"]["command"], tmp_path)
    assert [event["step"] for event in events(old, "resume")] == [reached]
    assert_ends_as_it_did(old, after=0)


def test_a_torn_run_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    old, facts = unpack("torn", tmp_path), runs()["torn"]
    damaged, uncommitted = folder_of(old, facts["damaged"]), folder_of(old, 8)
    torn_tail = (old / "metrics.jsonl").read_bytes().rpartition(b"\n")[2]
    assert torn_tail
    finished = run(facts["command"], tmp_path)
    (event,) = events(old, "resume")
    assert event["step"] == facts["resumes_from"]
    assert damaged.name in str(event["refused"])
    assert f"step {facts['damaged']} is damaged" in finished.err
    assert f"{uncommitted.name} was never committed" in finished.err
    assert "of a torn last line" in finished.err
    lines = (old / "metrics.jsonl").read_bytes().splitlines()
    assert torn_tail not in lines
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert_ends_as_it_did(old, after=0)


def test_a_killed_run_resumes_from_shared_memory(tmp_path: Path) -> None:
    old, step = unpack("memory", tmp_path), int(told()["memory"]["resumed_from"])
    with planted(tmp_path / "memory_arenas", old) as paths:
        finished = run(runs()["memory"]["command"], tmp_path)
        assert not any(path.exists() for path in paths)  # a run that ends normally removes its arenas
    assert f"resuming after step {step} (the memory of this run's nodes)" in finished.err
    (event,) = events(old, "resume")
    assert (event["step"], event["path"]) == (step, None)
    assert_ends_as_it_did(old, after=0)


def test_a_killed_run_without_its_shared_memory_resumes_from_the_disk(tmp_path: Path) -> None:
    """The twin: these arenas belong to a copy of the run directory, so this run must not use them."""
    old = unpack("memory", tmp_path)
    copy = tmp_path / "elsewhere"
    shutil.copytree(old, copy)
    with planted(tmp_path / "memory_arenas", copy):
        run(runs()["memory"]["command"], tmp_path)
    (event,) = events(old, "resume")
    assert (event["step"], Path(event["path"]).name) == (5, folder_of(copy, 5).name)
    assert_ends_as_it_did(old, after=0)


# ordinary floats


@pytest.mark.parametrize("name", ["bert", "bert_hdf5", "gpt"])
def test_an_old_corpus_is_read_and_the_run_on_it_resumes(name: str, tmp_path: Path) -> None:
    if name == "bert_hdf5":
        pytest.importorskip("h5py")
    old, facts = unpack(name, tmp_path), runs()[name]
    run([*facts["command"], "--resume", folder_of(old, 4), "--save-dir", "branch"], tmp_path)
    compare(tmp_path / "branch", facts, first=5)
    evaluated, expected = (
        json.loads(run(["evaluate", name, "--json", *TWO], tmp_path).out),
        json.loads(facts["evaluated"]),
    )
    assert evaluated.keys() == expected.keys()
    assert evaluated["subset"] == expected["subset"]
    assert evaluated["valid_loss"] == pytest.approx(expected["valid_loss"], abs=TOLERANCE)


def test_an_old_corpus_gives_an_untrained_network_the_same_steps(tmp_path: Path) -> None:
    """The order of the rows, their masks, the initial weights and dropout are as they were."""
    unpack("bert", tmp_path)
    facts = runs()["bert"]
    run([*facts["command"], "--save-dir", "anew", "--disable-validation", "--no-save"], tmp_path)
    compare(tmp_path / "anew", facts, first=1)


@pytest.mark.parametrize("name", [name for name in runs() if name.startswith("optimizers/")])
def test_every_optimizer_resumes_with_its_state(name: str, tmp_path: Path) -> None:
    unpack("optimizers", tmp_path)
    old, facts = tmp_path / name, runs()[name]
    restore = Path(name).parent / folder_of(old, 4)
    run([*facts["command"], "--resume", restore, "--save-dir", "branch"], tmp_path)
    tolerance = TOLERANCE_FP16 if name == "optimizers/fp16" else TOLERANCE
    compare(tmp_path / "branch", facts, first=5, tolerance=tolerance)
    fresh = ["--resume", restore, "--save-dir", "fresh", "--reset-optimizer", "--disable-validation", "--no-save"]
    run([*facts["command"], *fresh], tmp_path)
    with pytest.raises(AssertionError, match="steps differ"):
        compare(tmp_path / "fresh", facts, first=5, tolerance=tolerance)


def compare(run_directory: Path, facts: dict[str, Any], *, first: int, tolerance: float = TOLERANCE) -> None:
    """The losses from step `first` on are finite, and agree with the old ones."""
    expected = {int(step): loss for step, loss in facts["losses"].items() if int(step) >= first}
    found = {int(step): loss for step, loss in losses(run_directory).items()}
    assert sorted(found) == sorted(expected)
    worst = {step: abs(found[step] - expected[step]) for step in expected}
    print(f"{run_directory.name}: largest difference of the losses {max(worst.values()):.1e}")
    assert all(math.isfinite(found[step]) and worst[step] <= tolerance for step in expected), f"steps differ: {worst}"
    assert all(isinstance(row["step"], int) for row in read_rows(run_directory / "metrics.jsonl"))
