"""The last lines of a run that has ended: what was trained, the best validation, and how to use and continue it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetseq.config import parse
from hetseq.config.sections import Config
from hetseq.data.plan import Position
from hetseq.monitor.metrics import best_row
from hetseq.run import closing
from hetseq.training.controller import TrainingState

BEST = {"step": 15, "epoch": 1, "valid_loss": 1.267, "valid_accuracy": 0.7722, "best": True}


def config_of(*words: str) -> Config:
    return parse(["--task", "mnist", "--global-batch-size", "96", "--save-dir", "runs/my digits", *words])


def ended(**fields: Any) -> TrainingState:
    """After the second epoch."""
    values = {"updates": 30, "best": 1.267, "train_seconds": 83.5, "position": Position(31, 3, 0), **fields}
    return TrainingState(**values)


def closing_lines(config: Config, state: TrainingState, *, has_saved: bool = True, **fields: Any) -> list[str]:
    return closing.closing_lines(config, state, has_saved=has_saved, **fields)


def test_a_run_that_has_ended_says_what_it_did_and_what_to_do_next() -> None:
    lines = closing_lines(config_of("--max-epoch", "2"), ended(), step=30, start_s=312.0, best=BEST)
    assert lines == [
        "done: 30 steps in 83.5 s of training; this start took 5 min 12 s",
        "best: valid epoch 1 step 15 loss 1.267 accuracy 0.7722",
        "evaluate: hetseq evaluate 'runs/my digits' --resume best",
        "continue: the same command with a larger --max-epoch",
    ]


def test_a_run_that_had_ended_before_says_so_first() -> None:
    first, *others = closing_lines(config_of("--max-epoch", "2"), ended(), step=30, start_s=None, best=BEST)
    assert first == "nothing left to do: step 30 was the last one"
    assert others == closing_lines(config_of("--max-epoch", "2"), ended(), step=30, start_s=312.0, best=BEST)[1:]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("--max-update", "30"), "a larger --max-update"),
        (("--max-update", "40", "--max-epoch", "2"), "a larger --max-epoch"),
        (("--max-update", "30", "--max-epoch", "2"), "a larger --max-update and --max-epoch"),
        (("--min-lr", "0.1"), "a smaller --min-lr"),
        (("--min-lr", "0.1", "--max-epoch", "50"), "a smaller --min-lr"),
    ],
)
def test_the_option_that_ended_the_run_is_the_one_to_change(words: tuple[str, ...], remedy: str) -> None:
    lines = closing_lines(config_of(*words), ended(), step=30, start_s=1.0, best=BEST)
    assert lines[-1] == f"continue: the same command with {remedy}"


@pytest.mark.parametrize(
    ("steps", "scheduler", "is_told"), [(30, "cosine", True), (31, "cosine", False), (30, "constant", False)]
)
def test_a_run_whose_learning_rate_has_decayed_would_learn_nothing_more(
    steps: int, scheduler: str, is_told: bool
) -> None:
    config = config_of("--max-epoch", "2", "--lr-scheduler", scheduler)
    line = closing_lines(config, ended(decay_steps=steps), step=30, start_s=1.0, best=BEST)[-1]
    assert line.endswith(", and with --total-num-update as the learning rate has decayed") is is_told


def test_a_run_without_validation_is_evaluated_at_its_end() -> None:
    lines = closing_lines(config_of("--max-epoch", "2"), ended(best=None), step=30, start_s=1.0, best=None)
    assert lines[1] == "evaluate: hetseq evaluate 'runs/my digits'"
    assert len(lines) == 3


def test_the_best_of_earlier_meters_is_not_the_best_one() -> None:
    lines = closing_lines(config_of("--max-epoch", "2"), ended(best=1.1), step=30, start_s=1.0, best=BEST)
    assert not any(line.startswith("best") for line in lines)


def test_what_was_not_saved_cannot_be_evaluated_or_continued() -> None:
    lines = closing_lines(config_of("--max-epoch", "2", "--no-save"), ended(), step=30, start_s=1.0, best=BEST)
    assert lines[2:] == ["nothing was saved, because of --no-save"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--no-epoch-checkpoints --no-last-checkpoints --disable-validation",
         ": --no-epoch-checkpoints, --no-last-checkpoints, --disable-validation, and no other checkpoint was due"),
        ("--no-last-checkpoints", ": --no-last-checkpoints, and no other checkpoint was due"),
        ("", ", or it was deleted since"),
    ],
)  # fmt: skip
def test_a_run_without_a_checkpoint_names_no_command_that_needs_one(words: str, why: str) -> None:
    config = config_of("--max-epoch", "2", *words.split())
    lines = closing_lines(config, ended(best=None), step=30, start_s=1.0, best=None, has_saved=False)
    assert lines[1:] == [f"nothing was saved{why}"]


def test_the_best_row_of_a_file_is_its_last_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 1.0}, BEST, {**BEST, "step": 30}, {**BEST, "step": 45, "best": False}]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"best": tr')
    assert best_row(path) == {**BEST, "step": 30}
    assert best_row(path, 15) == BEST
    assert best_row(path, 45) is None
    assert best_row(tmp_path / "nothing") is None


def test_a_run_of_a_demo_names_no_next_command() -> None:
    config = config_of("--max-epoch", "2")
    lines = closing_lines(config, ended(), step=30, start_s=1.0, best=BEST, kind=closing.Kind.DEMO)
    assert [line.partition(":")[0] for line in lines] == ["done", "best"]
