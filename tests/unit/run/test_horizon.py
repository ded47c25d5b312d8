"""Until when the learning rate decays: the end of the run at its first start, kept ever after, and said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hetseq.comm.group import LocalGroup
from hetseq.config.sections import OptimizationConfig
from hetseq.data.plan import Position
from hetseq.run.horizon import in_words, settled
from hetseq.training.controller import TrainingState
from tests.support.training import prepared, toy_words, train


def decay(state: TrainingState, last_step: int | None, **options: Any) -> int | None:
    return settled(OptimizationConfig(**options), state, last_step).total_num_update


def test_the_decay_ends_with_the_run_as_its_first_start_asks_for_it() -> None:
    state = TrainingState()
    assert decay(state, 115) == state.decay_steps == 115
    assert decay(state, 138) == 115, "it is made longer, and goes on with its curve"
    assert decay(state, 138, total_num_update=138) == state.decay_steps == 138, "what is asked for wins"
    assert decay(TrainingState(), None) == 1_000_000, "a run without an end"


def test_updates_are_counted_and_not_steps() -> None:
    state = TrainingState(position=Position(21, 1, 0), updates=15)  # five were skipped
    assert decay(state, 40) == 35


@pytest.mark.parametrize(("warmup", "settles"), [(4, 4), (100, 5), (0.1, 0.1)])
def test_a_warm_up_that_leaves_nothing_ends_in_the_middle(warmup: float, settles: float) -> None:
    state, config = TrainingState(), OptimizationConfig(warmup_updates=warmup)
    assert settled(config, state, 10).warmup_updates == settles
    said = " ".join(in_words(config, state, 10, is_resumed=False))
    assert ("leaves nothing of 10 steps: the warm-up ends after 5" in said) is (warmup == 100)


def test_schedules_without_a_decay_have_nothing_to_say() -> None:
    state, config = TrainingState(), OptimizationConfig(lr_scheduler="constant", warmup_updates=100)
    assert settled(config, state, 10).warmup_updates == 100
    assert in_words(config, state, 10, is_resumed=False) == []


def test_a_run_without_an_end_says_so() -> None:
    (said,) = in_words(OptimizationConfig(), TrainingState(), None, is_resumed=False)
    assert said.startswith("this run has no end, as none of --max-update, --max-epoch and --min-lr is given")
    assert in_words(OptimizationConfig(min_lr=0.1), TrainingState(), None, is_resumed=False) == []


def words(max_update: int, *more: str) -> list[str]:
    found = [word for word in toy_words("Integers", global_batch_size=12, max_update=max_update) if word != "--no-save"]
    found[found.index("--lr-scheduler") + 1] = "polynomial"
    return [*found, *more]


def test_a_run_that_is_made_longer_keeps_its_curve_and_says_where_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = train(LocalGroup(), prepared(tmp_path / "one"), words(6, "--total-num-update", "4"))
    two = prepared(tmp_path / "two")
    with caplog.at_level(logging.INFO):
        first = train(LocalGroup(), two, words(4))
        assert "the learning rate decays to 0 over the 4 steps of this run; --total-num-update N" in caplog.text
        caplog.clear()
        second = train(LocalGroup(), two, words(6))
    assert first.losses + second.losses == one.losses
    assert "the learning rate is 0 from step 4 on, which was the end of this run at its first start" in caplog.text
    assert "--total-num-update 6 stretches the decay" in caplog.text
