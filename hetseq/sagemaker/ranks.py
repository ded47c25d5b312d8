"""The ranks of an FSDP script: its process group, the mesh that its degrees ask for, and the backend `smddp`.

Responsible for the uses of torch.distributed in this package outside FSDP. The one idea: ranks that share a tensor are
neighbours, ranks that shard one replica come next, and replicas are the outermost dimension.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hetseq.errors import ConfigError
from hetseq.launch.environments import Look
from hetseq.launch.environments.sagemaker import see
from hetseq.sagemaker.configuration import Configuration

SMDDP = "smddp"


def _uses_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def register_smddp() -> None:
    """Make `smddp` a name for torch's own NCCL, or for its gloo on a machine without a GPU."""
    if SMDDP not in dist.Backend.backend_list:
        device = "cuda" if _uses_nccl() else "cpu"
        dist.Backend.register_backend(SMDDP, _smddp, devices=[device])


def _smddp(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    if not _uses_nccl():
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def ensure_process_group(look: Look) -> None:
    """Make the default process group, unless the script has one: of torchrun's ranks, of a job's hosts, of one process.

    NCCL with a GPU, else gloo. Collective. Raises ConfigError for a host with several GPUs and one process.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if _uses_nccl() else "gloo"
    if look.get("RANK") and look.get("WORLD_SIZE"):
        if backend == "nccl":
            torch.cuda.set_device(look.number("LOCAL_RANK") or 0)
        dist.init_process_group(backend)
        return
    seen = see(look)
    if seen is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if backend == "nccl" and torch.cuda.device_count() > 1:
        raise ConfigError(
            f"this host has {torch.cuda.device_count()} GPUs and one process, which would leave all but one idle: start"
            " the script by torchrun, as distribution={'torch_distributed': {'enabled': True}} of the estimator does"
        )
    where = f"tcp://{seen.hosts[0]}:{seen.port}"
    dist.init_process_group(backend, init_method=where, rank=seen.index or 0, world_size=len(seen.hosts))


@dataclass(frozen=True)
class Meshes:
    """The ranks in dimensions. `data`: the dimensions of FSDP, one or two; None: all ranks in one, as torch has it."""

    device: torch.device
    data: DeviceMesh | None = None
    tensor: DeviceMesh | None = None  # the ranks that share a tensor; None: a tensor is of one rank
    root: DeviceMesh | None = None  # of which those two are slices

    def forget_groups(self) -> None:
        """End the threads of groups that the script has destroyed and that something keeps; for the end of a process.

        Cycles of FSDP keep them, and caches of torch keep a mesh of DTensors. A thread of gloo may not have let go of a
        tensor yet. It would need the interpreter for it, which ends a thread that asks once it is ending itself; and
        the process would abort with "terminate called without an active exception".
        """
        if not dist.is_initialized():
            getattr(self.root, "_pg_registry", {}).clear()
            gc.collect()

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several replicas, each of several ranks."""
        return self.data is not None and self.data.ndim == 2


def degrees(configuration: Configuration, world_size: int) -> tuple[int, int, int]:
    """Replicas, ranks that shard one replica, ranks that share a tensor; their product is the world size.

    Raises ConfigError if the ranks cannot be arranged so.
    """
    tensor = configuration.tensor_parallel_degree
    if world_size % tensor:
        raise ConfigError(
            f"tensor_parallel_degree {tensor} does not divide the {world_size} ranks: start a multiple of {tensor}"
        )
    shard = configuration.hybrid_shard_degree or world_size // tensor
    if (world_size // tensor) % shard:
        raise ConfigError(
            f"{configuration.groups}: groups of {shard * tensor} ranks do not divide the {world_size} ranks: set"
            f" hybrid_shard_degree to a divisor of {world_size // tensor}, or to 0 for the largest"
        )
    return world_size // tensor // shard, shard, tensor


def build_meshes(configuration: Configuration) -> Meshes:
    """The meshes of the default process group. Collective. Raises ConfigError."""
    replicas, shard, tensor = degrees(configuration, dist.get_world_size())
    backends = dist.get_backend_config().split(",")
    is_on_gpu = "cuda:nccl" in backends or f"cuda:{SMDDP}" in backends
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
    is_hybrid = replicas > 1 and shard > 1
    if tensor > 1:
        mesh = init_device_mesh(device.type, (replicas, shard, tensor), mesh_dim_names=("replicate", "shard", "tensor"))
        data = mesh["replicate", "shard"] if is_hybrid else mesh["replicate" if shard == 1 else "shard"]
        return Meshes(device, data, mesh["tensor"], mesh)
    if is_hybrid:  # no slice of a larger mesh, which FSDP takes for tensor parallelism
        mesh = init_device_mesh(device.type, (replicas, shard), mesh_dim_names=("replicate", "shard"))
        return Meshes(device, mesh, None, mesh)
    return Meshes(device)
