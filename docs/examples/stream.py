"""A stream of tar files as lanes: sentences in shards, read forward only, with a training loop of its own."""

import sys
import tarfile
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hetseq

SHARDS, SENTENCES = 32, 40  # tar files, and sentences in each
LANES = 16
WORDS = ["a", "the", "cat", "dog", "bird", "tree", "sees", "likes", "meets", "small", "large", "old", "and"]


def make(folder):
    """Write the shards, as a crawler or a data service would have left them."""
    folder.mkdir(exist_ok=True)
    for shard in range(SHARDS):
        draw = torch.Generator().manual_seed(shard)
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as tar:
            for number in range(SENTENCES):
                words = torch.randint(len(WORDS), (9,), generator=draw).sort().values
                text = " ".join(WORDS[word] for word in words).encode()
                member = tarfile.TarInfo(f"{number:06d}.txt")
                member.size = len(text)
                tar.addfile(member, BytesIO(text))


class Tars:
    """The sentences of some tar files, one after the other; it can say where it is, and continue there."""

    def __init__(self, paths):
        self.paths, self.file, self.member = paths, 0, 0

    def __iter__(self):
        while self.file < len(self.paths):
            with tarfile.open(self.paths[self.file], "r|") as tar:  # "|": never read backwards
                for number, member in enumerate(tar):
                    if number >= self.member:
                        self.member = number + 1
                        words = tar.extractfile(member).read().decode().split()
                        yield torch.tensor([WORDS.index(word) for word in words])
            self.file, self.member = self.file + 1, 0

    def state_dict(self):
        return {"file": self.file, "member": self.member}

    def load_state_dict(self, state):
        self.file, self.member = state["file"], state["member"]


folder = Path("shards")
if sys.argv[1:] == ["make"]:
    make(folder)
    sys.exit()

run = hetseq.start(seed=3)
model = nn.Sequential(nn.Embedding(len(WORDS), 24), nn.Linear(24, len(WORDS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
run.own(model, optimizer)

paths = sorted(folder.glob("*.tar"))
data = hetseq.Lanes(lambda lane: Tars(paths[lane::LANES]), lanes=LANES, length=SHARDS * SENTENCES, window=16)

for step in run.steps(data, global_batch_size=64, max_epoch=2, clip_norm=1.0):
    for words in step:
        scores = model(words[:, :-1]).flatten(0, 1)
        step.backward(F.cross_entropy(scores, words[:, 1:].flatten(), reduction="sum"), count=scores.shape[0])
    if run.is_first and step.ends_epoch:
        print(f"epoch {step.epoch}: loss {step.loss:.3f}")
