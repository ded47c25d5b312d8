"""Trackers receive each row once, whatever is killed, and no step waits for them."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetseq.config import parse
from hetseq.config.sections import LogConfig
from hetseq.config.tracker_specs import check_packages
from hetseq.errors import ConfigError
from hetseq.monitor.metrics import Display, Metrics, Recording
from hetseq.monitor.trackers import thread as thread_module
from hetseq.monitor.trackers.courses import Courses
from hetseq.monitor.trackers.follow import Follower
from hetseq.monitor.trackers.protocol import trackers_of
from hetseq.run_directory import RunDirectory
from tests.support.trials import until


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.prepare(tmp_path / "run", config_yaml="")


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "loss": 1.0 / step, "samples": 4, "seconds": 0.5, **more}


def valid(step: int, subset: str = "valid") -> dict[str, Any]:
    return {"step": step, "epoch": 1, "subset": subset, "valid_loss": 0.5}


@dataclass
class Store:
    """What a tracker has stored, and how it behaves."""

    counts: bool = False  # whether `begin` says how many rows there are
    fails: Callable[[dict[str, Any]], None] = lambda row: None
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    begun: list[tuple[str, bool]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def begin(self, run_id: str, config: dict[str, Any], is_resumed: bool) -> int | None:
        self.begun.append((run_id, is_resumed))
        return len(self.rows) if self.counts else None

    def row(self, row: dict[str, Any]) -> None:
        self.fails(row)
        self.rows.append(row)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append((kind, fields["step"]))

    def end(self, code: int) -> None:
        self.codes.append(code)

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]


Make = Callable[..., Metrics]


@pytest.fixture
def make(directory: RunDirectory) -> Iterator[Make]:
    made: list[Metrics] = []

    def start(*own: Any, has_display: bool = True) -> Metrics:
        display = Display(LogConfig(log_format="none"), stream=io.StringIO())
        recording = Recording(directory, has_tensorboard=False)
        made.append(Metrics(recording, display, is_writer=True, has_display=has_display))
        made[-1].track(trackers_of((), own), {"lr": 0.1})
        return made[-1]

    yield start
    for metrics in made:
        metrics.close()


def test_rows_and_events_arrive_in_order_with_the_run_id_and_the_exit_code(make: Make, directory: RunDirectory) -> None:
    store = Store()
    metrics = make(store)
    for one in (row(1), row(2)):
        metrics.step(one)
    metrics.validation(valid(2))
    metrics.event("save", step=2)
    metrics.code = 75
    metrics.close()
    assert store.rows == [row(1), row(2), valid(2)]
    assert (store.events, store.begun, store.codes) == ([("save", 2)], [(directory.run_id, False)], [75])


def test_a_later_process_continues_with_the_same_run_and_the_next_row(make: Make, directory: RunDirectory) -> None:
    first, second = Store(), Store()
    for store, steps in ((first, (1, 2)), (second, (3, 4))):
        metrics = make(store)
        for step in steps:
            metrics.step(row(step))
            metrics.event("save", step=step)
        metrics.close()
    assert (first.steps, second.steps) == ([1, 2], [3, 4])
    assert second.events == [("save", 3), ("save", 4)]
    assert second.begun == [(directory.run_id, True)]


def test_rows_that_the_files_repeat_arrive_once_and_late_numbers_by_themselves(make: Make) -> None:
    store = Store()
    metrics = make(store)
    for one in (row(1), row(2), row(1), row(2, log={"a": 3}), row(2, log={"a": 3}), row(3, log={"a": 4})):
        metrics.step(one)
    for _ in range(2):
        metrics.validation(valid(3))
        metrics.validation(valid(3, "dev"))
    metrics.close()
    late = {"step": 2, "epoch": 1, "log": {"a": 3}}
    assert store.rows == [row(1), row(2), late, row(3, log={"a": 4}), valid(3), valid(3, "dev")]


def test_only_the_rank_that_shows_sends_rows(make: Make) -> None:
    store = Store()
    metrics = make(store, has_display=False)
    metrics.step(row(1))
    metrics.close()
    assert (store.rows, store.begun) == ([], [])


def test_a_run_that_goes_back_on_purpose_sends_its_steps_again(make: Make) -> None:
    store = Store()
    for steps, back in (((1, 2, 3, 4), None), ((3, 4, 5), None), ((2, 3), 1), ((4, 5, 6), None)):
        metrics = make(store)
        if back is not None:
            metrics.goes_back(back)
        for step in steps:
            metrics.step(row(step))
        metrics.close()
    assert store.steps == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6]


# Killed between the call and the cursor, or with rows that the tracker still held in memory.


def write(directory: RunDirectory, *rows: dict[str, Any]) -> None:
    with directory.metrics.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)


def deliver(directory: RunDirectory, store: Store) -> None:
    """What a process sends that is then killed: the kernel closes its files, and nothing more happens."""
    following = Follower(directory, "x", {}, Courses(directory.status))
    try:
        assert following.deliver(store)
    finally:
        following.close()


def test_a_process_killed_between_call_and_cursor_is_made_up_for(directory: RunDirectory) -> None:
    def kill(row: dict[str, Any]) -> None:
        if row["step"] == 3 and not killed:
            killed.append(store.rows.append(row))  # taken, and no longer noted
            raise InterruptedError

    for counts, expected in ((True, [1, 2, 3, 4]), (False, [1, 2, 3, 3, 4])):
        store, killed = Store(counts=counts, fails=kill), list[None]()
        directory.metrics.unlink(missing_ok=True)
        (directory.status / "tracker-x.json").unlink(missing_ok=True)
        write(directory, row(1), row(2), row(3))
        with pytest.raises(InterruptedError):
            deliver(directory, store)
        write(directory, row(4))
        deliver(directory, store)
        assert store.steps == expected


@pytest.mark.parametrize("held", range(9))
def test_rows_that_a_killed_tracker_had_in_memory_are_sent_again(directory: RunDirectory, held: int) -> None:
    rows = [row(1), row(2), row(3), valid(3), row(3), row(4), row(4, log={"a": 1}), row(5), row(6)]
    store = Store(counts=True)
    write(directory, *rows[:6])
    Courses(directory.status).note(directory.metrics.stat().st_size, 3)
    write(directory, *rows[6:])
    deliver(directory, store)
    whole = store.rows[:]
    assert store.steps == [1, 2, 3, 3, 4, 4, 5, 6]
    del store.rows[held:]
    write(directory, row(7))
    deliver(directory, store)
    assert store.rows == [*whole, row(7)]


def test_a_file_that_was_replaced_is_read_from_its_beginning_and_sends_what_is_new(directory: RunDirectory) -> None:
    store = Store()
    write(directory, row(1), row(2))
    deliver(directory, store)
    directory.metrics.unlink()
    write(directory, *(row(step, from_another="directory") for step in (1, 2, 3)))
    deliver(directory, store)
    assert store.steps == [1, 2, 3]


def test_a_torn_line_waits_for_its_end(directory: RunDirectory) -> None:
    store = Store()
    directory.metrics.write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2))[:9])
    deliver(directory, store)
    assert store.steps == [1]
    directory.metrics.write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2)) + "\n")
    deliver(directory, store)
    assert store.steps == [1, 2]


def test_a_writer_that_still_sends_is_waited_for(make: Make, directory: RunDirectory) -> None:
    goes_on, count = threading.Event(), Store(counts=True)
    slow = Store(fails=lambda row: assert_true(goes_on.wait(60)), rows=count.rows)
    before = make(slow)
    before.step(row(1))
    until(lambda: slow.begun, "a call that takes long")
    before.lead(is_writer=False)  # returns at once
    after = make(count)
    after.step(row(2))
    until(lambda: len(directory.metrics.read_text().splitlines()) == 2, "both rows")
    assert count.begun == []
    goes_on.set()
    until(lambda: slow.codes == [75], "the end of the first writer's part")
    after.step(row(3))
    after.close()
    assert (count.steps, count.begun) == ([1, 2, 3], [(directory.run_id, True)])


# Trouble


def test_a_tracker_that_fails_is_warned_of_once_and_gets_its_rows_when_it_works(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_module, "_PAUSES_S", (0.01, 0.01))
    attempts = []

    def fail_often(row: dict[str, Any]) -> None:
        attempts.append(row["step"])
        if len(attempts) < 5:
            raise ConnectionError("no route to the server")

    store, other = Store(fails=fail_often), Store()
    metrics = make(store, other)
    for step in (1, 2):
        metrics.step(row(step))
    until(lambda: store.steps == [1, 2], "rows that arrive late")
    metrics.close()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "test_trackers:Store failed with ConnectionError: no route to the server" in record.getMessage()
    assert (attempts, other.steps) == ([1, 1, 1, 1, 1, 2], [1, 2])


def test_a_tracker_that_hangs_holds_up_neither_rows_nor_the_end(
    make: Make, directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    store, other = Store(fails=lambda row: assert_true(goes_on.wait(60))), Store()
    metrics = make(store, other)
    for step in (1, 2):
        metrics.step(row(step))
    until(lambda: other.steps == [1, 2], "the rows of the other tracker")
    metrics.close(deadline_s=0.01)
    assert [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()] == [1, 2]
    assert "test_trackers:Store does not end: it may lack the last rows until the next start" in caplog.text
    goes_on.set()
    until(lambda: store.codes, "the end of the thread")


def assert_true(is_true: bool) -> None:
    assert is_true


# Words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("wanb:project=x", "there is no tracker wanb (did you mean wandb?); expected one of wandb, mlflow, trackio"),
        ("tensorboard", "(TensorBoard's files are always written)"),
        ("wandb:projekt=x", "projekt=x is no setting of wandb; expected KEY=VALUE with each key once, of project,"),
        ("wandb:project=x,project=y", "project=y is no setting of wandb"),
        ("mlflow:experiment=", "experiment= is no setting of mlflow"),
        ("trackio", "trackio needs its project, as in trackio:project=digits"),
        ("wandb:project=x,wandb:project=x", "was given twice: every row would arrive twice"),
    ],
)
def test_a_tracker_that_cannot_be_meant_is_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(["--tracker", words])
    assert told in str(refusal.value)


def test_the_flag_adds_up_and_a_comma_separates_settings_and_trackers(tmp_path: Path) -> None:
    once = parse(["--tracker", "wandb:project=x,entity=y,mine.py:Mine", "--tracker=trackio:project=z"]).log
    assert [(spec.name, spec.keys) for spec in once.tracker_specs()] == [
        ("wandb", {"project": "x", "entity": "y"}), ("", {}), ("trackio", {"project": "z"}),
    ]  # fmt: skip


def test_a_package_that_is_missing_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb is not installed here; install it with pip install 'wandb>=0.31'"):
        check_packages(parse(["--tracker", "wandb:project=x"]).log.tracker_specs())


def test_a_class_of_the_users_own_is_found_and_one_that_is_no_tracker_refused(tmp_path: Path) -> None:
    file, methods = tmp_path / "mine.py", ("begin(self, run_id, config, is_resumed)", "row(self, row)",
                                           "event(self, kind, fields)", "end(self, code)")  # fmt: skip
    file.write_text("class Other: ...\nclass Mine:\n" + "".join(f"    def {method}: ...\n" for method in methods))
    (found,) = trackers_of(parse(["--tracker", f"{file}:Mine"]).log.tracker_specs())
    assert type(found.tracker).__name__ == "Mine"
    for name, told in (("Other", "is no tracker: expected the methods"), ("Absent", "has no Absent")):
        with pytest.raises(Exception, match=told):
            trackers_of(parse(["--tracker", f"{file}:{name}"]).log.tracker_specs())
