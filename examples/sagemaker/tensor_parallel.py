"""Tensor parallelism beside FSDP: `tensor_parallel_degree` ranks divide each layer, and compute the same samples.

    python -m torch.distributed.run --nproc-per-node 2 examples/sagemaker/tensor_parallel.py

Needs transformers. For SageMaker's own library the two lines that import from hetseq.sagemaker read
`import torch.sagemaker as tsm` and `from torch.distributed.fsdp import FullyShardedDataParallel as FSDP`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hetseq.sagemaker as tsm
from hetseq.sagemaker import FullyShardedDataParallel as FSDP

CONFIG = Path(__file__).with_suffix(".json")
LAYER = LlamaDecoderLayer
LR = 1e-3


def build_model() -> nn.Module:
    """A tiny Llama in fp64, with the same numbers on all ranks: curves of other layouts are equal to 12 digits."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny_llama")
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model


def batch(step: int) -> torch.Tensor:
    """The rows of one step, which repeat a word and the next four: (8, 16)."""
    first = torch.randint(0, 60, (8, 1), generator=torch.Generator().manual_seed(step))
    return first + torch.arange(16) % 4


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the next words, in fp64, where transformers would take fp32."""
    logits = model(input_ids=rows).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def main() -> None:
    """Train for six steps, on a part of each batch per group of ranks that hold a replica."""
    tsm.init(CONFIG)
    degree = json.loads(CONFIG.read_text())["tensor_parallel_degree"]
    data_rank, data_size = dist.get_rank() // degree, dist.get_world_size() // degree
    model = tsm.transform(build_model())
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({LAYER}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(1, 7):
        rows = batch(step).chunk(data_size)[data_rank].to(model.compute_device)
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.15f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
