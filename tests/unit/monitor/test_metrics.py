"""Rows reach the files whole, at full precision and without holding up a step, whatever the file system does."""

from __future__ import annotations

import builtins
import errno
import io
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetseq.config.sections import LogConfig
from hetseq.monitor import append_file as append_module
from hetseq.monitor import metrics as metrics_module
from hetseq.monitor import tensorboard as board_module
from hetseq.monitor.advice import Advice
from hetseq.monitor.metrics import Display, Metrics, Recording, read_events, read_rows
from hetseq.run_directory import RunDirectory, json_line, write_all

Make = Callable[..., Metrics]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.prepare(tmp_path / "run", config_yaml="")


@pytest.fixture
def make(directory: RunDirectory) -> Iterator[Make]:
    """Makes writers without a display; all are closed in the end."""
    made: list[Metrics] = []

    def start(*, is_writer: bool = True, has_tensorboard: bool = False) -> Metrics:
        display = Display(LogConfig(log_format="none"), stream=io.StringIO())
        made.append(Metrics(Recording(directory, has_tensorboard=has_tensorboard), display, is_writer=is_writer))
        return made[-1]

    yield start
    for metrics in made:
        metrics.close()


class Disk:
    """Stands between the helper thread and the file system; faults are switched on and off."""

    def __init__(self) -> None:
        self.is_full = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.began = threading.Semaphore(0)  # released before every attempt
        self.writes = threading.Semaphore(0)  # ... and after it

    def write_all(self, descriptor: int, data: bytes) -> None:
        try:
            self.began.release()
            assert self.goes_on.wait(10)
            if self.is_full:
                write_all(descriptor, data[:7])  # a full disk takes what still fits
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_all(descriptor, data)
        finally:
            self.writes.release()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(append_module, "write_all", disk.write_all)
    return disk


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "loss": 0.1 + 0.2, "samples": 64, "seconds": 0.5} | changes


def row_of_ranks(step: int, size: int, **changes: Any) -> dict[str, Any]:
    """A step of several ranks, with other numbers for each."""
    ranks = {
        "names": [f"lab{rank}/cpu" for rank in range(size)],
        "compute_s": [0.25 + rank for rank in range(size)],
        "data_s": [0.125] * size,
        "wait_s": [0.5 + rank for rank in range(size)],
        "overhead_s": [0.125] * size,
        "fixed_s": [0.0] * size,
        "per_sample_s": [None] * size,
        "memory_bytes": [2**30 + rank * 2**29 for rank in range(size)],
        "memory_limit_bytes": [0] * size,
    }
    own = {"shares": [32] * size, "efficiency": 0.75, "communication_s": 0.0625, "pace": 0}
    return row(step, ranks=ranks, **own | changes)


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_rows_and_events_are_written_in_order_and_in_full(make: Make, directory: RunDirectory) -> None:
    metrics = make()
    metrics.step(row(1, shares=(3, 1), terms={"loss": 19.2}))
    metrics.validation({"step": 1, "epoch": 1, "valid_loss": 0.5})
    metrics.event("join", slot=2)
    metrics.step(row(2))
    metrics.close()
    lines = directory.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2]
    assert '"loss": 0.30000000000000004' in lines[0]
    assert json.loads(lines[0]) == row(1, shares=[3, 1], terms={"loss": 19.2})
    [event] = read_events(directory.events)
    assert (event["event"], event["slot"]) == ("join", 2)
    assert event["time_utc"].endswith("Z")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory.metrics, directory.events)} == {0o600}


def test_a_row_that_is_held_and_what_follows_it_are_written_once_it_is_released(
    make: Make, directory: RunDirectory, disk: Disk
) -> None:
    metrics = make()

    def written(writes: int) -> list[int]:
        assert all(disk.writes.acquire(timeout=10) for _ in range(writes))
        return [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()]

    metrics.step(row(1))
    assert written(1) == [1]
    metrics.hold()
    metrics.step(row(2))
    metrics.validation({"step": 2, "epoch": 1, "valid_loss": 0.5})
    metrics.event("save", step=2)
    assert written(1) == [1]  # this write is of the event alone
    assert [event["step"] for event in read_events(directory.events)] == [2]
    metrics.release()
    assert written(1) == [1, 2, 2]
    metrics.step(row(3))
    assert written(1) == [1, 2, 2, 3]
    metrics.hold()
    metrics.step(row(4))
    metrics.close()
    assert written(1) == [1, 2, 2, 3, 4]


def test_rows_that_are_held_of_steps_that_are_made_again_are_not_written(make: Make, directory: RunDirectory) -> None:
    metrics = make()
    metrics.hold()
    for number in (1, 2, 3):
        metrics.step(row(number))
    metrics.complete([row(1), row(2)], step=2)
    metrics.release()
    metrics.close()
    assert [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()] == [1, 2]


def test_advice_is_an_event_and_a_hint_of_the_display_and_no_warning(
    make: Make, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    metrics = make()
    for step in (20, 40):
        metrics.advise([Advice("data", "more --num-workers may help")], step=step)
    metrics.close()
    told = [(event["step"], event["text"]) for event in read_events(directory.events)]
    assert told == [(20, "more --num-workers may help")]
    assert caplog.messages == []


def test_a_number_that_is_not_finite_becomes_null(make: Make, directory: RunDirectory) -> None:
    metrics = make()
    metrics.step(row(1, loss=float("nan"), terms={"a": float("inf")}))
    metrics.close()
    [found] = read_rows(directory.metrics)
    assert (found["loss"], found["terms"]) == (None, {"a": None})
    assert "NaN" not in directory.metrics.read_text()


def test_a_row_may_be_changed_after_the_call(make: Make, directory: RunDirectory, disk: Disk) -> None:
    disk.goes_on.clear()
    metrics = make()
    mine = row(1)
    metrics.step(mine)
    mine["step"] = 99
    disk.goes_on.set()
    metrics.close()
    assert steps(read_rows(directory.metrics)) == [1]


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', "\0" * 100_000, '{"step": 3}'])
def test_a_torn_last_line_is_cut_when_a_run_goes_on(make: Make, directory: RunDirectory, tail: str) -> None:
    directory.metrics.write_text('{"step": 1}\n{"step": 2}\n' + tail)
    assert steps(read_rows(directory.metrics)) == [1, 2]
    metrics = make()
    metrics.step(row(3))
    metrics.close()
    lines = directory.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_file_that_is_nothing_but_a_torn_line(make: Make, directory: RunDirectory) -> None:
    directory.metrics.write_text('{"step"')
    metrics = make()
    metrics.step(row(1))
    metrics.close()
    assert steps(read_rows(directory.metrics)) == [1]


def test_the_later_of_two_rows_of_a_step_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 2, "valid_loss": 2.1},
        {"step": 2, "subset": "test", "valid_loss": 2.2},
        {"step": 3, "loss": 3.0},
        {"step": 2, "loss": 2.5},
        {"step": 2, "valid_loss": 2.6},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + 'rubbish\n{"no": 1}\n{"step": 4')
    assert read_rows(path) == [rows[0], rows[5], rows[3], rows[6], rows[4]]
    assert "line 8 is not a row" in caplog.text
    assert "without a step" in caplog.text


def test_a_file_system_that_hangs_does_not_hold_up_a_step(make: Make, directory: RunDirectory, disk: Disk) -> None:
    disk.goes_on.clear()
    metrics = make()
    for step in range(1, 1001):
        metrics.step(row(step))  # returns, though nothing can be written: the test would time out
    assert not directory.metrics.exists() or directory.metrics.stat().st_size == 0
    disk.goes_on.set()
    metrics.close()
    assert steps(read_rows(directory.metrics)) == list(range(1, 1001))


def test_close_gives_up_on_a_file_system_that_hangs(
    make: Make, directory: RunDirectory, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.goes_on.clear()
    metrics = make()
    metrics.step(row(1))
    metrics.close(deadline_s=0.01)
    assert "could not be written within 0.01 s" in caplog.text
    disk.goes_on.set()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "hetseq-metrics"]
    thread.join(10)
    assert steps(read_rows(directory.metrics)) == [1]


def test_a_queue_that_overflows_is_warned_about_once(
    make: Make, disk: Disk, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (metrics_module, append_module):
        monkeypatch.setattr(module, "MOST_WAITING_BYTES", sum(len(json_line(row(step))) for step in range(2, 12)))
    disk.goes_on.clear()
    metrics = make()
    metrics.step(row(1))
    assert disk.began.acquire(timeout=60)  # the writer has taken it and hangs
    for step in range(2, 102):
        metrics.step(row(step))
    assert caplog.text.count("has not been writable for 10 rows: later rows are lost") == 1
    disk.goes_on.set()
    metrics.close()
    assert steps(read_rows(directory.metrics)) == list(range(1, 12))


def test_a_disk_that_is_full_and_recovers_loses_no_row(
    make: Make, directory: RunDirectory, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = make()
    metrics.step(row(1))
    assert disk.writes.acquire(timeout=60)
    disk.is_full = True
    for step in (2, 3):
        metrics.step(row(step))
        assert disk.writes.acquire(timeout=60)
    disk.is_full = False
    metrics.step(row(4))
    assert disk.writes.acquire(timeout=60)
    metrics.close()
    lines = directory.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]  # no torn line between them
    assert caplog.text.count("training continues") == 1
    assert "No space left on device" in caplog.text


def test_a_disk_that_stays_full_is_said_at_the_end(
    make: Make, directory: RunDirectory, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.is_full = True
    metrics = make()
    metrics.step(row(1))
    metrics.close()
    assert directory.metrics.read_bytes() == b""
    assert "lacks 1 rows" in caplog.text


def test_memory_stays_bounded_while_a_disk_is_full(
    make: Make, disk: Disk, monkeypatch: pytest.MonkeyPatch, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (metrics_module, append_module):
        monkeypatch.setattr(module, "MOST_WAITING_BYTES", 3 * len(json_line(row(1))))
    disk.is_full = True
    metrics = make()
    for step in range(1, 7):
        metrics.step(row(step))
        assert disk.writes.acquire(timeout=60)
    disk.is_full = False
    metrics.close()
    assert steps(read_rows(directory.metrics)) == [4, 5, 6]
    assert "lacks 3 rows" in caplog.text


def test_a_directory_that_vanishes_does_not_end_the_run(make: Make, tmp_path: Path, directory: RunDirectory) -> None:
    directory.path.rename(tmp_path / "moved")
    metrics = make()
    metrics.step(row(1))
    metrics.close()
    assert not directory.path.exists()


def test_only_the_writer_writes(make: Make, directory: RunDirectory) -> None:
    before = set(threading.enumerate())
    metrics = make(is_writer=False)
    metrics.step(row(1))
    metrics.validation({"step": 1, "valid_loss": 1.0})
    metrics.event("join")
    metrics.close()
    assert set(threading.enumerate()) == before
    assert not directory.metrics.exists()


def test_a_run_without_a_directory_shows_its_steps() -> None:
    stream = io.StringIO()
    with Metrics(Recording(None), Display(LogConfig(), total_steps=1, stream=stream), is_writer=True) as metrics:
        metrics.step(row(1))
        metrics.event("join")
    assert stream.getvalue() == "step 1/1 epoch 1 loss 0.3 samples/s 128\n"


def test_nothing_is_left_running(make: Make) -> None:
    metrics = make()
    metrics.step(row(1))
    metrics.close()
    metrics.close()
    assert "hetseq-metrics" not in [thread.name for thread in threading.enumerate()]


def test_tensorboard_missing_is_said_in_one_line(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, directory: RunDirectory
) -> None:
    real_import = builtins.__import__

    def import_without_tensorboard(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", import_without_tensorboard)
    metrics = make(has_tensorboard=True)
    metrics.step(row(1))
    metrics.close()
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "no TensorBoard log: No module named 'tensorboard'"
    ]
    assert steps(read_rows(directory.metrics)) == [1]


def board_numbers(directory: RunDirectory) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads: tag -> (step, number)."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = event_accumulator.EventAccumulator(str(directory.tensorboard))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_what_was_logged(make: Make, directory: RunDirectory) -> None:
    metrics = make(has_tensorboard=True)
    metrics.step(row(1, loss=2.0, lr=0.5, grad_norm=4.0, terms={"cls": 1.5, "reg": 0.0}, counts={"cls": 64, "reg": 0}))
    metrics.step(row(2, loss=None, skipped=True))
    metrics.validation({"step": 2, "valid_loss": 0.5, "valid_note": "text", "best": True})
    metrics.close()
    assert board_numbers(directory) == {
        "train/loss": [(1, 2.0)],
        "train/lr": [(1, 0.5)],
        "train/grad_norm": [(1, 4.0)],
        "train/samples_per_s": [(1, 128.0), (2, 128.0)],
        "train/cls": [(1, 1.5)],
        "valid/loss": [(2, 0.5)],
    }
    [file] = directory.tensorboard.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_tensorboard_shows_each_rank(make: Make, directory: RunDirectory) -> None:
    metrics = make(has_tensorboard=True)
    metrics.step(row_of_ranks(1, 2, efficiency=None))
    metrics.step(row_of_ranks(2, 2, shares=[32, 0]))
    metrics.close()
    assert {tag: numbers for tag, numbers in board_numbers(directory).items() if tag.startswith("ranks/1/")} == {
        "ranks/1/share": [(1, 32.0), (2, 0.0)],
        "ranks/1/samples_per_s": [(1, pytest.approx(32 / 1.5)), (2, 0.0)],  # 1.25 + 0.125 + 0.125 s
        "ranks/1/compute_s": [(1, 1.25), (2, 1.25)],
        "ranks/1/wait_s": [(1, 1.5), (2, 1.5)],
        "ranks/1/data_s": [(1, 0.125), (2, 0.125)],
        "ranks/1/memory_gib": [(1, 1.5), (2, 1.5)],
    }
    assert board_numbers(directory)["ranks/0/samples_per_s"] == [(1, 64.0), (2, 64.0)]
    assert board_numbers(directory)["train/efficiency"] == [(2, 0.75)]
    assert board_numbers(directory)["train/communication_s"] == [(1, 0.0625), (2, 0.0625)]


def test_tensorboard_shows_what_ranks_own_and_exchange(make: Make, directory: RunDirectory) -> None:
    row = row_of_ranks(1, 2)
    row["ranks"] |= {"owned_bytes": [3 << 30, 1 << 30], "sent_bytes": [3 << 20, 0], "received_bytes": [0, 3 << 20]}
    metrics = make(has_tensorboard=True)
    metrics.step(row)
    row["ranks"]["planned_bytes"] = [8 << 30, 4 << 30]
    metrics.step({**row, "step": 2})
    metrics.close()
    found = board_numbers(directory)
    assert {tag: found[f"ranks/1/{tag}"] for tag in ("owned_gib", "sent_mib", "received_mib", "planned_gib")} == {
        "owned_gib": [(1, 1.0), (2, 1.0)],
        "sent_mib": [(1, 0.0), (2, 0.0)],
        "received_mib": [(1, 3.0), (2, 3.0)],
        "planned_gib": [(2, 4.0)],
    }


def test_tensorboard_copes_with_numbers_that_are_not_known(
    make: Make, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = row_of_ranks(1, 2)
    unknown["ranks"] = {"compute_s": [None, 0.5], "memory_bytes": [None, None]}
    metrics = make(has_tensorboard=True)
    metrics.step(unknown)
    metrics.close()
    assert "TensorBoard" not in caplog.text
    shown = [tag for tag in board_numbers(directory) if tag.startswith("ranks/")]
    assert shown == ["ranks/0/share", "ranks/1/share", "ranks/1/compute_s"]


@pytest.mark.parametrize(("size", "shown"), [(8, list(range(1, 21))), (9, [10, 20])])
def test_tensorboard_shows_each_of_many_ranks_every_tenth_step(
    make: Make, directory: RunDirectory, size: int, shown: list[int]
) -> None:
    metrics = make(has_tensorboard=True)
    for step in range(1, 21):
        metrics.step(row_of_ranks(step, size))
    metrics.close()
    numbers = board_numbers(directory)
    assert [step for step, _ in numbers["ranks/7/wait_s"]] == shown
    assert [step for step, _ in numbers["train/efficiency"]] == list(range(1, 21))


@pytest.mark.parametrize(("size", "complete"), [(64, list(range(1, 21))), (65, [10, 20])])
def test_the_file_holds_what_each_of_very_many_ranks_did_every_tenth_step(
    make: Make, directory: RunDirectory, size: int, complete: list[int]
) -> None:
    metrics = make()
    for step in range(1, 21):
        metrics.step(row_of_ranks(step, size))
    metrics.close()
    rows = read_rows(directory.metrics)
    assert [one["step"] for one in rows if "ranks" in one] == complete
    assert rows[9] == row_of_ranks(10, size)  # names too: a row needs no other row
    assert [one["efficiency"] for one in rows] == [0.75] * 20
    assert all(len(one["shares"]) == size for one in rows)


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(make: Make, directory: RunDirectory) -> None:
    for first, loss in ((1, 1.0), (3, 2.0)):
        metrics = make(has_tensorboard=True)
        for step in range(first, first + 4):
            metrics.step(row(step, loss=loss))
        metrics.close()
    numbers = board_numbers(directory)["train/loss"]
    assert numbers == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_tensorboard_survives_a_full_disk(make: Make, directory: RunDirectory, disk: Disk) -> None:
    metrics = make(has_tensorboard=True)
    for step, is_full in ((1, False), (2, True), (3, False)):
        disk.is_full = is_full
        metrics.step(row(step))
        assert disk.writes.acquire(timeout=60)  # metrics.jsonl
        assert disk.writes.acquire(timeout=60)  # the event file
    metrics.close()
    assert [step for step, _ in board_numbers(directory)["train/loss"]] == [1, 2, 3]


def test_a_row_that_tensorboard_cannot_show_ends_only_its_log(
    make: Make, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = make(has_tensorboard=True)
    metrics.step(row(1, terms="much"))
    metrics.step(row(2))
    metrics.close()
    assert "the TensorBoard log ends here" in caplog.text
    assert steps(read_rows(directory.metrics)) == [1, 2]


def test_rows_do_not_wait_for_tensorboard(make: Make, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    # a run killed in its first seconds would have a checkpoint, and no row of the steps before it
    is_open, real = threading.Event(), board_module.open_board

    def slowly(*arguments: Any) -> Any:
        assert is_open.wait(20)
        return real(*arguments)

    monkeypatch.setattr(board_module, "open_board", slowly)
    metrics = make(has_tensorboard=True)
    for step in (1, 2):
        metrics.step(row(step, loss=1.0))
        deadline = time.monotonic() + 20
        while not directory.metrics.exists() or len(list(read_rows(directory.metrics))) < step:
            assert time.monotonic() < deadline
    is_open.set()
    metrics.close()
    assert board_numbers(directory)["train/loss"] == [(1, 1.0), (2, 1.0)]
