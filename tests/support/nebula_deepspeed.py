"""A script with DeepSpeed, for tests: `FOLDER STAGE RANK WORLD`; its last line is JSON, facts of this rank.

Five steps, saved after the third and the fifth; then another engine resumes from the third, and a last one from the
newest. Numbers are compared bit by bit, as text.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def engine_of(stage: int, world_size: int) -> Any:
    """A small net under DeepSpeed, always with the same numbers in it."""
    import deepspeed

    from hetseq.nebula.deepspeed import attach

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    config = {
        "train_batch_size": 2 * world_size,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": stage > 0},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    attach(engine)
    return engine


def train(engine: Any, first: int, last: int) -> None:
    """The steps from `first` to `last`."""
    for step in range(first, last + 1):
        data = torch.ones(2, 4, dtype=next(engine.parameters()).dtype) * (step + distributed.get_rank())
        engine.backward(engine(data).float().pow(2).mean())
        engine.step()


def numbers(engine: Any) -> str:
    """Its parameters; of ZeRO 3 what this rank holds of them."""
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.parameters()]
    return str([tensor.detach().float().flatten().tolist() for tensor in held])


def main() -> None:
    """The script from its first statement to its end."""
    folder, stage, rank, world_size = sys.argv[1], *map(int, sys.argv[2:5])
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo",
        LOCAL_SIZE=str(world_size),
    )  # fmt: skip
    store = distributed.FileStore(f"{folder}/store", world_size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    import hetseq.nebula as nm
    from hetseq.nebula.deepspeed import load_latest

    place = Path(folder, "saved")
    engine = engine_of(stage, world_size)
    train(engine, 1, 3)
    at_three = numbers(engine)
    engine.save_checkpoint(str(place), client_state={"mine": {"a": (1, None)}})
    train(engine, 4, 5)
    engine.save_checkpoint(str(place))
    engine.checkpoint_engine.cleanup()
    distributed.barrier()
    again = engine_of(stage, world_size)
    _, client = again.load_checkpoint(str(place), tag="global_step3")
    loaded = numbers(again)
    train(again, 4, 5)
    newest = engine_of(stage, world_size)
    load_latest(newest, place)
    facts = {
        "loaded": loaded == at_three,
        "went_on": numbers(again) == numbers(engine),
        "newest": numbers(newest) == numbers(engine),
        "moved": at_three != numbers(engine),
        "steps": newest.global_steps,
        "client": repr(client["mine"]),
        "tags": [checkpoint.tag for checkpoint in nm.list_checkpoints(place)],
        "names": nm.get_latest_checkpoint(place).names,
    }
    nm.close()
    distributed.barrier()
    print(json.dumps(facts), flush=True)
    os._exit(0)  # what DeepSpeed leaves behind ends with the process


if __name__ == "__main__":
    main()
