"""A run directory that is deleted under its run is there again, and still nobody else's."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetseq import upkeep as module
from hetseq.append_file import AppendFile
from hetseq.errors import RunDirectoryError
from hetseq.run_directory import RunDirectory, replace_file
from hetseq.upkeep import upkeep


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
            assert told.wait().endswith("made anew and the run goes on, but rows and checkpoints so far are lost")
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
        words = "is in use by another run" if is_locked else "is another run's: stop one of the two"
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
