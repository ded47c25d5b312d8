"""States of which ranks hold slices: saved, whatever each rank holds, and read in any other division."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.checkpoint import TensorSlice
from hetseq.checkpoint import arena as arena_module
from hetseq.checkpoint import async_save as background
from hetseq.errors import DisagreementError
from tests.support.checkpoints import NoWriter, contents, folder, keep, keeping, manager, save, started, together
from tests.support.sliced import ELEMENTS, held_by, is_state, keep_held, save_held, slice_of, state_of


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, in which no other test has arenas; no process writes checkpoints."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(arena_module, "SHARED_MEMORY", folder)
    monkeypatch.setattr(background, "WriterProcess", NoWriter)
    return folder


class Counting:
    """A group that counts its exchanges."""

    def __init__(self, group: Any) -> None:
        self._group, self.rank, self.world_size, self.exchanges = group, group.rank, group.world_size, 0

    def all_gather_rows(self, row: Any) -> Any:
        self.exchanges += 1
        return self._group.all_gather_rows(row)

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        self._group.broadcast(tensor, source=source)

    def since(self) -> int:
        """Exchanges since the last call."""
        count, self.exchanges = self.exchanges, 0
        return count


# -- saving ------------------------------------------------------------------------------------------------------------


def test_slices_of_three_ranks_make_one_checkpoint_in_which_each_wrote_its_own(tmp_path: Path) -> None:
    def live(group: Any) -> list[Any]:
        own = manager(tmp_path, group)
        cuts = {1: (6, 2, 1), 2: (6, 2, 1), 3: (0, 1, 8)}
        return [save_held(tmp_path, group, held_by(group.rank, cut, step), step, own) for step, cut in cuts.items()]

    for results in together(3, live):
        assert [result.ok for result in results] == [True] * 3
    for step in (1, 2, 3):
        loaded = manager(tmp_path).load(str(step))
        assert loaded is not None
        assert is_state(loaded.tensors, step)
    sizes = [path.stat().st_size for path in sorted(folder(tmp_path, 3).glob("*.safetensors"))]
    assert sizes[2] > 8 * 2 * ELEMENTS // 9 * 4
    commit = manager(tmp_path).list()[0]
    assert manager(tmp_path).verify(commit) == []


def test_one_process_may_hold_its_state_in_slices(tmp_path: Path) -> None:
    held: dict[str, Any] = state_of(4)
    held["model.w"] = [slice_of(held["model.w"], *extent) for extent in ((40, ELEMENTS), (0, 0), (0, 40))]
    held["nothing"] = []
    assert save_held(tmp_path, None, held, 4).ok
    loaded = manager(tmp_path).load()
    assert loaded is not None
    assert is_state(loaded.tensors, 4)


@pytest.mark.parametrize("whole", [0, 2])
def test_a_rank_that_holds_all_learns_from_the_first_row_that_others_do_not(tmp_path: Path, whole: int) -> None:
    def live(group: Any) -> Any:
        weights = [int(rank == whole) for rank in range(3)]
        held = held_by(group.rank, weights, 2) if group.rank != whole else state_of(2)
        return save_held(tmp_path, group, held, 2)

    assert [result.ok for result in together(3, live)] == [True] * 3
    assert len(contents(tmp_path)) == 1
    loaded = manager(tmp_path).load()
    assert loaded is not None
    assert is_state(loaded.tensors, 2)


def test_ranks_may_hold_different_whole_tensors(tmp_path: Path) -> None:
    def live(group: Any) -> Any:
        names = [["model.w", "model.running_mean"], ["optim.w.step", "model.w"], ["optim.w.exp_avg"]][group.rank]
        return save_held(tmp_path, group, {name: state_of(2)[name] for name in names}, 2)

    assert [result.ok for result in together(3, live)] == [True] * 3
    loaded = manager(tmp_path).load()
    assert loaded is not None
    assert is_state(loaded.tensors, 2)


def test_replicas_exchange_what_they_always_did_and_slices_one_row_more(tmp_path: Path, memory: Path) -> None:
    def replicas(group: Any) -> list[int]:
        counting = Counting(group)
        run = tmp_path / "replicas"
        own = keeping(run, counting)
        counting.since()
        own.prepare(state_of(0))
        counts = [counting.since()]
        for step in (1, 2):
            assert keep(own, step)  # of another kind at first, so it is prepared again
            counts.append(counting.since())
        own.close()
        save(run, 3, group=counting)
        return [*counts, counting.since()]

    def sliced(group: Any) -> list[int]:
        counting, counts = Counting(group), []
        run = tmp_path / "sliced"
        run.mkdir(exist_ok=True)
        own = manager(run, counting, run_id=str(run), keeps_states=True)
        own.prepare(held_by(group.rank, (6, 2, 1), 0))
        counts.append(counting.since())
        for step, cut in ((1, (6, 2, 1)), (2, (6, 2, 1)), (3, (1, 1, 1))):
            assert keep_held(own, held_by(group.rank, cut, step), step)
            counts.append(counting.since())
        own.close()
        return counts

    assert together(3, replicas) == [[3, 3, 0, 3]] * 3
    assert together(3, sliced) == [[1 + 2 + 3, 1, 1, 1 + 2 + 3]] * 3


@pytest.mark.parametrize("cuts", [((6, 2, 1), (1, 2, 6)), ((0, 1, 2), (3, 1, 1)), ((0, 0, 1), (0, 0, 1))])
def test_states_kept_in_memory_may_be_cut_anew(tmp_path: Path, memory: Path, cuts: Any) -> None:
    run = tmp_path / "run"

    def live(group: Any) -> None:
        own = keeping(run, group)
        for step, cut in enumerate((cuts[0], cuts[0], cuts[1], cuts[1]), 1):
            if step == 1:
                assert own.prepare(held_by(group.rank, cut, step)) is None
            assert keep_held(own, held_by(group.rank, cut, step), step)
        own.close(has_failed=True)

    assert together(3, live) == [None] * 3

    def resume(group: Any) -> Any:
        own = started(run, group)
        loaded = own.load()
        own.close(has_failed=True)
        assert loaded is not None
        return loaded.identity.step, loaded.is_from_memory, is_state(loaded.tensors, 4)

    assert together(2, resume) == [(4, True, True)] * 2


def test_a_state_with_a_gap_is_refused_on_all_ranks_by_name_and_the_next_one_is_saved(tmp_path: Path) -> None:
    def live(group: Any) -> Any:
        own = manager(tmp_path, group)
        held = held_by(group.rank, (1, 1, 1), 1)
        if group.rank == 1:
            del held["optim.w.exp_avg"]
        with pytest.raises(DisagreementError, match=r"the elements 30 to 60 of tensor optim.w.exp_avg"):
            save_held(tmp_path, group, held, 1, own)
        return save_held(tmp_path, group, held_by(group.rank, (1, 1, 1), 2), 2, own).ok

    assert together(3, live) == [True] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_that_disagree_about_a_tensor_are_all_told_which(tmp_path: Path, victim: int) -> None:
    def live(group: Any) -> Any:
        held = held_by(group.rank, (1, 1), 1)
        if group.rank == victim:
            held["model.w"] = [TensorSlice(one.tensor, one.begin, one.end, (ELEMENTS,)) for one in held["model.w"]]
        return save_held(tmp_path, group, held, 1)

    for error in together(2, live):
        assert isinstance(error, DisagreementError)
        assert "tensor model.w is F32 of shape" in str(error)
    assert contents(tmp_path) == set()


def test_a_rank_that_cannot_save_its_slice_raises_and_the_others_are_told(tmp_path: Path) -> None:
    def live(group: Any) -> Any:
        held = (
            held_by(group.rank, (0, 1, 2), 1)
            if group.rank
            else {"model.running_mean": state_of(1)["model.running_mean"]}
        )
        if group.rank == 2:
            held["model.w"] = [TensorSlice(torch.zeros(60, dtype=torch.complex128), 30, 90, (30, 3))]
        return save_held(tmp_path, group, held, 1)

    *told, raised = together(3, live)
    assert isinstance(raised, TypeError)
    for error in told:
        assert isinstance(error, DisagreementError)
        assert "rank 2 cannot save its tensors: TypeError: tensor model.w is torch.complex128" in str(error)
    assert contents(tmp_path) == set()


def test_slices_of_one_rank_that_overlap_are_refused(tmp_path: Path) -> None:
    held = {"model.w": [slice_of(state_of(1)["model.w"], *extent) for extent in ((0, 50), (49, ELEMENTS))]}
    with pytest.raises(ValueError, match=r"the slices of tensor model\.w on this rank overlap"):
        save_held(tmp_path, None, held, 1)


@pytest.mark.parametrize(
    ("elements", "begin", "end"), [(3, 0, 4), (4, 5, 9), (2, 7, 5), (0, -1, -1), (9, 0, 9), (4, 6, 10)]
)
def test_a_slice_that_does_not_fit_its_tensor_is_refused(elements: int, begin: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"slice {begin}:{end} of shape"):
        TensorSlice(torch.zeros(elements), begin, end, (2, 4))
