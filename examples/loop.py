"""A plain PyTorch loop, without HetSeq's trainer, that goes on after `kill -9`: `python examples/loop.py FOLDER STEPS`.

It saves by `hetseq.nebula` every ten steps: `save` copies and returns, another process writes. Started again it lists
the tags in FOLDER, loads the newest one and goes on behind it, to the very losses of a loop that was never killed.

    python examples/loop.py runs/loop 200
"""

import sys

import torch
from torch import nn

import hetseq.nebula as nm

EVERY = 10


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and their sines: from the step alone, so that a loop that goes on sees what it would have seen."""
    points = 6 * torch.rand(64, 1, generator=torch.Generator().manual_seed(step)) - 3
    return points, points.sin()


def main(folder: str, steps: int) -> None:
    """Train to the end, from the newest tag in `folder` if there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    nm.init(folder, num_of_version_in_retention=3)
    print("tags:", *[checkpoint.tag for checkpoint in nm.list_checkpoints()], flush=True)
    latest, done = nm.get_latest_checkpoint(), 0
    if latest.tag:
        model.load_state_dict(latest.load("model"))
        optimizer.load_state_dict(latest.load("optimizer"))
        done = latest.load("progress")["step"]
    print(f"begins after step {done}", flush=True)

    for step in range(done + 1, steps + 1):
        points, sines = batch_of(step)
        loss = nn.functional.mse_loss(model(points), sines)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0 or step == steps:
            checkpoint = nm.Checkpoint(f"step{step}")
            checkpoint.save("model", model)
            checkpoint.save("optimizer", optimizer)
            checkpoint.save("progress", {"step": step})
            checkpoint.commit()  # from here on a kill loses nothing of this tag
            print(f"step {step} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
