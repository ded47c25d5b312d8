"""kill -9 at any instant of a save: the old state or the new one, never a mixture, and never less than was promised.

A child process saves and writes the step into a pipe once `save` has returned ok; the parent then reads as a new run
would. `torch.distributed` is not involved.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint import Retention
from tests.support.checkpoints import Disk, fork, loaded_step, manager, reap, save, together

KEEP_ONE = Retention(keep_timed=1)


def killing_disk(run: Path, hit: int, *, half: bool) -> Disk:
    """A disk at whose call number `hit` the process ends, with half of the data written if it is a write."""

    def fault(name: str, real: Callable[..., Any], *args: Any) -> None:
        if half and name == "write":
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        elif half:  # carried out, and the process hears of it no more
            with suppress(FileNotFoundError):
                real(*args)
        os._exit(9)

    return Disk(run, lambda count, name: count == hit, fault)


def save_and_tell(run: Path, step: int, pipe: int, ranks: int) -> None:
    results = together(ranks, lambda group: save(run, step, group=group, kinds=["time"], retention=KEEP_ONE))
    if results[0].ok:
        os.write(pipe, bytes([step]))


def crash(run: Path, hit: int, *, half: bool, ranks: int) -> tuple[int, list[int]]:
    """Exit code and promises of a child that saves step 2 in a run that has step 1."""
    together(ranks, lambda group: save(run, 1, group=group, kinds=["time"], retention=KEEP_ONE))

    def job(pipe: int) -> None:
        with killing_disk(run, hit, half=half).between():
            save_and_tell(run, 2, pipe, ranks)

    return reap(*fork(job))


def calls_of_a_save(run: Path, ranks: int) -> int:
    together(ranks, lambda group: save(run, 1, group=group, kinds=["time"], retention=KEEP_ONE))
    with Disk(run, lambda *_: False, lambda *_: None).between() as disk:
        together(ranks, lambda group: save(run, 2, group=group, kinds=["time"], retention=KEEP_ONE))
    assert disk.calls.count("fsync") > 10  # the disk is really stood between
    return len(disk.calls)


def check_crash_point(run: Path, hit: int, *, half: bool, ranks: int) -> int:
    """The step that is found after a crash at this call; everything is checked that must hold."""
    code, promised = crash(run, hit, half=half, ranks=ranks)
    assert code == 9
    return check_what_is_left(run, promised)


def check_what_is_left(run: Path, promised: list[int]) -> int:
    found = loaded_step(run)
    assert found in (1, 2)
    assert found >= max(promised, default=1)
    assert loaded_step_after_recovery(run) in (found, 2)
    assert save(run, 3, kinds=["time"], retention=KEEP_ONE).ok
    assert loaded_step(run) == 3
    assert len(list((run / "checkpoints").glob("step-*"))) == 1  # no litter is left
    assert not list(run.rglob("*.tmp"))
    return found


def loaded_step_after_recovery(run: Path) -> int | None:
    manager(run).recover()
    return loaded_step(run)


@pytest.mark.parametrize("half", [False, True])
def test_a_save_killed_here_and_there(tmp_path: Path, half: bool) -> None:
    calls = calls_of_a_save(tmp_path / "count", 1)
    found = [check_crash_point(tmp_path / str(hit), hit, half=half, ranks=1) for hit in range(1, calls + 1, 25)]
    assert set(found) == {1, 2}


@pytest.mark.fault("FT-11")
@pytest.mark.slow
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_killed_at_each_call_of_the_disk(tmp_path: Path, half: bool, ranks: int, stride: int) -> None:
    calls = calls_of_a_save(tmp_path / "count", ranks)
    found = []
    for hit in count(1, stride):
        run = tmp_path / str(hit)
        code, promised = crash(run, hit, half=half, ranks=ranks)
        found.append(check_what_is_left(run, promised))
        if code == 0:  # the save needed fewer calls; how many, two ranks decide by who is first
            break
        assert code == 9
    assert calls - 5 < hit <= calls + 5 + stride, "each call was stood between, or every so many"
    assert found == sorted(found)  # once the new state is there, no later crash takes it away
    assert {1, 2} == set(found)


def test_a_promise_made_too_early_would_be_caught(tmp_path: Path) -> None:
    """The twin: who speaks before the commit has lost the step that he promised."""
    save(tmp_path, 1)

    def job(pipe: int) -> None:
        os.write(pipe, bytes([2]))
        with killing_disk(tmp_path, 12, half=False).between():
            save(tmp_path, 2)

    code, promised = reap(*fork(job))
    assert (code, promised, loaded_step(tmp_path)) == (9, [2], 1)


def test_a_writer_that_overwrites_in_place_would_be_caught(tmp_path: Path) -> None:
    """The twin: without a folder of its own for each attempt, a crash in the middle leaves a mixture."""
    run = tmp_path / "run"
    save(run, 1)
    (place,) = (run / "checkpoints").glob("step-*")
    save(tmp_path / "new", 2)
    (new,) = (tmp_path / "new" / "checkpoints").glob("step-*")
    part = "part-00000.safetensors"
    (place / part).write_bytes((new / part).read_bytes())  # ... and killed before COMMIT.json
    with pytest.raises(Exception, match="starting anew would hide that"):
        loaded_step(run)


@pytest.mark.parametrize(
    "trials", [pytest.param(20, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.nightly)]
)
def test_random_kills_tear_nothing_and_lose_nothing(tmp_path: Path, trials: int) -> None:
    generator, run = random.Random(3), tmp_path / "run"
    save(run, 1, kinds=["time"])
    commits = in_between = 0
    newest = 1
    for _ in range(trials):
        pid, pipe = fork(lambda pipe, first=newest + 1: save_in_a_row(run, first, pipe))
        select.select([pipe], [], [], 10)  # the first promise: from now on any instant will do
        deadline = time.monotonic() + generator.uniform(0, 0.03)
        while time.monotonic() < deadline:
            pass
        os.kill(pid, signal.SIGKILL)
        code, said = reap(pid, pipe)
        assert code == -signal.SIGKILL
        promised = newest + len(said)
        in_between += any(not (path / "COMMIT.json").exists() for path in (run / "checkpoints").glob("step-*"))
        if generator.random() < 0.5:
            manager(run).recover()
        found = loaded_step(run)
        assert found is not None
        assert promised <= found <= promised + 1
        commits += len(said)
        newest = found
    assert commits >= trials
    assert in_between > trials // 10  # the kills did hit saves in the middle


def save_in_a_row(run: Path, first: int, pipe: int) -> None:
    """Save step after step, one byte into the pipe for each that is promised."""
    for step in range(first, first + 1000):
        nonce = int.from_bytes(os.urandom(8), "little")  # an earlier life may have begun this step

        def job(group: Any, step: int = step, nonce: int = nonce) -> Any:
            return save(run, step, group=group, kinds=["time"], nonce=nonce, retention=KEEP_ONE)

        assert together(2, job)[0].ok
        os.write(pipe, b"\1")
