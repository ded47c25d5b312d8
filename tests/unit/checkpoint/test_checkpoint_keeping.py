"""States that stay in memory while training goes on: at each instant one of them is whole, whatever comes next."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetseq.checkpoint import CheckpointManager, Identity, SaveResult, snapshot
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint import async_save as background
from hetseq.checkpoint import writer_client as process_module
from hetseq.checkpoint.arena import OVERHEAD_BYTES, Arena
from hetseq.checkpoint.leftover_memory import Remains
from hetseq.checkpoint.memory_recovery import whole_states
from hetseq.cluster.membership.step_commit import CommitRow, Measured, SaveStatus, Vote, Wish, resolve
from tests.support.checkpoints import (
    LINEAGE,
    NoWriter,
    checked_step,
    fork,
    keep,
    keeping,
    leave,
    loaded_step,
    manager,
    reap,
    save,
    seal,
    started,
    tensors_of,
    together,
)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which nobody else has arenas."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes checkpoints: for states that are only kept."""
    monkeypatch.setattr(background, "WriterProcess", NoWriter)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def whole_in_memory(run: Path) -> list[int]:
    """The steps of the states of which every part is sealed, newest first."""
    found = Remains(str(run), run)
    facts = [
        [part.plan, part.attempt.identity.step, 0, part.attempt.number_of_parts, part.index, part.image_bytes]
        for part in found.parts
    ]
    found.close(remove=False)
    return [state.order[0] for state in whole_states([facts])]


def next_start(run: Path, ranks: int = 1, *, has_failed: bool = True) -> list[Any]:
    """Step that the next start loads, and whether it comes from memory, on each rank."""

    def live(group: Any) -> Any:
        own = started(run, group)
        try:
            loaded = own.load()
            return None if loaded is None else (checked_step(loaded), loaded.is_from_memory)
        finally:
            own.close(has_failed=has_failed)

    return together(ranks, live)


def meet(group: Any) -> None:
    """What the commit of a step does for the ranks."""
    group.all_gather_rows(np.zeros(1, np.int64))


def begin(own: CheckpointManager, step: int, elements: int = 1000) -> SaveResult | None:
    """Begin to save; sealed when this returns."""
    result = own.begin(
        tensors_of(step, elements), {"step": step}, identity=Identity(step, 0, LINEAGE), nonce=step * 16,
        kinds=["epoch"], at_once=["model.b"],
    )  # fmt: skip
    own.settle()
    seal(own)
    return result


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_two_newest_states_stay(memory: Path, run: Path, no_writer: None, ranks: int) -> None:
    def live(group: Any) -> list[list[int]]:
        own, seen = keeping(run, group), []
        for step in (1, 2, 3, 4, 5):
            assert own.is_sealed
            assert keep(own, step)
            meet(group)
            seen.append(whole_in_memory(run))
            meet(group)
        own.close()
        return seen

    assert together(ranks, live) == [[[1], [2, 1], [3, 2], [4, 3], [5, 4]]] * ranks
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_while_a_state_is_copied_the_one_before_is_whole(
    memory: Path, run: Path, no_writer: None, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    copy, seen, lock = snapshot._Copying._work, [], threading.Lock()

    def look_and_copy(self: Any) -> None:
        with lock:
            seen.append(whole_in_memory(run))
            copy(self)
            seen.append(whole_in_memory(run))

    monkeypatch.setattr(snapshot._Copying, "_work", look_and_copy)

    def live(group: Any) -> None:
        own = keeping(run, group)
        for step in (1, 2, 3, 4):
            keep(own, step)
            meet(group)
        own.close()

    assert together(ranks, live) == [None] * ranks
    each = 2 * ranks
    assert len(seen) == 4 * each
    for number, whole in enumerate(seen[each:]):
        assert 1 + number // each in whole


def test_a_state_is_sealed_once_its_copy_is_whole_and_not_before(
    memory: Path, run: Path, no_writer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, copy = threading.Event(), snapshot._Copying._work
    monkeypatch.setattr(snapshot._Copying, "_work", lambda self: may_copy.wait(20) and copy(self))
    own = keeping(run)
    assert (own.is_sealed, own.keeping_s) == (True, 0.0)
    own.keep(tensors_of(1), {"step": 1}, identity=Identity(1, 0, LINEAGE), nonce=1, at_once=[])
    assert (own.is_sealed, own.keeping_s, whole_in_memory(run)) == (False, 0.0, [])
    may_copy.set()
    seal(own)
    assert (own.is_sealed, whole_in_memory(run)) == (True, [1])
    assert own.keeping_s > 0
    own.close()
    assert own.is_sealed  # there is nothing to wait for


def test_tensors_may_change_when_it_was_said_that_they_may(memory: Path, run: Path, no_writer: None) -> None:
    own, tensors = keeping(run), tensors_of(1)
    assert own.keep(tensors, {"step": 1}, identity=Identity(1, 0, LINEAGE), nonce=1, at_once=["model.b"])
    tensors["model.b"].zero_()  # a forward
    own.settle()
    tensors["model.a"].zero_()  # an update
    own.close(has_failed=True)
    assert next_start(run) == [(1, True)]


def test_a_state_is_kept_without_anything_on_the_disk(memory: Path, run: Path) -> None:
    own = keeping(run)
    for step in (1, 2, 3):
        keep(own, step)
        assert not own.is_busy
        assert not own.is_underway
    own.close()
    assert list(run.iterdir()) == []


def test_the_first_keep_prepares_for_itself(memory: Path, run: Path, no_writer: None) -> None:
    own = manager(run, run_id=str(run), keeps_states=True)
    assert own.is_sealed
    assert keep(own, 1)
    assert own.keeps_states
    own.close(has_failed=True)
    assert next_start(run) == [(1, True)]


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_failing_end_leaves_anything(memory: Path, run: Path, ranks: int) -> None:
    leave(run, 1, 2, ranks=ranks)
    assert len(list(memory.iterdir())) == 2 * ranks

    def live(group: Any) -> None:
        own = started(run, group)
        assert own.load() is not None
        own.prepare(tensors_of(0))
        keep(own, 3)
        save_now(own, 4)
        own.close()

    assert together(ranks, live) == [None] * ranks
    assert list(memory.iterdir()) == []
    assert next_start(run, ranks) == [(4, False)] * ranks


def test_a_start_that_went_on_from_memory_and_saved_nothing_leaves_it_there(memory: Path, run: Path) -> None:
    """As where nothing was left to train, and the disk is full."""
    leave(run, 1, 2)
    own = started(run)
    assert own.load() is not None
    own.close()
    assert next_start(run) == [(2, True)]


def test_a_failing_end_waits_for_the_copy(memory: Path, run: Path, no_writer: None) -> None:
    own = keeping(run, elements=2_000_000)
    own.keep(tensors_of(1, 2_000_000), {"step": 1}, identity=Identity(1, 0, LINEAGE), nonce=1, at_once=[])
    own.close(has_failed=True)
    assert next_start(run) == [(1, True)]


def test_a_copy_that_failed_leaves_the_state_before(
    memory: Path, run: Path, no_writer: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = keeping(run)
    keep(own, 1)
    keep(own, 2)
    monkeypatch.setattr(snapshot._Copying, "_work", lambda self: self._pairs[0][0].zero_() and [][1])
    own.keep(tensors_of(3), {"step": 3}, identity=Identity(3, 0, LINEAGE), nonce=3, at_once=[])
    with caplog.at_level(logging.WARNING):
        own.close(has_failed=True)
    assert len(caplog.records) == 1
    assert len(list(memory.iterdir())) == 1
    assert next_start(run) == [(2, True)]


def test_a_start_that_fails_early_leaves_what_it_found_to_the_next_one(memory: Path, run: Path) -> None:
    leave(run, 1, 2, ranks=2)
    before = sorted(memory.iterdir())
    for _ in range(2):
        assert next_start(run, 2) == [(2, True)] * 2
    assert sorted(memory.iterdir()) == before
    assert next_start(run, 2, has_failed=False) == [(2, True)] * 2  # an end in good order, but nothing was saved
    assert sorted(memory.iterdir()) == before


def save_now(own: CheckpointManager, step: int) -> None:
    """A checkpoint of this step, on the disk when this returns."""
    identity = Identity(step, 0, LINEAGE)
    assert own.save(tensors_of(step), {"step": step}, identity=identity, nonce=step, kinds=["final"]).ok


def test_a_start_that_has_saved_has_given_the_old_memory_back(memory: Path, run: Path) -> None:
    leave(run, 1, 2, ranks=2)
    before = set(memory.iterdir())

    def live(group: Any) -> tuple[int, bool]:
        own = started(run, group)
        own.load()
        save_now(own, 2)
        own.prepare(tensors_of(0))
        meet(group)
        seen = set(memory.iterdir())
        meet(group)
        own.close()
        return len(seen), bool(seen & before)

    assert together(2, live) == [(4, False)] * 2


def test_a_run_killed_again_and_again_goes_on_from_its_memory_each_time(memory: Path, run: Path) -> None:
    for step in (1, 2, 3):

        def live(group: Any, step: int = step) -> Any:
            own = started(run, group)
            loaded = own.load()
            own.prepare(tensors_of(0))
            keep(own, step)
            own.close(has_failed=True)
            return None if loaded is None else (checked_step(loaded), loaded.is_from_memory)

        assert together(2, live) == [None if step == 1 else (step - 1, True)] * 2


def test_the_memory_of_a_run_is_nothing_to_another_one(memory: Path, run: Path, tmp_path: Path) -> None:
    leave(run, 1)
    copy, other = tmp_path / "copy", tmp_path / "other"
    for folder, run_id in ((copy, str(run)), (other, str(other))):
        folder.mkdir()
        own = started(folder, run_id=run_id)
        assert own.load() is None
        own.close()
    assert next_start(run) == [(1, True)]


# -- kills -------------------------------------------------------------------------------------------------------------


def kill_all(group: Any) -> None:
    """As soon as all ranks are here."""
    meet(group)
    os.kill(os.getpid(), signal.SIGKILL)


def live_until_killed(ranks: int, live: Callable[[Any], None]) -> None:
    """Ranks as threads of a child, which is killed."""
    assert reap(*fork(lambda pipe: together(ranks, live))) == (-signal.SIGKILL, [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_killed_between_two_steps_has_lost_nothing(memory: Path, run: Path, ranks: int) -> None:
    save(run, 1, run_id=str(run))

    def live(group: Any) -> None:
        own = keeping(run, group)
        for step in (2, 3):
            keep(own, step)
            meet(group)
        kill_all(group)

    live_until_killed(ranks, live)
    assert next_start(run, ranks) == [(3, True)] * ranks
    assert next_start(run, 3 - ranks) == [(3, True)] * (3 - ranks)
    assert len(list(memory.iterdir())) == 2 * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_killed_in_the_middle_of_a_copy_goes_on_from_the_state_before(
    memory: Path, run: Path, ranks: int
) -> None:
    save(run, 1, run_id=str(run))
    barrier = threading.Barrier(ranks)

    def copy_half(self: Any) -> None:
        for target, _ in self._pairs:
            target.zero_()
        barrier.wait(20)
        os.kill(os.getpid(), signal.SIGKILL)

    def live(group: Any) -> None:
        own = keeping(run, group)
        for step in (2, 3):
            keep(own, step)
            meet(group)
        snapshot._Copying._work = copy_half  # type: ignore[method-assign]
        meet(group)
        keep(own, 4)

    live_until_killed(ranks, live)
    assert next_start(run, 2) == [(3, True)] * 2
    assert len(list(memory.iterdir())) == ranks  # what was not whole has gone with the writers


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_that_was_not_sealed_on_all_ranks_is_not_gone_on_from(memory: Path, run: Path, ranks: int) -> None:
    has_sealed, seal_arena = threading.Event(), Arena.seal

    def seal_or_die(self: Arena, serial: int, sums: Any) -> None:
        if self.record(serial)["attempt"]["step"] == 4:
            if self.record(serial)["part"] == ranks - 1:
                assert ranks == 1 or has_sealed.wait(20)
                os.kill(os.getpid(), signal.SIGKILL)
            seal_arena(self, serial, sums)
            has_sealed.set()
        else:
            seal_arena(self, serial, sums)

    def live(group: Any) -> None:
        Arena.seal = seal_or_die  # type: ignore[method-assign]
        own = keeping(run, group)
        for step in (2, 3, 4):
            meet(group)
            keep(own, step)
        meet(group)

    live_until_killed(ranks, live)
    assert next_start(run, 2) == [(3, True)] * 2


# -- saves between -----------------------------------------------------------------------------------------------------


def test_a_save_between_states_that_are_kept_takes_its_turn(memory: Path, run: Path) -> None:
    def live(group: Any) -> list[Any]:
        own, seen = keeping(run, group, patience_s=20.0), []
        for step in range(1, 6):
            if step % 2:
                assert keep(own, step)
            else:
                assert begin(own, step) is None
                result = own.finish()
                assert result is not None
                assert result.ok
            meet(group)
            seen.append(whole_in_memory(run))
            meet(group)
        own.close(has_failed=True)
        return seen

    assert together(2, live) == [[[1], [2, 1], [3, 2], [4, 3], [5, 4]]] * 2
    assert next_start(run, 2) == [(5, True)] * 2
    assert [loaded_step(run, which) for which in ("2", "4", "latest")] == [2, 4, 4]


@pytest.mark.parametrize("is_kept_later", [False, True])
def test_a_failing_end_leaves_nothing_in_memory_where_a_file_has_the_newest_state(
    memory: Path, run: Path, is_kept_later: bool
) -> None:
    def live(group: Any) -> None:
        own = keeping(run, group, patience_s=20.0)
        keep(own, 1)
        begin(own, 2)
        own.finish()
        if is_kept_later:
            keep(own, 3)
        own.close(has_failed=True)

    assert together(2, live) == [None, None]
    assert len(list(memory.iterdir())) == (4 if is_kept_later else 0)
    assert next_start(run, 2) == [(3, True) if is_kept_later else (2, False)] * 2


def test_a_save_that_the_disk_refuses_leaves_its_state_and_the_one_before_in_memory(memory: Path, run: Path) -> None:
    (run / "checkpoints").touch()  # no folder can be made there

    def live(group: Any) -> list[Any]:
        own = keeping(run, group)
        keep(own, 1)
        meet(group)
        begin(own, 2)
        result = own.finish()
        assert result is not None
        meet(group)
        seen = whole_in_memory(run)
        meet(group)
        is_kept = keep(own, 3)
        own.close(has_failed=True)
        return [result.ok, seen, is_kept, own.is_sealed]

    assert together(2, live) == [[False, [2, 1], True, True]] * 2
    (run / "checkpoints").unlink()
    assert whole_in_memory(run) == [3, 2]
    assert next_start(run, 2) == [(3, True)] * 2


class Gate:
    """Holds the writers, once they have begun a part, until it is opened."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reached, self._opened = folder / "reached", folder / "opened"
        before, _, after = process_module._PROGRAM.rpartition("importlib.import_module")
        program = f"""
import os, time, hetseq.checkpoint.writer as writer
real = writer.Writer._await_image
def wait(*args):
    real(*args)
    open({str(self._reached)!r}, "w").close()
    while not os.path.exists({str(self._opened)!r}):
        time.sleep(0.005)
writer.Writer._await_image = wait
"""
        monkeypatch.setattr(
            process_module, "_PROGRAM", f"{before}exec({program!r}); importlib.import_module{after}"
        )  # fmt: skip

    def wait(self) -> None:
        """Until a writer is there."""
        deadline = time.monotonic() + 20
        while not self._reached.exists():
            assert time.monotonic() < deadline
            os.sched_yield()

    def open(self) -> None:
        self._opened.touch()


def keep_if_allowed(own: CheckpointManager, step: int) -> bool:
    """As the trainer does after a step in which rank zero finds that a state is due."""
    row = CommitRow(
        0, Vote.OK, 0, (), (), np.zeros(0, np.bool_), Measured(), Wish.NONE,
        SaveStatus(writing=own.is_busy, keep=True, sealed=own.is_sealed),
    )  # fmt: skip
    return resolve([row], next_samples=0).keep and keep(own, step)


def test_states_that_are_kept_during_a_save_do_not_change_what_is_saved(
    memory: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot that is still being written out would be the one of the older state for the second of them."""
    gate = Gate(tmp_path, monkeypatch)
    own = keeping(run)
    keep(own, 1)
    assert begin(own, 2) is None
    gate.wait()
    for step in (3, 4, 5):
        keep_if_allowed(own, step)
    gate.open()
    result = own.finish()
    assert result is not None
    assert result.ok, result.error
    own.close()
    assert loaded_step(run, "2") == 2


def test_a_state_of_another_layout_does_not_end_a_save_that_is_under_way(
    memory: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To prepare anew would leave it without a result and without a commit."""
    gate = Gate(tmp_path, monkeypatch)
    own = keeping(run)
    assert begin(own, 2) is None
    gate.wait()
    threading.Timer(0.2, gate.open).start()  # `keep` may wait for the save
    keep(own, 3, elements=2000)
    gate.open()
    result = own.finish()
    own.close()
    assert result is not None
    assert loaded_step(run, "2") == 2


# -- other layouts, larger states, less memory -------------------------------------------------------------------------


def test_a_state_of_another_layout_is_kept_in_memory_of_its_own(memory: Path, run: Path) -> None:
    def live(group: Any) -> None:
        own = keeping(run, group)
        keep(own, 1)
        keep(own, 2)
        meet(group)
        assert keep(own, 3, elements=5000)
        meet(group)
        assert whole_in_memory(run) == [3]
        meet(group)
        assert keep(own, 4, elements=5000)
        own.close(has_failed=True)

    assert together(2, live) == [None, None]
    assert whole_in_memory(run) == [4, 3]
    assert next_start(run, 3) == [(4, True)] * 3


LARGE = "\\" * 500_000


def test_a_state_too_large_for_the_record_is_not_kept_and_harms_nothing(memory: Path, run: Path) -> None:
    def live(group: Any) -> list[Any]:
        own, seen = keeping(run, group), []
        for step, notes in ((1, ""), (2, ""), (3, LARGE), (4, "")):
            is_kept = keep(own, step, notes=notes)
            meet(group)
            assert is_kept == (step != 3)
            seen.append((own.is_sealed, whole_in_memory(run)[0]))
            meet(group)
        own.close(has_failed=True)
        return seen

    assert together(2, live) == [[(True, 1), (True, 2), (True, 2), (True, 4)]] * 2
    assert next_start(run, 2) == [(4, True)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_state_that_was_too_large_the_only_whole_one_is_not_overwritten(
    memory: Path, run: Path, no_writer: None, ranks: int
) -> None:
    """Were that decided by rank zero alone, it would take the place of a good one on the others."""

    def live(group: Any) -> list[int]:
        own = keeping(run, group)
        for step, notes in ((1, ""), (2, ""), (3, LARGE), (4, LARGE)):
            assert own.is_sealed
            keep(own, step, notes=notes)
            meet(group)
        own.close(has_failed=True)
        return whole_in_memory(run)[:1]

    assert together(ranks, live) == [[2]] * ranks


def arena_size(elements: int, ranks: int) -> int:
    """What one slot of one rank takes, about."""
    return OVERHEAD_BYTES + 4 * elements // ranks + 3000


def test_where_there_is_memory_for_one_state_none_is_kept_and_saves_go_on_as_before(memory: Path, run: Path) -> None:
    def live(group: Any) -> list[Any]:
        own = manager(
            run, group, run_id=str(run), keeps_states=True, memory_bytes=3 * arena_size(1000, 2), patience_s=20.0
        )  # fmt: skip
        refusal = own.prepare(tensors_of(0))
        seen: list[Any] = [refusal, own.keeps_states, own.is_sealed, keep(own, 1)]
        meet(group)
        seen += [len(list(memory.iterdir())), own.node_memory_bytes < 3 * arena_size(1000, 2)]
        assert begin(own, 2) is None
        result = own.finish()
        seen += [result is not None and result.ok, own.is_sealed]
        own.close(has_failed=True)
        return seen

    assert together(2, live) == [[None, False, True, False, 2, True, True, True]] * 2
    assert list(memory.iterdir()) == []
    assert next_start(run) == [(2, False)]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_single_slot_is_nothing_to_go_on_from(memory: Path, run: Path, keeps: bool) -> None:
    """The next save would overwrite the only state that is there."""
    own = manager(run, run_id=str(run), keeps_states=keeps)
    own.prepare(tensors_of(0))
    (run / "checkpoints").touch()  # the disk refuses
    begin(own, 2)
    result = own.finish()
    assert result is not None
    assert not result.ok
    assert whole_in_memory(run) == ([2] if keeps else [])
    own.close(has_failed=True)
    assert len(list(memory.iterdir())) == int(keeps)


def test_where_there_is_memory_for_two_states_all_ranks_say_how_much(memory: Path, run: Path, no_writer: None) -> None:
    def live(group: Any) -> tuple[int, bool]:
        own = keeping(run, group, memory_bytes=4 * arena_size(1000, 2))
        meet(group)
        sizes = sum(path.stat().st_size for path in memory.iterdir())
        meet(group)
        found = own.keeps_states, own.node_memory_bytes == sizes
        own.close()
        return found

    assert together(2, live) == [(True, True)] * 2


def test_without_memory_nothing_is_kept_and_without_the_wish_neither(memory: Path, run: Path, no_writer: None) -> None:
    own = manager(run, run_id=str(run), keeps_states=True, memory_bytes=0)
    assert "are needed on this node" in str(own.prepare(tensors_of(0)))
    assert (own.keeps_states, own.is_sealed, own.node_memory_bytes) == (False, True, 0)
    own = manager(run, run_id=str(run))
    assert own.prepare(tensors_of(0)) is None
    assert (own.keeps_states, own.is_sealed, len(list(memory.iterdir()))) == (False, True, 1)
    own.close(has_failed=True)
    assert list(memory.iterdir()) == []


def test_all_memory_for_two_states_is_back_before_one_is_tried(
    memory: Path, run: Path, no_writer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rank 1 tries again while rank 0 still holds two: in a /dev/shm for one slot each it gets none."""
    has_two, tried_again = threading.Event(), threading.Event()
    create, tries = Arena.create, {0: 0, 1: 0}
    names: dict[int, int] = {}  # rank by thread

    def create_in_small_memory(run_id: str, image_bytes: int) -> Arena:
        rank = names[threading.get_ident()]
        tries[rank] += 1
        if rank == 1:
            assert has_two.wait(20)  # rank 0 was faster
            if tries[1] == 2:
                tried_again.set()
        if len(list(memory.iterdir())) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        arena = create(run_id, image_bytes)
        if tries[0] == 2:
            has_two.set()
        return arena

    monkeypatch.setattr(Arena, "create", staticmethod(create_in_small_memory))
    close = NoWriter.close

    def close_slowly(self: NoWriter, **_: Any) -> None:
        tried_again.wait(0.3)  # a writer needs a moment to end
        close(self)

    monkeypatch.setattr(NoWriter, "close", close_slowly)

    def live(group: Any) -> Any:
        names[threading.get_ident()] = group.rank
        own = manager(run, group, run_id=str(run), keeps_states=True)
        refusal = own.prepare(tensors_of(0))
        own.close()
        return refusal

    assert together(2, live) == [None, None]
