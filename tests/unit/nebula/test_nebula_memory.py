"""How much memory saved states may take, what it is divided by, and what happens where it does not suffice."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hetseq.nebula as nm
from hetseq.checkpoint.arena import SHARED_MEMORY
from hetseq.config.byte_size import parse_size
from hetseq.errors import ConfigError
from hetseq.nebula.memory_budget import Budget, budget
from hetseq.nebula.publish import TagPlace, TagPublisher
from hetseq.nebula.slots import Slots
from hetseq.nebula.tags import TagAttempt
from hetseq.system import host_memory
from tests.support.nebula import begun, save, service, state_of, step_in, stopped_writer, tags

MB = 10**6


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As a process leaves it that was stopped in an instant in which it keeps others out."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_nebulas_variable_gives_a_process_half_of_the_limit_divided_by_the_processes() -> None:
    four = {"NEBULA_MEMORY_BUFFER_SIZE": "200MB", "LOCAL_WORLD_SIZE": "4"}
    assert budget(None, four) == Budget(25 * MB, False, "NEBULA_MEMORY_BUFFER_SIZE / 2 / 4")
    alone = {"NEBULA_MEMORY_BUFFER_SIZE": "200000000"}
    assert budget(None, alone).limit_bytes == 100 * MB


def test_our_variable_is_one_account_of_the_node_and_comes_before_nebulas() -> None:
    both = {"HETSEQ_MEMORY_BUFFER_SIZE": "1GiB", "NEBULA_MEMORY_BUFFER_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}
    assert budget(None, both) == Budget(2**30, True, "HETSEQ_MEMORY_BUFFER_SIZE")
    assert budget("3 kB", both) == Budget(3000, True, "memory_buffer_size")
    assert budget(0, both).limit_bytes == 0


def test_without_a_word_it_is_half_of_what_is_there() -> None:
    allowed = budget(None, {})
    assert 0 < allowed.limit_bytes < 2**50
    assert allowed.is_shared


def test_a_container_that_leaves_less_than_the_machine_has_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: host_memory.Available(10 * MB, {1: 6 * MB}))
    assert budget(None, {}).limit_bytes == 3 * MB


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("2kb", 2000), ("2 KiB", 2048), ("1.5m", 1500000), (7, 7)])
def test_sizes_are_bytes_or_have_a_unit(text: str | int, size: int) -> None:
    assert parse_size(text, "it") == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "1 XB", "1e3", "nan", True, -1])
def test_a_size_that_is_none_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"it is .*expected bytes"):
        parse_size(text, "it")


def test_two_tags_wait_in_memory_and_not_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path):
        with stopped_writer(monkeypatch) as waits:
            for step in (1, 2):
                save(step, "a", "b")
            two = service().memory_bytes
            assert waits == []
            save(3, "a", "b")
            assert waits != []
        assert service().memory_bytes == two


def test_where_one_copy_fits_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path, memory_buffer_size="4MiB"):  # an arena of these states takes 2 MiB, what goes with it 1
        with stopped_writer(monkeypatch) as waits:
            save(1)
            assert waits == []
            save(2)
            assert waits != []
        nm.flush_persistence()
    assert [step_in(nm.get_checkpoint(tag, tmp_path).load("model")) for tag in tags(tmp_path)] == [2, 1]


def test_a_state_that_never_fits_is_written_while_the_script_waits_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(tmp_path, 1e9, memory_buffer_size="1MB"):
        for step in (1, 2):
            checkpoint = nm.Checkpoint(f"step{step}")
            state = {**state_of(step), "tied": torch.arange(4).t()}
            checkpoint.save("model", state)
            assert (Path(str(checkpoint.path)) / "model.manifest.json").exists()  # already there
            checkpoint.save("small", {"a": (1, None)})
            assert checkpoint.wait() == "open"
        assert service().memory_bytes == 0
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "do not fit into the 1.0 MB of memory for saved states (memory_buffer_size)" in warnings[0].getMessage()
    assert tags(tmp_path) == ["step2", "step1"]  # a tag that memory cannot keep is due
    latest = nm.get_latest_checkpoint(tmp_path)
    assert step_in({key: value for key, value in latest.load("model").items() if key != "tied"}) == 2
    assert latest.load("small") == {"a": (1, None)}


def test_processes_of_one_node_draw_from_one_account(tmp_path: Path) -> None:
    place = TagPlace(tmp_path, -1, 0, 1.0)
    shared = [Slots(place, Budget(10 << 20, True, "test")) for _ in range(2)]
    alone = Slots(place, Budget(10 << 20, False, "test"))
    try:
        assert shared[0].take(5 << 20) is not None
        assert shared[1].take(5 << 20) is None  # 7 and 7 MiB are more than 10
        assert shared[1].take(1 << 20) is not None  # who has fewer bytes takes less
        assert alone.take(5 << 20) is not None  # a share of its own knows nothing of the others
    finally:
        for slots in (*shared, alone):
            slots.close()


def test_a_process_that_stops_while_it_looks_at_the_account_holds_nobody_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetseq.nebula.slots._PATIENCE_S", 0.0)
    slots = Slots(TagPlace(tmp_path, -1, 0, 1.0), Budget(10 << 20, True, "test"))
    with locked(tmp_path):
        taken = slots.take(1 << 20)
        slots.close()
    assert taken is not None


def test_a_process_that_stops_while_it_tidies_up_holds_no_tag_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetseq.nebula.publish._LOCKED_S", 0.0)
    attempt, publisher = TagAttempt("one", f"{1:016x}", 1, 1, 1, False), TagPublisher(TagPlace(tmp_path, -1, 0, 1.0))
    (tmp_path / attempt.folder_name).mkdir()
    with locked(tmp_path / attempt.folder_name):
        assert publisher.open(attempt, size_bytes=1) == tmp_path / attempt.folder_name
    publisher.close(attempt)


def test_a_free_arena_is_used_again_or_makes_way(tmp_path: Path) -> None:
    slots = Slots(TagPlace(tmp_path, -1, 0, 1.0), Budget(10 << 20, True, "test"))
    try:
        first = slots.take(3 << 20)
        assert first is not None
        slots.give_back(first)
        again = slots.take((3 << 20) - 100)
        assert again is first
        slots.give_back(again)
        larger = slots.take(8 << 20)
        assert larger is not None
        assert larger is not first
        assert slots.memory_bytes == larger.arena.size
        slots.give_back(larger)
        assert slots.take(1000) is larger  # not worth an arena of its own while there is no room for it
    finally:
        slots.close()
    assert slots.memory_bytes == 0


def test_a_node_without_shared_memory_saves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hetseq.checkpoint.arena.os.posix_fallocate", refuse)
    with begun(tmp_path):
        save(1)
    assert step_in(nm.get_latest_checkpoint(tmp_path).load("model")) == 1


def test_the_end_gives_all_memory_back(tmp_path: Path) -> None:
    def ours() -> set[str]:
        prefix = f"hetseq-{os.getuid()}-"
        mine = TagPlace(tmp_path, -1, 0, 1.0).run_id
        return {path.name for path in SHARED_MEMORY.glob(f"{prefix}*") if path.name.split("-")[2] == digest(mine)}

    with begun(tmp_path):
        save(1)
        assert len(ours()) == 2  # the anchor, and one state
    assert ours() == set()


def digest(run_id: str) -> str:
    import hashlib

    return hashlib.sha256(run_id.encode()).hexdigest()[:16]
