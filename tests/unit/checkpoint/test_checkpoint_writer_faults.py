"""A disk that refuses or a writer that is killed, at each of its calls: the save in the background tells the truth.

The writer is a process of its own, so what goes wrong goes wrong in C (tests/support/shim.c). Every trial is a save
that meets a fault, and one after it that meets none. `Ranks.save_with_fault` asserts what must hold after each.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint import CheckpointManager, Identity, Retention, SaveResult
from hetseq.checkpoint import writer_client as writer_process
from hetseq.checkpoint.history import HISTORY_NAME, read_history
from tests.support.checkpoints import LINEAGE, contents, folder, loaded_step, manager, tensors_of, together
from tests.support.shim import Action, Shim, compiled, compiler

KEEP_ONE = Retention(keep_timed=1)
SMALL = 1000  # elements
THREE_CHUNKS = 5_000_000


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("no C compiler")
    return compiled(tmp_path_factory.mktemp("shim"))


class Ranks:
    """Ranks as threads that save in the background, one after the other; `step` is the newest that was promised."""

    def __init__(self, shim: Shim, run: Path, world_size: int, elements: int, patience_s: float) -> None:
        self.shim, self.run, self.step = shim, run, 0
        self._elements, self._patience_s = elements, patience_s
        self._managers: list[CheckpointManager] = checked(together(world_size, self._prepared))

    def _prepared(self, group: Any) -> CheckpointManager:
        made = manager(self.run, group, run_id=str(self.run), retention=KEEP_ONE, patience_s=self._patience_s)
        assert made.prepare(tensors_of(0, self._elements)) is None
        return made

    def save(self, step: int) -> SaveResult:
        """What rank zero is told of one save, whose tensors change as soon as they may."""

        def live(group: Any) -> SaveResult | None:
            own, tensors = self._managers[group.rank], tensors_of(step, self._elements)
            identity = Identity(step, 0, LINEAGE)
            at_once = own.begin(
                tensors, {"step": step}, identity=identity, nonce=step, kinds=["time"], at_once=["model.b"]
            )  # fmt: skip
            tensors["model.b"].zero_()
            own.settle()
            tensors["model.a"].zero_()
            return at_once or own.finish()

        results: list[SaveResult] = checked(together(len(self._managers), live))
        assert len({(result.ok, result.error) for result in results}) == 1
        self._rest()
        return results[0]

    def calls_of_a_save(self) -> list[str]:
        """The names of the calls of a save that replaces an older one."""
        assert self.save(self.step + 1).ok
        self.shim.arm(0, Action.NOTHING)
        assert self.save(self.step + 2).ok
        self.step += 2
        return self.shim.disarm()

    def save_with_fault(self, at: int, action: Action, *, number: int = errno.EIO, is_for_good: bool = False) -> bool:
        """Whether a save succeeds whose call `at` goes wrong, and perhaps all after it; asserts what must hold."""
        before, step = self.step, self.step + 1
        self.shim.arm(at, action, number=number, is_for_good=is_for_good)
        result = self.save(step)
        assert self.shim.has_hit
        self.shim.disarm()
        found = loaded_step(self.run)
        if result.ok:
            assert found == step
        elif is_for_good:  # what was committed and not reported cannot be taken back then
            assert found in (before, step)
        else:
            assert found == before
            assert os.strerror(number) in str(result.error)
            assert contents(self.run) == {folder(self.run, before).name}
        self.step += 2
        assert self.save(self.step).ok
        assert loaded_step(self.run) == self.step
        assert contents(self.run) == {folder(self.run, self.step).name}  # no litter is left
        assert not list(self.run.rglob("*.tmp"))
        assert read_history(self.run / HISTORY_NAME)[-1]["step"] == str(self.step)
        return result.ok

    def close(self) -> None:
        for own in self._managers:
            own.close()

    def _rest(self) -> None:
        """Return once rank zero's writer has done all that it was told: it answers, and what it is asked is nothing."""
        assert self._managers[0]._background is not None
        process = self._managers[0]._background._writer
        process.ask({"do": "commit", "serial": -1})
        assert "failed" in (process.answer(None) or {})


def checked(results: list[Any]) -> list[Any]:
    """The results of all ranks, none of which raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def hits(calls: list[str], stride: int) -> range:
    """The numbers of the calls that go wrong, one after the other: all of them, or every so many."""
    return range(1 + stride // 2, len(calls) + 1, stride)


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path, library: Path) -> Start:
    """`with start(world_size) as ranks`: ranks whose writers live behind a shim."""

    @contextmanager
    def started(world_size: int = 1, elements: int = SMALL, patience_s: float = 0.0) -> Iterator[Ranks]:
        run = tmp_path / "run"
        with Shim(library, tmp_path, run).between() as shim:
            ranks = Ranks(shim, run, world_size, elements, patience_s)
            try:
                yield ranks
            finally:
                ranks.close()

    return started


@pytest.mark.fault("FT-12")
@pytest.mark.parametrize("stride", [18, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("action", [Action.REFUSE, Action.REPORT])
def test_each_call_of_a_writer_may_fail_once_and_no_save_lies(
    start: Start, action: Action, number: int, stride: int
) -> None:
    with start() as ranks:
        calls = ranks.calls_of_a_save()
        assert {"open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"} <= set(calls)
        outcomes = [ranks.save_with_fault(at, action, number=number) for at in hits(calls, stride)]
    # what fails before the commit is promised fails the save; the hint, retention and the history do not
    assert outcomes == sorted(outcomes)
    assert len(outcomes) // 3 < outcomes.count(False) < len(outcomes)


@pytest.mark.parametrize("stride", [18, pytest.param(1, marks=pytest.mark.slow)])
def test_short_writes_are_continued(start: Start, stride: int) -> None:
    with start() as ranks:
        calls = ranks.calls_of_a_save()
        assert all(ranks.save_with_fault(at, Action.SHORTEN) for at in hits(calls, stride))
        assert ranks.save_with_fault(1, Action.SHORTEN, is_for_good=True)


@pytest.mark.fault("FT-11")
@pytest.mark.parametrize("stride", [25, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("action", [Action.KILL, Action.TEAR])
def test_a_writer_killed_once_at_any_call_is_replaced_and_the_save_succeeds(
    start: Start, action: Action, stride: int
) -> None:
    with start() as ranks:
        calls = ranks.calls_of_a_save()
        assert all(ranks.save_with_fault(at, action) for at in hits(calls, stride))


@pytest.mark.slow
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("action", [Action.KILL, Action.TEAR])
def test_writers_killed_at_every_call_from_one_on_are_a_failed_save_and_training_goes_on(
    start: Start, action: Action, stride: int
) -> None:
    with start() as ranks:
        calls = ranks.calls_of_a_save()
        outcomes = [ranks.save_with_fault(at, action, is_for_good=True) for at in hits(calls, stride)]
    assert {True, False} == set(outcomes)


@pytest.mark.parametrize("stride", [18, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_stays_full_keeps_what_it_has(start: Start, stride: int) -> None:
    with start() as ranks:
        calls = ranks.calls_of_a_save()
        outcomes = [
            ranks.save_with_fault(at, Action.REFUSE, number=errno.ENOSPC, is_for_good=True)
            for at in hits(calls, stride)
        ]
    assert outcomes == sorted(outcomes)
    assert {True, False} == set(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("action", [Action.REFUSE, Action.KILL, Action.TEAR])
def test_each_call_of_the_writers_of_two_ranks_may_be_the_one(start: Start, action: Action, stride: int) -> None:
    with start(2, patience_s=20.0) as ranks:
        calls = ranks.calls_of_a_save()
        outcomes = [ranks.save_with_fault(at, action) for at in hits(calls, stride)]
    if action == Action.REFUSE:
        assert {True, False} == set(outcomes)
    else:
        assert all(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["sync_file_range", "fdatasync"])
def test_what_flushes_a_large_part_on_the_way_may_fail_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    narrow = "import hetseq.checkpoint.part_writer as part_writing; part_writing.WINDOW_BYTES = 1 << 20; "
    narrow += "part_writing._set_direct = lambda *_: False; "  # past the page cache there is nothing to flush
    if flush == "fdatasync":  # as where the C library has no sync_file_range
        narrow += "part_writing._sync_file_range = None; "
    before, _, after = writer_process._PROGRAM.rpartition("importlib.import_module")
    monkeypatch.setattr(writer_process, "_PROGRAM", f"{before}{narrow}importlib.import_module{after}")
    with start(1, THREE_CHUNKS) as ranks:
        calls = ranks.calls_of_a_save()
        flushes = [at for at, name in enumerate(calls, start=1) if name == flush]
        assert len(flushes) >= 3
        begin, end = flushes[0] - 1, flushes[-1] + 1
        assert not any(ranks.save_with_fault(at, Action.REFUSE) for at in range(begin, end + 1))
        assert all(ranks.save_with_fault(at, Action.SHORTEN) for at in range(begin, end + 1))
        assert all(ranks.save_with_fault(at, Action.TEAR) for at in range(begin, end + 1))


def test_a_disk_that_lies_about_a_rename_would_be_caught(start: Start) -> None:
    """The twin: where a save is promised and COMMIT.json is not there, the assertions of these trials fail."""
    with start() as ranks:
        calls = ranks.calls_of_a_save()
        with pytest.raises(AssertionError, match=f"assert {ranks.step} == {ranks.step + 1}"):
            ranks.save_with_fault(calls.index("rename") + 1, Action.PRETEND)
