"""The speller as a task: `hetseq train --task with_hetseq.py --save-dir runs/words ...`."""

import torch.nn.functional as F
from words import NOTHING, Speller, Words, collate

from hetseq import Task


class Spelling(Task):
    """Guess the next letter; the loss is counted in letters."""

    def load_dataset(self, split):
        return Words(split)

    def collater(self, samples):
        return collate(samples)

    def build_model(self):
        return Speller()

    def count(self, sample):
        return {"loss": (sample[1] != NOTHING).sum()}

    def loss(self, model, sample):
        letters, following = sample
        scores = model(letters).flatten(0, 1)
        following = following.flatten()
        loss = F.cross_entropy(scores, following, ignore_index=NOTHING, reduction="sum")
        return {"loss": loss}
