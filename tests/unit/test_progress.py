"""A live line on a terminal, few plain lines elsewhere, and neither garbled nor fatal."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

from hetseq.config import LogConfig
from hetseq.progress import (
    LiveProgress,
    PlainProgress,
    ProgressHandler,
    progress_for,
    step_text,
    terminal,
    validation_text,
)

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": 1,
        "loss": 0.21341,
        "lr": 0.01,
        "grad_norm": 1.2,
        "samples": 64,
        "seconds": 0.012,
    } | changes


def live(stream: io.StringIO, clock: Clock, *, total_steps: int | None = 938, width: int = 140) -> LiveProgress:
    console = terminal(stream, force_terminal=True, width=width, color_system=None)
    return LiveProgress(console, total_steps=total_steps, every_steps=None, now=clock)


def test_the_line_of_a_step() -> None:
    assert step_text(row(120), 938) == "step 120/938 epoch 1 loss 0.2134 lr 0.01 grad_norm 1.2 samples/s 5333"


def test_the_line_of_a_step_without_numbers() -> None:
    assert step_text({"step": 3, "loss": None, "grad_norm": None, "seconds": 0.0, "samples": 4}, None) == "step 3"
    assert step_text(row(3, loss=float("nan"), samples=1, seconds=2.0), None).endswith(
        "loss nan lr 0.01 grad_norm 1.2 samples/s 0.5"
    )


def test_the_line_of_a_skipped_step() -> None:
    skipped = row(3, loss=None, skipped=True, grad_norm=None)
    assert step_text(skipped, None) == "step 3 epoch 1 skipped (gradient not finite) lr 0.01 samples/s 5333"


def test_the_line_of_a_validation() -> None:
    result = {"step": 1200, "epoch": 3, "valid_loss": 0.0312, "valid_accuracy": 0.9901, "best": True}
    assert validation_text(result) == "valid epoch 3 step 1200 loss 0.0312 accuracy 0.9901 (best)"
    assert validation_text({"subset": "test", "step": 5, "valid_loss": 1.0}) == "test step 5 loss 1"


def test_plain_lines_come_every_ten_seconds_and_at_both_ends() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, total_steps=40, every_steps=None, now=clock)
    for step in range(1, 41):
        progress.step(row(step))
        clock.now_s += 1.0
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/40", "11/40", "21/40", "31/40", "40/40"]
    assert "\r" not in stream.getvalue()


def test_plain_lines_of_a_run_that_ends_early_hold_its_last_step() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, total_steps=None, every_steps=None, now=clock)
    for step in range(1, 8):
        progress.step(row(step))
    progress.close()
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1", "7"]


def test_log_interval_counts_steps_and_nothing_else() -> None:
    stream = io.StringIO()
    progress = progress_for(LogConfig(log_interval=3), stream, total_steps=8, now=Clock())
    for step in range(1, 9):
        progress.step(row(step))
    progress.validation({"step": 8, "valid_loss": 2.0})
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["3/8", "6/8", "step"]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_log_format_none_leaves_only_validations(stream: io.StringIO) -> None:
    progress = progress_for(LogConfig(log_format="none"), stream, total_steps=1, now=Clock())
    progress.step(row(1))
    progress.validation({"step": 1, "valid_loss": 2.0})
    progress.close()
    assert stream.getvalue() == "valid step 1 loss 2\n"


def test_only_a_terminal_gets_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, config, kind in (
        (Terminal(), LogConfig(), LiveProgress),
        (io.StringIO(), LogConfig(), PlainProgress),
        (Terminal(), LogConfig(no_progress_bar=True), PlainProgress),
        (Terminal(), LogConfig(log_format="none"), PlainProgress),
    ):
        assert type(progress_for(config, stream, total_steps=1, now=Clock())) is kind
    monkeypatch.setenv("TERM", "dumb")
    assert type(progress_for(LogConfig(), Terminal(), total_steps=1, now=Clock())) is PlainProgress


def test_the_live_line_shows_the_step_and_the_time_left() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, total_steps=100)
    for step in range(1, 11):
        progress.step(row(step))
        clock.now_s += 2.0
    assert "step 10/100 epoch 1 loss 0.2134" in stream.getvalue()
    assert "ETA 0:03:00" in stream.getvalue()
    assert "━" in stream.getvalue()
    progress.close()


def test_the_live_line_is_drawn_at_most_ten_times_a_second_and_at_the_end() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, total_steps=None)
    for step in range(1, 1001):
        progress.step(row(step))
        clock.now_s += 0.001
    progress.close()
    assert 10 <= stream.getvalue().count("step ") <= 13
    assert "step 1000 " in stream.getvalue()


def test_a_narrow_terminal_gets_one_line_without_the_bar() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, width=40)
    progress.step(row(1))
    progress.close()
    assert "━" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_the_cursor_comes_back_after_an_exception_in_training() -> None:
    stream = Terminal()
    progress = live(stream, Clock())
    stdout, stderr = sys.stdout, sys.stderr

    def train() -> None:
        try:
            progress.step(row(1))
            assert stream.getvalue().count(HIDE_CURSOR) == 1
            raise RuntimeError("a step that fails")
        finally:
            progress.close()

    with pytest.raises(RuntimeError):
        train()
    progress.close()
    assert stream.getvalue().count(SHOW_CURSOR) == 1
    assert (sys.stdout, sys.stderr) == (stdout, stderr)


def test_warnings_stand_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock, stderr = Terminal(), Clock(), Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = live(stream, clock)
    handler = ProgressHandler(progress)
    handler.handle(logging.makeLogRecord({"msg": "before the first step", "levelno": logging.WARNING}))
    assert stderr.getvalue() == "before the first step\n"
    progress.step(row(1))
    handler.handle(logging.makeLogRecord({"msg": "rank 2 [gpu07] is slow", "levelno": logging.WARNING}))
    progress.close()
    shown = stream.getvalue()
    assert "rank 2 [gpu07] is slow" in shown  # brackets are not taken for markup
    after = shown[shown.index("is slow") :]
    assert "\n" in after.split("step 1/938")[0]  # a line of its own, and the live line again below it
    assert stderr.getvalue() == "before the first step\n"


def test_warnings_go_to_a_redirected_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, stderr = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = live(stream, Clock())
    progress.step(row(1))
    ProgressHandler(progress).handle(logging.makeLogRecord({"msg": "to the file"}))
    progress.close()
    assert stderr.getvalue() == "to the file\n"
    assert "to the file" not in stream.getvalue()


def test_a_validation_stays_above_the_live_line() -> None:
    stream = Terminal()
    progress = live(stream, Clock())
    progress.step(row(1))
    progress.validation({"step": 1, "epoch": 1, "valid_loss": 0.5})
    progress.close()
    assert "valid epoch 1 step 1 loss 0.5" in stream.getvalue()


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_reader_that_went_away_ends_the_display_and_not_the_run(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    stream, clock = Broken(), Clock()
    plain = PlainProgress(stream, total_steps=2, every_steps=1, now=clock)
    progress = plain if kind == "plain" else live(stream, clock)
    stdout, stderr = sys.stdout, sys.stderr
    for step in range(1, 4):
        progress.step(row(step))
        clock.now_s += 1.0
    progress.validation({"step": 3, "valid_loss": 2.0})
    progress.close()
    assert [record.message for record in caplog.records] == [
        "the progress display ended ([Errno 32] Broken pipe): the run goes on"
    ]
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
