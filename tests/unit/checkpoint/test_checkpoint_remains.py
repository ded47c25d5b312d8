"""What killed processes have left in shared memory: which of it goes, which stays, and which is believed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint import leftover_memory as remains
from hetseq.checkpoint.arena import PAGE, RECORD_BYTES, Arena
from hetseq.checkpoint.leftover_memory import ABANDONED_S, Remains, await_writers, directory_mark, has_remains, sweep
from hetseq.checkpoint.memory_checksums import image_sums
from hetseq.checkpoint.records import CHUNK_BYTES, Attempt, Identity
from tests.support.checkpoints import LINEAGE, SMALL, fork, held, manager, reap


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which nobody else has arenas."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def abandoned(run_id: str) -> Path:
    """An arena that nobody uses any more."""
    with held(run_id) as arena:
        assert arena.path is not None
        return arena.path


def record_of(run: Path, *, part: int = 0, parts: int = 1, step: int = 3, run_id: str = "run") -> dict[str, Any]:
    """What a trainer says of an image of a thousand bytes."""
    attempt = Attempt(run_id, Identity(step, 0, LINEAGE), step, ("time",), "", parts)
    return {
        "attempt": attempt.to_json(),
        "plan": f"plan {step}",
        "directory": directory_mark(run),
        "part": part,
        "image_bytes": SMALL,
        "size_bytes": SMALL * parts,
        "state": "{}" if part == 0 else None,
    }


def sealed(record: Any, run_id: str = "run", *, image_bytes: int = SMALL) -> Path:
    """An arena with this record and an image that is sealed, which nobody uses any more."""
    with held(run_id, image_bytes) as arena:
        arena.begin(4, record)
        arena.image[:] = os.urandom(image_bytes)
        arena.finish(4)
        arena.seal(4, image_sums(arena.image))
        assert arena.path is not None
        return arena.path


def parts_found(run: Path, run_id: str = "run") -> list[tuple[int, int]]:
    """Step and index of the parts that the next start finds."""
    found = Remains(run_id, run)
    try:
        return sorted((part.attempt.identity.step, part.index) for part in found.parts)
    finally:
        found.close(remove=False)


# -- which arenas go ---------------------------------------------------------------------------------------------------


def test_what_a_dead_start_of_this_run_has_left_goes_at_once(memory: Path) -> None:
    def job(pipe: int) -> None:
        Arena.create("run", SMALL)
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(*fork(job)) == (-signal.SIGKILL, [])
    assert len(list(memory.iterdir())) == 1
    assert sweep("run", now_s=time.time()) == []
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("has_failed", [False, True])
def test_what_a_rank_had_not_filled_when_it_was_killed_goes_with_the_end_of_another(
    memory: Path, run: Path, has_failed: bool
) -> None:
    own, path = manager(run, run_id="run"), abandoned("run")
    with held("run") as of_a_third:
        own.close(has_failed=has_failed)
        assert not path.exists()
        assert list(memory.iterdir()) == [of_a_third.path]


def test_what_another_run_has_left_stays_for_an_hour(memory: Path) -> None:
    path, now_s = abandoned("another"), time.time()
    assert sweep("run", now_s=now_s) == []
    assert sweep("run", now_s=now_s + ABANDONED_S - 60) == []
    assert path.exists()
    assert sweep("run", now_s=now_s + ABANDONED_S + 60) == []
    assert not path.exists()


def test_an_arena_whose_holder_lives_stays_however_old_it_is(memory: Path) -> None:
    late_s = time.time() + 2 * ABANDONED_S
    with held("run") as own, held("another") as other:
        assert sweep("run", now_s=late_s) == [own.path]  # only those of this run are somebody to wait for
        assert own.path is not None
        assert other.path is not None
        assert own.path.exists()
        assert other.path.exists()
    assert sweep("run", now_s=late_s) == []
    assert list(memory.iterdir()) == []


def test_an_arena_is_held_by_the_process_that_writes_it_out_after_its_trainer_has_ended(memory: Path) -> None:
    def trainer(pipe: int) -> None:
        Arena.create("run", SMALL)
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(pipe, (os.getpid()).to_bytes(4, "little"))
        signal.pause()  # the writer, which has the same descriptor

    pid, pipe = fork(trainer)
    writer = int.from_bytes(os.read(pipe, 4), "little")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [path.parent for path in sweep("run", now_s=time.time())] == [memory]
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)  # orphans are ours: tests/conftest.py
    os.close(pipe)
    assert sweep("run", now_s=time.time()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "foreign owner", "foreign name"])
def test_a_sweep_takes_nothing_but_arenas_of_this_user(memory: Path, tmp_path: Path, kind: str) -> None:
    treasure, path = tmp_path / "treasure", memory / f"{Arena.prefix('run')}0"
    treasure.write_text("mine")
    if kind == "link":
        path.symlink_to(treasure)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "foreign name":
        path = memory / "hetseq-arena"
        path.write_text("")
    else:
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        path.write_text("")
        os.chown(path, 4711, 4711)
    gone = abandoned("run")
    assert sweep("run", now_s=time.time() + 2 * ABANDONED_S) == []
    assert os.path.lexists(path)
    assert treasure.read_text() == "mine"
    assert not gone.exists()


def test_a_start_waits_until_the_last_writer_of_its_run_has_ended(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas = [Arena.create("run", SMALL) for _ in range(3)]
    naps = 0

    def nap(seconds: float) -> None:
        nonlocal naps
        naps += 1
        arenas.pop().close(unlink=False)

    clock = SimpleNamespace(time=time.time, monotonic=lambda: 0.0, sleep=nap)
    monkeypatch.setattr(remains, "time", clock)
    assert await_writers("run", patience_s=60.0) == []
    assert (naps, list(memory.iterdir())) == (3, [])


def test_a_start_waits_no_longer_than_it_was_told_to(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def nap(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(remains, "time", SimpleNamespace(time=time.time, monotonic=lambda: now_s, sleep=nap))
    with held("run") as arena:
        assert await_writers("run", patience_s=60.0) == [arena.path]
    assert 60.0 <= now_s < 61.0


def test_without_shared_memory_there_is_nothing_to_sweep_and_no_arena(memory: Path) -> None:
    memory.rmdir()
    assert sweep("run", now_s=0.0) == []
    with pytest.raises(FileNotFoundError):
        Arena.create("run", SMALL)


def test_what_is_sealed_stays_for_the_next_start_of_its_run(memory: Path, run: Path) -> None:
    stays, litter = sealed(record_of(run)), abandoned("run")
    assert sweep("run", now_s=time.time()) == []
    assert (stays.exists(), litter.exists()) == (True, False)
    assert sweep("run", now_s=time.time() + 2 * ABANDONED_S) == []  # a queue may take days to start it again
    assert stays.exists()


def test_what_is_sealed_goes_an_hour_after_its_seal_where_only_other_runs_start(memory: Path, run: Path) -> None:
    path = sealed(record_of(run))
    now_s = path.stat().st_ctime
    sweep("another", now_s=now_s + ABANDONED_S - 1)
    assert path.exists()
    sweep("another", now_s=now_s + ABANDONED_S + 1)
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 1, 10, 35, 36, 70, PAGE, PAGE + RECORD_BYTES])
def test_a_file_that_is_too_short_is_litter(memory: Path, run: Path, size: int) -> None:
    """A start that trips over it would fail again and again."""
    good, path = sealed(record_of(run)), memory / f"{Arena.prefix('run')}0"
    path.write_bytes(good.read_bytes()[:size])
    assert parts_found(run) == [(3, 0)]
    assert sweep("run", now_s=time.time()) == []
    assert list(memory.iterdir()) == [good]


# -- what is believed --------------------------------------------------------------------------------------------------


def test_the_next_start_finds_every_part_that_was_sealed_and_may_look_into_it(memory: Path, run: Path) -> None:
    paths = [sealed(record_of(run, part=part, parts=2, step=step)) for step in (3, 4) for part in (0, 1)]
    found = Remains("run", run)
    assert sorted((part.plan, part.index, part.attempt.number_of_parts) for part in found.parts) == [
        ("plan 3", 0, 2), ("plan 3", 1, 2), ("plan 4", 0, 2), ("plan 4", 1, 2)
    ]  # fmt: skip
    for part in found.parts:
        assert (part.image_bytes, part.state) == (SMALL, "{}" if part.index == 0 else None)
        assert list(part.sums) == image_sums(part.arena.image[:SMALL])
        assert part.arena.path in paths
    found.close(remove=False)
    assert found.parts == []
    assert sorted(memory.iterdir()) == sorted(paths)


def test_what_was_found_goes_when_it_is_needed_no_more_and_nothing_else_does(memory: Path, run: Path) -> None:
    paths, other = [sealed(record_of(run, step=step)) for step in (3, 4)], sealed(record_of(run), "another")
    before = set(os.listdir("/proc/self/fd"))
    found = Remains("run", run)
    found.close(remove=True)
    assert [path.exists() for path in (*paths, other)] == [False, False, True]
    assert set(os.listdir("/proc/self/fd")) == before


def test_whether_there_is_anything_can_be_asked_without_a_trace(memory: Path, run: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert not has_remains("run", run)
    path = sealed(record_of(run))
    assert has_remains("run", run)
    assert not has_remains("another", run)
    assert path.exists()
    assert set(os.listdir("/proc/self/fd")) == before


def test_two_ranks_of_a_node_find_the_same(memory: Path, run: Path) -> None:
    sealed(record_of(run))
    one, other = Remains("run", run), Remains("run", run)
    assert [part.plan for part in one.parts] == [part.plan for part in other.parts] == ["plan 3"]
    assert list(other.parts[0].sums) == image_sums(other.parts[0].arena.image[:SMALL])
    image = other.parts[0].arena.image
    one.close(remove=True)
    assert bytes(image[:SMALL]) == bytes(SMALL)  # the memory is free, though somebody still looks into it
    image.release()
    other.close(remove=True)  # it has gone already


def test_the_memory_of_a_run_is_nothing_to_a_copy_of_its_directory(memory: Path, run: Path, tmp_path: Path) -> None:
    sealed(record_of(run))
    shutil.copytree(run, tmp_path / "copy")
    assert parts_found(tmp_path / "copy") == []
    assert parts_found(tmp_path / "nowhere") == []
    run.rename(tmp_path / "moved")
    assert parts_found(tmp_path / "moved") == [(3, 0)]


def test_a_directory_that_nobody_can_look_at_has_no_memory(memory: Path, tmp_path: Path) -> None:
    """Its mark is empty, and so is that of every other such one."""
    assert directory_mark(tmp_path / "nowhere") == ""
    sealed({**record_of(tmp_path), "directory": ""})
    assert parts_found(tmp_path / "nowhere") == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "foreign owner"])
def test_only_files_of_this_user_are_looked_into(memory: Path, run: Path, tmp_path: Path, kind: str) -> None:
    good = sealed(record_of(run))
    elsewhere = tmp_path / "elsewhere"
    good.rename(elsewhere)
    assert parts_found(run) == []
    if kind == "link":
        good.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(good)
    elif kind == "folder":
        good.mkdir()
    else:
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        shutil.copy(elsewhere, good)
        os.chown(good, 4711, 4711)
    assert parts_found(run) == []
    sweep("run", now_s=time.time())
    assert os.path.lexists(good)
    if kind != "folder":
        good.unlink()
        elsewhere.rename(good)
        assert parts_found(run) == [(3, 0)]


def test_a_version_that_is_not_ours_is_not_looked_into(memory: Path, run: Path) -> None:
    path = sealed(record_of(run))
    content = bytearray(path.read_bytes())
    for version in (1, 3):
        content[8] = version
        path.write_bytes(content)
        assert parts_found(run) == []
    content[8] = 2
    path.write_bytes(content)
    assert parts_found(run) == [(3, 0)]


@pytest.mark.parametrize(
    "at",
    [0, 12, 16, 24, 32, 64, 68, PAGE, PAGE + 200, PAGE + RECORD_BYTES],
    ids=["magic", "status", "serial", "size", "crc", "sums' crc", "sealed", "record", "in the record", "sums"],
)
def test_what_was_damaged_outside_of_the_image_is_not_believed(memory: Path, run: Path, at: int) -> None:
    path, other = sealed(record_of(run)), sealed(record_of(run, step=2))
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    assert parts_found(run) == [(2, 0)]
    assert other.exists()


def test_what_lies_there_unsealed_is_not_believed(memory: Path, run: Path) -> None:
    with held("run") as arena:
        arena.begin(4, record_of(run))
        assert parts_found(run) == []
        arena.finish(4)
        assert parts_found(run) == []
        arena.seal(4, image_sums(arena.image))
        assert parts_found(run) == [(3, 0)]
        arena.mark_written(4)
        assert parts_found(run) == [(3, 0)]
        arena.begin(5, record_of(run))
        assert parts_found(run) == []


def attempt_with(**changes: Any) -> dict[str, Any]:
    return {**Attempt("run", Identity(3, 0, LINEAGE), 3, ("time",), "", 2).to_json(), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": None},
        pytest.param({"attempt": []}, id="attempt-list"),
        pytest.param({"attempt": "text"}, id="attempt-text"),
        {"attempt": {}},
        {"attempt": attempt_with(step=-1)},
        {"attempt": attempt_with(run_id="another")},
        {"attempt": attempt_with(version=99)},
        {"attempt": attempt_with(number_of_parts=0)},
        {"attempt": attempt_with(number_of_parts=1), "part": 1, "state": None},
        {"attempt": attempt_with(number_of_parts=10**9)},
        {"plan": None},
        {"plan": 3},
        {"directory": None},
        {"directory": "1:2"},
        {"part": None},
        {"part": -1},
        {"part": 2, "state": None},
        {"part": "0"},
        {"part": 1},  # with a state
        {"state": None},
        {"state": {}},
        {"image_bytes": None},
        {"image_bytes": 0},
        {"image_bytes": -SMALL},
        {"image_bytes": SMALL + 1},
        {"image_bytes": 10**30},
        {"image_bytes": float(SMALL)},
    ],
)
def test_every_field_of_a_record_is_looked_at(memory: Path, run: Path, changes: dict[str, Any]) -> None:
    good = {**record_of(run), "attempt": attempt_with()}
    sealed({**good, **changes})
    assert parts_found(run) == []
    sealed(good)
    assert parts_found(run) == [(3, 0)]


@pytest.mark.parametrize("record", [[], 3, None, "text"])
def test_a_record_that_is_no_object_is_not_believed(memory: Path, run: Path, record: Any) -> None:
    sealed(record)
    assert parts_found(run) == []


def test_a_record_without_one_of_its_fields_is_not_believed(memory: Path, run: Path) -> None:
    good = record_of(run)
    for name in ("attempt", "plan", "directory", "part", "image_bytes", "state"):
        sealed({key: value for key, value in good.items() if key != name})
    assert parts_found(run) == []


def test_an_image_of_several_chunks_has_as_many_sums(memory: Path, run: Path) -> None:
    size = CHUNK_BYTES + 5
    sealed({**record_of(run), "image_bytes": size}, image_bytes=size)
    found = Remains("run", run)
    assert len(found.parts[0].sums) == 2
    found.close(remove=True)


def test_a_file_in_which_nothing_is_costs_no_descriptor(memory: Path, run: Path) -> None:
    """A trainer that is killed between `open` and `posix_fallocate` leaves it."""
    (memory / f"{Arena.prefix('run')}0").touch()
    before = len(os.listdir("/proc/self/fd"))
    assert parts_found(run) == []
    assert sweep("run", now_s=time.time()) == []
    assert list(memory.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_sealed_and_not_believed_goes_too_when_the_rest_does(memory: Path, run: Path) -> None:
    """To a sweep it is sealed, so nobody else would remove it as long as only this run starts."""
    paths = [sealed(record_of(run, step=step)) for step in (3, 4)]
    content = bytearray(paths[1].read_bytes())
    content[PAGE + 5] ^= 1  # the record
    paths[1].write_bytes(content)
    found = Remains("run", run)
    assert len(found.parts) == 1
    found.close(remove=True)
    sweep("run", now_s=time.time())
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("is_filling", [False, True])
def test_what_somebody_holds_does_not_go(memory: Path, run: Path, is_filling: bool) -> None:
    """BUG: a run on a copy of this directory has the same id; while it copies, nothing says whose arena it is."""
    with held("run") as arena:
        if is_filling:
            arena.begin(4, {**record_of(run), "directory": "of a copy"})
        Remains("run", run).close(remove=True)
        assert arena.path is not None
        assert arena.path.exists()


def test_the_text_of_a_part_says_what_was_found(memory: Path, run: Path) -> None:
    sealed({**record_of(run), "state": json.dumps({"step": 3})})
    found = Remains("run", run)
    assert [part.state for part in found.parts] == ['{"step": 3}']
    found.close(remove=True)
