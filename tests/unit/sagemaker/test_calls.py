"""What `init`, `FSDP` and `offload_wrapper` refuse in one process; test_smp_scripts has the curves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import ShardingStrategy

import hetseq.sagemaker as tsm
from hetseq.errors import ConfigError
from hetseq.sagemaker import job
from hetseq.sagemaker.configuration import Configuration
from hetseq.sagemaker.ranks import Meshes
from hetseq.sagemaker.sharding import _strategy


@pytest.fixture
def a_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that no launcher has started, before `init`."""
    monkeypatch.setattr(job, "_jobs", [])
    for name in ("RANK", "WORLD_SIZE", "SM_HPS", "SM_HP_MP_PARAMETERS"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("call", [tsm.FSDP, tsm.transform, tsm.offload_wrapper])
@pytest.mark.usefixtures("a_process")
def test_every_call_needs_init_and_init_is_called_once(call: Any) -> None:
    with pytest.raises(ConfigError, match=r"call hetseq\.sagemaker\.init\(\) before it"):
        call(nn.Linear(2, 2))
    tsm.init()
    assert dist.get_world_size() == 1
    with pytest.raises(ConfigError, match="was called before"):
        tsm.init()


@pytest.mark.usefixtures("a_process")
def test_keys_without_effect_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tsm.init({"allow_empty_shards": 1})
    assert [record.getMessage() for record in caplog.records] == ["these keys have no effect here: allow_empty_shards"]


@pytest.mark.usefixtures("a_process")
def test_smddp_is_a_backend_that_adds() -> None:
    dist.init_process_group(backend="smddp", store=dist.HashStore(), rank=0, world_size=1)
    tsm.init()
    dist.all_reduce(one := torch.ones(2))
    assert dist.get_backend() == "smddp"
    assert one.tolist() == [1, 1]


@pytest.mark.usefixtures("a_process")
def test_groups_of_the_scripts_own_and_a_wrapper_too_early_are_refused() -> None:
    tsm.init({"sm_activation_offloading": True})
    with pytest.raises(ConfigError, match="process_group and device_mesh are made from hybrid_shard_degree"):
        tsm.FSDP(nn.Linear(2, 2), dist.group.WORLD)
    wrapped = tsm.offload_wrapper(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="call offload_wrapper after FSDP"):
        tsm.FSDP(nn.Sequential(wrapped))
    wrapped.offload.close()  # type: ignore[operator, union-attr]


@pytest.mark.usefixtures("a_process")
def test_without_the_switch_the_wrapper_is_torchs_own() -> None:
    tsm.init()
    assert type(tsm.offload_wrapper(nn.Linear(2, 2))) is checkpoint_wrapper.OffloadWrapper


def test_clipping_beside_tensor_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: Any = "a mesh"
    meshes = Meshes(torch.device("cpu"), tensor=tensor)
    monkeypatch.setattr(job, "_jobs", [job.Job(Configuration(tensor_parallel_degree=2), meshes)])
    with pytest.raises(ConfigError, match="the norm of a part of each divided layer"):
        tsm.FSDP.clip_grad_norm_(tsm.FSDP.__new__(tsm.FSDP), 1.0)


CPU = Meshes(torch.device("cpu"))


def test_a_strategy_that_the_degree_contradicts_is_refused() -> None:
    assert _strategy(0, CPU, None) is ShardingStrategy.FULL_SHARD
    assert _strategy(0, CPU, ShardingStrategy.SHARD_GRAD_OP) is ShardingStrategy.SHARD_GRAD_OP
    assert _strategy(1, CPU, None) is ShardingStrategy.NO_SHARD
    assert _strategy(4, CPU, ShardingStrategy.HYBRID_SHARD) is ShardingStrategy.FULL_SHARD  # of four ranks in all
    with pytest.raises(ConfigError, match="NO_SHARD contradicts hybrid_shard_degree 4"):
        _strategy(4, CPU, ShardingStrategy.NO_SHARD)
    with pytest.raises(ConfigError, match="HYBRID_SHARD makes no groups here: set hybrid_shard_degree"):
        _strategy(0, CPU, ShardingStrategy.HYBRID_SHARD)
