"""The rules for another global batch: the factor on the schedule, the advice, and that nothing is done unasked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hetseq.comm.group import LocalGroup
from hetseq.config.sections import OptimizationConfig
from hetseq.data.plan import GlobalBatch, Position
from hetseq.errors import ConfigError
from hetseq.training.lr_scaling import Course, advice, factor, scale_in_words, scaled, step_size, warmup_updates
from hetseq.training.lr_scheduler import Schedule, constant, cosine, polynomial, polynomial_from_zero
from tests.support.lives import begin
from tests.support.toys import Integers
from tests.support.training import Recorder, prepared, toy_words

SGD = OptimizationConfig(optimizer="sgd", lr=(0.5,))
BEGIN = Course(samples=1000, position=Position(1, 1, 0), updates=0, last_step=None)


@pytest.mark.parametrize("build", [polynomial, polynomial_from_zero, cosine])
@pytest.mark.parametrize(("rule", "times"), [("linear", 16.0), ("sqrt", 4.0)])
def test_the_rule_multiplies_the_whole_curve(build: Callable[..., Schedule], rule: str, times: float) -> None:
    config = OptimizationConfig(
        lr=(0.3, 0.1), warmup_updates=5, total_num_update=20, end_learning_rate=0.01, scale_lr=rule, scale_lr_from=8
    )
    plain, large = build(config), scaled(build(config), config, GlobalBatch(128))
    for epoch in (1, 2):
        curve = [plain(update, epoch) for update in range(25)]
        assert [large(update, epoch) for update in range(25)] == [times * rate for rate in curve]
        assert max(curve) > curve[-1] == 0.01  # warm-up, decay and end are all in it


def test_the_same_batch_and_a_smaller_one_have_their_factors_too() -> None:
    assert factor("linear", before=48, now=48) == factor("sqrt", before=48, now=48) == 1.0
    assert factor("linear", before=64, now=16) == 0.25
    assert factor("sqrt", before=64, now=16) == 0.5
    assert factor("sqrt", before=100, now=200) == math.sqrt(2)


def test_where_update_freq_differs_by_epoch_so_does_the_factor() -> None:
    config = OptimizationConfig(lr=(0.5,), scale_lr="linear", scale_lr_from=32)
    schedule = scaled(constant(config), config, GlobalBatch(32, update_freq=(1, 2, 4)))
    assert [schedule(0, epoch) for epoch in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("batch", [GlobalBatch(None, 4096), GlobalBatch(64, 4096)])
def test_steps_that_are_counted_in_tokens_are_refused(batch: GlobalBatch) -> None:
    config = OptimizationConfig(scale_lr="sqrt", scale_lr_from=64)
    said = r"--scale-lr sqrt needs a global batch in samples, .* 4096 tokens .*give --global-batch-size N"
    with pytest.raises(ConfigError, match=said):
        scaled(constant(config), config, batch)


def test_the_start_says_what_became_of_the_learning_rate() -> None:
    config = OptimizationConfig(lr=(0.1, 0.05), scale_lr="linear", scale_lr_from=64)
    said = scale_in_words(config, GlobalBatch(128, update_freq=(1, 2)), 2)
    assert "a step has 256 samples and --lr was chosen for 64" in said
    assert said.endswith("multiplied by 4: --lr 0.1,0.05 becomes 0.4,0.2")


def test_a_larger_batch_is_told_of_both_rules() -> None:
    said = advice(SGD, GlobalBatch(200), BEGIN, before=GlobalBatch(50), epoch_before=1)
    assert said is not None
    assert "the global batch was 50 and is 200 samples" in said
    assert "if --lr 0.5 was chosen for 50, the linear rule would make it 2 (sgd), the square-root rule 1 (adam" in said
    assert "with a warm-up of about 25 updates: --warmup-updates 25." in said  # 5 epochs of 1000 / 200 steps
    assert said.endswith("Nothing was changed: ask for it with --scale-lr linear --scale-lr-from 50")


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lamb"])
def test_adaptive_optimizers_are_sent_to_the_square_root(optimizer: str) -> None:
    config = OptimizationConfig(optimizer=optimizer)
    said = advice(config, GlobalBatch(200), BEGIN, before=GlobalBatch(50), epoch_before=1)
    assert said is not None
    assert "--lr 0.001 was" in said
    assert said.endswith("--scale-lr sqrt --scale-lr-from 50")


def test_a_smaller_batch_needs_no_warm_up() -> None:
    said = advice(SGD, GlobalBatch(50), BEGIN, before=GlobalBatch(200), epoch_before=1)
    assert said is not None
    assert "would make it 0.125 (sgd), the square-root rule 0.25 (adam, lamb). Nothing" in said


def test_a_run_that_has_counted_updates_needs_them_counted_anew_for_a_warm_up() -> None:
    later = Course(1000, Position(301, 3, 0), 300, None)
    said = advice(SGD, GlobalBatch(200), later, before=GlobalBatch(50), epoch_before=3)
    assert said is not None
    assert "--warmup-updates 25 (and --reset-lr-scheduler" in said


def test_tokens_are_compared_with_tokens_and_the_remedy_is_the_rate_itself() -> None:
    said = advice(SGD, GlobalBatch(None, 8192), BEGIN, before=GlobalBatch(None, 2048), epoch_before=1)
    assert said is not None
    assert "was 2048 and is 8192 tokens" in said
    assert "with a warm-up: --warmup-updates N." in said  # neither the epoch nor the end is known in steps
    assert said.endswith("ask for it with --lr 2")


@pytest.mark.parametrize(
    ("before", "epoch", "now"),
    [
        (GlobalBatch(64), 1, GlobalBatch(64)),
        (GlobalBatch(64, update_freq=(1, 2)), 2, GlobalBatch(64, update_freq=(1, 2))),  # the list goes on, as it was
        (GlobalBatch(32, update_freq=(2,)), 1, GlobalBatch(64)),
        (GlobalBatch(64), 1, GlobalBatch(None, 4096)),
        (GlobalBatch(64, 4096), 1, GlobalBatch(128, 4096)),  # which of the two ends a step depends on the samples
    ],
)
def test_batches_that_are_equal_or_not_to_be_compared_need_no_advice(
    before: GlobalBatch, epoch: int, now: GlobalBatch
) -> None:
    assert advice(SGD, now, BEGIN, before=before, epoch_before=epoch) is None


def test_the_size_of_a_step_is_that_of_its_epoch() -> None:
    one = step_size(GlobalBatch(8, update_freq=(1, 3)), 2)
    other = step_size(GlobalBatch(None, 512, (2,)), 1)
    assert one is not None
    assert other is not None
    assert (one.count, one.unit, other.count, other.unit) == (24, "samples", 1024, "tokens")
    assert step_size(GlobalBatch(8, 512), 1) is None


def test_the_warm_up_is_five_epochs_or_five_ninetieths_of_what_is_left_but_never_shorter_than_it_was() -> None:
    batch, at_step_11 = GlobalBatch(100), Position(11, 1, 0)
    assert warmup_updates(SGD, batch, BEGIN) == 50
    assert warmup_updates(SGD, batch, Course(1000, at_step_11, 10, 370)) == 20  # of 360 that are left
    assert warmup_updates(SGD, batch, Course(1000, at_step_11, 10, 371)) == 21
    assert warmup_updates(SGD, batch, Course(1000, at_step_11, 10, 10_000)) == 50
    as_before = OptimizationConfig(warmup_updates=3125)
    assert warmup_updates(as_before, batch, BEGIN) == 3125
    assert warmup_updates(SGD, GlobalBatch(None, 4096), BEGIN) is None


def rates(save_dir: str, words: list[str], caplog: pytest.LogCaptureFixture) -> tuple[list[float], str]:
    """The learning rates of the steps of a run, and what it said of them."""
    caplog.clear()
    recorder = Recorder()
    with caplog.at_level("INFO", "hetseq"), begin(LocalGroup(), save_dir, words, Integers, recorder) as session:
        session.train()
    said = [record.getMessage() for record in caplog.records if record.name == "hetseq.run.announcements"]
    return [row["lr"] for row in recorder.rows], "\n".join(line for line in said if "--lr" in line)


def words_of(updates: int, **flags: object) -> list[str]:
    words = [word for word in toy_words("Integers", max_update=updates, **flags) if word != "--no-save"]
    return [*words, "--lr-scheduler", "polynomial", "--warmup-updates", "3", "--total-num-update", "8"]


def test_a_resumed_run_is_on_the_same_scaled_curve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = {"global_batch_size": 4, "scale_lr": "sqrt", "scale_lr_from": 1}
    plain, _ = rates(prepared(tmp_path / "plain"), words_of(6, global_batch_size=4), caplog)
    whole, said = rates(prepared(tmp_path / "whole"), words_of(6, **rule), caplog)
    assert whole == [2 * rate for rate in plain]
    assert "--lr 0.0625 becomes 0.125" in said
    hurt = prepared(tmp_path / "hurt")
    first, _ = rates(hurt, words_of(3, **rule), caplog)
    # the batch of the checkpoint holds, and so does the factor, whatever --batch-size is on fewer or more ranks
    again = {"max_sentences": 1, "scale_lr": "sqrt", "scale_lr_from": 1}
    rest, said = rates(hurt, words_of(6, **again), caplog)
    assert first + rest == whole
    assert "a step has 4 samples" in said


def test_another_batch_is_told_of_and_changes_nothing_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = prepared(tmp_path / "run")
    plain, said = rates(run, words_of(2, max_sentences=2, update_freq="1,3"), caplog)  # 2 samples in epoch 1
    assert said == ""
    larger = {"global_batch_size": 4, "reset_dataloader": True}
    rest, said = rates(run, words_of(5, **larger), caplog)
    assert "the global batch was 2 and is 4 samples; if --lr 0.0625 was chosen for 2" in said
    assert "0.125 (sgd)" in said
    whole, _ = rates(prepared(tmp_path / "whole"), words_of(5, global_batch_size=2), caplog)
    assert plain + rest == whole  # the curve of --lr, as without the advice
    _, said = rates(run, words_of(6, **larger), caplog)
    assert said == ""  # it is told where it changes, not at every start
