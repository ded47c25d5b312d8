"""Loading slices: each rank reads what it wants, and all ranks together verify every byte before one goes on."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.checkpoint import CheckpointManager, Loaded, TensorSlice
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint import async_save as background
from hetseq.checkpoint import load as loading
from hetseq.checkpoint import memory_recovery as recall
from hetseq.checkpoint.arena import OVERHEAD_BYTES
from hetseq.checkpoint.leftover_memory import LeftPart
from hetseq.checkpoint.memory_recovery import find_states
from hetseq.checkpoint.records import CHUNK_BYTES
from hetseq.errors import CheckpointRefused
from tests.support.checkpoints import NoWriter, folder, keeping, manager, started, together
from tests.support.sliced import (
    CUT,
    ELEMENTS,
    extents,
    extents_in,
    held_by,
    is_state,
    keep_held,
    save_held,
    slice_of,
    state_of,
    wanting,
)

LARGE = 3 << 20  # elements of a tensor: one and a half chunks; of both, two thirds are in part 0
CUTS = [(1,), (3, 1), (1, 1, 1), (6, 0, 1), (0, 0, 1), (1, 0, 0)]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which no other test has arenas; no process writes checkpoints."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", folder)
    monkeypatch.setattr(background, "WriterProcess", NoWriter)
    return folder


def save_cut(run: Path, *steps: int, cut: Sequence[int] = (6, 2, 1), elements: int = ELEMENTS) -> None:
    """Save these steps, of which as many ranks hold slices."""

    def live(group: Any) -> list[bool]:
        return [save_held(run, group, held_by(group.rank, cut, step, elements), step).ok for step in steps]

    assert together(len(cut), live) == [[True] * len(steps)] * len(cut)


def load_cut(run: Path, cut: Sequence[int], *, elements: int = ELEMENTS, **settings: Any) -> list[Any]:
    """What each rank loads if it wants its slices of this cut."""

    def live(group: Any) -> Any:
        return manager(run, group).load(wanted=wanting(group.rank, cut, elements), **settings)

    return together(len(cut), live)


def check(results: Sequence[Any], cut: Sequence[int], step: int, *, elements: int = ELEMENTS) -> None:
    """Each rank has its slices of the cut, all other tensors, and the right numbers."""
    for loaded, (begin, end) in zip(results, extents(cut, elements), strict=True):
        assert isinstance(loaded, Loaded), loaded
        assert (loaded.identity.step, loaded.state) == (step, {"step": step})
        assert extents_in(loaded) == {name: [(begin, end)] if begin < end else [] for name in CUT}
        assert is_state(loaded.tensors, step, elements)


def flip(path: Path, at: int) -> None:
    """Damage one byte; below zero counts from the end."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


# -- from the disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS)
def test_any_cut_is_loaded_in_any_other(tmp_path: Path, cut: Sequence[int]) -> None:
    save_cut(tmp_path, 3)
    check(load_cut(tmp_path, cut), cut, 3)


def test_what_replicas_saved_is_loaded_in_slices(tmp_path: Path) -> None:
    assert [one.ok for one in together(2, lambda group: save_held(tmp_path, group, state_of(3), 3))] == [True] * 2
    check(load_cut(tmp_path, (3, 1)), (3, 1), 3)


def test_a_rank_may_want_everything_or_many_slices_beside_ranks_that_want_less(tmp_path: Path) -> None:
    save_cut(tmp_path, 3)
    many = [(0, 0), (1, 2), (2, 50), (89, 90)]
    wants: list[Any] = [None, {"model.w": many}, dict.fromkeys(state_of(0), ())]
    whole, some, nothing = together(
        3, lambda group: manager(tmp_path, group).load(wanted=lambda outline: wants[group.rank])
    )
    assert all(is_state(loaded.tensors, 3) for loaded in (whole, some, nothing))
    assert (extents_in(whole), extents_in(some)) == ({}, {"model.w": many})
    assert nothing.tensors == dict.fromkeys(state_of(0), ())


def test_without_wishes_ranks_exchange_two_rows_and_with_them_two_more(tmp_path: Path) -> None:
    save_cut(tmp_path, 3)

    def live(group: Any) -> tuple[int, int]:
        rows = []
        gather = group.all_gather_rows
        group.all_gather_rows = lambda row: rows.append(row) or gather(row)
        manager(tmp_path, group).load()
        count = len(rows)
        manager(tmp_path, group).load(wanted=lambda outline: None)
        return count, len(rows) - count

    assert together(2, live) == [(2, 4)] * 2


@pytest.mark.parametrize("lends", ["slices", "more", "tensors"])
def test_slices_are_read_into_memory_that_the_caller_lends(tmp_path: Path, lends: str) -> None:
    save_cut(tmp_path, 3)
    cut = (3, 1)

    def live(group: Any) -> Any:
        begin, end = extents(cut)[group.rank]
        if lends == "more":
            begin = 0
        into: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
        if lends != "tensors":
            into |= {name: [slice_of(into[name], begin, end)] for name in CUT}
        loaded = manager(tmp_path, group).load(wanted=wanting(group.rank, cut), into=into)
        assert loaded is not None
        for name, tensor in loaded.tensors.items():
            lent = into[name] if isinstance(into[name], torch.Tensor) else into[name][0].tensor
            if name not in CUT:
                assert tensor is lent
            else:
                first = extents(cut)[group.rank][0] - (0 if lends == "tensors" else begin)
                assert tensor[0].tensor.data_ptr() == lent.data_ptr() + 4 * first
        return loaded

    check(together(2, live), cut, 3)


def test_memory_that_does_not_suit_is_not_filled(tmp_path: Path) -> None:
    save_cut(tmp_path, 3)
    into = {
        "model.w": [TensorSlice(torch.zeros(90, dtype=torch.float64), 0, 90, (30, 3))],
        "optim.w.exp_avg": [TensorSlice(torch.zeros(90), 0, 90, (90,))],
    }
    loaded = manager(tmp_path).load(wanted=lambda outline: {name: [(0, 90)] for name in CUT}, into=into)
    assert loaded is not None
    assert is_state(loaded.tensors, 3)
    assert not any(one.tensor.any() for (one,) in into.values())


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, set[int]]]:
    """What each rank, that is thread, reads from the disk: (thread, part, chunks)."""
    reads: list[tuple[int, str, set[int]]] = []
    real = loading.read_chunks

    def read_chunks(path: Path, part: Any, chunks: Any) -> None:
        reads.append((threading.get_ident(), path.name, set(chunks)))
        real(path, part, chunks)

    monkeypatch.setattr(loading, "read_chunks", read_chunks)
    return reads


def test_each_rank_reads_its_chunks_and_the_unwanted_ones_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_cut(tmp_path, 3, elements=LARGE)
    reads = spied(monkeypatch)

    def live(group: Any) -> Any:
        begin = [0, LARGE // 3, 0][group.rank]
        wanted: dict[str, Any] = dict.fromkeys(state_of(0), ())
        if group.rank < 2:
            wanted[CUT[group.rank]] = [(begin, begin + 1000)]
        loaded = manager(tmp_path, group).load(wanted=lambda outline: wanted)
        assert loaded is not None
        assert is_state(loaded.tensors, 3, LARGE)
        return threading.get_ident()

    ranks = together(3, live)
    read = [{(name, chunk) for who, name, found in reads if who == rank for chunk in found} for rank in ranks]
    first, second, third = (f"part-{index:05d}.safetensors" for index in range(3))
    assert read == [{(first, 0), (second, 0)}, {(first, 1), (third, 0)}, {(first, 2)}]
    sizes = [path.stat().st_size for path in sorted(folder(tmp_path, 3).glob("*.safetensors"))]
    assert [-(-size // CHUNK_BYTES) for size in sizes] == [3, 1, 1]


@pytest.mark.parametrize("at", [20_000, CHUNK_BYTES + 5, -5])
def test_a_bad_byte_that_no_rank_wants_is_noticed_by_all(tmp_path: Path, at: int) -> None:
    save_cut(tmp_path, 2, 3, elements=LARGE)
    flip(folder(tmp_path, 3) / "part-00000.safetensors", at)

    def live(group: Any) -> Any:
        return manager(tmp_path, group).load(wanted=lambda outline: dict.fromkeys(state_of(0), ()))

    for loaded in together(3, live):
        assert loaded.identity.step == 2
        (sentence,) = loaded.skipped
        assert "part-00000.safetensors" in sentence


def test_a_bad_byte_in_the_slice_of_one_rank_is_noticed_by_all(tmp_path: Path) -> None:
    save_cut(tmp_path, 2, 3, cut=(1, 1))
    flip(folder(tmp_path, 3) / "part-00001.safetensors", -1)
    check(load_cut(tmp_path, (3, 1)), (3, 1), 2)
    refused = load_cut(tmp_path, (3, 1), which="3")
    assert [type(error) for error in refused] == [CheckpointRefused] * 2


def copied(run: Path, place: Path, change: Callable[[Path], None]) -> Path:
    """A copy of a run, of which the newest checkpoint has changed."""
    shutil.copytree(run, place)
    change(folder(place, 3))
    return place


def test_a_header_that_still_makes_sense_is_verified_though_no_rank_wants_anything(tmp_path: Path) -> None:
    save_cut(tmp_path, 2, 3)
    for part in folder(tmp_path, 3).glob("*.safetensors"):
        part.write_bytes(part.read_bytes().replace(b"model.w@", b"model.v@"))

    def live(group: Any) -> Any:
        return manager(tmp_path, group).load(wanted=lambda outline: dict.fromkeys(outline.tensors, ()))

    for loaded in together(3, live):
        assert loaded.identity.step == 2
        assert "do not match their checksum" in loaded.skipped[0]


def header_renamed(checkpoint: Path) -> None:
    part = checkpoint / "part-00000.safetensors"
    content = part.read_bytes()
    assert b"model.w@0:60" in content
    part.write_bytes(content.replace(b"model.w@0:60", b"model.v@0:60"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda checkpoint: (checkpoint / "part-00001.json").unlink(), "rank 1: part-00001.json: No such file"),
        (lambda checkpoint: os.truncate(checkpoint / "part-00000.safetensors", 300), "rank 1: part-00000.safetensors"),
        (header_renamed, "rank 1: "),
    ],
)
def test_a_rank_that_sees_other_files_makes_all_skip_the_checkpoint(
    tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    run = tmp_path / "run"
    save_cut(run, 2, 3, cut=(2, 1))
    other = copied(run, tmp_path / "other", change)

    def live(group: Any) -> Any:
        place = other if group.rank == 1 else run
        return manager(place, group).load(wanted=lambda outline: dict.fromkeys(state_of(0), ()))

    for loaded in together(2, live):
        assert loaded.identity.step == 2
        (sentence,) = loaded.skipped
        assert reason in sentence


def test_ranks_that_see_different_headers_skip_the_checkpoint_though_each_fits_its_own(tmp_path: Path) -> None:
    """A header is read before its checksum is known, by ranks that do not read its chunk again."""
    run = tmp_path / "run"
    save_cut(run, 2, 3, cut=(2, 1))

    def rename(checkpoint: Path) -> None:
        for part in checkpoint.glob("*.safetensors"):
            part.write_bytes(part.read_bytes().replace(b"model.w@", b"model.v@"))

    other = copied(run, tmp_path / "other", rename)

    def live(group: Any) -> Any:
        place = other if group.rank == 1 else run
        return manager(place, group).load(wanted=lambda outline: dict.fromkeys(outline.tensors, ()))

    for loaded in together(2, live):
        assert loaded.identity.step == 2
        assert "the ranks do not see the same headers of its parts" in loaded.skipped[0]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"model.v": [(0, 1)]}, "the checkpoint has no such tensor"),
        ({"model.w": [(0, 91)]}, "the elements 0 to 91 of tensor model.w, of 90"),
        ({"model.w": [(5, 4)]}, "in order and disjoint"),
        ({"model.w": [(0, 6), (5, 9)]}, "in order and disjoint"),
    ],
)
def test_elements_that_do_not_exist_are_refused_and_no_rank_waits(tmp_path: Path, wanted: Any, reason: str) -> None:
    save_cut(tmp_path, 3)

    def live(group: Any) -> Any:
        return manager(tmp_path, group).load(wanted=lambda outline: wanted if group.rank == 1 else None)

    told, raised = together(2, live)
    assert isinstance(raised, ValueError)
    assert reason in str(raised)
    assert isinstance(told, CheckpointRefused)
    assert "rank 1: ValueError" in str(told)


# -- from memory -------------------------------------------------------------------------------------------------------

Filter = Callable[[int, LeftPart], bool]
PLACES: dict[str, Filter] = {
    "every node has all": lambda rank, part: True,
    "one part each": lambda rank, part: part.index == rank,
    "turned round": lambda rank, part: part.index == 2 - rank,
    "the last rank has all": lambda rank, part: rank == 2,
    "one rank has none": lambda rank, part: rank != 1,
}


def leave_cut(run: Path, *steps: int, elements: int = ELEMENTS) -> None:
    """A run of three ranks that kept these states, and failed."""

    def live(group: Any) -> None:
        own = keeping(run, group)
        own.prepare(held_by(group.rank, (6, 2, 1), 0, elements))
        for step in steps:
            assert keep_held(own, held_by(group.rank, (6, 2, 1), step, elements), step)
        own.close(has_failed=True)

    assert together(3, live) == [None] * 3


def recall_cut(
    run: Path, has: Filter, wanted: Callable[[int], Any], hurt: Callable[[int, CheckpointManager], None] | None = None
) -> tuple[list[Any], list[int]]:
    """What the ranks of the next start load, and how many bytes each of them sent or received."""
    bytes_sent = [0] * 3

    def live(group: Any) -> Any:
        own = started(run, group)
        assert own._remains is not None
        own._remains.parts = [part for part in own._remains.parts if has(group.rank, part)]
        own._left = find_states(group, own._remains.parts)
        if hurt is not None:
            hurt(group.rank, own)
        broadcast = group.broadcast

        def counting(tensor: torch.Tensor, *, source: int) -> None:
            bytes_sent[group.rank] += tensor.nbytes
            broadcast(tensor, source=source)

        group.broadcast = counting
        try:
            return own.load(wanted=wanted(group.rank))
        finally:
            own.close(has_failed=True)

    return together(3, live), bytes_sent


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("cut", [(1, 1, 1), (1, 6, 0)])
def test_slices_come_back_from_memory_wherever_the_parts_are(
    memory: Path, tmp_path: Path, where: str, cut: Sequence[int]
) -> None:
    run = tmp_path / "run"
    leave_cut(run, 4, 5)
    results, _ = recall_cut(run, PLACES[where], lambda rank: wanting(rank, cut))
    check(results, cut, 5)
    assert all(loaded.is_from_memory for loaded in results)


def test_only_what_a_rank_of_another_node_wants_is_sent(memory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    leave_cut(run, 5, elements=LARGE)
    begin, end = extents((6, 2, 1), LARGE)[0]

    def wanted(rank: int) -> Callable[[Loaded], Any]:
        return lambda outline: {
            name: [(end - 9, end)] if rank == 1 and name == "optim.w.exp_avg" else () for name in state_of(0)
        }

    results, bytes_sent = recall_cut(run, PLACES["one part each"], wanted)
    assert all(is_state(loaded.tensors, 5, LARGE) for loaded in results)
    assert extents_in(results[1])["optim.w.exp_avg"] == [(end - 9, end)]
    assert (begin, end) == (0, 2 * LARGE // 3)
    # the last bytes of part 0 are in one chunk, and each part has a header
    assert all(0 < count < CHUNK_BYTES + 10_000 for count in bytes_sent)
    assert len(set(bytes_sent)) == 1


def arena_of(memory: Path, step: int, part: int) -> Path:
    """The file of an arena."""
    for path in memory.iterdir():
        arena = arena_module.Arena(os.open(path, os.O_RDWR), path)
        record = arena.record(arena.status[1])
        arena.close(unlink=False)
        if (record["attempt"]["step"], record["part"]) == (step, part):
            return path
    raise AssertionError("no such arena")


@pytest.mark.parametrize("where", ["every node has all", "one part each", "turned round"])
@pytest.mark.parametrize("at", [OVERHEAD_BYTES, OVERHEAD_BYTES + 40, OVERHEAD_BYTES + CHUNK_BYTES + 3, -5])
def test_an_image_with_a_bad_byte_that_no_rank_wants_is_skipped_by_all(
    memory: Path, tmp_path: Path, where: str, at: int
) -> None:
    run = tmp_path / "run"
    leave_cut(run, 4, 5, elements=LARGE // 2)
    flip(arena_of(memory, 5, 0), at)
    nothing: Callable[[int], Any] = lambda rank: lambda outline: dict.fromkeys(state_of(0), ())  # noqa: E731
    for loaded in recall_cut(run, PLACES[where], nothing)[0]:
        assert (loaded.identity.step, loaded.is_from_memory) == (4, True)
        (sentence,) = loaded.skipped
        assert sentence.startswith("checkpoint of step 5 in memory cannot be used: rank ")
        assert "part 0 in memory" in sentence


def test_a_chunk_that_is_spoilt_on_its_way_is_noticed_by_all_and_no_rank_waits(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    leave_cut(run, 4, 5)
    real, spoilt = recall._broadcast, []

    def broadcast(group: Any, content: memoryview, *, source: int) -> None:
        real(group, content, source=source)
        if group.rank == 2 and source == 0 and len(content) > 900 and not spoilt:  # of part 0, and not its header
            spoilt.append(True)
            content[-1] ^= 1

    monkeypatch.setattr(recall, "_broadcast", broadcast)
    results, _ = recall_cut(run, PLACES["one part each"], lambda rank: wanting(rank, (1, 1, 1)))
    check(results, (1, 1, 1), 4)
    assert "rank 2: part 0 in memory" in results[0].skipped[0]
