"""An average of the weights, a learning rate that falls on a plateau, and an end when nothing improves any more."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import hetseq

PATIENCE = 3

run = hetseq.start(seed=1)

draw = torch.Generator().manual_seed(0)
x = torch.randn(1400, 6, generator=draw)
y = (x[:, :2].prod(1) + 0.2 * torch.randn(1400, generator=draw) > 0).long()
train, valid = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])


class Best:
    """The best loss so far, and for how many epochs there was none better; `run.own` keeps it."""

    def __init__(self):
        self.loss, self.epochs_since = float("inf"), 0

    def see(self, loss):
        """Whether to continue after an epoch with this loss."""
        self.loss, self.epochs_since = (loss, 0) if loss < self.loss else (self.loss, self.epochs_since + 1)
        return self.epochs_since < PATIENCE

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
best = Best()
run.own(model=model, average=average, optimizer=optimizer, plateau=plateau, best=best)


def measure(batch):
    """Loss and hits of the average model."""
    inputs, labels = batch
    found = average(inputs)
    loss = F.cross_entropy(found, labels, reduction="sum")
    return {"loss": (loss, len(labels)), "right": ((found.argmax(1) == labels).sum(), len(labels))}


for step in run.steps(train, global_batch_size=100, max_epoch=100, metrics=("right",)):
    for inputs, labels in step:
        found = model(inputs)
        step.add("right", (found.argmax(1) == labels).sum(), len(labels))
        step.backward(F.cross_entropy(found, labels, reduction="sum"), count=len(labels))
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters()):
            mean.lerp_(value, 0.1)
    if step.ends_epoch:
        values = run.evaluate(valid, measure, batch_size=50)
        plateau.step(values["loss"])
        continues = best.see(values["loss"])
        if run.is_first:
            print(f"epoch {step.epoch}: {step.metrics['right']:.1%} right, of others {values['right']:.1%}")
        if not continues:
            break
