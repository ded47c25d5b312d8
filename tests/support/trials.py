"""A run seen from outside: a command line and all its descendant processes, to be killed or signalled.

`start_trial(words, save_dir)` starts `train.py` with a mark in its environment, which every process of the run
inherits; so they are all found, also children of ended processes. Nothing here sleeps for a guessed time: `until`
polls up to a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from hetseq.checkpoint import CheckpointManager, Loaded, Retention
from hetseq.checkpoint.leftover_memory import await_writers
from hetseq.comm.group import LocalGroup
from hetseq.errors import HetSeqError
from hetseq.monitor.metrics import read_events, read_rows
from hetseq.run_directory import RunDirectory
from tests.support.commands import TRAIN, Command, Finished, start_command

MARK = "HETSEQ_TEST_MARK"
_T = TypeVar("_T")


def until(look: Callable[[], _T], what: str, *, within_s: float = 60.0) -> _T:
    """The first true thing that `look` gives; AssertionError if there is none in time."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(0.01)  # between two looks, not for a time in which something is hoped to happen
    return found


class Trial:
    """A running command and its processes."""

    def __init__(self, command: Command, save_dir: Path, mark: str, begin: int) -> None:
        self.command, self.save_dir, self._mark, self._begin = command, save_dir, mark, begin

    @property
    def launcher(self) -> int:
        return self.command.pid

    def processes(self) -> list[int]:
        """All living processes of the run."""
        return _marked(f"{MARK}={self._mark}".encode())

    def workers(self) -> dict[int, int]:
        """Rank to pid of the workers that live and have reported."""
        living, found = set(self.processes()), {}
        for path in (self.save_dir / "status").glob("rank-*.json"):
            pid = json.loads(path.read_text())["pid"]
            if pid in living:
                found[int(path.stem.partition("-")[2])] = pid
        return found

    def helper(self, word: str) -> int:
        """The process of the launcher whose command line holds `word`: forkserver, resource_tracker."""
        for pid in self.processes():
            if word in _command_line(pid) and _parent(pid) == self.launcher:
                return pid
        raise AssertionError(f"no process {word}")

    def children_of(self, parent: int) -> list[int]:
        return [pid for pid in self.processes() if _parent(pid) == parent]

    def newest_step(self) -> int:
        """The newest step of which this start has written the row."""
        path = self.save_dir / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(self._begin)
            lines = file.read().split(b"\n")[:-1]
        return max((json.loads(line)["step"] for line in lines if line.startswith(b"{")), default=0)

    def wait_for_step(self, step: int) -> None:
        def look() -> bool:
            assert self.command.poll() is None or self.newest_step() >= step, f"ended early: {self.command.said()}"
            return self.newest_step() >= step

        until(look, f"step {step}")

    def signal(self, number: int, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    def kill_everything(self) -> None:
        """kill -9 for each process of the run, launcher first, in one go; then remove what its next start would."""
        was_killed = False
        while living := self.processes():
            was_killed = True
            for pid in [self.launcher, *living]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.command.poll()
        self.command.wait()
        if was_killed:
            with suppress(HetSeqError):  # nothing had been prepared yet
                assert await_writers(RunDirectory(self.save_dir).run_id, patience_s=10.0) == []

    def finish(self, timeout_s: float = 60.0) -> Finished:
        return self.command.finish(timeout_s=timeout_s)

    def wait_until_gone(self, within_s: float) -> float:
        """Seconds until no process of the run is left."""
        begin = time.monotonic()
        until(lambda: self.command.poll() is not None and not self.processes(), "processes left", within_s=within_s)
        return time.monotonic() - begin


@contextmanager
def start_trial(
    words: Sequence[object], save_dir: Path, *, program: Sequence[str] = TRAIN, is_cold: bool = False
) -> Iterator[Trial]:
    """A run that has been started; its remaining processes are killed at the end of the block.

    `is_cold`: from the interpreter's start, imports and all; else see tests/support/forked.py.
    """
    rows, mark = save_dir / "metrics.jsonl", uuid.uuid4().hex
    begin = rows.stat().st_size if rows.exists() else 0
    arguments = [*map(str, words), "--save-dir", str(save_dir)]
    with start_command(arguments, env={MARK: mark}, program=program, is_cold=is_cold) as command:
        trial = Trial(command, save_dir, mark, begin)
        try:
            yield trial
        finally:
            trial.kill_everything()


def run_trial(
    words: Sequence[object], save_dir: Path, *, timeout_s: float = 60.0, is_cold: bool = False
) -> Finished:  # fmt: skip
    """A run from start to end."""
    with start_trial(words, save_dir, is_cold=is_cold) as trial:
        return trial.finish(timeout_s)


def curve(save_dir: Path) -> dict[int, dict[str, Any]]:
    """What a run's result consists of, by step: no times, no shares."""
    kept = ("epoch", "loss", "terms", "counts", "samples", "lr", "grad_norm")
    rows = [row for row in read_rows(save_dir / "metrics.jsonl") if "loss" in row]
    return {row["step"]: {key: row[key] for key in kept} for row in rows}


def validations(save_dir: Path) -> dict[int, dict[str, Any]]:
    """The rows of validations, by step."""
    return {row["step"]: row for row in read_rows(save_dir / "metrics.jsonl") if "loss" not in row}


def events(save_dir: Path, name: str) -> list[dict[str, Any]]:
    """The events of one name, in the order of writing."""
    path = save_dir / "events.jsonl"
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []


def checkpoints(save_dir: Path) -> CheckpointManager:
    return CheckpointManager(save_dir, run_id="a-test-that-only-looks", group=LocalGroup(), retention=Retention())


def kept(save_dir: Path) -> dict[int, set[str]]:
    """Steps that have a checkpoint, with its kinds."""
    return {commit.identity.step: set(commit.kinds) for commit in checkpoints(save_dir).list()}


def last_state(save_dir: Path, which: str = "latest") -> Loaded:
    """A checkpoint, verified to the last byte."""
    loaded = checkpoints(save_dir).load(which)
    assert loaded is not None, f"{save_dir} has no checkpoint"
    return loaded


def largest_difference(one: Loaded, other: Loaded) -> float:
    """Between any two numbers of two states that hold the same tensors."""
    assert one.tensors.keys() == other.tensors.keys()
    return max(float((one.tensors[name].double() - other.tensors[name].double()).abs().max()) for name in one.tensors)


def is_bit_equal(one: Loaded, other: Loaded) -> bool:
    """Whether two states are the same to the bit, model and optimizer."""
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors
    )


def _marked(mark: bytes) -> list[int]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):  # a zombie has no environment any more
                found.append(int(environ.parent.name))
    return found


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _parent(pid: int) -> int:
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
