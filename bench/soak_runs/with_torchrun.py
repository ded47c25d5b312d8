"""The script of torchrun's side of the soak comparison, as a careful user writes it.

It saves model, optimizer and step by atomic rename, at the interval of Young and Daly for the cost of a save that it
measures itself; the position in the data follows from the step. On SIGTERM all ranks stop after the same step and save.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from soak_runs import toy


class Clock:
    """Says when to save: sqrt(2 × cost of a save × mean time between failures) - cost seconds after the last save."""

    def __init__(self, mean_time_between_failures_s: float, costs_s: list[float]) -> None:
        self._mean_s, self.costs_s = mean_time_between_failures_s, costs_s[-50:]
        self._saved_s = time.monotonic()

    @property
    def interval_s(self) -> float:
        """Seconds between two saves; the first one is at once, and measured."""
        if not self.costs_s:
            return 0.0
        cost_s = statistics.median(self.costs_s)
        return max(0.0, math.sqrt(2 * cost_s * self._mean_s) - cost_s)

    def is_due(self) -> bool:
        """Whether to save after this step."""
        return time.monotonic() - self._saved_s >= self.interval_s

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Save, and measure it."""
        began_s = time.monotonic()
        toy.write(path, {**state, "costs_s": self.costs_s, "interval_s": self.interval_s})
        self._saved_s = time.monotonic()
        self.costs_s = [*self.costs_s[-49:], self._saved_s - began_s]


def main() -> None:
    """Train until told to stop."""
    told_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_stop.append(number))
    settings, checkpoint = toy.settings(), Path(toy.settings().folder, "state.pt")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(toy.build())
    optimizer = toy.optimizer_of(model.parameters())
    step, costs_s = 0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, costs_s = saved["step"], saved["costs_s"]
    clock = Clock(settings.mean_time_between_failures_s, costs_s)
    dataset = toy.data()
    shards = [toy.Shard(number, settings.ranks, settings.batch) for number in range(rank, settings.ranks, world)]
    is_last = False
    while not is_last:
        sample = dataset[[index for shard in shards for index in shard.indices(step)]]
        optimizer.zero_grad()
        squares, uses = toy.computed(model, sample)
        toy.losses(squares, uses, settings.global_batch).mean().backward()
        optimizer.step()
        step += 1
        shared = torch.tensor([squares.mean().item() / world, float(bool(told_to_stop))], dtype=torch.float64)
        dist.all_reduce(shared)
        is_last = shared[1].item() > 0 or step == settings.last_step
        if rank == 0:
            toy.log_loss(step, shared[0].item())
            if is_last or clock.is_due():
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                clock.save(checkpoint, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
