"""Arenas: what they say of themselves, which of them are swept, and what a memory that is too small does."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetseq.checkpoint import Identity
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint.arena import (
    ABANDONED_S,
    EMPTY,
    FILLING,
    PAGE,
    READY,
    RECORD_BYTES,
    WRITTEN,
    Arena,
    await_writers,
    sweep,
)
from tests.support.checkpoints import LINEAGE, fork, loaded_step, manager, reap, save, tensors_of

SMALL = 1000  # bytes of an image
SHARED_MEMORY = Path("/dev/shm")
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_PRIVATE = 0x4000 | 1 << 18  # and all mounts below


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which nobody else has arenas."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", folder)
    return folder


@contextmanager
def held(run_id: str, image_bytes: int = SMALL) -> Iterator[Arena]:
    """An arena that somebody uses, and whose file stays."""
    arena = Arena.create(run_id, image_bytes)
    try:
        yield arena
    finally:
        arena.close(unlink=False)


def abandoned(run_id: str) -> Path:
    """An arena that nobody uses any more."""
    with held(run_id) as arena:
        assert arena.path is not None
        return arena.path


# -- what an arena says ------------------------------------------------------------------------------------------------


def test_an_arena_is_read_by_whoever_has_its_descriptor_as_it_was_filled(memory: Path) -> None:
    with held("run") as arena:
        other = Arena(os.dup(arena.descriptor), None)
        seen = [other.status]
        arena.begin(7, {"part": 3})
        arena.image[:4] = b"part"
        seen.append(other.status)
        arena.finish(7)
        seen.append(other.status)
        assert (other.record(7), bytes(other.image[:4])) == ({"part": 3}, b"part")
        other.mark_written(7)
        seen.append(arena.status)
        other.close(unlink=False)
    assert seen == [(EMPTY, 0), (FILLING, 7), (READY, 7), (WRITTEN, 7)]


def test_an_arena_is_all_there_when_it_is_created_and_is_nobody_elses(memory: Path) -> None:
    with held("run", 1 << 20) as arena:
        assert arena.path is not None
        about = arena.path.stat()
        assert about.st_blocks * 512 >= about.st_size == PAGE + RECORD_BYTES + (1 << 20)
        assert stat.S_IMODE(about.st_mode) == 0o600
        assert len(arena.image) == arena.image_bytes == 1 << 20


def test_what_is_said_of_another_serial_changes_nothing(memory: Path) -> None:
    with held("run") as arena:
        arena.begin(7, {})
        arena.finish(6)
        arena.mark_written(7)  # not before it is ready
        assert arena.status == (FILLING, 7)
        arena.finish(7)
        arena.begin(8, {})
        arena.finish(7)
        assert arena.status == (FILLING, 8)
        with pytest.raises(ValueError, match="does not hold the record 7"):
            arena.record(7)


@pytest.mark.parametrize("at", [0, 8, 20, 28, PAGE, PAGE + 5])
def test_a_header_or_a_record_that_was_damaged_is_not_believed(memory: Path, at: int) -> None:
    with held("run") as arena:
        arena.begin(7, {"part": 3})
        arena.finish(7)
        assert arena.record(7) == {"part": 3}
        arena._map[at] ^= 1
        with pytest.raises(ValueError, match="does not hold the record 7"):
            arena.record(7)


def test_a_reader_never_sees_a_header_that_is_just_being_written(memory: Path) -> None:
    """The writer reads the record while, in another process, the trainer's copy becomes whole."""
    with held("run") as arena:
        arena.begin(7, {"part": 3})

        def become_whole_again_and_again(pipe: int) -> None:
            os.write(pipe, b"\1")
            while True:
                arena._advance(FILLING, READY, 7)
                arena._advance(READY, FILLING, 7)

        pid, pipe = fork(become_whole_again_and_again)
        os.read(pipe, 1)
        try:
            seen = {(arena.record(7)["part"], arena.status) for _ in range(20_000)}
        finally:
            os.kill(pid, signal.SIGKILL)
            reap(pid, pipe)
    assert seen <= {(3, (FILLING, 7)), (3, (READY, 7))}


def test_what_is_no_arena_is_empty(memory: Path) -> None:
    (memory / "a-file").write_bytes(bytes([255]) * (PAGE + RECORD_BYTES + SMALL))
    other = Arena(os.open(memory / "a-file", os.O_RDWR), None)
    assert other.status == (EMPTY, 0)
    with pytest.raises(ValueError):
        other.record(0)
    other.close(unlink=False)


def test_a_record_that_is_too_large_is_refused_and_the_arena_stays_as_it_was(memory: Path) -> None:
    with held("run") as arena:
        arena.begin(1, {"state": "x" * (RECORD_BYTES - 100)})
        with pytest.raises(ValueError, match="at most 1048576"):
            arena.begin(2, {"state": "x" * RECORD_BYTES})
        assert arena.status == (FILLING, 1)


def test_a_planted_name_is_not_followed(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module.secrets, "token_hex", lambda size: "0" * 16)
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    planted = memory / f"{Arena.prefix('run')}{'0' * 16}"
    planted.symlink_to(treasure)
    with pytest.raises(FileExistsError):
        Arena.create("run", SMALL)
    assert treasure.read_text() == "mine"
    planted.unlink()
    with held("run"):
        assert planted.is_file()


# -- which arenas go ---------------------------------------------------------------------------------------------------


def test_what_a_dead_start_of_this_run_has_left_goes_at_once(memory: Path) -> None:
    def job(pipe: int) -> None:
        Arena.create("run", SMALL)
        os.kill(os.getpid(), signal.SIGKILL)

    assert reap(*fork(job)) == (-signal.SIGKILL, [])
    assert len(list(memory.iterdir())) == 1
    assert sweep("run", now_s=time.time()) == []
    assert list(memory.iterdir()) == []


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
    monkeypatch.setattr(arena_module, "time", clock)
    assert await_writers("run", patience_s=60.0) == []
    assert (naps, list(memory.iterdir())) == (3, [])


def test_a_start_waits_no_longer_than_it_was_told_to(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def nap(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(arena_module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now_s, sleep=nap))
    with held("run") as arena:
        assert await_writers("run", patience_s=60.0) == [arena.path]
    assert 60.0 <= now_s < 61.0


def test_without_shared_memory_there_is_nothing_to_sweep_and_no_arena(memory: Path) -> None:
    memory.rmdir()
    assert sweep("run", now_s=0.0) == []
    with pytest.raises(FileNotFoundError):
        Arena.create("run", SMALL)


# -- too little memory -------------------------------------------------------------------------------------------------


def enter_small_memory(size: str) -> bool:
    """Give this process, which must be a child that has just been forked, a /dev/shm of its own, of this size."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _CLONE_NEWNS if os.getuid() == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    return (
        libc.unshare(flags) == 0
        and libc.mount(None, b"/", None, _MS_PRIVATE, None) == 0  # or everybody would see the next one
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()) == 0
    )


def inside_small_memory(job: object, size: str = "2m") -> list[int]:
    """The bytes that `job(pipe)` writes in a process with a small /dev/shm; the test is skipped where there is none."""

    def live(pipe: int) -> None:
        if enter_small_memory(size):
            job(pipe)  # type: ignore[operator]
        else:
            os.write(pipe, b"\xff")

    code, said = reap(*fork(live))
    if said == [255]:
        pytest.skip("no mount namespaces for this user")
    assert code == 0
    return said


def test_an_arena_that_does_not_fit_is_an_error_at_the_start_and_leaves_nothing() -> None:
    def job(pipe: int) -> None:
        try:
            Arena.create("run", 2 << 20)
        except OSError as error:
            os.write(pipe, bytes([error.errno or 0, len(list(SHARED_MEMORY.iterdir()))]))
        Arena.create("run", 1 << 19).close(unlink=True)
        os.write(pipe, bytes([len(list(SHARED_MEMORY.iterdir()))]))

    assert inside_small_memory(job) == [errno.ENOSPC, 0, 0]


def test_a_run_with_too_little_memory_is_told_so_and_saves_all_the_same(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def job(pipe: int) -> None:
        own, tensors = manager(tmp_path), tensors_of(2, 500_000)
        os.write(pipe, bytes(["No space left on device" in str(own.prepare(tensors)), own.is_underway]))
        result = own.begin(tensors, {"step": 2}, identity=Identity(2, 0, LINEAGE), nonce=2, kinds=["time"], at_once=[])
        os.write(pipe, bytes([result is not None and result.ok]))

    assert inside_small_memory(job) == [1, 0, 1]
    assert loaded_step(tmp_path) == 2
