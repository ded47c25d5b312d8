"""A script of examples/sagemaker with torch's FSDP2 in place of what it takes from hetseq.sagemaker: the oracle.

torchrun --nproc-per-node 2 tests/support/fully_sharded.py examples/sagemaker/fsdp.py
"""

from __future__ import annotations

import os
import runpy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(path: str) -> None:
    """Print the losses of the same model, batches and optimizer."""
    script = runpy.run_path(path)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    model = script["build_model"]()
    for module in model.modules():
        if isinstance(module, script["LAYER"]):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=script["LR"])
    for step in range(1, 7):
        batch = script["batch"](step)
        if isinstance(batch, tuple):
            inputs, targets = (whole.chunk(world_size)[rank] for whole in batch)
            loss = nn.functional.mse_loss(model(inputs), targets)
        else:
            loss = script["loss_of"](model, batch.chunk(world_size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world_size)
        if rank == 0:
            print(f"step {step} loss {mean.item():.15f}")
    dist.destroy_process_group()
    # caches of torch keep the groups, and a thread of gloo that lets go of a tensor now would abort the process
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
