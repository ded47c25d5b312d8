"""Our checkpoints into DTensors over gloo ranks, by torch.distributed.checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.checkpoints import folder
from tests.support.elsewhere import UNEQUAL, as_empty, bits, odd_state, save_state
from tests.support.ranks import run_ranks

#: the dimension over which a tensor is sharded, if it has that many
DIMENSIONS = {"rows": 0, "columns": 1, "everywhere": 9}


def load_distributed(group: Any, run: str, store: str, placement: str) -> dict[str, Any] | str:
    """The bytes of this rank's shards by name; or in words what the load raised."""
    from torch import distributed
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from hetseq.checkpoint.dcp import HetSeqReader

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, group.world_size), rank=group.rank, world_size=group.world_size
    )
    try:
        mesh, dimension = init_device_mesh("cpu", (group.world_size,)), DIMENSIONS[placement]
        state = {}
        for name, tensor in as_empty(odd_state()).items():
            shard = Shard(dimension) if tensor.dim() > dimension else Replicate()
            state[name] = distribute_tensor(tensor, mesh, [shard], src_data_rank=None)  # gloo sends no odd types
        found = run if os.path.isdir(run) else f"{run}-{group.rank}"
        try:
            dcp.load(state, storage_reader=HetSeqReader(found))
        except dcp.CheckpointException as error:
            return "; ".join(
                f"{rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()
            )
        return {name: bits(value.to_local()) for name, value in state.items()}
    finally:
        distributed.destroy_process_group()


def shards(state: dict[str, Tensor], dimension: int, world_size: int) -> list[dict[str, bytes]]:
    """What each rank should hold: the pieces of torch.chunk, which are as many as there are ranks or fewer."""
    ranks: list[dict[str, bytes]] = [{} for _ in range(world_size)]
    for name, tensor in state.items():
        pieces = tensor.chunk(world_size, dimension) if tensor.dim() > dimension else [tensor] * world_size
        for rank, held in enumerate(ranks):
            held[name] = bits(pieces[rank]) if rank < len(pieces) else b""
    return ranks


@pytest.mark.parametrize(("world_size", "placement"), [(2, "rows"), (2, "columns"), (3, "rows"), (2, "everywhere")])
def test_dtensors_over_ranks_come_from_unequal_parts(tmp_path: Path, world_size: int, placement: str) -> None:
    save_state(tmp_path, 1, odd_state(), UNEQUAL)
    held = run_ranks(load_distributed, world_size, str(tmp_path), str(tmp_path / "store"), placement)
    assert held == shards(odd_state(), DIMENSIONS[placement], world_size)
    assert held != shards(odd_state(seed=2), DIMENSIONS[placement], world_size)
    assert (held[0] == held[1]) is (placement == "everywhere")


@pytest.mark.slow
@pytest.mark.parametrize("placement", DIMENSIONS)
def test_five_ranks_read_what_three_unequal_ones_wrote(tmp_path: Path, placement: str) -> None:
    save_state(tmp_path, 1, odd_state(), UNEQUAL)
    held = run_ranks(load_distributed, 5, str(tmp_path), str(tmp_path / "store"), placement)
    assert held == shards(odd_state(), DIMENSIONS[placement], 5)


def load_spoilt(group: Any, run: str, store: str) -> Any:
    """As `load_distributed`, but on rank 1 the parts change once they have been opened."""
    from hetseq.checkpoint import tensor_reader as spans

    if group.rank == 1:
        real = spans.Spans.read

        def read(self: Any, name: str, begin: int, end: int) -> Tensor:
            for path in Path(run).glob("checkpoints/*/part-00001.safetensors"):
                path.unlink()
            return real(self, name, begin, end)

        spans.Spans.read = read  # type: ignore[method-assign]
    return load_distributed(group, run, store, "rows")


def test_a_damage_that_one_rank_meets_stops_all_of_them(tmp_path: Path) -> None:
    save_state(tmp_path, 1, odd_state(), UNEQUAL)
    said = run_ranks(load_spoilt, 2, str(tmp_path), str(tmp_path / "store"))
    assert said[0] == said[1]
    assert "1: DamagedError: " in said[0]
    assert "part-00001.safetensors" in said[0]


def test_ranks_that_found_different_checkpoints_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        save_state(tmp_path / f"run-{rank}", 1 + rank, odd_state(), [1])
    said = run_ranks(load_distributed, 2, str(tmp_path / "run"), str(tmp_path / "store"), "rows")
    assert said[0] == said[1]
    assert said[0].startswith("0: CheckpointError: the ranks found different checkpoints")
    assert str(folder(tmp_path / "run-0", 1)) in said[0]
