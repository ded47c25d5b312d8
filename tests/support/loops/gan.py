"""A GAN in two dimensions: two models, two optimizers, two updates in a step; words as for `lines`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hetseq
from tests.support.loops.happening import happen, note

STEPS, SAMPLES, BATCH = 8, 60, 16


class Points(torch.utils.data.Dataset[Any]):
    """A point, and the noise from which one is made."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(2, generator=draw) * 0.3 + torch.tensor([1.0, -1.0]), torch.randn(4, generator=draw)


def parts() -> Any:
    """Generator and critic, and an optimizer for each."""

    def network(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs))

    generator, critic = network(4, 2), network(2, 1)
    return (
        generator, critic, torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9)),
        torch.optim.RMSprop(critic.parameters(), lr=1e-3),
    )  # fmt: skip


def score(found: torch.Tensor, target: float) -> torch.Tensor:
    """The sum over the points; neither divides by their number."""
    return F.binary_cross_entropy_with_logits(found, torch.full_like(found, target), reduction="sum")


def main() -> None:
    run = hetseq.start(seed=5)
    generator, critic, adam, rmsprop = parts()
    run.own(generator=generator, critic=critic, adam=adam, rmsprop=rmsprop)
    for step in run.steps(Points(), global_batch_size=BATCH, max_steps=STEPS, phases=2):
        for real, noise in step.of(rmsprop):
            happen("first", run.rank, step.number)
            step.backward(score(critic(real), 1.0) + score(critic(generator(noise).detach()), 0.0), count=len(real))
        happen("between", run.rank, step.number)
        row = {"step": step.number} if step.loss is None else {"step": step.number, "critic": step.loss}
        for real, noise in step.of(adam):
            happen("second", run.rank, step.number)
            step.backward(score(critic(generator(noise)), 1.0), count=len(real))
        weights = [float(value.detach().abs().sum()) for model in (generator, critic) for value in model.parameters()]
        note({**row, "generator": step.loss, "grad_norm": step.grad_norm, "weights": sum(weights)})
    print("behind the loop")


if __name__ == "__main__":
    main()
