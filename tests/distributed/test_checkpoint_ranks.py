"""Checkpoints over a real group: ranks as processes, gloo between them."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetseq.checkpoint import SaveResult
from hetseq.checkpoint.leftover_memory import Remains
from hetseq.checkpoint.memory_recovery import find_states
from hetseq.errors import CheckpointRefused, PeerLostError
from tests.support.checkpoints import checked_step, contents, folder, keep, keeping, loaded_step, manager, save, started
from tests.support.ranks import run_ranks
from tests.support.sliced import (
    CUT,
    extents,
    extents_in,
    held_by,
    is_state,
    keep_held,
    save_held,
    save_held_in_background,
    wanting,
)


def save_and_load(group: Any, run: str, step: int) -> tuple[SaveResult, int, list[float]]:
    result = save(Path(run), step, group=group, weights=[3] + [1] * (group.world_size - 1))
    loaded = manager(Path(run), group).load()
    assert loaded is not None
    return result, loaded.identity.step, loaded.tensors["model.a"][:2].tolist()


def fail_on_one(group: Any, run: str, victim: int) -> SaveResult:
    if group.rank == victim:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            os.fsync = real
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.fsync = fsync
    return save(Path(run), 2, group=group)


def refuse(group: Any, run: str) -> str:
    with pytest.raises(CheckpointRefused) as caught:
        manager(Path(run), group).load("7")
    return str(caught.value)


def die_while_saving(group: Any, run: str) -> str:
    if group.rank == 1:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync
        save(Path(run), 2, group=group)
        os.fsync = real
    with pytest.raises(PeerLostError):
        save(Path(run), 2, group=group)
    return "told"


def keep_and_fail(group: Any, run: str, step: int) -> None:
    own = keeping(Path(run), group, elements=5_000_000)
    keep(own, step, elements=5_000_000)
    own.close(has_failed=True)


def load_as_nodes_of_their_own(group: Any, run: str) -> tuple[int, bool]:
    """Each rank as if its node held one part alone."""
    own = manager(Path(run), group, run_id=run)
    own.recover()
    assert own._remains is not None
    own._remains.parts[:] = [part for part in own._remains.parts if part.index == group.rank]
    own._left = find_states(group, own._remains.parts)
    loaded = own.load()
    own.close(has_failed=True)
    assert loaded is not None
    return checked_step(loaded), loaded.is_from_memory


def save_slices(group: Any, run: str) -> list[Any]:
    """Saves in the background, of cuts that change, and at last one for which this rank waits."""
    own, results = manager(Path(run), group, run_id=run, patience_s=15.0), []
    assert own.prepare(held_by(group.rank, (6, 2, 1), 0)) is None
    for step, cut in enumerate([(6, 2, 1), (6, 2, 1), (0, 5, 4)], 1):
        results.append(save_held_in_background(own, held_by(group.rank, cut, step), step))
    results.append(save_held(Path(run), group, held_by(group.rank, (1, 1, 1), 4), 4, own))
    own.close()
    return results


def test_slices_are_saved_in_the_background_also_when_they_are_cut_anew(tmp_path: Path) -> None:
    for results in run_ranks(save_slices, 3, str(tmp_path)):
        assert [(result.ok, result.error) for result in results] == [(True, None)] * 4
    for step in (1, 2, 3, 4):
        loaded = manager(tmp_path).load(str(step))
        assert loaded is not None
        assert is_state(loaded.tensors, step)


def load_slices(group: Any, run: str, cut: list[int]) -> tuple[int, bool, bool, dict[str, list[tuple[int, int]]]]:
    """Step, whether it comes from memory, whether each number is right, and the slices that this rank got."""
    own = started(Path(run), group)
    loaded = own.load(wanted=wanting(group.rank, cut))
    own.close(has_failed=True)
    assert loaded is not None
    step = loaded.identity.step
    return step, loaded.is_from_memory, is_state(loaded.tensors, step), extents_in(loaded)


@pytest.mark.parametrize("cut", [[1], [3, 1], [1, 0, 5]])
def test_slices_are_loaded_in_any_other_cut_and_a_bad_byte_is_noticed_by_all(tmp_path: Path, cut: list[int]) -> None:
    run_ranks(save_slices, 3, str(tmp_path))
    own = [{name: [extent] if extent[0] < extent[1] else [] for name in CUT} for extent in extents(cut)]
    assert run_ranks(load_slices, len(cut), str(tmp_path), cut) == [(4, False, True, slices) for slices in own]
    part = folder(tmp_path, 4) / "part-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert run_ranks(load_slices, len(cut), str(tmp_path), cut) == [(3, False, True, slices) for slices in own]


def read_nothing(group: Any, run: str) -> int:
    loaded = manager(Path(run), group).load(wanted=lambda outline: dict.fromkeys(outline.tensors, ()))
    assert loaded is not None
    assert set(loaded.tensors.values()) == {()}
    return loaded.identity.step


def test_a_bad_byte_in_a_chunk_that_no_rank_wants_is_noticed_by_all(tmp_path: Path) -> None:
    run_ranks(save_slices, 3, str(tmp_path))
    assert run_ranks(read_nothing, 3, str(tmp_path)) == [4] * 3
    part = folder(tmp_path, 4) / "part-00002.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert run_ranks(read_nothing, 3, str(tmp_path)) == [3] * 3


def keep_slices_and_die(group: Any, run: str) -> None:
    """Keeps a state of one cut and two of another in memory, and is killed."""
    own = manager(Path(run), group, run_id=run, keeps_states=True)
    own.recover()
    assert own.prepare(held_by(group.rank, (6, 2, 1), 0)) is None
    for step, cut in enumerate([(6, 2, 1), (1, 2, 6), (1, 2, 6)], 1):
        assert keep_held(own, held_by(group.rank, cut, step), step)
        group.all_gather_rows(np.zeros(1, np.int64))
    os.kill(os.getpid(), signal.SIGKILL)


def load_slices_as_nodes_of_their_own(group: Any, run: str, cut: list[int]) -> tuple[bool, dict[str, Any]]:
    """Each rank as if its node held one part alone."""
    own = started(Path(run), group)
    assert own._remains is not None
    own._remains.parts[:] = [part for part in own._remains.parts if part.index == group.rank]
    own._left = find_states(group, own._remains.parts)
    loaded = own.load(wanted=wanting(group.rank, cut))
    own.close(has_failed=True)
    assert loaded is not None
    return loaded.is_from_memory and is_state(loaded.tensors, 3), extents_in(loaded)


def test_slices_in_the_memory_of_killed_ranks_are_loaded_in_any_other_cut(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert run_ranks(keep_slices_and_die, 3, str(run), dies=[0, 1, 2]) == [None] * 3
    for cut in ([1], [3, 1], [1, 0, 5]):
        own = [{name: [extent] if extent[0] < extent[1] else [] for name in CUT} for extent in extents(cut)]
        assert run_ranks(load_slices, len(cut), str(run), cut) == [(3, True, True, slices) for slices in own]
    assert run_ranks(load_slices_as_nodes_of_their_own, 3, str(run), [1, 0, 5]) == [(True, slices) for slices in own]
    Remains(str(run), run).close(remove=True)


def test_parts_in_the_memory_of_other_nodes_travel_over_the_real_group(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(keep_and_fail, 3, str(run), 7)
    assert run_ranks(load_as_nodes_of_their_own, 3, str(run)) == [(7, True)] * 3
    assert loaded_step(run) is None  # on the disk there is nothing
    Remains(str(run), run).close(remove=True)


def test_two_ranks_save_and_three_load(tmp_path: Path) -> None:
    for step, world_size in ((1, 2), (2, 3)):
        facts = run_ranks(save_and_load, world_size, str(tmp_path), step)
        assert all(result.ok for result, _, _ in facts)
        assert [found for _, found, _ in facts] == [step] * world_size
        assert [numbers for _, _, numbers in facts] == [[step, step]] * world_size
    assert loaded_step(tmp_path, "1") == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path, victim: int) -> None:
    run_ranks(save_and_load, 2, str(tmp_path), 1)
    results = run_ranks(fail_on_one, 2, str(tmp_path), victim)
    named = "checkpoints" if victim == 0 else "step-000000002.0000000000000020"
    assert {(result.ok, result.error) for result in results} == {
        (False, f"rank {victim}: Input/output error (EIO): {named}")
    }
    assert loaded_step(tmp_path) == 1
    assert contents(tmp_path) == {folder(tmp_path, 1).name}


def test_what_rank_zero_refuses_every_rank_refuses(tmp_path: Path) -> None:
    run_ranks(save_and_load, 2, str(tmp_path), 1)
    said = run_ranks(refuse, 2, str(tmp_path))
    assert all("no usable checkpoint of step 7" in text for text in said)


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run_ranks(save_and_load, 2, str(tmp_path), 1)
    assert run_ranks(die_while_saving, 2, str(tmp_path), dies=[1]) == ["told", None]
    assert loaded_step(tmp_path) == 1
    manager(tmp_path).recover()
    assert loaded_step(tmp_path) == 1
    assert save(tmp_path, 3).ok
    assert {name[:14] for name in contents(tmp_path)} == {"step-000000001", "step-000000003"}
