"""FSDP with hybrid sharding: `hybrid_shard_degree` ranks hold one replica together.

    python -m torch.distributed.run --nproc-per-node 2 examples/sagemaker/fsdp.py

For SageMaker's own library the two lines that import from hetseq.sagemaker read `import torch.sagemaker as tsm` and
`from torch.distributed.fsdp import FullyShardedDataParallel as FSDP`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import hetseq.sagemaker as tsm
from hetseq.sagemaker import FullyShardedDataParallel as FSDP

torch.set_default_dtype(torch.float64)  # so that curves of other layouts are equal to 12 digits
LAYER = nn.TransformerEncoderLayer
LR = 1e-3


def build_model() -> nn.Module:
    """A small encoder, with the same numbers on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(LAYER(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(3)), nn.Linear(32, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one step, and their targets: (8, 6, 32) and (8, 6, 1)."""
    inputs = torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(2, keepdim=True).sin()


def main() -> None:
    """Train for six steps, on a part of each batch per rank."""
    tsm.init(Path(__file__).with_suffix(".json"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = FSDP(build_model(), auto_wrap_policy=ModuleWrapPolicy({LAYER}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(1, 7):
        inputs, targets = (whole.chunk(world_size)[rank].to(model.compute_device) for whole in batch(step))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world_size)
        if rank == 0:
            print(f"step {step} loss {mean.item():.15f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
