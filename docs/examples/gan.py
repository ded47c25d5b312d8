"""A GAN: two models and two optimizers take turns in every step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hetseq

run = hetseq.start(seed=5)


class Ring(Dataset):
    """Points on a ring, and the noise from which the generator makes others: drawn here, so seeded by sample."""

    def __len__(self):
        return 2000

    def __getitem__(self, i):
        angle = torch.rand(1) * 6.2832
        return torch.cat([angle.cos(), angle.sin()]) + 0.05 * torch.randn(2), torch.randn(4)


def network(inputs, outputs):
    """Three layers."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def verdict(points, is_real):
    """The sum over the points of the cross-entropy of the critic's verdict."""
    found = critic(points)
    return F.binary_cross_entropy_with_logits(found, torch.full_like(found, float(is_real)), reduction="sum")


generator, critic = network(4, 2), network(2, 1)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_d = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
run.own(generator=generator, critic=critic, opt_g=opt_g, opt_d=opt_d)

for step in run.steps(Ring(), global_batch_size=200, max_steps=60, phases=2):
    for real, noise in step.of(opt_d):  # the critic learns; the generator has no gradient here
        made = generator(noise).detach()
        step.backward(verdict(real, True) + verdict(made, False), count=len(real))
    for real, noise in step.of(opt_g):  # the same samples again, and the generator learns
        step.backward(verdict(generator(noise), True), count=len(real))
    if step.number % 20 == 0 and run.is_first:
        print(f"step {step.number}: the generator's loss is {step.loss:.3f}")
