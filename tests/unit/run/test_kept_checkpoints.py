"""How many checkpoints stay where no option says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import config as options
from hetseq.comm.group import LocalGroup
from hetseq.config.sections import CheckpointConfig, OptimizationConfig
from hetseq.run.build import RankJob, build_session
from hetseq.run.horizon import has_end
from hetseq.run.loaded_task import load_material
from hetseq.run.resume import retention_of
from hetseq.run_directory import RunDirectory
from tests.support.checkpoints import save
from tests.support.training import Recorder, prepared, toy_words


@pytest.mark.parametrize(
    ("options", "ends"),
    [({}, False), ({"max_update": 5}, True), ({"max_epoch": 1}, True), ({"min_lr": 0.0}, True)],
)
def test_an_option_ends_a_run(options: dict[str, Any], ends: bool) -> None:
    assert has_end(OptimizationConfig(**options)) is ends


@pytest.mark.parametrize(
    ("saved", "options", "epochs", "intervals"),
    [
        (0, {"save_interval": 2}, 2, 2),
        (3, {"save_interval": 2}, 2, 2),  # one of them about to go
        (4, {"save_interval": 2}, -1, -1),  # of starts that had an end: they stay
        (4, {"keep_last_epochs": 1}, 1, -1),
        (0, {"keep_last_epochs": -1, "keep_interval_updates": 5}, -1, 5),
    ],
)
def test_of_a_run_without_an_end_the_newest_two_of_a_kind_stay(
    tmp_path: Path, saved: int, options: dict[str, Any], epochs: int, intervals: int
) -> None:
    for step in range(1, saved + 1):
        assert save(tmp_path, step, kinds=["epoch"]).ok
    config = CheckpointConfig(**options)
    found = retention_of(config, tmp_path / "checkpoints", has_end=False)
    assert (found.keep_last_epochs, found.keep_interval_updates) == (epochs, intervals)
    with_end = retention_of(config, tmp_path / "checkpoints", has_end=True)
    assert with_end.keep_last_epochs == options.get("keep_last_epochs", -1)


ABOUT_SAVING = [
    {"save_interval": 2}, {"save_interval_updates": 9}, {"persistent_time_interval": 0.0},
    {"keep_last_epochs": 5}, {"keep_every_updates": 9}, {"no_epoch_checkpoints": True}, {"no_last_checkpoints": True},
    {"keep_interval_updates": -1},
]  # fmt: skip


@pytest.mark.parametrize("has_end", [False, True])
@pytest.mark.parametrize("options", [{}, {"restore_file": "none", "save_dir": "x"}, *ABOUT_SAVING])
def test_without_an_option_about_saving_the_newest_two_and_the_best_stay(
    tmp_path: Path, options: dict[str, Any], has_end: bool
) -> None:
    found = retention_of(CheckpointConfig(**options), tmp_path / "checkpoints", has_end=has_end)
    assert found.keep_newest == (None if options in ABOUT_SAVING else 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            [],
            "2 checkpoints of this run and the best one stay; --keep-last-epochs -1 keeps one of each epoch",
        ),
        (["--max-epoch", "1"], "the newest 2 checkpoints of this run and the best one stay"),
        (["--save-interval", "2"], "the newest 2 of epochs stay, as it has no end"),
        (["--no-save"], ""),
        (["--keep-last-epochs", "-1"], ""),
        (["--max-epoch", "1", "--save-interval", "2"], ""),
    ],
)
def test_what_stays_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: list[str], said: str
) -> None:
    words = [word for word in toy_words("Integers", global_batch_size=48) if word != "--no-save"]
    config = options.complete(options.parse([*words, *more, "--save-dir", str(tmp_path)]))
    material = load_material(config, torch.device("cpu"))
    directory = RunDirectory(Path(prepared(tmp_path)))
    with caplog.at_level(logging.INFO):
        build_session(RankJob(config, directory, LocalGroup(), material, metrics=Recorder())).close()
    assert ("the newest 2" in caplog.text) is bool(said)
    assert said in caplog.text
