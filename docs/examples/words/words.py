"""Names of Python's modules, letter by letter, and a network that spells them.

The programs beside this file train it, each in its own way.
"""

import argparse
import string
import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

# a name begins and ends with the dot
LETTERS = "." + string.ascii_lowercase + string.digits + "_"
NOTHING = -100  # stands where there is nothing to predict
# the learning rate rises for 6 steps and falls until step 40
LR, WARMUP, TOTAL = 0.5, 6, 40


class Words(Dataset):
    """The names, as numbers of letters; every fifth is held out for validation."""

    def __init__(self, split):
        names = sorted(name.lower() for name in sys.stdlib_module_names)
        is_wanted = [(at % 5 == 0) == (split == "valid") for at in range(len(names))]
        self.names = [name for name, wanted in zip(names, is_wanted) if wanted]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        name = f".{self.names[index]}."
        return torch.tensor([LETTERS.index(letter) for letter in name])


class Speller(nn.Module):
    """Scores of the next letter: (names, letters) to (names, letters, 38)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 24)
        self.memory = nn.GRU(24, 48, batch_first=True)
        self.output = nn.Linear(48, len(LETTERS))

    def forward(self, letters):
        return self.output(self.memory(self.embedding(letters))[0])


def collate(samples):
    """Letters and what follows each of them, both (names, longest - 1)."""
    letters = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    rest = [sample[1:] for sample in samples]
    return letters, pad_sequence(rest, batch_first=True, padding_value=NOTHING)


def rate(step):
    """The learning rate, as a part of LR: up from 0, then down to 0, both linearly."""
    return step / WARMUP if step <= WARMUP else max(0, TOTAL - step) / (TOTAL - WARMUP)


def arguments():
    """The options of the three programs that HetSeq takes the place of."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-dir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--clip", type=float, default=5.0)
    parser.add_argument("--in-order", action="store_true", help="do not shuffle")
    parser.add_argument("--double", action="store_true", help="64-bit numbers")
    return parser.parse_args()
