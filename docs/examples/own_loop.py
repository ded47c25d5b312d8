"""A character model with a training loop of its own: one device by `python`, all of them by `hetseq run`."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hetseq

WIDTH = 32  # characters of a sample

run = hetseq.start(seed=7)

text = Path(__file__).read_text() * 8
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])


class Windows(Dataset):
    """Sample i is the i-th piece of the text, and the same piece one character further."""

    def __len__(self):
        return (len(codes) - 1) // WIDTH

    def __getitem__(self, i):
        start = i * WIDTH
        return codes[start : start + WIDTH], codes[start + 1 : start + WIDTH + 1]


class CharacterModel(nn.Module):
    """Predicts the next character at each place."""

    def __init__(self, size=48):
        super().__init__()
        self.embedding = nn.Embedding(len(letters), size)
        self.recurrent = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, len(letters))

    def forward(self, x):
        return self.head(self.recurrent(self.embedding(x))[0])


model = CharacterModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
model, optimizer, scheduler = run.own(model, optimizer, scheduler)
data = Windows()


def measure(batch):
    """Sum and count of the loss of all characters of a batch."""
    x, y = batch
    return {"loss": (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), y.numel())}


for step in run.steps(data, global_batch_size=64, max_steps=60, clip_norm=1.0):
    for x, y in step:  # this rank's part of the step; again if a peer was lost
        is_letter = y != letters.index(" ")
        loss = F.cross_entropy(model(x)[is_letter], y[is_letter], reduction="sum")
        step.backward(loss, count=is_letter.sum())
    scheduler.step()  # once per step, after all ranks have applied it
    if step.number % 20 == 0:
        valid = run.evaluate(data, measure, batch_size=64)
        if run.is_first:
            print(f"step {step.number}: loss {step.loss:.3f}, of all characters {valid['loss']:.3f}")
