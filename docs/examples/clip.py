"""A contrastive loss over the whole batch, as of CLIP: every image is compared with every text of the step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hetseq

run = hetseq.start(seed=3)


class Pairs(Dataset):
    """Two views of the same hidden numbers."""

    def __len__(self):
        return 1500

    def __getitem__(self, i):
        hidden = torch.randn(8)
        return torch.cat([hidden, torch.randn(8)]), torch.cat([torch.randn(4), hidden.flip(0).tanh()])


class TwoTowers(nn.Module):
    """An encoder for images, one for texts, and the temperature of their products."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 32))
        self.text = nn.Sequential(nn.Linear(12, 128), nn.GELU(), nn.Linear(128, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def encode(self, batch):
        """A row of length 1 for each image, and one for each text."""
        images, texts = batch
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)


model = TwoTowers()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
run.own(model, optimizer)

for step in run.steps(Pairs(), global_batch_size=256, max_steps=60):
    for images, texts in step.whole(model.encode):  # the rows of ALL 256 pairs, on every rank
        logits = model.scale.exp() * images @ texts.T
        pair = torch.arange(len(images), device=images.device)
        loss = (F.cross_entropy(logits, pair) + F.cross_entropy(logits.T, pair)) / 2
        step.backward(loss)  # the loss itself: it compares samples, so it is no sum over them
    if step.number % 20 == 0 and run.is_first:
        print(f"step {step.number}: loss {step.loss:.3f}")
