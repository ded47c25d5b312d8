"""The script of torchft's side of the soak comparison: one replica group, which has one rank.

A group that was killed gets the state from the other one. Each group keeps its own position in its shard of the data on
the disk after each committed step, as torchft's manual advises, and does not advance when it only healed. The state is
saved every 10 s, in case all groups are lost at once, and when all stop, after the same step.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from soak_runs import toy

GROUP = "HETSEQ_SOAK_GROUP"
SAVE_S = 10.0


def main() -> None:
    """Train until told to stop."""
    told_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_stop.append(number))
    logging.basicConfig(level=logging.WARNING)
    settings, group = toy.settings(), int(os.environ[GROUP])
    checkpoint, place = Path(settings.folder, "state.pt"), Path(settings.folder, f"position-{group}")
    module = toy.build()
    plain = toy.optimizer_of(module.parameters())

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": plain.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=load_state_dict, state_dict=state_dict,
        min_replica_size=1, replica_id=f"group-{group}", hostname="localhost", timeout=timedelta(seconds=10),
        init_sync=False,  # all build the same model
    )  # fmt: skip
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, plain)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        load_state_dict(saved)
        manager.load_state_dict(saved["torchft"])
    position = int(place.read_text()) if place.exists() else 0
    dataset, shard = toy.data(), toy.Shard(group, settings.ranks, settings.batch)
    is_last, saved_s = False, time.monotonic()
    while not is_last:
        sample, step = dataset[shard.indices(position)], manager.current_step()
        optimizer.zero_grad()
        squares, uses = toy.computed(model, sample)
        toy.losses(squares, uses, settings.batch * manager.num_participants()).mean().backward()
        shared = torch.tensor([squares.mean().item(), float(bool(told_to_stop))], dtype=torch.float64)
        manager.allreduce(shared).wait()
        takes_part, is_first = manager.is_participating(), manager.participating_rank() == 0
        optimizer.step()
        # a group that heals jumps to the step of the others
        if manager.current_step() == step or manager.errored():
            continue
        if takes_part:
            position += 1
            beside = place.with_suffix(".new")
            beside.write_text(str(position))
            beside.rename(place)
        is_last = shared[1].item() > 0
        if is_first:
            toy.log_loss(manager.current_step(), shared[0].item())
            if is_last or time.monotonic() - saved_s >= SAVE_S:
                saved_s = time.monotonic()
                state = {**state_dict(), "torchft": manager.state_dict(), "step": manager.current_step()}
                toy.write(checkpoint, state)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
