"""HetSeqTrainer trains like Hugging Face's Trainer: on one rank, on unequal ones, through lost ones; with callbacks."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, run_command, start_command
from tests.support.hf_trainer import (
    BATCHES,
    courses,
    events,
    farthest,
    farthest_numbers,
    losses,
    losses_of_trainer,
    plain_history,
    ranks_words,
    result,
    train_alone,
    train_ranks,
    version,
)
from tests.support.nightly import nightly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
        reason="transformers or accelerate is not installed",
    ),
]
THREE = ("--ranks", 3, "--balance", "5,2,1")
#: micro-batches, a last smaller step, clipping, groups of weight decay, a warm-up, evaluations and saving in the loop
ALL = {
    "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 3,
    "eval_strategy": "steps", "eval_steps": 4,
}  # fmt: skip
LONG = {**ALL, "num_train_epochs": 12, "pace_s": 1.0}  # a rank that was killed is back before the end
CASES: list[tuple[str, dict[str, Any]]] = [
    ("GPT-2", ALL),
    ("a model without num_items_in_batch", {"model": "tagger", "max_steps": 13}),
    ("compute_loss_func", {"by_function": True, "gradient_accumulation_steps": 3, "max_grad_norm": 0.0}),
    ("no labels", {"model": "quiet"}),
    ("compute_metrics", {"metrics": True, "eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau",
                         "metric_for_best_model": "accuracy"}),
    ("dropped last batch", {"dataloader_drop_last": True, "data_seed": 5, "num_train_epochs": 1.5}),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def by_trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training by the Trainer itself."""
    return trained(tmp_path_factory.mktemp("all"), ALL)


@pytest.fixture(scope="module")
def long_by_trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("long"), LONG)


def trained(folder: Path, settings: dict[str, Any]) -> Path:
    done = train_alone(folder, "Trainer", settings)
    assert done.code == 0, done.err
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_one_rank_is_the_trainer_to_the_last_digits(
    name: str, settings: dict[str, Any], by_trainer: Path, tmp_path: Path
) -> None:
    trainer, ours = by_trainer if settings is ALL else tmp_path / "trainer", tmp_path / "ours"
    for folder, kind in ((trainer, "Trainer"), (ours, "HetSeqTrainer")):
        if not folder.exists():
            done = train_alone(folder, kind, settings)
            assert done.code == 0, done.err
    found = losses(ours / "HetSeqTrainer" / "hetseq")
    apart = farthest(losses_of_trainer(trainer, settings.get("gradient_accumulation_steps", 1)), found)
    print(f"{name}: {len(found)} steps, loss {apart:.1e} from the Trainer's, {version(ours)}")
    assert apart <= 1e-12
    (theirs,), (mine,) = courses(trainer), courses(ours)
    assert events(mine) == events(theirs)
    assert farthest_numbers(theirs, mine) <= 1e-11
    histories = (plain_history(result(*of)["history"]) for of in ((trainer, "Trainer"), (ours, "HetSeqTrainer")))
    for one, other in zip(*histories, strict=True):
        assert set(other) - set(one) <= {"grad_norm"}, "an older Trainer has no norm where it does not clip"
        assert {key: other[key] for key in one} == pytest.approx(one, abs=1e-4), "losses in fp32, and rounded"


def test_unequal_ranks_give_the_course_of_the_trainer(by_trainer: Path, tmp_path: Path) -> None:
    done = train_ranks(tmp_path, ALL, *THREE)
    assert done.code == 0, done.err
    apart = farthest(losses_of_trainer(by_trainer, 2), losses(tmp_path / "run"))
    print(f"3 unequal ranks: loss {apart:.1e} from the Trainer's, {version(tmp_path)}")
    assert apart <= 1e-11
    (theirs,), ours = courses(by_trainer), courses(tmp_path)
    assert [events(course) for course in ours] == [events(theirs)] * 3
    assert max(farthest_numbers(theirs, course) for course in ours) <= 1e-11
    ends = result(by_trainer, "Trainer"), result(tmp_path, "HetSeqTrainer")
    assert farthest(ends[0]["weights"], ends[1]["weights"]) <= 1e-11
    assert ends[0]["eval_loss"] == pytest.approx(ends[1]["eval_loss"], abs=1e-11)
    folders = [path.name for path in sorted((tmp_path / "HetSeqTrainer").iterdir())]
    assert folders == ["checkpoint-12", "checkpoint-4", "checkpoint-8"], "one rank has written them"
    assert (tmp_path / "saved-HetSeqTrainer" / "model.safetensors").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("event", ["kill:body:1:6", "kill:after:0:7", "kill:evaluate:1:8", "kill:evaluate:0:8"])
def test_a_rank_that_is_killed_and_comes_back_changes_nothing(
    event: str, long_by_trainer: Path, tmp_path: Path
) -> None:
    done = train_ranks(tmp_path, LONG, *THREE, event=event)
    assert done.code == 0, done.err
    assert re.search(r"is back: 3 ranks continue after step", done.err), done.err
    apart = farthest(losses_of_trainer(long_by_trainer, 2), losses(tmp_path / "run"))
    print(f"{event}: loss {apart:.1e} from the Trainer's, {version(tmp_path)}")
    assert apart <= 1e-11
    (theirs,), ours = courses(long_by_trainer), courses(tmp_path)
    assert len(ours) == 4
    assert max(farthest_numbers(theirs, course) for course in ours) <= 1e-11
    ends = result(long_by_trainer, "Trainer"), result(tmp_path, "HetSeqTrainer")
    assert [entry["step"] for entry in ends[0]["history"]] == [entry["step"] for entry in ends[1]["history"]]
    assert farthest(ends[0]["weights"], ends[1]["weights"]) <= 1e-11


EARLY = {"patience": 2, "threshold": 0.3, "load_best_model_at_end": True, "eval_strategy": "epoch",
         "save_strategy": "epoch", "num_train_epochs": 20, "save_total_limit": 2}  # fmt: skip


@pytest.mark.nightly
def test_early_stopping_ends_at_the_step_of_the_trainer_with_its_best_model(tmp_path: Path) -> None:
    trainer, ours = tmp_path / "trainer", tmp_path / "ours"
    assert train_alone(trainer, "Trainer", EARLY).code == 0
    done = train_ranks(ours, EARLY, *THREE)
    assert done.code == 0, done.err
    one, other = result(trainer, "Trainer"), result(ours, "HetSeqTrainer")
    apart = farthest(one["weights"], other["weights"])
    print(f"early stopping after step {other['steps']}: weights {apart:.1e} from the Trainer's, {version(ours)}")
    assert 8 < other["steps"] == one["steps"] < 160
    assert other["best"] == pytest.approx(one["best"], abs=1e-11)
    assert apart <= 1e-10, "the best model is loaded"  # 3.4e-12: Adam divides by small numbers in 32 steps
    folders = [sorted(path.name for path in (folder / kind).glob("checkpoint-*"))
               for folder, kind in ((trainer, "Trainer"), (ours, "HetSeqTrainer"))]  # fmt: skip
    assert folders[0] == folders[1]
    again = train_ranks(ours, EARLY, *THREE)
    assert again.code == 0, again.err
    assert f"nothing left to do: step {one['steps']} was the last one" in again.err
    assert result(ours, "HetSeqTrainer")["steps"] == one["steps"]


@pytest.mark.nightly  # test_own_loop has a shorter one
def test_a_killed_launcher_resumes_on_another_world(long_by_trainer: Path, tmp_path: Path) -> None:
    (tmp_path / "happened").touch()  # so that a pace is kept
    settings = {**LONG, "pace_s": 0.2, "resume": True}
    first = {key: value for key, value in settings.items() if key != "resume"}
    words = ("--save-interval-updates", 3)
    with start_command(ranks_words(tmp_path, first, *THREE, *words), program=HETSEQ, is_cold=False) as command:
        command.wait_for_step(tmp_path / "run", 8)
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    done = train_ranks(tmp_path, settings, "--ranks", 2, "--balance", "3,1", *words)
    assert done.code == 0, done.err
    assert "resuming after step" in done.err
    apart = farthest(losses_of_trainer(long_by_trainer, 2), losses(tmp_path / "run"))
    print(f"resumed on 2 ranks: loss {apart:.1e} from the Trainer's, {version(tmp_path)}")
    assert apart <= 1e-11
    (theirs,) = courses(long_by_trainer)
    assert max(farthest_numbers(theirs, course) for course in courses(tmp_path)) <= 1e-11
    entries = [[entry["step"] for entry in result(*of)["history"]]
               for of in ((long_by_trainer, "Trainer"), (tmp_path, "HetSeqTrainer"))]  # fmt: skip
    assert entries[0] == entries[1]


@pytest.mark.nightly
def test_a_run_that_has_ended_continues_where_more_is_asked(tmp_path: Path) -> None:
    for epochs in (1, 2):
        done = train_ranks(tmp_path, {"num_train_epochs": epochs}, "--ranks", 1)
        assert done.code == 0, done.err
        assert f"done: {epochs * BATCHES} steps" in done.err


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"resume": True}, r"resume_from_checkpoint=...\): the run directory has no checkpoint"),
        *nightly(
            ({"wrong": "count_items", "model": "tagger", "data_seed": 5}, r"the loss depends on how a step is cut"),
            ({"wrong": "get_batch_samples"}, r"Watched.get_batch_samples would not be called: override count_items"),
            ({"wrong": "on_substep_end"}, r"Notes.on_substep_end would not be called, since HetSeq cuts a step"),
            ({"wrong": "stream", "max_steps": 3}, r"got a Stream as its data, which has no index"),
            is_many=True,
        ),
    ],
)
def test_what_would_be_silent_or_inexact_is_refused(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    done = train_alone(tmp_path, "HetSeqTrainer", settings)
    assert done.code == 1
    assert re.search(told, done.err), done.err


@pytest.mark.nightly
def test_the_example_of_the_manual_runs_on_one_rank_and_on_two(tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "hf_trainer.py"
    found = []
    for words in ([str(example)], ["-m", "hetseq", "run", "--cpu", "--ranks", "2", "--balance", "2,1", str(example)]):
        folder = tmp_path / str(len(words))
        folder.mkdir()
        done = run_command(words, program=HETSEQ[:1], cwd=folder, timeout_s=120)
        assert done.code == 0, done.err
        found.append(re.findall(r"'eval_loss': '?([\d.]+)", done.out))
        assert (folder / "counting" / "model.safetensors").exists()
    assert found[0] == found[1]
    assert len(found[0]) >= 2
