"""A task as the documentation of 2020 taught to write one; only the imports are of today.

It registers nothing, fills `self.datasets`, takes `args` in `build_model`, keeps `collater`, `num_tokens` and
`set_epoch` on the data set, and its model returns the MEAN loss of its batch. It must go on working, so whatever looks
old here stays old. `--task tests/golden/mnist_2020.py:MNISTTask --data FOLDER_WITH_MNIST/processed`.
"""

import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from hetseq import Task

FILE_OF_SPLIT = {"train": "training.pt", "test": "test.pt"}


class MNISTTask(Task):
    def __init__(self, args):
        super(MNISTTask, self).__init__(args)  # noqa: UP008

    @classmethod
    def setup_task(cls, args, **kwargs):
        return cls(args)

    def build_model(self, args):
        return MNISTNet()

    def load_dataset(self, split, **kwargs):
        path = self.args.data
        if not os.path.exists(path):
            raise FileNotFoundError(f"Dataset not found: ({path})")
        processed = os.path.join(path, "MNIST/processed/")
        if os.path.exists(processed):
            path = processed

        # the split is looked for in the file's name; 2020 looked in the whole path
        names = sorted(name for name in os.listdir(path) if name.endswith(".pt") and split in name)
        assert names == [FILE_OF_SPLIT.get(split)], f"no suitable file in split ***{split}***"

        dataset = MNISTDataset(os.path.join(path, names[0]))
        print(f"| loaded {len(dataset)} sentences from: {path}", flush=True)
        self.datasets[split] = dataset
        print("| loading finished")


class MNISTDataset(Dataset):
    def __init__(self, path):
        self.path = path
        self.image, self.label = torch.load(path, weights_only=True)

    def __getitem__(self, index):
        pixels = self.image[index].to(torch.float32).div(255)
        return pixels.sub(0.1307).div(0.3081).unsqueeze(0), int(self.label[index])

    def __len__(self):
        return len(self.image)

    def ordered_indices(self):
        return np.arange(len(self))

    def num_tokens(self, index):
        return 1

    def collater(self, samples):
        if len(samples) == 0:
            return None
        return default_collate(samples)

    def set_epoch(self, epoch):
        pass


class MNISTNet(nn.Module):
    def __init__(self):
        super(MNISTNet, self).__init__()  # noqa: UP008
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x, target, eval=False):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = torch.flatten(x, 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        output = F.log_softmax(self.fc2(x), dim=1)
        if eval:
            return output
        return F.nll_loss(output, target)
