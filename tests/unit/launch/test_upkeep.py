"""A run directory that is deleted under its run is there again, and still nobody else's."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetseq.errors import RunDirectoryError
from hetseq.launch import run_directory_guard as module
from hetseq.launch.run_directory_guard import looked_after, taken_over, upkeep
from hetseq.monitor.append_file import AppendFile
from hetseq.run_directory import RunDirectory, replace_file
from tests.support.recorded import step_row


class Told:
    """What the user was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._comes = threading.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self._comes.set()

    def wait(self) -> str:
        assert self._comes.wait(10)
        self._comes.clear()
        return self.texts[-1]


class Looks(threading.Event):
    """In place of the event that ends the thread: counts its looks."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self._look = 0, threading.Condition()
        self.between, self._is_looking = threading.Lock(), False

    def wait(self, timeout: float | None = None) -> bool:
        if self._is_looking:
            self.between.release()
        with self._look:
            self.number += 1
            self._look.notify_all()
        is_over = super().wait(0.001)
        self._is_looking = not is_over
        if self._is_looking:
            self.between.acquire()  # a test that holds it is not seen half done
        return is_over

    def more(self) -> None:
        """Returns after two whole looks."""
        with self._look:
            last = self.number + 3
            assert self._look.wait_for(lambda: self.number >= last, 10)


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=lambda: looks, Thread=threading.Thread))
    return looks


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.prepare(tmp_path / "run", config_yaml="seed: 1\n")
    with directory.lock():
        yield directory


def modes(directory: RunDirectory) -> dict[str, int]:
    return {str(path.relative_to(directory.path)): path.stat().st_mode for path in directory.path.rglob("*")}


def test_what_was_deleted_is_there_again_with_the_same_id_and_the_same_modes(run: RunDirectory, looks: Looks) -> None:
    config, before, told = run.config_file.read_bytes(), modes(run), Told()
    with upkeep(run, told):
        for _ in range(2):
            with looks.between:
                shutil.rmtree(run.path)
            assert told.wait().endswith("recreated and the run continues, but rows and checkpoints so far are lost")
            assert (run.config_file.read_bytes(), modes(run)) == (config, before)
            with pytest.raises(RunDirectoryError, match="in use by another run"):
                RunDirectory.prepare(run.path, config_yaml="seed: 1\n")
    RunDirectory.prepare(run.path, config_yaml="seed: 1\n")  # free once it is over


def test_what_a_later_config_says_is_what_comes_back(run: RunDirectory, looks: Looks) -> None:
    told = Told()
    with upkeep(run, told):
        adopted = run.config_file.read_bytes().replace(b"seed: 1", b"seed: 1\nlr: 2")
        replace_file(run.config_file, adopted, is_durable=False)
        looks.more()
        with looks.between:
            shutil.rmtree(run.path)
        told.wait()
        assert run.config_file.read_bytes() == adopted


def test_the_id_of_a_run_that_began_elsewhere_is_no_deletion_and_comes_back(run: RunDirectory, looks: Looks) -> None:
    """A node whose directory is new is given the id of the run that it joins."""
    told = Told()
    with upkeep(run, told):
        adopted = run.adopt_run_id("0123456789abcdef")
        looks.more()
        assert told.texts == []
        with looks.between:
            shutil.rmtree(run.path)
        assert "was deleted under this run: it was recreated" in told.wait()
        assert b"0123456789abcdef" in run.config_file.read_bytes()
    assert adopted.run_id == "0123456789abcdef"


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_directory_that_another_run_has_taken_is_left_to_it_and_told_once(
    run: RunDirectory, looks: Looks, is_locked: bool
) -> None:
    told = Told()
    with upkeep(run, told), ExitStack() as closing:
        with looks.between:
            run.path.rename(run.path.with_name("moved"))
            other = RunDirectory.prepare(run.path, config_yaml="seed: 2\n")
            theirs = other.config_file.read_bytes()
            if is_locked:
                closing.enter_context(other.lock())
        words = "is in use by another run" if is_locked else "belongs to another run now: stop one of the two"
        assert words in told.wait()
        looks.more()
        assert run.config_file.read_bytes() == theirs
    assert len(told.texts) == 1


def test_a_directory_that_cannot_be_made_is_told_once_and_tried_again(run: RunDirectory, looks: Looks) -> None:
    told = Told()
    with upkeep(run, told):
        run.path.rename(run.path.with_name("moved"))
        run.path.write_text("in the way")
        looks.more()
        assert told.texts == []  # a file in its place is no sign that it was deleted
        run.path.unlink()
        told.wait()
    assert len(told.texts) == 1
    assert run.config_file.exists()


def test_rows_go_into_a_file_that_is_begun_anew_when_it_was_deleted(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "run" / "rows.jsonl")
    file.path.parent.mkdir()
    file.append([b"1\n"])
    file.path.unlink()
    file.append([b"2\n"])
    assert file.path.read_bytes() == b"2\n"
    shutil.rmtree(file.path.parent)
    file.append([b"3\n"])
    file.path.parent.mkdir()
    file.append([b"4\n"])
    file.close()
    assert file.path.read_bytes() == b"3\n4\n"


# The report of a run whose directory was made by a launcher that is gone.


def rows_of(path: Path, number: int) -> RunDirectory:
    directory = RunDirectory.prepare(path, config_yaml="task: mnist\n")
    add_rows(directory, number)
    return directory


def add_rows(directory: RunDirectory, number: int) -> None:
    with directory.metrics.open("a") as file:
        file.writelines(json.dumps(step_row(step)) + "\n" for step in range(1, number + 1))


@pytest.mark.parametrize(
    ("is_over", "is_kept", "is_reported", "is_written"),
    [
        (True, False, False, True),
        (False, False, False, False),  # it leaves, and others go on
        (True, True, False, False),  # the launcher that has made it lives
        (True, False, True, False),  # ... and was quicker
    ],
)
def test_who_is_left_at_the_end_writes_the_report_of_a_directory_that_nobody_keeps(
    tmp_path: Path, is_over: bool, is_kept: bool, is_reported: bool, is_written: bool
) -> None:
    directory, told = rows_of(tmp_path / "run", 1), Told()
    with ExitStack() as owner, looked_after(directory, told, is_over=lambda: is_over):
        add_rows(directory, 3)
        if is_kept:
            owner.enter_context(directory.lock())
        if is_reported:
            directory.report.write_text("by another launcher")
            os.utime(directory.report, (2**31, 2**31))
    assert told.texts == ([f"report: {directory.report}"] if is_written else [])
    assert directory.report.exists() == (is_written or is_reported)


def test_where_nothing_has_come_there_is_nothing_to_report(tmp_path: Path) -> None:
    with looked_after(directory := rows_of(tmp_path / "run", 1), told := Told(), is_over=lambda: True):
        pass
    assert told.texts == []
    assert not directory.report.exists()


@pytest.mark.parametrize("is_free", [True, False])
def test_the_next_head_keeps_the_directory_of_the_lost_one_and_reports_whatever_becomes_of_the_lock(
    tmp_path: Path, is_free: bool
) -> None:
    directory, told = rows_of(tmp_path / "run", 1), Told()
    with ExitStack() as server:
        if not is_free:  # as a file server holds that of a machine that is off
            server.enter_context(directory.lock())
        with taken_over(directory, told):
            with pytest.raises(RunDirectoryError, match="in use"), directory.lock():
                pass
            add_rows(directory, 3)
    assert told.texts == [f"report: {directory.report}"]
    with directory.lock():
        pass
