"""An average of the weights, a learning rate that falls at a plateau, and an early end, all by `after_step`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from hetseq import Task


class Averaged(Task):
    """Points inside and outside a circle. Halves the learning rate at a plateau, and stops at the third one."""

    patience, decay = 2, 0.9

    def load_dataset(self, split):
        random = torch.Generator().manual_seed(1 if split == "train" else 2)
        points = torch.rand(300, 2, generator=random) * 2 - 1
        return TensorDataset(points, (points.norm(dim=1) < 0.8).long())

    def build_model(self):
        self.average, self.best, self.bad_epochs, self.plateaus = {}, float("inf"), 0, 0
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(self, model, sample):
        return {"loss": F.cross_entropy(model(sample[0]), sample[1], reduction="sum")}

    def after_step(self, step):
        for name, value in step.model.state_dict().items():
            self.average[name] = self.average.get(name, value).to(value).lerp(value, 1 - self.decay)
        if "valid" not in step.valid:  # no validation after this step
            return None
        loss = step.valid["valid"]["loss"]
        if loss < 0.98 * self.best:
            self.best, self.bad_epochs = loss, 0
        else:
            self.bad_epochs += 1
        if self.bad_epochs == self.patience:  # a plateau
            self.plateaus, self.bad_epochs = self.plateaus + 1, 0
            self.learning_rate_factor *= 0.5
        return self.plateaus == 3

    def state_dict(self):
        names = ("average", "best", "bad_epochs", "plateaus")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state):
        vars(self).update(state)
