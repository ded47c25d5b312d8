"""What a resume says of options that are other ones now."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from hetseq.comm.group import LocalGroup
from hetseq.config.sections import OptimizationConfig
from hetseq.run.recipe import changes, recipe_of
from tests.support.toys import Integers
from tests.support.training import prepared, toy_words, train


def stored(**options: object) -> dict[str, object]:
    """As it comes back from a file."""
    made: dict[str, object] = json.loads(json.dumps(recipe_of(OptimizationConfig(**options))))  # type: ignore[arg-type]
    return made


def test_what_is_another_one_now_is_named_with_both_values() -> None:
    before, now = stored(lr=(0.001,)), recipe_of(OptimizationConfig(lr=(0.5, 0.1), clip_norm=0, max_update=7))
    assert changes(before, now) == ["--lr 0.001 -> 0.5,0.1", "--clip-norm 25 -> 0"]
    assert changes(stored(weight_decay=0.1), recipe_of(OptimizationConfig())) == ["--weight-decay 0.1 -> 0"]


def test_the_default_that_is_written_out_is_no_change() -> None:
    assert changes(stored(), recipe_of(OptimizationConfig(lr=(0.001,), max_epoch=3, min_lr=0.1))) == []
    assert changes({}, recipe_of(OptimizationConfig())) == [], "a checkpoint from before there was a recipe"


def test_where_the_first_numbers_come_from_is_part_of_it() -> None:
    before, now = (recipe_of(OptimizationConfig(), delayed_init=is_delayed) for is_delayed in (False, True))
    assert changes(before, now) == ["--delayed-init False -> True"]
    assert changes(stored(), now) == [], "a checkpoint from before there was the option"


def test_a_task_of_another_file_is_named_with_both_files(monkeypatch: pytest.MonkeyPatch) -> None:
    options, task = OptimizationConfig(), object.__new__(Integers)
    before = recipe_of(options, task)
    assert changes(before, recipe_of(options, task)) == []
    here = str(before["task_file"])
    assert here.endswith("/tests/support/toys.py")
    monkeypatch.setattr(sys.modules[Integers.__module__], "__file__", "/elsewhere/toys.py")
    assert changes(before, recipe_of(options, task)) == [f"task file {here} -> /elsewhere/toys.py"]
    assert changes({}, recipe_of(options, task)) == [], "a checkpoint from before there was one"


def test_a_resume_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [word for word in toy_words("Integers", global_batch_size=12, max_update=4) if word != "--no-save"]
    run = prepared(tmp_path / "run")
    with caplog.at_level(logging.INFO):
        train(LocalGroup(), run, words)
        assert "changed since" not in caplog.text
        words[words.index("--max-update") + 1] = "6"
        train(LocalGroup(), run, [*words, "--lr", "0.5", "--weight-decay", "0.25"])
    rate = words[words.index("--lr") + 1]
    assert f"changed since step 4: --lr {float(rate):g} -> 0.5, --weight-decay 0 -> 0.25" in caplog.text
