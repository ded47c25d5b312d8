"""torch's FSDP with the mesh of the configuration.

Responsible for the arguments that `hybrid_shard_degree` decides: mesh, strategy, device. Everything else is torch's. A
subclass, so that class methods such as `FSDP.state_dict_type` and `isinstance` stay as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from hetseq.errors import ConfigError
from hetseq.sagemaker.job import job
from hetseq.sagemaker.offload import OffloadWrapper
from hetseq.sagemaker.ranks import Meshes

_FULL = {
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy.FULL_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.SHARD_GRAD_OP,
}
_HYBRID = {full: hybrid for hybrid, full in _FULL.items()}


class FullyShardedDataParallel(fsdp.FullyShardedDataParallel):
    """torch's FSDP, with the arguments of torch's; the configuration of `init` decides the groups.

    Raises ConfigError before `init`, for groups of the script's own, and for a strategy that the degree contradicts.
    """

    def __init__(
        self, module: nn.Module, process_group: Any = None, sharding_strategy: ShardingStrategy | None = None,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        one = job("FSDP")
        if any(isinstance(inner, OffloadWrapper) for inner in module.modules()):
            raise ConfigError("FSDP: the model is in an offload_wrapper already: call offload_wrapper after FSDP")
        # the children that an auto_wrap_policy makes get the arguments of this call, and are torch's own
        if process_group is not None or kwargs.get("device_mesh") is not None:
            raise ConfigError(
                "FSDP: process_group and device_mesh are made from hybrid_shard_degree: leave them out, or take FSDP"
                " from torch.distributed.fsdp"
            )
        _check_ties(module)
        strategy = _strategy(one.configuration.hybrid_shard_degree, one.meshes, sharding_strategy)
        kwargs["device_mesh"] = one.meshes.data
        kwargs.setdefault("device_id", one.meshes.device)
        super().__init__(module, None, strategy, *args, **kwargs)

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> Tensor:
        """Clip as torch's FSDP does. Raises ConfigError beside tensor parallelism, where each rank has another norm."""
        if job("FSDP").meshes.tensor is not None:
            raise ConfigError(
                "FSDP: clip_grad_norm_ would take the norm of a part of each divided layer: leave clipping out, or set"
                " tensor_parallel_degree to 1"
            )
        norm: Tensor = super().clip_grad_norm_(max_norm, norm_type)
        return norm


def _check_ties(module: nn.Module) -> None:
    """Raise ConfigError for divided parameters that are tied: torch's FSDP would train them apart."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and isinstance(parameter, DTensor):
            raise ConfigError(
                f"FSDP: {other} and {name} are tied and divided, and FSDP would train them apart: build the"
                " model with tie_word_embeddings=False, or set tensor_parallel_degree to 1"
            )


def _strategy(degree: int, meshes: Meshes, asked: ShardingStrategy | None) -> ShardingStrategy:
    """The strategy that the script asked for, in the groups of the degree."""
    if degree == 1:
        return ShardingStrategy.NO_SHARD
    asked = asked or ShardingStrategy.FULL_SHARD
    if degree == 0:
        # its groups are the GPUs of a machine; on a CPU torch makes groups of one rank, whose replicas drift apart
        if asked in _FULL and (meshes.data is not None or meshes.device.type == "cpu"):
            raise ConfigError(
                f"FSDP: sharding_strategy {asked.name} makes no groups here: set hybrid_shard_degree to the ranks of a"
                " group"
            )
        return asked
    if asked is ShardingStrategy.NO_SHARD:
        raise ConfigError(
            f"FSDP: sharding_strategy NO_SHARD contradicts hybrid_shard_degree {degree}: set the key to 1, or leave the"
            " strategy out"
        )
    full = _FULL.get(asked, asked)
    return _HYBRID[full] if meshes.is_hybrid else full
