"""Checkpoints over a real group: ranks as processes, gloo between them."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint import SaveResult
from hetseq.checkpoint.leftover_memory import Remains
from hetseq.checkpoint.memory_recovery import find_states
from hetseq.errors import CheckpointRefused, PeerLostError
from tests.support.checkpoints import checked_step, contents, folder, keep, keeping, loaded_step, manager, save
from tests.support.ranks import run_ranks
from tests.support.sliced import held_by, is_state, save_held, save_held_in_background


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
