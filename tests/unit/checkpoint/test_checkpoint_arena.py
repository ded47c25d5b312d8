"""Arenas: what they say of themselves, when they are sealed, and what a memory that is too small does."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from hetseq.checkpoint import Identity
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint.arena import EMPTY, FILLING, PAGE, READY, RECORD_BYTES, SUMS_BYTES, WRITTEN, Arena
from hetseq.checkpoint.records import CHUNK_BYTES
from hetseq.system.files import lock
from tests.support.checkpoints import LINEAGE, SMALL, fork, held, loaded_step, manager, reap, save, tensors_of

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
        assert about.st_blocks * 512 >= about.st_size == PAGE + RECORD_BYTES + SUMS_BYTES + (1 << 20)
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


# -- what is sealed ----------------------------------------------------------------------------------------------------


def test_an_image_is_sealed_with_its_sums_until_the_next_one_begins(memory: Path) -> None:
    with held("run") as arena:
        seen = []

        def look() -> None:
            seen.append((arena.is_sealed, arena.sums(arena.status[1], image_bytes=SMALL)))

        look()
        arena.begin(7, {})
        look()
        arena.finish(7)
        look()
        arena.seal(7, [5])
        look()
        arena.mark_written(7)
        look()
        assert arena.sums(6, image_bytes=SMALL) is None
        arena.begin(8, {})
        look()
        arena.finish(8)
        look()
    nothing, sealed = (False, None), (True, (5,))
    assert seen == [nothing, nothing, nothing, sealed, sealed, nothing, nothing]


def test_the_seal_of_an_image_that_is_no_longer_there_is_not_set(memory: Path) -> None:
    with held("run") as arena:
        arena.begin(8, {})
        arena.finish(8)
        arena.seal(7, [5])
        assert not arena.is_sealed
        arena.seal(8, [5])
        arena.seal(7, [6])  # too late: its image has gone
        assert arena.sums(8, image_bytes=SMALL) == (5,)


def test_a_serial_that_is_used_again_has_no_seal_yet(memory: Path) -> None:
    with held("run") as arena:
        for _ in range(2):
            arena.begin(7, {})
            arena.finish(7)
            assert not arena.is_sealed
            arena.seal(7, [5])
            assert arena.is_sealed


def test_an_image_that_is_not_whole_is_not_sealed(memory: Path) -> None:
    with held("run") as arena:
        arena.begin(7, {})
        arena.seal(7, [5])
        assert not arena.is_sealed
        assert arena.sums(7, image_bytes=SMALL) is None


def test_sums_are_those_of_an_image_of_one_size(memory: Path) -> None:
    with held("run", 2 * CHUNK_BYTES) as arena:
        arena.begin(7, {})
        arena.finish(7)
        arena.seal(7, [5, 6])
        known = {size: arena.sums(7, image_bytes=size) for size in (CHUNK_BYTES + 1, 2 * CHUNK_BYTES)}
        others = (-1, 0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 2**70)
        unknown = {size: arena.sums(7, image_bytes=size) for size in others}
    assert set(known.values()) == {(5, 6)}
    assert set(unknown.values()) == {None}


def test_an_image_with_more_sums_than_there_is_room_for_is_not_sealed(memory: Path) -> None:
    with held("run") as arena:
        arena.begin(7, {})
        arena.finish(7)
        arena.image[:4] = b"part"
        arena.seal(7, [1] * (SUMS_BYTES // 4 + 1))
        assert (arena.is_sealed, bytes(arena.image[:4])) == (False, b"part")
        arena.seal(7, [1] * (SUMS_BYTES // 4))
        assert (arena.is_sealed, bytes(arena.image[:4])) == (True, b"part")


SEAL, SUMS = 64, PAGE + RECORD_BYTES


@pytest.mark.parametrize("at", [0, 8, 12, 16, SEAL, SEAL + 4, SUMS, SUMS + 3])
def test_a_seal_that_was_damaged_is_not_believed(memory: Path, at: int) -> None:
    with held("run") as arena:
        arena.begin(7, {})
        arena.finish(7)
        arena.seal(7, [5])
        assert arena.sums(7, image_bytes=SMALL) == (5,)
        arena._map[at] ^= 4
        assert arena.sums(7, image_bytes=SMALL) is None


def test_who_seals_an_arena_says_that_he_lives(memory: Path) -> None:
    """What sweeps old arenas away goes by the time of the last change, and stores to a map are none."""
    with held("run") as arena:
        assert arena.path is not None
        arena.begin(7, {})
        arena.finish(7)
        os.utime(arena.path, (1, 1))
        arena.image[:] = bytes(SMALL)
        assert arena.path.stat().st_mtime == 1
        arena.seal(7, [5])
        assert arena.path.stat().st_mtime > 1


@pytest.mark.parametrize("size", [1, 10, 35, 36, 70, PAGE])
def test_a_file_that_is_too_short_is_an_empty_arena(memory: Path, size: int) -> None:
    (memory / "a-file").write_bytes(b"hetseq-a"[:size].ljust(size, b"\0"))
    other = Arena(os.open(memory / "a-file", os.O_RDWR), None)
    try:
        assert (other.status, other.is_sealed, other.sums(0, image_bytes=1)) == ((EMPTY, 0), False, None)
    finally:
        other.close(unlink=False)


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
        own, tensors = manager(tmp_path, memory_bytes=1 << 30), tensors_of(2, 500_000)
        os.write(pipe, bytes(["No space left on device" in str(own.prepare(tensors)), own.is_underway]))
        result = own.begin(tensors, {"step": 2}, identity=Identity(2, 0, LINEAGE), nonce=2, kinds=["time"], at_once=[])
        os.write(pipe, bytes([result is not None and result.ok]))

    assert inside_small_memory(job) == [1, 0, 1]
    assert loaded_step(tmp_path) == 2


def test_a_lock_that_somebody_keeps_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    ours, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        lock(other, fcntl.LOCK_EX, patience_s=0.0)
        with pytest.raises(BlockingIOError, match=r"another process has held the lock for 0.02 s: is it stopped\?"):
            lock(ours, fcntl.LOCK_SH, patience_s=0.02)
        releasing = threading.Timer(0.01, os.close, [other])
        releasing.start()
        lock(ours, fcntl.LOCK_SH, patience_s=60.0)  # as soon as it is free
        releasing.join()
    finally:
        os.close(ours)


def test_an_arena_on_which_somebody_stopped_is_an_error_and_leaves_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, kind: int, *, patience_s: float) -> None:
        assert patience_s < 60.0
        raise BlockingIOError(errno.EWOULDBLOCK, "held")

    monkeypatch.setattr("hetseq.checkpoint.arena.lock", refuse)
    with pytest.raises(BlockingIOError, match="held"):
        Arena.create("run", SMALL)
    assert list(memory.iterdir()) == []
