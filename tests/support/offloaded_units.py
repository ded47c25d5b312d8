"""Two FSDP units of one weight each, without checkpointing: what offload leaves of their gradients.

torchrun --nproc-per-node 2 tests/support/offloaded_units.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import hetseq.sagemaker as tsm
from hetseq.sagemaker.offload import OffloadWrapper


class Unit(nn.Module):
    """A weight that fills the memory which FSDP gathers it into, and takes away after forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


def gradients(*, is_offloaded: bool) -> tuple[list[torch.Tensor], int]:
    """This rank's parts of the gradients, and the tensors that left."""
    torch.manual_seed(0)
    model: nn.Module = tsm.FSDP(
        nn.Sequential(Unit(), Unit(), Unit()).double(), auto_wrap_policy=ModuleWrapPolicy({Unit})
    )
    model = tsm.offload_wrapper(model) if is_offloaded else model
    model(torch.randn(256, 512).double()).square().mean().backward()
    found = [one.grad for one in model.parameters() if one.grad is not None]
    return found, model.offload.facts.moved if isinstance(model, OffloadWrapper) else 0


def main() -> None:
    """Print the comparison of gradients, and how many tensors left."""
    tsm.init({"sm_activation_offloading": True, "activation_loading_horizon": 0})
    plain, _ = gradients(is_offloaded=False)
    offloaded, moved = gradients(is_offloaded=True)
    is_equal = len(plain) == len(offloaded) == 3 and all(map(torch.equal, plain, offloaded))
    found: list[tuple[bool, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (is_equal, moved))
    if dist.get_rank() == 0:  # the lines of two ranks could end up in one
        print(f"gradients equal, tensors that left: {found}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
