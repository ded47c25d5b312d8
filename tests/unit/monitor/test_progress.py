"""A live line on a terminal, few plain lines elsewhere, and neither garbled nor fatal."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, BinaryIO, TextIO, cast

import pytest

from hetseq.config.sections import LogConfig
from hetseq.launch import launcher
from hetseq.monitor import progress
from hetseq.monitor.progress import (
    LiveProgress,
    PlainProgress,
    ProgressHandler,
    progress_for,
    step_text,
    takes_text,
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


def row_of_ranks(step: int, compute_s: list[float], **changes: Any) -> dict[str, Any]:
    """A step of several ranks."""
    size, longest_s = len(compute_s), max(compute_s)
    ranks = {"compute_s": compute_s, "data_s": [0.0] * size, "overhead_s": [0.0] * size}
    ranks["wait_s"] = [longest_s - seconds for seconds in compute_s]
    return row(step, shares=[32] * size, ranks=ranks, efficiency=0.931, pace=None, **changes)


def live(
    stream: TextIO, clock: Clock, *, total_steps: int | None = 938, width: int = 140, height: int = 24
) -> LiveProgress:
    console = terminal(stream, force_terminal=True, width=width, height=height, color_system=None)
    return LiveProgress(console, total_steps=total_steps, every_steps=None, now=clock)


def test_the_line_of_a_step() -> None:
    assert step_text(row(120), 938) == "step 120/938 epoch 1 loss 0.2134 lr 0.01 grad_norm 1.2 samples/s 5333"


def test_the_line_of_a_step_of_several_ranks() -> None:
    several = row(120, efficiency=0.9349)
    assert step_text(several, 938).endswith(" samples/s 5333 efficiency 0.93")
    assert step_text(several, 938, with_efficiency=False) == step_text(row(120), 938)
    assert step_text(row(120, efficiency=None), 938) == step_text(row(120), 938)


def test_the_line_of_a_step_without_numbers() -> None:
    assert step_text({"step": 3, "loss": None, "grad_norm": None, "seconds": 0.0, "samples": 4}, None) == "step 3"
    assert step_text(row(3, loss=float("nan"), samples=1, seconds=2.0), None).endswith(
        "loss nan lr 0.01 grad_norm 1.2 samples/s 0.5"
    )


def test_the_line_of_a_step_has_no_figure_that_needs_an_explanation() -> None:
    assert step_text(row(120, noise_scale=210.0), 938) == step_text(row(120), 938)


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


@pytest.mark.parametrize("every_steps", [None, 2])
def test_plain_lines_end_with_one_table_of_the_ranks(every_steps: int | None) -> None:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, total_steps=20, every_steps=every_steps, now=clock)
    for step in range(1, 21):
        progress.step(row_of_ranks(step, [0.3, 0.2] * 10))
        clock.now_s += 1.0
    progress.close()
    progress.close()
    lines = stream.getvalue().splitlines()
    place = lines.index("ranks: medians of 5 steps")
    assert all(line.startswith("step ") and line.endswith(" efficiency 0.93") for line in lines[:place])
    assert [line.split()[0] for line in lines[place + 2 : place + 18]] == [str(rank) for rank in range(16)]
    assert lines[place + 18 :] == ["... and 4 more", "efficiency 0.93"]


def test_plain_lines_of_a_rank_alone_and_of_a_run_without_steps_end_without_a_table() -> None:
    stream = io.StringIO()
    for rows in ([row(1)], []):
        progress = PlainProgress(stream, total_steps=1, every_steps=None, now=Clock())
        for one in rows:
            progress.step(one)
        progress.close()
    assert stream.getvalue().count("\n") == 1


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
    progress.step(row_of_ranks(1, [0.3, 0.2]))
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


def test_the_table_of_the_ranks_stands_below_the_live_line_and_remains_at_the_end() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock)
    for step in range(1, 4):
        progress.step(row_of_ranks(step, [0.3, 0.2]))
        clock.now_s += 1.0
    progress.close()
    last = stream.getvalue().rpartition("step 3/938")[2].splitlines()
    assert "efficiency" not in last[0]
    assert last[1].startswith("ranks: medians of 3 steps")
    assert [line.split()[:3] for line in last[3:5]] == [["0", "32", "107"], ["1", "32", "160"]]
    assert last[5].startswith("efficiency 0.93")


def test_a_rank_alone_has_no_table() -> None:
    stream = Terminal()
    progress = live(stream, Clock())
    progress.step(row(1))
    progress.close()
    assert "ranks" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_a_table_is_drawn_at_most_twice_a_second() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, total_steps=None)
    for step in range(1, 3001):
        progress.step(row_of_ranks(step, [0.3, 0.2]))
        clock.now_s += 0.001
    progress.close()
    assert 6 <= stream.getvalue().count("step ") <= 8  # rich draws the last one once more
    assert "step 3000 " in stream.getvalue()


@pytest.mark.parametrize(("height", "shown"), [(40, 29), (24, 15), (15, 8), (7, 1), (6, 0), (1, 0)])
def test_a_terminal_shows_as_many_ranks_as_it_has_lines_for(height: int, shown: int) -> None:
    stream = Terminal()
    progress = live(stream, Clock(), height=height)
    progress.step(row_of_ranks(1, [0.3] * 100))
    progress.close()
    assert (f"... and {100 - shown} more" in stream.getvalue()) == (shown > 0)
    drawn = stream.getvalue().rpartition("step 1/938")[2]
    assert drawn.count("\n") <= height
    assert ("efficiency 0.93" in drawn.splitlines()[0]) == (shown == 0)


def test_the_ranks_of_a_long_table_stay_for_five_seconds_but_the_pace_is_always_there() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, height=9)  # three ranks

    def ranks_after(seconds: float, slow: int, pace: int | None = None) -> list[str]:
        clock.now_s += seconds
        for step in range(1, 6):  # all that medians are of
            progress.step(row_of_ranks(step, [0.3 + 0.1 * (rank == slow) for rank in range(9)]) | {"pace": pace})
        stream.truncate(0)
        clock.now_s += 0.5
        progress.step(row_of_ranks(6, [0.3 + 0.1 * (rank == slow) for rank in range(9)]) | {"pace": pace})
        lines = [line.strip(">").split() for line in stream.getvalue().splitlines()]
        return [words[0] for words in lines if words and words[0].isdigit()]

    assert ranks_after(0.0, slow=5) == ["0", "1", "5"]
    assert ranks_after(2.0, slow=7) == ["0", "1", "5"]
    assert ranks_after(2.0, slow=7) == ["0", "1", "7"]
    assert ranks_after(0.5, slow=7, pace=8) == ["0", "7", "8"]
    progress.close()


@pytest.mark.parametrize(("size", "rows"), [(3, 3), (2, 2), (1, 0)])
def test_a_world_that_shrinks_loses_its_rows(size: int, rows: int) -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock)
    progress.step(row_of_ranks(1, [0.3] * 3))
    clock.now_s += 1.0
    progress.step(row_of_ranks(2, [0.3] * size) if size > 1 else row(2))
    progress.close()
    drawn = stream.getvalue().rpartition("step 2/938")[2]
    assert drawn.count(" 300 ms") == rows
    assert ("ranks:" in drawn) == (rows > 0)


def test_a_terminal_that_is_stopped_is_not_waited_for() -> None:
    controller, descriptor = os.openpty()
    with open(descriptor, "w", encoding="utf-8") as stream, open(controller, "rb", buffering=0) as screen:
        clock = Clock()
        progress = live(stream, clock)
        termios.tcflow(descriptor, termios.TCOOFF)  # as Ctrl-S does
        os.set_blocking(descriptor, False)  # so that a write, which would wait for ever, fails
        progress.step(row_of_ranks(1, [0.3, 0.2]))
        termios.tcflow(descriptor, termios.TCOON)
        progress.step(row_of_ranks(2, [0.3, 0.2]))
        progress.close()
        shown = screen.read(65536)
    assert b"step 2/938" in shown
    assert b"step 1/938" not in shown


@contextmanager
def full_pipe() -> Iterator[tuple[TextIO, BinaryIO]]:
    """A stream into a pipe that nobody reads for now, and the other end."""
    ours, theirs = os.pipe()
    with open(theirs, "w", encoding="utf-8") as stream, open(ours, "rb", buffering=0) as reader:
        os.set_blocking(theirs, False)  # so that a write, which would wait for ever, fails
        with suppress(BlockingIOError):
            while True:
                os.write(theirs, b"." * 4096)
        yield stream, cast(BinaryIO, reader)


def test_a_reader_that_has_stopped_is_waited_for_a_moment_and_misses_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.monitor.progress._PATIENCE_S", 0.01)
    with full_pipe() as (stream, reader):
        progress = PlainProgress(stream, total_steps=None, every_steps=1, now=Clock())
        progress.step(row(1))
        progress.validation({"step": 1, "valid_loss": 0.5})
        reader.read(1 << 20)
        progress.step(row(2))
        shown = reader.read(1 << 20).decode()
    assert shown.startswith("step 2 ")
    assert shown.count("\n") == 1


def test_a_launcher_does_not_wait_for_a_reader_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_LOOK_S", 0.01)
    with full_pipe() as (stream, reader):
        monkeypatch.setattr(sys, "stderr", stream)
        launcher._tell("rank 1 is gone")
        reader.read(1 << 20)
        launcher._tell("rank 2 is gone")
        stream.flush()
        assert reader.read(1 << 20) == b"rank 2 is gone\n"
        monkeypatch.undo()


def test_a_narrow_terminal_gets_one_line_without_the_bar() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, width=40)
    progress.step(row(1))
    progress.close()
    assert "━" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (140, "step 2/938 epoch 1 loss 0.2134 lr 0.01 grad_norm 1.2 samples/s 5333 ETA 0:15:36 saving step 1 (50%)"),
        (80, "step 2/938 epoch 1 loss 0.2134 samples/s 5333 ETA 0:15:36 saving step 1 (50%)"),
        (60, "step 2/938 epoch 1 loss 0.2134 samples/s 5333 ETA 0:15:36"),
        (40, "step 2/938 loss 0.2134 ETA 0:15:36"),
    ],
)
def test_a_narrow_line_keeps_step_loss_and_time_left(width: int, line: str) -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, width=width)
    progress.saving = (1, 0.5)
    progress.step(row(1))
    clock.now_s += 1.0
    progress.step(row(2))
    progress.close()
    assert f"{line}\n" in _plain(stream.getvalue())


def _plain(shown: str) -> str:
    """What a terminal shows, without control sequences, the bar, and spaces at the end of a line."""
    return re.sub(r"[ ━╸╺]*\n", "\n", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown))


def test_a_warning_is_yellow_a_lost_rank_red_and_the_best_validation_green(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", Terminal())
    console = terminal(stream, force_terminal=True, width=140, height=24, color_system="standard")
    progress = LiveProgress(console, total_steps=9, every_steps=None, now=Clock())
    handler = ProgressHandler(progress)
    progress.step(row(1))
    progress.validation({"step": 1, "valid_loss": 0.5, "best": True})
    handler.handle(logging.makeLogRecord({"msg": "slow", "levelno": logging.WARNING}))
    handler.handle(logging.makeLogRecord({"msg": "rank 1 is gone [worker-died]", "levelno": logging.WARNING}))
    progress.close()
    handler.handle(logging.makeLogRecord({"msg": "after the end", "levelno": logging.WARNING}))
    shown = stream.getvalue()
    assert "\x1b[32m(best)\x1b[0m" in shown
    assert "\x1b[33mslow\x1b[0m" in shown
    assert "\x1b[31mrank 1 is gone [worker-died]\x1b[0m" in shown
    assert sys.stderr.getvalue() == "\x1b[33mafter the end\x1b[39m\n"  # type: ignore[attr-defined]


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
    monkeypatch.setenv("NO_COLOR", "1")
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
    ProgressHandler(progress).handle(logging.makeLogRecord({"msg": "to the file", "levelno": logging.WARNING}))
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
        "the progress display ended ([Errno 32] Broken pipe): training continues"
    ]
    assert (sys.stdout, sys.stderr) == (stdout, stderr)


def test_a_live_line_tells_how_far_a_save_is() -> None:
    stream, clock = Terminal(), Clock()
    progress = live(stream, clock, total_steps=None)
    progress.step(row(1))
    assert "saving" not in stream.getvalue()
    progress.saving = (400, 0.634)
    clock.now_s += 10
    progress.step(row(2))
    progress.close()
    assert "saving step 400 (63%)" in stream.getvalue()


def test_only_the_first_text_that_finds_no_room_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    class Poller:
        def __init__(self) -> None:
            self._poller = select.poll()

        def register(self, stream: TextIO, events: int) -> None:
            self._poller.register(stream, events)

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            waited.append(milliseconds)
            return self._poller.poll(0)

    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb", buffering=0) as reader:
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        monkeypatch.setattr(progress, "select", SimpleNamespace(poll=Poller, POLLOUT=select.POLLOUT))
        assert [takes_text(stream, patience_s=1.0) for _ in range(3)] == [False] * 3
        reader.read(1 << 16)
        assert takes_text(stream, patience_s=1.0)
        assert takes_text(stream, patience_s=1.0)
    assert waited == [1000, 0, 0, 0, 1000]
