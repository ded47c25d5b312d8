"""States that killed processes have left in memory: which of them are whole, and that every rank gets all of one."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetseq.checkpoint import CheckpointManager, Identity, Loaded
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint import async_save as background
from hetseq.checkpoint import memory_recovery as recall
from hetseq.checkpoint.arena import OVERHEAD_BYTES, PAGE, RECORD_BYTES, Arena
from hetseq.checkpoint.leftover_memory import LeftPart
from hetseq.checkpoint.memory_recovery import LeftState, believed, choose_state, find_states, whole_states
from hetseq.errors import CheckpointRefused
from tests.support.checkpoints import (
    NoWriter,
    checked_step,
    keep,
    keeping,
    leave,
    loaded_step,
    save,
    started,
    tensors_of,
    together,
)

#: where one byte of an arena lies, beside the image
HEADER_FIELDS = {"magic": 0, "version": 8, "status": 12, "serial": 16, "record's size": 24, "record's crc": 32}
SEAL_FIELDS = {"sums' crc": 64, "sealed serial": 68, "record": PAGE + 30, "sums": PAGE + RECORD_BYTES}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which nobody else has arenas, and nobody who writes checkpoints."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", folder)
    monkeypatch.setattr(background, "WriterProcess", NoWriter)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


Filter = Callable[[int, LeftPart], bool]


def load_together(
    run: Path, ranks: int, *, has: Filter = lambda rank, part: True, which: str = "latest",
    hurt: Callable[[int, CheckpointManager], None] = lambda rank, own: None, into: bool = False,
) -> list[Any]:  # fmt: skip
    """What the ranks of the next start load; only the parts for which `has` holds are on the node of a rank."""

    def live(group: Any) -> Loaded | None:
        own = started(run, group)
        assert own._remains is not None
        own._remains.parts = [part for part in own._remains.parts if has(group.rank, part)]
        own._left = find_states(group, own._remains.parts)
        hurt(group.rank, own)
        lent = tensors_of(99) if into else None
        try:
            loaded = own.load(which, into=lent)
            if loaded is not None and lent is not None:
                assert all(loaded.tensors[name] is lent[name] for name in lent)
            return loaded
        finally:
            own.close(has_failed=True)

    return together(ranks, live)


def steps(results: list[Any]) -> list[Any]:
    """Step, and whether it comes from memory, on each rank; exceptions as they are."""
    return [(checked_step(one), one.is_from_memory) if isinstance(one, Loaded) else one for one in results]


# -- which states are whole --------------------------------------------------------------------------------------------

A0, A1 = ["a", 3, 0, 2, 0, 100], ["a", 3, 0, 2, 1, 50]
B0, B1 = ["b", 5, 0, 2, 0, 100], ["b", 5, 0, 2, 1, 50]
STATE_A = (3, 0), (100, 50)
STATE_B = (5, 0), (100, 50)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ([], []),
        ([[], []], []),
        ([[A0]], []),
        ([[A0, A1]], [("a", *STATE_A, [{0}, {0}])]),
        ([[A1, A0]], [("a", *STATE_A, [{0}, {0}])]),
        ([[A0], [A1]], [("a", *STATE_A, [{0}, {1}])]),
        ([[A1], [], [A0, A1]], [("a", *STATE_A, [{2}, {0, 2}])]),
        ([[A0], [A0]], []),
        ([[A0, A0]], []),
        ([[A0, B1]], []),
        ([[A0, A1, B0]], [("a", *STATE_A, [{0}, {0}])]),
        ([[A0, A1], [B0, B1]], [("b", *STATE_B, [{1}, {1}]), ("a", *STATE_A, [{0}, {0}])]),
        ([[B0, B1], [A0, A1]], [("b", *STATE_B, [{0}, {0}]), ("a", *STATE_A, [{1}, {1}])]),
    ],
)
def test_a_state_is_whole_if_each_of_its_parts_is_on_some_node(facts: Any, found: list[Any]) -> None:
    assert whole_states(facts) == [
        LeftState(plan, order, sizes, tuple(frozenset(ranks) for ranks in holders))
        for plan, order, sizes, holders in found
    ]


def left_state(step: int, *, known: tuple[int, ...] = (), is_kept: bool = True) -> LeftState:
    """A state whose nonce is its step."""
    return LeftState(f"plan {step}", (step, 0), (9,), (frozenset({0}),), step, is_kept, known)


KEPT, LATER = left_state(4, known=(1,)), left_state(5, known=(1,))
SAVED = left_state(4, known=(1,), is_kept=False)
WHILE_IT_WAS_SAVED, ONCE_IT_HAD_FAILED = left_state(5, known=(1, 4)), LATER


@pytest.mark.parametrize(
    ("states", "on_disk", "expected"),
    [
        ([], None, None),
        ([LATER, KEPT], None, LATER),
        ([LATER, KEPT], 1, LATER),
        ([LATER, KEPT], 3, None),  # which they do not know: another one's
        ([LATER, KEPT], 6, None),
        ([LATER, left_state(4, known=(3,))], 3, left_state(4, known=(3,))),
        ([SAVED], 1, SAVED),
        ([SAVED], 4, SAVED),  # it is on the disk too
        ([WHILE_IT_WAS_SAVED, SAVED], 1, SAVED),  # else it would never get its file
        ([WHILE_IT_WAS_SAVED, SAVED], None, SAVED),
        ([WHILE_IT_WAS_SAVED, SAVED], 4, WHILE_IT_WAS_SAVED),
        ([ONCE_IT_HAD_FAILED, SAVED], 1, ONCE_IT_HAD_FAILED),
    ],
)
def test_what_is_in_memory_counts_if_it_follows_what_is_on_the_disk(
    states: list[LeftState], on_disk: int | None, expected: LeftState | None
) -> None:
    newest: Any = None
    if on_disk is not None:
        newest = SimpleNamespace(attempt=SimpleNamespace(nonce=on_disk), order=(on_disk, 0, on_disk))
    assert choose_state(believed(states, newest), newest) == expected


def test_newer_states_come_first_by_step_and_then_by_generation() -> None:
    facts = [[f"{step}.{generation}", step, generation, 1, 0, 9] for step in (2, 10, 9) for generation in (0, 11, 2)]
    expected = ["10.11", "10.2", "10.0", "9.11", "9.2", "9.0", "2.11", "2.2", "2.0"]
    assert [state.plan for state in whole_states([facts])] == expected
    assert [state.plan for state in whole_states([[fact] for fact in facts])] == expected


def test_parts_of_two_numbers_of_ranks_are_no_state() -> None:
    """Equal plans cannot have them; a record that was damaged and still fits its CRC could."""
    assert whole_states([[["a", 3, 0, 2, 0, 9], ["a", 3, 0, 3, 1, 9]]]) == []


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 3), (3, 1), (3, 2), (1, 3), (2, 3)])
def test_a_state_comes_back_bit_for_bit_on_any_number_of_ranks(
    memory: Path, run: Path, before: int, after: int, into: bool
) -> None:
    leave(run, 1, 2, ranks=before)
    assert steps(load_together(run, after, into=into)) == [(2, True)] * after


def test_every_bit_of_a_state_comes_back(memory: Path, run: Path) -> None:
    odd = {
        "nan": torch.tensor([float("nan"), -0.0, 5e-324, float("inf")], dtype=torch.float64),
        "half": torch.arange(-9, 9).to(torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(7, dtype=torch.int16),
        "turned": torch.arange(12.0).reshape(3, 4).T,
    }

    identity, state = Identity(7, 3, "0123456789abcdef"), {"numbers": [float("inf"), "ä"]}

    def live(group: Any) -> bool:
        own = keeping(run, group)
        is_kept = own.keep(odd, state, identity=identity, nonce=2**64 - 1, at_once=["nan", "turned"])
        own.close(has_failed=True)
        return is_kept

    assert together(2, live) == [True, True]
    for loaded in load_together(run, 3):
        assert (loaded.state, loaded.identity, loaded.nonce) == (state, identity, 2**64 - 1)
        assert (loaded.run_id, loaded.is_from_memory, loaded.skipped) == (str(run), True, [])
        assert loaded.path.parent == run / "checkpoints"
        assert set(loaded.tensors) == set(odd)
        for name, tensor in odd.items():
            got = loaded.tensors[name]
            assert (got.shape, got.dtype, got.is_contiguous()) == (tensor.shape, tensor.dtype, True)
            assert got.reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))


def test_a_state_of_several_chunks_and_pieces_comes_back(memory: Path, run: Path) -> None:
    leave(run, 3, elements=(17 << 20) // 4)
    assert steps(load_together(run, 2, has=lambda rank, part: rank == 1)) == [(3, True)] * 2


PLACES: dict[str, Filter] = {
    "one part each": lambda rank, part: part.index == rank,
    "turned round": lambda rank, part: part.index == 2 - rank,
    "two nodes have them": lambda rank, part: part.index == 0 if rank == 2 else part.index != 0,
    "the last rank has all": lambda rank, part: rank == 2,
    "rank zero has all": lambda rank, part: rank == 0,
    "one rank has none": lambda rank, part: rank != 1,
    "each lacks one": lambda rank, part: part.index != rank,
}


@pytest.mark.parametrize("at_once", [1000, 16 << 20])
@pytest.mark.parametrize("where", PLACES)
def test_parts_travel_to_the_nodes_that_lack_them(
    memory: Path, run: Path, monkeypatch: pytest.MonkeyPatch, where: str, at_once: int
) -> None:
    monkeypatch.setattr(recall, "_AT_ONCE", at_once)
    leave(run, 4, ranks=3)
    assert steps(load_together(run, 3, has=PLACES[where])) == [(4, True)] * 3


def test_a_part_that_no_node_has_makes_a_state_of_no_use(memory: Path, run: Path) -> None:
    leave(run, 4, 5, ranks=3)
    newest_lacks_part_one: Filter = lambda rank, part: (part.attempt.identity.step, part.index) != (5, 1)  # noqa: E731
    assert steps(load_together(run, 3, has=newest_lacks_part_one)) == [(4, True)] * 3
    assert load_together(run, 3, has=lambda rank, part: part.index != 1) == [None] * 3
    save(run, 1, run_id=str(run))
    assert steps(load_together(run, 3, has=lambda rank, part: part.index != 1)) == [(1, False)] * 3
    leave(run, 6, ranks=3)
    assert steps(load_together(run, 3)) == [(6, True)] * 3


def test_the_same_part_twice_on_a_node_is_one_part(memory: Path, run: Path) -> None:
    leave(run, 4, ranks=2)
    for path in list(memory.iterdir()):
        shutil.copy(path, path.with_name(path.name[:-1] + "_"))
    assert steps(load_together(run, 2)) == [(4, True)] * 2


# -- what is newest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "saved", "expected"),
    [
        ((4, 0), (3, 0), (4, True)),
        ((3, 0), (4, 0), (4, False)),
        ((4, 0), (4, 0), (4, True)),  # it is faster
        ((4, 0), (4, 1), (4, False)),
        ((4, 1), (4, 0), (4, True)),
        ((10, 0), (9, 5), (10, True)),
    ],
)
def test_the_newer_one_of_memory_and_disk_is_gone_on_from(
    memory: Path, run: Path, kept: tuple[int, int], saved: tuple[int, int], expected: tuple[int, bool]
) -> None:
    assert save(run, saved[0], generation=saved[1], run_id=str(run)).ok
    own = keeping(run)
    keep(own, kept[0], generation=kept[1])
    own.close(has_failed=True)
    results = load_together(run, 2)
    assert steps(results) == [expected] * 2
    assert [one.identity.generation for one in results] == [(kept if expected[1] else saved)[1]] * 2
    assert [one.skipped for one in results] == [[], []]


@pytest.mark.parametrize(("left", "is_warned"), [(3, False), (9, True)])
def test_a_state_in_memory_that_does_not_follow_is_a_warning_only_if_it_is_newer(
    memory: Path, run: Path, caplog: pytest.LogCaptureFixture, left: int, is_warned: bool
) -> None:
    leave(run, left)
    save(run, 5, run_id=str(run))
    own = keeping(run)
    keep(own, 6)
    own.close(has_failed=True)
    with caplog.at_level(logging.WARNING):
        results = load_together(run, 2)
    assert steps(results) == [(6, True)] * 2
    assert [one.skipped for one in results] == [[], []]
    warning = "the state of step 9 in memory does not follow the newest checkpoint, step 5, and is not used"
    assert caplog.messages == [warning] * is_warned


def test_whoever_names_a_checkpoint_gets_that_one_and_never_what_is_in_memory(
    memory: Path, run: Path, tmp_path: Path
) -> None:
    save(run, 3, run_id=str(run), kinds=["best", "epoch"])
    leave(run, 4)
    folder = next(run.glob("checkpoints/step-000000003.*"))
    for which in ("3", "best", str(folder), str(run)):
        assert steps(load_together(run, 2, which=which)) == [(3, False)] * 2
    assert steps(load_together(run, 2)) == [(4, True)] * 2
    refused = load_together(run, 2, which="4")
    assert [type(one) for one in refused] == [CheckpointRefused] * 2


def test_another_start_that_has_not_looked_into_memory_loads_from_the_disk(memory: Path, run: Path) -> None:
    save(run, 3)
    leave(run, 4)
    assert loaded_step(run) == 3


# -- damage ------------------------------------------------------------------------------------------------------------


def arena_of(memory: Path, step: int, part: int) -> Path:
    """The file of an arena."""
    for path in memory.iterdir():
        arena = Arena(os.open(path, os.O_RDWR), path)
        record = arena.record(arena.status[1])
        arena.close(unlink=False)
        if (record["attempt"]["step"], record["part"]) == (step, part):
            return path
    raise AssertionError("no such arena")


def flip(path: Path, at: int, bit: int = 4) -> None:
    """Damage one byte; `at` below zero counts from the end."""
    with path.open("r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)
        byte = file.read(1)[0]
        file.seek(at, 0 if at >= 0 else 2)
        file.write(bytes([byte ^ bit]))


IMAGE_FIELDS = {"length of the header": OVERHEAD_BYTES, "its text": OVERHEAD_BYTES + 40, "tensors": -5}


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("where", IMAGE_FIELDS)
def test_an_image_that_was_damaged_is_passed_over_by_all_ranks_with_a_warning(
    memory: Path, run: Path, caplog: pytest.LogCaptureFixture, where: str, part: int
) -> None:
    leave(run, 4, 5, ranks=2)
    flip(arena_of(memory, 5, part), IMAGE_FIELDS[where])
    with caplog.at_level(logging.WARNING):
        results = load_together(run, 3)
    assert steps(results) == [(4, True)] * 3
    for one in results:
        (sentence,) = one.skipped
        assert sentence.startswith("checkpoint of step 5 in memory cannot be used: rank 0: ")
        assert f"part {part} in memory" in sentence
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the state of step 5 in memory is damaged (part {part} in memory: ")
    assert record.getMessage().endswith("): the state of step 4 in memory is used instead")


@pytest.mark.parametrize("where", HEADER_FIELDS | SEAL_FIELDS)
def test_what_was_damaged_beside_an_image_is_not_believed(memory: Path, run: Path, where: str) -> None:
    leave(run, 4, 5, ranks=2)
    flip(arena_of(memory, 5, 1), (HEADER_FIELDS | SEAL_FIELDS)[where])
    assert steps(load_together(run, 2)) == [(4, True)] * 2


def test_damage_to_all_that_is_in_memory_leaves_the_disk(
    memory: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 3, run_id=str(run))
    leave(run, 4, 5, ranks=2)
    flip(arena_of(memory, 5, 0), -1)
    flip(arena_of(memory, 4, 1), -1)
    results = load_together(run, 2, into=True)
    assert steps(results) == [(3, False)] * 2
    assert [sentence.split(" cannot")[0] for sentence in results[0].skipped] == [
        "checkpoint of step 5 in memory",
        "checkpoint of step 4 in memory",
    ]


def test_a_state_in_memory_between_two_on_the_disk_is_taken_in_its_turn(memory: Path, run: Path) -> None:
    for step in (3, 5):
        save(run, step, run_id=str(run))
    leave(run, 4)
    part = next(run.glob("checkpoints/step-000000005.*/part-00000.safetensors"))
    flip(part, -5)
    results = load_together(run, 2)
    assert steps(results) == [(4, True)] * 2
    assert "step-000000005" in results[0].skipped[0]
    flip(arena_of(memory, 4, 0), -5)
    assert steps(load_together(run, 2)) == [(3, False)] * 2


@pytest.mark.parametrize("name", ["part-00000.safetensors", "part-00000.json", "state.json", "COMMIT.json"])
def test_a_disk_on_which_everything_is_damaged_leaves_the_memory(memory: Path, run: Path, name: str) -> None:
    save(run, 3, run_id=str(run))
    leave(run, 4)
    flip(next(run.glob(f"checkpoints/*/{name}")), 20)
    assert steps(load_together(run, 2)) == [(4, True)] * 2


def test_damage_to_all_there_is_is_said_and_no_run_starts_anew_over_it(memory: Path, run: Path) -> None:
    leave(run, 4)
    flip(arena_of(memory, 4, 0), -5)
    for refusal in load_together(run, 2):
        assert isinstance(refusal, CheckpointRefused)
        assert "step 4 in memory" in str(refusal)
        assert "part 0 in memory" in str(refusal)


def own_copies(own: CheckpointManager, folder: Path, *, flipped: bool) -> None:
    """Give a rank a node, that is copies of the arenas, of its own."""
    assert own._remains is not None
    for place, part in enumerate(own._remains.parts):
        assert part.arena.path is not None
        path = folder / part.arena.path.name
        shutil.copy(part.arena.path, path)
        if flipped and part.index == 1:
            flip(path, -5)
        copy = Arena(os.open(path, os.O_RDWR), path)
        own._remains._arenas.append(copy)
        own._remains.parts[place] = replace(part, arena=copy)


@pytest.mark.parametrize("bad", [0, 1, 2, None])
def test_a_part_that_is_damaged_on_one_node_is_refused_by_all_and_nobody_hangs(
    memory: Path, run: Path, tmp_path: Path, bad: int | None
) -> None:
    """Ranks 0 and 1 have all parts, on nodes of their own; rank 2 has none of part 1, which rank 0 sends."""
    save(run, 3, run_id=str(run))
    leave(run, 4, ranks=2)

    def hurt(rank: int, own: CheckpointManager) -> None:
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        own_copies(own, folder, flipped=rank == bad)

    results = load_together(run, 3, hurt=hurt, has=lambda rank, part: rank != 2 or part.index == 0)
    fits = bad in (2, None)  # what rank 2 has of it is not there
    assert steps(results) == [(4, True) if fits else (3, False)] * 3
    if not fits:
        assert "part 1 in memory" in results[2].skipped[0]


def test_parts_that_do_not_make_up_whole_tensors_are_refused(memory: Path, run: Path) -> None:
    save(run, 3, run_id=str(run))
    leave(run, 4, ranks=2)
    first, second = arena_of(memory, 4, 0), arena_of(memory, 4, 1)
    shutil.copy(first, second)
    arena = Arena(os.open(second, os.O_RDWR), second)
    serial = arena.status[1]
    record = {**arena.record(serial), "part": 1, "state": None}
    sums = arena.sums(serial, image_bytes=record["image_bytes"])
    assert sums is not None
    arena.begin(serial, record)
    arena.finish(serial)
    arena.seal(serial, sums)
    arena.close(unlink=False)
    results = load_together(run, 2)
    assert steps(results) == [(3, False)] * 2
    assert "do not fit together" in results[0].skipped[0]
