"""A disk that refuses: the save fails on all ranks, says why, and the older checkpoints stay."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint import Retention
from hetseq.checkpoint import publish as publishing
from hetseq.checkpoint.part_writer import PartWriting
from hetseq.checkpoint.rank_messages import failure_row
from tests.support.checkpoints import Disk, contents, folder, fork, loaded_step, manager, reap, save, together


def refuse(number: int, *, after: bool = False) -> Callable[..., None]:
    """A fault: the call fails with this errno, for `after` once it has been carried out."""

    def fault(name: str, real: Callable[..., Any], *args: Any) -> None:
        if name == "close" or after:
            real(*args)
        raise OSError(number, os.strerror(number), str(args[0]))

    return fault


def calls_of_a_save(run: Path, **settings: Any) -> list[str]:
    """The disk's calls of one save in a run that has one checkpoint already."""
    save(run, 1, kinds=["time"])
    with Disk(run, lambda number, name: False, refuse(0)).between() as disk:
        assert save(run, 2, kinds=["time"], **settings).ok
    return disk.calls


@pytest.mark.fault("FT-12")
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_each_call_of_the_disk_may_fail_once_and_no_save_lies(tmp_path: Path, stride: int) -> None:
    calls = calls_of_a_save(tmp_path / "count", retention=Retention(keep_timed=1))
    assert {"open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"} <= set(calls)
    failed = 0
    hits = range(1, len(calls) + 1, stride)
    for hit in hits:
        run = tmp_path / str(hit)
        save(run, 1, kinds=["time"])
        with Disk(run, lambda number, name, hit=hit: number == hit, refuse(errno.EIO)).between():
            result = save(run, 2, kinds=["time"], retention=Retention(keep_timed=1))
        assert loaded_step(run) == (2 if result.ok else 1)
        if not result.ok:
            failed += 1
            assert "Input/output error" in str(result.error)
            assert contents(run) == {folder(run, 1).name}  # the litter is gone
        assert save(run, 3).ok
        assert loaded_step(run) == 3
    assert len(hits) // 3 < failed < len(hits)


@pytest.mark.parametrize("steps", [(3, 4), (4, 3), (4, 4), (3, 30)])
def test_two_nodes_that_lost_each_other_save_each_its_own_step(tmp_path: Path, steps: tuple[int, int]) -> None:
    mine, theirs = steps
    settings = {"underway_s": 60.0, "kinds": ["signal"], "retention": Retention(keep_timed=1)}
    count = len(calls_of_a_save(tmp_path / "count"))
    for moment in range(1, count + 1):
        run = tmp_path / str(moment)
        save(run, 1)

        def save_theirs(*_: Any, run: Path = run) -> None:
            assert save(run, theirs, nonce=77, **settings).ok

        def is_hit(number: int, name: str, moment: int = moment) -> bool:
            return number == moment

        with Disk(run, is_hit, save_theirs).between():
            result = save(run, mine, nonce=66, **settings)
        assert result.ok, f"another node saved before call {moment}: {result.error}"
        assert loaded_step(run) == max(steps)


@pytest.mark.fault("FT-12")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE])
def test_a_disk_that_stays_full_keeps_what_it_has(tmp_path: Path, number: int) -> None:
    calls = calls_of_a_save(tmp_path / "count")
    for begin in range(1, len(calls) + 1, 3):
        run = tmp_path / str(begin)
        save(run, 1, kinds=["time"])

        def is_hit(count: int, name: str, begin: int = begin) -> bool:
            return count >= begin and name in ("write", "fsync", "mkdir", "rename")

        with Disk(run, is_hit, refuse(number)).between():
            result = save(run, 2, kinds=["time"])
        assert loaded_step(run) == (2 if result.ok else 1)
        assert save(run, 3).ok


def test_an_fsync_that_failed_once_is_a_failed_save(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path / "count")
    syncs = [index + 1 for index, name in enumerate(calls) if name == "fsync"]
    outcomes = []
    for hit in syncs:
        run = tmp_path / str(hit)
        save(run, 1, kinds=["time"])
        with Disk(run, lambda number, name, hit=hit: number == hit, refuse(errno.EIO, after=True)).between():
            outcomes.append(save(run, 2, kinds=["time"]).ok)
        assert loaded_step(run) == (2 if outcomes[-1] else 1)
    # state, part and manifest with their folders, COMMIT with its folders: all count. Only the hint's two do not.
    assert outcomes == [False] * (len(syncs) - 2) + [True] * 2


def test_short_writes_are_continued(tmp_path: Path) -> None:
    real = os.write
    try:
        os.write = lambda descriptor, data: real(descriptor, bytes(data[:7]))  # type: ignore[assignment]
        assert save(tmp_path, 1).ok
    finally:
        os.write = real
    assert loaded_step(tmp_path) == 1


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_failure_on_any_rank_is_the_failure_of_all(tmp_path: Path, victim: int) -> None:
    together(3, lambda group: save(tmp_path, 1, group=group))

    def is_hit(number: int, name: str) -> bool:
        return name == "write"

    with Disk(tmp_path, lambda *_: False, refuse(0)).between() as disk:
        part = f"part-{victim:05d}.safetensors"
        wrapped = os.open

        def refuse_part(path: Any, *args: Any, **kwargs: Any) -> int:
            if str(path).endswith(part) and args[0] & os.O_CREAT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return wrapped(path, *args, **kwargs)

        os.open = refuse_part  # Disk puts the real one back
        results = together(3, lambda group: save(tmp_path, 2, group=group))
    assert disk.calls
    assert {result.ok for result in results} == {False}
    (error,) = {str(result.error).partition("; ")[0] for result in results}  # then what the file system lacks
    assert error == f"rank {victim}: No space left on device (ENOSPC): {part}"
    assert contents(tmp_path) == {folder(tmp_path, 1).name}
    assert loaded_step(tmp_path) == 1
    assert all(result.ok for result in together(3, lambda group: save(tmp_path, 2, group=group, nonce=5)))


def test_a_limit_of_the_file_size_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def job(pipe: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        result = save(tmp_path, 2, elements=100_000)
        os.write(pipe, bytes([result.ok, "EFBIG" in str(result.error)]))

    assert reap(*fork(job)) == (0, [0, 1])
    assert loaded_step(tmp_path) == 1
    assert contents(tmp_path) == {folder(tmp_path, 1).name}


# -- too little room --------------------------------------------------------------------------------------------------


class Room:
    """A disk that holds `size` bytes."""

    def __init__(self, run: Path, size: int) -> None:
        self.run, self.size = run, size

    def free_bytes(self, path: Path) -> int:
        return self.size - sum(file.stat().st_size for file in self.run.rglob("*.safetensors"))


@pytest.mark.parametrize(("holds", "steps"), [(3.5, [8, 9]), (2.5, [9]), (1.5, [1])])
def test_a_disk_with_little_room_makes_progress_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: float, steps: list[int]
) -> None:
    size = save(tmp_path / "one", 1).bytes
    monkeypatch.setattr(publishing, "free_bytes", Room(tmp_path / "run", int(holds * size)).free_bytes)
    results = [save(tmp_path / "run", step, kinds=["time"]) for step in range(1, 10)]
    found = [commit.identity.step for commit in manager(tmp_path / "run").list()]
    if holds < 2:
        assert [result.ok for result in results] == [True] + [False] * 8
        assert "ENOSPC" in str(results[-1].error)
        assert "no older checkpoint may be deleted" in str(results[-1].error)
    else:
        assert all(result.ok for result in results)
    assert found[::-1] == steps or set(steps) <= set(found)
    assert loaded_step(tmp_path / "run") == steps[-1]


def test_room_is_not_made_at_the_price_of_the_only_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        size = save(tmp_path, step, kinds=["time"]).bytes
    part = folder(tmp_path, 2) / "part-00000.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    monkeypatch.setattr(publishing, "free_bytes", Room(tmp_path, int(2.5 * size)).free_bytes)
    assert not save(tmp_path, 3, kinds=["time"]).ok
    assert loaded_step(tmp_path) == 1


def test_kept_checkpoints_are_not_given_up_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        size = save(tmp_path, step, kinds=["epoch"]).bytes
    monkeypatch.setattr(publishing, "free_bytes", Room(tmp_path, int(2.5 * size)).free_bytes)
    assert not save(tmp_path, 3, kinds=["epoch"]).ok
    assert [commit.identity.step for commit in manager(tmp_path).list()] == [2, 1]
    assert save(tmp_path, 3, kinds=["epoch"], retention=Retention(keep_last_epochs=2)).ok
    assert [commit.identity.step for commit in manager(tmp_path).list()] == [3, 2]


def test_room_is_made_of_attempts_that_came_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = save(tmp_path, 1, nonce=99, kinds=["signal"]).bytes
    (folder(tmp_path, 1) / "COMMIT.json").unlink()
    save(tmp_path, 1, underway_s=60.0)
    assert len(contents(tmp_path)) == 2, "it changed just now, so somebody who stops may be at it"
    monkeypatch.setattr(publishing, "free_bytes", Room(tmp_path, int(2.5 * size)).free_bytes)
    assert save(tmp_path, 2, underway_s=60.0).ok
    assert [commit.identity.step for commit in manager(tmp_path).list()] == [2, 1]
    assert len(contents(tmp_path)) == 2


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_part_that_the_disk_refuses_in_the_background_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writing = PartWriting(tmp_path / "part-00000.safetensors", memoryview(bytes(5000)))
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        writing.run(lambda: False)
    writing.close()
    assert failure_row(caught.value).text == "Input/output error (EIO): part-00000.safetensors"
