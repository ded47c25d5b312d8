"""Sentences of unequal length, each a ladder of numbers with one step size: the task is to guess the next number."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hetseq import Task

WORDS, PADDING = 50, 50


class Sentences(Dataset):
    """800 sentences, some of them spoilt anew in each epoch."""

    def __init__(self, seed, spoils):
        random = np.random.default_rng(seed)
        self.lengths = random.integers(4, 20, size=800)  # tokens of each sentence: what --max-tokens adds up
        self.starts = random.integers(0, WORDS, size=800)
        self.steps = random.integers(1, 4, size=800)
        self.spoils = spoils
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch  # called before the first sample of an epoch is fetched

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        sentence = torch.arange(self.lengths[index]) * self.steps[index] + self.starts[index]
        if self.spoils and self.epoch > 1:  # the first epoch is clean
            at = torch.randint(len(sentence), (1,))  # seeded by (seed, epoch, index) before this is called
            sentence[at] = torch.randint(WORDS, (1,))
        return sentence % WORDS

    def collater(self, samples):
        return pad_sequence(samples, batch_first=True, padding_value=PADDING)


class SentencesAtOnce(Sentences):
    """The same, unspoilt: all sentences of a micro-batch in one call."""

    def __getitems__(self, indices):
        rows = np.asarray(indices)
        places = np.arange(self.lengths[rows].max())  # (longest,)
        batch = (places * self.steps[rows, None] + self.starts[rows, None]) % WORDS  # (sentences, longest)
        batch[places >= self.lengths[rows, None]] = PADDING
        return torch.from_numpy(batch)

    def collater(self, batch):
        return batch  # __getitems__ has made it


class NextWord(Task):
    """Guess the next word; the loss is counted in words."""

    def load_dataset(self, split):
        return Sentences(1, spoils=True) if split == "train" else SentencesAtOnce(2, spoils=False)

    def build_model(self):
        return nn.Sequential(nn.Embedding(WORDS + 1, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, WORDS))

    def count(self, sample):
        return {"loss": (sample[:, 1:] != PADDING).sum()}  # words that are guessed, not sentences

    def loss(self, model, sample):
        output, target = model(sample[:, :-1]), sample[:, 1:]
        return {"loss": F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")}
